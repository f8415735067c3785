"""Which of all rows an operand's rows are, where devices have a part of them each.

Window, causal mask, ALiBi and dropout ask for the numbers of rows among all rows. A
device has rows that follow one another, or stripes of such rows: its first, then one
every so many. Numbers rise with rows either way, so that what a block of queries looks
at is a range of keys, whose ends have a closed form: `Numbering.at` and its inverse
`Numbering.before`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from pallas_kernels.core.ranges import divide, maximum, minimum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Numbering:
    """The numbers of rows. Numbering(3, stripe=2, parts=3): rows 0 to 4 are

        3 4 . . . . 9 10 . . . . 15

    Attributes:
      first: number of row 0, an int32 scalar; None for 0.
      stripe: how many rows follow one another; None for all (static).
      parts: from a stripe to the next it is so many stripes (static).
    """

    first: Any = None
    stripe: int | None = dataclasses.field(default=None, metadata={"static": True})
    parts: int = dataclasses.field(default=1, metadata={"static": True})

    def at(self, row):
        """The number of a row, or of rows."""
        if self.stripe is not None:
            row = row + divide(row, self.stripe) * (self.stripe * (self.parts - 1))
        return row if self.first is None else row + self.first

    def before(self, number):
        """How many rows have a lower number; any number where rows are not striped.

        Then it may be below 0, or more than there are.
        """
        count = number if self.first is None else number - self.first
        if self.stripe is None:
            return count
        count, step = maximum(count, 0), self.stripe * self.parts
        stripes = divide(count, step)
        return stripes * self.stripe + minimum(count - stripes * step, self.stripe)

    def after(self, row, more):
        """How far the rows `row + more` stand from `row`."""
        return more if self.stripe is None else self.at(row + more) - self.at(row)

    def of_block(self, start, size: int) -> Numbering:
        """For the rows of a block: within a stripe they follow one another.

        Args:
          start: of the block, a multiple of its size.
        """
        if self.stripe is None or self.stripe % size:
            return self
        return Numbering(self.at(start) - start)

    def of_groups(self, size: int) -> Numbering:
        """Of groups of so many rows, which divide a stripe and what comes before."""
        first = None if self.first is None else divide(self.first, size)
        stripe = None if self.stripe is None else self.stripe // size
        return Numbering(first, stripe, self.parts)


ALL_ROWS = Numbering()


class Positions(NamedTuple):
    """Where rows stand: a query at its number and `offset`, a key at its number."""

    offset: Any = 0
    query: Numbering = ALL_ROWS
    key: Numbering = ALL_ROWS


AT_THEIR_NUMBERS = Positions()
