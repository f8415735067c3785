"""A kind of mask that the library lacks: nothing outside this file knows it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import Atom, Limits, Traits
from pallas_kernels.core.masks.base import mask_dataclass
from pallas_kernels.core.masks.traits import ALL
from pallas_kernels.core.positions import Positions
from pallas_kernels.core.ranges import Range, divide

# A multiple of every chunk in the tests, so that no position is below 0.
_FAR = 1 << 12


@mask_dataclass(meta=("chunk", "hole"))
class Chunks(Atom):
    """Positions are cut in chunks; a query attends its own, but for the first keys.

    Chunks(4, 1), of six queries and keys:

        . 1 1 1 . .
        . 1 1 1 . .
        . 1 1 1 . .
        . 1 1 1 . .
        . . . . . 1
        . . . . . 1

    Attributes:
      chunk: positions of a chunk, a power of two.
      hole: the first keys of each chunk that no query attends; they may hold NaN.
    """

    chunk: int
    hole: int
    has_ranges = True
    # A block of keys within a hole meets no queries, but theirs lie in its chunk.
    ranges_are_exact = False
    limits = Limits()

    def keep(self, q, kv, q_pos, kv_pos):
        of_keys = divide(kv_pos + _FAR, self.chunk)
        is_own = divide(q_pos + _FAR, self.chunk) == of_keys
        return is_own & (kv_pos + _FAR - of_keys * self.chunk >= self.hole)

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            ALL,
            is_positional=True,
            is_absolute=True,
            reach=(self.chunk - 1, self.chunk - 1),
            keeps_own_key=False,
            keeps_first_key=False,
        )

    def mean_keys(self, kv_size: int) -> float:
        return min(self.chunk - self.hole, kv_size)

    def attended_keys(self, positions: Positions, kv_size: int) -> Named:
        first = positions.key.first
        axes = () if first is None else first.squeezed().axes
        start = None if first is None else first.to((*axes, "s"))
        numbering = dataclasses.replace(positions.key, first=start)
        numbers = numbering.at(jnp.arange(kv_size, dtype=jnp.int32))
        return Named(numbers % self.chunk >= self.hole, (*axes, "s"))

    def kv_range(self, q_lo, q_hi, positions: Positions, size: int) -> Range:
        offset, query, key = positions
        first, last = (query.at(x) + offset for x in (q_lo, q_hi - 1))
        return self._range(first, last, self.hole, key, size)

    def q_range(self, kv_lo, kv_hi, positions: Positions, size: int) -> Range:
        offset, query, key = positions
        first, last = (key.at(x) for x in (kv_lo, kv_hi - 1))
        return self._range(first, last, 0, _Moved(query, offset), size)

    def _range(self, first, last, hole: int, along, size: int) -> Range:
        """Rows from the chunk of one position to that of another; none are full."""
        start, end = (divide(x + _FAR, self.chunk) * self.chunk for x in (first, last))
        lo = along.before(start - _FAR + hole)
        hi = along.before(end - _FAR + self.chunk)
        return Range(0, 0, size, size) & Range(lo, lo, lo, hi)

    def dense(self, t: int, s: int, offset) -> np.ndarray:
        """The mask of all pairs [.., T, S], for queries from position `offset` on."""
        q_pos = np.asarray(offset)[..., None, None] + np.arange(t)[:, None]
        own = q_pos // self.chunk == np.arange(s) // self.chunk
        return own & (np.arange(s) % self.chunk >= self.hole)


@dataclasses.dataclass(frozen=True)
class _Moved:
    """The query rows by their positions."""

    query: object
    offset: object

    def before(self, position):
        return self.query.before(position - self.offset)
