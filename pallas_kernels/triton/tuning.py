"""Blocks of the Triton kernels: from a table, if they fit the GPU.

A block that spills registers runs 3 to 8 times slower, and one that needs more shared
memory than the GPU has does not run at all: so blocks follow from the head size, the
width of the dtype and what is unusual about a call by a table made on a GPU, or made
with the compiler for its family (`pallas_kernels.tables`), and from its shared memory,
unless the caller passes a `Config`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings

from pallas_kernels import device, tables, user_tables
from pallas_kernels.configs import KERNELS, LIKE, Blocks, Config
from pallas_kernels.device import Gpu
from pallas_kernels.tables import padded
from pallas_kernels.triton import tangent_blocks

# A table of what is taken where tuned blocks do not fit, from the largest on, by kernel
# and padded head sizes up to the key.
_SMALLER = "Smaller blocks"
# In place of a regime: those alone, which serve every call. None has more rows or keys
# than `tables.FEW_ROWS`.
_ANY_CALL = "any call"

# The head size that an entry of a table is tuned for, if it is not the largest one that
# it serves.
TUNED_SIZES = {192: 160}
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
# Of the regimes of other elements than those of two bytes.
ITEMSIZES = {"float32": 4, "float32 highest": SPLIT_ITEMSIZE}

# How many tiles of a program multiply every block from the left: the first of the size
# of keys, the second of that of values, or of that of keys, too (`_heads_of_tiles`).
LEFT = {"forward": 1, "dkv": 2, "dk": 2, "dv": 1, "dq": 2, "dbias": 0, "tangent": 2}

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
    "tangent": (1, (1,), 3, 2),
}
# There, bytes of barriers and padding; 8 warps also share maxima and sums of rows.
_BESIDE = (1 << 10) + 512
_BESIDE_8_WARPS = (4 << 10) + 512


def _heads_of_tiles(
    kernel: str, heads: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Head sizes of a program's left tiles, and of what its loop loads, keys first."""
    if kernel == "tangent":  # each is beside its tangent
        key, value = heads
        return (key, key), (key, key, value, value)
    return heads[: LEFT[kernel]], heads


# Kernels whose programs own a block of keys.
_OF_KEYS = ("dkv", "dk", "dv")


def _rows(kernel: str, blocks: Blocks) -> tuple[int, int]:
    """Rows of the block that a program owns, and of those that it loops over."""
    if kernel in _OF_KEYS:
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
    products: str = "wgmma",
    dropout: bool = False,
) -> int:
    """Shared memory in bytes that a kernel's tiles need at most.

    Never less than what Triton 3.6 took of some 200 configurations that fit a GPU, of
    some 400 compiled for a B200 and as many for GPUs of `mma.sync`.

    Args:
      kernel: one of `KERNELS`, or of those in `LIKE`.
      blocks: the blocks.
      heads: padded head sizes of key and value.
      itemsize: bytes of an element, or `SPLIT_ITEMSIZE`.
      pair_bytes: bytes loaded for each pair of query and key (bias, mask).
      products: of the family of the GPU (`device.Family`).
      dropout: whether bits are made for each pair.
    """
    pair_bytes *= 2 if kernel == "tangent" else 1  # a bias is beside its tangent
    beside = products == "tcgen05" and uses_tensor_memory(kernel, blocks)
    if products != "wgmma" and not beside:
        handed = 1 + dropout  # its bits, too
        return _of_mma_sync(kernel, blocks, heads, itemsize, pair_bytes, handed)
    pairs = blocks.block_q * blocks.block_kv
    tiles = (blocks.num_stages - 1) * pairs * pair_bytes
    stages: float = blocks.num_stages
    own, streamed = _rows(kernel, blocks)
    left, loaded = _heads_of_tiles(kernel, heads)
    owns_keys = kernel in _OF_KEYS
    if kernel == "dbias":  # every loop loads all four
        own, streamed = 0, own + streamed
    elif owns_keys:  # one of q and do is also wanted transposed
        stages = max(stages, 1.5)
        tiles += 8 * blocks.num_stages * blocks.block_q  # lse and delta
        tiles += 4 * pairs if itemsize == 4 else 0
    resident = own * sum(left[: max(0, len(left) - blocks.left_in_registers)])
    need = (resident + stages * streamed * sum(loaded)) * itemsize
    # A sum, in float32, passes through it on its way out.
    need = max(need, own * max(heads) * 4)
    if beside:
        # Products run beside the loop: the second reader of a block holds it for one
        # round more. What is made of pairs in other layouts passes through it, too.
        need += streamed * sum(heads[: _PRODUCTS[kernel][0]]) * itemsize
        bits = max(pairs, 32 * 32 * blocks.num_warps)  # in bytes, 32 or more a thread
        tiles += 4 * blocks.num_stages * streamed  # what keys have each
        tiles += dropout * bits * (1 + (owns_keys or kernel == "dbias"))
        tiles += _BESIDE if blocks.num_warps == 4 else _BESIDE_8_WARPS
    elif kernel != "dbias" and not owns_keys:
        tiles += 8 * blocks.num_stages * streamed  # also what keys have each
    return int(need) + tiles


def _of_mma_sync(
    kernel: str,
    blocks: Blocks,
    heads: tuple[int, int],
    itemsize: float,
    pair_bytes: int,
    handed: int,
) -> int:
    """`shared_memory` where products are `mma.sync`.

    Left operands stay there. Of what a loop loads ahead there is a buffer less than
    there are stages, for products wait for their operands. `handed` counts tiles of
    pairs that warps hand to each other where they divide columns of a product.
    """
    pairs, stages = blocks.block_q * blocks.block_kv, blocks.num_stages
    own, streamed = _rows(kernel, blocks)
    kept, loaded = _heads_of_tiles(kernel, heads)
    halves = loaded[: len(loaded) // 2], loaded[len(loaded) // 2 :]
    keys, values = (streamed * sum(half) * itemsize for half in halves)
    summed = [tables.pieces(heads[i]) for i in _PRODUCTS[kernel][1]]
    divide = own <= 64 and any(x[0] >= 128 and len(x) == 1 for x in summed)
    each = 4 if own <= 16 else min(itemsize, 4)
    left = each * pairs * handed if divide or own <= 32 else 0
    rows = (16 if kernel in _OF_KEYS else 8) * streamed  # lse, delta, ids
    resident = own * sum(kept) * itemsize
    if kernel == "dbias":
        resident = own * sum(heads) * itemsize
        rows += 8 * own
        ahead = (own + streamed) * sum(heads) * itemsize + pairs * pair_bytes + rows
        more = 4 * pairs + (keys if itemsize > 2 else 0) + rows
        need = max(resident + more, (stages - 1) * ahead)
    elif stages > 1:
        if itemsize > 2 and kernel == "dkv" and own <= 32:  # half stays in registers
            resident, left = resident / 2, 0
        ahead = keys + values + pairs * pair_bytes + rows
        need = resident + (stages - 1) * ahead + left
    elif itemsize > 2:  # a tile at a time; of left operands there are three pieces
        pieces = 6 if itemsize == SPLIT_ITEMSIZE else itemsize
        need = (resident * pieces + 4 * max(keys, values)) / itemsize + rows
    else:  # in the order of products, and of heads in pieces a piece
        of_kernel = {
            "forward": max(keys, values + left),
            "dv": max(keys, values + left),
            "dkv": keys + values + max(keys, values),  # one is also wanted transposed
        }
        in_pieces = all(len(tables.pieces(head)) > 1 for head in heads)
        both = keys + (pairs * itemsize if in_pieces else values)
        need = resident + rows + of_kernel.get(kernel, max(both, keys + left))
    # A sum, in float32, passes through it on its way out.
    return math.ceil(max(need, own * max((x[0] for x in summed), default=0) * 4))


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
        columns += sum(_heads_of_tiles(kernel, heads)[0])
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
    first = sum(tables.pieces(n)[0] for n in _heads_of_tiles(kernel, heads)[1])
    return (blocks.num_stages - 1) * streamed * first * itemsize


def fits(
    kernel: str,
    blocks: Blocks,
    heads: tuple[int, int],
    itemsize: float,
    pair_bytes: int = 0,
    *,
    gpu: Gpu,
    dropout: bool = False,
) -> bool:
    """Whether a kernel surely has room on a GPU; arguments as for `choose`."""
    sizes = kernel, blocks, heads, itemsize
    more = {"dropout": dropout, "products": gpu.family.products}
    if shared_memory(*sizes, pair_bytes, **more) > gpu.shared_memory:
        return False
    return not gpu.tensor_memory or tensor_memory(*sizes) <= gpu.tensor_memory


@functools.cache
def _table(gpu: Gpu) -> dict[str, dict[str, dict[str, Blocks]]]:
    """The blocks that serve a GPU, by kernel, padded head size and regime.

    Warns of those in its own table that do not fit it.

    Raises:
      ValueError: if a field of the table is wrong.
    """
    found = {}
    for kernel, heads in tables.table("triton", gpu.kind, gpu.family).items():
        if kernel not in KERNELS:
            raise _wrong(gpu, kernel, f"no such kernel, of {', '.join(KERNELS)}")
        found[kernel] = {
            head: _regimes(gpu, kernel, head, regimes)
            for head, regimes in heads.items()
        }
    return found


def _regimes(gpu: Gpu, kernel: str, head: str, regimes) -> dict[str, Blocks]:
    """Of a table that serves a GPU, the blocks of a kernel for heads of a size."""
    field, found = f"{kernel}, {head}", {}
    if head not in map(str, tables.HEADS):
        raise _wrong(gpu, field, f"no such head size, of {tables.HEADS}")
    for regime, numbers in regimes.items():
        field = f"{kernel}, {head}, {regime}"
        if regime not in tables.REGIMES:
            raise _wrong(gpu, field, f"no such regime, of {', '.join(tables.REGIMES)}")
        try:
            blocks = found[regime] = Blocks(*numbers)
        except (TypeError, ValueError) as error:
            raise _wrong(gpu, field, f"{numbers!r}: {error}") from None
        if odd := no_power_of_two(blocks):
            raise _wrong(gpu, field, f"{odd} is no power of two")
        size = ITEMSIZES.get(regime, 2)
        is_own = tables.serving("triton", gpu.kind) == gpu.kind
        heads = int(head), int(head)
        if is_own and not fits(kernel, blocks, heads, size, gpu=gpu):
            text = f"{numbers!r} may need more memory than it has; others are taken"
            warnings.warn(str(_wrong(gpu, field, text)), stacklevel=2)
    if "plain" not in found:
        raise _wrong(gpu, f"{kernel}, {head}", "no blocks for 'plain'")
    return found


def _wrong(gpu: Gpu, field: str, why: str) -> ValueError:
    path = tables.table_path("triton", tables.serving("triton", gpu.kind, gpu.family))
    return ValueError(f"{path}, of blocks for {gpu.kind}: {field}: {why}")


def _candidates(
    kernel: str,
    heads: tuple[int, int],
    itemsize: float,
    gpu: Gpu,
    regime: str = "plain",
) -> list[Blocks]:
    """From the fastest on, each with fewer stages too; the last needs least."""
    size = min(max(heads), tables.HEADS[-1])  # latent keys are larger
    head, like = str(tables.bucket(size)), LIKE.get(kernel, kernel)
    tuned = _table(gpu).get(like, {}).get(head)
    if tuned is None:
        raise _wrong(gpu, f"{like}, {head}", "no blocks")
    own = user_tables.read("triton", gpu.kind)["blocks"].get(like, {}).get(head, {})
    tuned = tuned | {name: Blocks(*numbers) for name, numbers in own.items()}
    smaller = tables.table("triton", _SMALLER)[like]
    smaller = next(blocks for n, blocks in smaller.items() if size <= int(n))
    regime = {x: name for name, x in ITEMSIZES.items()}.get(itemsize, regime)
    # What was chosen for elements of two bytes is too large for others.
    names = tables.in_order(regime) if itemsize == 2 else [regime]
    found = []
    for blocks in (tuned[name] for name in names if name in tuned):
        fewer = range(blocks.num_stages, min(blocks.num_stages, 2) - 1, -1)
        found += [dataclasses.replace(blocks, num_stages=n) for n in fewer]
    smaller = [Blocks(*blocks) for blocks in smaller]
    if regime == _ANY_CALL:
        # A program has two outputs of float32: of a part of the keys, of those before.
        wide = size > 64
        return [dataclasses.replace(x, num_warps=8) if wide else x for x in smaller]
    if kernel == like:
        return found + smaller
    in_pieces = itemsize == SPLIT_ITEMSIZE
    crowded = in_pieces or (gpu.tensor_memory and size > _LARGEST_SUMMED)
    return tangent_blocks.of(found, smaller, crowded=bool(crowded))


def smallest(kernel: str, heads: tuple[int, int], itemsize: float, gpu: Gpu) -> int:
    """Bytes of shared memory below which a kernel cannot run with these heads.

    Args:
      kernel, heads, itemsize, gpu: as for `choose`.
    """
    blocks = _candidates(kernel, heads, itemsize, gpu)[-1]
    products = gpu.family.products
    return shared_memory(kernel, blocks, heads, itemsize, products=products)


def choose(
    kernel: str,
    config: Config | None,
    *,
    rows: tuple[int, int],
    heads: tuple[int, int],
    itemsize: float,
    gpu: Gpu,
    pair_bytes: int = 0,
    dropout: bool = False,
    regime: str = "plain",
) -> Blocks:
    """Blocks for one kernel: the caller's, or the first candidate that fits.

    Args:
      kernel: one of `KERNELS`, or of those in `LIKE`.
      config: the caller's configuration.
      rows: query and key rows; blocks are not larger than these need.
      heads: padded head sizes of key and value.
      itemsize: bytes of an element, or `SPLIT_ITEMSIZE`.
      gpu: the GPU, with `smallest` bytes of shared memory at least.
      pair_bytes: bytes of bias and mask for each pair of query and key.
      dropout: whether bits are made for each pair.
      regime: of a call with elements of two bytes, one of `tables.REGIMES`.

    The blocks of an invariant forward (`Config.invariant`) follow from `heads`,
    `itemsize`, `gpu` and what there is for each pair alone.

    Raises:
      ValueError: if no candidate is known to fit, or the GPU's table is wrong.
    """
    chosen = None if config is None else config.blocks(kernel)
    if chosen is not None:
        return chosen
    if kernel == "forward" and config is not None and config.invariant:
        # One tile for all calls of such heads: rows beyond a call's are padding.
        regime, rows = _ANY_CALL, (tables.FEW_ROWS, tables.FEW_ROWS)
    for blocks in _candidates(kernel, heads, itemsize, gpu, regime):
        more = {"gpu": gpu, "dropout": dropout}
        if fits(kernel, blocks, heads, itemsize, pair_bytes, **more):
            return dataclasses.replace(
                blocks,
                block_q=min(blocks.block_q, padded(rows[0])),
                block_kv=min(blocks.block_kv, padded(rows[1])),
            )
    raise ValueError(
        f"implementation='triton': no blocks of {kernel} for head sizes {heads} fit "
        f"{gpu.shared_memory >> 10} KiB of shared memory"
    )


def _unfit(kernel: str, size: int, regime: str, blocks: Blocks) -> str | None:
    """Why a kernel cannot have blocks of a user's table, or None."""
    if odd := no_power_of_two(blocks):
        return f"{odd} is no power of two"
    head = TUNED_SIZES.get(size, size)
    gpu, itemsize = device.gpu(), ITEMSIZES.get(regime, 2)
    room = {"gpu": gpu, "dropout": regime == "dropout"}
    if fits(kernel, blocks, (head, head), itemsize, **room):
        return None
    return f"{blocks} does not fit {gpu.shared_memory >> 10} KiB of shared memory"


user_tables.KNOWN["triton"] = user_tables.Known(
    sizes=dict.fromkeys(KERNELS, tables.HEADS),
    regimes=dict.fromkeys(KERNELS, tables.REGIMES),
    conditions=(),
    unfit=_unfit,
)
