"""What small arrays may mean: numbers, positions, conditions; moved and negated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_flash2._flashify.graph import Node, Value


@dataclasses.dataclass(frozen=True)
class Number:
    """An array of one number."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Position:
    """constant + sum over axes of factor * index, or its absolute value."""

    factors: tuple[tuple[int, int], ...]  # (axis, factor)
    constant: int
    is_absolute: bool = False


@dataclasses.dataclass(frozen=True)
class Data:
    """An array of the program, whose axis i is axis axes[i]; constant along others."""

    value: Value
    axes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AtLeastZero:
    """Whether a position is not negative."""

    position: Position


@dataclasses.dataclass(frozen=True)
class Equal:
    """Whether two arrays have the same number."""

    left: Data
    right: Data


@dataclasses.dataclass(frozen=True)
class Holds:
    """Whether a boolean array is true (or false)."""

    data: Data
    is_true: bool = True


@dataclasses.dataclass(frozen=True)
class Unread:
    """Something else."""


Test = AtLeastZero | Equal | Holds | Unread


@dataclasses.dataclass(frozen=True)
class Condition:
    """True where all tests agree."""

    tests: tuple[Test, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """One number where a condition is true, and another elsewhere."""

    condition: Condition
    true: Any
    false: Any


NEVER = AtLeastZero(Position((), -1))
Meaning = Number | Position | Data | Condition | Choice


def moved_axes(node: Node) -> list[int | None] | None:
    """Of a node that moves axes, where each axis of its operand is then."""
    if not node.inputs:
        return None
    shape, name = node.inputs[0].shape, node.name
    if name == "transpose":
        return [node.params["permutation"].index(i) for i in range(len(shape))]
    if name == "broadcast_in_dim":
        places = node.params["broadcast_dimensions"]
        new = node.shape
        return [
            to if size == new[to] else None
            for size, to in zip(shape, places, strict=True)
        ]
    if name in ("reshape", "squeeze", "expand_dims"):
        new = node.shape
        if [x for x in shape if x > 1] != [x for x in new if x > 1]:
            return None
        places = iter(i for i, size in enumerate(new) if size > 1)
        return [next(places) if size > 1 else None for size in shape]
    return None


def moved(found: Meaning, to: Sequence[int | None]) -> Meaning | None:
    if isinstance(found, Number):
        return found
    if isinstance(found, Position):
        factors = tuple((to[i], f) for i, f in found.factors if to[i] is not None)
        return dataclasses.replace(found, factors=_sorted(factors))
    if isinstance(found, Data):
        return _moved_data(found, to)
    if isinstance(found, Choice):
        return dataclasses.replace(found, condition=moved_tests(found.condition, to))
    return moved_tests(found, to)


def _sorted(factors) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(factors))


# Of an axis of one element, which is nowhere in what it was moved to.
NOWHERE = -1


def _moved_data(found: Data, to: Sequence[int | None]) -> Data:
    places = (NOWHERE if i == NOWHERE else to[i] for i in found.axes)
    return Data(found.value, tuple(NOWHERE if i is None else i for i in places))


def moved_tests(found: Condition, to: Sequence[int | None]) -> Condition:
    def one(test: Test) -> Test:
        if isinstance(test, AtLeastZero):
            factors = ((to[i], f) for i, f in test.position.factors)
            kept = _sorted((i, f) for i, f in factors if i not in (None, NOWHERE))
            return AtLeastZero(dataclasses.replace(test.position, factors=kept))
        if isinstance(test, Equal):
            return Equal(_moved_data(test.left, to), _moved_data(test.right, to))
        if isinstance(test, Unread):
            return test
        return Holds(_moved_data(test.data, to), test.is_true)

    return Condition(tuple(map(one, found.tests)))


def negated(condition: Condition) -> Condition | None:
    """Where a condition is false, if that is one test again."""
    if len(condition.tests) != 1:
        return None
    (test,) = condition.tests
    if isinstance(test, Holds):
        return Condition((Holds(test.data, not test.is_true),))
    if isinstance(test, AtLeastZero) and not test.position.is_absolute:
        return Condition((AtLeastZero(scaled(test.position, -1, -1)),))
    return None


def scaled(x: Position, factor: int, plus: int = 0) -> Position:
    factors = tuple((i, f * factor) for i, f in x.factors)
    return Position(factors, x.constant * factor + plus)
