"""Block sizes, warps and pipeline depth of the kernels.

A block that spills registers runs 3 to 8 times slower, and one that needs more shared
memory than the GPU has does not run at all: so blocks follow from the head size, the
width of the dtype and what is unusual about a call by a table made on a GPU, and from
its shared memory, unless the caller passes a `Config`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

_REGISTER_BOUNDS = range(24, 256, 8)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How one kernel cuts its work.

    Attributes:
      block_q: query rows of a block, a power of two from 16.
      block_kv: key rows of a block, a power of two from 16.
      num_warps: warps of 32 threads that share a block: 1, 2, 4, 8 or 16.
      num_stages: depth of the software pipeline of the loads, from 1.
      max_registers: of a thread, a multiple of 8 from 24 to 248; None leaves them to
        the compiler. With fewer more programs share a multiprocessor, which has 65,536
        for all of their threads; with too few values spill to memory.
      held: how many of the tiles that multiply every block from the left stay in
        registers, and leave shared memory and its bandwidth to the rest: for `forward`
        that of queries; for `dq` of output gradients, then of queries; for `dkv` and
        `dk` of values, then of keys; for `dv` of keys. For compute capability 9, whose
        products else read them from there; a table's blocks hold none on other GPUs.

    Example:
      >>> from jax_flash2 import Blocks
      >>> Blocks(128, 64, num_warps=4, num_stages=3).block_kv
      64
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    held: int = 0

    def __post_init__(self):
        for name, smallest in (("block_q", 16), ("block_kv", 16), ("num_warps", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < smallest or value & (value - 1):
                raise ValueError(
                    f"{name} must be a power of two >= {smallest}, got {value!r}"
                )
        if self.num_warps > 16:
            raise ValueError(f"num_warps must be at most 16, got {self.num_warps}")
        if not isinstance(self.num_stages, int) or self.num_stages < 1:
            raise ValueError(f"num_stages must be an int >= 1, got {self.num_stages!r}")
        most = self.max_registers
        if most is not None and (
            not isinstance(most, int) or most not in _REGISTER_BOUNDS
        ):
            raise ValueError(
                "max_registers must be None or a multiple of 8 from 24 to 248, "
                f"got {most!r}"
            )
        if isinstance(self.held, bool) or self.held not in (0, 1, 2):
            raise ValueError(f"held must be 0, 1 or 2, got {self.held!r}")


@dataclasses.dataclass(frozen=True)
class Config:
    """Configuration of the kernels of one call; None leaves a part to the library.

    The "xla" backend takes the numbers of rows and keys of `forward` and, for the
    backward, of `dkv`.

    Attributes:
      forward: blocks of the forward kernel.
      dkv: blocks of the kernels for the gradients of key and value.
      dk, dv: of those for one of them each, that heads above 128 take; None: `dkv`.
      dq: blocks of the kernel for the gradient of query.
      operand: blocks of the kernel for the gradient of a bias or of ALiBi's slopes.
      interpret: run the kernels in Pallas's interpreter: slow, on any platform.

    Example:
      >>> from jax_flash2 import Blocks, Config
      >>> Config(forward=Blocks(128, 64, num_warps=4, num_stages=3)).interpret
      False
    """

    forward: Blocks | None = None
    dkv: Blocks | None = None
    dk: Blocks | None = None
    dv: Blocks | None = None
    dq: Blocks | None = None
    operand: Blocks | None = None
    interpret: bool = False


# What is taken where the tuned blocks (`table`) do not fit, by kernel and padded head
# sizes up to the key: from the largest on. (block_q, block_kv, warps, stages)
_SMALLER = {
    "forward": {
        64: [(64, 64, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1)],
        128: [(64, 64, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1)],
        256: [(64, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1)],
        512: [(32, 32, 8, 2), (32, 16, 8, 1), (16, 16, 4, 1)],
    },
    "dkv": {
        64: [(32, 64, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)],
        128: [(32, 64, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)],
    },
    "dk": {
        256: [(32, 32, 8, 2), (16, 32, 4, 1), (16, 16, 4, 1)],
        512: [(32, 16, 8, 2), (16, 16, 8, 2), (16, 16, 8, 1)],
    },
    "dv": {
        256: [(32, 32, 8, 2), (16, 32, 4, 1), (16, 16, 4, 1)],
        512: [(32, 16, 8, 2), (16, 16, 8, 2), (16, 16, 8, 1)],
    },
    "dq": {
        64: [(64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)],
        128: [(64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)],
        256: [(128, 32, 8, 2), (64, 32, 8, 1), (32, 16, 4, 1), (16, 16, 4, 1)],
        512: [(32, 32, 8, 1), (16, 16, 8, 2), (16, 16, 8, 1)],
    },
    "operand": {
        64: [(64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)],
        128: [(64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)],
        256: [(64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)],
        512: [(32, 32, 8, 1), (16, 16, 8, 1)],
    },
}

KERNELS = tuple(_SMALLER)
HEADS = (64, 128, 256, 512)


def kernels(heads: tuple[int, int]) -> tuple[str, ...]:
    """The kernels that serve padded head sizes of key and value.

    The gradients of key and value come from one kernel, or above 128 from one each.
    """
    unused = ("dkv",) if max(heads) > 128 else ("dk", "dv")
    return tuple(kernel for kernel in KERNELS if kernel not in unused)


# Bytes, at most, that an element of float32 took of some 30 configurations whose
# products are made of three pieces in bfloat16 (`triton.support.product_precision`).
SPLIT_ITEMSIZE = 5.5

TUNING = Path(__file__).parent / "tuning"
# The table of a GPU that has none of its own: what fits its shared memory is used.
_DEFAULT_GPU = "NVIDIA H200"


def table_path(gpu: str) -> Path:
    return TUNING / f"{gpu.lower().replace(' ', '_')}.json"


@functools.cache
def table(gpu: str | None) -> dict:
    """The fastest blocks found on a GPU: by kernel, padded head size and regime.

    Made by `python -m benchmarks.tune`. A regime is what tells calls apart whose best
    blocks differ (`REGIMES`); one that a kernel lacks is as "plain" is.
    """
    path = table_path(gpu or _DEFAULT_GPU)
    path = path if path.exists() else table_path(_DEFAULT_GPU)
    return json.loads(path.read_text())["blocks"]


REGIMES = {
    "plain": "none of the others",
    "single": "at most one program of 128 query rows to a multiprocessor",
    "few": "at most eight of them",
    "short": "few keys for a query: a window, short sequences, packed documents",
    "long": "sequences of many keys",
    "heavy": "much arithmetic or one byte for every pair: a soft cap, a mask",
    "dropout": "bits made for every pair",
    "bias": "more bytes for every pair: a bias",
    "float32": "elements of four bytes",
    "float32 highest": "their products split in bfloat16",
}


# How many tiles of a program multiply every block from the left: the first of the size
# of keys, the second of that of values.
LEFT = {"forward": 1, "dkv": 2, "dk": 2, "dv": 1, "dq": 2, "operand": 0}


def shared_memory(
    kernel: str,
    blocks: Blocks,
    heads: tuple[int, int],
    itemsize: float,
    pair_bytes: int = 0,
) -> int:
    """Shared memory in bytes that a kernel's tiles need at most.

    Never less than what Triton 3.6 took of some 200 configurations that fit a GPU.

    Args:
      kernel: one of `KERNELS`.
      blocks: the blocks.
      heads: padded head sizes of key and value.
      itemsize: bytes of an element, or `SPLIT_ITEMSIZE`.
      pair_bytes: bytes loaded for each pair of query and key (bias, mask).
    """
    pairs = blocks.block_q * blocks.block_kv
    tiles = (blocks.num_stages - 1) * pairs * pair_bytes
    stages: float = blocks.num_stages
    own, streamed = blocks.block_q, blocks.block_kv
    if kernel == "operand":  # every loop loads all four
        own, streamed = 0, own + streamed
    elif kernel not in ("forward", "dq"):  # one of q and do is also wanted transposed
        own, streamed, stages = streamed, own, max(stages, 1.5)
        tiles += 8 * blocks.num_stages * blocks.block_q  # lse and delta
        tiles += 4 * pairs if itemsize == 4 else 0
    resident = own * sum(heads[: max(0, LEFT[kernel] - blocks.held)])
    need = (resident + stages * streamed * sum(heads)) * itemsize
    # A sum, in float32, passes through it on its way out.
    return int(max(need, own * max(heads) * 4)) + tiles


def _candidates(
    kernel: str,
    heads: tuple[int, int],
    itemsize: float,
    kind: str = "plain",
    gpu: str | None = None,
) -> list[Blocks]:
    """From the fastest on, each with fewer stages too; the last needs least."""
    size = next(size for size in HEADS if max(heads) <= size)
    tuned = table(gpu)[kernel][str(size)]
    kind = {4: "float32", SPLIT_ITEMSIZE: "float32 highest"}.get(itemsize, kind)
    # What was chosen for elements of two bytes is too large for others.
    names = [kind, "plain"] if itemsize == 2 else [kind]
    found = []
    for name in names:
        if name in tuned:
            blocks = Blocks(*tuned[name])
            fewer = range(blocks.num_stages, min(blocks.num_stages, 2) - 1, -1)
            found += [dataclasses.replace(blocks, num_stages=n) for n in fewer]
    return found + [Blocks(*blocks) for blocks in _SMALLER[kernel][size]]


def smallest(kernel: str, heads: tuple[int, int], itemsize: float) -> int:
    """Bytes of shared memory below which a kernel cannot run with these heads."""
    blocks = _candidates(kernel, heads, itemsize)[-1]
    return shared_memory(kernel, blocks, heads, itemsize)


def choose(
    kernel: str,
    config: Config | None,
    *,
    rows: tuple[int, int],
    heads: tuple[int, int],
    itemsize: float,
    limit: int,
    pair_bytes: int = 0,
    kind: str = "plain",
    gpu: str | None = None,
    holds: bool = True,
) -> Blocks:
    """Blocks for one kernel: the caller's, or the first candidate that fits.

    Args:
      kernel: one of `KERNELS`.
      config: the caller's configuration.
      rows: query and key rows; blocks are not larger than these need.
      heads: padded head sizes of key and value.
      itemsize: bytes of an element, or `SPLIT_ITEMSIZE`.
      limit: shared memory of the GPU in bytes, at least `smallest`.
      pair_bytes: bytes of bias and mask for each pair of query and key.
      kind: the regime of a call with elements of two bytes, one of `REGIMES`.
      gpu: kind of the device, for its table.
      holds: whether a table's blocks may have tiles `held` on the GPU.
    """
    chosen = getattr(config, kernel, None)
    if chosen is None and kernel in ("dk", "dv"):
        chosen = getattr(config, "dkv", None)
    if chosen is not None:
        return chosen
    candidates = [
        dataclasses.replace(blocks, held=blocks.held if holds else 0)
        for blocks in _candidates(kernel, heads, itemsize, kind, gpu)
    ]
    fits = (
        blocks
        for blocks in candidates
        if shared_memory(kernel, blocks, heads, itemsize, pair_bytes) <= limit
    )
    blocks = next(fits, candidates[-1])
    return dataclasses.replace(
        blocks,
        block_q=min(blocks.block_q, padded(rows[0])),
        block_kv=min(blocks.block_kv, padded(rows[1])),
    )


def padded(size: int) -> int:
    """The block size that holds `size` rows or head elements: a power of two >= 16."""
    return max(16, 1 << (size - 1).bit_length())
