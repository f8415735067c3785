"""What a forward kernel runs with: operands, shared memory and work tiles."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.lists import Visited
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Rows
from pallas_kernels.mosaic_gpu import memory
from pallas_kernels.mosaic_gpu.hopper.forward_plan import Plan, Refs, edges_first
from pallas_kernels.mosaic_gpu.tile_scheduler import (
    DynamicTiles,
    StaticTiles,
    TileSet,
    tiles_of,
)
from pallas_kernels.program import Where, key_blocks, query_start


@dataclasses.dataclass(frozen=True)
class WorkTile:
    """A block of query rows of one head and batch entry.

    Attributes:
      spec: the call's, with what is a scalar here loaded.
      where: head and batch entry.
      start: the first row.
    """

    spec: AttentionSpec
    where: Where
    start: Any


@dataclasses.dataclass(frozen=True)
class Program:
    """A plan with what its kernel is given, in one warpgroup of a thread block.

    Attributes:
      plan: of the call.
      q, k, v, o, lse, largest: views of global memory; None if nobody asks for the
        largest scores.
      spec: of views, of which nothing is loaded yet.
      refs: shared memory.
      warpgroup: the number of this one. The last one is the producer.
      scheduler: the thread block's work tiles.
    """

    plan: Plan
    q: memory.View
    k: memory.View
    v: memory.View
    spec: AttentionSpec
    o: memory.View
    lse: memory.View
    largest: memory.View | None
    refs: Refs
    warpgroup: jax.Array
    scheduler: StaticTiles | DynamicTiles

    @classmethod
    def of(cls, plan: Plan, inputs, outputs, refs: Refs) -> Program:
        warpgroup, thread_block = lax.axis_index("warpgroup"), lax.axis_index("program")
        words, taken = refs.tile_words.ref, refs.tile_taken
        scheduler = tiles_of(plan.schedule, thread_block, words, taken)
        (q, k, v, spec), (o, lse, *rest) = inputs, outputs
        views = q, k, v, spec, o, lse
        largest = rest[0] if rest else None
        return cls(plan, *views, largest, refs, warpgroup, scheduler)

    def work_tile(self, slot) -> WorkTile:
        """The work tile in a slot of the thread block."""
        tile = self.scheduler.tile(slot)
        return WorkTile(*query_start(self.spec, self.plan.layout.at_tile(tile)))

    def key_blocks(self, tile: WorkTile) -> tuple[Visited, jax.Array]:
        """The blocks of keys that a tile's rows attend, and how many there are.

        All edges of the range come before its full blocks (`Range.at`).
        """
        found = key_blocks(tile.spec, tile.where, self.plan.layout, tile.start)
        blocks = edges_first(found)
        # If all have a running maximum, there is one loop, over edges.
        blocks = blocks.all_edges() if self.plan.all_running else blocks
        return blocks, jnp.int32(blocks.count)

    def keys_at(self, where: Where, block) -> Where:
        """Where a block of keys lies."""
        size = self.plan.block_kv
        return {**where, "s": Rows(block * size, size)}

    def unfinished(self, retry) -> TileSet:
        """The tiles that a retry goes through, once the pass before it is done."""
        plgpu.barrier_wait(self.refs.pass_done.at[retry])
        consumers, words = self.plan.consumers, self.refs.tile_words.ref
        first = retry * consumers
        slots = functools.reduce(
            operator.or_, (words[first + i] for i in range(consumers))
        )
        return TileSet(self.plan.schedule, slots)

    def retries(self, visit: Callable, state):
        """Runs `state = visit(retry, is_final, state)` for passes after the first.

        In the final one all blocks have a running maximum.
        """
        if self.plan.storage.retries < 2:
            return visit(0, 1, state) if self.plan.storage.retries else state
        return lax.fori_loop(0, 2, lambda i, state: visit(i, i, state), state)
