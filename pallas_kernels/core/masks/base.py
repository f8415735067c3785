"""The contract of a mask atom, and the block table of those that data decides.

An atom says which (query, key) pairs it keeps, and answers for itself what a call must
know beside that. A new kind of mask is one file with one class: no other code asks for
its type. What a class does not answer is an error, not a guess.

- `keep(q, kv, q_pos, kv_pos)` is pointwise: row numbers `q` and `kv` that broadcast
  against each other (and where they stand, `core.positions`) give a boolean array. The
  same line serves a dense mask (q [T, 1], kv [1, S]), a block of it, and a transposed
  block.
- Block ranges. For the rows [q_lo, q_hi) of a query block, `kv_range` gives
  `need_lo <= full_lo <= full_hi <= need_hi`: outside `need` no pair is kept, inside
  `full` every pair is. `q_range` is its twin for a block of keys. An atom whose answer
  depends on arrays of rows gives `block_relation` instead: two small arrays
  [query blocks, key blocks] that say "some pair may be kept" and "all are".

Loops evaluate `keep` only on the two sides of `full`:

    need_lo      full_lo                 full_hi     need_hi
       |  masked    |   no mask evaluated   |  masked   |

- `attended_keys` and `limits` name the rows that must meet no product, for they may
  hold NaN, and 0 times NaN is NaN.
- `traits` and `mean_keys` say how much work there is, for the choice of kernels.

Fields hold scalars, blocks or whole arrays (`spec.AttentionSpec`), for the same code.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.core.axes import Named, batch_axes
from pallas_kernels.core.lists import BlockList
from pallas_kernels.core.masks.relation import Relation, Tiling
from pallas_kernels.core.masks.traits import Traits
from pallas_kernels.core.positions import Positions
from pallas_kernels.core.ranges import (
    Range,
    block_ends,
    divide,
    everything,
    maximum,
    minimum,
    where,
)


@typing.dataclass_transform(frozen_default=True)
def mask_dataclass(data: tuple[str, ...] = (), meta: tuple[str, ...] = ()):
    """A frozen dataclass that is a pytree of its `data` fields."""

    def register(cls: type) -> type:
        cls = dataclasses.dataclass(frozen=True)(cls)
        return jax.tree_util.register_dataclass(cls, list(data), list(meta))

    return register


class Limits(NamedTuple):
    """Rows at or beyond any of these are padding: int32 scalars."""

    query: tuple = ()
    key: tuple = ()


class Atom(abc.ABC):
    """A kind of mask: a frozen dataclass that is a pytree (`mask_dataclass`).

    Methods that take or give `Named` are called where operands are whole arrays. The
    others run in kernels, too, where fields hold what a block needs of them.

    Attributes:
      traits: what is known of the atom without data.
      limits: from which rows on all are padding, whose values must not be touched.
      has_ranges: whether `kv_range` and `q_range` say, without arrays, what meets.
      ranges_are_exact: whether a block of keys is in the `kv_range` of a block of
        queries if and only if that is in the `q_range` of the keys. Ranges that are
        only safe do not promise that.
      operations, words: what a kernel must have for it, and what `explain` says of it,
        as of a term of the score.
      lists_blocks: whether the blocks that it keeps may have others between them, so
        that a list of them (`core.lists`) skips more than a range.
      arguments: of `attention`, by the fields that have other names (`Call.argument`).
    """

    # Class attributes or properties; without one, an AttributeError says so.
    traits: Traits
    limits: Limits
    has_ranges: bool
    ranges_are_exact: bool
    operations: frozenset[str] = frozenset()
    words: str = ""
    lists_blocks: bool = False
    arguments: ClassVar[Mapping[str, str]] = {}

    @abc.abstractmethod
    def keep(self, q, kv, q_pos, kv_pos) -> jax.Array | None:
        """Which pairs are kept; None for all.

        Args:
          q, kv: int32 numbers of rows, which broadcast against each other.
          q_pos, kv_pos: the positions of these rows, int32.
        """

    @abc.abstractmethod
    def mean_keys(self, kv_size: int) -> float:
        """About how many keys a query attends, as far as is known without data.

        That is with as many queries as keys, from the same position on.
        """

    @abc.abstractmethod
    def attended_keys(self, positions: Positions, kv_size: int) -> Named | None:
        """Which keys some query may attend, beside `limits` (`Named` fields).

        The others meet no product. None says that values need no such care: what masks
        by positions alone drops keys, and callers keep them finite.

        Returns:
          A boolean array with `s` among its axes, or without it if all keys are alike;
          or None.
        """

    def kv_range(self, q_lo, q_hi, positions: Positions, size: int) -> Range:
        """The keys that the query rows [q_lo, q_hi) need, of so many.

        It may use scalars, but no arrays of rows.
        """
        raise NotImplementedError(f"{type(self).__name__} gives no ranges of keys")

    def q_range(self, kv_lo, kv_hi, positions: Positions, size: int) -> Range:
        """The query rows that need the keys [kv_lo, kv_hi): the twin of `kv_range`."""
        raise NotImplementedError(f"{type(self).__name__} gives no ranges of queries")

    def block_relation(self, tiling: Tiling) -> Relation:
        """For each pair of blocks, whether some pair may be kept and whether all are.

        Of an atom with ranges it follows from these; others must give it. Fields hold
        `Named` arrays.
        """
        parts = without_rows(self), tiling.positions
        axes = (*_element_axes(parts), "i")
        own, positions = named_map(lambda x: x.to(axes), parts)
        start, end = block_ends(tiling.block_q, tiling.q_size)
        if tiling.repeat > 1:
            start = divide(start, tiling.repeat)
            end = divide(end - 1, tiling.repeat) + 1
        keys = own.kv_range(start, end, positions, tiling.kv_size)
        found = keys.blocks(tiling.block_kv, tiling.kv_size)
        shape = (1,) * (len(axes) - 1) + jnp.shape(start)
        lo, full_lo, full_hi, hi = (
            (x + jnp.zeros(shape, jnp.int32))[..., None] for x in found
        )
        j = jnp.arange(-(-tiling.kv_size // tiling.block_kv), dtype=jnp.int32)
        axes = (*axes, "j")
        some, every = (lo <= j) & (j < hi), (full_lo <= j) & (j < full_hi)
        return Relation(Named(some, axes), Named(every, axes))

    def of_rows(self, positions: Positions, size: Mapping[str, int]) -> Atom:
        """For a part of the rows, from that of all (`Named` fields).

        An atom without arrays is the same for any part. Arrays of rows come as those of
        the part.

        Args:
          positions: of those rows; `Named`.
          size: how many of `t` and `s` there are.
        """
        del positions, size
        if jax.tree.leaves(self):
            raise NotImplementedError(
                f"{type(self).__name__} does not say what it is for a part of the rows"
            )
        return self

    def with_pairs(self, convert: Callable[[Named], Atom]) -> Atom:
        """Itself, or what a backend makes of it if it keeps what an array says.

        Args:
          convert: makes an atom of a mask with axes `t` and `s`, and others.
        """
        del convert
        return self

    def without_lists(self) -> Atom:
        """Itself, without lists of blocks that it holds: what kernels evaluate."""
        return self

    def by_sides(self, tiling: Tiling) -> Atom:
        """Itself, with arrays of what queries or keys alone decide (`Named` fields)."""
        del tiling
        return self

    def block_list(self, looped: str, tiling: Tiling) -> BlockList | None:
        """The list of blocks that it holds for a kernel with these blocks, or None.

        Args:
          looped: which rows a kernel loops over, as of `AttentionSpec.with_table`.
        """
        del looped, tiling
        return None

    def __and__(self, other: Atom) -> Atom:
        """The pairs that both keep."""
        return Both(self, other)

    def __or__(self, other: Atom) -> Atom:
        """The pairs that one of them keeps, or both."""
        return Either(self, other)


class _Combined(Atom):
    """Two atoms, `first` and `second`, as one."""

    first: Atom
    second: Atom

    @property
    def _atoms(self) -> tuple[Atom, Atom]:
        return self.first, self.second

    @property
    def has_ranges(self) -> bool:
        return all(atom.has_ranges for atom in self._atoms)

    @property
    def operations(self) -> frozenset[str]:
        return self.first.operations | self.second.operations

    @property
    def ranges_are_exact(self) -> bool:
        return False  # ranges of both may meet where no pair is kept

    def kv_range(self, q_lo, q_hi, positions: Positions, size: int) -> Range:
        return self._joined("kv_range", q_lo, q_hi, positions, size)

    def q_range(self, kv_lo, kv_hi, positions: Positions, size: int) -> Range:
        return self._joined("q_range", kv_lo, kv_hi, positions, size)

    def _joined(self, method: str, *arguments) -> Range:
        first, second = (getattr(atom, method)(*arguments) for atom in self._atoms)
        return self._of_ranges(first, second, arguments[-1])

    def with_pairs(self, convert: Callable[[Named], Atom]) -> Atom:
        return type(self)(*(atom.with_pairs(convert) for atom in self._atoms))

    def by_sides(self, tiling: Tiling) -> Atom:
        return type(self)(*(atom.by_sides(tiling) for atom in self._atoms))

    @abc.abstractmethod
    def _of_ranges(self, first: Range, second: Range, size: int) -> Range: ...

    def of_rows(self, positions: Positions, size: Mapping[str, int]) -> Atom:
        return type(self)(*(atom.of_rows(positions, size) for atom in self._atoms))


@mask_dataclass(data=("first", "second"))
class Both(_Combined):
    """Keeps the pairs that both atoms keep."""

    first: Atom
    second: Atom

    def keep(self, q, kv, q_pos, kv_pos):
        found = (atom.keep(q, kv, q_pos, kv_pos) for atom in self._atoms)
        kept = [x for x in found if x is not None]
        return functools.reduce(operator.and_, kept) if kept else None

    @property
    def traits(self) -> Traits:
        return self.first.traits & self.second.traits

    def mean_keys(self, kv_size: int) -> float:
        return min(atom.mean_keys(kv_size) for atom in self._atoms)

    @property
    def limits(self) -> Limits:
        pairs = zip(self.first.limits, self.second.limits, strict=True)
        return Limits(*(one + other for one, other in pairs))

    def attended_keys(self, positions: Positions, kv_size: int) -> Named | None:
        found = (atom.attended_keys(positions, kv_size) for atom in self._atoms)
        return joined(operator.and_, [x for x in found if x is not None])

    def _of_ranges(self, first: Range, second: Range, size: int) -> Range:
        return everything(0, size) & first & second

    def block_relation(self, tiling: Tiling) -> Relation:
        first, second = (atom.block_relation(tiling) for atom in self._atoms)
        return first & second


@mask_dataclass(data=("first", "second"))
class Either(_Combined):
    """Keeps the pairs that one of two atoms keeps, or both."""

    first: Atom
    second: Atom

    def keep(self, q, kv, q_pos, kv_pos):
        first, second = (atom.keep(q, kv, q_pos, kv_pos) for atom in self._atoms)
        return None if first is None or second is None else first | second

    @property
    def traits(self) -> Traits:
        return self.first.traits | self.second.traits

    def mean_keys(self, kv_size: int) -> float:
        return min(kv_size, sum(atom.mean_keys(kv_size) for atom in self._atoms))

    @property
    def limits(self) -> Limits:
        return Limits()  # what is padding for one may be none for the other

    def attended_keys(self, positions: Positions, kv_size: int) -> Named | None:
        found = (_all_attended(atom, positions, kv_size) for atom in self._atoms)
        kept = [x for x in found if x is not None]
        return joined(operator.or_, kept) if len(kept) == 2 else None

    def _of_ranges(self, first: Range, second: Range, size: int) -> Range:
        """The hull, and of what is full the longer part."""
        first, second = (everything(0, size) & x for x in (first, second))
        lo = minimum(*(x.need_lo + where(x.count <= 0, size) for x in (first, second)))
        hi = maximum(*(where(x.count > 0, x.need_hi) for x in (first, second)))
        one, other = (x.full_hi - x.full_lo for x in (first, second))
        full_lo, full_hi = (
            where(one >= other, a) + where(one < other, b)
            for a, b in zip(first[1:3], second[1:3], strict=True)
        )
        return everything(0, size) & Range(lo, full_lo, full_hi, hi)

    def block_relation(self, tiling: Tiling) -> Relation:
        first, second = (atom.block_relation(tiling) for atom in self._atoms)
        return first | second


def _all_attended(atom: Atom, positions: Positions, kv_size: int) -> Named | None:
    """Which keys an atom's queries may attend, with what its limits say."""
    own = atom.attended_keys(positions, kv_size)
    found = [] if own is None else [own]
    for limit in atom.limits.key:
        limit = limit.squeezed()
        kept = jnp.arange(kv_size, dtype=jnp.int32) < limit.to((*limit.axes, "s"))
        found.append(Named(kept, (*limit.axes, "s")))
    return joined(operator.and_, found)


def joined(operation: Callable, arrays: list[Named]) -> Named | None:
    """An operation of arrays with any axes; None of none."""
    axes = tuple(dict.fromkeys(a for x in arrays for a in x.axes))
    if not arrays:
        return None
    return Named(functools.reduce(operation, (x.to(axes) for x in arrays)), axes)


def named_map(function: Callable, tree):
    """A function of each `Named` of a tree, in which numbers may stand, too."""
    return jax.tree.map(lambda x: function(x) if isinstance(x, Named) else x, tree)


def without_rows(tree):
    """A tree of `Named` without arrays of rows, which are None: what ranges may use."""
    return named_map(lambda x: None if {"t", "s"} & set(x.axes) else x, tree)


def _element_axes(tree) -> tuple[str, ...]:
    """The axes of batch and heads of a tree of `Named`."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, Named)]
    heads = ("n",) if any("n" in x.axes for x in leaves) else ()
    return (*batch_axes(leaves), *heads)
