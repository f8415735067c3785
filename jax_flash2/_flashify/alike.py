"""Pieces of a program that are alike: the same operations on other values.

Layers are. What is found out of one piece holds of another, value by value, if the same
is known of what both read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_flash2._flashify.graph import Value, is_literal


class Pairs:
    """Which value of one piece is which of another.

    Attributes:
      of: for each value of the first, that of the second.
      inputs: those of them that the pieces do not make themselves, in the order in
        which they are read. Literals are none.
    """

    def __init__(self):
        self.of: dict[Value, Value] = {}
        self.inputs: list[tuple[Value, Value]] = []

    def read(self, first: Sequence[Value], second: Sequence[Value]) -> bool:
        """Whether both pieces may read these next."""
        of = self.of
        for a, b in zip(first, second, strict=True):
            known = of.get(a)
            if known is b:
                continue
            if known is not None:
                return False
            if a.constant is not None and is_literal(a):
                if not _same_literal(a, b):
                    return False
                continue
            if a.aval != b.aval or is_literal(b):
                return False
            of[a] = b
            self.inputs.append((a, b))
        return True

    def make(self, first: Sequence[Value], second: Sequence[Value]) -> None:
        """Notes what both pieces make next."""
        for a, b in zip(first, second, strict=True):
            self.of[a] = b

    def are_different(self) -> bool:
        """Whether no two values of the first are one of the second."""
        return len({*self.of.values()}) == len(self.of)


def same_operation(a: Any, b: Any) -> bool:
    """Whether two equations do the same with their operands."""
    return a is b or (
        a.primitive is b.primitive
        and a.params == b.params
        and a.ctx == b.ctx
        and len(a.invars) == len(b.invars)
    )


def _same_literal(a: Value, b: Value) -> bool:
    """Whether a value is the same number as a literal, bit by bit."""
    if a.aval != b.aval or not is_literal(b):
        return False
    return np.asarray(a.constant).tobytes() == np.asarray(b.constant).tobytes()
