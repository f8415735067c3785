"""Rules of the Mosaic GPU kernels' blocks, and of which calls they serve faster.

Their numbers are in the table of the GPU (`measured`). What is here is true of every
Hopper GPU: rows and registers of warpgroups, and what fits them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pallas_kernels import device
from pallas_kernels.backend import Call
from pallas_kernels.configs import Blocks
from pallas_kernels.core.lists import BlockList
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.core.visits import Sharing, many_known, size_of_counts
from pallas_kernels.mosaic_gpu import measured, memory

# Query rows of a warpgroup's products: a block of them for each warpgroup.
ROWS = 64
# Registers of a thread that loads or adds, and of one that computes, by how many
# warpgroups compute.
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
# The producer of tangents has four arrays to load, and spills 8 bytes of 24 registers.
TANGENT_REGISTERS = {**REGISTERS, 2: (40, 232)}


def choose(heads: tuple[int, int], keys: int, spec: AttentionSpec) -> Blocks:
    """Blocks of the forward kernel.

    Args:
      heads: sizes of a head of key and value.
      keys: how many a query looks at, about.
      spec: of the call.
    """
    table = measured.here()
    numbers, is_level = table.numbers, _may_be_level(spec)
    # With three warpgroups these spill 150 to 450 bytes (JAX 0.11.2, ptxas 13.0), but
    # not tables whose loads come late (`Plan.finds_level`).
    has_operands = any(term.operands for term in spec.score.terms) and not is_level
    wants_registers = spec.traits.is_sparse or spec.dropout is not None or has_operands
    fewest = numbers.many_level_keys if is_level else numbers.many_keys
    # Blocks of fewer rows divide those of lists, which then serve both passes.
    many = keys >= fewest and not wants_registers
    many = many and not spec.lists_blocks
    regime = "many keys" if many else "few keys"
    return table.blocks_of("forward", max(heads), regime)


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


def conditions(call: Call, *, makes_gradient: bool = False) -> list[str]:
    """What of `measured.CONDITIONS` a call has; the first one is one of the first five.

    Without "documents" and "copied", which have reasons of their own.

    Args:
      makes_gradient: whether `dbias` makes the gradient of its bias.
    """
    spec = call.spec
    grows, windowed = spec.traits.cost_grows, spec.traits.is_windowed
    if _has_wide_bias(spec):
        found = ["wide bias"]
    elif spec.score.pair_operands:
        found = ["bias and its gradient" if makes_gradient else "bias"]
    else:
        found = ["causal" if grows and not windowed else "plain"]
    if windowed:
        no_pairs = grows and not spec.score.pair_operands
        found.append("causal window" if no_pairs else "window")
    if spec.has_mask_of_pairs:
        found.append("mask")
    if spec.dropout is not None:
        found.append("dropout")
    if not (spec.cost_is_monotone or spec.has_mask_of_pairs):
        known = _is_causal_with_lengths(spec)
        found.append("causal lengths" if known else "uneven")
    return found


def _crossover(call: Call, *, makes_gradient: bool = False) -> measured.Crossover:
    """The largest crossover points of a call's conditions."""
    table, largest = measured.here(), max(call.head_sizes)
    found = conditions(call, makes_gradient=makes_gradient)
    points = [table.crossover(x, largest) for x in found]
    forward, backward = (x.forward for x in points), (x.backward for x in points)
    return measured.Crossover(max(forward), max(backward))


def slower(call: Call, programs: float, copied: bool) -> str | None:
    """Why the next backend is faster for a call, or None.

    Args:
      programs: for each multiprocessor.
      copied: whether operands must be, for these kernels.
    """
    keys = call.spec.mean_keys(call.size["s"])
    if keys < _crossover(call).forward:
        return f"about {keys} keys for a query are few"
    return _slower_in_pass("forward", call, programs, copied)


def _slower_in_pass(
    which: str, call: Call, programs: float, copied: bool
) -> str | None:
    """Why the next backend is faster in the "forward" or the "backward", or None."""
    spec, largest, table = call.spec, max(call.head_sizes), measured.here()
    keys = spec.mean_keys(call.size["s"])

    def fewest(condition: str) -> float:
        return getattr(table.crossover(condition, largest), which)

    if spec.traits.is_sparse and keys < fewest("documents"):
        return "most blocks of keys may be skipped"
    if _has_wide_bias(spec) and math.isinf(fewest("wide bias")):
        return "a float32 bias for each pair takes long to load beside small heads"
    # Fewer leave warpgroups without work. The Triton kernels then have smaller blocks,
    # take the heads of a group as rows and divide the keys.
    rows = table.numbers.fewest_query_rows
    if call.size["t"] < rows:
        return f"blocks have {rows} query rows, and the call {call.size['t']}"
    if copied and keys < fewest("copied"):
        return (
            f"about {keys} keys for a query are few where operands are copied, since "
            "TMA cannot read rows or heads of such sizes as they are"
        )
    if programs < table.numbers.fewest_tiles:
        return "it has few blocks of queries, and their keys are not divided"
    return None


def slower_backward(
    call: Call, programs: float, copied: bool, *, makes_gradient: bool
) -> str | None:
    """Why the gradients are made faster by the next backend, or None.

    A program goes through the queries of its keys: many of these will do, too.

    Args:
      programs, copied: as of `slower`.
      makes_gradient: as of `conditions`.
    """
    t, s = call.size["t"], call.size["s"]
    keys = call.spec.mean_keys(s)
    fewest = _crossover(call, makes_gradient=makes_gradient).backward
    if keys * max(t, s) < fewest * max(s, 1):
        return f"about {keys} keys for a query are few"
    return _slower_in_pass("backward", call, programs, copied)


def slower_tangent(call: Call) -> str | None:
    """Why tangents are made faster by the next backend, or None.

    As in the backward pass a thread block has one block of rows, whose first loads and
    last stores nothing hides. So the crossover points are those of the backward, until
    they are measured (benchmarks/lab/116-tangents-on-hopper.md).
    """
    keys = call.spec.mean_keys(call.size["s"])
    if keys < _crossover(call).backward:
        return f"about {keys} keys for a query are few"
    return None


def head_tiles(size: Mapping[str, int]) -> dict[str, int]:
    """Widths of the tiles of heads in the backward kernels, of keys and of values."""
    largest = max(size["h"], size["d"])
    if largest <= 128:
        return dict.fromkeys("hd", 64 if largest <= 64 else 128)
    d = 32 if separate_dq(size) else 16
    return {"h": _multiple(size["h"], 32), "d": _multiple(size["d"], d)}


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def separate_dq(size: Mapping[str, int]) -> bool:
    """Whether the gradients of a head are too many registers for one kernel."""
    h, d = _multiple(size["h"], 32), _multiple(size["d"], 16)
    return max(h, d) > 192 or h + d > 320


def pipelines_scores(width: Mapping[str, int]) -> bool:
    """Whether the scores of the next work tile are computed during this one.

    There is room for that, and for what is prefetched of its pairs, in registers and in
    shared memory, for heads up to 128.
    """
    return max(width.values()) <= 128


def overlaps_exponents(width: Mapping[str, int], spec: AttentionSpec) -> bool:
    """Whether all exponents of a work tile are computed while the product for dp runs.

    Registers suffice for that, but not with dropout beside heads of 64: 204 bytes are
    spilled, and gradients take 6.4 ms in place of 4.3 (NVIDIA H100:
    075-what-the-kernels-for-hopper-wait-for.md).
    """
    narrow = max(width.values()) <= 64
    return pipelines_scores(width) and not (narrow and spec.dropout is not None)


def may_await_keys_early(blocks: Blocks) -> bool:
    """Whether keys may be awaited before the product of the values before them.

    With one stage that would be a deadlock: keys come after values, which have no room
    until this product has been waited for.
    """
    return blocks.num_stages > 1


def awaits_keys_early(
    width: Mapping[str, int], spec: AttentionSpec, blocks: Blocks
) -> bool:
    """Whether a step of the forward awaits the next keys before the last product.

    Then all exponents are computed beside that product. Calls at heads of 96 to 128 ran
    at 0.97 to 1.06 times their speed so, 1.02 in the mean, and masks of lists at heads
    of 64 at 1.00 to 1.03. Others gained nothing (heads of 64 and 256, a mask of arrays,
    a table by distance), or lost up to 9 % (heads of 160 to 224, a bias of pairs)
    (NVIDIA H200, 2026-11-30: benchmarks/lab/148-exponents-before-a-wait.md).

    Args:
      width: of tiles of heads.
      spec: as the kernel has it, with its table.
    """
    least = 64 if isinstance(spec.table, BlockList) else 96
    in_range = all(least <= x <= 128 for x in width.values())
    score = spec.score
    reads_pairs = bool(score.pair_operands) or score.reads_distances
    is_plain = not (reads_pairs or spec.has_mask_of_pairs)
    return may_await_keys_early(blocks) and in_range and is_plain


def _may_be_level(spec: AttentionSpec) -> bool:
    return spec.score.may_be_level and spec.rows_follow


def finds_level(width: Mapping[str, int], spec: AttentionSpec, blocks: Blocks) -> bool:
    """Whether the forward asks of each block whether what is added to it is level.

    With T5's bias it is 1.02 to 1.09 times as fast so at heads of 128. At heads of 64
    it is 1.07 to 1.13 times from 2,048 keys on, with three warpgroups, for which there
    are registers then. Heads of 256 gain nothing (NVIDIA H200, 2026-11-30:
    benchmarks/lab/149-level-blocks.md).

    Args:
      width: of tiles of heads.
      spec: of the call, or of its kernel.
      blocks: of the kernel.
    """
    largest = max(width.values())
    fewest = 3 if largest <= 64 else 1
    fits = largest <= 128 and blocks.block_q >= fewest * ROWS
    return fits and _may_be_level(spec)


def adder_warps(width: Mapping[str, int]) -> int:
    """How many warps of a thread block add dq to global memory."""
    return measured.up_to(measured.here().numbers.adder_warps, max(width.values()))


def blocks_alike(spec: AttentionSpec) -> int | None:
    """How many blocks of keys in succession may meet the same queries; None for all."""
    traits = spec.traits
    is_short = spec.has_all_rows if traits.is_windowed else traits.is_sparse
    return measured.here().numbers.blocks_of_a_document if is_short else None


def sharing(
    spec: AttentionSpec, size: Mapping[str, int], rows: Mapping[str, int]
) -> Sharing | None:
    """How several programs of the backward share a block of keys with many visits.

    All parts but the last are kept in float32: so many that they take at most as much
    memory as dk and dv, in whole tiles of heads. A call of few keys has few, as its
    programs that no block needs count, too. Where masks alone say which blocks have
    many visits, none is left over. Nor is a part so small that to begin it and to sum
    it takes longer than its visits.

    Args:
      size: of `t` and `s`, and of the heads `n` and `k`.
      rows: of a block, of `t` and `s`.
    """
    if not spec.lists_blocks or spec.is_part:
        return None
    numbers = measured.here().numbers
    many = many_known(spec, size, rows)
    blocks = numbers.shared_blocks if many is None else min(numbers.shared_blocks, many)
    if not blocks:
        return None
    bytes_of_float32 = 2  # times those of dk and dv
    more = size["s"] // (blocks * rows["s"] * bytes_of_float32)
    visited = size["t"] * size["n"] // size["k"]
    most = min(numbers.parts_of_a_shared_block, visited // numbers.rows_of_a_part)
    parts = min(most, 1 + more)
    return Sharing(blocks, parts) if parts > 1 else None


def dq_accumulators(spec: AttentionSpec, layout: memory.TileGrid) -> int:
    """How many accumulators dq is the sum of, so that thread blocks wait less.

    All thread blocks of a head that start together begin with the same block of
    queries: the last of n waits for n - 1 additions. In a call of many heads that
    happens once in a long time. Each accumulator is as large as dq, in float32, but
    then there are few heads.

    Args:
      layout: of the kernel.
    """
    if not spec.meets_exactly:  # how much there is to do is not known
        return 1
    numbers = measured.here().numbers
    part = spec.mean_keys(layout.size["s"]) / max(layout.size["s"], 1)
    queries = -(-layout.size["t"] // layout.rows["t"])
    heads = layout.elements / math.prod(layout.parts.values())
    programs = max(1.0, layout.tiles / device.multiprocessors())
    tiles = programs * heads * queries * part  # of a multiprocessor
    until = numbers.addition_part * (layout.in_turn - 1) / max(tiles, 1.0)
    count = 1
    while count < numbers.most_accumulators:
        rows = 2 * count * numbers.rows_of_an_accumulator
        if until <= count * numbers.first_turns_part or rows > layout.size["t"]:
            break
        count *= 2
    return count


def of_backward(heads: tuple[int, int]) -> dict[str, Blocks] | None:
    """Blocks of the kernels for the gradients of query, key and value, by kernel.

    None for heads that do not fit these kernels, or not well.

    Returns:
      Those of "backward", or of "dkv" and "dq" where each is a kernel of its own.
    """
    size, table = dict(zip("hd", heads, strict=True)), measured.here()
    width = head_tiles(size)
    if separate_dq(size):
        return {x: table.blocks_of(x, max(heads)) for x in ("dkv", "dq")}
    fills = sum(heads) >= table.numbers.filled_part * sum(width.values())
    if pipelines_scores(width) and not fills:
        return None
    return {"backward": table.blocks_of("backward", max(width.values()))}


def of_dbias(size: Mapping[str, int]) -> Blocks | None:
    """Blocks of the kernel for a bias's gradient; None where heads do not fit it."""
    width = head_tiles(size)
    fits = size["h"] == size["d"] and pipelines_scores(width)
    return measured.here().blocks_of("dbias", max(width.values())) if fits else None


def no_backward(call: Call, rows: Mapping[str, int], programs: float) -> str | None:
    """Why the backward kernel does not serve a call that the forward serves, or None.

    Args:
      rows: of a block of `t` and of `s`.
      programs: for each multiprocessor.
    """
    width, numbers = head_tiles(call.size), measured.here().numbers
    if call.spec.is_part and not pipelines_scores(width):
        return "parts in float32 of heads above 128 do not fit shared memory"
    capped = call.spec.score.keeps_scores
    if capped and max(width.values()) in numbers.widths_that_keep_no_scores:
        return (
            f"with a soft cap and heads of {call.head_sizes} registers do not suffice"
        )
    if odd := call.spec.odd_stripe(**rows):
        return f"blocks would lie in several stripes of {odd} rows"
    if not call.spec.meets_exactly:
        need = size_of_counts(call.spec, call.size, rows)
        if need > numbers.most_order_bytes:
            return f"to order the sums of dq takes {need >> 20} MiB"
    if programs < numbers.fewest_tiles:
        return "there are few blocks of keys, in parts too"
    return None
