"""Trees of tokens: which of the newest keys each of the newest queries attends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.core.masks.base import Atom, Limits, Traits, mask_dataclass
from pallas_kernels.core.masks.traits import ALL
from pallas_kernels.core.positions import Positions
from pallas_kernels.core.ranges import Range, maximum, where

# Bits of a word: as many queries there may be.
MOST = 32


@mask_dataclass(data=("words",))
class Tree(Atom):
    """Keeps all keys before position `offset`, and of those after it what a word says.

    `words` is int32 [.., T]: query t attends the key at position offset + i if bit i of
    its word is set. A block of pairs needs one number a row for it, and no mask [T, T].
    """

    words: Any
    has_ranges = True
    ranges_are_exact = False
    limits = Limits()

    @classmethod
    def bits(cls, mask: jax.Array) -> jax.Array:
        """The words of a boolean array [.., T, T], queries before keys."""
        place = jnp.left_shift(
            jnp.uint32(1), jnp.arange(mask.shape[-1], dtype="uint32")
        )
        words = jnp.sum(jnp.where(mask, place, jnp.uint32(0)), -1, dtype=jnp.uint32)
        return jax.lax.bitcast_convert_type(words, jnp.int32)

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            ALL,
            is_positional=True,
            cost_is_monotone=False,
            keeps_own_key=False,
            keeps_first_key=False,
        )

    def mean_keys(self, kv_size: int) -> float:
        return kv_size

    def attended_keys(self, positions: Positions, kv_size: int) -> None:
        del positions, kv_size  # keys without queries are not looked for

    def keep(self, q, kv, q_pos, kv_pos):
        del kv
        number = kv_pos - (q_pos - q)
        bit = jnp.right_shift(self.words, jnp.clip(number, 0, MOST - 1)) & 1
        return (number < 0) | (bit != 0)

    def kv_range(self, q_lo, q_hi, positions: Positions, size: int) -> Range:
        del q_lo, q_hi
        return Range(0, 0, maximum(positions.offset, 0), size)

    def q_range(self, kv_lo, kv_hi, positions: Positions, size: int) -> Range:
        del kv_lo
        return Range(0, 0, where(kv_hi <= positions.offset, size), size)

    def of_rows(self, positions: Positions, size: Mapping[str, int]) -> Tree:
        """The words of a part's queries come as they are; keys are never in parts."""
        del positions, size
        return self
