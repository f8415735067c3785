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
        self._seconds: set[Value] = set()

    def read(self, first: Sequence[Value], second: Sequence[Value]) -> bool:
        """Whether both pieces may read these next."""
        for a, b in zip(first, second, strict=True):
            known = self.of.get(a)
            if known is b or (known is None and _same_literal(a, b)):
                continue
            if known is not None or b in self._seconds or not _fit(a, b):
                return False
            self.inputs.append((a, b))
            self._add(a, b)
        return True

    def make(self, first: Sequence[Value], second: Sequence[Value]) -> None:
        """Notes what both pieces make next."""
        for a, b in zip(first, second, strict=True):
            self._add(a, b)

    def _add(self, a: Value, b: Value) -> None:
        self.of[a] = b
        self._seconds.add(b)


def same_operation(a: Any, b: Any) -> bool:
    """Whether two equations do the same with their operands."""
    return a is b or (
        a.primitive is b.primitive
        and len(a.invars) == len(b.invars)
        and a.params == b.params
        and a.ctx == b.ctx
    )


def _fit(a: Value, b: Value) -> bool:
    """Whether two values may be inputs of the same function."""
    return a.aval == b.aval and not is_literal(a) and not is_literal(b)


def _same_literal(a: Value, b: Value) -> bool:
    """Whether two values are the same number, bit by bit."""
    if a.constant is None or b.constant is None or a.aval != b.aval:
        return False
    if not is_literal(a) or not is_literal(b):
        return False
    return np.asarray(a.constant).tobytes() == np.asarray(b.constant).tobytes()
