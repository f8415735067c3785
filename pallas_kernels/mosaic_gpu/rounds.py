"""The tiles that a program goes through: dealt out before, or taken as it goes.

Where tiles are alike or sorted, they can be dealt out before so that programs take
equally long. Else a program takes the next tile of all when it has loaded its last one:
a counter in global memory says which. Either way loads run on from tile to tile, which
those of the next program on a multiprocessor cannot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import schedule, support
from pallas_kernels.mosaic_gpu.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class InSet:
    """Rounds that are the bits of a number."""

    schedule: Schedule
    bits: Any

    def has_next(self, r):
        return schedule.has_next(self.bits, r)

    def has_last(self, r):
        return schedule.has_last(self.bits, r)

    def fold(self, visit: Callable, state):
        """Runs `state = visit(r, state)` for all of them."""
        return self.schedule.fold(self.bits, visit, state)


@dataclasses.dataclass(frozen=True)
class Dealt(InSet):
    """All of a program's rounds, with tiles that are known before."""

    program: Any

    @classmethod
    def of(cls, schedule: Schedule, program) -> Dealt:
        return cls(schedule, schedule.rounds(program), program)

    def tile(self, r):
        return self.schedule.tile(self.program, r)

    def take(self, r) -> None:
        """Takes the tile of round r: the warpgroup that loads, once."""

    def wait_for(self, r) -> None:
        """Until round r has a tile: each other warpgroup, once, before it asks."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """All of a program's rounds, with tiles that it takes.

    Attributes:
      numbers: in shared memory; the last ones are those of each round's tile.
      here: a barrier for each round, which says that its tile's number is there.
      counter: of the next tile that nobody took, in global memory.
    """

    schedule: Schedule
    numbers: Any
    here: Any
    counter: Any

    @classmethod
    def of(cls, schedule: Schedule, numbers, here) -> Taken:
        """Once in a kernel: all programs have one counter."""
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR((1,)))
        return cls(schedule, numbers, here, counter.at[0])

    def _may_be(self, r):
        return jnp.int32(r) < self.schedule.most_rounds

    def _place(self, r):
        return self.numbers.shape[0] - self.schedule.most_rounds + r

    def tile(self, r):
        return support.warp_uniform(self.numbers[self._place(r)])

    def take(self, r) -> None:
        @pl.when(self._may_be(r))
        def _():
            support.fetch_add(self.counter, self.numbers.at[self._place(r)])
            plgpu.barrier_arrive(self.here.at[r])

    def wait_for(self, r) -> None:
        pl.when(self._may_be(r))(lambda: plgpu.barrier_wait(self.here.at[r]))

    def _has(self, r):
        """Whether round r has a tile, which is known of the first and of the next."""
        last = jnp.minimum(r, self.schedule.most_rounds - 1)
        return self._may_be(r) & (self.tile(last) < self.schedule.tiles)

    def has_next(self, r):
        return self._has(r + 1)

    def has_last(self, r):
        return r > 0

    def fold(self, visit: Callable, state):
        """As of `InSet`."""

        def one(r, state):
            goes_on, inner = state

            def step():
                after = visit(r, inner)
                return self.has_next(r).astype(jnp.int32), after

            return lax.cond(goes_on != 0, step, lambda: state)

        most = jnp.int32(self.schedule.most_rounds)
        first = self._has(jnp.int32(0)).astype(jnp.int32)
        return lax.fori_loop(jnp.int32(0), most, one, (first, state))[1]


def of(schedule: Schedule, program, numbers, taken) -> Dealt | Taken:
    """All rounds of a program.

    Args:
      numbers: int32 in shared memory; the last ones are for the tiles that it takes.
      taken: a barrier for each of these.
    """
    if schedule.dealt:
        return Dealt.of(schedule, program)
    return Taken.of(schedule, numbers, taken)
