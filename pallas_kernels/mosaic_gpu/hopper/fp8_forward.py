"""The forward kernel for Hopper in eight bits (Shah 2024, FlashAttention-3, 3.3).

It is the kernel of `forward`, whose text says how warpgroups, pipelines, work tiles and
passes go together, for queries, keys and values of float8_e4m3fn. What differs:

- A product reads both operands along its sum. So values come transposed, [Hv, keys],
  with keys in the order in which threads have probabilities (`fp8_bytes`).
- Scales are data, one for each batch entry and head: that of queries and keys is part
  of the exponent's unit, that of values is multiplied into the output.
- Probabilities have a range of 2**15 alone. With the maximum fixed, that of the first
  blocks, a probability is 2**room there (`Plan.room`). A larger one than `LARGEST` is
  cut; the sum of its block tells (`Sums.peak`), and its tile goes through the second
  pass, with running maxima, in which probabilities are up to 2**8. In the first pass
  the edges and one more block have running maxima; and all blocks of the `_WARY` tiles
  that follow such a tile, as others of the layer may be like it. (Not in a dynamic
  schedule, where bits would depend on who took which tile.)
- Sums of probabilities are those of the rounded numbers, so that what rounding adds to
  all of them cancels. They come from the product with values, where a row of ones
  follows these (`fp8_plan.with_sums`); else from additions.

Hopper's tensor cores add products of eight bits with 13 bits after the leading one of
the largest summand, the sum so far among them: what is smaller is cut (lab note 107).
Output of both signs does not show it, but a sum of probabilities over 8,192 keys lost
13 %. So sums of probabilities leave the accumulator after each block.

Unattended keys have values of 0 already (`core.clear`): there is no pass to clear them.

Shared memory (`fp8_plan.Refs`): q [block_q, H], o [block_q, Hv] or half of its columns,
num_stages times k [block_kv, H] and v [Hv + 8, block_kv].
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.axes import Named
from pallas_kernels.core.flash2 import LN_2, LOG2_E, finite
from pallas_kernels.core.lists import Visited
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import memory, support
from pallas_kernels.mosaic_gpu.hopper import fp8_bytes
from pallas_kernels.mosaic_gpu.hopper.fp8_plan import LARGEST, Plan, Refs
from pallas_kernels.mosaic_gpu.hopper.tuning import REGISTERS, ROWS
from pallas_kernels.mosaic_gpu.tile_scheduler import (
    DynamicTiles,
    StaticTiles,
    TileSet,
    has,
    tiles_of,
)
from pallas_kernels.program import Where, key_blocks, query_rows, query_start
from pallas_kernels.program import pairs as pairs_of_block

# log2 of the probability of a running maximum.
_RUNNING_ROOM = 8
# How many tiles have running maxima after one that left the range of a fixed one.
_WARY = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scales:
    """What numbers of eight bits are multiplied by, with axes of batch and heads.

    Attributes:
      unit: products of queries and keys, which makes them scores in units of log2.
      value: values.
    """

    unit: Any
    value: Any


class Sums(NamedTuple):
    """What rows carry along the keys, beside the sums of values and the maximum.

    Attributes:
      total: sums of probabilities, [ROWS], or parts of them, [ROWS, 8].
      peak: the largest sum of a block with a fixed maximum, likewise.
    """

    total: jax.Array
    peak: jax.Array

    def added(self, part: jax.Array) -> Sums:
        """With those of one more block, whose maximum is fixed, or no larger."""
        return Sums(self.total + part, jnp.maximum(self.peak, part))


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


@dataclasses.dataclass(frozen=True)
class Program:
    """A plan with what its kernel is given, in one warpgroup of a thread block.

    Attributes:
      plan: of the call.
      q, k, v, o, lse: views of global memory.
      spec, scales: of views, of which nothing is loaded yet.
      refs: shared memory.
      warpgroup: the number of this one. The last one is the producer.
      scheduler: the thread block's work tiles.
    """

    plan: Plan
    q: memory.View
    k: memory.View
    v: memory.View
    spec: AttentionSpec
    scales: Scales
    o: memory.View
    lse: memory.View
    refs: Refs
    warpgroup: jax.Array
    scheduler: StaticTiles | DynamicTiles

    @classmethod
    def of(cls, plan: Plan, inputs, outputs, refs: Refs) -> Program:
        warpgroup, thread_block = lax.axis_index("warpgroup"), lax.axis_index("program")
        words, taken = refs.tile_words.ref, refs.tile_taken
        scheduler = tiles_of(plan.schedule, thread_block, words, taken)
        (q, k, v, spec, scales), (o, lse) = inputs, outputs
        views = q, k, v, spec, scales, o, lse
        return cls(plan, *views, refs, warpgroup, scheduler)

    def work_tile(self, slot, all_running) -> WorkTile:
        """The work tile in a slot of the thread block.

        Args:
          all_running: 1 if all blocks are taken with a running maximum, else 0.
        """
        layout = self.plan.layout.at_tile(self.scheduler.tile(slot))
        spec, where, start = query_start(self.spec, layout)
        blocks = key_blocks(spec, where, layout, start)
        blocks = blocks.with_an_edge(1).with_a_block().all_edges(all_running)
        return WorkTile(spec, where, start, blocks, self.plan.block_kv)

    def unfinished(self) -> TileSet:
        """The tiles that the second pass goes through, once the first is done."""
        plgpu.barrier_wait(self.refs.pass_done.at[0])
        words = self.refs.tile_words.ref
        own = (words[i] for i in range(self.plan.consumers))
        return TileSet(self.plan.schedule, functools.reduce(operator.or_, own))


@dataclasses.dataclass(frozen=True)
class WorkTile:
    """A block of query rows of one head and batch entry, and its blocks of keys.

    Attributes:
      spec: the call's, with what is a scalar here loaded.
      where: head and batch entry.
      start: the first row.
      blocks: the range of blocks of keys, the edges first, with one edge at least.
      block_kv: keys of a block.
    """

    spec: AttentionSpec
    where: Where
    start: Any
    blocks: Visited
    block_kv: int

    @property
    def count(self) -> jax.Array:
        """How many blocks of keys there are."""
        return jnp.int32(self.blocks.count)

    @property
    def edges(self) -> jax.Array:
        """In how many of them, the first ones, pairs may be masked."""
        return jnp.int32(self.blocks.edges)

    def running(self, more: int, wary) -> jax.Array:
        """How many blocks, the first ones, have a running maximum.

        Args:
          more: beyond the edges.
          wary: whether it is all of them.
        """
        count = self.count
        return jnp.where(wary > 0, count, jnp.minimum(self.edges + more, count))

    def keys_at(self, i) -> Where:
        """Where block number i of keys lies."""
        size = self.block_kv
        return {**self.where, "s": Rows(self.blocks.at(i)[1] * size, size)}


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
    m, sums, values = pl.run_scoped(loop.run, accumulator)
    good = loop.is_right(m, sums, start)
    if all_running:
        good &= has(unfinished, slot)
    else:
        bad = (~good).astype(jnp.int32)
        unfinished |= bad << slot
        if plan.schedule.is_static:
            wary = jnp.maximum(wary - 1, _WARY * bad)
    pl.when(good)(functools.partial(loop.store, m, sums, values))
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


def wait_until_stored() -> None:
    """Waits until TMA has read the tiles that this warpgroup stores."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclasses.dataclass(frozen=True)
class KeyLoop:
    """A warpgroup's rows of a work tile, and its way through their keys.

    Blocks are numbered in the order in which the pipelines bring them, over all work
    tiles; this one's first is `first`. A step has the probabilities of the block before
    in registers, as in `forward_loop`.

    Attributes:
      program: the warpgroup's.
      tile: the work tile.
      spec: with what these rows have loaded.
      where: head and batch entry, and which rows these are.
      unit: what makes products scores in units of log2.
      first: number of the first block.
      running: how many blocks have a running maximum.
      all_running: whether all have, in the second pass.
      queries_read: called when no more products read the queries.
    """

    program: Program
    tile: WorkTile
    spec: AttentionSpec
    where: Where
    unit: jax.Array
    first: Any
    running: jax.Array
    all_running: bool
    queries_read: Callable[[], None]

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def room(self) -> int:
        """log2 of the probability at the maximum."""
        return _RUNNING_ROOM if self.all_running else self.plan.room

    def run(self, acc):
        """Goes through the keys.

        Args:
          acc: where values, and sums of probabilities, are summed.

        Returns:
          The maximum of each row, `Sums`, and the sums of values.
        """
        first, head = self.first, self.plan.head
        last = first + self.tile.count - 1
        x = self._masked(self._products(first), first)
        m = jnp.max(x, axis=-1) * self.unit
        words, part = self._probabilities(x, m)
        part = self._nothing if part is None else part
        state = m, part, fp8_bytes.joined(words)
        step = functools.partial(self._running_step, acc)
        m, total, p = lax.fori_loop(first + 1, first + self.running, step, state)
        sums = Sums(total, jnp.zeros_like(total))
        if not self.all_running:
            step = functools.partial(self._fixed_step, acc, m)
            start = first + self.running
            sums, p = lax.fori_loop(start, last + 1, step, (sums, p))
        self.queries_read()
        self._add_values(acc, last, p)
        self._finish_values(last)
        values = acc[...]
        if self.plan.sums:
            sums, values = sums.added(values[:, head:]), values[:, :head]
        return m, sums, values

    @property
    def _nothing(self) -> jax.Array:
        return jnp.zeros([ROWS, support.COLUMNS], jnp.float32)

    def _running_step(self, acc, i, state):
        """Block i with a running maximum, and the values of the block before it."""
        i = support.opaque(i)
        m, total, p = state
        x = self._products(i, lambda: self._add_values(acc, i - 1, p))
        x = self._masked(x, i)
        largest = jnp.maximum(m, jnp.max(x, axis=-1) * self.unit)
        alpha = jnp.exp2(m - finite(largest))
        words, part = self._probabilities(x, largest)
        self._finish_values(i - 1)
        values = acc[...]
        if part is None:
            total = total + values[:, self.plan.head :]
            total = total * self._along(alpha, support.COLUMNS)
            values = fp8_bytes.cleared(values, self.plan.head)
        else:
            total = total * alpha + part
        acc[...] = values * self._along(alpha, values.shape[-1])
        return largest, total, fp8_bytes.joined(words)

    def _fixed_step(self, acc, m, i, state):
        """Block i with a fixed maximum, and the values of the block before it."""
        i = support.opaque(i)
        sums, p = state
        x = self._products(i, lambda: self._add_values(acc, i - 1, p))
        words, part = self._probabilities(x, m)
        self._finish_values(i - 1)
        if part is None:
            values = acc[...]
            part = values[:, self.plan.head :]
            acc[...] = fp8_bytes.cleared(values, self.plan.head)
        return sums.added(part), fp8_bytes.joined(words)

    def _along(self, x: jax.Array, columns: int) -> jax.Array:
        return support.ARITHMETIC.along(x, -2, (ROWS, columns))

    # Scores and probabilities.

    def _products(self, i, before_wait: Callable | None = None) -> jax.Array:
        """Products of queries and the keys of block i.

        Args:
          before_wait: issues products that run on after those of queries and keys.
        """
        refs, me = self.program.refs, self.program.warpgroup
        ping_pong = self.plan.ping_pong

        def issue(qk):
            refs.k.wait(i)
            ping_pong.wait(me)
            queries = refs.q.ref.at[support.keep_in_loop(me, i)]
            plgpu.wgmma(qk, queries, support.transposed(refs.k.at(i).ref))
            if before_wait is not None:
                before_wait()
            ping_pong.pass_on(me)
            return plgpu.wgmma_accumulator_load(qk, wait_n=int(before_wait is not None))

        shape = ROWS, self.plan.block_kv
        x = pl.run_scoped(issue, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        refs.k.release(i)
        return x

    def _masked(self, x: jax.Array, i) -> jax.Array:
        """Products of block i, -inf where a mask says so."""
        where = {**self.where, "s": self.tile.keys_at(i - self.first)["s"]}
        pairs = pairs_of_block(self.spec, where, ("t", "s"), True, self.plan.launch)
        return pairs.scores_of(x, self.program.q.dtype).x

    def _probabilities(self, x: jax.Array, m: jax.Array):
        """Words of a block, and sums of its rows where the product makes none.

        Args:
          x: of `_scores`.
          m: the maximum of each row, in units of log2.
        """
        shift = self._along(self.room - finite(m), self.plan.block_kv)
        if self.plan.sums:
            return fp8_bytes.by_bits(x, self.unit, shift), None
        p = jnp.exp2(x * self.unit + shift)
        return fp8_bytes.rounded(p), jnp.sum(p, axis=-1)

    # Values.

    def _add_values(self, acc, i, p) -> None:
        """Issues the product of probabilities and values of block i."""
        values = self.program.refs.v
        values.wait(i)
        plgpu.wgmma(acc, p, support.transposed(values.at(i).ref))

    def _finish_values(self, i) -> None:
        """Waits for the product with values of block i, and releases their stage."""
        plgpu.wgmma_wait(0)
        self.program.refs.v.release(i)

    # Results.

    def is_right(self, m: jax.Array, sums: Sums, start) -> jax.Array:
        """Whether the sums of these rows can be stored."""
        if self.all_running:
            return jnp.int32(0) == 0
        peak = sums.peak if sums.peak.ndim == 1 else jnp.max(sums.peak, axis=-1)
        beyond = start + support.numbers_along(0, ROWS) >= self.plan.layout.size["t"]
        good = ((peak < LARGEST) & (m > -jnp.inf)) | beyond
        out = support.warpgroup_any(self.program.warpgroup, jnp.where(good, 0, 1))
        return (out == 0) | (self.running == self.tile.count)

    def store(self, m: jax.Array, sums: Sums, values: jax.Array) -> None:
        """The epilogue: output and log-sum-exp of these rows."""
        refs, me, head = self.program.refs, self.program.warpgroup, self.plan.head
        total = sums.total
        total = total if total.ndim == 1 else jnp.sum(total, axis=-1)
        empty = total == 0.0
        nothing = 0.0 * self.unit  # NaN, if there is NaN in queries or keys
        scale = self.program.scales.value.load((), self.where)
        by = self._along(jnp.where(empty, nothing, scale / total), head)
        output = (values * by).astype(jnp.bfloat16)
        surplus = fp8_bytes.SURPLUS if self.plan.sums else 1.0
        log = (finite(m) - self.room) * LN_2 + jnp.log(total * (1.0 / surplus))
        wait_until_stored()  # of the previous work tile, which used the same tiles
        refs.lse.ref[me] = jnp.where(empty, -jnp.inf, log)
        tile, columns = refs.o.at(me), self.plan.storage.output_columns
        for column in range(0, head, columns):
            part, to = output, self.program.o.at(self.where)
            if columns < head:
                some = slice(column, column + columns)
                part, to = part[:, some], to.at[:, some]
                wait_until_stored()
            tile.ref[...] = part
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile.copied, to)
        plgpu.copy_smem_to_gmem(refs.lse.ref.at[me], self.program.lse.at(self.where))


def unit_of(scale: float) -> float:
    """What a product of real queries and keys is multiplied by, in units of log2."""
    return scale * LOG2_E
