"""Padding on the left: keys before a start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks.base import Atom, Limits, Traits, mask_dataclass
from pallas_kernels.core.masks.traits import ALL
from pallas_kernels.core.positions import Positions
from pallas_kernels.core.ranges import Range, everything, where


@mask_dataclass(data=("first",))
class Starts(Atom):
    """Keeps pairs whose key row >= `first`, an int32 scalar for each batch entry."""

    first: Any
    arguments: ClassVar = {"first": "key_value_seq_starts"}
    has_ranges = True
    ranges_are_exact = True
    limits = Limits()

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            ALL, cost_is_monotone=False, keeps_own_key=False, keeps_first_key=False
        )

    def mean_keys(self, kv_size: int) -> float:
        return kv_size

    def attended_keys(self, positions: Positions, kv_size: int) -> Named | None:
        del positions
        first = self.first.squeezed()
        axes = (*first.axes, "s")
        return Named(jnp.arange(kv_size, dtype=jnp.int32) >= first.to(axes), axes)

    def keep(self, q, kv, q_pos, kv_pos):
        del q, q_pos, kv_pos
        return kv >= self.first

    def kv_range(self, q_lo, q_hi, positions: Positions, size: int) -> Range:
        del q_lo, q_hi, positions
        return everything(self.first, size)

    def q_range(self, kv_lo, kv_hi, positions: Positions, size: int) -> Range:
        del positions
        full = where(kv_lo >= self.first, size)
        return Range(0, 0, full, where(kv_hi > self.first, size))

    def of_rows(self, positions: Positions, size: Mapping[str, int]) -> Starts:
        """Of all rows as of a part: how many of it come before (`Named` fields)."""
        if positions.key.first is None:
            return self
        first = positions.key.first
        axes = tuple(dict.fromkeys((*self.first.axes, *first.axes)))
        rows = dataclasses.replace(positions.key, first=first.to(axes))
        return Starts(
            Named(jnp.clip(rows.before(self.first.to(axes)), 0, size["s"]), axes)
        )
