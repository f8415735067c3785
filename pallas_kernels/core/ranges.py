"""Ranges of rows and of blocks, and the loops over them.

Arithmetic of Python integers stays in Python integers, so that a loop that is empty for
every program is seen to be so while tracing and costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def minimum(a, b):
    """The smaller; of Python integers, a Python integer."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def maximum(a, b):
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def divide(a, b: int):
    """a // b for a >= 0: one division in a kernel, where `//` would be many steps."""
    if isinstance(a, int):
        return a // b
    # Mosaic GPU lowers no `full_like` of a scalar.
    return lax.div(a, jnp.int32(b) if a.ndim == 0 else jnp.full_like(a, b))


def block_ends(block: int, size: int) -> tuple[jax.Array, jax.Array]:
    """The first row of each block of rows, and where it ends: int32 [blocks].

    How many rows the last block has is a constant, and no minimum: of one that XLA
    computes in 16 bits ptxas up to 13.3 says wrongly on Hopper whether it is the bound
    (benchmarks/lab/145). Of ends that are all constants XLA would fold what follows.
    """
    count = -(-size // block)
    first = jnp.arange(count, dtype=jnp.int32) * block
    rows = np.full(count, block, np.int32)
    rows[-1:] = size - (count - 1) * block
    return first, first + rows


def where(condition, count):
    """The count, or 0: arithmetic, as scalar selects do not lower in every kernel."""
    if isinstance(condition, bool):
        return count if condition else 0
    return count * jnp.asarray(condition, jnp.int32)


class Range(NamedTuple):
    """Bounds `need_lo <= full_lo <= full_hi <= need_hi`, of rows or of blocks.

    Outside `need` no pair is kept, inside `full` every pair is (`core.masks`).
    """

    need_lo: Any
    full_lo: Any
    full_hi: Any
    need_hi: Any

    def __and__(self, other: Range) -> Range:
        """Pairs kept by both: the ranges intersect."""
        need_lo = maximum(self.need_lo, other.need_lo)
        need_hi = maximum(minimum(self.need_hi, other.need_hi), need_lo)
        full_lo = maximum(maximum(self.full_lo, other.full_lo), need_lo)
        if not (isinstance(full_lo, int) and full_lo == need_lo):  # <= need_hi already
            full_lo = minimum(full_lo, need_hi)
        full_hi = maximum(
            minimum(minimum(self.full_hi, other.full_hi), need_hi), full_lo
        )
        return Range(need_lo, full_lo, full_hi, need_hi)

    def blocks(self, block: int, size: int) -> Range:
        """From rows to blocks of `block` rows; `size` is the number of rows.

        Of no rows there are no blocks, wherever they would begin.
        """
        rows = self & Range(0, 0, size, size)
        need_lo = divide(minimum(rows.need_lo, size), block)
        end = divide(minimum(rows.need_hi, size) + block - 1, block)
        need_hi = need_lo + where(rows.need_lo < rows.need_hi, end - need_lo)
        full_lo = divide(rows.full_lo + block - 1, block)
        full_hi = divide(rows.full_hi, block)
        return Range(need_lo, full_lo, full_hi, need_hi) & everything(need_lo, need_hi)

    def fold(self, visit: Callable, state):
        """Runs `state = visit(masked, block, state)` over the blocks of `need`.

        First those in which every pair is kept, then those on either side of them, with
        the mask evaluated. The forward kernel runs the two the other way round.
        """
        return self.fold_edges(visit, self.fold_full(visit, state))

    def fold_full(self, visit: Callable, state):
        if _same(self.full_lo, self.full_hi):
            return state
        full = functools.partial(visit, False)
        return loop(self.full_lo, self.full_hi, full, state)

    def fold_edges(self, visit: Callable, state):
        edge = functools.partial(visit, True)
        if _same(self.need_lo, self.full_lo):
            return loop(self.full_hi, self.need_hi, edge, state)
        if _same(self.full_hi, self.need_hi):
            return loop(self.need_lo, self.full_lo, edge, state)
        count, place = self._edges()
        return loop(0, count, lambda i, state: edge(place(i), state), state)

    @property
    def count(self):
        """Number of blocks in `need`."""
        return self.need_hi - self.need_lo

    @property
    def edges(self):
        """How many of them are not full."""
        return self.count - (self.full_hi - self.full_lo)

    def _edges(self) -> tuple[Any, Callable]:
        """How many blocks are in `need` and not in `full`; the place of each number."""
        before, skipped = self.full_lo - self.need_lo, self.full_hi - self.full_lo

        def place(index):
            beyond = jnp.asarray(index >= before, jnp.int32)
            return self.need_lo + index + beyond * skipped

        return self.need_hi - self.need_lo - skipped, place

    def at(self, index) -> tuple[Any, Any]:
        """Number `index` of the `count` blocks: first the edges, then the full ones.

        For loops that do not run here: a warp that loads blocks for others walks them
        with a counter, in the order in which the forward kernel folds them.

        Returns:
          Whether pairs may be masked, and the block.
        """
        edges, place = self._edges()
        full = jnp.asarray(index >= edges, jnp.int32)
        edge = place(index)
        # Arithmetic instead of `where`, as in `_when`.
        return index < edges, edge + full * (self.full_lo + index - edges - edge)

    def in_order(self, index) -> tuple[Any, Any]:
        """Number `index` of the `count` blocks, from the first on: as `at`."""
        block = self.need_lo + index
        return (block < self.full_lo) | (block >= self.full_hi), block

    def only(self, block) -> Range:
        """The block, if it is in `need`."""
        return self & everything(block, block + 1)

    def part(self, index, count: int) -> Range:
        """Part `index` of `count`, as equal as whole blocks can be."""
        first, last = (divide(self.count * i, count) for i in (index, index + 1))
        return self & everything(self.need_lo + first, self.need_lo + last)

    @property
    def any_full(self):
        """Whether a block is full; False, not traced, if it is known that none is."""
        return not _same(self.full_lo, self.full_hi) and self.full_lo < self.full_hi

    def with_an_edge(self, one) -> Range:
        """The same, but where every block is full the first or last is not said to be.

        The first where there is no mask: padding that a bias masks mostly comes last.

        Args:
          one: 1. A traced one makes the bounds traced too.
        """
        edges = (self.full_lo - self.need_lo) + (self.need_hi - self.full_hi)
        missing = maximum(one - edges, 0)
        if all(isinstance(x, int) for x in self):
            return self._replace(full_lo=minimum(self.full_lo + missing, self.full_hi))
        return self._replace(full_hi=maximum(self.full_hi - missing, self.full_lo))

    def all_edges(self, on: int | jax.Array = 1) -> Range:
        """The same, but no block is said to be full.

        Args:
          on: 1; a 0, which may be traced, leaves the range as it is.
        """
        empty = self.need_lo, self.need_lo
        if isinstance(on, int):
            none = self._replace(full_lo=empty[0], full_hi=empty[1])
            return none if on else self
        full = (self.full_lo, self.full_hi)
        lo, hi = (x + on * (none - x) for x, none in zip(full, empty, strict=True))
        return self._replace(full_lo=lo, full_hi=hi)

    def with_a_block(self) -> Range:
        """The same, but of no block the first one is needed, and it is not full.

        For a kernel whose first round is no part of a loop.
        """
        need_hi = maximum(self.need_hi, 1)
        need_lo = minimum(self.need_lo, need_hi - 1)
        return self._replace(need_lo=need_lo, need_hi=need_hi)


def _same(a, b) -> bool:
    """Whether two bounds are known to be equal while tracing."""
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def loop(lo, hi, body: Callable, state):
    """`state = body(number, state)` for the numbers from lo on and below hi."""
    if isinstance(lo, int) and isinstance(hi, int) and lo >= hi:
        return state
    lo, hi = (np.int32(x) if isinstance(x, int) else x for x in (lo, hi))
    # Of static bounds `fori_loop` makes an int64 under x64.
    return lax.fori_loop(lo, hi, lambda i, x: body(jnp.int32(i), x), state)


def everything(lo, hi) -> Range:
    """The range in which every pair from `lo` to `hi` is kept."""
    return Range(lo, lo, hi, hi)
