"""What small integer, boolean and constant arrays of a program mean.

A mask is often a comparison of positions or of ids, spread over [T, S] and mended with
constants. `Meanings` reads that back from the program: a number, a position (a sum of
indices), a choice between two numbers, or a condition, which is what all of several
`Test`s say.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_flash2._flashify.arithmetic import (
    POINTWISE,
    POSITIONS,
    chosen,
    converted,
    pointwise,
    selected,
)
from jax_flash2._flashify.conditions import (
    NEVER,
    Choice,
    Condition,
    Data,
    Holds,
    Meaning,
    Number,
    Position,
    Test,
    moved,
    moved_axes,
    moved_tests,
    negated,
)
from jax_flash2._flashify.graph import COPIES, Value, is_known

# Constants of more elements are not read.
_MOST_ELEMENTS = 2**24
# Operations are not followed further back than this.
_MOST_DEPTH = 100
_SAME = (*COPIES, "stop_gradient", "optimization_barrier", "name")


class Meanings:
    """The meanings of a program's values, found when asked for."""

    def __init__(self):
        self._known: dict[Value, Meaning] = {}
        self._depth = 0

    def of(self, value: Value) -> Meaning:
        value = value.origin
        if value in self._known:
            return self._known[value]
        has_symbols = not all(isinstance(x, int) for x in value.shape)
        if self._depth == _MOST_DEPTH or has_symbols:
            return _itself(value)
        self._depth += 1
        try:
            found = self._found(value)
        finally:
            self._depth -= 1
        if isinstance(found, Position) and not _is_exact(found, value):
            found = None  # it may wrap, or be rounded
        self._known[value] = found or _itself(value)
        return self._known[value]

    def was_asked(self, value: Value) -> bool:
        """Whether anything was made of what an array means."""
        return value.origin in self._known

    def number(self, value: Value) -> float | None:
        """The number that all of an array is, if it is known."""
        found = self.of(value)
        return float(found.value) if isinstance(found, Number) else None

    def condition(self, value: Value, when: bool = True) -> Condition:
        """Where a boolean array is true, or where it is false."""
        found = self.of(value)
        if isinstance(found, Number):
            return Condition(() if bool(found.value) == when else (NEVER,))
        if isinstance(found, Choice):
            own = chosen(found.condition, *((x == when) for x in _truths(found)))
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
            data = test.data if isinstance(test, Holds) and not test.is_true else None
            node = None if data is None else data.value.node
            if data is None or node is None or node.name != "or":
                found.append(test)
                continue
            for x in node.inputs:
                own = self.condition(x, False)
                found += moved_tests(own, data.axes).tests
        return tuple(found)

    def _found(self, value: Value) -> Meaning | None:
        if is_known(value):
            return _of_constant(value)
        node = value.node
        if node is None or node.results is not None:
            return None
        if node.name == "iota":
            axis = node.params["dimension"]
            return Position(((axis, 1),) if value.shape[axis] > 1 else (), 0)
        places = moved_axes(node)
        if places is not None:
            return moved(self.of(node.inputs[0]), places)
        if node.name in _SAME:
            return self.of(node.inputs[0])
        if node.name == "convert_element_type":
            return converted(self.of(node.inputs[0]), value)
        if node.name == "integer_pow":
            power = np.asarray(node.params["y"], np.float64)
            return pointwise("pow", (self.of(node.inputs[0]), Number(power)), value)
        if node.name == "select_n" and len(node.inputs) == 3:
            which, false, true = map(self.of, node.inputs)
            return selected(which, false, true, value)
        if node.name == "and" and value.aval.dtype == np.bool_:
            tests = (self.condition(x).tests for x in node.inputs)
            return Condition(tuple(test for own in tests for test in own))
        if node.name in POINTWISE:
            return pointwise(node.name, tuple(map(self.of, node.inputs)), value)
        return None


def _is_exact(found: Position, value: Value) -> bool:
    """Whether the type of an array holds all of its positions."""
    ends = [f * (value.shape[i] - 1) for i, f in found.factors]
    low, high = (found.constant + sum(f(x, 0) for x in ends) for f in (min, max))
    return max(-low, high) < POSITIONS.get(value.aval.dtype, 0)


def _data(value: Value) -> Data:
    return Data(value, tuple(range(len(value.shape))))


def _holds(value: Value, when: bool) -> Condition:
    return Condition((Holds(_data(value), when),))


def _truths(found: Choice) -> tuple[bool, bool]:
    return bool(found.true), bool(found.false)


def _itself(value: Value) -> Meaning:
    """Of what is not seen through."""
    if value.aval.dtype == np.bool_:
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
    if np.issubdtype(x.dtype, np.integer):
        found = _position_of(x)
        if found is not None:
            return found
    if x.dtype != bool and x.ndim > 1:
        numbers = np.unique(x)
        if numbers.size == 2 and not np.isnan(numbers).any():  # a mask as numbers
            low, high = numbers
            mask = Value(value.aval.update(dtype=np.dtype(bool)), x == high)
            return Choice(Condition((Holds(_data(mask)),)), high, low)
    return None


def _position_of(x: np.ndarray) -> Position | None:
    """Of integers that grow evenly along one axis, and are the same along others."""
    axes = [i for i in range(x.ndim) if (np.diff(x, axis=i) != 0).any()]
    if len(axes) != 1:
        return None
    line = np.moveaxis(x, axes[0], 0).reshape(x.shape[axes[0]], -1)[:, 0]
    steps = np.unique(np.diff(line.astype(np.int64)))
    if steps.size != 1:
        return None
    return Position(((axes[0], int(steps[0])),), int(line[0]))
