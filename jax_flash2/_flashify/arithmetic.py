"""Operations on what small arrays mean (`conditions`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_flash2._flashify.conditions import (
    AtLeastZero,
    Choice,
    Condition,
    Data,
    Equal,
    Meaning,
    Number,
    Position,
    negated,
    scaled,
)
from jax_flash2._flashify.graph import Value

POINTWISE: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "square": np.square,
    "eq": np.equal,
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "not": np.logical_not,
    "and": np.logical_and,
    "or": np.logical_or,
}
# Types of positions, and up to which number they have all.
POSITIONS = {
    np.dtype(np.int32): 2**31,
    np.dtype(np.int64): 2**63,
    np.dtype(np.float32): 2**24,
    np.dtype(np.float64): 2**53,
}
_COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt")


def converted(found: Meaning, value: Value) -> Meaning | None:
    dtype = value.aval.dtype
    if isinstance(found, Number):
        return Number(_cast(found.value, dtype))
    if isinstance(found, Position):
        return found if dtype in POSITIONS else None
    if isinstance(found, Choice):
        if dtype == np.bool_:
            return chosen(found.condition, found.true != 0, found.false != 0)
        return dataclasses.replace(
            found, true=_cast(found.true, dtype), false=_cast(found.false, dtype)
        )
    if isinstance(found, Condition):
        if dtype == np.bool_:
            return found
        return Choice(found, _cast(True, dtype), _cast(False, dtype))
    return None


def _cast(x: Any, dtype) -> Any:
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype)


def chosen(condition: Condition, true: bool, false: bool) -> Meaning | None:
    """The condition that a choice between two truths is."""
    if true and false:
        return Number(np.True_)
    if not true and not false:
        return Number(np.False_)
    return condition if true else negated(condition)


def selected(
    which: Meaning, false: Meaning, true: Meaning, value: Value
) -> Meaning | None:
    if isinstance(which, Number):
        return true if which.value else false
    if not isinstance(which, Condition):
        return None
    if isinstance(false, Number) and isinstance(true, Number):
        if value.aval.dtype == np.bool_:
            return chosen(which, bool(true.value), bool(false.value))
        return Choice(which, true.value, false.value)
    if isinstance(false, Number) and isinstance(true, Condition) and not false.value:
        return Condition(which.tests + true.tests)
    other = negated(which)
    if isinstance(true, Number) and isinstance(false, Condition) and not true.value:
        return other and Condition(other.tests + false.tests)
    if not (isinstance(false, Number) and isinstance(true, Choice)):
        return None
    if not np.array_equal(true.false, false.value):
        return None
    tests = which.tests + true.condition.tests
    return Choice(Condition(tests), true.true, true.false)


def pointwise(name: str, args: tuple[Meaning, ...], value: Value) -> Meaning | None:
    function, dtype = POINTWISE[name], value.aval.dtype
    if name in ("and", "or", "not") and dtype != np.bool_:
        return None
    numbers = [x.value for x in args if isinstance(x, Number)]
    if len(numbers) == len(args):
        return Number(_computed(function, numbers, dtype))
    choices = [x for x in args if isinstance(x, Choice)]
    if len(choices) == 1 and len(numbers) == len(args) - 1:
        return _of_choice(function, args, dtype)
    if name in ("mul", "min") and len(choices) == 2:
        return _product(choices, dtype)
    if name == "not" and isinstance(args[0], Condition):
        return negated(args[0])
    if name == "or":
        return _either(args)
    if all(isinstance(x, Position | Number) for x in args):
        return _of_positions(name, args, dtype)
    data = [x for x in args if isinstance(x, Data)]
    if name in ("eq", "ne") and len(data) == 2:
        both = Condition((Equal(*data),))
        return both if name == "eq" else Choice(both, np.False_, np.True_)
    return None


def _computed(function: Callable, numbers: Sequence, dtype) -> Any:
    with np.errstate(all="ignore"):
        return np.asarray(function(*numbers)).astype(dtype)


def _of_choice(function: Callable, args: tuple[Meaning, ...], dtype) -> Meaning | None:
    def at(field: str):
        own = [getattr(x, field, getattr(x, "value", None)) for x in args]
        return _computed(function, own, dtype)

    (choice,) = (x for x in args if isinstance(x, Choice))
    true, false = at("true"), at("false")
    if dtype == np.bool_:
        return chosen(choice.condition, bool(true), bool(false))
    return Choice(choice.condition, true, false)


def _product(choices: list[Choice], dtype) -> Meaning | None:
    """Of two masks of 0 and 1."""
    if any((x.true, x.false) != (1, 0) for x in choices):
        return None
    tests = choices[0].condition.tests + choices[1].condition.tests
    return Choice(Condition(tests), _cast(1, dtype), _cast(0, dtype))


def _either(args) -> Meaning | None:
    """Of conditions of which one is known to be true or false."""
    for x, other in (args, args[::-1]):
        if isinstance(x, Number):
            return x if x.value else other
    return None


def _of_positions(name: str, args, dtype) -> Meaning | None:
    a, *rest = (
        x if isinstance(x, Position) else _constant_position(x.value) for x in args
    )
    b = rest[0] if rest else None
    if a is None or (rest and b is None):
        return None
    if name == "abs" and not a.is_absolute:
        return dataclasses.replace(a, is_absolute=True)
    if name == "neg" and not a.is_absolute:
        return scaled(a, -1)
    if name in _COMPARISONS and b is not None:
        return _compared(name, a, b)
    if b is None or a.is_absolute or b.is_absolute or dtype == np.bool_:
        return None
    if name in ("add", "sub"):
        return _sum(a, b, 1 if name == "add" else -1)
    if name == "mul" and not (a.factors and b.factors):
        a, b = (a, b) if a.factors else (b, a)
        return scaled(a, b.constant)
    return None


def _constant_position(x: Any) -> Position | None:
    whole = np.asarray(x).astype(np.float64)
    if not np.isfinite(whole) or whole != np.round(whole) or abs(whole) > 2**31:
        return None
    return Position((), int(whole))


def _sum(a: Position, b: Position, sign: int) -> Position:
    factors = dict(a.factors)
    for axis, factor in b.factors:
        factors[axis] = factors.get(axis, 0) + sign * factor
    kept = tuple(sorted((i, f) for i, f in factors.items() if f))
    return Position(kept, a.constant + sign * b.constant)


def _compared(name: str, a: Position, b: Position) -> Meaning | None:
    if name in ("le", "lt"):
        return _compared("ge" if name == "le" else "gt", b, a)
    if a.is_absolute:
        return None  # |x| >= c is no interval
    if b.is_absolute:  # c >= |x|: c - x >= 0 and c + x >= 0
        if a.factors or name not in ("ge", "gt"):
            return None
        plain = dataclasses.replace(b, is_absolute=False)
        room = [_sum(a, plain, sign) for sign in (1, -1)]
        less = 1 if name == "gt" else 0
        tests = (AtLeastZero(scaled(x, 1, -less)) for x in room)
        return Condition(tuple(tests))
    difference = _sum(a, b, -1)
    if name in ("ge", "gt"):
        less = 1 if name == "gt" else 0
        return Condition((AtLeastZero(scaled(difference, 1, -less)),))
    both = (AtLeastZero(difference), AtLeastZero(scaled(difference, -1)))
    return Condition(both) if name == "eq" else Choice(Condition(both), False, True)
