"""Masks for kernels: what queries or keys alone decide is computed before.

A kernel evaluates a function for each pair of a block. Of a mask such as

    (abs(q // w - kv // w) <= 3) & (abs(q % w - kv % w) <= 3)

the quotients and remainders belong to a row or to a column. XLA makes arrays of them,
and kernels load these as vectors (`split`).

What is left are comparisons of a number of the query with one of the key. Several of
them are one, since such numbers are small: they are fields of a word. Of l <= r, where
r has b bits, a field of the query has l, and one of the key has 2**b - 1 - r. Their sum
has bit b if l is larger, and reaches no other field. So a pair adds two words, and
looks whether such a bit of any field is set (`_packed`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core.axes import Named, is_whole
from pallas_kernels.core.pointwise.parts import Part, parts_of
from pallas_kernels.core.pointwise.program import (
    Argument,
    Constant,
    Program,
    Step,
    compact,
    made_by,
    only_live,
)

# An instruction or two, or none: kernels compute these for rows and columns.
_CHEAP = {
    *("abs", "add", "and", "clamp", "convert_element_type", "eq", "ge", "gt", "le"),
    *("lt", "max", "min", "ne", "neg", "not", "or", "read", "select_n", "sub", "xor"),
}
_SIDES = {"q": "t", "kv": "s"}
_BITS = 32
_NEGATED = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le", "ne": "eq"}
_FAR = 2**30  # an int32 up to here has not overflowed

Ends = tuple[int, int]


def split(
    program: Program,
    arrays: Sequence[Named],
    inputs: Mapping[str, Named | None],
    known: Mapping[str, Ends],
) -> tuple[Program, list[Named]]:
    """The program with reads in place of what one side decides, and all it reads.

    Args:
      program: of a mask.
      arrays: what its reads take.
      inputs: of all rows and keys.
      known: of inputs, the smallest and the largest number.
    """
    of_inputs = [_side_of(x, inputs.get(x)) for x in program.inputs]
    program = _packed(program, _sides(program, arrays, of_inputs), known)
    first = len(program.inputs)
    sides, costly = _sides(program, arrays, of_inputs), _costly(program)
    found, steps = list(arrays), list(program.steps)
    for number in _roots(program, sides):
        if costly[number] and steps[number - first].primitive is not None:
            dtype = steps[number - first].dtype
            steps[number - first] = Step(None, (len(found),), (), dtype)
            found.append(_of_side(program, number, arrays, inputs))
    program, kept = compact(dataclasses.replace(program, steps=tuple(steps)))
    return program, [found[i] for i in kept]


def _side_of(name: str, x: Named | None) -> frozenset[str]:
    """Heads of a group may be rows of queries (`division.Packing`)."""
    if name in _SIDES:
        return frozenset({_SIDES[name]})
    axes = () if x is None else x.axes
    return frozenset({"t", "s"} & {str(a) for a in axes})


def _sides(program: Program, arrays, of_inputs) -> list[frozenset[str]]:
    """On the rows of which sides each value depends: "t", "s"."""
    found = list(of_inputs)
    for step in program.steps:
        own = {x for arg in step.args if isinstance(arg, int) for x in found[arg]}
        if step.primitive is None:
            own |= {"t", "s"} & {str(a) for a in arrays[step.params[0]].axes}
        found.append(frozenset(own))
    return found


def _costly(program: Program) -> list[bool]:
    """Whether each value takes a step that is not `_CHEAP`."""
    found = [False] * len(program.inputs)
    for step in program.steps:
        of_args = any(found[x] for x in step.args if isinstance(x, int))
        found.append(of_args or step.name not in _CHEAP)
    return found


def _roots(program: Program, sides: Sequence[frozenset[str]]) -> list[int]:
    """The steps that one side decides, and that meet the other one."""
    first = len(program.inputs)
    met = {x for x in program.outputs if isinstance(x, int)}
    for number, step in enumerate(program.steps):
        own = sides[first + number]
        met |= {x for x in step.args if isinstance(x, int) and sides[x] != own}
    return [x for x in sorted(met) if x >= first and len(sides[x]) == 1]


def _of_side(program: Program, number: int, arrays, inputs) -> Named:
    """A value for all rows of its side."""
    live = only_live(program, [number])
    asked = {x for step in live.steps for x in step.args if isinstance(x, int)}
    own = {i: inputs[name] for i, name in enumerate(live.inputs) if i in asked}
    read = {step.params[0]: arrays[step.params[0]].squeezed() for step in live.reads}
    named = [x for x in (*own.values(), *read.values()) if x is not None]
    names = dict.fromkeys(a for x in named for a in x.axes if not is_whole(a))
    rows = [a for a in names if a in ("t", "s")]
    axes = (*(a for a in names if a not in rows), *rows)
    values = [_to(own.get(i), axes) for i in range(len(live.inputs))]
    blocks = [_to(read.get(i), axes) for i in range(len(arrays))]
    (value,) = live.on_blocks(values, blocks)
    return Named.broadcast(jnp.asarray(value), axes)


def _to(x: Named | None, axes: tuple[str, ...]):
    return None if x is None else x.to(axes)


class _Limit(NamedTuple):
    """A condition low <= high + more, of a value of the queries and one of the keys."""

    low: int
    high: int
    more: int


class _Field(NamedTuple):
    """A condition as bits of a word.

    Attributes:
      bits: of the key's number; the next one says that the condition does not hold.
      query, key: their parts of the word, before they are moved to their place.
    """

    bits: int
    query: int
    key: int


class _Extended:
    """A program to which steps are added."""

    def __init__(self, program: Program):
        self.program = program

    def add(self, primitive, *args: Argument, dtype: str = "int32") -> int:
        steps = (*self.program.steps, Step(primitive, (), args, dtype))
        self.program = dataclasses.replace(self.program, steps=steps)
        return len(self.program.inputs) + len(steps) - 1

    def all_of(self, values: Sequence[Argument]) -> Argument:
        found, *others = values
        for x in others:
            found = self.add(lax.and_p, found, x, dtype="bool")
        return found


def _packed(program: Program, sides, known: Mapping[str, Ends]) -> Program:
    """The same, with words in place of comparisons of queries with keys."""
    more = _Extended(program)
    kept: list[Argument] = []
    fields: list[_Field] = []
    for part in parts_of(program):
        limits = _limits(program, part, sides)
        own = [_field(more, x, sides, known) for x in limits or ()]
        if own and None not in own:
            fields += filter(None, own)
        elif isinstance(part.value, Constant):
            return program
        else:
            value, negated = part
            kept.append(more.add(lax.not_p, value, dtype="bool") if negated else value)
    if len(fields) < 2:
        return program
    kept += [_word(more, own) for own in _words(fields)]
    output = more.all_of(kept)
    return dataclasses.replace(more.program, outputs=(output,))


def _limits(program: Program, part: Part, sides) -> list[_Limit] | None:
    """What a part says, as limits; None if it is none of such comparisons."""
    step = made_by(program, part.value, *_NEGATED, "eq")
    if step is None or (step.name, part.is_negated) in (("eq", True), ("ne", False)):
        return None
    name = _NEGATED[step.name] if part.is_negated else step.name
    low, high = step.args[::-1] if name in ("ge", "gt") else step.args
    limit, inner = -int(name in ("lt", "gt")), made_by(program, low, "abs")
    both = name == "eq"
    if inner is not None and isinstance(high, Constant) and high.dtype == "int32":
        difference = made_by(program, inner.args[0], "sub")
        if difference is None or both:
            return None
        (low, high), limit, both = difference.args, limit + int(high.value), True
    if isinstance(low, Constant) or isinstance(high, Constant):
        return None
    if {*sides[low]} | {*sides[high]} != {"t", "s"} or sides[low] & sides[high]:
        return None
    found = [_Limit(low, high, limit)]
    return [*found, _Limit(high, low, limit)] if both else found


def _field(more: _Extended, limit: _Limit, sides, known) -> _Field | None:
    """The bits of a limit; None where they are too many, or numbers are not known."""
    low, high, number = limit
    if sides[low] == {"s"}:  # then -high - number <= -low
        low, high = (more.add(lax.neg_p, x) for x in (high, low))
    ends = _ends(more.program, high, known)
    if ends is None or _ends(more.program, low, known) is None:
        return None
    first, last = ends
    if abs(number) > _FAR or abs(first + number) > _FAR:
        return None
    bits = max(1, (last - first).bit_length())
    if 2 * (bits + 1) > _BITS:
        return None
    key = more.add(lax.sub_p, _int32(first + 2**bits - 1), high)
    query = more.add(lax.sub_p, low, _int32(first + number))
    # At most what no key has.
    query = more.add(lax.clamp_p, _int32(0), query, _int32(2**bits))
    return _Field(bits, query, key)


def _words(fields: Sequence[_Field]) -> list[list[_Field]]:
    """The fields of each word."""
    found: list[list[_Field]] = []
    for field in sorted(fields, key=lambda x: -x.bits):
        room = (x for x in found if _width([*x, field]) <= _BITS)
        own = next(room, None)
        if own is None:
            found.append([field])
        else:
            own.append(field)
    return found


def _width(fields: Sequence[_Field]) -> int:
    return sum(x.bits + 1 for x in fields)


def _word(more: _Extended, fields: Sequence[_Field]) -> int:
    """The value that says whether all fields of a word hold."""
    query: Argument = _int32(0)
    key: Argument = _int32(0)
    place = says = 0
    for field in fields:
        at = _int32(place)
        query = more.add(lax.or_p, query, more.add(lax.shift_left_p, field.query, at))
        key = more.add(lax.or_p, key, more.add(lax.shift_left_p, field.key, at))
        says |= 1 << (place + field.bits)
        place += field.bits + 1
    says_no = Constant.of(np.uint32(says).view(np.int32))
    total = more.add(lax.add_p, query, key)
    found = more.add(lax.and_p, total, says_no)
    return more.add(lax.eq_p, found, _int32(0), dtype="bool")


def _int32(number: int) -> Constant:
    return Constant.of(np.int32(number))


def _quotient(a: int, b: int) -> int:
    return abs(a) // b * (1 if a >= 0 else -1)


# Of numbers between ends: results at pairs of ends, between which all are.
_CORNERS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "neg": lambda a: -a,
    "div": _quotient,
    "min": min,
    "max": max,
    "clamp": lambda low, x, high: min(max(low, x), high),
}


def _ends(program: Program, value: Argument, known: Mapping[str, Ends]) -> Ends | None:
    """Between which numbers an int32 is, if it and its parts are known."""
    if isinstance(value, Constant):
        if value.dtype != "int32":  # an infinite or a missing number is no integer
            return None
        number = int(value.value)
        return number, number
    if value < len(program.inputs):
        return known.get(program.inputs[value])
    step = program.steps[value - len(program.inputs)]
    found = [_ends(program, x, known) for x in step.args]
    ends = [x for x in found if x is not None]
    is_known = len(ends) == len(found) and step.primitive is not None
    if step.dtype != "int32" or not is_known:
        return None
    if step.name in ("div", "rem") and not ends[1][0] == ends[1][1] > 0:
        return None
    if step.name == "rem":
        low, high = ends[0]
        most = ends[1][0] - 1
        return (0, min(high, most)) if low >= 0 else (-most, most)
    if step.name not in _CORNERS:
        return None
    corners = [_CORNERS[step.name](*x) for x in itertools.product(*ends)]
    inside = min(corners) >= -_FAR and max(corners) <= _FAR
    return (min(corners), max(corners)) if inside else None
