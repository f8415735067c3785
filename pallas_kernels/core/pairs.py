"""A block of (query, key) pairs: its scores, probabilities and their gradients.

Everything that a spec says about a pair meets the recurrences of `flash2` here, once
for every loop of every backend, forward and backward, in either orientation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core import flash2
from pallas_kernels.core.arithmetic import PLAIN, Arithmetic
from pallas_kernels.core.dropout import GROUP
from pallas_kernels.core.flash2 import Scores
from pallas_kernels.core.score import Place
from pallas_kernels.core.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Where a block lies, and the spec with its fields loaded for it.

    Attributes:
      spec: array fields hold what broadcasts against the block.
      rows: (start, size) of `t` (query rows) and `s` (key rows).
      order: axes of the block: ("t", "s"), or ("s", "t") for a transposed one.
      masked: whether some pair may be masked; if not, no mask is evaluated.
      precision: of float32 products.
      arithmetic: the backend's.
    """

    spec: AttentionSpec
    rows: Mapping[str, tuple[Any, int]]
    order: tuple[str, str] = ("t", "s")
    masked: bool = True
    precision: Any = None
    arithmetic: Arithmetic = PLAIN

    def _numbers(self, name: str, start=None) -> jax.Array:
        """Row numbers of the block, or counted from `start`, against the block."""
        first, size = self.rows[name]
        numbers = (first if start is None else start) + lax.iota(jnp.int32, size)
        return jnp.expand_dims(numbers, 1 - self.order.index(name))

    @functools.cached_property
    def _place(self) -> Place | None:
        if not self.spec.score.positional:
            return None
        (t_start, _), (s_start, _) = self.rows["t"], self.rows["s"]
        between = jnp.asarray(t_start + self.spec.start - s_start, jnp.float32)
        query, key = (self._numbers(name, 0).astype(jnp.float32) for name in "ts")
        return Place(between + query, key, self.spec.keeps_past_only)

    @functools.cached_property
    def _bits(self) -> jax.Array:
        dropout = self.spec.dropout
        assert dropout is not None
        groups = {
            n: (lo, -(-size // GROUP) * GROUP) for n, (lo, size) in self.rows.items()
        }
        bits = dropout.bits(groups, self.order, self.arithmetic)
        shape = tuple(self.rows[name][1] for name in self.order)
        return bits if bits.shape[-2:] == shape else bits[..., : shape[0], : shape[1]]

    def product(self, of_queries: jax.Array, of_keys: jax.Array) -> jax.Array:
        """The products of rows [query rows, h] and [key rows, h], pair by pair."""
        first, second = of_queries, of_keys
        if self.order == ("s", "t"):
            first, second = second, first
        return flash2.dot(first, second, "nt", self.precision)

    def scores(self, q: jax.Array, k: jax.Array) -> Scores:
        return self.scores_of(self.product(q, k), q.dtype)

    def scores_of(self, qk: jax.Array, dtype) -> Scores:
        """Scores of the products of queries and keys in `dtype`."""
        score, tanh = self.spec.score, self.arithmetic.tanh
        # The two parts of a distance may be larger than it and round more: not far from
        # the diagonal, and not beside elements of two bytes.
        apart = not self.masked and jnp.dtype(dtype).itemsize == 2
        scores = score.apply(qk, self._place, tanh, apart=apart)
        keep = None
        if self.masked:
            keep = self.spec.keep(self._numbers("t"), self._numbers("s"))
        if keep is None:
            return scores
        return scores._replace(x=jnp.where(keep, scores.x, -jnp.inf))

    def drop(self, p: jax.Array) -> jax.Array:
        """Dropout without its scale (`AttentionSpec.dropout_scale`)."""
        dropout = self.spec.dropout
        if dropout is None:
            return p
        return self.arithmetic.where_below(p, self._bits, dropout.limit)

    def score_gradient(
        self, p: jax.Array, scores: Scores, dp: jax.Array, delta: jax.Array
    ) -> jax.Array:
        """dz, the gradient before the soft cap, over `AttentionSpec.dropout_scale`.

        Args:
          p: probabilities.
          scores: of which they are.
          dp: the product of do and v.
          delta: of the query rows.
        """
        if self.spec.dropout is not None:
            dp, delta = self.drop(dp), delta * (1 / self.spec.dropout_scale)
        ds = flash2.score_gradient(p, dp, delta)
        return self.spec.score.gradient(ds, scores.x, self.masked)

    def operand_gradient(self, name: str, dz: jax.Array, qk: jax.Array) -> jax.Array:
        """What each pair adds to the gradient of a field of the score.

        Args:
          name: of the field.
          dz: of `score_gradient`.
          qk: products of queries and keys.
        """
        return getattr(self.spec.score.operand_gradients(dz, qk, self._place), name)
