"""What small integer, boolean and constant arrays of a program mean.

A mask is often a comparison of positions or of ids, spread over [T, S] and mended with
constants. `Meanings` reads that back from the program: a number, a position (a sum of
indices), a choice between two numbers, or a condition, which is what all of several
`Test`s say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_flash2._flashify.graph import Node, Value, is_known

# Constants of more elements are not read.
_MOST_ELEMENTS = 2**24


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


_NEVER = AtLeastZero(Position((), -1))
Meaning = Number | Position | Data | Condition | Choice

_POINTWISE: dict[str, Callable] = {
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
_POSITIONS = ("int32", "int64", "float32", "float64")
_COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt")
_SAME = (
    "copy",
    "copy_p",
    "stop_gradient",
    "optimization_barrier",
    "name",
    "pvary",
    "pcast",
)


class Meanings:
    """The meanings of a program's values, found when asked for."""

    def __init__(self):
        self._known: dict[Value, Meaning] = {}

    def of(self, value: Value) -> Meaning:
        value = value.origin
        if value not in self._known:
            found = self._found(value)
            if isinstance(found, Position) and value.aval.dtype.name not in _POSITIONS:
                found = None  # it may wrap, or be rounded
            self._known[value] = found or _itself(value)
        return self._known[value]

    def number(self, value: Value) -> float | None:
        """The number that all of an array is, if it is known."""
        found = self.of(value)
        return float(found.value) if isinstance(found, Number) else None

    def condition(self, value: Value, when: bool = True) -> Condition:
        """Where a boolean array is true, or where it is false."""
        found = self.of(value)
        if isinstance(found, Number):
            return Condition(() if bool(found.value) == when else (_NEVER,))
        if isinstance(found, Choice):
            own = _chosen(found.condition, *((x == when) for x in _truths(found)))
            return own if isinstance(own, Condition) else _holds(value, when)
        if not isinstance(found, Condition):
            return _holds(value, when)
        if when:
            return Condition(self._expanded(found.tests))
        node = value.origin.node
        if node is not None and node.name == "or":
            return Condition(
                tuple(t for x in node.inputs for t in self.condition(x, False).tests)
            )
        own = negated(found)
        return (
            _holds(value, when) if own is None else Condition(self._expanded(own.tests))
        )

    def _expanded(self, tests: tuple[Test, ...]) -> tuple[Test, ...]:
        """Neither a nor b holds where not (a or b) does."""
        found: list[Test] = []
        for test in tests:
            node = test.data.value.node if isinstance(test, Holds) else None
            if node is None or node.name != "or" or test.is_true:
                found.append(test)
                continue
            for x in node.inputs:
                own = self.condition(x, False)
                found += _moved_tests(own, test.data.axes).tests
        return tuple(found)

    def _found(self, value: Value) -> Meaning | None:
        if is_known(value):
            return _of_constant(value)
        node = value.node
        if node is None or len(node.outputs) != 1:
            return None
        if node.name == "iota":
            axis = node.params["dimension"]
            return Position(((axis, 1),) if value.shape[axis] > 1 else (), 0)
        moved = _moved_axes(node)
        if moved is not None:
            return _moved(self.of(node.inputs[0]), moved, value)
        if node.name in _SAME:
            return self.of(node.inputs[0])
        if node.name == "convert_element_type":
            return _converted(self.of(node.inputs[0]), value)
        if node.name == "integer_pow":
            power = np.asarray(node.params["y"], np.float64)
            return _pointwise("pow", (self.of(node.inputs[0]), Number(power)), value)
        if node.name == "select_n" and len(node.inputs) == 3:
            return _selected(*map(self.of, node.inputs), value)
        if node.name == "and" and value.aval.dtype == jnp.bool_:
            tests = (self.condition(x).tests for x in node.inputs)
            return Condition(tuple(test for own in tests for test in own))
        if node.name in _POINTWISE:
            return _pointwise(node.name, tuple(map(self.of, node.inputs)), value)
        return None


def _data(value: Value) -> Data:
    return Data(value, tuple(range(len(value.shape))))


def _holds(value: Value, when: bool) -> Condition:
    return Condition((Holds(_data(value), when),))


def _truths(found: Choice) -> tuple[bool, bool]:
    return bool(found.true), bool(found.false)


def _itself(value: Value) -> Meaning:
    """Of what is not seen through."""
    if value.aval.dtype == jnp.bool_:
        return _holds(value, True)
    return _data(value)


def _of_constant(value: Value) -> Meaning | None:
    if value.aval.size == 0 or value.aval.size > _MOST_ELEMENTS:
        return None
    if not jnp.issubdtype(value.aval.dtype, np.number) and value.aval.dtype != bool:
        return None
    x = np.asarray(value.constant)
    first = x.reshape(-1)[0]
    if x.size == 1 or np.all(x == first):
        return Number(first.astype(value.aval.dtype))
    if np.issubdtype(x.dtype, np.integer) and math.prod(x.shape) == max(x.shape):
        steps = np.unique(np.diff(x.reshape(-1)))
        if steps.size == 1:
            axis = int(np.argmax(x.shape))
            return Position(((axis, int(steps[0])),), int(first))
    if x.dtype != bool and x.ndim > 1:
        numbers = np.unique(x)
        if numbers.size == 2 and not np.isnan(numbers).any():  # a mask as numbers
            low, high = numbers
            mask = Value(value.aval.update(dtype=np.dtype(bool)), constant=x == high)
            return Choice(Condition((Holds(_data(mask)),)), high, low)
    return None


def _moved_axes(node: Node) -> list[int | None] | None:
    """Of a node that moves axes, where each axis of its operand is then."""
    if not node.inputs:
        return None
    shape, name = node.inputs[0].shape, node.name
    if name == "transpose":
        return [node.params["permutation"].index(i) for i in range(len(shape))]
    if name == "broadcast_in_dim":
        places = node.params["broadcast_dimensions"]
        new = node.outputs[0].shape
        return [
            to if size == new[to] else None
            for size, to in zip(shape, places, strict=True)
        ]
    if name in ("reshape", "squeeze", "expand_dims"):
        new = node.outputs[0].shape
        if [x for x in shape if x > 1] != [x for x in new if x > 1]:
            return None
        places = iter(i for i, size in enumerate(new) if size > 1)
        return [next(places) if size > 1 else None for size in shape]
    return None


def _moved(found: Meaning, to: Sequence[int | None], value: Value) -> Meaning | None:
    if isinstance(found, Number):
        return found
    if isinstance(found, Position):
        factors = tuple((to[i], f) for i, f in found.factors if to[i] is not None)
        return dataclasses.replace(found, factors=_sorted(factors))
    if isinstance(found, Data):
        return _moved_data(found, to)
    if isinstance(found, Choice):
        return dataclasses.replace(found, condition=_moved_tests(found.condition, to))
    return _moved_tests(found, to)


def _sorted(factors) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(factors))


# Of an axis of one element, which is nowhere in what it was moved to.
NOWHERE = -1


def _moved_data(found: Data, to: Sequence[int | None]) -> Data:
    places = (NOWHERE if i == NOWHERE else to[i] for i in found.axes)
    return Data(found.value, tuple(NOWHERE if i is None else i for i in places))


def _moved_tests(found: Condition, to: Sequence[int | None]) -> Condition:
    def moved(test: Test) -> Test:
        if isinstance(test, AtLeastZero):
            factors = ((to[i], f) for i, f in test.position.factors)
            kept = _sorted((i, f) for i, f in factors if i not in (None, NOWHERE))
            return AtLeastZero(dataclasses.replace(test.position, factors=kept))
        if isinstance(test, Equal):
            return Equal(_moved_data(test.left, to), _moved_data(test.right, to))
        if isinstance(test, Unread):
            return test
        return Holds(_moved_data(test.data, to), test.is_true)

    return Condition(tuple(map(moved, found.tests)))


def _converted(found: Meaning, value: Value) -> Meaning | None:
    dtype = value.aval.dtype
    if isinstance(found, Number):
        return Number(_cast(found.value, dtype))
    if isinstance(found, Position):
        return found if dtype.name in _POSITIONS else None
    if isinstance(found, Choice):
        if dtype == jnp.bool_:
            return _chosen(found.condition, found.true != 0, found.false != 0)
        return dataclasses.replace(
            found, true=_cast(found.true, dtype), false=_cast(found.false, dtype)
        )
    if isinstance(found, Condition):
        if dtype == jnp.bool_:
            return found
        return Choice(found, _cast(True, dtype), _cast(False, dtype))
    return None


def _cast(x: Any, dtype) -> Any:
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype)


def _chosen(condition: Condition, true: bool, false: bool) -> Meaning | None:
    """The condition that a choice between two truths is."""
    if true and false:
        return Number(np.True_)
    if not true and not false:
        return Number(np.False_)
    return condition if true else negated(condition)


def negated(condition: Condition) -> Condition | None:
    """Where a condition is false, if that is one test again."""
    if len(condition.tests) != 1:
        return None
    (test,) = condition.tests
    if isinstance(test, Holds):
        return Condition((Holds(test.data, not test.is_true),))
    if isinstance(test, AtLeastZero) and not test.position.is_absolute:
        return Condition((AtLeastZero(_scaled(test.position, -1, -1)),))
    return None


def _scaled(x: Position, factor: int, plus: int = 0) -> Position:
    factors = tuple((i, f * factor) for i, f in x.factors)
    return Position(factors, x.constant * factor + plus)


def _selected(
    which: Meaning, false: Meaning, true: Meaning, value: Value
) -> Meaning | None:
    if isinstance(which, Number):
        return true if which.value else false
    if not isinstance(which, Condition):
        return None
    if isinstance(false, Number) and isinstance(true, Number):
        if value.aval.dtype == jnp.bool_:
            return _chosen(which, bool(true.value), bool(false.value))
        return Choice(which, true.value, false.value)
    if isinstance(false, Number) and isinstance(true, Condition) and not false.value:
        return Condition(which.tests + true.tests)
    other = negated(which)
    if isinstance(true, Number) and isinstance(false, Condition) and not true.value:
        return other and Condition(other.tests + false.tests)
    if isinstance(false, Number) and isinstance(true, Choice):
        if np.array_equal(true.false, false.value):
            tests = which.tests + true.condition.tests
            return Choice(Condition(tests), true.true, true.false)
    return None


def _pointwise(name: str, args: tuple[Meaning, ...], value: Value) -> Meaning | None:
    function, dtype = _POINTWISE[name], value.aval.dtype
    if name in ("and", "or", "not") and dtype != jnp.bool_:
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
    if name in ("eq", "ne") and all(isinstance(x, Data) for x in args):
        left, right = args
        both = Condition((Equal(left, right),))
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
    if dtype == jnp.bool_:
        return _chosen(choice.condition, bool(true), bool(false))
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
        return _scaled(a, -1)
    if name in _COMPARISONS and b is not None:
        return _compared(name, a, b)
    if b is None or a.is_absolute or b.is_absolute or dtype == jnp.bool_:
        return None
    if name in ("add", "sub"):
        return _sum(a, b, 1 if name == "add" else -1)
    if name == "mul" and not (a.factors and b.factors):
        a, b = (a, b) if a.factors else (b, a)
        return _scaled(a, b.constant)
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
        tests = (AtLeastZero(_scaled(x, 1, -less)) for x in room)
        return Condition(tuple(tests))
    difference = _sum(a, b, -1)
    if name in ("ge", "gt"):
        less = 1 if name == "gt" else 0
        return Condition((AtLeastZero(_scaled(difference, 1, -less)),))
    both = (AtLeastZero(difference), AtLeastZero(_scaled(difference, -1)))
    return Condition(both) if name == "eq" else Choice(Condition(both), False, True)
