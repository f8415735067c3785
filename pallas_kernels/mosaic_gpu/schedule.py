"""Which tiles (a block of rows of one head) each program of a kernel goes through."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

# Sets of rounds are the bits of an int32 that is not negative.
MOST_ROUNDS = 31
# Of programs that take tiles: some go through more. By a simulation of documents, 31
# take up to 1.38 times the ideal (benchmarks/lab/089-tiles-that-programs-take.md).
_MEAN_ROUNDS = 26


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Programs that each go through tiles in rounds, one tile a round.

    Attributes:
      tiles: how many there are.
      programs: how many, at most as many as tiles.
      together: how many of them run at the same time; then come as many others.
      dealt: whether each program's tiles are chosen before anything runs.
    """

    tiles: int
    programs: int
    together: int
    dealt: bool

    @classmethod
    def of(cls, tiles: int, multiprocessors: int, *, alike: bool) -> Schedule:
        """One program or more on each multiprocessor (`rounds`).

        If rounds would be more than `MOST_ROUNDS`, each has several, one after the
        other. Where tiles are dealt out, those that run together have tiles that lie
        together. Where they are taken, a program that is through all of its rounds
        leaves others to its multiprocessor's next.

        Args:
          alike: whether tiles take equally long, or are known to be sorted by that.
        """
        together = min(tiles, multiprocessors)
        dealt = alike or tiles <= together
        rounds = MOST_ROUNDS if dealt else _MEAN_ROUNDS
        times = -(-tiles // (rounds * together))
        return cls(tiles, times * together, together, dealt)

    @property
    def most_rounds(self) -> int:
        """Of a program: some may have fewer."""
        if self.dealt:
            return -(-self.tiles // self.programs)
        return min(MOST_ROUNDS, self.tiles)

    def tile(self, program, r):
        """The tile of a program in round r, where tiles are dealt out.

        Every other round deals the tiles out backwards. So the sums are alike where the
        tiles are sorted.
        """
        row, place = r, program
        if self.programs > self.together:
            time = lax.div(jnp.int32(program), jnp.int32(self.together))
            row = r + time * self.most_rounds
            place = program - time * self.together
        back = (r & 1) * (self.together - 1 - 2 * place)
        return row * self.together + place + back

    def rounds(self, program):
        """All of a program's rounds, a set."""
        times = self.programs // self.together  # at most so many rows are missing
        last = range(max(self.most_rounds - times, 0), self.most_rounds)
        lacks = (self.tile(program, r) >= self.tiles for r in last)
        missing = functools.reduce(
            operator.add, (jnp.asarray(x, jnp.int32) for x in lacks)
        )
        most = jnp.int32((1 << self.most_rounds) - 1)
        return lax.shift_right_logical(most, missing)

    def fold(self, chosen, visit: Callable, state):
        """Runs `state = visit(r, state)` for the rounds in a set."""

        def one(r, state):
            return lax.cond(has(chosen, r), lambda: visit(r, state), lambda: state)

        most = jnp.int32(self.most_rounds)
        return lax.fori_loop(jnp.int32(0), most, one, state)


def heads_together(heads: int, blocks: int, programs: int, most: int) -> int:
    """Of how many heads the tiles of the same block should lie side by side.

    So many that rows of one length are enough for all programs, where lengths differ:
    each then gets of all lengths. But few enough for their keys and values to stay in
    the GPU's cache, if that can be.

    Args:
      heads: and batch entries, of which the result is a divisor.
      blocks: of each head.
      programs: that run at the same time.
      most: heads that the cache holds.
    """
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    enough = [n for n in divisors if n * blocks >= programs]
    held = [n for n in enough if n <= most]
    return held[-1] if held else (enough or divisors[-1:])[0]


def has(rounds, r):
    """Whether round r is in a set."""
    return (rounds >> r) & 1 == 1


def has_next(rounds, r):
    """Whether the round after r is."""
    return has(rounds >> 1, r)


def has_last(rounds, r):
    """Whether the round before r is."""
    return has(rounds << 1, r)
