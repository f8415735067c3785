"""Blocks of the Triton kernels: from a table, if they fit the GPU.

A block that spills registers runs 3 to 8 times slower, and one that needs more shared
memory than the GPU has does not run at all: so blocks follow from the head size, the
width of the dtype and what is unusual about a call by a table made on a GPU
(`pallas_kernels.tables`), and from its shared memory, unless the caller passes a
`Config`.
"""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels import tables
from pallas_kernels.configs import KERNELS, Blocks, Config
from pallas_kernels.tables import padded

# A table of what is taken where tuned blocks do not fit, from the largest on, by kernel
# and padded head sizes up to the key.
_SMALLER = "Smaller blocks"
# A table of what is taken instead of the H200's on GPUs with tensor memory that have
# none of their own, where its blocks spill registers or ask for more than there is.
_ON_BLACKWELL = "Blackwell"


# The largest head size of the table of the kernel that sums both gradients.
_LARGEST_SUMMED = 192


def kernels(heads: tuple[int, int]) -> tuple[str, ...]:
    """The kernels that serve blocks of such head sizes of key and value.

    The gradients of key and value come from one kernel, or one each for large heads.
    """
    most = tables.number("triton", "most_summed")
    apart = sum(heads) > most or max(heads) > _LARGEST_SUMMED
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

# With tensor memory, by kernel: how many of the blocks that its loop loads two products
# read (the first of the size of keys, the second of that of values), the sizes of its
# sums (0: keys, 1: values), how many products are tiles of pairs, and how many left
# operands are made of them.
_PRODUCTS = {
    "forward": (0, (1,), 1, 1),
    "dkv": (2, (0, 1), 2, 2),
    "dk": (1, (0,), 2, 1),
    "dv": (0, (1,), 1, 1),
    "dq": (1, (0,), 2, 1),
    "dbias": (0, (), 2, 0),
}
# There, bytes of barriers and padding; 8 warps also share maxima and sums of rows.
_BESIDE = (1 << 10) + 512
_BESIDE_8_WARPS = (4 << 10) + 512


def _rows(kernel: str, blocks: Blocks) -> tuple[int, int]:
    """Rows of the block that a program owns, and of those that it loops over."""
    if kernel in ("dkv", "dk", "dv"):
        return blocks.block_kv, blocks.block_q
    return blocks.block_q, blocks.block_kv


def uses_tensor_memory(kernel: str, blocks: Blocks) -> bool:
    """Whether a kernel's products run there, on a GPU that has it.

    Blackwell's `tcgen05.mma` takes 64 or 128 rows, and Triton uses it with one or two
    groups of 4 warps. Other kernels run as on GPUs without tensor memory.
    """
    return _rows(kernel, blocks)[0] >= 64 and blocks.num_warps in (4, 8)


def shared_memory(
    kernel: str,
    blocks: Blocks,
    heads: tuple[int, int],
    itemsize: float,
    pair_bytes: int = 0,
    *,
    tensor_memory: bool = False,
    dropout: bool = False,
) -> int:
    """Shared memory in bytes that a kernel's tiles need at most.

    Never less than what Triton 3.6 took of some 200 configurations that fit a GPU, and
    of some 400 compiled for a B200.

    Args:
      kernel: one of `KERNELS`.
      blocks: the blocks.
      heads: padded head sizes of key and value.
      itemsize: bytes of an element, or `SPLIT_ITEMSIZE`.
      pair_bytes: bytes loaded for each pair of query and key (bias, mask).
      tensor_memory: whether the GPU has it.
      dropout: whether bits are made for each pair.
    """
    pairs = blocks.block_q * blocks.block_kv
    tiles = (blocks.num_stages - 1) * pairs * pair_bytes
    stages: float = blocks.num_stages
    own, streamed = _rows(kernel, blocks)
    if kernel == "dbias":  # every loop loads all four
        own, streamed = 0, own + streamed
    elif kernel not in ("forward", "dq"):  # one of q and do is also wanted transposed
        stages = max(stages, 1.5)
        tiles += 8 * blocks.num_stages * blocks.block_q  # lse and delta
        tiles += 4 * pairs if itemsize == 4 else 0
    resident = own * sum(heads[: max(0, LEFT[kernel] - blocks.left_in_registers)])
    need = (resident + stages * streamed * sum(heads)) * itemsize
    # A sum, in float32, passes through it on its way out.
    need = max(need, own * max(heads) * 4)
    if tensor_memory and uses_tensor_memory(kernel, blocks):
        # Products run beside the loop: the second reader of a block holds it for one
        # round more. What is made of pairs in other layouts passes through it, too.
        need += streamed * sum(heads[: _PRODUCTS[kernel][0]]) * itemsize
        bits = max(pairs, 32 * 32 * blocks.num_warps)  # in bytes, 32 or more a thread
        tiles += dropout * bits * (1 if kernel in ("forward", "dq") else 2)
        tiles += _BESIDE if blocks.num_warps == 4 else _BESIDE_8_WARPS
    return int(need) + tiles


def tensor_memory(
    kernel: str, blocks: Blocks, heads: tuple[int, int], itemsize: float
) -> int:
    """Columns of tensor memory that a kernel needs at most; one is 128 words."""
    if not uses_tensor_memory(kernel, blocks):
        return 0
    own, streamed = _rows(kernel, blocks)
    _, sums, products, left = _PRODUCTS[kernel]
    columns = sum(heads[i] for i in sums) + streamed * products
    columns += math.ceil(streamed * left * itemsize / 4)
    # In float32 left operands that are loaded are there, too.
    if kernel == "dbias" and itemsize > 2:
        columns += math.ceil(sum(heads) * itemsize / 4)
    elif itemsize == 4:
        columns += sum(heads[: LEFT[kernel]])
    return -(-own // 128) * columns


def least_shared_memory(
    kernel: str, blocks: Blocks, heads: tuple[int, int], itemsize: int
) -> int:
    """Shared memory in bytes that a kernel surely takes, on any GPU; 0: not known.

    All stages but one of what its loop loads are there at once, if head sizes are
    multiples of 16 (other rows may not be loaded ahead).
    """
    if itemsize != 2 or kernel == "dbias":  # some of it may not pass through it
        return 0
    _, streamed = _rows(kernel, blocks)
    first = sum(tables.pieces(head)[0] for head in heads)
    return (blocks.num_stages - 1) * streamed * first * itemsize


def fits(
    kernel: str,
    blocks: Blocks,
    heads: tuple[int, int],
    itemsize: float,
    pair_bytes: int = 0,
    *,
    limit: int,
    columns: int = 0,
    dropout: bool = False,
) -> bool:
    """Whether a kernel surely has room on a GPU; arguments as for `choose`."""
    need = shared_memory(
        kernel,
        blocks,
        heads,
        itemsize,
        pair_bytes,
        dropout=dropout,
        tensor_memory=columns > 0,
    )
    if need > limit:
        return False
    return not columns or tensor_memory(kernel, blocks, heads, itemsize) <= columns


def _candidates(
    kernel: str,
    heads: tuple[int, int],
    itemsize: float,
    regime: str = "plain",
    gpu: str | None = None,
    columns: int = 0,
) -> list[Blocks]:
    """From the fastest on, each with fewer stages too; the last needs least."""
    size = min(max(heads), tables.HEADS[-1])  # latent keys are larger
    bucket = tables.bucket(size)
    tuned = tables.table("triton", gpu)[kernel][str(bucket)]
    smaller = tables.table("triton", _SMALLER)[kernel]
    smaller = next(blocks for n, blocks in smaller.items() if size <= int(n))
    regime = {4: "float32", SPLIT_ITEMSIZE: "float32 highest"}.get(itemsize, regime)
    # What was chosen for elements of two bytes is too large for others.
    names = [regime]
    if itemsize == 2:
        names += ["short", "plain"] if regime == "whole" else ["plain"]
    if columns and not tables.is_tuned("triton", gpu):
        there = tables.table("triton", _ON_BLACKWELL)
        tuned = tuned | there.get(kernel, {}).get(str(bucket), {})
    found = []
    for name in names:
        if name in tuned:
            blocks = Blocks(*tuned[name])
            fewer = range(blocks.num_stages, min(blocks.num_stages, 2) - 1, -1)
            found += [dataclasses.replace(blocks, num_stages=n) for n in fewer]
    return found + [Blocks(*blocks) for blocks in smaller]


def smallest(
    kernel: str, heads: tuple[int, int], itemsize: float, columns: int = 0
) -> int:
    """Bytes of shared memory below which a kernel cannot run with these heads.

    Args:
      kernel, heads, itemsize, columns: as for `choose`.
    """
    blocks = _candidates(kernel, heads, itemsize, columns=columns)[-1]
    has = columns > 0
    return shared_memory(kernel, blocks, heads, itemsize, tensor_memory=has)


def choose(
    kernel: str,
    config: Config | None,
    *,
    rows: tuple[int, int],
    heads: tuple[int, int],
    itemsize: float,
    limit: int,
    columns: int = 0,
    pair_bytes: int = 0,
    dropout: bool = False,
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
      columns: of tensor memory of the GPU, 0 where it has none.
      pair_bytes: bytes of bias and mask for each pair of query and key.
      dropout: whether bits are made for each pair.
      regime: of a call with elements of two bytes, one of `tables.REGIMES`.
      gpu: kind of the device, for its table.
      keeps_left: whether a table's blocks may keep left operands in registers.

    Raises:
      ValueError: if no candidate is known to fit.
    """
    chosen = None if config is None else config.blocks(kernel)
    if chosen is not None:
        return chosen
    candidates = _candidates(kernel, heads, itemsize, regime, gpu, columns)
    if not keeps_left:
        candidates = [dataclasses.replace(x, left_in_registers=0) for x in candidates]
    room = {"limit": limit, "columns": columns, "dropout": dropout}
    for blocks in candidates:
        if fits(kernel, blocks, heads, itemsize, pair_bytes, **room):
            return dataclasses.replace(
                blocks,
                block_q=min(blocks.block_q, padded(rows[0])),
                block_kv=min(blocks.block_kv, padded(rows[1])),
            )
    raise ValueError(
        f"implementation='triton': no blocks of {kernel} for head sizes {heads} fit "
        f"{limit >> 10} KiB of shared memory"
    )
