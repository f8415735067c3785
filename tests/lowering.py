"""Lowering for an NVIDIA GPU on a machine without one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from unittest import mock

import jax
from jax.experimental.mosaic.gpu import utils
from jax.sharding import AbstractDevice, AbstractMesh
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from pallas_kernels import device as devices

# A GPU of each compute capability, times ten, that Mosaic GPU kernels are for.
GPUS = {
    80: "NVIDIA A100-SXM4-80GB",
    86: "NVIDIA A10",
    89: "NVIDIA L4",
    90: "NVIDIA H200",
    100: "NVIDIA B200",
    103: "NVIDIA B300",
    120: "NVIDIA GeForce RTX 5090",
    121: "NVIDIA GB10",
}


def on_gpu(device: str = "NVIDIA H200"):
    """A context in which calls are traced for a CUDA device of that kind."""
    gpu = AbstractDevice(device_kind=device, num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), abstract_device=gpu)
    return jax.sharding.use_abstract_mesh(mesh)


def lower_for_gpu(function, *args, device: str = "NVIDIA H200") -> str:
    """The StableHLO module of `function` for a CUDA device of that kind."""
    with on_gpu(device):
        traced = jax.jit(function).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@contextlib.contextmanager
def described_as_here(capability: int) -> Iterator[str]:
    """As if there were a GPU of that capability: Mosaic GPU is lowered for it.

    Gives its name. JAX takes Mosaic GPU's architecture from a device that is there.
    """
    here = mock.patch.object(devices, "gpu_is_here", lambda: True)
    architecture = divmod(capability, 10)
    asked = mock.patch.object(utils, "_infer_arch", lambda: architecture, create=True)
    with here, asked:
        yield GPUS[capability]


def kernel_modules(text: str) -> dict[str, str]:
    """The Triton modules inside a module of `lower_for_gpu`, as text, by name.

    A kernel's custom call holds its module as bytes, so that text searched for in the
    outer module is not found where it means something.
    """
    found = {}
    for data in string_attributes(text, "ir"):
        with ir.Context() as context:
            dialect.register_dialect(context)
            context.load_all_available_dialects()
            module = ir.Module.parse(data)
            name = ir.StringAttr(module.operation.attributes["sym_name"]).value
            found[name] = str(module)
    return found


def string_attributes(text: str, name: str) -> list[bytes]:
    """The values of the attributes of that name in a module."""
    return list(map(_bytes, re.findall(rf'\b{name} = "((?:[^"\\]|\\.)*)"', text)))


def _bytes(escaped: str) -> bytes:
    """Of a string attribute as MLIR prints it: a backslash and two hexadecimals."""

    def byte(match: re.Match) -> bytes:
        code = match[1]
        return bytes.fromhex(code.decode()) if len(code) == 2 else code

    return re.sub(rb'\\([0-9A-Fa-f]{2}|[\\"])', byte, escaped.encode("latin-1"))
