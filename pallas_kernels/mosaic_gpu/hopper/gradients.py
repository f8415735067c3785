"""What the kernels of the backward pass have in common.

`plan` says how a kernel is divided by role.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.axes import Named
from pallas_kernels.core.lists import Visited
from pallas_kernels.core.masks import Tiling
from pallas_kernels.core.pairs import Pairs, Recomputed
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.core.visits import Visits
from pallas_kernels.layout import Rows
from pallas_kernels.mosaic_gpu import memory, plan, support
from pallas_kernels.mosaic_gpu.barriers import (
    NamedBarrier,
    NamedBarriers,
    PingPong,
)
from pallas_kernels.mosaic_gpu.hopper import tuning
from pallas_kernels.mosaic_gpu.pipeline import Pipeline
from pallas_kernels.mosaic_gpu.shared_memory import Tile
from pallas_kernels.mosaic_gpu.tiles import Tiles, visits_of
from pallas_kernels.program import Where, key_program, with_end

F32 = jnp.float32


class Saved(NamedTuple):
    """What the backward pass has of query rows beside q.

    Attributes:
      lse: log-sum-exps in units of log2 (`flash2.lse_log2`), axis `t` among others.
      delta: `flash2.delta`, axis `t` among others.
      do: the gradient of the output, axes `t d` among others.
    """

    lse: Any
    delta: Any
    do: Any


class Inputs(NamedTuple):
    """The operands of a kernel: `Named` arrays outside of it, `memory.View`s inside.

    Attributes:
      q, k, v: axes `t h`, `s h` and `s d` among others.
      spec: of the call.
      saved: of the query rows.
      visits: which blocks meet, where arrays decide it and the kernel must know.
    """

    q: Any
    k: Any
    v: Any
    spec: AttentionSpec
    saved: Saved
    visits: Visits | None = None

    def with_outputs(self, outputs: Sequence[Named]) -> list[Named]:
        """All operands of a call, from which a layout is made."""
        arrays = self.q, self.k, self.v
        return [*arrays, *jax.tree.leaves(self.spec), *self.saved, *outputs]

    def with_visits(self, layout: memory.TileGrid) -> Inputs:
        visits = visits_of(self.spec, layout)
        size, rows = layout.size, layout.rows
        sizes = rows["t"], rows["s"], size["t"], size["s"]
        tiling = Tiling(*sizes, self.spec.positions)
        return self._replace(spec=self.spec.for_pairs(tiling), visits=visits)


@dataclasses.dataclass(frozen=True)
class Plan(plan.Plan):
    """The plan of a kernel of the backward pass."""

    registers = tuning.REGISTERS

    @property
    def accumulator(self):
        """Registers in which a product of the block's queries and keys is summed."""
        rows, columns = self.pair_block.values()
        return plgpu.WGMMAAccumulatorRef((rows, columns), F32)

    @functools.cached_property
    def ping_pong(self) -> PingPong:
        """Turns of the consumers, in kernels whose consumers take turns."""
        return self._named_barriers[1]

    @functools.cached_property
    def width(self) -> dict[str, int]:
        return tuning.head_tiles(self.layout.size)

    @functools.cached_property
    def swizzled(self) -> dict[str, int]:
        """Elements that the swizzled parts of these tiles divide (`support.tile`)."""
        return memory.of_tiles(self.layout.size, self.width)[0]

    def head_tile(
        self,
        head: str,
        *shape: int,
        dtype: Any = None,
        swizzled: int | None = None,
        along: str | None = None,
    ) -> Tile:
        """Tiles in shared memory whose rows are of a head.

        Args:
          head: `h` or `d`.
          shape: how many tiles, and how many rows of each.
          dtype: None for that of the operands.
          swizzled: as `Plan.swizzled` has it, where that is not meant.
          along: the axis of the rows, if the array has rows of any number.
        """
        size = self.layout.size
        return Tile(
            support.tile(
                (*shape, self.width[head]),
                dtype or self.dtype,
                swizzled or self.swizzled[head],
                (size[along], size[head]) if along else (0, 0),
            )
        )

    def sync_consumers(self) -> None:
        """Every consumer waits here for all the others."""
        self._named_barriers[0].sync()

    @functools.cached_property
    def _named_barriers(self) -> tuple[NamedBarrier, PingPong]:
        barriers = NamedBarriers(warpgroups=self.consumers + 1)
        return barriers.barrier(self.consumers), barriers.ping_pong(self.consumers)


@dataclasses.dataclass(frozen=True)
class Program:
    """A thread block.

    Attributes:
      plan: of the kernel.
      inputs: the operands, as they are in global memory.
      outputs: the results, likewise.
      refs: its shared memory.
      warpgroup: the number of the warpgroup that runs this.
      spec: with scalars loaded.
      where: the place of the thread block.
    """

    plan: Any
    inputs: Inputs
    outputs: Sequence[memory.View]
    refs: Any
    warpgroup: Any
    spec: AttentionSpec
    where: Where


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup.

    Attributes:
      program: of its thread block.
    """

    program: Any

    @property
    def plan(self):
        return self.program.plan

    @property
    def refs(self):
        return self.program.refs


def recompute_rows(
    plan: Plan, spec: AttentionSpec, where: Where, masked, qk: jax.Array, lse: jax.Array
) -> Recomputed:
    """The probabilities of a block of pairs, [queries, keys].

    Args:
      spec, where, masked: as of `Plan.pairs`.
      qk: products of queries and keys.
      lse: of the queries.
    """
    return recompute_pairs(plan, plan.pairs(spec, where, masked), qk, lse)


def recompute_pairs(
    plan: Plan, pairs: Pairs, qk: jax.Array, lse: jax.Array
) -> Recomputed:
    """`recompute_rows` of pairs that have loaded what they read."""
    scores = pairs.scores_of(qk, plan.dtype)
    return pairs.recompute(scores, pairs.along(lse, "t"))


def has_edges(needed: Visited) -> bool:
    """Whether some block of a range may hold masked pairs, as far as is known here."""
    return not (isinstance(needed.edges, int) and needed.edges == 0)


# Thread blocks that own keys.


class QueryStage(NamedTuple):
    """What the first products of a work tile need: queries, and their log-sum-exps."""

    q: Any
    lse: Any


class OutputStage(NamedTuple):
    """What the second ones need: the gradients of outputs, and delta."""

    do: Any
    delta: Any


def declare_stages(plan: Plan, q: Tile, do: Tile) -> dict[str, Any]:
    """Fields that every `Refs` of such a thread block has beside its tiles.

    These are the vectors and barriers of two pipelines, of `QueryStage` and of
    `OutputStage`, and the barrier at which the thread block's keys and values arrive.
    """
    vector = Tile(plgpu.SMEM((plan.stages, plan.block_q), F32))
    stages = QueryStage(q, vector), OutputStage(do, vector)
    first, second = (Pipeline.declare(x, plan.stages, plan.consumers) for x in stages)
    return {
        "lse": vector,
        "q_full": first.full,
        "q_empty": first.empty,
        "delta": vector,
        "do_full": second.full,
        "do_empty": second.empty,
        "keys_full": plgpu.Barrier(num_barriers=(), num_arrivals=2),
    }


@dataclasses.dataclass(frozen=True)
class KeyProgram(Program):
    """A thread block that owns a block of keys. Its spec is without its `keys`.

    It visits work tiles: a block of queries of one query head of its group each.

    Attributes:
      tiles: its work tiles.
    """

    tiles: Tiles

    @classmethod
    def start(cls, plan: Plan, inputs: Inputs, outputs, refs) -> Self:
        warpgroup, layout = lax.axis_index("warpgroup"), plan.layout
        spec = dataclasses.replace(inputs.spec, keys=None)
        spec, where = key_program(with_end(spec, layout), layout, inputs.visits)
        tiles = Tiles.of(spec, where, layout, inputs.visits)
        return cls(plan, inputs, outputs, refs, warpgroup, spec, where, tiles)

    @property
    def block(self) -> Where:
        """Where the block of keys lies."""
        return {**self.where, "s": Rows(self.where["s"].start, self.plan.block_kv)}

    @property
    def query_pipeline(self) -> Pipeline:
        """Of `QueryStage`, a work tile a stage."""
        refs = self.refs
        tiles = QueryStage(refs.q, refs.lse)
        return Pipeline(tiles, refs.q_full, refs.q_empty, self.plan.stages)

    @property
    def do_pipeline(self) -> Pipeline:
        """Of `OutputStage`, likewise."""
        refs = self.refs
        tiles = OutputStage(refs.do, refs.delta)
        return Pipeline(tiles, refs.do_full, refs.do_empty, self.plan.stages)

    def lse(self, pairs: Pairs, tile) -> jax.Array:
        """Log-sum-exps of a work tile's queries, against its pairs."""
        vector = self.query_pipeline.at(tile).lse.ref
        return pairs.along(support.load_vector(vector, 1, shared=True), "t")

    def delta(self, pairs: Pairs, tile) -> jax.Array:
        """delta of a work tile's queries, likewise."""
        vector = self.do_pipeline.at(tile).delta.ref
        return pairs.along(support.load_vector(vector, 1, shared=True), "t")

    def recompute(self, spec, where, masked, tile, qk: jax.Array) -> Recomputed:
        """The probabilities of a work tile's pairs, transposed: [keys, queries].

        Args:
          spec, where, masked: as of `Plan.pairs`.
          qk: products of keys and queries.
        """
        pairs = self.plan.pairs(spec, where, masked)
        lse = self.lse(pairs, tile)
        return pairs.recompute(pairs.scores_of(qk, self.plan.dtype), lse)


def load(program: KeyProgram) -> None:
    """The producer loads the block's keys and values, then queries tile by tile."""
    refs, inputs = program.refs, program.inputs
    saved = inputs.saved
    for array, held in ((inputs.k, refs.k), (inputs.v, refs.v)):
        source, target = array.at(program.block), held.copied.at[0]
        plgpu.copy_gmem_to_smem(source, target, refs.keys_full)

    @pl.loop(0, program.tiles.count)
    def _(tile):
        here = program.tiles.at(program.tiles.place(tile))
        queries = QueryStage(inputs.q.at(here), saved.lse.at(here))
        program.query_pipeline.fill(tile, queries)
        outputs = OutputStage(saved.do.at(here), saved.delta.at(here))
        program.do_pipeline.fill(tile, outputs)
