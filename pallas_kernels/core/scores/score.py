"""The score of a (query, key) pair, its cotangents and its tangent.

    z = scale * factor * q.k
    s = the terms, one after the other, of z; -inf where a term masks

Masks come after. Fields hold scalars, blocks or whole arrays (`spec.AttentionSpec`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.core.flash2 import Scores
from pallas_kernels.core.pointwise.tables import Distances, Table
from pallas_kernels.core.scores.base import Setting, Term

_TINY = 2.0**-40
# The name of the operand `Score.factor`.
_FACTOR = "factor"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Score:
    """How a product q.k becomes a score.

    Attributes:
      scale: of the product (static).
      terms: in the order of the equation (`scores.base.Term`).
      factor: of the product, a scalar, where the scale is data; or None.
      key_scale: multiplies each key, where keys are quantised, or None. It has no
        gradient.
    """

    scale: float = dataclasses.field(metadata={"static": True})
    terms: tuple[Term, ...] = ()
    factor: Any = None
    key_scale: Any = None
    arguments: ClassVar = {"factor": "scale"}

    @property
    def operands(self) -> dict[str, Any]:
        """What has gradients, in the order of the tree's leaves."""
        found = {n: x for term in self.terms for n, x in term.operands.items()}
        return found if self.factor is None else {**found, _FACTOR: self.factor}

    @property
    def pair_operands(self) -> dict[str, Any]:
        """Those with an element for each pair (fields have names of axes)."""
        return {n: x for n, x in self.operands.items() if {"t", "s"} <= set(x.axes)}

    def zero(self, name: str) -> int | None:
        """Of an operand that is read at distances, the place of 0 (`Term.zero`)."""
        found = (x.zero(name) for x in self.terms if name in x.operands)
        return next(found, None)

    def at(self, distances: Callable[[], Distances]) -> Score:
        """With what terms read at the distances of a block loaded."""
        terms = tuple(term.at(distances) for term in self.terms)
        return dataclasses.replace(self, terms=terms)

    @property
    def may_be_level(self) -> bool:
        """As `Term.may_be_level`, of all terms."""
        return bool(self.terms) and all(term.may_be_level for term in self.terms)

    def level(self, distances: Callable[[], Distances]) -> tuple[jax.Array, jax.Array]:
        """As `Term.level`, of all terms."""
        flags, numbers = zip(*(x.level(distances) for x in self.terms), strict=True)
        is_level = functools.reduce(operator.and_, flags)
        return is_level, functools.reduce(operator.add, numbers)

    @property
    def product(self) -> Score:
        """The score without its terms."""
        return dataclasses.replace(self, terms=())

    @property
    def reads_distances(self) -> bool:
        """Whether some operand is read at distances."""
        return any(self.zero(name) is not None for name in self.operands)

    @property
    def is_positional(self) -> bool:
        """Whether the score depends on where query and key stand."""
        return any(term.traits.is_positional for term in self.terms)

    @property
    def is_absolute(self) -> bool:
        """Whether it depends on more than their distance."""
        return any(term.traits.is_absolute for term in self.terms)

    @property
    def asks_distances(self) -> bool:
        """Whether a term takes `Setting.place`."""
        traits = (term.traits for term in self.terms)
        return any(x.is_positional and not x.is_absolute for x in traits)

    @property
    def may_mask(self) -> bool:
        """Whether a score may be -inf without a mask."""
        return any(term.traits.may_mask for term in self.terms)

    @property
    def is_heavy(self) -> bool:
        """Whether a term takes much arithmetic for each pair."""
        return any(term.traits.is_heavy for term in self.terms)

    @property
    def keeps_scores(self) -> bool:
        """Whether the backward holds scores until their cotangents are there."""
        return any(term.kept != "nothing" for term in self.terms)

    def apply(
        self, qk: jax.Array, setting: Setting, *, nan_shows: bool = False
    ) -> Scores:
        """A block of scores.

        Args:
          qk: products.
          setting: of the block. Whether parts of a sum are separable counts for the
            last term.
          nan_shows: whether a product of NaN that a term masks may stay NaN: there is
            none, or sums show it and the scores are made again without this.
        """
        if self.factor is not None:
            qk = qk * self.factor.astype(qk.dtype)
        if self.key_scale is not None:
            qk = qk * self.key_scale.astype(qk.dtype)
        scores = Scores(qk, self.scale)
        # Of a tiny unit the inverse may be infinite, of a masking number the product.
        if self.may_mask or self.scale <= _TINY:
            scores = scores.settled
        terms, kept = [], []
        for i, term in enumerate(self.terms):
            is_last = i + 1 == len(self.terms)
            term = jax.tree.map(lambda x: _with_dtype(x, qk.dtype), term)
            own = setting._replace(is_separable=setting.is_separable and is_last)
            kept += [scores.settled] if term.kept == "argument" else []
            scores = term.apply(scores, own)
            kept += [scores] if term.kept == "result" and not is_last else []
            terms.append(term)
        for i, term in enumerate(terms):
            shows = nan_shows and all(x.traits.keeps_lowest for x in terms[i + 1 :])
            if term.traits.may_mask and not shows:
                masked = term.masks(scores.x.shape)
                if masked is not None:
                    x = jnp.where(masked, -jnp.inf, scores.x)
                    scores = scores._replace(x=x)
        return scores._replace(kept=tuple(kept))

    def pull(self, ds: jax.Array, scores: Scores, setting: Setting, masked) -> Pulled:
        """The cotangents of all scores from that of the last.

        Args:
          ds: of the score; 0 where it is -inf.
          scores: of `apply`.
          setting: of the block.
          masked: whether a mask made some of the scores -inf.
        """
        may_mask = masked or self.may_mask
        found = [ds]
        for term, kept in reversed(self._kept(scores)):
            ds = term.pull(ds, kept, setting, may_mask)
            found.append(ds)
        return Pulled(self, scores, setting, tuple(reversed(found)))

    def push(
        self,
        dqk: jax.Array,
        qk: jax.Array,
        tangents: Mapping[str, jax.Array],
        scores: Scores,
        setting: Setting,
    ) -> jax.Array:
        """The tangent of the score.

        Args:
          dqk: of the products.
          qk: the products.
          tangents: of those operands that have one, by name, against the block.
          scores: of `apply`.
          setting: of the block.
        """
        ds = dqk * self.gradient_unit
        if _FACTOR in tangents:
            ds = ds + qk * (self.scale * tangents[_FACTOR])
        for term, kept in self._kept(scores):
            own = {n: tangents[n] for n in term.operands if n in tangents}
            ds = term.push(ds, own, kept, setting)
        return ds

    def _kept(self, scores: Scores) -> list[tuple[Term, Scores | None]]:
        """The terms, each with what was kept for it."""
        kept, found = iter(scores.kept), []
        for i, term in enumerate(self.terms):
            is_last = i + 1 == len(self.terms)
            if term.kept == "nothing":
                found.append((term, None))
            elif term.kept == "result" and is_last:
                found.append((term, scores))
            else:
                found.append((term, next(kept)))
        return found

    @property
    def gradient_unit(self):
        """Cotangent of q.k over that of z."""
        return self.scale if self.factor is None else self.scale * self.factor


def _with_dtype(x: Any, dtype) -> Any:
    """An operand as scores are; numbers that are counted stay integers."""
    if isinstance(x, Table):
        return x
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


class Pulled(NamedTuple):
    """The cotangents of a block of scores, from z on (`Score.pull`)."""

    score: Score
    scores: Scores
    setting: Setting
    cotangents: tuple[jax.Array, ...]

    @property
    def dz(self) -> jax.Array:
        """Of z: that of q.k over `Score.gradient_unit`."""
        return self.cotangents[0]

    def operand(self, name: str, qk: jax.Array) -> jax.Array:
        """What each pair adds to the gradient of an operand.

        Args:
          name: one of `Score.operands`.
          qk: the products.
        """
        if name == _FACTOR:
            return self.dz * qk * self.score.scale
        kept = self.score._kept(self.scores)
        for (term, own), ds in zip(kept, self.cotangents[1:], strict=True):
            if name in term.operands:
                return term.pull_operand(name, ds, own, self.setting)
        raise KeyError(name)

    def places(self, name: str) -> jax.Array | Distances | None:
        """Where in a table each pair adds that (`Term.places`)."""
        terms = (x for x in self.score.terms if name in x.operands)
        return next((x.places(name, self.setting) for x in terms), None)
