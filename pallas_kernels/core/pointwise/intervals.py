"""The steps of a program on intervals: what a block of pairs may give, and must.

An interval is a pair of arrays, the lowest and the highest value; of booleans, whether
all are True for certain and whether one may be. None says that nothing is known. A rule
is sound for every value within its arguments, however a kernel rounds it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.pointwise.program import Program, Step

Interval = tuple[Any, Any] | None
_FAR = 2.0**30  # an int32 up to here has not overflowed
_ROUNDING = 4 * float(np.finfo(np.float32).eps)


def run(program: Program, inputs: Sequence[Interval], reads: Sequence[Interval]):
    """The intervals of a program's outputs; those of booleans are never None."""

    def rule(step: Step, args: list) -> Interval:
        args = list(map(_interval, args))
        known = step.name in _RULES and None not in args
        found = _RULES[step.name](step, *args) if known else None
        is_open = found is None and step.dtype == "bool"
        return (np.False_, np.True_) if is_open else found

    def read(step: Step, index: list) -> Interval:
        del index  # a table has the interval of all its elements
        found = reads[step.params[0]]
        return found and tuple(x.astype(step.dtype) for x in found)

    return list(map(_interval, program.run(inputs, read, rule)))


def _interval(x) -> Interval:
    """Of what a run passes on: an interval, or the value of a constant."""
    if not isinstance(x, np.ndarray):
        return x
    return None if x.dtype.kind == "f" and np.isnan(x) else (x[()], x[()])


def of_ends(low, high) -> Interval:
    """From the smallest and the largest number; all numbers where one is NaN."""
    if not jnp.issubdtype(low.dtype, jnp.floating):
        return low, high
    odd = jnp.isnan(low) | jnp.isnan(high)
    return jnp.where(odd, -jnp.inf, low), jnp.where(odd, jnp.inf, high)


def _arithmetic(step: Step, function: Callable, *args) -> Interval:
    """Of a function that is monotone in each argument, from all pairs of their ends."""
    if step.dtype not in ("int32", "float32"):
        return None
    corners = [(a, b) for a in args[0] for b in args[1]]
    wide = [function(*(jnp.asarray(x, jnp.float32) for x in pair)) for pair in corners]
    low, high = _hull(wide)
    if step.dtype == "float32":
        size = sum(jnp.maximum(*map(jnp.abs, x)) for x in args)
        size = jnp.maximum(size, jnp.maximum(jnp.abs(low), jnp.abs(high)))
        slack = _ROUNDING * size
        return of_ends(low - slack, high + slack)
    far = (low < -_FAR) | (high > _FAR)
    low, high = _hull([function(*pair) for pair in corners])
    ends = np.iinfo(np.int32)
    return jnp.where(far, ends.min, low), jnp.where(far, ends.max, high)


def _hull(values: list) -> tuple:
    low = high = values[0]
    for x in values[1:]:
        low, high = jnp.minimum(low, x), jnp.maximum(high, x)
    return low, high


def _compared(step: Step, certain, possible, *args) -> Interval:
    """Of a comparison; an infinite end may stand for a NaN, of which none is True."""
    for x in args:
        if jnp.issubdtype(jnp.asarray(x[0]).dtype, jnp.floating):
            certain = certain & (x[0] > -jnp.inf) & (x[1] < jnp.inf)
            possible = possible | (x[0] == -jnp.inf) | (x[1] == jnp.inf)
    return certain, possible


def _equal(step: Step, x, y) -> Interval:
    is_one = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
    return _compared(step, is_one, (x[0] <= y[1]) & (y[0] <= x[1]), x, y)


def _unequal(step: Step, x, y) -> Interval:
    is_one = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
    apart = (x[0] > y[1]) | (y[0] > x[1])
    return _compared(step, apart, ~is_one, x, y)


def _absolute(step: Step, x) -> Interval:
    # Not by abs: of max(|x|, y) ptxas may lose the sign (`build.Build`).
    low = jnp.maximum(jnp.maximum(x[0], -x[1]), jnp.zeros_like(x[0]))
    high = jnp.maximum(-x[0], x[1])
    if step.dtype != "int32":
        return low, high
    overflows = x[0] == np.iinfo(np.int32).min
    return jnp.where(overflows, x[0], low), jnp.where(overflows, x[1], high)


def _quotient(step: Step, x, y) -> Interval:
    """By one positive number."""
    if step.dtype != "int32" or not _is_number(y) or not y[0] > 0:
        return None
    return step.bound(x[0], y[0]), step.bound(x[1], y[0])


def _remainder(step: Step, x, y) -> Interval:
    """By one positive number: whole periods are all of it."""
    if step.dtype != "int32" or not _is_number(y) or not y[0] > 0:
        return None
    n = np.int32(y[0])
    same = (x[0] // n == x[1] // n) & (x[0] >= 0)
    low = jnp.where(same, x[0] % n, jnp.where(x[0] < 0, 1 - n, 0))
    return low, jnp.where(same, x[1] % n, n - 1)


def _is_number(x) -> bool:
    return isinstance(x[0], np.generic | np.ndarray)


def _selected(step: Step, which, *cases) -> Interval:
    if len(cases) != 2 or jnp.asarray(which[0]).dtype != jnp.bool_:
        return None
    certain, possible = which
    no, yes = cases
    if step.dtype == "bool":
        either = no[0] & yes[0], no[1] | yes[1]
    else:
        either = jnp.minimum(no[0], yes[0]), jnp.maximum(no[1], yes[1])
    low, high = (
        jnp.where(certain, a, jnp.where(possible, b, c))
        for a, b, c in zip(yes, either, no, strict=True)
    )
    return low, high


def _converted(step: Step, x) -> Interval:
    kind, wanted = jnp.asarray(x[0]).dtype, jnp.dtype(step.dtype)
    if kind == jnp.bool_ or (kind == jnp.int32 and wanted == jnp.float32):
        low, high = (jnp.asarray(end).astype(wanted) for end in x)
        return low, high
    if wanted == jnp.int32 and kind in (jnp.float32, jnp.int8, jnp.int16):
        near = (x[0] >= -_FAR) & (x[1] <= _FAR)
        ends = np.iinfo(np.int32)
        low, high = (jnp.asarray(end).astype(jnp.int32) for end in x)
        return jnp.where(near, low, ends.min), jnp.where(near, high, ends.max)
    return None


def _each(step: Step, *args) -> Interval:
    """Of what rises with each argument and is never rounded."""
    if step.name in ("and", "or") and step.dtype != "bool":
        return None
    low, high = (step.bound(*x) for x in zip(*args, strict=True))
    if not jnp.issubdtype(step.dtype, jnp.floating):
        return low, high
    # An infinite end may stand for a NaN, which no bound takes away.
    odd = [(x[0] == -jnp.inf) | (x[1] == jnp.inf) for x in args if not _is_number(x)]
    odd = functools.reduce(operator.or_, odd, np.False_)
    return of_ends(jnp.where(odd, jnp.nan, low), high)


_RULES: dict[str, Callable] = {
    "add": lambda step, x, y: _arithmetic(step, jnp.add, x, y),
    "sub": lambda step, x, y: _arithmetic(step, jnp.subtract, x, y),
    "mul": lambda step, x, y: _arithmetic(step, jnp.multiply, x, y),
    "neg": lambda step, x: _arithmetic(step, jnp.subtract, (np.int32(0),) * 2, x),
    "abs": _absolute,
    "div": _quotient,
    "rem": _remainder,
    "lt": lambda s, x, y: _compared(s, x[1] < y[0], x[0] < y[1], x, y),
    "le": lambda s, x, y: _compared(s, x[1] <= y[0], x[0] <= y[1], x, y),
    "gt": lambda s, x, y: _compared(s, x[0] > y[1], x[1] > y[0], x, y),
    "ge": lambda s, x, y: _compared(s, x[0] >= y[1], x[1] >= y[0], x, y),
    "eq": _equal,
    "ne": _unequal,
    "not": lambda step, x: (~x[1], ~x[0]),
    "select_n": _selected,
    "convert_element_type": _converted,
    **dict.fromkeys(("and", "or", "max", "min", "clamp", "floor", "ceil"), _each),
}
