"""What the compiler makes of the Mosaic GPU kernels, on a machine without a GPU.

    python -m tests.ptxas                  every variant for Hopper
    python -m tests.ptxas backward causal  those whose name has all of these words
    python -m tests.ptxas fp8              those of operands in eight bits
    python -m tests.ptxas ampere 12.0      those of kernels that run only by name
    python -m tests.ptxas tangent          those of tangents

Prints for each kernel the registers of a thread, the bytes that it spills, and what
ptxas says of products: C7510 to C7513, C7514 and C7520 that it put them in
sequence, C7517 that it waits for one too early. Needs the wheels jax-cuda13-plugin and
jax-cuda13-pjrt, a C compiler, and ptxas on the PATH. The compiler asks the driver for
the kind of GPU: a library of a few lines answers in its place.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_flash2 import Config, Context, attention
from pallas_kernels.mosaic_gpu import ampere, blackwell
from tests.lowering import described_as_here, lower_for_gpu, string_attributes

# Attributes 75 and 76, capability: as the environment says. 16 and 97, multiprocessors
# and shared memory: of an H200.
_CAPABILITY = "DESCRIBED_CAPABILITY"
_DRIVER = """
#include <stdlib.h>
#define ANSWER(name, arguments, body) int name arguments { body; return 0; }
ANSWER(cuInit, (unsigned f), )
ANSWER(cuDriverGetVersion, (int *v), *v = 13000)
ANSWER(cuDeviceGet, (int *d, int i), *d = 0)
ANSWER(cuDeviceGetCount, (int *n), *n = 1)
ANSWER(cuCtxGetDevice, (int *d), *d = 0)
ANSWER(cuDeviceGetAttribute, (int *x, int a, int d),
       int c = atoi(getenv("DESCRIBED_CAPABILITY"));
       *x = a == 75 ? c / 10 : a == 76 ? c % 10 : a == 16 ? 132 : a == 97 ? 232448 : 0)
ANSWER(cuModuleLoadData, (void **m, const void *x), *m = (void *)1)
ANSWER(cuModuleGetFunction, (void **f, void *m, const char *n), *f = (void *)1)
ANSWER(cuFuncSetAttribute, (void *f, int a, int v), )
ANSWER(cuGetErrorString, (int e, const char **s), *s = "none")
"""
IN_SEQUENCE = ("C7510", "C7511", "C7512", "C7513", "C7514", "C7517", "C7520")


@dataclasses.dataclass(frozen=True)
class Report:
    """Of one kernel.

    Attributes:
      kernel: its name.
      registers: of a thread, before warpgroups ask for more or fewer.
      stored, loaded: bytes spilled.
      messages: of `IN_SEQUENCE`.
    """

    kernel: str
    registers: int
    stored: int
    loaded: int
    messages: tuple[str, ...]

    def __str__(self) -> str:
        said = ", ".join(self.messages) or "none in sequence"
        return (
            f"{self.kernel}: {self.registers} registers, spills {self.stored} and "
            f"{self.loaded} bytes, {said}"
        )


def reports(log: str) -> Iterator[Report]:
    """From what ptxas printed."""
    for part in re.split(r"(?=ptxas info\s+: Compile time)", log):
        name = re.search(r"Function properties for (\w+)", part)
        used = re.search(r"Used (\d+) registers", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if name is None or used is None or spills is None:
            continue
        kernel = name[1].removesuffix("_mosaic_gpu_kernel")
        said = tuple(x for x in IN_SEQUENCE if f"({x})" in part)
        yield Report(kernel, int(used[1]), int(spills[1]), int(spills[2]), said)


def variants() -> dict[str, tuple[tuple[int, ...], int, dict]]:
    """Shapes of the query, key heads and arguments, by name."""
    key, causal = jax.random.PRNGKey(0), {"is_causal": True}
    struct = jax.ShapeDtypeStruct  # arrays would take gigabytes
    mask = {"mask": struct((8192, 8192), jnp.bool_)}
    bias = {"bias": struct((16, 8192, 8192), jnp.float32)}
    features = {
        "plain": {},
        "causal": causal,
        "window": {"is_causal": True, "local_window_size": (1000, 0)},
        "soft cap": {"is_causal": True, "logits_soft_cap": 30.0},
        "lengths": {"is_causal": True, "key_value_seq_lengths": jnp.int32([8192, 99])},
        "offset": {"is_causal": True, "query_offset": jnp.int32(5)},
        "segments": {"query_segment_ids": jnp.zeros((2, 8192), jnp.int32)},
        "alibi": {"is_causal": True, "alibi_slopes": jnp.ones(16)},
        "sinks": {"is_causal": True, "sinks": jnp.zeros(16)},
        "dropout": {"dropout_rate": 0.1, "dropout_rng": key},
        "causal dropout": {**causal, "dropout_rate": 0.1, "dropout_rng": key},
        "mask": mask,
        "bias": bias,
        "causal bias": {**causal, **bias},
        "half bias": {"bias": struct((16, 8192, 8192), jnp.bfloat16)},
        "causal mask": {**causal, **mask},
    }
    shape = (2, 8192, 16)
    found = {
        f"head size {h}, {name}": ((*shape, h), 16, arguments)
        for h in (64, 128, 256)
        for name, arguments in features.items()
    }
    for h in (48, 72, 96, 160, 192):
        found[f"head size {h}, causal"] = ((*shape, h), 16, causal)
    for h in (64, 128, 256):
        found[f"head size {h}, causal, 1 key head"] = ((4, 2048, 16, h), 1, causal)
    for h in (64, 128):
        found[f"head size {h}, causal, 2 key heads"] = ((*shape, h), 2, causal)
        found[f"head size {h}, causal, T 2048"] = ((8, 2048, 16, h), 16, causal)
        free = {**causal, "config": Config(deterministic=False)}
        found[f"head size {h}, causal, any order"] = ((*shape, h), 16, free)
        for layout, stripe in (("stripes", 256), ("one run", None)):
            ring = {**causal, "context": Context("x", stripe, "ring")}
            found[f"head size {h}, causal, ring of {layout}"] = ((*shape, h), 16, ring)
    return found


def kernels(shape: tuple[int, ...], key_heads: int, arguments: dict) -> list[bytes]:
    """The modules of the Mosaic GPU kernels of a call and its gradients."""
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    k = jax.ShapeDtypeStruct((*shape[:2], key_heads, shape[3]), jnp.bfloat16)
    arrays = jax.Array | jax.ShapeDtypeStruct
    data = {n: x for n, x in arguments.items() if isinstance(x, arrays)}
    static = {n: x for n, x in arguments.items() if n not in data}

    def run(arrays, data):
        def call(arrays, data):
            return attention(*arrays, **static, **data, implementation="mosaic_gpu")

        out, vjp = jax.vjp(call, arrays, data)
        return out, vjp(out)

    if "context" not in arguments:
        return string_attributes(lower_for_gpu(run, (q, k, k), data), "module")
    q, k = (jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in (q, k))
    devices = jax.vmap(run, (0, None), axis_name="x")
    modules = string_attributes(lower_for_gpu(devices, (q, k, k), data), "module")
    return modules[::2]  # of the first round


@dataclasses.dataclass(frozen=True)
class ByName:
    """A forward pass by a kernel that runs only by name.

    Attributes:
      implementation: the name.
      capability: of the GPU, times ten.
      shape: of the query.
      key_heads: how many.
      arguments: of `attention`.
    """

    implementation: str
    capability: int
    shape: tuple[int, ...]
    key_heads: int
    arguments: dict

    @property
    def modules(self) -> list[bytes]:
        """The modules of its kernels: one."""
        q = jax.ShapeDtypeStruct(self.shape, jnp.bfloat16)
        batch, rows, _, size = self.shape
        k = jax.ShapeDtypeStruct((batch, rows, self.key_heads, size), q.dtype)
        run = functools.partial(
            attention, **self.arguments, implementation=self.implementation
        )
        with described_as_here(self.capability) as device:
            text = lower_for_gpu(run, q, k, k, device=device)
        return string_attributes(text, "module")


def _masks() -> dict[str, tuple[int, dict]]:
    """Key heads of 16, and arguments, by name: masks that need scalars alone."""
    lengths = jnp.int32([8192, 99])
    causal, keys = {"is_causal": True}, {"key_value_seq_lengths": lengths}
    return {
        "plain": (16, {}),
        "causal, 4 key heads": (4, causal),
        "window": (16, {**causal, "local_window_size": (1000, 0)}),
        "two-sided window": (16, {"local_window_size": (300, 200)}),
        "causal lengths": (16, {**causal, **keys}),
        "lengths": (16, {**keys, "query_seq_lengths": lengths}),
    }


class EightBits(ByName):
    """A forward pass of operands in eight bits."""

    @property
    def modules(self) -> list[bytes]:
        batch, rows, heads, size = self.shape
        q = jax.ShapeDtypeStruct(self.shape, jnp.float8_e4m3fn)
        k = jax.ShapeDtypeStruct((batch, rows, self.key_heads, size), q.dtype)
        scales = [
            jax.ShapeDtypeStruct((batch, n), jnp.float32)
            for n in (heads, self.key_heads, self.key_heads)
        ]

        def run(q, k, v, *scales):
            names = ("query_scale", "key_scale", "value_scale")
            named = dict(zip(names, scales, strict=True), **self.arguments)
            return attention(q, k, v, implementation=self.implementation, **named)

        return string_attributes(lower_for_gpu(run, q, k, k, *scales), "module")


def eight_bits() -> dict[str, EightBits]:
    """Forward passes of operands in eight bits."""
    lengths = jnp.int32([8192, 99])
    causal, keys = {"is_causal": True}, {"key_value_seq_lengths": lengths}
    features = {
        "plain": (16, {}),
        "causal": (16, causal),
        "causal, 4 key heads": (4, causal),
        "window": (16, {**causal, "local_window_size": (1000, 0)}),
        "lengths": (16, {**keys, "query_seq_lengths": lengths}),
        "causal lengths": (16, {**causal, **keys}),
        "segments": (16, {"query_segment_ids": jnp.zeros((2, 8192), jnp.int32)}),
    }
    return {
        f"fp8, head size {h}, {name}": EightBits(
            "mosaic_gpu", 90, (2, 8192, 16, h), *feature
        )
        for h in (64, 128, 256)
        for name, feature in features.items()
    }


class Tangent(ByName):
    """A tangent, and the forward pass before it."""

    @property
    def modules(self) -> list[bytes]:
        batch, rows, _, size = self.shape
        q = jax.ShapeDtypeStruct(self.shape, jnp.bfloat16)
        k = jax.ShapeDtypeStruct((batch, rows, self.key_heads, size), q.dtype)
        call = functools.partial(
            attention, **self.arguments, implementation=self.implementation
        )

        def run(operands, tangents):
            return jax.jvp(call, operands, tangents)

        with described_as_here(self.capability) as device:
            text = lower_for_gpu(run, (q, k, k), (q, k, k), device=device)
        return string_attributes(text, "module")


def tangents() -> dict[str, Tangent]:
    """Tangents by the kernel for Hopper."""
    segments = jnp.zeros((2, 8192), jnp.int32)
    others = {
        "causal": (16, {"is_causal": True}),
        "segments": (16, {"query_segment_ids": segments}),
    }
    found = {
        f"tangent, head size {h}, {name}": Tangent(
            "mosaic_gpu", 90, (2, 8192, 16, h), *feature
        )
        for h in (64, 128)
        for name, feature in {**_masks(), **others}.items()
    }
    for h in (64, 128):
        odd = Tangent("mosaic_gpu", 90, (2, 8191, 16, h), *others["causal"])
        found[f"tangent, head size {h}, causal, T 8191"] = odd
    return found


def by_name() -> dict[str, ByName]:
    """Forward passes by kernels that run only by name."""
    return {
        f"{architecture} {capability / 10}, head size {h}, {name}": ByName(
            f"mosaic_gpu_{architecture}", capability, (2, 8192, 16, h), *feature
        )
        for architecture, backend in (("ampere", ampere), ("blackwell", blackwell))
        for capability in backend.CAPABILITIES
        for h in (64, 128)
        for name, feature in _masks().items()
    }


def compiler(folder: str):
    """The function of JAX's plugin that compiles a module."""
    source, library = Path(folder, "driver.c"), Path(folder, "libcuda.so.1")
    source.write_text(_DRIVER)
    command = ["cc", "-w", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1"], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from jax.experimental.mosaic.gpu import core  # sets the variable that follows
    from jax_plugins import xla_cuda13

    del core
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        sys.exit("ptxas is not on the PATH")
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(Path(ptxas).resolve().parent.parent)
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    compile_module = ctypes.CDLL(str(xla_cuda13._get_library_path())).MosaicGpuCompile
    compile_module.argtypes = [ctypes.c_char_p, ctypes.c_int]
    compile_module.restype = ctypes.c_void_p
    return compile_module


def printed(function, *arguments) -> str:
    """What a function in C prints."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            function(*arguments)
            ctypes.CDLL(None).fflush(None)
        finally:
            for copy, number in zip(kept, (1, 2), strict=True):
                os.dup2(copy, number)
                os.close(copy)
        file.seek(0)
        return file.read().decode()


def main(words: list[str]) -> None:
    passes = {"forward", "backward"} & set(words)
    words = [word for word in words if word not in passes]
    if "fp8" in words:
        found = eight_bits()
    elif "tangent" in words:
        found = tangents()
    else:
        found = by_name() if {"ampere", "blackwell"} & set(words) else variants()
    wanted = {name: x for name, x in found.items() if all(w in name for w in words)}
    capabilities = {
        x.capability if isinstance(x, ByName) else 90 for x in wanted.values()
    }
    if len(capabilities) > 1:  # the compiler asks a process once
        for capability in sorted(capabilities):
            again = [sys.executable, "-m", "tests.ptxas", *words, f"{capability / 10},"]
            subprocess.run(again, check=True)
        return
    os.environ[_CAPABILITY] = str(*capabilities)
    with tempfile.TemporaryDirectory() as folder:
        compile_module = compiler(folder)
        for name, variant in wanted.items():
            is_named = isinstance(variant, ByName)
            for module in variant.modules if is_named else kernels(*variant):
                log = printed(compile_module, module, len(module))
                compiled = list(reports(log))
                if not compiled:
                    sys.exit(f"{name}: {log}")
                for report in compiled:
                    if not passes or any(x in report.kernel for x in passes):
                        print(f"{name}: {report}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
