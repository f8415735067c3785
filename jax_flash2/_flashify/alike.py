"""Pieces of a program that are alike: the same operations on other values.

Layers are. What is found out of one piece holds of another, value by value, if the same
is known of what both read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_flash2._flashify.graph import Value, is_literal

Pairs = dict[Value, Value]  # from values of one piece to those of another


class Piece(NamedTuple):
    """Operations that follow each other: equations, and what they make and read."""

    equations: Sequence[Any]
    made: Sequence[Value]
    read: Sequence[Value]


def paired(first: Piece, second: Piece) -> tuple[Pairs, Pairs] | None:
    """The values of two pieces, if these are the same function of what they read.

    Returns:
      All values, and those that the pieces do not make, in the order in which they are
      read. Literals are in neither.
    """
    if not _are_same(first.equations, second.equations):
        return None
    pairs: Pairs = dict(zip(first.made, second.made, strict=True))
    inputs: Pairs = {}
    for a, b in zip(first.read, second.read, strict=True):
        known = pairs.get(a)
        if known is b:
            continue
        if known is not None:
            return None
        if a.constant is not None and is_literal(a):
            if not _same_literal(a, b):
                return None
        elif a.aval != b.aval or is_literal(b):
            return None
        else:
            pairs[a] = inputs[a] = b
    return (pairs, inputs) if is_one_to_one(pairs) else None


def is_one_to_one(pairs: Pairs) -> bool:
    return len({*pairs.values()}) == len(pairs)


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether equations do the same with their operands."""
    return (
        [x.primitive for x in first] == [x.primitive for x in second]
        and [x.params for x in first] == [x.params for x in second]
        and [x.ctx for x in first] == [x.ctx for x in second]
        and [len(x.invars) for x in first] == [len(x.invars) for x in second]
    )


def _same_literal(a: Value, b: Value) -> bool:
    """Whether a value is the same number as a literal, bit by bit."""
    if a.aval != b.aval or not is_literal(b):
        return False
    return np.asarray(a.constant).tobytes() == np.asarray(b.constant).tobytes()
