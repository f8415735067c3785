"""What the forward kernel in eight bits runs with: operands, work tiles."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.flash2 import LOG2_E
from pallas_kernels.core.lists import Visited
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Rows
from pallas_kernels.mosaic_gpu import memory
from pallas_kernels.mosaic_gpu.hopper.fp8_plan import Plan, Refs
from pallas_kernels.mosaic_gpu.tile_scheduler import (
    DynamicTiles,
    StaticTiles,
    TileSet,
    tiles_of,
)
from pallas_kernels.program import Where, key_blocks, query_start


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


def unit_of(scale: float) -> float:
    """What a product of real queries and keys is multiplied by, in units of log2."""
    return scale * LOG2_E
