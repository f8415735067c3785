"""The gradient of a bias for Hopper, of one with an element for each pair.

Grid: (query blocks, key blocks, heads and batch axes that the gradient has). A thread
block owns a tile of the gradient. It loops over the elements, which are the heads and
batch entries that the bias was broadcast over, and sums them in registers, in one
order. A consumer warpgroup computes 64 rows, [queries, keys]. The producer warpgroup
loads, by TMA.

Shared memory: a pipeline of num_stages stages, each of which holds rows of queries
beside those of keys. q and k of an element take one stage, do and v take the next one.
If the bias has two bytes, its tile lies there too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, division
from pallas_kernels.core.axes import Axes, Named
from pallas_kernels.core.ranges import Range
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import gradients, memory, pairwise, prefetch, support
from pallas_kernels.mosaic_gpu.gradients import F32, Inputs, Saved
from pallas_kernels.mosaic_gpu.ring import Ring
from pallas_kernels.mosaic_gpu.tuning import ROWS
from pallas_kernels.program import Where, element, tile_program


def layout_of(operands, launch: Launch, summed: Axes) -> memory.Layout:
    """The layout of tiles of pairs, whose thread blocks loop over the axes `summed`.

    A part is as large as the result, and that is large where it has many tiles. So they
    are divided only if there are fewer than one for each multiprocessor.
    """
    own = "t", "s"
    whole = dataclasses.replace(launch, splits=1)
    found = memory.Layout.of("dbias", operands, whole, own=own, looped=summed)
    if found.tiles >= device.multiprocessors():
        return found
    return memory.Layout.of("dbias", operands, launch, own=own, looped=summed)


def dbias(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named],
    output: Named,
    *,
    summed: Axes,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """The gradient of the score's bias, in a tuple.

    Args:
      q, k, v, spec, saved, launch: as of `backward.backward`.
      output: its shape struct, axes `t s` last.
      summed: axes of batch and heads that it lacks.
    """
    inputs = Inputs(q, k, v, spec, Saved(*saved))
    layout = layout_of(inputs.and_outputs([output]), launch, summed)
    bias = [x.dtype for x in prefetch.pair_values(spec)]
    plan = Plan(launch, layout, launch.blocks.block_q // ROWS, q.dtype, bias)
    found = plan.call(
        _kernel,
        inputs,
        [division.partial(output, layout.parts)],
        shared=Shared.declare(plan),
        name="flash2_dbias",
    )
    return division.summed(found, (output,))


@dataclasses.dataclass(frozen=True)
class Plan(gradients.Plan):
    """The plan of this kernel.

    Attributes:
      bias: the dtype of the bias if that comes in tiles by TMA, or nothing.
    """

    bias: list[Any]


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory of a thread block.

    Attributes:
      rows: [stages, block_q, H], the tiles "rows" of the pipeline.
      pipeline: of "rows" (q or do) with "keys" (k or v), [stages, block_kv, H].
      bias: [consumers, 64, block_kv], or None.
      bias_loaded: for each consumer, the barrier that says that its bias is there.
    """

    rows: Any
    pipeline: Ring
    bias: Any
    bias_loaded: Any

    @staticmethod
    def declare(plan: Plan) -> dict[str, Any]:
        consumers, stages = plan.consumers, plan.stages
        tiles = {
            "rows": plan.tile("h", stages, plan.block_q, along="t"),
            "keys": plan.tile("h", stages, plan.block_kv, along="s"),
        }
        found = Ring.shared(tiles, stages, readers=consumers)
        for dtype in plan.bias:
            found["bias"] = support.tile((consumers, ROWS, plan.block_kv), dtype)
            found["bias here"] = plgpu.Barrier(num_barriers=consumers)
        return found

    @classmethod
    def bind(cls, plan: Plan, refs: Mapping[str, Any]) -> Shared:
        bias = refs.get("bias"), refs.get("bias here")
        return cls(refs["rows"], Ring(refs, plan.stages), *bias)


@dataclasses.dataclass(frozen=True)
class Program:
    """A thread block, which owns a tile of the gradient.

    Attributes:
      plan: of the kernel.
      inputs: the operands, as they are in global memory.
      dbias: the result, likewise.
      shared: its shared memory.
      warpgroup: the number of the warpgroup that runs this.
      spec: with scalars loaded.
      where: the place of the thread block.
      tile: the place of its tile.
      first, end: of its elements.
    """

    plan: Plan
    inputs: Inputs
    dbias: memory.View
    shared: Shared
    warpgroup: Any
    spec: AttentionSpec
    where: Where
    tile: Where
    first: Any
    end: Any

    @classmethod
    def of(cls, plan: Plan, inputs: Inputs, result, shared: Shared) -> Program:
        warpgroup = lax.axis_index("warpgroup")
        spec, where, tile = tile_program(inputs.spec, plan.layout)
        first, end = (jnp.int32(x) for x in plan.layout.own_elements(where))
        known = plan, inputs, result, shared, warpgroup
        return cls(*known, spec, where, tile, first, end)

    @property
    def of_keys(self) -> Where:
        """The keys of its tile."""
        return {"s": Rows(self.tile["s"].start, self.plan.block_kv)}

    def with_rows(self, where: Where, start, size: int) -> Where:
        """`where`, and rows of its tile, counted from the first of these."""
        return {**where, "t": Rows(self.tile["t"].start + start, size)}

    def element(self, spec: AttentionSpec, index):
        """An element: the spec, where it is, and its block of keys, if it needs any."""
        layout = self.plan.layout
        spec, here, _, needed = element(spec, self.where, layout, index)
        return spec, {**here, **self.of_keys}, needed


def _kernel(plan: Plan, inputs: Inputs, outputs, refs) -> None:
    (result,) = outputs
    program = Program.of(plan, inputs, result, Shared.bind(plan, refs))
    gradients.run_roles(program, _load, _compute)


def _load(program: Program) -> None:
    """The role of the producer: two stages for each element that needs the keys."""
    q, k, v, _, saved, _ = program.inputs

    def fetch(index, i):
        _, here, needed = program.element(program.spec, index)
        here = program.with_rows(here, 0, program.plan.block_q)
        count = jnp.int32(needed.count)

        @pl.when(count > 0)
        def _():
            pipeline = program.shared.pipeline
            pipeline.fill(i, rows=q.at(here), keys=k.at(here))
            pipeline.fill(i + 1, rows=saved.do.at(here), keys=v.at(here))

        return i + 2 * count

    lax.fori_loop(program.first, program.end, fetch, jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class Consumer(gradients.Consumer):
    """A consumer warpgroup, which owns 64 rows of the thread block's tile.

    Attributes:
      rows: its rows, in tiles of the thread block.
      where: the place of its part of the gradient.
      spec: the thread block's, with the bias where it is loaded to.
    """

    program: Program
    rows: Any
    where: Where
    spec: AttentionSpec

    @classmethod
    def start(cls, program: Program) -> Consumer:
        """Loads its part of the bias, if that comes in tiles."""
        me, shared, spec = program.warpgroup, program.shared, program.spec
        rows = pl.ds(me * ROWS, ROWS)
        where = program.with_rows({**program.where, **program.of_keys}, me * ROWS, ROWS)
        for view in prefetch.pair_values(spec)[: len(program.plan.bias)]:
            tile, loaded = shared.bias.at[me], shared.bias_loaded.at[me]
            plgpu.copy_gmem_to_smem(view.at(where), tile, loaded)
            plgpu.barrier_wait(loaded)
            spec = prefetch.with_pair_tile(spec, tile)
        return cls(program, rows, where, spec)

    def issue(self, accumulator, i) -> None:
        """Issues the product of its rows and the keys of stage i, once they are there.

        An element's first stage gives its scores, the second one dp.
        """
        shared, pipeline = self.shared, self.shared.pipeline
        pipeline.wait("rows", i)
        # Addressed anew in every step of the loop.
        slot = support.keep_in_loop(pipeline.slot(i), i)
        rows, keys = shared.rows.at[slot, self.rows], pipeline.tile("keys", i)
        plgpu.wgmma(accumulator, rows, support.transposed(keys))


def _compute(program: Program) -> None:
    """The role of a consumer: its rows of the gradient, summed over the elements."""
    consumer, plan = Consumer.start(program), program.plan
    total = jnp.zeros((ROWS, plan.block_kv), F32)
    add = functools.partial(_add, consumer)
    _, total = lax.fori_loop(program.first, program.end, add, (jnp.int32(0), total))
    total = (total * program.spec.dropout_scale).astype(program.dbias.dtype)
    pairwise.store(program.dbias.at(consumer.where), total)


def _add(consumer: Consumer, index, state):
    """Adds an element to the sum, if it needs the block of keys.

    Args:
      state: the number of the element's first stage, and the sum.
    """
    i, total = state
    _, here, needed = consumer.program.element(consumer.program.spec, index)
    masked = _masked(needed)
    visit = functools.partial(_visit, consumer, index, i, here, masked, total)
    if isinstance(needed.count, int) and needed.count == 1:
        return i + 2, visit()
    count = jnp.int32(needed.count)
    return i + 2 * count, lax.cond(count > 0, visit, lambda: total)


def _masked(needed: Range):
    """Whether pairs of a range of one block may be masked, if that can be."""
    return jnp.int32(needed.edges) > 0 if gradients.has_edges(needed) else False


def _visit(consumer: Consumer, index, i, here, masked, total) -> jax.Array:
    """The sum with an element added, whose stages are i and i + 1."""
    program, saved = consumer.program, consumer.program.inputs.saved
    spec, _, _ = program.element(consumer.spec, index)
    where = program.with_rows(here, program.warpgroup * ROWS, ROWS)
    lse, delta = (support.load_vector(x.at(where), 0) for x in (saved.lse, saved.delta))
    plan, pipeline = consumer.plan, consumer.shared.pipeline

    def gradient(qk_acc, dp_acc):
        consumer.issue(qk_acc, i)
        consumer.issue(dp_acc, i + 1)
        qk = plgpu.wgmma_accumulator_load(qk_acc, wait_n=1)
        pipeline.release("rows", i)
        again = gradients.recompute_rows(plan, spec, where, masked, qk, lse)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        pipeline.release("rows", i + 1)
        pulled = again.pull(dp, again.pairs.along(delta, "t"))
        return total + pulled.operand("bias", qk)

    return pl.run_scoped(gradient, plan.accumulator, plan.accumulator)
