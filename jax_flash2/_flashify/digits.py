"""Which axis of a product each axis of a value is, whatever was reshaped since.

An axis of n elements is a number with digits: reshaping splits it into digits and puts
digits together, and transposing moves them. So the axes of every value that is made of
a product are digits of the product's axes, from the highest on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

FREE = -1  # the axis of a digit along which a value is constant


class Digit(NamedTuple):
    """The digit (index // stride) % size of an index of an axis."""

    axis: int
    stride: int
    size: int


Dim = tuple[Digit, ...]  # the digits of one axis of a value, the highest first
Layout = tuple[Dim, ...]


def whole(axis: int, size: int) -> Dim:
    """An axis itself."""
    return (Digit(axis, 1, size),) if size != 1 else ()


def free(size: int) -> Dim:
    return whole(FREE, size)


def size_of(digits: Iterable[Digit]) -> int:
    return math.prod(x.size for x in digits)


def joined(digits: Iterable[Digit]) -> Dim:
    """Digits that follow each other in one axis are one."""
    found: list[Digit] = []
    for x in digits:
        last = found[-1] if found else None
        if x.size == 1:
            continue
        if last and last.axis == FREE == x.axis:
            found[-1] = Digit(FREE, 1, last.size * x.size)
        elif last and (last.axis, last.stride) == (x.axis, x.stride * x.size):
            found[-1] = Digit(x.axis, x.stride, last.size * x.size)
        else:
            found.append(x)
    return tuple(found)


def reshaped(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """The layout after a reshape, or None if it divides no digit evenly."""
    if 0 in shape:
        return None
    left = [x for dim in layout for x in dim][::-1]
    found = []
    for size in shape:
        dim: list[Digit] = []
        while size > 1:
            x = left.pop()
            if size % x.size == 0:
                dim.append(x)
                size //= x.size
                continue
            if x.size % size:
                return None
            rest = x.size // size
            step = 1 if x.axis == FREE else x.stride * rest
            dim.append(Digit(x.axis, step, size))
            left.append(Digit(x.axis, x.stride, rest))
            size = 1
        found.append(joined(dim))
    return tuple(found)


def refined(digits: Iterable[Digit], cuts: Mapping[int, Iterable[int]]) -> Dim | None:
    """Digits cut at places of axes, or None if they do not fit."""
    found: list[Digit] = []
    for x in digits:
        if x.axis == FREE:
            found.append(x)
            continue
        end = x.stride * x.size
        inner = (c for c in cuts.get(x.axis, ()) if x.stride < c < end)
        places = [x.stride, *sorted(inner), end]
        if any(b % a for a, b in itertools.pairwise(places)):
            return None
        pairs = itertools.pairwise(places)
        found += [Digit(x.axis, a, b // a) for a, b in reversed(list(pairs))]
    return tuple(x for x in found if x.size > 1)
