"""What a forward kernel runs with, of any architecture: operands, work tiles, keys.

A work tile is a block of query rows of one head and batch entry. A thread block has one
(`Program`), or goes through several (`TilesProgram`): its producer then loads the keys
and values of all of them (`load`), one after the other.

    of a kernel      a plan (`Plan`, `TilesPlan`), Refs with pipelines `k` and `v`, and
                     what a consumer does with a work tile
    of this file     which work tiles there are, which blocks of keys meet one, and how
                     these are loaded
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import device
from pallas_kernels.core.axes import Named
from pallas_kernels.core.lists import Visited
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import memory
from pallas_kernels.mosaic_gpu.plan import Plan
from pallas_kernels.mosaic_gpu.tile_scheduler import (
    DynamicTiles,
    Schedule,
    StaticTiles,
)
from pallas_kernels.program import Where, key_blocks, query_start


@dataclasses.dataclass(frozen=True)
class TilesPlan(Plan):
    """The plan of a kernel whose thread blocks go through several work tiles.

    Attributes:
      schedule: which thread blocks compute which work tiles.
    """

    schedule: Schedule

    @property
    def programs(self) -> int:
        return self.schedule.thread_blocks


def tile_grid(
    operands: Sequence[Named],
    spec: AttentionSpec,
    outputs: Sequence[Named],
    launch: Launch,
) -> memory.TileGrid:
    """The work tiles of a call, in the order in which they are computed.

    Args:
      operands: queries, keys and values.
      spec: of `Named`.
      outputs: shape structs.
      launch: has the blocks.
    """
    arrays = [*operands, *jax.tree.leaves(spec), *outputs]
    by_block = spec.traits.cost_grows
    return memory.TileGrid.of("forward", arrays, launch, by_block=by_block)


def schedule(grid: memory.TileGrid, *, uniform_cost: bool) -> Schedule:
    """The schedule of a grid's work tiles on this GPU (`Schedule.of`)."""
    return Schedule.of(grid.tiles, device.multiprocessors(), uniform_cost=uniform_cost)


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
class KeyBlocks:
    """The blocks of keys that a work tile's rows attend, one at least.

    Attributes:
      blocks: numbered as they are visited: all edges come before the full blocks
        (`Range.at`).
      block_kv: keys of a block.
      known: how many there are, if that has been computed (`counted`).
    """

    blocks: Visited
    block_kv: int
    known: jax.Array | None = None

    @property
    def count(self) -> jax.Array:
        """How many there are, computed where it is asked for."""
        return jnp.int32(self.blocks.count) if self.known is None else self.known

    def counted(self) -> KeyBlocks:
        """The same, with the count computed here, once: loops then only read it."""
        return dataclasses.replace(self, known=self.count)

    @property
    def edges(self) -> jax.Array:
        """In how many of them, the first ones, pairs may be masked."""
        return jnp.int32(self.blocks.edges)

    def at(self, i) -> Rows:
        """The keys of block number i."""
        return Rows(self.blocks.at(i)[1] * self.block_kv, self.block_kv)


@dataclasses.dataclass(frozen=True)
class Program:
    """A plan with what its kernel is given, in one warpgroup of a thread block.

    Attributes:
      plan: of the call.
      q, k, v, o, lse: views of global memory.
      spec: of views, of which nothing is loaded yet.
      refs: shared memory.
      warpgroup: the number of this one. The last one is the producer, if there is one.
    """

    plan: Any
    q: memory.View
    k: memory.View
    v: memory.View
    spec: AttentionSpec
    o: memory.View
    lse: memory.View
    refs: Any
    warpgroup: jax.Array

    def tile_of(self, layout: memory.TileGrid) -> WorkTile:
        """The work tile of a layout that is in a program (`TileGrid.at_tile`)."""
        return WorkTile(*query_start(self.spec, layout))

    def key_blocks(self, tile: WorkTile, this=None) -> KeyBlocks:
        """The blocks of keys that a tile's rows attend.

        Args:
          this: the pass over work tiles (`TilesProgram.passes`), or None if there is
            but one.
        """
        found = key_blocks(tile.spec, tile.where, self.plan.layout, tile.start)
        return KeyBlocks(self.visited(found, this), self.plan.block_kv)

    def visited(self, found: Visited, this) -> Visited:
        """Blocks of keys as a work tile visits them in a pass."""
        del this
        return found.with_a_block()


@dataclasses.dataclass(frozen=True)
class TilesProgram(Program):
    """One whose thread block goes through several work tiles.

    Attributes:
      scheduler: the thread block's work tiles.
    """

    scheduler: StaticTiles | DynamicTiles

    @classmethod
    def of(cls, plan: TilesPlan, inputs, outputs, refs, **own: Any) -> Self:
        """From what a kernel gets.

        Args:
          inputs: queries, keys, values and the spec.
          outputs: output and log-sum-exp.
          own: further fields.
        """
        warpgroup, thread_block = lax.axis_index("warpgroup"), lax.axis_index("program")
        scheduler = cls.scheduler_of(plan, refs, thread_block)
        (q, k, v, spec), (o, lse) = inputs, outputs
        views = q, k, v, spec, o, lse
        return cls(plan, *views, refs, warpgroup, scheduler, **own)

    @classmethod
    def scheduler_of(cls, plan: TilesPlan, refs, thread_block):
        """The work tiles of a thread block: here of a static schedule."""
        del refs
        return StaticTiles.of(plan.schedule, thread_block)

    def work_tile(self, slot) -> WorkTile:
        """The work tile in a slot of the thread block."""
        return self.tile_of(self.plan.layout.at_tile(self.scheduler.tile(slot)))

    def passes(self, visit: Callable, state):
        """Runs `state = visit(pass, slot, state)` for the work tiles of all passes.

        Here there is one, which is None, and the schedule is static.
        """
        assert isinstance(self.scheduler, StaticTiles)
        return self.scheduler.fold(functools.partial(visit, None), state)

    def fill(self, this, loaded, i, tile: WorkTile, keys: Where) -> None:
        """Loads the keys and values of block i of a work tile.

        Args:
          this: the pass (`passes`).
          loaded: how many blocks of keys were loaded before those of the tile.
          keys: where the block lies.
        """
        del this, tile
        self.refs.k.fill(loaded + i, self.k.at(keys))
        self.refs.v.fill(loaded + i, self.v.at(keys))


def load(program: TilesProgram) -> None:
    """The producer: it loads keys and values of the work tiles of all passes.

    In the first pass it also takes the work tiles of a dynamic schedule.
    """
    scheduler = program.scheduler

    def visit(this, slot, loaded):
        loaded = _load_tile(program, this, slot, loaded)
        is_first = True if this is None else this.is_first
        pl.when(is_first)(lambda: scheduler.take(slot + 1))
        return loaded

    scheduler.take(0)
    program.passes(visit, jnp.int32(0))


def _load_tile(program: TilesProgram, this, slot, loaded):
    """Fills the pipelines with the keys and values of a work tile.

    Args:
      this: the pass (`Program.key_blocks`).
      slot: of the thread block, which has the work tile.
      loaded: how many blocks of keys were loaded before.

    Returns:
      How many have been loaded now.
    """
    tile = program.work_tile(slot)
    blocks = program.key_blocks(tile, this)

    @pl.loop(0, blocks.count)
    def _(i):
        program.fill(this, loaded, i, tile, {**tile.where, "s": blocks.at(i)})

    return loaded + blocks.count
