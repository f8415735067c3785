"""Pieces of a graph that were searched, and whether another has the same attention.

A piece is what follows a root of attention, up to the next root. A program that repeats
a layer has like pieces (`alike`), and what was found in one holds of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax_flash2._flashify.alike import Pairs, same_operation
from jax_flash2._flashify.axes import is_seen_through
from jax_flash2._flashify.graph import Node, Value
from jax_flash2._flashify.meaning import Meanings

# A piece is compared with so many others: those that were searched last.
_MOST_PIECES = 8


class Piece(NamedTuple):
    """What was searched, where the last node is a root.

    `found` is what is known of the root, and `lost` has the reasons why something else
    of it is no attention.
    """

    nodes: Sequence[Node]
    found: Any
    lost: dict[Node, str]


class Pieces:
    """Those of a graph that were searched."""

    def __init__(
        self,
        nodes: Sequence[Node],
        products: Collection[Node],
        facts: Mapping[Value, Any],
        meanings: Meanings,
    ):
        self._nodes, self._products = nodes, products
        self._facts, self._meanings = facts, meanings
        self._pieces: list[Piece] = []
        self._last: dict[Value, Node] = {}  # which node reads a value last

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def like(self, start: int) -> tuple[Piece, Pairs] | None:
        """A piece that is like what begins at a node, so that it has the same root."""
        for piece in reversed(self._pieces[-_MOST_PIECES:]):
            nodes = self._nodes[start : start + len(piece.nodes)]
            pairs = self._paired(piece.nodes, nodes)
            if pairs is not None and self._are_apart(piece, nodes, pairs):
                return piece, pairs
        return None

    def _paired(self, first: Sequence[Node], second: Sequence[Node]) -> Pairs | None:
        """The values of two pieces, if they are the same operations."""
        pairs, products = Pairs(), self._products
        if len(first) != len(second):
            return None
        for a, b in zip(first, second, strict=True):
            if not same_operation(a.equation, b.equation):
                return None
            if not pairs.read(a.inputs, b.inputs):
                return None
            pairs.make(a.outputs, b.outputs)
        of_first, of_second = ([x in products for x in y] for y in (first, second))
        return pairs if of_first == of_second and pairs.are_different() else None

    def _are_apart(self, piece: Piece, second: Sequence[Node], pairs: Pairs) -> bool:
        """Whether nothing else is known of what the two read, or of what they make.

        What is known of scores would have to be known of the second's scores, too,
        where something after it reads them.
        """
        facts = self._facts
        for a, b in list(pairs.inputs):
            if a in facts or b in facts or not self._is_same(a, b):
                return False
            if not pairs.read((a.origin,), (b.origin,)):
                return False  # one array outside of a loop, and two
        if not self._last:
            self._last |= {x: node for node in self._nodes for x in node.inputs}
        inside = {*piece.nodes, *second}
        known = [x for node in piece.nodes for x in node.outputs if x in facts]
        every = (*known, *(pairs.of[x] for x in known))
        return all(self._last[x] in inside for x in every if x in self._last)

    def _is_same(self, a: Value, b: Value) -> bool:
        """Whether two inputs tell the rules the same.

        They are one, or nothing is known of them, or nobody asked what they mean.
        """
        a, b = a.origin, b.origin
        if a is b:
            return True
        nodes, was_asked = (a.node, b.node), self._meanings.was_asked(a)
        if nodes == (None, None):
            are_data = a.constant is None and b.constant is None
            return are_data or not was_asked
        is_opened = any(x is not None and is_seen_through(x) for x in nodes)
        return not is_opened and not was_asked
