"""A window of positions around each query; causal masks."""

from __future__ import annotations

from pallas_kernels.core.masks.base import Atom, Limits, Traits, mask_dataclass
from pallas_kernels.core.positions import Numbering, Positions
from pallas_kernels.core.ranges import Range, everything


@mask_dataclass(meta=("left", "right"))
class Window(Atom):
    """Keeps keys from `left` positions before the query to `right` after it, inclusive.

    `None` is unbounded on that side; `Window(None, 0)` is causal. Window(1, 0):

        1 . . .
        1 1 . .
        . 1 1 .
        . . 1 1
    """

    left: int | None
    right: int | None
    has_ranges = True
    ranges_are_exact = True
    limits = Limits()

    @property
    def traits(self) -> Traits:
        sides = (None if x is None else max(x, 0) for x in (self.left, self.right))
        before, after = sides
        return Traits(
            is_positional=True,
            is_absolute=False,
            reach=(before, after),
            cost_grows=self.right is not None,
            cost_is_monotone=self.right is not None,
            is_sparse=False,
            keeps_own_key=True,
            keeps_first_key=self.left is None,
        )

    def among(self, queries: int, keys: int) -> Window | None:
        """The same mask of so many rows from position 0 on; None if it keeps all.

        A side that reaches the last of them has no bound, so that a long window runs
        as a causal mask does.
        """
        left = None if self.left is None or self.left >= queries - 1 else self.left
        right = None if self.right is None or self.right >= keys - 1 else self.right
        return None if left is None and right is None else Window(left, right)

    def mean_keys(self, kv_size: int) -> float:
        def side(width: int | None) -> float:
            width = kv_size if width is None else min(width, kv_size)
            return width - width * width / (2 * max(kv_size, 1))

        return side(self.left) + side(self.right)

    def attended_keys(self, positions: Positions, kv_size: int) -> None:
        del positions, kv_size  # positions alone decide

    def keep(self, q, kv, q_pos, kv_pos):
        del q, kv
        kept = None
        if self.left is not None:
            kept = kv_pos >= q_pos - self.left
        if self.right is not None:
            below = kv_pos <= q_pos + self.right
            kept = below if kept is None else kept & below
        return kept

    def kv_range(self, q_lo, q_hi, positions: Positions, size: int) -> Range:
        offset, query, key = positions
        ends = query.at(q_lo) + offset, query.at(q_hi - 1) + offset
        return self._range(ends, key, self.left, self.right, size)

    def q_range(self, kv_lo, kv_hi, positions: Positions, size: int) -> Range:
        offset, query, key = positions
        ends = key.at(kv_lo) - offset, key.at(kv_hi - 1) - offset
        return self._range(ends, query, self.right, self.left, size)

    @staticmethod
    def _range(ends, along: Numbering, before, after, size: int) -> Range:
        """Rows that are `before` to `after` numbers from a block with these ends."""
        need_lo, full_lo, full_hi, need_hi = everything(0, size)
        first, last = ends
        if before is not None:
            need_lo, full_lo = (along.before(x - before) for x in (first, last))
        if after is not None:
            full_hi, need_hi = (along.before(x + after + 1) for x in (first, last))
        return Range(need_lo, full_lo, full_hi, need_hi)
