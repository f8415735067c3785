"""The tile scheduler: which work tiles each thread block of a kernel computes.

A work tile is a block of rows of one head and batch entry. A thread block has slots 0,
1 and so on, with a work tile in each, and goes through them in this order. Its loads
run on from tile to tile, which those of the next thread block on a multiprocessor
cannot. There are two kinds of schedule:

    static    Tiles cost the same, or are sorted by cost. Which ones a thread block
              computes is known before, so that all take equally long.
    dynamic   The cost of a tile is unknown. A thread block takes the next tile of all
              when it has loaded its last one. A counter in global memory says which.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import measured, support

# Sets of slots are the bits of an int32 that is not negative.
MOST_TILES = 31


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Thread blocks that go through work tiles, one in each slot.

    Attributes:
      tiles: how many there are.
      thread_blocks: how many, at most as many as tiles.
      resident: how many of them run at the same time. Then come as many others.
      is_static: whether each thread block's tiles are chosen before anything runs.
    """

    tiles: int
    thread_blocks: int
    resident: int
    is_static: bool

    @classmethod
    def of(cls, tiles: int, multiprocessors: int, *, uniform_cost: bool) -> Schedule:
        """One thread block or more on each multiprocessor.

        If a thread block would have more than `MOST_TILES`, a multiprocessor has
        several, one after the other. In a static schedule those that run together have
        tiles that lie together. In a dynamic one a thread block whose slots are all
        used leaves other tiles to its multiprocessor's next.

        Args:
          uniform_cost: whether tiles take equally long, or are known to be sorted by
            how long they take.
        """
        resident = min(tiles, multiprocessors)
        is_static = uniform_cost or tiles <= resident
        mean_tiles = MOST_TILES
        if not is_static:
            mean_tiles = measured.here().numbers.mean_tiles
        waves = -(-tiles // (mean_tiles * resident))
        return cls(tiles, waves * resident, resident, is_static)

    @property
    def most_tiles(self) -> int:
        """How many slots a thread block has: some may stay empty."""
        if self.is_static:
            return -(-self.tiles // self.thread_blocks)
        return min(MOST_TILES, self.tiles)

    @property
    def taken_tiles(self) -> int:
        """How many tiles a thread block may take as it goes; 0 if all are static."""
        return 0 if self.is_static else self.most_tiles

    def tile(self, thread_block, slot):
        """The tile in a slot of a thread block, in a static schedule.

        Tiles are given out in rows of one for each resident thread block, every other
        row backwards. So the sums of their costs are alike where tiles are sorted.
        """
        row, place = slot, thread_block
        if self.thread_blocks > self.resident:
            wave = lax.div(jnp.int32(thread_block), jnp.int32(self.resident))
            row = slot + wave * self.most_tiles
            place = thread_block - wave * self.resident
        back = (slot & 1) * (self.resident - 1 - 2 * place)
        return row * self.resident + place + back

    def slots(self, thread_block):
        """The set of slots in which a thread block has a tile, in a static schedule."""
        waves = self.thread_blocks // self.resident  # at most so many rows are missing
        last = range(max(self.most_tiles - waves, 0), self.most_tiles)
        lacks = (self.tile(thread_block, slot) >= self.tiles for slot in last)
        missing = functools.reduce(
            operator.add, (jnp.asarray(x, jnp.int32) for x in lacks)
        )
        most = jnp.int32((1 << self.most_tiles) - 1)
        return lax.shift_right_logical(most, missing)

    def fold(self, slots, visit: Callable, state):
        """Runs `state = visit(slot, state)` for the slots in a set."""

        def one(slot, state):
            is_in = has(slots, slot)
            return lax.cond(is_in, lambda: visit(slot, state), lambda: state)

        most = jnp.int32(self.most_tiles)
        return lax.fori_loop(jnp.int32(0), most, one, state)


def has(slots, slot):
    """Whether a slot is in a set."""
    return (slots >> slot) & 1 == 1


def has_next(slots, slot):
    """Whether the slot after this one is in a set."""
    return has(slots >> 1, slot)


def has_previous(slots, slot):
    """Whether the slot before this one is in a set."""
    return has(slots << 1, slot)


@dataclasses.dataclass(frozen=True)
class TileSet:
    """Some tiles of a thread block: those in a set of slots."""

    schedule: Schedule
    slots: Any

    def has_next(self, slot):
        return has_next(self.slots, slot)

    def has_previous(self, slot):
        return has_previous(self.slots, slot)

    def fold(self, visit: Callable, state):
        """Runs `state = visit(slot, state)` for all of them."""
        return self.schedule.fold(self.slots, visit, state)


@dataclasses.dataclass(frozen=True)
class StaticTiles(TileSet):
    """All tiles of a thread block in a static schedule."""

    thread_block: Any

    @classmethod
    def of(cls, schedule: Schedule, thread_block) -> StaticTiles:
        return cls(schedule, schedule.slots(thread_block), thread_block)

    def tile(self, slot):
        """The number of the tile in a slot."""
        return self.schedule.tile(self.thread_block, slot)

    def of_pass(self, is_first, slots) -> TileSet:
        """The tiles of a pass: all in the first one, else those in a set of slots."""
        return TileSet(self.schedule, jnp.where(is_first, self.slots, slots))

    def take(self, slot) -> None:
        """Takes a tile into a slot: the producer does so once for each slot."""

    def wait_for(self, slot) -> None:
        """Waits until a slot has a tile: each consumer does so once for each slot."""


@dataclasses.dataclass(frozen=True)
class DynamicTiles:
    """All tiles of a thread block in a dynamic schedule.

    Attributes:
      words: int32 in shared memory. The last ones are the number of each slot's tile.
      taken: a barrier for each slot, which says that its tile's number is there.
      counter: of the next tile that nobody took, in global memory.
    """

    schedule: Schedule
    words: Any
    taken: Any
    counter: Any

    @classmethod
    def of(cls, schedule: Schedule, words, taken) -> DynamicTiles:
        """Is called once in a kernel: all thread blocks have one counter."""
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR((1,)))
        return cls(schedule, words, taken, counter.at[0])

    def _is_slot(self, slot):
        return jnp.int32(slot) < self.schedule.most_tiles

    def _word(self, slot):
        return self.words.shape[0] - self.schedule.most_tiles + slot

    def tile(self, slot):
        """As of `StaticTiles`."""
        return support.warp_uniform(self.words[self._word(slot)])

    def take(self, slot) -> None:
        """As of `StaticTiles`."""

        @pl.when(self._is_slot(slot))
        def _():
            support.fetch_add(self.counter, self.words.at[self._word(slot)])
            plgpu.barrier_arrive(self.taken.at[slot])

    def wait_for(self, slot) -> None:
        """As of `StaticTiles`."""
        is_slot = self._is_slot(slot)
        pl.when(is_slot)(lambda: plgpu.barrier_wait(self.taken.at[slot]))

    def has_first(self):
        """Whether there is a tile at all."""
        return self._has(jnp.int32(0))

    def _has(self, slot):
        """Whether a slot has a tile, which is known of slot 0 and of the next one."""
        last = jnp.minimum(slot, self.schedule.most_tiles - 1)
        return self._is_slot(slot) & (self.tile(last) < self.schedule.tiles)

    def of_pass(self, is_first, slots) -> DynamicPass:
        """As of `StaticTiles`."""
        return DynamicPass(self, is_first, slots)

    def has_next(self, slot):
        return self._has(slot + 1)


@dataclasses.dataclass(frozen=True)
class DynamicPass:
    """The tiles of a pass in a dynamic schedule.

    Attributes:
      tiles: of the thread block.
      is_first: whether the pass goes through all of them, as they are taken.
      slots: those that it goes through otherwise.
    """

    tiles: DynamicTiles
    is_first: Any
    slots: Any

    def has_next(self, slot):
        """As of `TileSet`."""
        return self._either(self.tiles.has_next(slot), has_next(self.slots, slot))

    def has_previous(self, slot):
        """As of `TileSet`."""
        return self._either(slot > 0, has_previous(self.slots, slot))

    def fold(self, visit: Callable, state):
        """As of `TileSet`."""
        schedule = self.tiles.schedule

        def one(slot, state):
            goes_on, inner = state

            def step():
                after = visit(slot, inner)
                return self.tiles.has_next(slot).astype(jnp.int32), after

            is_in = self._either(goes_on != 0, has(self.slots, slot))
            return lax.cond(is_in, step, lambda: state)

        most = jnp.int32(schedule.most_tiles)
        first = self.tiles.has_first().astype(jnp.int32)
        return lax.fori_loop(jnp.int32(0), most, one, (first, state))[1]

    def _either(self, in_first, in_retry):
        return jnp.where(self.is_first, in_first, in_retry)


def tiles_of(schedule: Schedule, thread_block, words, taken):
    """All tiles of a thread block.

    Args:
      words: int32 in shared memory, the last ones for the tiles that it takes.
      taken: a barrier for each slot of a dynamic schedule.
    """
    if schedule.is_static:
        return StaticTiles.of(schedule, thread_block)
    return DynamicTiles.of(schedule, words, taken)


def heads_per_wave(heads: int, blocks: int, thread_blocks: int, most: int) -> int:
    """Of how many heads the tiles of the same block should lie side by side.

    So many that rows of one length are enough for all thread blocks, where lengths
    differ: each then gets of all lengths. But few enough for their keys and values to
    stay in the GPU's cache, if that can be.

    Args:
      heads: and batch entries, of which the result is a divisor.
      blocks: of each head.
      thread_blocks: that run at the same time.
      most: heads that the cache holds.
    """
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    enough = [n for n in divisors if n * blocks >= thread_blocks]
    held = [n for n in enough if n <= most]
    return held[-1] if held else (enough or divisors[-1:])[0]
