"""How much shared and tensor memory the Triton kernels need, at most.

From what the compilers of supported versions of JAX took, on GPUs of each family.
"""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels import tables
from pallas_kernels.configs import Blocks

# Bytes, at most, that an element of float32 took of some 30 configurations whose
# products are made of three pieces in bfloat16 (`support.product_precision`).
SPLIT_ITEMSIZE = 5.5
# As much, of some five whose products are float32's own, without tensor cores: in
# "highest", where three pieces do not fit.
OWN_ITEMSIZE = 4.0625
# Bytes of the three pieces of an element, each in bfloat16.
_IN_PIECES = 6

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
    "tangent": (0, (1,), 3, 2),
}
# There, bytes of barriers and padding; 8 warps also share maxima and sums of rows.
_BESIDE_SCORES = 256
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


def _uses_wgmma(kernel: str, blocks: Blocks) -> bool:
    """Whether a kernel's products are `wgmma`, on a GPU that has it.

    A group of 4 warps takes 64 rows; others run as on GPUs without it.
    """
    return _rows(kernel, blocks)[0] >= 64 and blocks.num_warps >= 4


def shared_memory(
    kernel: str,
    blocks: Blocks,
    heads: tuple[int, int],
    itemsize: float,
    pair_bytes: int = 0,
    *,
    products: str = "wgmma",
    has_bits: bool = False,
    looped: str = "s",
) -> int:
    """Shared memory in bytes that a kernel's tiles need at most.

    Never less than what the Triton of JAX 0.11 or 0.12 took of some 1,900 kernels that
    were compiled, and at most 1.3 times that (tests/triton/test_estimates.py).

    Args:
      kernel: one of `KERNELS`, or of those in `LIKE`.
      blocks: the blocks.
      heads: padded head sizes of key and value.
      itemsize: bytes of an element, `SPLIT_ITEMSIZE` or `OWN_ITEMSIZE`.
      pair_bytes: bytes loaded for each pair of query and key (bias, mask).
      products: of the family of the GPU (`device.Family`).
      has_bits: whether random bits are made for each pair.
      looped: the axis whose blocks a program of "dbias" loops over, "s" (in a tile) or
        "t"; "e" for diagonals, of square tiles.
    """
    if looped == "e":
        rows = min(blocks.block_q, blocks.block_kv)
        blocks = dataclasses.replace(blocks, block_q=rows, block_kv=rows)
    pair_bytes *= 2 if kernel == "tangent" else 1  # a bias is beside its tangent
    sizes = kernel, blocks, heads, itemsize, pair_bytes
    is_wgmma = False
    if itemsize != OWN_ITEMSIZE:
        if products == "tcgen05" and uses_tensor_memory(kernel, blocks):
            return math.ceil(_of_tcgen05(*sizes, has_bits))
        is_wgmma = products == "wgmma" and _uses_wgmma(kernel, blocks)
    if kernel == "dbias":
        return math.ceil(_of_scores(*sizes[1:], has_bits, looped, is_wgmma))
    if is_wgmma:
        return math.ceil(_of_wgmma(*sizes))
    return math.ceil(_of_mma_sync(*sizes, 1 + has_bits))  # its scores, and the bits


def _bytes(itemsize: float) -> tuple[float, float]:
    """Bytes of an element as it is loaded, and as a product reads it."""
    return (4, _IN_PIECES) if itemsize == SPLIT_ITEMSIZE else (itemsize, itemsize)


def _widest_part(heads: tuple[int, int]) -> int:
    """Elements of the largest block that a head is divided into."""
    return max(tables.pieces(head)[0] for head in heads)


def _passing(pair_bytes: int) -> int:
    """Bytes of each pair that change their layout at once: beside a mask not all do."""
    return pair_bytes // 2 if pair_bytes in (3, 5) else min(pair_bytes, 4)


def _of_wgmma(
    kernel: str,
    blocks: Blocks,
    heads: tuple[int, int],
    itemsize: float,
    pair_bytes: int,
) -> float:
    """`shared_memory` where products are `wgmma`.

    They run beside the loop, and what they read stays for a round: of what is loaded
    there is a buffer for each stage. Float32 passes through registers, where it is made
    what a product reads: there is a buffer less, and a tile, of keys or of pairs.
    """
    stages, (width, read) = blocks.num_stages, _bytes(itemsize)
    own, streamed = _rows(kernel, blocks)
    left, loaded = _heads_of_tiles(kernel, heads)
    pairs = blocks.block_q * blocks.block_kv
    resident = own * sum(left[: max(0, len(left) - blocks.left_in_registers)]) * read
    every = streamed * sum(loaded) * width
    ahead = every + pairs * pair_bytes
    # A tile of pairs passes to the layout of a product, if it is not loaded ahead.
    passing = pairs * _passing(pair_bytes) if stages == 1 else 0
    if itemsize > 2:
        most = max(heads) if read == width else _widest_part(heads)
        last = max(streamed * most * read, passing)
    elif stages == 1 and not _PRODUCTS[kernel][0]:
        last = every / 2  # values in place of keys
    else:
        last = every + (passing if kernel == "dq" else 0)
    need = resident + last + (stages - 1) * ahead
    # A sum, in float32, passes on its way out; q may still be there.
    holds = kernel == "forward" and (stages > 1 or itemsize > 2 or max(heads) > 64)
    held = resident if holds else 0
    need = max(need, own * max(heads) * 4 + held + (stages - 1) * pairs * pair_bytes)
    if kernel == "tangent" and own < 16 * blocks.num_warps:
        need += 512 * blocks.num_warps  # two warps share the sums of a row
    return need + 8 * stages * streamed


def _of_scores(
    blocks: Blocks,
    heads: tuple[int, int],
    itemsize: float,
    pair_bytes: int,
    has_bits: bool,
    looped: str,
    is_wgmma: bool,
) -> float:
    """`shared_memory` of "dbias" without tensor memory.

    Of the two operands that have the axis of its loop (k and v, or q and do) there are
    as many buffers as other kernels have of what they load; the other two stay. A tile
    of pairs is not loaded ahead, for no product reads it: it changes its layout.
    """
    stages, (width, read) = blocks.num_stages, _bytes(itemsize)
    of_keys, is_split = looped != "t", itemsize == SPLIT_ITEMSIZE
    own, streamed = blocks.block_q, blocks.block_kv
    if not of_keys:
        own, streamed = streamed, own
    # What passes through registers, or is there for one product alone: all or a part.
    most = max(heads) if itemsize == 2 else _widest_part(heads)
    tile = streamed * most * width
    if is_wgmma and of_keys and (itemsize > 2 or stages == 1):
        tile *= read / width
    elif stages > 1 and not is_split:
        tile = 0
    elif of_keys and not is_split:  # as much as warps load at once, or 8 rows of each
        columns = blocks.num_warps if own < streamed else 1
        tile = min(tile, max(512 * blocks.num_warps, 8 * columns * most * width))
    rounds = stages - (itemsize > 2 or not is_wgmma)
    ahead = rounds * streamed * sum(heads) * width if stages > 1 else 0
    passing, first = _passing_of_scores(blocks, heads, itemsize, pair_bytes)
    # Where warps divide keys, too, bits pass as well.
    pairs, rows = blocks.block_q * blocks.block_kv, 16 * blocks.num_warps
    if is_wgmma and pair_bytes != 4:  # of two bytes, as many columns as rows at once
        passing = min(passing, 2 * rows * rows)
    if is_wgmma and has_bits and stages == 1 and blocks.block_q < rows:
        passing = max(passing, pairs * 2)
    elif blocks.block_q < blocks.block_kv and not is_wgmma:
        passing, first = pairs * 4 if has_bits else min(passing, 8 << 10), 0
    need = own * sum(heads) * read + ahead + max(tile, passing) + 8 * streamed
    return max(need, first) if stages == 1 else need


def _passing_of_scores(
    blocks: Blocks, heads: tuple[int, int], itemsize: float, pair_bytes: int
) -> tuple[int, int]:
    """Bytes of pairs that change their layout in "dbias", at once and at the start.

    At once are as many rows as warps have. A bias in float32 is loaded as keys of two
    bytes are, if a block of them has its shape, and half of it passes then.
    """
    pairs, rows = blocks.block_q * blocks.block_kv, 16 * blocks.num_warps
    at_once = min(pairs, rows * max(blocks.block_kv, *heads))
    each = _passing(pair_bytes)
    if itemsize == 2 and any(blocks.block_kv in tables.pieces(n) for n in heads):
        each = min(each, 2)
    added = pairs * min(pair_bytes // 2 * 2, 4)
    return max(at_once * each, min(added, 2 << 10)), added


def _of_tcgen05(
    kernel: str,
    blocks: Blocks,
    heads: tuple[int, int],
    itemsize: float,
    pair_bytes: int,
    has_bits: bool,
) -> float:
    """`shared_memory` where products are `tcgen05`, of what does not lie beside it.

    Products run beside the loop: the second reader of a block holds it for one round
    more. In float32 left operands lie in tensor memory; its three pieces do not, and
    are made of a tile at a time, as for `wgmma`.
    """
    stages, (width, read) = blocks.num_stages, _bytes(itemsize)
    own, streamed = _rows(kernel, blocks)
    left, loaded = _heads_of_tiles(kernel, heads)
    pairs, owns_keys = blocks.block_q * blocks.block_kv, kernel in _OF_KEYS
    again = streamed * sum(heads[: _PRODUCTS[kernel][0]]) * width
    tile, every = streamed * _widest_part(heads) * read, streamed * sum(loaded) * width
    need, ahead = own * sum(left) * read, (stages - 1) * pairs * pair_bytes
    bits = max(pairs, 32 * 32 * blocks.num_warps)  # in bytes, 32 or more a thread
    # Of a head in pieces there is a buffer less.
    several = sum(n * (stages - (len(tables.pieces(n)) > 1)) for n in heads)
    if kernel == "dbias":  # a tile of pairs changes its layout
        every, ahead = (own + streamed) * sum(heads) * width, 0
        first = -(-own // 128) * bits if has_bits or pair_bytes >= 4 else 0
        if itemsize > 2:
            need = max((stages - 1) * every + tile, first)
        elif stages == 1:  # two of four in turn
            need = max((own + streamed) * max(heads) * width, first)
        else:
            need = (own + streamed) * several * width
            if pair_bytes:  # a bias of two bytes passes as it is
                ahead = pairs * pair_bytes if pair_bytes in (2, 3) else bits
    elif itemsize == SPLIT_ITEMSIZE:
        need += (stages - 1) * every + tile
    elif itemsize == 4:
        need = stages * every if stages > 1 else every / len(loaded)
        need += tile if kernel == "dkv" and stages > 1 else 0  # also wanted transposed
        if kernel == "tangent" and stages == 1:
            need += own * _widest_part(heads)
    elif stages == 1:
        need += every + pairs * min(pair_bytes, 1) if again else every / 2
    elif again:
        need += streamed * several * width + again
    else:
        need += stages * every
    # What is made of pairs in other layouts passes through it, too.
    if kernel != "dbias" or (stages > 1 and itemsize == 2):
        need += has_bits * bits * (1 + owns_keys)
    ahead += (8 if owns_keys else 4) * stages * streamed  # what queries or keys have
    if kernel == "dbias":
        return need + ahead + _BESIDE_SCORES
    has_sums = blocks.num_warps == 8 and not owns_keys
    return need + ahead + (_BESIDE_8_WARPS if has_sums else _BESIDE)


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
    pairs that warps hand to each other where they divide columns of a product. The
    Triton of JAX 0.10 and 0.11 takes more for float32 than that of 0.12: its numbers.
    """
    pairs, stages = blocks.block_q * blocks.block_kv, blocks.num_stages
    own, streamed = _rows(kernel, blocks)
    kept, loaded = _heads_of_tiles(kernel, heads)
    halves = loaded[: len(loaded) // 2], loaded[len(loaded) // 2 :]
    is_split = itemsize == SPLIT_ITEMSIZE
    width = min(itemsize, 4)  # of what is loaded
    keys, values = (streamed * sum(half) * width for half in halves)
    summed = [tables.pieces(heads[i]) for i in _PRODUCTS[kernel][1]]
    divide = own <= 64 and any(x[0] >= 128 and len(x) == 1 for x in summed)
    each = 4 if own <= 16 else min(itemsize, 4)
    if is_split and own <= 32:
        each = _IN_PIECES
    left = each * pairs * handed if divide or own <= 32 or is_split else 0
    rows = (16 if kernel in _OF_KEYS else 8) * streamed  # lse, delta, ids
    resident = own * sum(kept) * width
    if stages > 1:
        if kernel == "dkv" and width > 2:
            if is_split:  # kept as it is loaded, not in pieces
                left += streamed * heads[0] * width if own > streamed else 0
            elif own <= 32:  # half stays in registers
                resident, left = resident / 2, 0
        elif is_split:
            resident *= _IN_PIECES / width
            if kernel in ("forward", "dv"):  # values, in registers and there
                left = left + values if own <= 32 else max(left, values)
        if kernel == "tangent" and width > 2:  # two products read keys
            again = streamed * heads[0] * (_IN_PIECES if is_split else width)
            left = max(left, again) + (2 * pairs if is_split else 0)
        ahead = keys + values + pairs * pair_bytes + rows
        need = resident + (stages - 1) * ahead + left
    elif is_split:  # a tile at a time
        tile = streamed * max(loaded) * width
        need = resident * _IN_PIECES / width + tile + left + rows
    elif itemsize == OWN_ITEMSIZE:  # keys and values; of tangents in turn, with pairs
        in_turn = max(keys, values) + 8 * pairs
        need = resident + rows + (in_turn if kernel == "tangent" else keys + values)
    elif itemsize > 2:  # a tile at a time
        need = resident + streamed * max(loaded) * width + rows
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


def room_on_hopper(
    kernel: str,
    blocks: Blocks,
    heads: tuple[int, int],
    itemsize: float,
    pair_bytes: int = 0,
) -> int:
    """Shared memory that blocks must find on Hopper to be chosen, whatever they need.

    For float32, and for the gradient of what is added to scores: as if all that a loop
    loads had a buffer for each stage. What was chosen there before has that room, and
    what fits without it has more stages or rows: a GPU has yet to time that
    (benchmarks/lab/097-blocks-by-family.md). 0 for all others.
    """
    if itemsize <= 2 and kernel != "dbias":
        return 0
    itemsize = 4 if itemsize == OWN_ITEMSIZE else itemsize
    pairs, stages = blocks.block_q * blocks.block_kv, blocks.num_stages
    own, streamed = _rows(kernel, blocks)
    left, loaded = _heads_of_tiles(kernel, heads)
    if kernel == "dbias":
        elements = stages * (own + streamed) * sum(loaded)
        return int(elements * itemsize) + (stages - 1) * pairs * pair_bytes
    owns_keys = kernel in _OF_KEYS
    rounds = max(stages, 1.5) if owns_keys else stages
    elements = own * sum(left) + rounds * streamed * sum(loaded)
    pair_bytes *= (stages - 1) * (2 if kernel == "tangent" else 1)
    pair_bytes += 4 if owns_keys and itemsize == 4 else 0
    return int(elements * itemsize) + pairs * pair_bytes + 8 * stages * streamed


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
    elif itemsize in (4, OWN_ITEMSIZE):
        columns += sum(_heads_of_tiles(kernel, heads)[0])
    return -(-own // 128) * columns


def least_shared_memory(
    kernel: str, blocks: Blocks, heads: tuple[int, int], itemsize: float
) -> int:
    """Shared memory in bytes that a kernel surely takes, on any GPU; 0: not known.

    All stages but one of what its loop loads are there at once, if head sizes are
    multiples of 16 (other rows may not be loaded ahead).
    """
    if itemsize != 2 or kernel == "dbias":  # some of it may not pass through it
        return 0
    _, streamed = _rows(kernel, blocks)
    first = sum(tables.pieces(n)[0] for n in _heads_of_tiles(kernel, heads)[1])
    return (blocks.num_stages - 1) * streamed * first * 2
