"""Lists of blocks: what each block visits, where blocks to skip lie in between.

A `Range` names blocks that follow one another. A `BlockList` names any: for each block
of rows how many others it visits, and which: first those with pairs that a mask drops
(the edges), then those without (the full ones). In a program it is a `Walk`, which has
the methods of a `Range`, so that no kernel knows which of the two it has.

The blocks of a list may be larger than those of the kernel that walks it: then the
kernel visits each of them in parts. One list serves kernels with blocks of any size
that divides its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core.axes import Named, whole_axis
from pallas_kernels.core.ranges import Range, divide, loop, maximum, minimum, where

# What is sorted has its kind above its number.
_KIND = 2**28


def sorted_by_kind(kind: jax.Array, number: jax.Array) -> jax.Array:
    """Numbers below 2^28 along the last axis, by kind (0 to 3) and then by number.

    Each still has its kind in its upper bits, so that one sort is all that XLA runs.
    `number_of` leaves them out.
    """
    return lax.sort(kind * _KIND + number, is_stable=False)


def number_of(entry):
    """The number of an element of `sorted_by_kind`."""
    return entry & (_KIND - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockList:
    """The blocks that each block of the own rows visits.

    Each array is flat along one whole axis (`axes.whole_axis`), after axes of batch and
    heads, so that kernels read it at numbers that they compute.

    Attributes:
      order: int32 [.., own blocks * others], for each own block the numbers of all
        others (`number_of`): edges, full ones, and those that are not visited, each
        from first to last. None where it is not read (`read`).
      ascending: int32 [.., own blocks * others], twice the number of each visited block
        (`number_of`), from first to last, and 1 more of a full one; then of those not
        visited. None where it is not read.
      edges, count: int32 [.., own blocks], how many of them are edges, and how many are
        visited.
      code: int32 [.., own blocks * others]: 0 of a block that is not visited, 1 of an
        edge, 2 of a full one.
      own, visited: rows of a block of either side (static).
      size: all rows of the visited side (static).
    """

    order: Any
    ascending: Any
    edges: Any
    count: Any
    code: Any
    own: int = dataclasses.field(metadata={"static": True})
    visited: int = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})
    arguments: ClassVar = dict.fromkeys(
        ("order", "ascending", "edges", "count", "code"), "block_mask"
    )

    @classmethod
    def of(cls, code: Named, *, own: int, visited: int, size: int) -> BlockList:
        """From the codes of all pairs of blocks.

        Args:
          code: int32 [.., own blocks, others].
          own, visited, size: as the attributes.
        """
        value, lead = code.value, code.axes[:-2]
        others = value.shape[-1]
        numbers = jnp.arange(others, dtype=jnp.int32)
        if size % visited:  # of what lies beyond the rows nothing may be read unmasked
            last = numbers == others - 1
            value = jnp.where(last, jnp.minimum(value, 1), value)
        rank = jnp.where(value == 0, 2, value - 1)  # edges first, then full blocks
        order = sorted_by_kind(rank, numbers)
        twice = 2 * numbers + jnp.where(value == 2, 1, 0)
        ascending = sorted_by_kind(jnp.where(value == 0, 1, 0), twice)

        def flat(x: jax.Array) -> Named:
            x = x.reshape(*x.shape[: len(lead)], -1)
            return Named(x, (*lead, whole_axis(x.shape[-1])))

        edges, count = (
            jnp.sum(x, axis=-1, dtype=jnp.int32) for x in (value == 1, value > 0)
        )
        order, ascending = flat(order), flat(ascending)
        edges, count, value = map(flat, (edges, count, value))
        return cls(order, ascending, edges, count, value, own, visited, size)

    @property
    def others(self) -> int:
        """How many blocks the visited side has."""
        return -(-self.size // self.visited)

    def read(self, *, in_order: bool) -> BlockList:
        """Without the array that a kernel does not read, which XLA then leaves out.

        Args:
          in_order: whether it goes through blocks by `Walk.in_order` alone.
        """
        return dataclasses.replace(self, **{"order" if in_order else "ascending": None})

    def fits(self, own: int, visited: int) -> bool:
        """Whether a kernel with blocks of so many rows may walk the list."""
        return self.own % own == 0 and self.visited % visited == 0

    def codes(self) -> Named:
        """[.., own blocks, others]"""
        value = self.code.value
        shape = *value.shape[:-1], -1, self.others
        return Named(value.reshape(shape), (*self.code.axes[:-1], "own", "others"))

    def walk(self, first, block: int) -> Walk:
        """The visits of a program: arrays are read by `number` (`layout.Elements`).

        Args:
          first: a row of the program's own block.
          block: rows of the kernel's blocks of the visited side.
        """
        own, parts = divide(first, self.own), self.visited // block
        start = own * self.others
        edges, count = self.edges.number(own), self.count.number(own)
        beyond = self.others * parts - (-(-self.size // block))
        if beyond:  # parts of the last block, which is an edge if it is visited
            has_last = self._last_edge(start, edges, count) == self.others - 1
            beyond = where((edges > 0) & has_last, beyond)
        mid, end = edges * parts - beyond, count * parts - beyond
        return Walk(self, start, parts, mid, beyond, jnp.int32(0), mid, end)

    def _last_edge(self, start, edges, count):
        """The last of the edges, or of all: alike where that is the last block."""
        if self.order is None:
            found = self.ascending.number(start + maximum(count - 1, 0))
            return divide(number_of(found), 2)
        return number_of(self.order.number(start + maximum(edges - 1, 0)))


class Walk(NamedTuple):
    """What one block visits, as a `Range` says it: positions in a `BlockList`.

    Attributes:
      blocks: the list.
      start: of the block's part of it.
      parts: blocks of the kernel in a block of the list.
      known_edges: how many positions are of edges.
      skipped: how many are left out after them.
      lo, mid, hi: the positions to visit, and from which on blocks are full.
      no_full: 1 if no block is said to be full (`all_edges`), else 0.
    """

    blocks: BlockList
    start: Any
    parts: int
    known_edges: Any
    skipped: Any
    lo: Any
    mid: Any
    hi: Any
    no_full: Any = 0

    def _block(self, position):
        """The kernel's block at a position."""
        if not isinstance(self.skipped, int):
            is_beyond = jnp.asarray(position >= self.known_edges, jnp.int32)
            position = position + is_beyond * self.skipped
        entry = divide(position, self.parts)
        found = number_of(self.blocks.order.number(self.start + entry))
        return found * self.parts + (position - entry * self.parts)

    def fold(self, visit, state):
        """As of `Range`."""
        return self.fold_edges(visit, self.fold_full(visit, state))

    def fold_full(self, visit, state):
        return self._fold(False, self.mid, self.hi, visit, state)

    def fold_edges(self, visit, state):
        return self._fold(True, self.lo, self.mid, visit, state)

    def _fold(self, masked: bool, lo, hi, visit, state):
        return loop(lo, hi, lambda i, x: visit(masked, self._block(i), x), state)

    @property
    def count(self):
        return self.hi - self.lo

    @property
    def edges(self):
        return self.mid - self.lo

    @property
    def any_full(self):
        return self.mid < self.hi

    def at(self, index) -> tuple[Any, Any]:
        """As of `Range`."""
        position = self.lo + index
        return position < self.mid, self._block(position)

    def in_order(self, index) -> tuple[Any, Any]:
        """As of `Range`: from first to last, so that few programs wait for turns."""
        position = self.lo + index
        entry = divide(position, self.parts)
        found = number_of(self.blocks.ascending.number(self.start + entry))
        block = divide(found, 2)
        masked = (found == 2 * block) | (self.no_full > 0)
        return masked, block * self.parts + (position - entry * self.parts)

    def part(self, index, count: int) -> Walk:
        first, last = (
            self.lo + divide(self.count * i, count) for i in (index, index + 1)
        )
        mid = maximum(minimum(self.mid, last), first)
        return self._replace(lo=first, mid=mid, hi=last)

    def only(self, block) -> Range:
        """The block, if it is visited."""
        code = self.blocks.code.number(self.start + divide(block, self.parts))
        is_full, is_needed = divide(code, 2), minimum(code, 1)
        return Range(block, block, block + is_full, block + is_needed)

    def with_an_edge(self, one) -> Walk:
        missing = maximum(one - self.edges, 0)
        return self._replace(mid=minimum(self.mid + missing, self.hi))

    def all_edges(self, on: int | jax.Array = 1) -> Walk:
        mid = self.mid + on * (self.hi - self.mid)
        return self._replace(mid=mid, no_full=maximum(self.no_full, on))

    def with_a_block(self) -> Walk:
        hi = maximum(self.hi, 1)
        lo = minimum(self.lo, hi - 1)
        # Of none the position that is added is an edge.
        was_none = 1 - minimum(self.hi - self.lo, 1)
        return self._replace(lo=lo, mid=self.mid + was_none * (hi - self.mid), hi=hi)


# What a program visits, in either form.
Visited = Range | Walk
