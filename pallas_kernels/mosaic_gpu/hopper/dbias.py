"""The gradient of a bias for Hopper, one with an element for each pair.

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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, division
from pallas_kernels.core.axes import Named
from pallas_kernels.core.lists import Visited
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import memory, pairwise, prefetch, support
from pallas_kernels.mosaic_gpu.hopper import gradients
from pallas_kernels.mosaic_gpu.hopper.gradients import F32, Inputs, Saved
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.pipeline import Pipeline
from pallas_kernels.mosaic_gpu.plan import by_role
from pallas_kernels.mosaic_gpu.shared_memory import Tile
from pallas_kernels.program import Where, element, tile_program


def grid_of(operands, launch: Launch, summed: tuple[str, ...]) -> memory.TileGrid:
    """The layout of tiles of pairs, whose thread blocks loop over the axes `summed`.

    A part is as large as the result, and that is large where it has many tiles. So they
    are divided only if there are fewer than one for each multiprocessor.
    """
    own = "t", "s"
    whole = dataclasses.replace(launch, splits=1)
    found = memory.TileGrid.of("dbias", operands, whole, own=own, looped=summed)
    if found.tiles >= device.multiprocessors():
        return found
    return memory.TileGrid.of("dbias", operands, launch, own=own, looped=summed)


def dbias(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named],
    output: Named,
    *,
    summed: tuple[str, ...],
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """The gradient of the score's bias, in a tuple.

    Args:
      q, k, v, spec, saved, launch: as of `backward.backward`.
      output: its shape struct, axes `t s` last.
      summed: axes of batch and heads that it lacks.
    """
    inputs = Inputs(q, k, v, spec, Saved(*saved))
    layout = grid_of(inputs.with_outputs([output]), launch, summed)
    bias = next((x.dtype for x in prefetch.pair_values(spec)), None)
    plan = Plan(launch, layout, launch.blocks.block_q // ROWS, q.dtype, bias)
    found = plan.call(
        by_role(TileProgram.of, load, compute),
        inputs,
        [division.partial(output, layout.parts)],
        refs=Refs.declare(plan),
        name="flash2_dbias",
    )
    return division.summed(found, (output,))


@dataclasses.dataclass(frozen=True)
class Plan(gradients.Plan):
    """The plan of this kernel.

    Attributes:
      bias: the dtype of the bias if that comes in tiles by TMA, or None.
      has_sums: whether a consumer has memory for what it sums at the end.
    """

    bias: Any
    has_sums: bool = False

    @property
    def takes_turns(self) -> bool:
        """Whether consumers take turns to issue products: with stages for two steps.

        With fewer these took longer (heads of 128 on an H200: benchmarks/lab/125).
        """
        return self.consumers > 1 and self.stages >= 4

    @property
    def has_tile(self) -> bool:
        """Whether what is added to scores comes in tiles, of two bytes for each pair.

        Such a tile is loaded to registers before products are issued. Anything else
        that pairs load takes more registers than there are, and comes after them.
        """
        return self.bias is not None


class ProductStage(NamedTuple):
    """The operands of a product: rows of q or of do, and of k or of v."""

    rows: Any
    keys: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs:
    """Shared memory of a thread block: the order of the fields is that of addresses.

    Attributes:
      bias: [64, block_kv] of each consumer, or None.
      bias_full: a barrier of each consumer, at which its bias arrives, or None.
      sums: [64, 64 + 8] of each consumer, in float32, or None (`ddistance`).
      keys: [block_kv, H] in each stage.
      rows: [block_q, H] in each stage.
      full, empty: barriers of the stages (`pipeline.Pipeline`).
    """

    bias: Tile | None
    bias_full: Any
    sums: Any
    keys: Tile
    rows: Tile
    full: Any
    empty: Any

    @classmethod
    def declare(cls, plan: Plan) -> Refs:
        consumers, stages = plan.consumers, plan.stages
        rows = plan.head_tile("h", stages, plan.block_q, along="t")
        keys = plan.head_tile("h", stages, plan.block_kv, along="s")
        pipeline = Pipeline.declare(ProductStage(rows, keys), stages, readers=consumers)
        bias = bias_full = None
        if plan.has_tile:
            bias = Tile(support.tile((consumers, ROWS, plan.block_kv), plan.bias))
            bias_full = plgpu.Barrier(num_barriers=consumers)
        # Rows of another length than the banks have, so that they do not meet in one.
        shape = consumers, ROWS, ROWS + 8
        sums = plgpu.SMEM(shape, F32) if plan.has_sums else None
        return cls(bias, bias_full, sums, keys, rows, pipeline.full, pipeline.empty)


class Step(NamedTuple):
    """A step of a thread block's loop.

    Attributes:
      where: the numbers of the tile's blocks of queries, `i`, and of keys, `j`, and of
        heads and batch entries that the thread block owns.
      start: the first of the tile's queries, `t`, and of its keys, `s`.
      element: the number of the head or batch entry (`program.element`).
    """

    where: Where
    start: Where
    element: Any


@dataclasses.dataclass(frozen=True)
class Program(gradients.Program):
    """A thread block.

    Attributes:
      first, end: of its steps.
    """

    plan: Plan
    refs: Refs
    first: Any
    end: Any

    @property
    def pipeline(self) -> Pipeline:
        """Of `ProductStage`, two stages for each step."""
        refs = self.refs
        tiles = ProductStage(refs.rows, refs.keys)
        return Pipeline(tiles, refs.full, refs.empty, self.plan.stages)

    def step(self, index) -> Step:
        """Step number `index`."""
        raise NotImplementedError

    def with_spec(self, loop: Callable, spec: AttentionSpec):
        """What a consumer's loop over all steps gives.

        Args:
          loop: of a spec, from which steps load what it has not loaded.
          spec: the consumer's.
        """
        return loop(spec)

    def result(self) -> Where:
        """Where this warpgroup's rows of the result go."""
        raise NotImplementedError

    def store(self, output, total: jax.Array, visited) -> None:
        """Writes them there.

        Args:
          total: the sum over all steps.
          visited: whether any step had keys; else the sum is 0.
        """
        raise NotImplementedError

    def rows_of(self, start: Where) -> Where:
        """This warpgroup's queries of a tile that starts there, and the tile's keys."""
        first = start["t"] + self.warpgroup * ROWS
        return {"t": Rows(first, ROWS), "s": Rows(start["s"], self.plan.block_kv)}

    def element(self, spec: AttentionSpec, index):
        """A step: the spec, where it is, and its block of keys, if it needs any.

        Returns:
          Also the start of its tile.
        """
        where, start, number = self.step(index)
        spec, here, _, needed = element(spec, where, self.plan.layout, number)
        return spec, here, needed, start


@dataclasses.dataclass(frozen=True)
class TileProgram(Program):
    """A thread block that owns a tile of the gradient.

    Attributes:
      tile: the start of its tile.
    """

    tile: Where

    @classmethod
    def of(cls, plan: Plan, inputs: Inputs, outputs, refs: Refs) -> TileProgram:
        warpgroup = lax.axis_index("warpgroup")
        spec, where, tile = tile_program(inputs.spec, plan.layout)
        first, end = (jnp.int32(x) for x in plan.layout.own_elements(where))
        start = {name: rows.start for name, rows in tile.items()}
        own = first, end, start
        return cls(plan, inputs, outputs, refs, warpgroup, spec, where, *own)

    def step(self, index) -> Step:
        return Step(self.where, self.tile, index)

    def result(self) -> Where:
        return {**self.where, **self.rows_of(self.tile)}

    def store(self, output, total: jax.Array, visited) -> None:
        del visited
        pairwise.store(output, total.astype(output.dtype))


def load(program: Program) -> None:
    """The role of the producer: two stages for each step that needs the keys."""
    inputs, plan = program.inputs, program.plan

    def fetch(index, i):
        here, needed, start = program.element(program.spec, index)[1:]
        rows = Rows(start["t"], plan.block_q), Rows(start["s"], plan.block_kv)
        here = {**here, "t": rows[0], "s": rows[1]}
        count = jnp.int32(needed.count)

        @pl.when(count > 0)
        def _():
            first = ProductStage(inputs.q.at(here), inputs.k.at(here))
            program.pipeline.fill(i, first)
            second = ProductStage(inputs.saved.do.at(here), inputs.v.at(here))
            program.pipeline.fill(i + 1, second)

        return i + 2 * count

    lax.fori_loop(program.first, program.end, fetch, jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class Consumer(gradients.Consumer):
    """A consumer warpgroup, which owns 64 rows of the thread block's tile.

    Attributes:
      rows: its rows, in tiles of the thread block.
      where: the place of its part of the result.
      spec: the thread block's, with the bias where it is loaded to.
    """

    program: Program
    rows: Any
    where: Where
    spec: AttentionSpec

    @classmethod
    def start(cls, program: Program) -> Consumer:
        """Loads its part of the bias, if that comes in tiles."""
        me, refs, spec = program.warpgroup, program.refs, program.spec
        rows, where = pl.ds(me * ROWS, ROWS), program.result()
        if program.plan.takes_turns:
            program.plan.ping_pong.start(me)
        if refs.bias is not None:
            view, *_ = prefetch.pair_values(spec)
            bias, full = refs.bias.ref.at[me], refs.bias_full.at[me]
            plgpu.copy_gmem_to_smem(view.at(where), bias, full)
            plgpu.barrier_wait(full)
            spec = prefetch.with_pair_tile(spec, bias)
        return cls(program, rows, where, spec)

    def issue(self, qk, dp, i) -> None:
        """Issues the products of a step, whose stages are i and i + 1."""
        turns, me = self.plan.ping_pong, self.program.warpgroup
        if self.plan.takes_turns:
            turns.wait(me)
        self._issue(qk, i)
        self._issue(dp, i + 1)
        if self.plan.takes_turns:
            turns.pass_on(me)

    def _issue(self, accumulator, i) -> None:
        """Issues the product of its rows and the keys of stage i, once these are."""
        refs, pipeline = self.refs, self.program.pipeline
        pipeline.wait(i)
        # Addressed anew in every step of the loop.
        stage = support.keep_in_loop(pipeline.stage(i), i)
        rows, keys = refs.rows.ref.at[stage, self.rows], pipeline.at(i).keys.ref
        plgpu.wgmma(accumulator, rows, support.transposed(keys))


def compute(program: Program) -> None:
    """The role of a consumer: its rows of the result, summed over the steps."""
    consumer, plan = Consumer.start(program), program.plan

    def loop(spec: AttentionSpec):
        add = functools.partial(_add, dataclasses.replace(consumer, spec=spec))
        start = jnp.int32(0), jnp.zeros((ROWS, plan.block_kv), F32)
        return lax.fori_loop(program.first, program.end, add, start)

    i, total = program.with_spec(loop, consumer.spec)
    (output,) = program.outputs
    total = total * program.spec.dropout_scale
    program.store(output.at(consumer.where), total, i > 0)


def _add(consumer: Consumer, index, state):
    """Adds a step to the sum, if it needs the block of keys.

    Args:
      state: the number of the step's first stage, and the sum.
    """
    i, total = state
    _, here, needed, start = consumer.program.element(consumer.program.spec, index)
    where = {**here, **consumer.program.rows_of(start)}
    masked = _masked(needed)
    visit = functools.partial(_visit, consumer, index, i, where, masked, total)
    if isinstance(needed.count, int) and needed.count == 1:
        return i + 2, visit()
    count = jnp.int32(needed.count)
    return i + 2 * count, lax.cond(count > 0, visit, lambda: total)


def _masked(needed: Visited):
    """Whether pairs of a range of one block may be masked, if that can be."""
    return jnp.int32(needed.edges) > 0 if gradients.has_edges(needed) else False


def _visit(consumer: Consumer, index, i, where, masked, total) -> jax.Array:
    """The sum with a step added, whose stages are i and i + 1."""
    program, saved = consumer.program, consumer.program.inputs.saved
    spec, *_ = program.element(consumer.spec, index)
    lse, delta = (support.load_vector(x.at(where), 0) for x in (saved.lse, saved.delta))
    plan, pipeline = consumer.plan, program.pipeline

    def gradient(qk_acc, dp_acc):
        pairs = plan.pairs(spec, where, masked) if plan.has_tile else None
        consumer.issue(qk_acc, dp_acc, i)
        qk = plgpu.wgmma_accumulator_load(qk_acc, wait_n=1)
        pipeline.release(i)
        if pairs is None:
            pairs = plan.pairs(spec, where, masked)
        again = gradients.recompute_pairs(plan, pairs, qk, lse)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        pipeline.release(i + 1)
        pulled = again.pull(dp, again.pairs.along(delta, "t"))
        (name,) = spec.score.operands
        return total + pulled.operand(name, qk)

    return pl.run_scoped(gradient, plan.accumulator, plan.accumulator)
