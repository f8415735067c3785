"""Padding: rows beyond a length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks.base import Atom, Limits, mask_dataclass
from pallas_kernels.core.masks.traits import ALL, Traits
from pallas_kernels.core.positions import Numbering, Positions
from pallas_kernels.core.ranges import Range, everything, maximum, minimum


def _when(condition, rows: Range) -> Range:
    """`rows` with nothing full where `condition` does not hold.

    Arithmetic instead of `where`: scalar selects of constants do not lower in Pallas.
    """
    if isinstance(condition, bool):
        return rows if condition else rows._replace(full_hi=rows.full_lo)
    on = condition.astype(jnp.int32)
    full_hi = rows.full_lo + on * (rows.full_hi - rows.full_lo)
    return rows._replace(full_hi=full_hi)


@mask_dataclass(data=("query", "key_value"))
class Lengths(Atom):
    """Keeps pairs whose query row < `query` and key row < `key_value` (None: all).

    Both are int32 scalars (one for each batch entry). One below 0 is as 0, and one
    beyond the rows that there are as their number.
    """

    query: Any = None
    key_value: Any = None
    arguments: ClassVar = {
        "query": "query_seq_lengths",
        "key_value": "key_value_seq_lengths",
    }
    has_ranges = True
    ranges_are_exact = True

    @property
    def traits(self) -> Traits:
        own = self.key_value is None
        return dataclasses.replace(ALL, cost_is_monotone=False, keeps_own_key=own)

    def mean_keys(self, kv_size: int) -> float:
        return kv_size

    @property
    def limits(self) -> Limits:
        sides = (self.query, self.key_value)
        return Limits(*(() if x is None else (x,) for x in sides))

    def attended_keys(self, positions: Positions, kv_size: int) -> None:
        del positions, kv_size  # `limits` say it

    def keep(self, q, kv, q_pos, kv_pos):
        del q_pos, kv_pos
        kept = None
        if self.key_value is not None:
            kept = kv < self.key_value
        if self.query is not None:
            below = q < self.query
            kept = below if kept is None else kept & below
        return kept

    def kv_range(self, q_lo, q_hi, positions: Positions, size: int) -> Range:
        del positions
        return self._range(self.key_value, self.query, q_lo, q_hi, size)

    def q_range(self, kv_lo, kv_hi, positions: Positions, size: int) -> Range:
        del positions
        return self._range(self.query, self.key_value, kv_lo, kv_hi, size)

    def of_rows(self, positions: Positions, size: Mapping[str, int]) -> Lengths:
        """Of all rows as of a part: how many of it come before (`Named` fields)."""

        def own(length: Named | None, rows: Numbering, size: int):
            if length is None or rows.first is None:
                return length
            axes = tuple(dict.fromkeys((*length.axes, *rows.first.axes)))
            rows = dataclasses.replace(rows, first=rows.first.to(axes))
            return Named(jnp.clip(rows.before(length.to(axes)), 0, size), axes)

        return Lengths(
            own(self.query, positions.query, size["t"]),
            own(self.key_value, positions.key, size["s"]),
        )

    @staticmethod
    def _range(along, across, lo, hi, size: int) -> Range:
        """Range along one axis of the block [lo, hi) of the other."""
        end = size if along is None else along
        if across is None:
            return everything(0, end)
        full = _when(hi <= across, everything(0, end))
        # A block that starts beyond the length needs nothing.
        need_hi = minimum(full.need_hi, minimum(maximum(across - lo, 0), 1) * size)
        return full & everything(0, need_hi)._replace(full_hi=size)
