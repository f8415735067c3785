"""A block of (query, key) pairs: its scores, probabilities and their gradients.

Everything that a spec says about a pair meets the recurrences of `flash2` here, once
for every loop of every backend, forward and backward, in either orientation.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core import flash2
from pallas_kernels.core.arithmetic import PLAIN, Arithmetic
from pallas_kernels.core.dropout import BLOCK
from pallas_kernels.core.flash2 import Block, Scores
from pallas_kernels.core.pointwise.tables import Distances
from pallas_kernels.core.scores import PairPositions, Setting
from pallas_kernels.core.scores.score import Pulled
from pallas_kernels.core.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Where a block lies, and the spec with its fields loaded for it.

    Attributes:
      spec: array fields hold what broadcasts against the block.
      rows: (start, size) of `t` (query rows) and `s` (key rows).
      order: axes of the block: ("t", "s"), or ("s", "t") for a transposed one.
      masked: whether some pair may be masked; if not, no mask is evaluated. A kernel
        that cannot have its loop twice gives a traced scalar. Where it is not, a
        product of NaN beside a bias of -inf gives NaN: the backward has none, and a
        forward sees it in its sums and begins again with blocks that are.
      precision: of float32 products.
      arithmetic: the backend's.
      is_differentiated: whether JAX differentiates the scores, not this library.
      level: whether the terms of the score add one number to all pairs of the block,
        and that number (`Score.level`); None where nobody has looked.
    """

    spec: AttentionSpec
    rows: Mapping[str, tuple[Any, int]]
    order: tuple[str, str] = ("t", "s")
    masked: Any = True
    precision: Any = None
    arithmetic: Arithmetic = PLAIN
    is_differentiated: bool = False
    level: tuple[Any, Any] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the block."""
        first, second = self.order
        return self.rows[first][1], self.rows[second][1]

    def _numbers(self, name: str, start=None) -> jax.Array:
        """Row numbers of the block, or counted from `start`, against the block."""
        first = self.rows[name][0] if start is None else start
        return self.arithmetic.numbers(first, self.order.index(name), self.shape)

    def along(self, x: jax.Array, name: str) -> jax.Array:
        """A vector of the rows of `t` or `s`, against the block."""
        return self.arithmetic.along(x, self.order.index(name) - 2, self.shape)

    @functools.cached_property
    def place(self) -> PairPositions | None:
        if not self.spec.score.asks_distances:
            return None
        offset, queries, keys = self.spec.positions
        (t_start, _), (s_start, _) = self.rows["t"], self.rows["s"]
        query = self._numbers("t", 0)
        key = keys.after(s_start, self._numbers("s", 0)).astype(jnp.float32)
        if self.spec.repeat > 1:
            query, t_start = self.spec.query_numbers(self._numbers("t")), 0
        between = queries.at(t_start) + offset - keys.at(s_start)
        between = jnp.asarray(between, jnp.float32)
        query = queries.after(t_start, query).astype(jnp.float32)
        return PairPositions(between + query, key, self.spec.is_causal)

    def with_tables(self) -> Pairs:
        """With what is read at distances loaded: before products are waited for."""
        score = self.spec.score.at(self.distances)
        return dataclasses.replace(
            self, spec=dataclasses.replace(self.spec, score=score)
        )

    def positions(self) -> tuple[jax.Array, jax.Array]:
        """Of the queries and of the keys, int32, against the block."""
        return self.spec.positions_of(self._numbers("t"), self._numbers("s"))

    def distances(self) -> Distances:
        """Of queries and keys, by their numbers among those of all devices."""
        queries, keys = self.spec.query_rows, self.spec.key_rows

        def numbers() -> jax.Array:
            rows = self.spec.query_numbers(self._numbers("t"))
            return queries.at(rows) - keys.at(self._numbers("s"))

        t, s = self.rows["t"][0], self.rows["s"][0]
        first = None
        if self.spec.rows_follow:
            first = jnp.int32(queries.at(t) - keys.at(s))
        return Distances(first, numbers, self.order)

    def _setting(self, is_separable: bool = False) -> Setting:
        tanh = self.arithmetic.tanh
        known = self.place, self.positions, self.distances
        return Setting(*known, tanh, is_separable)

    @functools.cached_property
    def _bits(self) -> jax.Array:
        dropout = self.spec.dropout
        assert dropout is not None
        groups = {
            n: (lo, -(-size // BLOCK) * BLOCK) for n, (lo, size) in self.rows.items()
        }
        numberings = {"t": self.spec.query_rows, "s": self.spec.key_rows}
        make, shape = self.arithmetic.bits or type(dropout).bits, self.shape
        bits = make(dropout, groups, numberings, self.order, self.arithmetic)
        return bits if bits.shape[-2:] == shape else bits[..., : shape[0], : shape[1]]

    def product(self, of_queries: Block, of_keys: Block) -> jax.Array:
        """The products of rows [query rows, h] and [key rows, h], pair by pair."""
        first, second = map(jax.tree.leaves, (of_queries, of_keys))
        if self.order == ("s", "t"):
            first, second = second, first
        of_pieces = zip(first, second, strict=True)
        found = (flash2.dot(*pair, "nt", self.precision) for pair in of_pieces)
        return functools.reduce(operator.add, found)

    def scores(self, q: Block, k: Block) -> Scores:
        dtype = jax.tree.leaves(q)[0].dtype
        return self.scores_of(self.product(q, self.widened(k, dtype)), dtype)

    def widened(self, x: Block, dtype) -> Block:
        """Keys or values in the dtype of products, without their scale."""
        return jax.tree.map(lambda x: self.arithmetic.widened(x, dtype), x)

    def scores_of(self, qk: jax.Array, dtype) -> Scores:
        """Scores of the products of queries and keys in `dtype`."""
        # The two parts of a distance may be larger than it and round more: not far from
        # the diagonal, and not beside elements of two bytes.
        is_full = self.masked is False
        separable = is_full and jnp.dtype(dtype).itemsize == 2
        setting = self._setting(separable)
        if self.is_differentiated and (kept := self._kept):
            setting = setting._replace(kept=functools.reduce(operator.and_, kept))
        scores = self.spec.score.apply(qk, setting, nan_shows=is_full)
        if self.masked is False or not self.spec.masks:
            return scores
        if self.masked is True:
            return scores._replace(x=self._with_mask(scores.x))
        x = lax.cond(self.masked, self._with_mask, lambda x: x, scores.x)
        return scores._replace(x=x)

    def probabilities(self, qk: jax.Array, dtype, shift: jax.Array) -> jax.Array:
        """exp(scores) / 2**shift, of products as for `scores_of`.

        If the block is known to be `level`, its number moves the shift, and no table is
        read.
        """

        def of_pairs(qk: jax.Array) -> jax.Array:
            scores = self.scores_of(qk, dtype)
            return flash2.probabilities(scores, shift, self.arithmetic)

        if self.level is None:
            return of_pairs(qk)
        is_level, number = self.level

        def of_level(qk: jax.Array) -> jax.Array:
            scores = self.spec.score.product.apply(qk, self._setting())
            moved = shift - number * flash2.LOG2_E
            return flash2.probabilities(scores, moved, self.arithmetic)

        return lax.cond(is_level, of_level, of_pairs, qk)

    @property
    def _kept(self) -> list[jax.Array]:
        """Which pairs masks keep (`AttentionSpec.keep`)."""
        return self.spec.keep(self._numbers("t"), self._numbers("s"))

    def _with_mask(self, x: jax.Array) -> jax.Array:
        """Scores, -inf where no mask keeps the pair."""
        return functools.reduce(self.arithmetic.masked, self._kept, x)

    def drop(self, p: jax.Array) -> jax.Array:
        """Dropout without its scale (`AttentionSpec.dropout_scale`)."""
        dropout = self.spec.dropout
        if dropout is None:
            return p
        return self.arithmetic.where_below(p, self._bits, dropout.limit)

    def left(self, p: jax.Array) -> jax.Array:
        """What multiplies the values of a block: p after dropout, with their scale."""
        p, scale = self.drop(p), self.spec.value_scale
        return p if scale is None else p * scale.astype(p.dtype)

    def recompute(self, scores: Scores, lse_log2: jax.Array) -> Recomputed:
        """The probabilities of the block, in the backward pass.

        Args:
          scores: of the block.
          lse_log2: of the query rows (`flash2.lse_log2`), against the block.
        """
        p = flash2.probabilities(scores, lse_log2, self.arithmetic)
        if self.drops_by_sign:
            p = 2.0 * self.drop(p) - p
        return Recomputed(self, scores, p)

    @property
    def drops_by_sign(self) -> bool:
        """Whether `Recomputed.p` has a sign where dropout drops it."""
        return self.arithmetic.drops_by_sign and self.spec.dropout is not None


class Recomputed(NamedTuple):
    """What the backward pass makes again of a block: p, and from dp the gradient dz.

    The products p^T do, do v^T, dz k and dz^T q are the caller's, who issues each where
    its hardware wants it.
    """

    pairs: Pairs
    scores: Scores
    p: jax.Array  # probabilities; -p of those dropped (`Pairs.drops_by_sign`)

    @property
    def dropped(self) -> jax.Array:
        """p after dropout, over its scale: the left operand of dv."""
        if self.pairs.drops_by_sign:
            return jnp.maximum(self.p, 0.0)
        return self.pairs.drop(self.p)

    def push(
        self, dqk: jax.Array, qk: jax.Array, tangents: Mapping[str, jax.Array]
    ) -> jax.Array:
        """p times the tangent of the scores, for tangents (`core.tangent`).

        0 where p is, whatever the tangent is there: of a score of -inf it may be NaN.

        Args:
          dqk: the tangent of the products of queries and keys.
          qk: those products.
          tangents: of those operands of the score that have one, against the block.
        """
        score, masked = self.pairs.spec.score, self.pairs.masked is not False
        own = {name: x for name, x in tangents.items() if name in score.operands}
        ds = score.push(dqk, qk, own, self.scores, self.pairs._setting())
        if masked or score.may_mask:
            ds = jnp.where(self.p == 0.0, 0.0, ds)
        return self.p * ds

    def dz(self, dp: jax.Array, delta: jax.Array) -> jax.Array:
        """The gradient before the terms of the score, as `pull` makes it."""
        return self.pull(dp, delta).dz

    def pull(self, dp: jax.Array, delta: jax.Array) -> Pulled:
        """The gradients of the scores, over `AttentionSpec.dropout_scale`.

        Args:
          dp: the product of do and v.
          delta: of the query rows, against the block.
        """
        spec, p = self.pairs.spec, self.p
        if spec.dropout is not None:
            if self.pairs.drops_by_sign:
                dp, p = jnp.where(p > 0.0, dp, 0.0), jnp.abs(p)
            else:
                dp = self.pairs.drop(dp)
            delta = delta * (1 / spec.dropout_scale)
        ds = flash2.score_gradient(p, dp, delta)
        masked = self.pairs.masked is not False
        return spec.score.pull(ds, self.scores, self.pairs._setting(), masked)
