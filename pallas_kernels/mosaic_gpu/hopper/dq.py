"""The gradient of queries for Hopper, by itself (Dao 2023, algorithm 2).

This kernel is for wide heads, whose gradients do not fit one kernel's registers
(`tuning.separate_dq`), and `dkv` then makes the gradients of keys and values. Grid:
(query blocks, query heads, batch axes). A thread block owns a block of queries and
visits the blocks of keys that it meets. No thread block waits for another.

The producer warpgroup loads keys and values, by TMA. A consumer warpgroup computes 64
rows, [queries, keys]: dz goes to its product from registers, and dq is summed there.
The scores of the next keys are computed beside dq:

    producer | load k0, v0, k1   | load v1, k2, as soon as v0 and k0 are read | ...
    consumer | q k0^T | do v0^T, p, dz | dz k0, q k1^T | do v1^T, p, dz | dz k1, ...

Shared memory: q, do [64, ...] of each consumer, dq in place of q; num_stages times k
[block_kv, H], once v [block_kv, Hv].
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.axes import Named
from pallas_kernels.core.lists import Visited
from pallas_kernels.core.ranges import minimum
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import memory, support
from pallas_kernels.mosaic_gpu.hopper import gradients
from pallas_kernels.mosaic_gpu.hopper.gradients import F32, Inputs, Plan, Saved
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.pipeline import Pipeline
from pallas_kernels.mosaic_gpu.plan import by_role, wait_until_stored
from pallas_kernels.mosaic_gpu.shared_memory import Tile
from pallas_kernels.program import Where, key_blocks, query_rows, query_start


def dq(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named],
    output: Named,
    *,
    launch: Launch,
) -> jax.Array:
    """The gradient of q.

    Args:
      q, k, v, spec, saved, launch: as of `backward.backward`.
      output: shape struct of dq.
    """
    inputs = Inputs(q, k, v, spec, Saved(*saved))
    operands, by_block = inputs.with_outputs([output]), spec.traits.cost_grows
    layout = memory.TileGrid.of("dq", operands, launch, by_block=by_block)
    plan = Plan(launch, layout, launch.blocks.block_q // ROWS, q.dtype)
    (found,) = plan.call(
        by_role(Program.of, _load, _compute),
        inputs,
        [output],
        refs=Refs.declare(plan),
        name="flash2_dq",
    )
    return found.value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs:
    """Shared memory of a thread block: the order of the fields is that of addresses.

    Attributes:
      do: [64, Hv] of each consumer.
      keys: k, [block_kv, H] in each stage.
      queries_full: a barrier of each consumer, at which its q and do arrive.
      q: [64, H] of each consumer.
      values: v, [block_kv, Hv], in one stage.
    """

    do: Tile
    keys: Pipeline
    queries_full: Any
    q: Tile
    values: Pipeline

    @classmethod
    def declare(cls, plan: Plan) -> Refs:
        consumers, stages, keys = plan.consumers, plan.stages, plan.block_kv
        return cls(
            do=plan.head_tile("d", consumers, ROWS),
            keys=Pipeline.declare(plan.head_tile("h", stages, keys), stages, consumers),
            queries_full=plgpu.Barrier(num_barriers=consumers, num_arrivals=2),
            q=plan.head_tile("h", consumers, ROWS),
            values=Pipeline.declare(plan.head_tile("d", 1, keys), 1, consumers),
        )


@dataclasses.dataclass(frozen=True)
class Program(gradients.Program):
    """A thread block, which owns a block of queries.

    Attributes:
      start: its first query.
      needed: the blocks of keys that it visits.
      count: how many they are.
    """

    plan: Plan
    refs: Refs
    start: Any
    needed: Visited
    count: Any

    @classmethod
    def of(cls, plan: Plan, inputs: Inputs, outputs, refs: Refs) -> Program:
        warpgroup = lax.axis_index("warpgroup")
        spec, where, start = query_start(inputs.spec, plan.layout)
        needed = key_blocks(spec, where, plan.layout, start)
        own = start, needed, jnp.int32(needed.count)
        return cls(plan, inputs, outputs, refs, warpgroup, spec, where, *own)

    def keys_at(self, i) -> Rows:
        """The rows of the i-th block of keys that is visited."""
        size = self.plan.block_kv
        return Rows(self.needed.in_order(i)[1] * size, size)


@dataclasses.dataclass(frozen=True)
class Consumer(gradients.Consumer):
    """A consumer warpgroup, which owns 64 of the thread block's queries.

    Attributes:
      spec: with what varies along its queries loaded.
      where: the place of its queries.
      lse, delta: vectors of its queries.
    """

    program: Program
    spec: AttentionSpec
    where: Where
    lse: jax.Array
    delta: jax.Array

    @classmethod
    def start(cls, program: Program) -> Consumer:
        """Begins to load q and do of its queries, and loads their vectors."""
        me, inputs, layout = program.warpgroup, program.inputs, program.plan.layout
        start = program.start + me * ROWS
        spec, where = query_rows(program.spec, program.where, layout, start, ROWS)
        refs, do = program.refs, inputs.saved.do
        loaded = refs.queries_full.at[me]
        plgpu.copy_gmem_to_smem(inputs.q.at(where), refs.q.ref.at[me], loaded)
        plgpu.copy_gmem_to_smem(do.at(where), refs.do.ref.at[me], loaded)
        vectors = inputs.saved.lse, inputs.saved.delta
        lse, delta = (support.load_vector(x.at(where), 0) for x in vectors)
        return cls(program, spec, where, lse, delta)

    def tile(self, tiles: Tile, i):
        """Its tile of q or do, addressed anew in every step i of a loop."""
        return tiles.ref.at[support.keep_in_loop(self.program.warpgroup, i)]

    def issue_scores(self, qk_acc, i) -> None:
        """The product of its queries and the i-th block of keys."""
        k, q = self.refs.keys.at(i).ref, self.refs.q
        plgpu.wgmma(qk_acc, self.tile(q, i), support.transposed(k))


def _load(program: Program) -> None:
    """The role of the producer: keys and values, block by block."""

    @pl.loop(0, program.count)
    def _(i):
        here = {**program.where, "s": program.keys_at(i)}
        program.refs.keys.fill(i, program.inputs.k.at(here))
        program.refs.values.fill(i, program.inputs.v.at(here))


def _compute(program: Program) -> None:
    """The role of a consumer: dq of its queries."""
    consumer, me = Consumer.start(program), program.warpgroup
    plgpu.barrier_wait(program.refs.queries_full.at[me])
    accumulator = plgpu.WGMMAAccumulatorRef((ROWS, program.plan.width["h"]), F32)
    total = pl.run_scoped(functools.partial(_walk, consumer), accumulator)
    _store(consumer, total)


def _walk(consumer: Consumer, dq_acc) -> jax.Array:
    """The sum of dz k over all blocks of keys."""
    count, keys = consumer.program.count, consumer.refs.keys
    first, end = jnp.int32(0), support.opaque(count)

    @pl.when(count > 0)
    def _():
        keys.wait(first)
        scores = functools.partial(_first_scores, consumer, first)
        qk = pl.run_scoped(scores, consumer.plan.accumulator)
        lax.fori_loop(first, end, functools.partial(_visit, consumer, dq_acc), qk)

    return dq_acc[...]


def _first_scores(consumer: Consumer, i, qk_acc) -> jax.Array:
    consumer.issue_scores(qk_acc, i)
    return plgpu.wgmma_accumulator_load(qk_acc, wait_n=0)


def _visit(consumer: Consumer, dq_acc, i, qk: jax.Array) -> jax.Array:
    """dq of the i-th block of keys, and the scores of the next one.

    Args:
      qk: the scores' products, which the last step made.
    """
    program, keys = consumer.program, consumer.refs.keys
    i = support.opaque(i)
    has_next, next_i = i + 1 < program.count, minimum(i + 1, program.count - 1)
    needed = program.needed
    masked = needed.in_order(i)[0] if gradients.has_edges(needed) else False

    def wait_for_next():
        pl.when(has_next)(lambda: keys.wait(next_i))

    pairs = functools.partial(_pairs, consumer, i, qk, masked, wait_for_next)
    dz = pl.run_scoped(pairs, consumer.plan.accumulator)

    def products(qk_acc):
        plgpu.wgmma(dq_acc, dz, keys.at(i).ref)
        consumer.issue_scores(qk_acc, next_i)
        plgpu.wgmma_wait(0)
        return plgpu.wgmma_accumulator_load(qk_acc, wait_n=0)

    qk = pl.run_scoped(products, consumer.plan.accumulator)
    pl.when(has_next)(lambda: keys.release(i))
    return qk


def _pairs(consumer: Consumer, i, qk, masked, wait_for_next, dp_acc) -> jax.Array:
    """dz of the i-th block of keys, while the product do v^T runs."""
    program, plan, values = consumer.program, consumer.plan, consumer.refs.values
    values.wait(i)
    v, do = values.at(i).ref, consumer.tile(program.refs.do, i)
    plgpu.wgmma(dp_acc, do, support.transposed(v))
    where = {**consumer.where, "s": program.keys_at(i)}
    again = gradients.recompute_rows(
        plan, consumer.spec, where, masked, qk, consumer.lse
    )
    # The compiler moves nothing across this branch, so that exponents are computed
    # while the product runs.
    wait_for_next()
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
    values.release(i)
    dz = again.dz(dp, again.pairs.along(consumer.delta, "t")).astype(plan.dtype)
    return dz


def _store(consumer: Consumer, total: jax.Array) -> None:
    """dq goes to global memory, through the tile where q was.

    Args:
      total: dq over `AttentionSpec.gradient_unit`.
    """
    program, (output,) = consumer.program, consumer.program.outputs
    tile = program.refs.q.ref.at[program.warpgroup]
    # A row without keys may have met values that are not finite.
    has_keys = support.ARITHMETIC.along(consumer.lse, -2, total.shape) != jnp.inf
    total = jnp.where(has_keys, total * consumer.spec.gradient_unit, 0.0)
    tile[...] = total.astype(output.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, output.at(consumer.where))
    wait_until_stored()
