"""Layers of a graph that were searched for attention, and others that are like them.

A layer is here what follows one root of attention, up to the next. What was found in
one holds of those that are alike (`alike`), if nothing tells the rules which it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax_flash2._flashify.alike import Pairs, Piece, is_one_to_one, paired
from jax_flash2._flashify.axes import is_seen_through
from jax_flash2._flashify.graph import Node, Value
from jax_flash2._flashify.meaning import Meanings

# A layer is compared with so many others: those that were searched last.
_MOST_LAYERS = 4


class Layer:
    """Nodes from one place of a graph up to another, of which the last is a root."""

    def __init__(self, start: int, nodes: Sequence[Node], products: Collection[Node]):
        self.start, self.nodes = start, nodes
        self.products = [x in products for x in nodes]
        self.piece = Piece(
            [x.equation for x in nodes],
            [y for x in nodes for y in x.outputs],
            [y for x in nodes for y in x.inputs],
        )


class Layers:
    """Those of a graph that were searched.

    Args:
      nodes: of the graph.
      products: those of `nodes` that may be of queries and keys.
      facts: what is known of values by now; `meanings`, what of masks.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        products: Collection[Node],
        facts: Mapping[Value, Any],
        meanings: Meanings,
    ):
        self._nodes, self._products = nodes, products
        self._facts, self._meanings = facts, meanings
        self._searched: list[Layer] = []
        self._last: dict[Value, int] = {}  # the place where a value is read last

    def add(self, start: int, end: int) -> None:
        """Notes that what lies between two places was searched."""
        self._searched.append(Layer(start, self._nodes[start:end], self._products))

    def like(self, start: int) -> tuple[Layer, Pairs] | None:
        """A layer that is like what begins at a place, and which values are which."""
        for layer in reversed(self._searched[-_MOST_LAYERS:]):
            nodes = self._nodes[start : start + len(layer.nodes)]
            if nodes[-1].name == layer.nodes[-1].name:
                pairs = self._paired(layer, Layer(start, nodes, self._products))
                if pairs is not None:
                    return layer, pairs
        return None

    def _paired(self, first: Layer, second: Layer) -> Pairs | None:
        found = paired(first.piece, second.piece)
        if found is None or first.products != second.products:
            return None
        pairs, inputs = found
        outer: Pairs = {}
        for a, b in inputs.items():
            if a in self._facts or b in self._facts or not self._is_same(a, b):
                return None
            if outer.setdefault(a.origin, b.origin) is not b.origin:
                return None  # one array outside of a loop, and two
        if not is_one_to_one(outer) or not self._end_there(first, second, pairs):
            return None
        return pairs | outer

    def _end_there(self, first: Layer, second: Layer, pairs: Pairs) -> bool:
        """Whether nothing that follows reads scores of either.

        What is known of the first's scores is not noted of those of the second.
        """
        if not self._last:
            places = enumerate(self._nodes)
            self._last |= {x: i for i, node in places for x in node.inputs}
        ends = [x.start + len(x.nodes) for x in (first, second)]
        return all(
            self._last.get(y, 0) < end
            for x in self._facts.keys() & first.piece.made
            for y, end in zip((x, pairs[x]), ends, strict=True)
        )

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
