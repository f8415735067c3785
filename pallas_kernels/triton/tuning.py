"""Blocks of the Triton kernels: from a table, if they fit the GPU.

A block that spills registers runs 3 to 8 times slower, and one that needs more shared
memory than the GPU has does not run at all: so blocks follow from the head size, the
width of the dtype and what is unusual about a call by a table made on a GPU
(`pallas_kernels.tables`), and from its shared memory, unless the caller passes a
`Config`.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels import tables
from pallas_kernels.configs import KERNELS, Blocks, Config
from pallas_kernels.tables import padded

# What is taken where the tuned blocks do not fit, by kernel and padded head
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
        256: [(32, 64, 8, 2), (32, 32, 8, 1), (16, 16, 4, 1)],
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
    "dbias": {
        64: [(64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)],
        128: [(64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)],
        256: [(64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)],
        512: [(32, 32, 8, 1), (16, 16, 8, 1)],
    },
}


# Elements of a row of key and of value whose gradients one kernel sums (NVIDIA H200,
# 2026-11-23: benchmarks/lab/064-heads-in-pieces.md).
_MOST_SUMMED = 320
_LARGEST_SUMMED = 192  # the largest head size of that kernel's table


def kernels(heads: tuple[int, int]) -> tuple[str, ...]:
    """The kernels that serve blocks of such head sizes of key and value.

    The gradients of key and value come from one kernel, or one each for large heads.
    """
    apart = sum(heads) > _MOST_SUMMED or max(heads) > _LARGEST_SUMMED
    unused = ("dkv",) if apart else ("dk", "dv")
    return tuple(kernel for kernel in KERNELS if kernel not in unused)


def no_power_of_two(blocks: Blocks) -> str | None:
    """A field of the blocks that a kernel cannot have, or None."""
    for name in ("block_q", "block_kv", "num_warps"):
        value = getattr(blocks, name)
        if value & (value - 1):
            return f"{name}={value}"
    return None


# Bytes, at most, that an element of float32 took of some 30 configurations whose
# products are made of three pieces in bfloat16 (`support.product_precision`).
SPLIT_ITEMSIZE = 5.5

# How many tiles of a program multiply every block from the left: the first of the size
# of keys, the second of that of values.
LEFT = {"forward": 1, "dkv": 2, "dk": 2, "dv": 1, "dq": 2, "dbias": 0}


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
    if kernel == "dbias":  # every loop loads all four
        own, streamed = 0, own + streamed
    elif kernel not in ("forward", "dq"):  # one of q and do is also wanted transposed
        own, streamed, stages = streamed, own, max(stages, 1.5)
        tiles += 8 * blocks.num_stages * blocks.block_q  # lse and delta
        tiles += 4 * pairs if itemsize == 4 else 0
    resident = own * sum(heads[: max(0, LEFT[kernel] - blocks.left_in_registers)])
    need = (resident + stages * streamed * sum(heads)) * itemsize
    # A sum, in float32, passes through it on its way out.
    return int(max(need, own * max(heads) * 4)) + tiles


def _candidates(
    kernel: str,
    heads: tuple[int, int],
    itemsize: float,
    regime: str = "plain",
    gpu: str | None = None,
) -> list[Blocks]:
    """From the fastest on, each with fewer stages too; the last needs least."""
    size = max(heads)
    tuned = tables.table("triton", gpu)[kernel][str(tables.bucket(size))]
    smaller = next(n for n in _SMALLER[kernel] if size <= n)
    regime = {4: "float32", SPLIT_ITEMSIZE: "float32 highest"}.get(itemsize, regime)
    # What was chosen for elements of two bytes is too large for others.
    names = [regime]
    if itemsize == 2:
        names += ["short", "plain"] if regime == "whole" else ["plain"]
    found = []
    for name in names:
        if name in tuned:
            blocks = Blocks(*tuned[name])
            fewer = range(blocks.num_stages, min(blocks.num_stages, 2) - 1, -1)
            found += [dataclasses.replace(blocks, num_stages=n) for n in fewer]
    return found + [Blocks(*blocks) for blocks in _SMALLER[kernel][smaller]]


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
    regime: str = "plain",
    gpu: str | None = None,
    keeps_left: bool = True,
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
      regime: of a call with elements of two bytes, one of `tables.REGIMES`.
      gpu: kind of the device, for its table.
      keeps_left: whether a table's blocks may keep left operands in registers.
    """
    chosen = None if config is None else config.blocks(kernel)
    if chosen is not None:
        return chosen
    found = _candidates(kernel, heads, itemsize, regime, gpu)
    candidates = [
        blocks if keeps_left else dataclasses.replace(blocks, left_in_registers=0)
        for blocks in found
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
