"""What programs run on: the platform, and the facts of its GPU."""

from __future__ import annotations

import contextlib
import contextvars
import re

import jax

# GPUs known by name only, where programs are lowered for them elsewhere: a pattern of
# names (the first that matches is meant), compute capability times ten, and how many
# multiprocessors the largest of them has.
_NAMED = (
    (r"T4|Quadro RTX \d+|TITAN RTX|RTX 20\d\d|GTX 16\d\d", 75, 72),
    (r"L2|L4|L20|L40S?|RTX 40\d\d|Ada", 89, 142),
    (r"RTX PRO \d+|RTX 50\d\d", 120, 188),
    (r"A2|A10G?|A16|A40|RTX A\d+|RTX 30\d\d", 86, 84),
    (r"A100|A800", 80, 108),
    (r"A30", 80, 56),
    (r"G?H[12]00|H800|H20", 90, 132),
    (r"G?B[12]00", 100, 148),
    (r"G?B300", 103, 148),
    (r"GB10", 121, 48),
    (r"Orin", 87, 16),
    (r"Thor", 110, 20),
    (r"V100|TITAN V", 70, 80),
    (r"P100", 60, 56),
)
_UNKNOWN = 86, 84  # no GPU that runs the kernels has less shared memory

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
# Columns of tensor memory, of 128 lanes of 32 bits (PTX ISA, tensor memory). GPUs of
# capability 12, also called Blackwell, have none.
_TENSOR_MEMORY = 512


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


def is_here() -> bool:
    """Whether this machine has the GPU that is meant."""
    return _here() is not None


def _named() -> tuple[int, int]:
    """Capability times ten and multiprocessors of a GPU that is not here."""
    kind = device_kind()
    if kind is None:
        return 90, 132
    found = (x for name, *x in _NAMED if re.search(rf"\b(?:{name})\b", kind))
    capability, multiprocessors = next(found, _UNKNOWN)
    return capability, multiprocessors


def capability() -> int:
    """Compute capability of the GPU, times ten.

    By its name where it is not here; 90 where there is no name either.
    """
    here = _here()
    if here is not None:
        return round(float(here.compute_capability) * 10)
    return _named()[0]


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
    here = _here() or abstract_device()
    count = getattr(here, "core_count", None) or getattr(here, "num_cores", None)
    return count or _named()[1]


def shared_memory_limit() -> int:
    """Shared memory in bytes that a block may use on the GPU."""
    return _SHARED_MEMORY.get(capability(), _SMALLEST_SHARED_MEMORY)


def tensor_memory_columns() -> int:
    """Columns of tensor memory that a block may use on the GPU; 0 if it has none."""
    return _TENSOR_MEMORY if 100 <= capability() < 120 else 0
