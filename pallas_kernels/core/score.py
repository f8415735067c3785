"""The score of a (query, key) pair, and its gradient, side by side.

    s = scale * q.k

Further terms (bias, ALiBi, soft cap) belong here, and nowhere else.
"""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Score:
    """How a product q.k becomes a score.

    Constant factors are left to the caller, who folds them into a multiplication that
    is made anyway: the exponent's, or the one at the end of an accumulation.
    """

    scale: float

    def apply(self, qk: jax.Array) -> tuple[jax.Array, float]:
        """A block of scores as `(x, unit)`, score = unit * x with unit > 0."""
        if self.scale > 0:
            return qk, self.scale
        return qk * self.scale, 1.0

    def gradient(self, ds: jax.Array) -> jax.Array:
        """The gradient of `qk` from that of the score, over `gradient_unit`."""
        return ds

    @property
    def gradient_unit(self) -> float:
        return self.scale
