"""The parts of a caller's function that are built-in masks.

Those have ranges, which skip blocks without a table and sort work by its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax import lax

from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks.base import Atom
from pallas_kernels.core.masks.segments import SegmentIds
from pallas_kernels.core.masks.window import Window
from pallas_kernels.core.pointwise.parts import Part, parts_of
from pallas_kernels.core.pointwise.program import (
    Argument,
    Constant,
    Program,
    Step,
    made_by,
)

# a < b says of integers that a + 1 <= b; b > a says the same.
_STRICT = ("lt", "gt")
_REVERSED = ("ge", "gt")
_NEGATED = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le"}


class Split(NamedTuple):
    """A function as an AND.

    Attributes:
      atoms: the conditions that are built-in masks.
      rest: the program of the others, or None.
    """

    atoms: tuple[Atom, ...]
    rest: Program | None


def split(
    program: Program, arrays: Sequence[Named], are_shared: Callable[[int, int], bool]
) -> Split:
    """Finds windows, causal masks and equal ids in a function.

    Args:
      program: of a function of indices, bound to operands.
      arrays: what its reads take.
      are_shared: whether row i finds the same element in both of two arrays.
    """
    atoms: list[Atom] = []
    others: list[Part] = []
    for part in parts_of(program):
        atom = _window(program, part)
        if atom is None:
            atom = _segments(program, part, arrays, are_shared)
        if atom is None:
            others.append(part)
        else:
            atoms.append(atom)
    if not atoms:
        return Split((), program)
    rest = _all_of(program, others) if others else None
    return Split(tuple(_one_window(atoms)), rest)


def _one_window(atoms: Sequence[Atom]) -> list[Atom]:
    """The atoms, with one window in place of several."""
    windows = [x for x in atoms if isinstance(x, Window)]
    found: list[Atom] = [x for x in atoms if not isinstance(x, Window)]
    if windows:
        lefts = [x.left for x in windows if x.left is not None]
        rights = [x.right for x in windows if x.right is not None]
        found.insert(0, Window(min(lefts, default=None), min(rights, default=None)))
    return found


def _all_of(program: Program, parts: Sequence[Part]) -> Program:
    steps = list(program.steps)

    def add(primitive, *args: Argument) -> int:
        steps.append(Step(primitive, (), args, "bool"))
        return len(program.inputs) + len(steps) - 1

    found = [add(lax.not_p, x) if negated else x for x, negated in parts]
    whole, *others = found
    for x in others:
        whole = add(lax.and_p, whole, x)
    return Program(program.inputs, tuple(steps), (whole,))


class _Linear(NamedTuple):
    """q * its factor + kv * its factor + a number, of int32."""

    q: int
    kv: int
    number: int

    def plus(self, other: _Linear, factor: int = 1) -> _Linear:
        return _Linear(*(a + factor * b for a, b in zip(self, other, strict=True)))


def _linear(program: Program, value: Argument) -> _Linear | None:
    """A value as a sum of positions and a number, or None."""
    if isinstance(value, Constant):
        is_whole = value.dtype == "int32"
        return _Linear(0, 0, int(value.value)) if is_whole else None
    if value < len(program.inputs):
        name = program.inputs[value]
        known = name in ("q", "kv")
        return _Linear(int(name == "q"), int(name == "kv"), 0) if known else None
    step = made_by(program, value, "add", "sub", "neg")
    if step is None or step.dtype != "int32":
        return None
    if step.name == "neg":
        return _sum(_Linear(0, 0, 0), _linear(program, step.args[0]), -1)
    first, second = (_linear(program, x) for x in step.args)
    return _sum(first, second, 1 if step.name == "add" else -1)


def _sum(a: _Linear | None, b: _Linear | None, factor: int) -> _Linear | None:
    """a + factor * b, if both are known."""
    return None if a is None or b is None else a.plus(b, factor)


def _window(program: Program, part: Part) -> Window | None:
    """A comparison of the distance between query and key with a number."""
    step = made_by(program, part.value, *_NEGATED)
    if step is None:
        return None
    name = _NEGATED[step.name] if part.is_negated else step.name
    low, high = reversed(step.args) if name in _REVERSED else step.args
    more = int(name in _STRICT)
    inside = made_by(program, low, "abs")
    if inside is not None:
        width = _linear(program, high)
        if width is None or _distance(_linear(program, inside.args[0])) != 0:
            return None
        is_number = (width.q, width.kv) == (0, 0)
        limit = width.number - more
        return _of_limits(limit, limit) if is_number else None
    found = _sum(_linear(program, low), _linear(program, high), -1)
    if found is None or _distance(found) is None:
        return None
    limit = -found.number - more
    return _of_limits(limit, None) if found.q == 1 else _of_limits(None, limit)


def _distance(x: _Linear | None) -> int | None:
    """The number beside q - kv or kv - q; None if it is neither."""
    known = x is not None and (x.q, x.kv) in ((1, -1), (-1, 1))
    return x.number if x is not None and known else None


def _of_limits(left: int | None, right: int | None) -> Window | None:
    """The window; None where it lies wholly on one side of its query."""
    is_plain = all(x is None or x >= 0 for x in (left, right))
    return Window(left, right) if is_plain else None


def _segments(
    program: Program, part: Part, arrays: Sequence[Named], are_shared: Callable
) -> SegmentIds | None:
    """Equal elements of an array by queries and one by keys."""
    step = made_by(program, part.value, "ne" if part.is_negated else "eq")
    if step is None:
        return None
    reads = [made_by(program, x, "read") for x in step.args]
    numbers = [x.params[0] for x in reads if x is not None and not x.args]
    if len(numbers) < 2:
        return None
    found = [arrays[i] for i in numbers]
    if any("n" in x.axes or x.value.dtype != np.int32 for x in found):
        return None
    of_queries, of_keys = ([x for x in found if name in x.axes] for name in "ts")
    if len(of_queries) != 1 or len(of_keys) != 1 or of_queries[0] is of_keys[0]:
        return None
    return SegmentIds(of_queries[0], of_keys[0], are_shared(*numbers))
