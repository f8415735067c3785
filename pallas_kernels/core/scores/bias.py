"""A bias: numbers that are added to the scores, of which -inf masks a pair."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.core.flash2 import Scores
from pallas_kernels.core.scores.base import Term, TermTraits, term_dataclass

# Beside a number so far below 0, float32 keeps no digit of a score.
_LOWEST = -(2.0**24)


def masking_bias(dtype, soft_cap: float | None) -> float:
    """The largest bias of a dtype that masks a pair (`Bias.masking`).

    That is -inf. A soft cap would make a common score of every lower number that stands
    for a mask too, such as -1e9 or the lowest of its dtype: then these are masks.
    """
    if soft_cap is None:
        return -math.inf
    return max(_LOWEST, -float(jnp.finfo(dtype).max))


@term_dataclass(data=("bias",), meta=("masking",))
class Bias(Term):
    """Adds an array of any broadcast over batch, heads, queries and keys.

    Attributes:
      bias: the array.
      masking: a bias of at most this makes a score -inf, whatever the product is, NaN
        too (static; `masking_bias`).
    """

    bias: Any
    masking: float = -math.inf
    traits = TermTraits(
        is_positional=False,
        is_absolute=False,
        may_mask=True,
        keeps_lowest=True,
        is_additive=True,
        is_heavy=False,
        maximum_may_grow=False,
    )
    kept = "nothing"

    @property
    def operands(self) -> dict[str, Any]:
        return {"bias": self.bias}

    def apply(self, scores: Scores, setting) -> Scores:
        scores = scores.settled
        return scores._replace(x=scores.x + self.bias)

    def masks(self, shape: tuple[int, ...]) -> jax.Array:
        # Mosaic GPU has no choice of a block by a scalar.
        return jnp.broadcast_to(self.bias, shape) <= self.masking

    def pull(self, ds, kept, setting, may_mask):
        return ds

    def pull_operand(self, name, ds, kept, setting):
        return ds

    def push(self, ds, tangents, kept, setting):
        return ds + tangents["bias"] if "bias" in tangents else ds
