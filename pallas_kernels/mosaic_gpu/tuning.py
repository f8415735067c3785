"""Blocks of the Mosaic GPU kernels, and which calls they serve faster than others.

Measured on NVIDIA H200s, 2026-11-24 (benchmarks/lab/067-mosaic-gpu-backward.md,
068-several-tiles-a-program.md, 070-features-of-pairs-on-hopper.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pallas_kernels import device
from pallas_kernels.backend import Call
from pallas_kernels.configs import Blocks
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.core.visits import size_of_counts
from pallas_kernels.mosaic_gpu import memory

# Query rows of a warpgroup's products: a block of them for each warpgroup.
ROWS = 64
# Registers of a thread that loads or adds, and of one that computes, by how many
# warpgroups compute.
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}

# By the largest head size that they are for: of many keys, and of few.
_FORWARD = {
    64: (Blocks(192, 128, 12, 4), Blocks(128, 128, 8, 2)),
    128: (Blocks(128, 128, 8, 2), Blocks(128, 128, 8, 2)),
    256: (Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2)),
}
_MANY_KEYS = 1024


def choose(heads: tuple[int, int], keys: int, spec: AttentionSpec) -> Blocks:
    """Blocks of the forward kernel.

    Args:
      heads: sizes of a head of key and value.
      keys: how many a query looks at, about.
      spec: of the call.
    """
    many, few = next(x for size, x in _FORWARD.items() if max(heads) <= size)
    # With three warpgroups these spill 150 to 450 bytes (JAX 0.11.2, ptxas 13.0).
    has_operands = any(term.operands for term in spec.score.terms)
    wants_registers = spec.traits.is_sparse or spec.dropout is not None or has_operands
    return many if keys >= _MANY_KEYS and not wants_registers else few


# Keys, about, that a query looks at, from which on these kernels are faster, forward
# and backward, by the largest head size: a program's start and end are then little of
# its time. Timed at heads of 32, 40, 48, 64, 80, 96, 128, 160 and 256 (NVIDIA H100,
# 2026-11-25: 068-several-tiles-a-program.md, 081-short-rows-on-hopper.md).
_FEWEST_KEYS = {
    32: (1024, 1024),
    63: (64, 192),
    95: (64, 1024),
    128: (256, 256),
    256: (256, 512),
}
# Of biases with an element for each pair, and backward where their gradient is made
# here: 16 x 512, 16 x 64 with it take 0.88 of the time (0.91 causal); heads of 128 have
# not been timed (NVIDIA H100, 2026-11-26: 086-the-gradient-of-a-bias-on-hopper.md).
_FEWEST_OF_BIASES = (128, 1024)
_FEWEST_OF_GRADIENTS = 256
_FEWEST_OF_WINDOWS = 450
# Of packed documents, with heads of more than 95. They run at 1.00 to 1.20 times
# Triton's speed as documents have 250 to 2000 rows on average, heads of 64 at 0.86 to
# 1.04 times (NVIDIA H100, 2026-11-27: 089-tiles-that-programs-take.md).
_FEWEST_OF_DOCUMENTS = 1024
_FEWEST_OF_MASKS = 512  # of pairs, and dropout
# Of causal key lengths with heads of 96 to 128, forward and backward. Of Triton's time
# 32 x 512, 16 x 128 takes 0.79 forward, 0.98 with both passes (NVIDIA H100, 2026-11-27:
# 089-tiles-that-programs-take.md).
_FEWEST_OF_LENGTHS = (256, 1024)
# Of other key lengths, masks of keys, and biases of four bytes; beside small heads of
# windows, masks and dropout.
_FEWEST_OF_OTHERS = 1024
# Beside heads of 64 to 95: both passes are 1.04 to 1.15 times as fast, the forward 0.94
# to 1.09 times (NVIDIA H100, 2026-11-26: 081-short-rows-on-hopper.md).
_FEWEST_OF_CAUSAL = 512
# Where operands are copied because TMA cannot read them as they are. Not timed between
# 2047, where Triton is 1.34 times as fast at heads of 80, and 4095, where it is not at
# 128 (the same GPU: 081-short-rows-on-hopper.md).
_FEWEST_OF_COPIES = 3072
# Query rows: those of a block. Fewer leave warpgroups without work; the Triton kernels
# then have smaller blocks, take the heads of a group as rows and divide the keys.
_FEWEST_ROWS = 128
# Programs for each multiprocessor, at least. Reckoned, not measured.
_ENOUGH = 0.8


def _has_wide_bias(spec: AttentionSpec) -> bool:
    return any(x.dtype.itemsize > 2 for x in spec.score.pair_operands.values())


def _is_causal_with_lengths(spec: AttentionSpec) -> bool:
    """Whether a call has these and nothing else."""
    traits = spec.traits
    is_causal = traits.cost_grows and not traits.is_windowed
    by_length = all(not any(x.limits) or x.limits.key for x in spec.masks)
    by_length = by_length and bool(spec.limits("key")) and spec.meets_exactly
    others = *spec.score.terms, spec.dropout, spec.offset
    return is_causal and by_length and all(x is None for x in others)


def _fewest_keys(call: Call) -> tuple[int, int]:
    """Of `_FEWEST_KEYS`, for the forward and the backward of a call."""
    spec, largest = call.spec, max(call.head_sizes)
    if _has_wide_bias(spec):
        forward = backward = _FEWEST_OF_OTHERS
    elif spec.score.pair_operands:
        forward, backward = _FEWEST_OF_BIASES
        if no_dbias(call) is None:
            backward = _FEWEST_OF_GRADIENTS
    else:
        found = (x for size, x in _FEWEST_KEYS.items() if largest <= size)
        forward, backward = next(found)
    least = [_FEWEST_OF_WINDOWS] if spec.traits.is_windowed else [0]
    if spec.has_mask_of_pairs or spec.dropout is not None:
        least.append(_FEWEST_OF_MASKS if largest > 95 else _FEWEST_OF_OTHERS)
    sorted_and_plain = spec.traits.cost_grows and not spec.score.pair_operands
    if sorted_and_plain and 63 < largest <= 95:
        causal = not spec.traits.is_windowed
        forward = backward = _FEWEST_OF_CAUSAL if causal else _FEWEST_OF_OTHERS
    if not (spec.cost_is_monotone or spec.has_mask_of_pairs):
        measured = _is_causal_with_lengths(spec) and 95 < largest <= 128
        of_lengths = _FEWEST_OF_LENGTHS if measured else (_FEWEST_OF_OTHERS,) * 2
        forward, backward = map(max, of_lengths, (forward, backward))
    return max(forward, *least), max(backward, *least)


def slower(call: Call, programs: float, copied: bool) -> str | None:
    """Why the next backend is faster for a call, or None.

    Args:
      programs: for each multiprocessor.
      copied: whether operands must be, for these kernels.
    """
    spec, largest = call.spec, max(call.head_sizes)
    keys = spec.mean_keys(call.size["s"])
    if spec.traits.is_sparse and (largest <= 95 or keys < _FEWEST_OF_DOCUMENTS):
        return "most blocks of keys may be skipped"
    if _has_wide_bias(spec) and largest <= 64:
        return "a float32 bias for each pair takes long to load beside small heads"
    if call.size["t"] < _FEWEST_ROWS:
        return f"blocks have {_FEWEST_ROWS} query rows, and the call {call.size['t']}"
    if keys < _fewest_keys(call)[0]:
        return f"about {keys} keys for a query are few"
    if copied and keys < _FEWEST_OF_COPIES:
        return (
            f"about {keys} keys for a query are few where operands are copied, since "
            "TMA cannot read rows or heads of such sizes as they are"
        )
    if programs < _ENOUGH:
        return "it has few blocks of queries, and their keys are not divided"
    return None


def slower_backward(call: Call) -> str | None:
    """Why the gradients are made faster by the next backend, or None.

    A program goes through the queries of its keys: many of these will do, too.
    """
    t, s = call.size["t"], call.size["s"]
    keys = call.spec.mean_keys(s)
    _, fewest = _fewest_keys(call)
    if keys * max(t, s) < fewest * max(s, 1):
        return f"about {keys} keys for a query are few"
    return None


# Of the backward kernel, by the width of its tiles of heads.
_BACKWARD = {64: Blocks(128, 128, 8, 2), 128: Blocks(64, 128, 8, 2)}
# Of gradients in kernels of their own, for heads of up to 256.
DQ_APART, DKV_APART = Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2)
# Of gradients of a bias: places for rows are as wide as heads. Fewer places take 1.01
# to 1.16 times the time, six at heads of 64 no less (086, the same GPU).
_DBIAS = {64: Blocks(128, 128, 8, 4), 128: Blocks(128, 128, 8, 3)}
# Part of a tile, at least, that a head must fill: products with the rest are lost.
# Heads of 80 are 1.07 times as fast as Triton's (NVIDIA H200, 2026-11-24, 4 x 2048,
# 32 x 80 causal: 067-mosaic-gpu-backward.md); heads of less have not been timed.
_FILLED = 0.62


def head_tiles(size: Mapping[str, int]) -> dict[str, int]:
    """Widths of the tiles of heads in the backward kernels, of keys and of values."""
    largest = max(size["h"], size["d"])
    if largest <= 128:
        return dict.fromkeys("hd", 64 if largest <= 64 else 128)
    d = 32 if makes_dq_apart(size) else 16
    return {"h": _multiple(size["h"], 32), "d": _multiple(size["d"], d)}


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def makes_dq_apart(size: Mapping[str, int]) -> bool:
    """Whether the gradients of a head are too many registers for one kernel."""
    h, d = _multiple(size["h"], 32), _multiple(size["d"], 16)
    return max(h, d) > 192 or h + d > 320


def computes_ahead(width: Mapping[str, int]) -> bool:
    """Whether there is room for products of the next queries, and what pairs have.

    Room in registers and in shared memory.
    """
    return max(width.values()) <= 128


def waits_early(width: Mapping[str, int], spec: AttentionSpec) -> bool:
    """Whether registers suffice for all exponents of a tile before dp is there.

    Not with dropout beside heads of 64: 204 bytes are spilled, and gradients take 6.4
    ms in place of 4.3 (NVIDIA H100: 075-what-the-kernels-for-hopper-wait-for.md).
    """
    narrow = max(width.values()) <= 64
    return computes_ahead(width) and not (narrow and spec.dropout is not None)


def warps_that_add(width: Mapping[str, int]) -> int:
    """Of the backward kernel. Two have twice the time for each block of dq.

    At heads of 128 gradients are 1.06 to 1.10 times as fast with two, at heads of 64
    0.93 to 1.01 times (NVIDIA H100: 075-what-the-kernels-for-hopper-wait-for.md).
    """
    return 2 if 64 < max(width.values()) <= 128 else 1


# Blocks of keys that a document is taken to have: how long it is, no choice can see.
# Measured, for windows, too (NVIDIA H100: 071-heads-side-by-side-backward.md). Windows
# of a part of the rows took 1.4 times as long so: programs that do not keep step read
# more than the cache holds.
_BLOCKS_OF_A_DOCUMENT = 16


def blocks_alike(spec: AttentionSpec) -> int | None:
    """How many blocks of keys in succession may meet the same queries; None for all."""
    traits = spec.traits
    is_short = spec.has_all_rows if traits.is_windowed else traits.is_sparse
    return _BLOCKS_OF_A_DOCUMENT if is_short else None


# An addition to dq and the news of it take so much of a tile's time (NVIDIA H200, H100:
# 071-heads-side-by-side-backward.md).
_OF_A_TILE = 0.65
# Part of the time that may pass before all programs have had their first turn.
_UNTIL_ALL_ADD = 0.05
# Sums are read once more: of few rows that takes as long as they save. So there are no
# more than one for so many rows (NVIDIA H100: 082-sums-of-dq-on-hopper.md).
_ROWS_OF_A_SUM = 2048
_MOST_SUMS = 4


def sums_of_dq(spec: AttentionSpec, layout: memory.Layout) -> int:
    """How many sums of dq the backward kernel makes, so that programs wait less.

    All programs of a head that start together begin with the same block of queries: the
    last of n waits for n - 1 additions. In a call of many heads that happens once in a
    long time. Each sum is as large as dq, in float32, but then there are few heads.

    Args:
      layout: of the kernel.
    """
    if not spec.meets_exactly:  # how much there is to do is not known
        return 1
    part = spec.mean_keys(layout.size["s"]) / max(layout.size["s"], 1)
    queries = -(-layout.size["t"] // layout.rows["t"])
    heads = layout.elements / math.prod(layout.parts.values())
    programs = max(1.0, layout.tiles / device.multiprocessors())
    tiles = programs * heads * queries * part  # of a multiprocessor
    until = _OF_A_TILE * (layout.in_turn - 1) / max(tiles, 1.0)
    sums = 1
    while sums < _MOST_SUMS and until > sums * _UNTIL_ALL_ADD:
        if 2 * sums * _ROWS_OF_A_SUM > layout.size["t"]:
            break
        sums *= 2
    return sums


def of_backward(heads: tuple[int, int]) -> Blocks | None:
    """Blocks of the backward kernel; None of heads that do not fit it, or not well.

    Of `dkv`, where it has a kernel of its own.
    """
    size = dict(zip("hd", heads, strict=True))
    width = head_tiles(size)
    if not computes_ahead(width):
        return DKV_APART if makes_dq_apart(size) else _BACKWARD[128]
    fits = sum(heads) >= _FILLED * sum(width.values())
    return _BACKWARD[max(width.values())] if fits else None


def of_dbias(size: Mapping[str, int]) -> Blocks | None:
    """Blocks of the kernel for a bias's gradient; None where heads do not fit it."""
    width = head_tiles(size)
    fits = size["h"] == size["d"] and computes_ahead(width)
    return _DBIAS[max(width.values())] if fits else None


def no_dbias(call: Call) -> str | None:
    """Why there is no kernel for the gradients of the score's operands, or None."""
    score = call.spec.score
    if len(score.operands) != 1 or not score.pair_operands:
        return "there is a kernel only for one operand, with an element for each pair"
    if call.config is not None and call.config.dbias:
        return "the blocks of `Config` are those of its kernels"
    blocks = of_dbias(call.size)
    if blocks is None:
        return f"there is no kernel for a bias with head sizes {call.head_sizes}"
    if odd := call.spec.odd_stripe(t=blocks.block_q, s=blocks.block_kv):
        return f"blocks would lie in several stripes of {odd} rows"
    return None


# Widths of tiles at which a soft cap leaves too few registers: 300 to 450 bytes are
# spilled (JAX 0.11.2, ptxas 13.0). Such spills have cost two thirds of the speed
# (NVIDIA H200, 2026-11-24: 067-mosaic-gpu-backward.md).
_NO_SOFT_CAP = (64, 144, 160, 176, 192)
# Bytes at most of what orders the sums of dq where arrays decide which blocks meet.
_MOST_COUNTS = 64 << 20


def no_backward(call: Call, rows: Mapping[str, int], programs: float) -> str | None:
    """Why the backward kernel does not serve a call that the forward serves, or None.

    Args:
      rows: of a block of `t` and of `s`.
      programs: for each multiprocessor.
    """
    width = head_tiles(call.size)
    if call.spec.is_part and not computes_ahead(width):
        return "parts in float32 of heads above 128 do not fit shared memory"
    if call.spec.score.keeps_scores and max(width.values()) in _NO_SOFT_CAP:
        return (
            f"with a soft cap and heads of {call.head_sizes} registers do not suffice"
        )
    if odd := call.spec.odd_stripe(**rows):
        return f"blocks would lie in several stripes of {odd} rows"
    if not call.spec.meets_exactly:
        need = size_of_counts(call.spec, call.size, rows)
        if need > _MOST_COUNTS:
            return f"to order the sums of dq takes {need >> 20} MiB"
    if programs < _ENOUGH:
        return "there are few blocks of keys, in parts too"
    return None
