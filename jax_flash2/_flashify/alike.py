"""Pieces of a program that are alike: the same operations on other values.

Layers are. What is found out of one piece holds of another, value by value, if the same
is known of what both read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax_flash2._flashify.graph import Value, is_literal

Pairs = dict[Value, Value]  # from values of one piece to those of another


class Piece:
    """Operations that follow each other: equations, and what they make and read."""

    def __init__(
        self, equations: Sequence[Any], made: Sequence[Value], read: list[Value]
    ):
        self.made, self.read = made, read
        self.operations = [
            [x.primitive for x in equations],
            [x.params for x in equations],
            [x.ctx for x in equations],
            [len(x.invars) for x in equations],
        ]

    @functools.cached_property
    def inputs(self) -> list[Value]:
        """What it reads and does not make, in the order in which it is read."""
        made = {*self.made}
        return [x for x in dict.fromkeys(self.read) if x not in made]


def paired(first: Piece, second: Piece) -> tuple[Pairs, Pairs] | None:
    """The values of two pieces, if these are the same function of what they read.

    Returns:
      All values, and those of `Piece.inputs` that are no literals.
    """
    if first.operations != second.operations:
        return None
    pairs: Pairs = dict(zip(first.read, second.read, strict=True))
    pairs.update(zip(first.made, second.made, strict=True))
    if [pairs[x] for x in first.read] != second.read or not is_one_to_one(pairs):
        return None
    inputs: Pairs = {}
    for a in first.inputs:
        b = pairs[a]
        if is_literal(a) or is_literal(b):
            if a is not b:
                return None
        elif a.aval != b.aval:
            return None
        else:
            inputs[a] = b
    return pairs, inputs


def is_one_to_one(pairs: Pairs) -> bool:
    return len({*pairs.values()}) == len(pairs)
