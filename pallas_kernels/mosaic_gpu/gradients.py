"""What the kernels of the backward pass have in common.

A thread block has consumer warpgroups, which compute, and one producer warpgroup, which
copies. The producer fills the stages of a pipeline in shared memory by TMA, and the
consumers read and release them (`ring.Ring`).

A kernel is divided by role. Each kernel file has

- a `Plan`, which is made once, outside of the kernel: blocks, layout, widths of tiles;
- `Shared`, which declares its shared memory and barriers and names them in the kernel;
- a `Program`, which is what a thread block has: the plan, operands, shared memory, the
  number of the warpgroup, and which rows are its own;
- a function for each role: what the producer loads, what a consumer computes and
  stores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.axes import Named
from pallas_kernels.core.pairs import Pairs, Recomputed
from pallas_kernels.core.ranges import Range
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.core.visits import Visits
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import memory, support, tuning
from pallas_kernels.mosaic_gpu.ring import Ring
from pallas_kernels.mosaic_gpu.tiles import Tiles, visits_of
from pallas_kernels.mosaic_gpu.tuning import ROWS
from pallas_kernels.program import Where, key_program, with_end
from pallas_kernels.program import pairs as pairs_of_block

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

    def and_outputs(self, outputs: Sequence[Named]) -> list[Named]:
        """All operands of a call, from which a layout is made."""
        arrays = self.q, self.k, self.v
        return [*arrays, *jax.tree.leaves(self.spec), *self.saved, *outputs]

    def with_visits(self, layout: memory.Layout) -> Inputs:
        return self._replace(visits=visits_of(self.spec, layout))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel of the backward pass decides once, before it is traced.

    Attributes:
      launch: the blocks and the rest.
      layout: how thread blocks divide the call.
      consumers: how many warpgroups compute; the producer is one more.
      dtype: of the operands, and of p and dz in products.
    """

    launch: Launch
    layout: memory.Layout
    consumers: int
    dtype: Any

    @property
    def block_q(self) -> int:
        return self.launch.blocks.block_q

    @property
    def block_kv(self) -> int:
        return self.launch.blocks.block_kv

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return self.launch.blocks.num_stages

    @property
    def pair_block(self) -> dict[str, int]:
        """The block of pairs that a consumer computes: its axes in order, their sizes.

        This one is of a consumer that owns 64 queries.
        """
        return {"t": ROWS, "s": self.block_kv}

    @property
    def accumulator(self):
        """Registers in which a product of the block's queries and keys is summed."""
        return plgpu.ACC(tuple(self.pair_block.values()), F32)

    def pairs(self, spec: AttentionSpec, where: Where, masked) -> Pairs:
        """The block of pairs at `where`.

        Args:
          spec: with what does not vary inside the loop loaded.
          masked: whether some of them may be masked.
        """
        order = tuple(self.pair_block)
        return pairs_of_block(spec, where, order, masked, self.launch)

    @functools.cached_property
    def width(self) -> dict[str, int]:
        """Columns of tiles of heads, by axis: `h` of queries and keys, `d` of values.

        Beyond an array a tile holds 0, and nothing of it is written.
        """
        return tuning.head_tiles(self.layout.size)

    @functools.cached_property
    def swizzled(self) -> dict[str, int]:
        """Elements that the swizzled parts of these tiles divide (`support.tile`)."""
        return memory.of_tiles(self.layout.size, self.width)[0]

    def tile(
        self,
        head: str,
        *shape: int,
        dtype: Any = None,
        swizzled: int | None = None,
        along: str | None = None,
    ):
        """Tiles in shared memory whose rows are of a head.

        Args:
          head: `h` or `d`.
          shape: how many tiles, and how many rows of each.
          dtype: None for that of the operands.
          swizzled: as `Plan.swizzled` has it, where that is not meant.
          along: the axis of the rows, if the array has rows of any number.
        """
        size = self.layout.size
        return support.tile(
            (*shape, self.width[head]),
            dtype or self.dtype,
            swizzled or self.swizzled[head],
            (size[along], size[head]) if along else (0, 0),
        )

    def call(
        self,
        kernel: Callable,
        inputs: Inputs,
        results: Sequence[Named],
        *,
        shared: Mapping[str, Any],
        name: str,
    ) -> tuple[Named, ...]:
        """Runs `kernel(plan, inputs, results, refs)` in every thread block.

        Args:
          results: shape structs.
          shared: what `Shared.declare` gave.
          name: of the kernel in profiles.
        """
        _, wider = memory.of_tiles(self.layout.size, self.width)
        return memory.call(
            functools.partial(kernel, self),
            self.layout,
            inputs,
            tuple(results),
            block={**self.pair_block, **wider},
            tiles=self.width,
            scratch=shared,
            warpgroups=self.consumers + 1,
            name=name,
        )

    def sync_consumers(self) -> None:
        """Every consumer waits here for all the others.

        Named barrier 0 is the thread block's own, the next ones are its warpgroups'.
        """
        number = jnp.int32(self.consumers + 2)
        support.named_barrier("sync", number, self.consumers)


def run_roles(program, produce: Callable, consume: Callable) -> None:
    """Runs the role of this warpgroup: the last one produces, all others consume.

    The producer gives up registers, and the consumers take them.

    Args:
      program: a thread block, with its `plan` and the number of this `warpgroup`.
      produce, consume: the roles, functions of the thread block.
    """
    consumers, warpgroup = program.plan.consumers, program.warpgroup
    fewer, more = tuning.REGISTERS[consumers]

    @pl.when(warpgroup == consumers)
    def _():
        plgpu.set_max_registers(fewer, action="decrease")
        produce(program)

    @pl.when(warpgroup < consumers)
    def _():
        plgpu.set_max_registers(more, action="increase")
        consume(program)


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
    def shared(self):
        return self.program.shared


def recompute_rows(
    plan: Plan, spec: AttentionSpec, where: Where, masked, qk: jax.Array, lse: jax.Array
) -> Recomputed:
    """The probabilities of a block of pairs, [queries, keys].

    Args:
      spec, where, masked: as of `Plan.pairs`.
      qk: products of queries and keys.
      lse: of the queries.
    """
    pairs = plan.pairs(spec, where, masked)
    scores = pairs.scores_of(qk, plan.dtype)
    return pairs.recompute(scores, pairs.along(lse, "t"))


def has_edges(needed: Range) -> bool:
    """Whether some block of a range may hold masked pairs, as far as is known here."""
    return not (isinstance(needed.edges, int) and needed.edges == 0)


# Thread blocks that own keys.


@dataclasses.dataclass(frozen=True)
class KeyShared:
    """Shared memory of a thread block that owns a block of keys.

    Attributes:
      k, v: [1, block_kv, ...], its keys and values.
      k_copied, v_copied: the same memory as TMA copies it (`support.copied`).
      keys_loaded: the barrier that says that k and v are there.
      pipeline: of "q" with "lse" and of "do" with "delta", [stages, block_q, ...].
    """

    k: Any
    v: Any
    k_copied: Any
    v_copied: Any
    keys_loaded: Any
    pipeline: Ring

    @staticmethod
    def declare_keys(k, v) -> dict[str, Any]:
        """The tiles of the block of keys, and the barrier at which both arrive."""
        loaded = plgpu.Barrier(num_barriers=(), num_arrivals=2)
        return {"k": k, "v": v, "own here": loaded}

    @staticmethod
    def declare_queries(plan: Plan, q: dict, do: dict) -> dict[str, Any]:
        """The pipeline, in which vectors come with their tiles.

        Args:
          q, do: the tile, by its name.
        """
        vector = plgpu.SMEM((plan.stages, plan.block_q), F32)
        of_q, of_do = {**q, "lse": vector}, {**do, "delta": vector}
        pipeline = Ring.shared(of_q, plan.stages, readers=plan.consumers)
        return pipeline | Ring.shared(of_do, plan.stages, readers=plan.consumers)

    @classmethod
    def of(cls, plan: Plan, refs: Mapping[str, Any], **more: Any) -> Self:
        """What a kernel got for what was declared.

        Args:
          more: the fields of a subclass.
        """
        return cls(
            k=refs["k"],
            v=refs["v"],
            k_copied=support.copied(refs, "k"),
            v_copied=support.copied(refs, "v"),
            keys_loaded=refs["own here"],
            pipeline=Ring(refs, plan.stages),
            **more,
        )


@dataclasses.dataclass(frozen=True)
class KeyProgram:
    """A thread block that owns a block of keys.

    It visits work tiles: a block of queries of one query head of its group each.

    Attributes:
      plan: of the kernel.
      inputs: the operands, as they are in global memory.
      outputs: the results, likewise.
      shared: its shared memory.
      warpgroup: the number of the warpgroup that runs this.
      spec: with scalars loaded, and without `AttentionSpec.keys`.
      where: the place of the thread block.
      tiles: its work tiles.
    """

    plan: Any
    inputs: Inputs
    outputs: Sequence[Any]
    shared: Any
    warpgroup: Any
    spec: AttentionSpec
    where: Where
    tiles: Tiles

    @classmethod
    def start(cls, plan: Plan, inputs: Inputs, outputs, shared: KeyShared) -> Self:
        warpgroup, layout = lax.axis_index("warpgroup"), plan.layout
        spec = dataclasses.replace(inputs.spec, keys=None)
        spec, where = key_program(with_end(spec, layout), layout)
        tiles = Tiles.of(spec, where, layout, inputs.visits)
        return cls(plan, inputs, outputs, shared, warpgroup, spec, where, tiles)

    @property
    def block(self) -> Where:
        """Where the block of keys lies."""
        return {**self.where, "s": Rows(self.where["s"].start, self.plan.block_kv)}

    def along_queries(self, name: str, pairs: Pairs, tile) -> jax.Array:
        """A vector of a work tile's queries ("lse" or "delta"), against its pairs."""
        vector = self.shared.pipeline.tile(name, tile)
        return pairs.along(support.load_vector(vector, 1, shared=True), "t")

    def recompute(self, spec, where, masked, tile, qk: jax.Array) -> Recomputed:
        """The probabilities of a work tile's pairs, transposed: [keys, queries].

        Args:
          spec, where, masked: as of `Plan.pairs`.
          qk: products of keys and queries.
        """
        pairs = self.plan.pairs(spec, where, masked)
        lse = self.along_queries("lse", pairs, tile)
        return pairs.recompute(pairs.scores_of(qk, self.plan.dtype), lse)


def load(program: KeyProgram) -> None:
    """The producer loads the block's keys and values, then queries tile by tile."""
    shared, (q, k, v, _, saved, _) = program.shared, program.inputs
    for x, tile in ((k, shared.k_copied), (v, shared.v_copied)):
        plgpu.copy_gmem_to_smem(x.at(program.block), tile.at[0], shared.keys_loaded)

    @pl.loop(0, program.tiles.count)
    def _(tile):
        here, pipeline = program.tiles.at(tile), shared.pipeline
        pipeline.fill(tile, q=q.at(here), lse=saved.lse.at(here))
        pipeline.fill(tile, do=saved.do.at(here), delta=saved.delta.at(here))
