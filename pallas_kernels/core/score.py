"""The score of a (query, key) pair, and its gradient, side by side.

    z = scale * factor * q.k + bias - slope * |query position - key position|
    s = soft_cap * tanh(z / soft_cap), or z without a soft cap; -inf where bias masks

Masks come after. Fields hold scalars, blocks or whole arrays (`spec.AttentionSpec`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.core.flash2 import Scores

_TINY = 2.0**-40
# Beside a number so far below 0, float32 keeps no digit of a score.
_LOWEST = -(2.0**24)


def masking_bias(dtype, soft_cap: float | None) -> float:
    """The largest bias of a dtype that masks a pair (`Score.masking_bias`).

    That is -inf. A soft cap would make a common score of every lower number that stands
    for a mask too, such as -1e9 or the lowest of its dtype: then these are masks.
    """
    if soft_cap is None:
        return -math.inf
    return max(_LOWEST, -float(jnp.finfo(dtype).max))


class Place(NamedTuple):
    """Where a block of pairs lies: float32 positions, from that of its first key."""

    query: jax.Array  # against the block, of size 1 along the keys
    key: jax.Array  # of size 1 along the queries
    past_only: bool  # whether a mask follows that drops keys after the query

    @property
    def distance(self) -> jax.Array:
        """|query position - key position|, of any sign where a mask follows."""
        distance = self.query - self.key
        return distance if self.past_only else jnp.abs(distance)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Score:
    """How a product q.k becomes a score.

    Constant factors are left to the caller, who folds them into a multiplication that
    is made anyway: the exponent's, or the one at the end of an accumulation.

    Attributes:
      scale: of the product (static).
      soft_cap: largest size of a score, > 0, or None (static).
      bias: added to the product, any broadcast over batch, heads, queries and keys.
      slopes: ALiBi's, one for each head.
      factor: of the product, a scalar, where the scale is data; or None.
      masking_bias: a bias of at most this makes a score -inf, whatever the product
        is, NaN too (static; `masking_bias`).
    """

    scale: float = dataclasses.field(metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    bias: Any = None
    slopes: Any = None
    factor: Any = None
    masking_bias: float = dataclasses.field(
        default=-math.inf, metadata={"static": True}
    )

    @property
    def operands(self) -> dict[str, Any]:
        """The fields that have gradients, in the order of the tree's leaves."""
        fields = {"bias": self.bias, "slopes": self.slopes, "factor": self.factor}
        return {name: x for name, x in fields.items() if x is not None}

    @property
    def positional(self) -> bool:
        """Whether the score depends on the distance of query and key."""
        return self.slopes is not None

    def apply(
        self,
        qk: jax.Array,
        place: Place | None,
        tanh: Callable = jnp.tanh,
        *,
        apart: bool = False,
        nan_shows: bool = False,
    ) -> Scores:
        """A block of scores.

        Args:
          qk: products.
          place: of the block, if `positional`.
          tanh: the backend's.
          apart: whether the parts of a signed distance may be subtracted one by one,
            that of the queries once for a row.
          nan_shows: whether a product of NaN beside a bias of -inf may stay NaN: there
            is none, or sums show it and the scores are made again without this.
        """
        unit = 1.0
        if self.factor is not None:
            qk = qk * self.factor.astype(qk.dtype)
        if self.bias is None and self.scale > _TINY:  # whose inverse may be infinite
            unit = self.scale
        x = qk if unit == self.scale else qk * self.scale
        bias = None if self.bias is None else self.bias.astype(x.dtype)
        if bias is not None:
            x = x + bias
        row = None
        if self.slopes is not None and place is not None:
            slopes = self.slopes.astype(x.dtype) * (1 / unit)
            if apart and place.past_only and self.soft_cap is None:
                x, row = x + slopes * place.key, slopes * place.query
            else:
                x = x - slopes * place.distance
        if self.soft_cap is not None:
            # All of the score is in x: `gradient` takes the hyperbolic tangent from it.
            x, unit = tanh(x * (unit / self.soft_cap)), self.soft_cap
        if bias is not None and not (nan_shows and self.soft_cap is None):
            # Mosaic GPU has no choice of a block by a scalar.
            masks = jnp.broadcast_to(bias, x.shape) <= self.masking_bias
            x = jnp.where(masks, -jnp.inf, x)
        return Scores(x, unit, row)

    def gradient(self, ds: jax.Array, x: jax.Array, masked: bool) -> jax.Array:
        """The gradient of z from that of the score.

        Args:
          ds: gradient of the score.
          x: of the scores.
          masked: whether a mask made some of x -inf.
        """
        if self.soft_cap is None:
            return ds
        if masked or self.bias is not None:
            x = jnp.maximum(x, -1.0)  # ds is 0 where x was -inf
        return ds * (1.0 - x * x)

    @property
    def gradient_unit(self):
        """Gradient of q.k over that of z."""
        return self.scale if self.factor is None else self.scale * self.factor

    def operand_gradients(
        self, dz: jax.Array, qk: jax.Array, place: Place | None
    ) -> Score:
        """What a block of gradients of z adds to those of the fields, pair by pair."""
        bias = None if self.bias is None else dz
        slopes = None if place is None else -dz * place.distance
        factor = None if self.factor is None else dz * qk * self.scale
        return dataclasses.replace(self, bias=bias, slopes=slopes, factor=factor)
