"""The forward kernel for Hopper in eight bits (Shah 2024, FlashAttention-3, 3.3).

It is the kernel of `forward`, whose text says how warpgroups, pipelines, work tiles and
passes go together, for queries, keys and values of float8_e4m3fn. What differs:

- A product reads both operands along its sum. So values come transposed, [Hv, keys],
  with keys in the order in which threads have probabilities (`fp8_bytes`).
- Scales are data, one for each batch entry and head: that of queries and keys is part
  of the exponent's unit, that of values is multiplied into the output.
- Probabilities have a range of 2**15 alone: 2**(score - base), in units of log2, is
  kept between 2**-7 and 448. The base is fixed after the edges and one more block (the
  first one, if nothing is masked), where the mean probability is 1/2 at most. A larger
  probability than `LARGEST` is cut; the sum of its block tells. A mean of all keys
  below 1/8 says that many may be below the range. In both cases the tile goes through
  the second pass, with running maxima, in which probabilities are up to 2**8. So have,
  in the first pass, all blocks of the `_WARY` tiles that follow such a tile, as others
  of the layer may be like it. (Not in a dynamic schedule, where bits would depend on
  who took which tile.)
- With running maxima, probabilities are exponentials that are rounded, and sums are
  those of the exact ones. With a fixed base they are bits (`fp8_bytes`), and their sums
  come from the product with values, where a row of ones follows these
  (`fp8_plan.with_sums`); else they are exponentials, too.

Hopper's tensor cores add products of eight bits with 13 bits after the leading one of
the largest summand, the sum so far among them: what is smaller is cut (lab note 107).
Output of both signs does not show it, but a sum of probabilities over 8,192 keys lost
13 %. So sums of probabilities leave the accumulator after each block.

Unattended keys have values of 0 already (`core.clear`): there is no pass to clear them.

Shared memory (`fp8_plan.Refs`): q [block_q, H], o [block_q, Hv] or half of its columns,
num_stages times k [block_kv, H] and v [Hv + 8, block_kv].
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.axes import Named
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu.forward_program import KeyBlocks, load
from pallas_kernels.mosaic_gpu.hopper.fp8_loop import KeyLoop
from pallas_kernels.mosaic_gpu.hopper.fp8_plan import Plan
from pallas_kernels.mosaic_gpu.hopper.fp8_program import Program, Scales
from pallas_kernels.mosaic_gpu.hopper.retries import (
    TilesPass,
    fetch_queries,
    run_passes,
)
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.plan import by_role
from pallas_kernels.mosaic_gpu.tile_scheduler import has
from pallas_kernels.program import query_rows

# How many tiles have running maxima after one that left the range of a fixed one.
_WARY = 8


def forward(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    scales: Scales,
    outputs: tuple[Named, Named],
    *,
    launch: Launch,
    given: tuple[Named, Named, Named],
) -> tuple[jax.Array, ...]:
    """Output and log-sum-exp.

    Args:
      q, k: operands, axes `t h` and `s h` among others, those last.
      v: values as the kernel reads them (`fp8.values`).
      spec: of `Named` arrays, with the tables for these blocks, without a score.
      scales: of `Named` arrays.
      outputs: shape structs of o (axes `t d` among others) and lse (`t` last).
      launch: block sizes and the rest.
      given: queries, keys and values as the caller has them.
    """
    plan = Plan.of(given, spec, outputs, launch)
    found = plan.call(
        by_role(Program.of, load, compute),
        (q, k, v, spec, scales),
        outputs,
        refs=plan.storage.declare(),
        name="flash2_forward_fp8",
    )
    return tuple(x.value for x in found)


def compute(program: Program) -> None:
    """A consumer: it computes and stores 64 rows of each work tile."""
    zero = jnp.int32(0)
    run_passes(program, functools.partial(attend, program), zero, zero, zero)


def attend(program: Program, this: TilesPass, slot, state):
    """One work tile of a pass: its attention, and its output where that is right.

    Args:
      this: the pass, the first or the second one, which is final.
      slot: of the thread block, which has the work tile.
      state: how many blocks of keys the pipelines have had, the set of tiles that this
        warpgroup has not finished, and how many of the next ones have running maxima.

    Returns:
      The state after this work tile.
    """
    plan, me = program.plan, program.warpgroup
    first, unfinished, wary = state
    tile = program.work_tile(slot)
    keys = program.key_blocks(tile, this)
    start = tile.start + me * ROWS
    spec, where = query_rows(tile.spec, tile.where, plan.layout, start, ROWS)

    def fetch(slot):
        fetch_queries(program, program.work_tile(slot))

    def fetch_next():
        pl.when(this.is_first)(lambda: program.scheduler.wait_for(slot + 1))
        following = functools.partial(fetch, slot + 1)
        pl.when(this.tiles.has_next(slot))(following)

    # If the previous slot has a tile of this pass, that one fetched these queries.
    pl.when(~this.tiles.has_previous(slot))(functools.partial(fetch, slot))
    plgpu.barrier_wait(program.refs.q_full.at[me])
    loop = KeyLoop(
        program,
        spec,
        where,
        keys,
        first,
        unit=program.scales.unit.load((), where),
        running=running_blocks(keys, plan.running, wary),
        all_running=this.is_final,
        queries_read=fetch_next,
    )
    shape = ROWS, plan.storage.value_rows
    accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
    rows, peak, values = pl.run_scoped(loop.run, accumulator)
    good = loop.is_right(rows, peak, start)
    good &= this.is_first | has(unfinished, slot)
    bad = (this.is_first & ~good).astype(jnp.int32)
    unfinished |= bad << slot
    if plan.schedule.is_static:
        wary = jnp.maximum(wary - 1, _WARY * bad)
    pl.when(good)(functools.partial(loop.store, rows, values))
    return first + keys.count, unfinished, wary


def running_blocks(keys: KeyBlocks, more: int, wary) -> jax.Array:
    """How many blocks, the first ones, have a running maximum in the first pass.

    Args:
      more: how many beyond the edges.
      wary: whether it is all of them: a number above 0.
    """
    count = keys.count
    return jnp.where(wary > 0, count, jnp.minimum(keys.edges + more, count))
