"""The forward kernel for Hopper (Dao 2023, algorithm 1; Shah 2024, FlashAttention-3).

A work tile is a block of query rows of one head and batch entry. A thread block goes
through several (`tile_scheduler`; `memory.TileGrid` for their order).

It has warpgroups that compute, of 64 query rows each, and one that only loads:

    producer     copies k[0] v[0] k[1] v[1] k[2] ...  and those of the next work tile
                        | full    ^ empty
    pipelines    num_stages x k [block_kv, H]    num_stages x v [block_kv, Hv]
                        | full    ^ empty
    consumer 0   products | softmax  | products | softmax  | ...      | store
    consumer 1            | products | softmax  | products | softmax  | ...

The producer (`forward_program.load`) brings keys and values into two pipelines, in the
order of `Range.at`. It runs on into the next work tile while the previous one is
computed and stored. A consumer (`compute`) brings its own queries, goes through the
keys (`forward_loop.KeyLoop`), and stores its output.

First come the edges: the blocks in which pairs may be masked, or one block if there
are none. They have a running maximum (`flash2.update`). Then come all the others, with
the maximum fixed, as in `flash2.accumulate`. A mask with an element for each pair may
mask some pairs of any block: then only the first block has a running maximum. Where
products become scores (`forward_loop.KeyLoop`, by `Pairs.scores_of`), a consumer
applies the masks, in the edges alone. Biases and the like come in all blocks.

A row may leave the range in which a fixed maximum is exact (`flash2.in_range`). Its
warpgroup then stores nothing. After its last work tile, the thread block goes through
the unfinished ones again (`retries.run_passes`), with running maxima alone: the final
retry.

Unattended keys are those beyond a length, and those that a mask keeps for no query.
Their values may be NaN, and 0 times NaN is NaN. Where a call may have such keys
(`Plan.drops_keys`), the producer puts zeros in the place of their values in each retry
(`forward_program.Program.fill`), and another retry comes before the final one. All
unfinished tiles go through it, also those that were merely out of range.

    pass          maximum              unattended values   work tiles
    first         fixed, as above      as they are         all
    first retry   fixed, as above      0                   out of range, or not finite
    final retry   running everywhere   0                   still out of range

Without unattended keys there is no first retry. With `Plan.all_running` the first pass
has running maxima everywhere. Then only a call that may have unattended keys has a
retry, the final one, for tiles with a sum that is not finite.

All passes run the same code (benchmarks/lab/144). They differ in how many blocks have a
running maximum, and in whether the producer clears values. So a tile that is made again
because of values which count for nothing has the same bits without them.

A step issues the products of the next keys, then those of the previous probabilities
with their values. While the latter run, it computes the next probabilities (Shah 2024,
section 3.2). Consumers take turns, ping-pong: one computes while another multiplies
(section 3.1).

Shared memory (`forward_plan.Refs`; `Storage.num_bytes` is the sum): q [block_q, H],
num_stages times k [block_kv, H] and v [block_kv, Hv], and o [block_q, Hv] or half of
its columns at a time, where that fits (`Storage.with_output_tile`). The next queries
then come as soon as the final product has read these. Else o is written over q. If
there is room, values of two bytes with an element for each pair come by TMA too,
[block_q, block_kv] at a time.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Named
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import support
from pallas_kernels.mosaic_gpu.forward_program import load
from pallas_kernels.mosaic_gpu.hopper.forward_loop import KeyLoop
from pallas_kernels.mosaic_gpu.hopper.forward_plan import Plan
from pallas_kernels.mosaic_gpu.hopper.forward_program import Program
from pallas_kernels.mosaic_gpu.hopper.retries import (
    TilesPass,
    fetch_queries,
    run_passes,
    store,
)
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.plan import by_role, wait_until_stored
from pallas_kernels.mosaic_gpu.tile_scheduler import has
from pallas_kernels.program import Where, query_rows


def forward(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    outputs: tuple[Named, ...],
    *,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Output and log-sum-exp, and the largest scores if they have a struct.

    Args:
      q, k, v: operands, axes `t h`, `s h`, `s d` among others, those last.
      spec: of `Named` arrays, with the tables for these blocks.
      outputs: shape structs of o (axes `t d` among others), lse (`t` last), and as lse.
      launch: block sizes and the rest.
    """
    plan = Plan.of((q, k, v), spec, outputs, launch)
    found = plan.call(
        by_role(Program.of, load, compute),
        (q, k, v, spec),
        outputs,
        refs=plan.storage.declare(),
        name="flash2_forward",
    )
    return tuple(x.value for x in found)


def compute(program: Program) -> None:
    """A consumer: it computes and stores 64 rows of each work tile."""
    parts = support.COLUMNS if program.plan.storage.largest else None
    no_keys = flash2.init([ROWS], 1, top_parts=parts)
    visit = functools.partial(attend, program, no_keys)
    run_passes(program, visit, jnp.int32(0), jnp.int32(0))


def attend(program: Program, no_keys: flash2.State, this: TilesPass, slot, state):
    """One work tile of a pass: its attention, and its output where that is right.

    Args:
      no_keys: the state of rows that have met no keys.
      this: the pass.
      slot: of the thread block, which has the work tile.
      state: how many blocks of keys the pipelines have had, and the set of tiles that
        this warpgroup has not finished.

    Returns:
      The state after this work tile.
    """
    plan, me = program.plan, program.warpgroup
    first, unfinished = state
    tile = program.work_tile(slot)
    keys = program.key_blocks(tile).counted()
    start = tile.start + me * ROWS
    edges = 1 if plan.one_edge else keys.blocks.edges
    running = 1 if plan.one_running else edges
    running += this.is_final.astype(jnp.int32) * (keys.count - running)
    spec, where = query_rows(tile.spec, tile.where, plan.layout, start, ROWS)

    def fetch_next():
        pl.when(this.is_first)(lambda: program.scheduler.wait_for(slot + 1))
        # `has_next`: whether the next slot has a tile of this pass.
        pl.when(this.tiles.has_next(slot))(
            lambda: fetch_queries(program, program.work_tile(slot + 1))
        )

    # If the previous slot has a tile of this pass, that one fetched these queries.
    pl.when(~this.tiles.has_previous(slot))(lambda: fetch_queries(program, tile))
    plgpu.barrier_wait(program.refs.q_full.at[me])
    loop = KeyLoop(
        program,
        spec,
        where,
        keys,
        first=first,
        edges=edges,
        running=running,
        queries_read=fetch_next if plan.output_columns else lambda: None,
        no_keys=no_keys,
    )
    accumulator = plgpu.WGMMAAccumulatorRef((ROWS, plan.width["d"]), jnp.float32)
    sums = pl.run_scoped(loop.run, accumulator)

    due = this.is_first | has(unfinished, slot)
    good = is_right(loop, sums, start, this.is_first)
    unfinished &= ~(1 << slot)
    unfinished |= (due & ~good).astype(jnp.int32) << slot
    pl.when(due & good)(functools.partial(store_sums, program, spec, where, sums))
    if not plan.output_columns:
        wait_until_stored()
        fetch_next()
    return first + keys.count, unfinished


def is_right(
    loop: KeyLoop, sums: flash2.State, start, is_first_pass: jax.Array
) -> jax.Array:
    """Whether the sums of this warpgroup's rows can be stored.

    Args:
      loop: over the keys.
      sums: of all keys of the rows.
      start: the first row.
      is_first_pass: whether values of unattended keys met the sums, if there are any.
    """
    plan, me = loop.plan, loop.program.warpgroup
    beyond = start + support.numbers_along(0, ROWS) >= plan.layout.size["t"]
    in_range = flash2.in_range(sums, loop.program.v.dtype) | beyond
    out = support.warpgroup_any(me, jnp.where(in_range, 0, 1))
    good = (out == 0) | (loop.running == loop.count)
    if plan.drops_keys:
        finite = flash2.has_finite_sums(sums) | beyond | ~is_first_pass
        good &= support.warpgroup_any(me, jnp.where(finite, 0, 1)) == 0
    return good


def store_sums(
    program: Program, spec: AttentionSpec, where: Where, sums: flash2.State
) -> None:
    """The epilogue: the results of this warpgroup's rows.

    Args:
      spec: with what the rows have.
      where: head and batch entry, and which rows these are.
      sums: of all keys of the rows.
    """
    plan, refs, me = program.plan, program.refs, program.warpgroup
    output, log = flash2.finish(sums, spec.sink, plan.arithmetic)
    assert not isinstance(output, tuple), "heads are not in pieces here"
    output = (output * spec.dropout_scale).astype(program.o.dtype)
    wait_until_stored()  # of the previous work tile, which used the same tiles
    of_rows = [(refs.lse.ref.at[me], log, program.lse)]
    if program.largest is not None:
        at = refs.lse.ref.at[plan.consumers + me]
        of_rows += [(at, sums.largest, program.largest)]
    store(program, where, output, of_rows)
