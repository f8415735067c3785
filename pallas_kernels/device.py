"""What programs run on: the platform, and the facts of its GPU."""

from __future__ import annotations

import contextlib
import contextvars
import re

import jax

_CAPABILITY = {  # of devices known by name only, when lowering without a GPU
    "A100": 80,
    "A10": 86,
    "L4": 89,
    "H100": 90,
    "H200": 90,
    "GH200": 90,
    "B200": 100,
}

# Shared memory that one block may use, in bytes, by compute capability (CUDA C++
# Programming Guide, technical specifications per compute capability).
_SHARED_MEMORY = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    87: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    103: 227 << 10,
    120: 99 << 10,
    121: 99 << 10,
}
_SMALLEST_SHARED_MEMORY = 99 << 10


def abstract_device():
    """The device that an abstract mesh in scope stands for, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return getattr(mesh, "abstract_device", None)


_lowered_for: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "_lowered_for", default=None
)


@contextlib.contextmanager
def lowering_for(name: str):
    """In which a program is lowered for a platform, as JAX says it, or run on one."""
    token = _lowered_for.set(_exact(name))
    try:
        yield
    finally:
        _lowered_for.reset(token)


def target() -> str:
    """What is lowered now runs there; before that, as far as is known (`platform`)."""
    return _lowered_for.get() or platform()


def platform() -> str:
    """Where the program that is being traced will run: "cuda", "rocm", "cpu", ...

    JAX decides it later, by where the arrays lie: this is where they lie by default.
    """
    device = abstract_device()
    if device is not None and device.platform:
        return _exact(device.platform)
    default = jax.config.jax_default_device  # a device, or the name of a platform
    if default is not None:
        return _exact(getattr(default, "platform", default))
    return _exact(jax.default_backend())


def platform_of(arrays) -> str:
    """Where JAX runs an operation on these arrays, each of which lies somewhere."""
    arrays = [x for x in arrays if isinstance(x, jax.Array)]
    committed = [x for x in arrays if x.committed]
    if arrays and (committed or jax.config.jax_default_device is None):
        (first, *_) = (committed or arrays)[0].devices()
        return _exact(first.platform)
    return platform()


def _exact(name: str) -> str:
    """JAX's devices say "gpu" for two platforms."""
    if name != "gpu":
        return name
    if jax.default_backend() != "gpu":
        return "cuda"
    version = jax.devices()[0].client.platform_version
    return "rocm" if "rocm" in version.lower() else "cuda"


def device_kind() -> str | None:
    """The name of the GPU; None where there is none to ask."""
    device = abstract_device()
    if device is not None and device.device_kind:
        return device.device_kind
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None


def _here():
    """The GPU of this machine, if that is the one meant."""
    if jax.default_backend() != "gpu":
        return None
    here = jax.devices()[0]
    return here if here.device_kind == device_kind() else None


def capability() -> int:
    """Compute capability of the GPU, times ten; 90 where there is none to ask."""
    here = _here()
    if here is not None:
        return round(float(here.compute_capability) * 10)
    words = (device_kind() or "").replace("-", " ").split()
    return next((_CAPABILITY[w] for w in words if w in _CAPABILITY), 90)


def are_linked() -> bool:
    """Whether all devices are known to reach each other fast: NVLink within a host.

    JAX names no links: those of one process are on one host, and the names of GPUs
    say whether they have NVLink to all others there. Simulated devices have.
    """
    kind = device_kind() or "cpu"
    has_nvlink = re.search(r"^cpu|SXM|HBM3$|H200$|B200$", kind) is not None
    return has_nvlink and jax.process_count() == 1


def multiprocessors() -> int:
    """Of the GPU; those of an H200 where there is none to ask."""
    return getattr(_here(), "core_count", 132)


def shared_memory_limit() -> int:
    """Shared memory in bytes that a block may use on the GPU."""
    return _SHARED_MEMORY.get(capability(), _SMALLEST_SHARED_MEMORY)
