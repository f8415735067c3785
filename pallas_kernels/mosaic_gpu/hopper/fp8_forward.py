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
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import memory
from pallas_kernels.mosaic_gpu.hopper.fp8_loop import KeyLoop, wait_until_stored
from pallas_kernels.mosaic_gpu.hopper.fp8_plan import Plan, Refs
from pallas_kernels.mosaic_gpu.hopper.fp8_program import Program, Scales
from pallas_kernels.mosaic_gpu.hopper.tuning import REGISTERS, ROWS
from pallas_kernels.mosaic_gpu.tile_scheduler import (
    DynamicTiles,
    TileSet,
    has,
)
from pallas_kernels.program import query_rows, query_start

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

    def kernel(inputs, outputs, refs: Refs):
        program = Program.of(plan, inputs, outputs, refs)
        is_producer = program.warpgroup == plan.consumers
        pl.when(is_producer)(functools.partial(load, program))
        is_consumer = program.warpgroup < plan.consumers
        pl.when(is_consumer)(functools.partial(compute, program))

    found = memory.call(
        kernel,
        plan.layout,
        (q, k, v, spec, scales),
        outputs,
        block={"t": ROWS, "s": plan.block_kv},
        tiles={"h": plan.head, "d": plan.head},
        scratch=plan.storage.declare(),
        warpgroups=plan.consumers + 1,
        name="flash2_forward_fp8",
        programs=plan.schedule.thread_blocks,
    )
    return tuple(x.value for x in found)


# The producer.


def load(program: Program) -> None:
    """The producer: it loads keys and values of all work tiles, in both passes."""
    plan, scheduler = program.plan, program.scheduler
    plgpu.set_max_registers(REGISTERS[plan.consumers][0], action="decrease")

    def first_pass(slot, loaded):
        loaded = load_tile(program, 0, slot, loaded)
        scheduler.take(slot + 1)
        return loaded

    scheduler.take(0)
    loaded = scheduler.fold(first_pass, jnp.int32(0))
    again = functools.partial(load_tile, program, 1)
    program.unfinished().fold(again, loaded)


def load_tile(program: Program, all_running: int, slot, loaded):
    """Fills the pipelines with keys and values of a work tile.

    Returns:
      How many blocks have been loaded now, of `loaded` before.
    """
    refs, tile = program.refs, program.work_tile(slot, all_running)

    @pl.loop(0, tile.count)
    def _(i):
        keys = tile.keys_at(i)
        refs.k.fill(loaded + i, program.k.at(keys))
        refs.v.fill(loaded + i, program.v.at(keys))

    return loaded + tile.count


# The consumers.


def compute(program: Program) -> None:
    """A consumer: it computes and stores 64 rows of each work tile."""
    plan, scheduler, refs = program.plan, program.scheduler, program.refs
    me = program.warpgroup
    plgpu.set_max_registers(REGISTERS[plan.consumers][1], action="increase")
    plan.ping_pong.start(me)
    scheduler.wait_for(0)
    nothing = jnp.int32(0), jnp.int32(0), jnp.int32(0)
    state = scheduler.fold(functools.partial(attend, program, scheduler, 0), nothing)
    refs.tile_words.ref[me] = state[1]
    plgpu.barrier_arrive(refs.pass_done.at[0])
    tiles = program.unfinished()
    tiles.fold(functools.partial(attend, program, tiles, 1), state)
    wait_until_stored()


def attend(
    program: Program, tiles: TileSet | DynamicTiles, all_running: int, slot, state
):
    """One work tile of a pass: its attention, and its output where that is right.

    Args:
      tiles: those of the pass.
      all_running: 1 in the second pass, 0 in the first.
      slot: of the thread block, which has the work tile.
      state: how many blocks of keys the pipelines have had, the set of tiles that this
        warpgroup has not finished, and how many of the next ones have running maxima.

    Returns:
      The state after this work tile.
    """
    plan, me = program.plan, program.warpgroup
    first, unfinished, wary = state
    tile = program.work_tile(slot, all_running)
    start = tile.start + me * ROWS
    spec, where = query_rows(tile.spec, tile.where, plan.layout, start, ROWS)

    def fetch_next():
        if not all_running:
            program.scheduler.wait_for(slot + 1)
        following = functools.partial(fetch_queries, program, slot + 1)
        pl.when(tiles.has_next(slot))(following)

    # If the previous slot has a tile of this pass, that one fetched these queries.
    pl.when(~tiles.has_previous(slot))(lambda: fetch_queries(program, slot))
    plgpu.barrier_wait(program.refs.q_full.at[me])
    loop = KeyLoop(
        program,
        tile,
        spec,
        where,
        unit=program.scales.unit.load((), where),
        first=first,
        running=tile.running(plan.running, wary),
        all_running=bool(all_running),
        queries_read=fetch_next,
    )
    shape = ROWS, plan.storage.value_rows
    accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
    rows, peak, values = pl.run_scoped(loop.run, accumulator)
    good = loop.is_right(rows, peak, start)
    if all_running:
        good &= has(unfinished, slot)
    else:
        bad = (~good).astype(jnp.int32)
        unfinished |= bad << slot
        if plan.schedule.is_static:
            wary = jnp.maximum(wary - 1, _WARY * bad)
    pl.when(good)(functools.partial(loop.store, rows, values))
    return first + tile.count, unfinished, wary


def fetch_queries(program: Program, slot) -> None:
    """Loads this warpgroup's queries of the work tile in a slot."""
    plan, me = program.plan, program.warpgroup
    layout = plan.layout.at_tile(program.scheduler.tile(slot))
    _, where, start = query_start(program.spec, layout)
    rows = {**where, "t": Rows(start + me * ROWS, ROWS)}
    plgpu.commit_smem()  # all warps have read the previous queries
    queries, full = program.refs.q.copied.at[me], program.refs.q_full.at[me]
    plgpu.copy_gmem_to_smem(program.q.at(rows), queries, full)
