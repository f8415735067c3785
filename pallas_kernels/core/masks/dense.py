"""A boolean array of pairs, or of what broadcasts to pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks.arrays import ArrayMask
from pallas_kernels.core.masks.base import Atom, mask_dataclass
from pallas_kernels.core.masks.relation import Relation, Tiling, blocked, reduced
from pallas_kernels.core.masks.traits import ALL, Traits
from pallas_kernels.core.positions import Positions


@mask_dataclass(data=("mask",))
class DenseMask(ArrayMask):
    """Keeps the pairs where a boolean array of any broadcast shape is True."""

    mask: Any

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            ALL, cost_is_monotone=False, keeps_own_key=False, keeps_first_key=False
        )

    def attended_keys(self, positions: Positions, kv_size: int) -> Named:
        """Which keys some query and head keep."""
        del positions, kv_size
        return reduced(self.mask.squeezed(), jnp.any, ("n", "t"))

    def keep(self, q, kv, q_pos, kv_pos):
        del q, kv, q_pos, kv_pos
        return self.mask

    def block_relation(self, tiling: Tiling) -> Relation:
        mask = self.mask.squeezed()
        axes = tuple(a for a in mask.axes if a not in ("t", "s"))
        some, every = (
            reduced(blocked(mask, tiling.blocks, fill), function, ("t", "s"))
            for fill, function in ((False, jnp.any), (True, jnp.all))
        )
        axes = (*axes, "i", "j")
        return Relation(Named(some.to(axes), axes), Named(every.to(axes), axes))

    def with_pairs(self, convert: Callable[[Named], Atom]) -> Atom:
        mask = self.mask.squeezed()
        return convert(mask) if {"t", "s"} <= set(mask.axes) else self
