"""What programs run on: the platform, and the facts of its GPU."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Iterable

import jax
from jax.sharding import AbstractDevice

# GPUs by name, where programs are lowered for them elsewhere: a pattern of names (the
# first that matches is meant), compute capability times ten, and how many
# multiprocessors each GPU of that name has; None if they differ, or were not looked up.
_NAMED = (
    (r"T4", 75, 40),
    (r"Quadro RTX \d+|TITAN RTX|RTX 20\d\d|GTX 16\d\d", 75, None),
    (r"L40S?|RTX 6000 Ada", 89, 142),
    (r"L4", 89, 58),
    (r"RTX 4090(?! D| Laptop)", 89, 128),
    (r"L2|L20|RTX 40\d\d|Ada", 89, None),
    (r"RTX PRO 6000", 120, 188),
    (r"RTX 5090(?! D| Laptop)", 120, 170),
    (r"RTX PRO \d+|RTX 50\d\d", 120, None),
    (r"A10", 86, 72),
    (r"A10G", 86, 80),
    (r"A40|RTX A6000", 86, 84),
    (r"RTX 3090 Ti", 86, 84),
    (r"RTX 3090", 86, 82),
    (r"A2|A16|RTX A\d+|RTX 30\d\d", 86, None),
    (r"A100|A800", 80, 108),
    (r"A30", 80, 56),
    (r"H[18]00 PCIe", 90, 114),
    (r"G?H[12]00|H800", 90, 132),
    (r"H20", 90, 78),
    (r"B[12]00", 100, 148),
    (r"B300", 103, 148),
    (r"GB[12]00", 100, None),
    (r"GB300", 103, None),
    (r"GB10", 121, 48),
    (r"Orin", 87, None),
    (r"Thor", 110, 20),
    (r"V100|TITAN V", 70, 80),
    (r"P100", 60, 56),
)
# By capability, a GPU of that capability.
_KNOWN_TO_JAX = {
    80: "NVIDIA A100",
    86: "NVIDIA A10",
    89: "NVIDIA L4",
    90: "NVIDIA H200",
    100: "NVIDIA B200",
    103: "NVIDIA B300",
    110: "NVIDIA Thor",
    120: "NVIDIA RTX PRO 6000",
    121: "NVIDIA GB10",
}
_UNKNOWN = 86  # no GPU that runs the kernels has less shared memory
# Parts of a GPU have names of their own, after that of the GPU.
_PART = re.compile(r"\bMIG\b")

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


@dataclasses.dataclass(frozen=True)
class Family:
    """GPUs that take the same blocks where they have no table of their own.

    Attributes:
      name: of the first of them, by its compute capability.
      products: the instruction of their products: "mma.sync" has left operands in
        registers, "wgmma" there or in shared memory, and "tcgen05" has sums and left
        operands in tensor memory.
      multiprocessors: of a usual GPU.
    """

    name: str
    products: str
    multiprocessors: int


SM_80 = Family("sm_80", "mma.sync", 108)
SM_86 = Family("sm_86", "mma.sync", 84)
SM_90 = Family("sm_90", "wgmma", 132)
SM_100 = Family("sm_100", "tcgen05", 148)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the blocks of kernels depend on.

    Attributes:
      kind: its name, None where there is none to ask.
      capability: compute capability, times ten.
      shared_memory: bytes that one block of threads may use.
      core_count: how many multiprocessors it has, None if that is not known.
      is_known: whether the capability is its own, not that of an unknown name.
    """

    kind: str | None
    capability: int
    shared_memory: int
    core_count: int | None = None
    is_known: bool = True

    @classmethod
    def of(cls, kind: str | None, capability: int, **more) -> Gpu:
        """With the shared memory of its capability."""
        size = _SHARED_MEMORY.get(capability, _SMALLEST_SHARED_MEMORY)
        return cls(kind, capability, size, **more)

    @classmethod
    def named(cls, kind: str) -> Gpu:
        """A GPU of which no more than the name is known.

        An unknown name is one of the family with the least shared memory.
        """
        for name, capability, count in _NAMED:
            if re.search(rf"\b(?:{name})\b", kind):
                count = None if _PART.search(kind) else count
                return cls.of(kind, capability, core_count=count)
        return cls.of(kind, _UNKNOWN, is_known=False)

    @property
    def family(self) -> Family:
        if 100 <= self.capability < 120:
            return SM_100
        if self.capability // 10 == 9:
            return SM_90
        size = _SHARED_MEMORY.get(self.capability, _SMALLEST_SHARED_MEMORY)
        return SM_80 if size >= _SHARED_MEMORY[80] else SM_86

    @property
    def tensor_memory(self) -> int:
        """Columns of tensor memory that a block may use."""
        return _TENSOR_MEMORY if self.family is SM_100 else 0

    @property
    def multiprocessors(self) -> int:
        """Its own, or those of a usual GPU of its family."""
        return self.core_count or self.family.multiprocessors

    @property
    def words(self) -> str:
        """For a reader of `explain`."""
        capability = (
            f"{self.capability / 10}{'' if self.is_known else ' (unknown name)'}"
        )
        count = f"{self.multiprocessors} multiprocessors"
        count += "" if self.core_count else " (assumed)"
        size = f"{self.shared_memory >> 10} KiB of shared memory"
        return f"{self.kind}, capability {capability}, {count}, {size}"


# Where there is no GPU, and no name of one: interpreted kernels have its blocks.
_NONE = Gpu.of(None, 90, core_count=132)


_described: contextvars.ContextVar = contextvars.ContextVar("_described", default=None)
_lowered_for: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "_lowered_for", default=None
)


def abstract_device():
    """The device that is described: by `describing`, or an abstract mesh; or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return _described.get() or getattr(mesh, "abstract_device", None)


def described_by(arrays: Iterable):
    """The abstract device of the mesh in scope, or that types of arrays name, or None.

    Arguments of a `jit` that are divided over devices of a topology have such types; an
    array of one device has a type that says nothing of it.
    """
    if (there := abstract_device()) is not None:
        return there
    types = (getattr(x, "aval", x) for x in arrays)
    meshes = (getattr(getattr(x, "sharding", None), "mesh", None) for x in types)
    found = (getattr(mesh, "abstract_device", None) for mesh in meshes)
    return next((x for x in found if x is not None), None)


@contextlib.contextmanager
def describing(abstract_device):
    """In which a program is meant to run there, whatever abstract mesh is in scope."""
    token = _described.set(abstract_device)
    try:
        yield
    finally:
        _described.reset(token)


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


def is_here(name: str) -> bool:
    """Whether this machine has devices of a platform, as JAX says it."""
    try:
        return bool(jax.devices(name))
    except RuntimeError:
        return False


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


def gpu_is_here() -> bool:
    """Whether this machine has the GPU that is meant."""
    return _here() is not None


def known_to_jax():
    """The abstract device that kernels are lowered for, under a name that JAX knows.

    JAX refuses others (0.11.2 to 0.12.0.1, `pallas/triton/gpu_info.py`), and asks for
    no more than the capability.
    """
    there = abstract_device()
    name = _KNOWN_TO_JAX.get(gpu().capability)
    if there is None or there.platform == "cpu" or _here() is not None or name is None:
        return there
    return AbstractDevice(name, there.num_cores, there.platform)


def gpu() -> Gpu:
    """The GPU that is meant: by its name, where it is not here."""
    here, kind = _here(), device_kind()
    if here is not None:
        capability = round(float(here.compute_capability) * 10)
        count = getattr(here, "core_count", None)
        return Gpu.of(kind, capability, core_count=count)
    if kind is None or kind == "cpu":
        return _NONE
    count = getattr(abstract_device(), "num_cores", None)
    found = Gpu.named(kind)
    return dataclasses.replace(found, core_count=count) if count else found


def capability() -> int:
    """Compute capability of the GPU, times ten."""
    return gpu().capability


def are_linked() -> bool:
    """Whether all devices are known to reach each other fast: NVLink within a host.

    JAX names no links: those of one process are on one host, and the names of GPUs
    say whether they have NVLink to all others there. Simulated devices have.
    """
    kind = device_kind() or "cpu"
    has_nvlink = re.search(r"^cpu|SXM|HBM3$|H200$|B200$", kind) is not None
    return has_nvlink and jax.process_count() == 1


def multiprocessors() -> int:
    """Of the GPU; those of a usual one of its family where it is not known."""
    return gpu().multiprocessors


def shared_memory_limit() -> int:
    """Shared memory in bytes that a block may use on the GPU."""
    return gpu().shared_memory
