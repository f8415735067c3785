"""From the masks of a site to arguments of `attention`, and its rows without keys."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jax_flash2._flashify.axes import Axes, Cuts, seen_through
from jax_flash2._flashify.conditions import (
    NOWHERE,
    AtLeastZero,
    Data,
    Equal,
    Holds,
    Position,
)
from jax_flash2._flashify.digits import Dim, size_of
from jax_flash2._flashify.facts import Added, Fact, Lost, Mask, Operand, Scale
from jax_flash2._flashify.graph import is_known

# What a row without keys gives: there is none, or 0 as in `attention`; the mean of the
# values, with the gradient of a constant, or with that of scores too; NaN.
Empty = Literal["none", "mean", "mean of scores", "nan"]


@dataclasses.dataclass(frozen=True)
class Dense:
    """Pairs are kept where an array is not one number (or is it: `is_kept`)."""

    operand: Operand
    number: float
    is_kept: bool = False


@dataclasses.dataclass
class Window:
    """Keys from t - left to t + right; None for all."""

    left: int | None = None
    right: int | None = None

    def add(self, left: int | None, right: int | None) -> None:
        self.left = _least(self.left, left)
        self.right = _least(self.right, right)

    def all_rows_have_keys(self, t: int, s: int) -> bool:
        left = math.inf if self.left is None else self.left
        right = math.inf if self.right is None else self.right
        return right >= 0 and left + right >= 0 and t - 1 - left <= s - 1

    def has_diagonal(self) -> bool:
        return all(x is None or x >= 0 for x in (self.left, self.right))


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


@dataclasses.dataclass(frozen=True)
class Masks:
    """The masks of a site.

    Attributes:
      window: as `local_window_size`, of any sign, or None.
      segments: ids of queries and of keys.
      dense: the others.
      empty: what rows without keys give; `keeps` are then all masks, as the program has
        them.
      biases: masks that are better added.
      is_sum: whether "mean" is to be times the number of keys.
    """

    window: tuple[int | None, int | None] | None
    segments: tuple[Operand, Operand] | None
    dense: tuple[Dense, ...]
    empty: Empty
    keeps: tuple[Dense, ...]
    biases: tuple[Added, ...]
    is_sum: bool = False

    def operands(self) -> list[Operand]:
        own = [x.operand for x in (*self.dense, *self.keeps)]
        return [*own, *(self.segments or ()), *(x.operand for x in self.biases)]


def read_masks(fact: Fact, axes: Axes, cuts: Cuts, sizes: tuple[int, int]) -> Masks:
    """The masks of a fact.

    Args:
      sizes: numbers of rows and of keys.

    Raises:
      Lost: if rows may lack keys, and what they give then is not known.
    """
    masks = [x for x in fact.steps if isinstance(x, Mask)]
    reader = _Reader(axes, cuts, sizes)
    for mask in masks:
        reader.read(mask)
    if reader.always_have_keys() or not masks or fact.is_zeroed:
        return reader.masks("none", ())
    empty = _empty(fact, masks)
    is_sum = empty in ("mean", "mean of scores") and _adds_up_to_keys(
        fact, masks, sizes[1]
    )
    if empty is None:
        (mask,) = masks
        bias = Added(seen_through(Operand(mask.predicate, mask.layout)), mask.factor)
        own = _Reader(axes, cuts, sizes)
        return own.masks(
            "none", (dataclasses.replace(bias, operand=cuts.operand(bias.operand)),)
        )
    return dataclasses.replace(reader.masks(empty, ()), is_sum=is_sum)


def _adds_up_to_keys(fact: Fact, masks: list[Mask], keys: int) -> bool:
    """Whether rows without keys have the sum of all values, not their mean.

    Where scores are -1e9, so is their log-sum-exp: the logarithm of the number of keys
    is rounded away, and all probabilities are exp(0).
    """
    if fact.total_dtype is None:
        return False
    rounding = -masks[0].fill * float(jnp.finfo(fact.total_dtype).eps) / 4
    if rounding > math.log(keys):
        return True
    if rounding > 1e-4:
        raise Lost("rows may have no keys, and rounding says what they give")
    return False


def _empty(fact: Fact, masks: list[Mask]) -> Empty | None:
    """What a row without keys gives, or None if the one mask is a bias there."""
    if fact.dropped == "unknown":
        raise Lost("rows may have no keys, and what they give then is not known")
    if fact.dropped == "zero":
        return "nan"  # 0 / 0
    first = fact.steps.index(masks[0])
    biases = [i for i, x in enumerate(fact.steps) if isinstance(x, Added)]
    if all(np.isneginf(x.fill) for x in masks):
        return "nan"
    if len(masks) == 1 and masks[0].is_added:
        return "mean of scores" if masks[0].vanishes else None
    are_alike = len({x.fill for x in masks}) == 1 and not any(x.is_added for x in masks)
    if are_alike and not any(i > first for i in biases):
        scales = [i for i, x in enumerate(fact.steps) if isinstance(x, Scale)]
        last = fact.steps.index(masks[-1])
        if len(masks) == 1 or not any(first < i < last for i in scales):
            return "mean"
    raise Lost("rows may have no keys, and several terms then say what they give")


class _Reader:
    """Sorts the tests of masks into windows, segments and others."""

    def __init__(self, axes: Axes, cuts: Cuts, sizes: tuple[int, int]):
        self._axes, self._cuts, self._sizes = axes, cuts, sizes
        self._window = Window()
        self._has_window = False
        self._segments: tuple[Operand, Operand] | None = None
        self._dense: list[Dense] = []
        self._keeps: list[Dense] = []
        self._have_keys = True

    def always_have_keys(self) -> bool:
        t, s = self._sizes
        if not self._have_keys or not self._window.all_rows_have_keys(t, s):
            return False
        if self._segments is None:
            return True
        left, right = self._segments
        return self._window.has_diagonal() and self._are_same(left, right)

    def _are_same(self, left: Operand, right: Operand) -> bool:
        """Whether ids of keys are those of queries."""
        of_keys = dict(zip(self._axes.rows, self._axes.keys, strict=False))
        layout = tuple(tuple(of_keys.get(x, x) for x in dim) for dim in left.layout)
        t, s = self._sizes
        return t == s and left.value is right.value and layout == right.layout

    def masks(self, empty: Empty, biases: tuple[Added, ...]) -> Masks:
        t, s = self._sizes
        left, right = self._window.left, self._window.right
        left = None if left is None or left >= t - 1 else left
        right = None if right is None or right >= s - 1 else right
        has_window = left is not None or right is not None
        if left is not None and right is not None and left + right < 0:
            raise Lost("a window without keys")
        return Masks(
            (left, right) if has_window else None,
            self._segments,
            tuple(dict.fromkeys(self._dense)),
            empty,
            tuple(self._keeps) if empty != "none" else (),
            biases,
        )

    def read(self, mask: Mask) -> None:
        whole = Dense(self._operand(Operand(mask.predicate, mask.layout)), mask.dropped)
        self._keeps.append(whole)
        for test in mask.condition.tests:
            if isinstance(test, AtLeastZero):
                done = self._position(test.position, mask)
            elif isinstance(test, Equal):
                done = self._equal(test, mask)
            elif isinstance(test, Holds):
                done = self._holds(test, mask)
            else:
                done = False
            if not done:
                self._have_keys = False
                self._dense.append(whole)

    def _operand(self, operand: Operand) -> Operand:
        return self._cuts.operand(seen_through(operand, widened=False))

    def _of_data(self, data: Data, mask: Mask) -> Operand:
        places = zip(data.axes, data.value.shape, strict=True)
        layout = tuple(
            () if i == NOWHERE or size == 1 else mask.layout[i] for i, size in places
        )
        return self._operand(Operand(data.value, layout))

    def _position(self, position: Position, mask: Mask) -> bool:
        """Whether it is a window, and part of the one that there is."""
        factors = {self._cuts.dim(mask.layout[i]): f for i, f in position.factors}
        ends = (f * (size_of(dim) - 1) for dim, f in factors.items())
        if (
            not position.is_absolute
            and position.constant + sum(min(x, 0) for x in ends) >= 0
        ):
            return True  # everywhere
        rows, keys = self._axes.rows, self._axes.keys
        if (
            position.is_absolute
            or not factors
            or set(factors) != {rows, keys}
            or rows == keys
        ):
            return False
        if factors[rows] != -factors[keys] or abs(factors[rows]) != 1:
            return False
        if factors[rows] == 1:
            self._window.add(None, position.constant)
        else:
            self._window.add(position.constant, None)
        return True

    def _equal(self, test: Equal, mask: Mask) -> bool:
        """Whether it is one of ids of queries and of keys."""
        sides = [self._of_data(x, mask) for x in (test.left, test.right)]
        batch = {*self._axes.batch}
        of_rows, of_keys = ({*x, *batch} for x in (self._axes.rows, self._axes.keys))
        for left, right in (sides, sides[::-1]):
            dtypes = {x.value.aval.dtype.name for x in (left, right)}
            fits = {*left.digits()} <= of_rows and {*right.digits()} <= of_keys
            has = {*self._axes.rows} <= {*left.digits()}
            has &= {*self._axes.keys} <= {*right.digits()}
            if fits and has and dtypes <= _IDS and self._segments is None:
                self._segments = left, right
                return True
        return False

    def _holds(self, test: Holds, mask: Mask) -> bool:
        """True: an array of its own, smaller than the whole predicate, or a window."""
        operand = self._of_data(test.data, mask)
        found = self._constant_window(operand, test.is_true)
        if found is None:
            self._have_keys = False
            self._dense.append(Dense(operand, float(not test.is_true)))
            return True
        self._window.add(*found)
        return True

    def _constant_window(self, operand: Operand, is_true: bool):
        """(left, right) of a constant mask that is one."""
        t, s = self._sizes
        value, rows, keys = operand.value, self._axes.rows, self._axes.keys
        dims: list[Dim] = [x for x in operand.layout if x]
        if not is_known(value) or not {rows, keys} <= {*dims} or not (rows and keys):
            return None
        kept = np.asarray(value.constant).reshape([size_of(x) for x in dims])
        kept = np.moveaxis(
            kept == is_true, [dims.index(x) for x in (rows, keys)], [-2, -1]
        )
        kept = kept.reshape(-1, t, s)
        if not (kept == kept[0]).all():  # of one batch entry, or one head
            return None
        kept = kept[0]
        q, k = np.nonzero(kept)
        if not q.size:
            return None
        right, left = int(np.max(k - q)), int(np.max(q - k))
        distance = np.arange(s)[None, :] - np.arange(t)[:, None]
        if not np.array_equal(kept, (distance <= right) & (distance >= -left)):
            return None
        return left, right


_IDS = {"bool", "int8", "int16", "int32", "uint8", "uint16"}
