"""The tangent kernel for Hopper: tangents of output and log-sum-exp (`core.tangent`).

Grid: (query blocks, query heads, batch axes). A thread block owns a block of queries
and visits the blocks of keys that it meets. It takes the forward's output and
log-sum-exp, so that no maximum runs, nothing is scaled again, and one sum of the size
of the output is carried. What was tried and timed is in
benchmarks/lab/116-tangents-on-hopper.md.

The producer warpgroup loads keys, values and their tangents, by TMA. A consumer
warpgroup computes 64 rows. Step i of its loop, for keys i and values i - 1, when
registers hold p and p * ds of block i - 1:

    products   qk = q k[i]'
               dqk = dq k[i]' + q dk[i]'
               acc += (p * ds) v[i-1] + p dv[i-1]
    pairs      p of block i, from qk, while the products after it run
               p * ds, from dqk, while those with values run
    wait       for keys i + 1, then for all products; values i - 1 have been read

Consumers take turns to issue products, as in the forward (`barriers.PingPong`). Of five
products of the forward's size, those of tangents that are zero are left out.

Shared memory: q and dq [64, H] of each consumer, o and then its tangent in place of q;
num_stages times k, dk [block_kv, H] and v, dv [block_kv, Hv].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import flash2
from pallas_kernels.core import tangent as sums_of
from pallas_kernels.core.axes import Named
from pallas_kernels.core.lists import Visited
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import memory, support
from pallas_kernels.mosaic_gpu.hopper import gradients
from pallas_kernels.mosaic_gpu.hopper.forward_plan import edges_first
from pallas_kernels.mosaic_gpu.hopper.gradients import F32
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS, TANGENT_REGISTERS
from pallas_kernels.mosaic_gpu.pipeline import Pipeline
from pallas_kernels.mosaic_gpu.plan import by_role, wait_until_stored
from pallas_kernels.mosaic_gpu.shared_memory import Tile
from pallas_kernels.program import Where, key_blocks, query_rows, query_start


class Operand(NamedTuple):
    """An operand of products and its tangent; None in place of a tangent of zeros."""

    primal: Any
    tangent: Any


class Inputs(NamedTuple):
    """The operands: `Named` arrays outside of the kernel, `memory.View`s inside.

    Attributes:
      q, k, v: axes `t h`, `s h` and `s d` among others.
      spec: of the call.
      o: the forward's output, axes `t d` among others.
      lse: its log-sum-exp, axis `t` among others.
    """

    q: Operand
    k: Operand
    v: Operand
    spec: AttentionSpec
    o: Any
    lse: Any


def tangent(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named],
    tangents: Mapping[str, Named],
    outputs: tuple[Named, Named],
    *,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """The tangents of output and log-sum-exp.

    Args:
      q, k, v: operands. No key or value that no query attends is NaN or infinite, and
        no tangent of one.
      spec: of `Named` arrays, with the tables for these blocks.
      saved: o and lse.
      tangents: of "query", "key" and "value", those that are not zero.
      outputs: shape structs of the results, like o and lse.
      launch: block sizes and the rest.
    """
    o, lse = saved
    padded = memory.Filled(lse.value, lse.axes, -jnp.inf)
    inputs = Inputs(
        Operand(q, tangents.get("query")),
        Operand(k, tangents.get("key")),
        Operand(v, tangents.get("value")),
        spec,
        o,
        padded,
    )
    arrays = [*jax.tree.leaves(inputs), *outputs]
    layout = memory.TileGrid.of(
        "tangent", arrays, launch, by_block=spec.traits.cost_grows
    )
    plan = Plan.of(inputs, layout, launch)
    found = plan.call(
        by_role(Program.of, _load, _compute),
        inputs,
        outputs,
        refs=Refs.declare(plan),
        name="flash2_tangent",
    )
    return tuple(x.value for x in found)


@dataclasses.dataclass(frozen=True)
class Plan(gradients.Plan):
    """The plan of this kernel.

    Attributes:
      along: which of q, k and v have a tangent that is not zero.
    """

    along: tuple[bool, bool, bool]

    registers = TANGENT_REGISTERS

    @classmethod
    def of(cls, inputs: Inputs, layout: memory.TileGrid, launch: Launch) -> Plan:
        operands = inputs.q, inputs.k, inputs.v
        of_q, of_k, of_v = (x.tangent is not None for x in operands)
        consumers = launch.blocks.block_q // ROWS
        return cls(launch, layout, consumers, inputs.q.primal.dtype, (of_q, of_k, of_v))

    @property
    def products_of_scores(self) -> int:
        """How many products make the tangent of the scores."""
        return sum(self.along[:2])

    @property
    def products_of_values(self) -> int:
        """How many products the probabilities of a block go to."""
        return 1 + self.along[2]

    def tiles(self, number: int, axes: str, *shape: int) -> Operand:
        """Tiles of operand `number` and of its tangent, as `head_tile` has them.

        Args:
          number: of q, k and v.
          axes: of its rows, and of its head elements.
          shape: how many tiles, and how many rows of each.
        """
        rows, head = axes
        tile = self.head_tile(head, *shape, along=rows)
        return Operand(tile, tile if self.along[number] else None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs:
    """Shared memory of a thread block: the order of the fields is that of addresses.

    Attributes:
      dlse: [64] of each consumer, the tangent of the log-sum-exp.
      keys: k and dk, [block_kv, H] in each stage.
      queries: q and dq, [64, H] of each consumer.
      queries_full: a barrier of each consumer, at which its queries arrive.
      output_full: a barrier of each consumer, at which its rows of o arrive.
      values: v and dv, [block_kv, Hv] in each stage.
    """

    dlse: Tile
    keys: Pipeline
    queries: Operand
    queries_full: Any
    output_full: Any
    values: Pipeline

    @classmethod
    def declare(cls, plan: Plan) -> Refs:
        consumers, stages, keys = plan.consumers, plan.stages, plan.block_kv
        barriers = functools.partial(plgpu.Barrier, num_barriers=consumers)
        return cls(
            dlse=Tile(plgpu.SMEM((consumers, ROWS), F32)),
            keys=Pipeline.declare(plan.tiles(1, "sh", stages, keys), stages, consumers),
            queries=plan.tiles(0, "th", consumers, ROWS),
            queries_full=barriers(num_arrivals=1 + plan.along[0]),
            output_full=barriers(),
            values=Pipeline.declare(
                plan.tiles(2, "sd", stages, keys), stages, consumers
            ),
        )


@dataclasses.dataclass(frozen=True)
class Program(gradients.Program):
    """A thread block, which owns a block of queries.

    Attributes:
      inputs: `Inputs` of this file.
      start: its first query.
      blocks: the range of blocks of keys that it visits, edges first, one at least.
    """

    plan: Plan
    inputs: Any
    refs: Refs
    start: Any
    blocks: Visited

    @classmethod
    def of(cls, plan: Plan, inputs: Inputs, outputs, refs: Refs) -> Program:
        warpgroup = lax.axis_index("warpgroup")
        spec, where, start = query_start(inputs.spec, plan.layout)
        blocks = edges_first(key_blocks(spec, where, plan.layout, start))
        return cls(plan, inputs, outputs, refs, warpgroup, spec, where, start, blocks)

    @property
    def count(self) -> jax.Array:
        """How many blocks of keys it visits."""
        return jnp.int32(self.blocks.count)

    def keys_at(self, i) -> Rows:
        """The rows of the i-th block of keys that is visited."""
        size = self.plan.block_kv
        return Rows(self.blocks.at(i)[1] * size, size)


def _parts(operand: Operand, where: Where) -> Operand:
    """What of an operand and of its tangent is copied."""
    return jax.tree.map(lambda x: x.at(where), operand, is_leaf=_is_view)


def _is_view(x) -> bool:
    return isinstance(x, memory.View)


def _load(program: Program) -> None:
    """The role of the producer: keys and values, block by block."""

    @pl.loop(0, program.count)
    def _(i):
        here = {**program.where, "s": program.keys_at(i)}
        program.refs.keys.fill(i, _parts(program.inputs.k, here))
        program.refs.values.fill(i, _parts(program.inputs.v, here))


def _compute(program: Program) -> None:
    """The role of a consumer: the tangents of its rows."""
    consumer, me = Consumer.start(program), program.warpgroup
    program.plan.ping_pong.start(me)
    plgpu.barrier_wait(program.refs.queries_full.at[me])
    accumulator = plgpu.WGMMAAccumulatorRef((ROWS, program.plan.width["d"]), F32)
    sums = pl.run_scoped(consumer.walk, accumulator)
    consumer.store(sums)


class Left(NamedTuple):
    """Left operands of the products with values, in registers.

    Attributes:
      weighted: p * ds.
      p: probabilities; None if the tangent of the values is zero.
    """

    weighted: jax.Array
    p: jax.Array | None

    def rounded(self, dtype) -> Left:
        """In the dtype of products: once those with the block before are done.

        Rounded before that, they make the compiler put products in sequence (C7513).
        """
        p = None if self.p is None else self.p.astype(dtype)
        return Left(self.weighted.astype(dtype), p)


@dataclasses.dataclass(frozen=True)
class Consumer(gradients.Consumer):
    """A consumer warpgroup, which owns 64 of the thread block's queries.

    Attributes:
      spec: with what varies along its queries loaded.
      where: the place of its queries.
      lse: of its queries; -inf of those that kept nothing, and beyond the last one.
    """

    program: Program
    spec: AttentionSpec
    where: Where
    lse: jax.Array

    @classmethod
    def start(cls, program: Program) -> Consumer:
        """Begins to load its queries and their tangents, and loads their vectors."""
        me, inputs, layout = program.warpgroup, program.inputs, program.plan.layout
        start = program.start + me * ROWS
        spec, where = query_rows(program.spec, program.where, layout, start, ROWS)
        refs = program.refs
        sources = jax.tree.leaves(_parts(inputs.q, where))
        tiles = [x for x in refs.queries if x is not None]
        for source, tile in zip(sources, tiles, strict=True):
            full = refs.queries_full.at[me]
            plgpu.copy_gmem_to_smem(source, tile.copied.at[me], full)
        lse = support.load_vector(inputs.lse.at(where), 0)
        return cls(program, spec, where, lse)

    @property
    def last(self) -> jax.Array:
        """The number of the last block of keys."""
        return self.program.count - 1

    def walk(self, acc) -> sums_of.Sums:
        """Goes through the keys; `acc` are registers for the sum of the products."""
        blocks, first = self.program.blocks, jnp.int32(0)
        last = self.last
        self.refs.keys.wait(first)
        mu, left = self._pairs(True, first)
        self.refs.keys.wait_unless_beyond(first + 1, last)
        state: Any = mu, left.rounded(self.plan.dtype)
        edges: Any = blocks.edges
        if not (isinstance(edges, int) and edges == 1):
            step = functools.partial(self._step, acc, True)
            state = lax.fori_loop(1, jnp.int32(edges), step, state)
        step = functools.partial(self._step, acc, False)
        mu, left = lax.fori_loop(jnp.int32(edges), last + 1, step, state)
        self._fetch_output()
        self._add_values(acc, last, left)
        self._finish_values(last)
        return sums_of.Sums(jnp.sum(mu, axis=-1), acc[...])

    def _step(self, acc, masked: bool, i, state):
        """Block i of keys, and the values of the block before it."""
        i = support.opaque(i)
        mu, left = state
        more, following = self._pairs(
            masked, i, lambda: self._add_values(acc, i - 1, left)
        )
        self.refs.keys.wait_unless_beyond(i + 1, self.last)
        self._finish_values(i - 1)
        return mu + more, following.rounded(self.plan.dtype)

    def _pairs(self, masked: bool, i, before_wait: Callable | None = None):
        """The pairs of these rows and block i.

        Args:
          masked: whether some of them may be masked.
          before_wait: issues products that run on after those of queries and keys.

        Returns:
          What the block adds to mu, in parts, and `Left`, in float32.
        """
        plan, keys = self.plan, self.refs.keys
        turns, me = plan.ping_pong, self.program.warpgroup
        running = plan.products_of_values if before_wait else 0

        def visit(qk_acc, dqk_acc):
            turns.wait(me)
            self._issue_scores(i, qk_acc, dqk_acc)
            if before_wait is not None:
                before_wait()
            turns.pass_on(me)
            after = running + plan.products_of_scores
            qk = plgpu.wgmma_accumulator_load(qk_acc, wait_n=after)
            where = {**self.where, "s": self.program.keys_at(i)}
            lse = flash2.lse_log2(self.lse)
            again = gradients.recompute_rows(plan, self.spec, where, masked, qk, lse)
            dqk = plgpu.wgmma_accumulator_load(dqk_acc, wait_n=running)
            keys.release(i)
            weighted = again.push(dqk, qk, {})
            p = again.dropped if plan.along[2] else None
            left = Left(again.pairs.drop(weighted), p)
            return support.sums_of_rows(weighted), left

        return pl.run_scoped(visit, plan.accumulator, plan.accumulator)

    def _issue_scores(self, i, qk_acc, dqk_acc) -> None:
        """Issues the products of queries and the keys of block i, and their tangent."""
        me, queries = self.program.warpgroup, self.refs.queries
        own = support.keep_in_loop(me, i)
        q, dq = (x and x.ref.at[own] for x in queries)
        k, dk = (x and support.transposed(x.ref) for x in self.refs.keys.at(i))
        plgpu.wgmma(qk_acc, q, k)
        if dq is not None:
            plgpu.wgmma(dqk_acc, dq, k)
        if dk is not None:
            plgpu.wgmma(dqk_acc, q, dk)

    def _add_values(self, acc, i, left: Left) -> None:
        """Issues the products of the probabilities and the values of block i."""
        values = self.refs.values
        values.wait(i)
        v, dv = values.at(i)
        plgpu.wgmma(acc, left.weighted, v.ref)
        if dv is not None:
            plgpu.wgmma(acc, left.p, dv.ref)

    def _finish_values(self, i) -> None:
        """Waits for the products with values of block i, and releases their stage."""
        plgpu.wgmma_wait(0)
        self.refs.values.release(i)

    def _fetch_output(self) -> None:
        """Begins to load its rows of o, in place of the queries: all have been read."""
        program, me = self.program, self.program.warpgroup
        plgpu.commit_smem()
        tile, full = self.refs.queries.primal, self.refs.output_full.at[me]
        plgpu.copy_gmem_to_smem(
            program.inputs.o.at(self.where), tile.copied.at[me], full
        )

    def store(self, sums: sums_of.Sums) -> None:
        """The tangents of these rows go to global memory."""
        program, refs, me = self.program, self.refs, self.program.warpgroup
        of_output, of_lse = program.outputs
        tile, dlse = refs.queries.primal.at(me), refs.dlse.ref.at[me]
        plgpu.barrier_wait(refs.output_full.at[me])
        o = support.load_tile(tile.ref)
        arithmetic = self.plan.launch.arithmetic
        found, mu = sums_of.finish(sums, self.spec, o, self.lse, arithmetic)
        assert not isinstance(found, tuple), "heads are not in pieces here"
        plgpu.commit_smem()  # all threads have loaded o
        tile.ref[...] = found.astype(of_output.dtype)
        dlse[...] = mu
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.copied, of_output.at(self.where))
        plgpu.copy_smem_to_gmem(dlse, of_lse.at(self.where))
        wait_until_stored()
