"""The contract of a term of the score.

A term makes scores of scores: s' = f(s, its operands, the pair's place). It gives the
value (`apply`), the cotangent of s and of its operands from that of s' (`pull`,
`pull_operand`), and the tangent of s' from those of s and of its operands (`push`). It
also says what a call must know of it (`TermTraits`). A new kind of score is one file
with one class: no other code asks for its type.

Constant factors are left to the caller, who folds them into a multiplication that is
made anyway: `Scores` hold them as `unit`. A term that needs the score itself takes
`Scores.value`, or multiplies by the unit first (`settled`).
"""

from __future__ import annotations

import abc
import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.core.flash2 import Scores
from pallas_kernels.core.pointwise.tables import Distances

Kept = Literal["nothing", "argument", "result"]


@typing.dataclass_transform(frozen_default=True)
def term_dataclass(data: tuple[str, ...] = (), meta: tuple[str, ...] = ()):
    """A frozen dataclass that is a pytree of its `data` fields."""

    def register(cls: type) -> type:
        cls = dataclasses.dataclass(frozen=True)(cls)
        return jax.tree_util.register_dataclass(cls, list(data), list(meta))

    return register


class PairPositions(NamedTuple):
    """Where a block of pairs lies: float32 positions, from that of its first key."""

    query: jax.Array  # against the block, of size 1 along the keys
    key: jax.Array  # of size 1 along the queries
    is_causal: bool  # whether a mask follows that drops keys after the query

    @property
    def distance(self) -> jax.Array:
        """|query position - key position|, of any sign where a mask follows."""
        distance = self.query - self.key
        return distance if self.is_causal else jnp.abs(distance)


class Setting(NamedTuple):
    """What a term may ask of the block and of the backend.

    Attributes:
      place: where the pairs lie; None where no term asks for distances.
      positions: makes the positions of queries and of keys, int32, against the block;
        for terms that are absolute.
      distances: makes what `tables.take` takes of the pairs, for these terms, too.
      tanh: the backend's hyperbolic tangent.
      kept: which pairs masks keep, where JAX differentiates the terms; else None.
      is_separable: whether the parts of a sum may be left to a row (`Scores.row`).
    """

    place: PairPositions | None
    positions: Callable[[], tuple[jax.Array, jax.Array]] | None = None
    distances: Callable[[], Distances] | None = None
    tanh: Callable = jnp.tanh
    is_separable: bool = False
    kept: jax.Array | None = None

    @property
    def distance(self) -> jax.Array:
        """Of the pairs (`PairPositions.distance`), for terms that ask for it."""
        assert self.place is not None
        return self.place.distance


@dataclasses.dataclass(frozen=True)
class TermTraits:
    """What a call must know of a term.

    Attributes:
      is_positional: whether it asks where rows stand.
      is_absolute: whether it asks for more than the distance of query and key
        (`Setting.positions`, in place of `Setting.place`).
      may_mask: whether it may make a score -inf.
      keeps_lowest: whether -inf stays -inf.
      is_additive: whether it adds what does not depend on the score.
      is_heavy: whether it takes much arithmetic for each pair.
      maximum_may_grow: whether the scores of the first blocks of a row may lie far
        below those of others, without a causal mask.
    """

    is_positional: bool
    is_absolute: bool
    may_mask: bool
    keeps_lowest: bool
    is_additive: bool
    is_heavy: bool
    maximum_may_grow: bool


class Term(abc.ABC):
    """A term of the score: a frozen dataclass that is a pytree (`term_dataclass`).

    Attributes:
      traits: what is known of it without data.
      kept: what `pull` and the others are given: the argument of `apply`, its result,
        or nothing. A tile of it is held until then. The result of the last term is
        there anyway.
      operations: what a kernel must have for it beside what all kernels have, such as
        the names of JAX's primitives (`pointwise.Program.operations`).
      words: what `explain` says of it beside the arguments; or nothing.
      arguments: of `attention`, by the fields that have other names (`Call.argument`).
    """

    # Class attributes or properties; without one, an AttributeError says so.
    traits: TermTraits
    kept: Kept
    operations: frozenset[str] = frozenset()
    words: str = ""
    arguments: ClassVar[Mapping[str, str]] = {}

    @property
    @abc.abstractmethod
    def operands(self) -> Mapping[str, Any]:
        """Its fields that have gradients, by the names that no other term has."""

    @abc.abstractmethod
    def apply(self, scores: Scores, setting: Setting) -> Scores:
        """The scores that follow. Operands have the dtype of the scores."""

    def masks(self, shape: tuple[int, ...]) -> jax.Array | None:
        """Which pairs are -inf whatever the product is: booleans of this shape.

        Asked of terms that may mask. None says that `apply` makes them -inf.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it masks")

    @abc.abstractmethod
    def pull(
        self, ds: jax.Array, kept: Scores | None, setting: Setting, may_mask: bool
    ) -> jax.Array:
        """The cotangent of the argument from that of the result.

        Args:
          ds: of the result; 0 where the score is -inf.
          kept: what was kept.
          setting: as for `apply`.
          may_mask: whether some of what was kept may be -inf.
        """

    def pull_operand(
        self, name: str, ds: jax.Array, kept: Scores | None, setting: Setting
    ) -> jax.Array:
        """What each pair adds to the gradient of an operand.

        Args:
          name: one of `operands`.
          ds, kept, setting: as for `pull`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gradient of {name}")

    def places(self, name: str, setting: Setting) -> jax.Array | Distances | None:
        """Which element of an operand each pair reads, where it is a table.

        Args:
          name: one of `operands`.
          setting: as for `apply`.

        Returns:
          int32 places along its whole axis (`axes.whole_axis`), against the block, or
          distances; None of an operand that stands against the block itself.
        """
        del name, setting
        return None

    def at(self, distances: Callable[[], Distances]) -> Term:
        """With what it reads at the distances of a block loaded (`tables.Taken`)."""
        del distances
        return self

    @property
    def may_be_level(self) -> bool:
        """Whether it adds what may be one number for all pairs of a block (`level`).

        Asked of whole operands, `Named`.
        """
        return False

    def level(self, distances: Callable[[], Distances]) -> tuple[jax.Array, jax.Array]:
        """Whether it adds one number to all pairs of a block, and that number.

        Asked of terms that `may_be_level`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it adds")

    def zero(self, name: str) -> int | None:
        """The place of distance 0 of an operand that is read at distances; or None."""
        del name
        return None

    @abc.abstractmethod
    def push(
        self,
        ds: jax.Array,
        tangents: Mapping[str, jax.Array],
        kept: Scores | None,
        setting: Setting,
    ) -> jax.Array:
        """The tangent of the result.

        Args:
          ds: the tangent of the argument.
          tangents: of those operands that have one, against the block.
          kept, setting: as for `pull`.
        """
