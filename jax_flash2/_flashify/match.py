"""Finds attention in a graph: rules from values to `Fact`s, an operation at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp

from jax_flash2._flashify import digits
from jax_flash2._flashify.alike import Pairs
from jax_flash2._flashify.facts import OF_PAIRS, VALUE, Fact, Lost, Operand, Product
from jax_flash2._flashify.graph import COPIES, Graph, Node, Value
from jax_flash2._flashify.layers import Layer, Layers
from jax_flash2._flashify.meaning import Meanings
from jax_flash2._flashify.score_rules import ScoreRules, in_dtype

_BARRIERS = ("optimization_barrier", "name", "sharding_constraint")
_PLAIN = (*COPIES, *_BARRIERS, "convert_element_type")
_MOVES = ("reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim")


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A root, whose value is softmax(scores) . values, and what is known of it."""

    root: Node
    product: Node  # of weights and values
    fact: Fact
    values: Operand
    weights: Value
    layout: digits.Layout


class Matcher(ScoreRules):
    """Facts of the values of one graph."""

    def __init__(self, graph: Graph, meanings: Meanings):
        super().__init__(meanings)
        self._nodes = graph.nodes
        self._products = _before_exponentials(graph.nodes)
        # Of each root what is found, and which values of it are which others here.
        self.found: dict[Node, tuple[Found, Pairs]] = {}
        # Where exponentials of something lost are: node of the exponential -> reason.
        self.lost: dict[Node, str] = {}

    def run(self) -> None:
        nodes, start = self._nodes, 0 if self._products else len(self._nodes)
        layers = Layers(nodes, self._products, self.facts, self._meanings)
        while start < len(nodes):
            same = layers.like(start)
            if same is not None:
                end = start + len(same[0].nodes)
                self._copy(nodes[end - 1], *same)
            else:
                end = self._searched(start)
                if nodes[end - 1] in self.found:
                    layers.add(start, end)
            start = end

    def _searched(self, start: int) -> int:
        """Where the layer ends that begins at a place."""
        for end, node in enumerate(self._nodes[start:], start + 1):
            self._visit(node)
            if node in self.found:
                return end
        return len(self._nodes)

    def _copy(self, root: Node, layer: Layer, pairs: Pairs) -> None:
        """What is found in a layer, for another that is like it."""
        self.found[root] = self.found[layer.nodes[-1]][0], pairs
        for node in layer.nodes:
            if node in self.lost:
                own = pairs[node]
                assert isinstance(own, Node)
                self.lost[own] = self.lost[node]

    def _visit(self, node: Node) -> None:
        facts, is_product = self.facts, node in self._products
        if facts.keys().isdisjoint(node.inputs) and not is_product:
            return
        known = [facts.get(x) for x in node.inputs]
        if node.name == "dot_general":
            self._product(node, known, is_product)
        else:
            self._step(node, known)

    def _step(self, node: Node, known: list[Fact | None]) -> None:
        if node.results is not None:
            return
        rule: Callable | None = getattr(self, f"_{node.name}", None)
        try:
            known = _told_apart(node, known)
            if node.name in _PLAIN:
                found = self._plain(node, known[0])
            elif node.name in _MOVES:
                found = self._moved(node, known[0])
            elif all(x is None or x.is_of_rows for x in known):
                found = self._of_rows(node, known)
            elif rule is None:
                raise Lost(f"{node.name!r} between the product and the values")
            else:
                found = rule(node, known)
        except Lost as why:
            found = self._loss(node, known, str(why))
        if found is not None and found.kind in OF_PAIRS and len(known) > 1:
            size = digits.size_of(x for dim in found.layout for x in dim)
            if size != math.prod(node.shape):
                found = self._loss(node, known, "scores are repeated")
        if found is not None:
            self.facts[node] = found

    def _loss(self, node: Node, known: list[Fact | None], reason: str) -> Fact | None:
        """A fact that keeps the first reason, as long as it may be of scores."""
        first = next(x for x in known if x is not None)
        kept = ("scores", "shifted", "exp", "prob", "log_prob", "lost")
        if first.kind not in kept or node.name.startswith(("reduce", "arg")):
            return None
        if node.name in ("exp", "exp2") or first.kind in ("exp", "prob"):
            self.lost.setdefault(node, reason)
            return None
        return first.replace(kind="lost", reason=reason)

    # Products.

    def _product(
        self, node: Node, known: list[Fact | None], may_be_scores: bool
    ) -> None:
        of_weights = [i for i, x in enumerate(known) if x and x.kind in ("exp", "prob")]
        if len(of_weights) == 1:
            (side,) = of_weights
            fact = known[side]
            assert fact is not None
            try:
                self._weighted(node, fact, side)
            except Lost as why:
                self.lost.setdefault(node, str(why))
            return
        value = node
        if not may_be_scores or not jnp.issubdtype(value.aval.dtype, jnp.floating):
            return
        sizes = [x for own in (value, *node.inputs) for x in own.shape]
        if not all(isinstance(x, int) for x in sizes):
            reason = "shapes with symbols"
            self.facts[value] = Fact(Product(node), "lost", (), reason=reason)
        elif 0 not in value.shape:
            layout = tuple(digits.whole(i, x) for i, x in enumerate(value.shape))
            self.facts[value] = Fact(Product(node), "scores", layout)

    def _weighted(self, node: Node, fact: Fact, side: int) -> None:
        contracted, batch = node.params["dimension_numbers"]
        own, other = fact.layout, node.inputs[1 - side]
        keys = frozenset(x for i in contracted[side] for x in own[i])
        if fact.kind == "prob" and keys != fact.keys:
            raise Lost("values are not summed over the axis of the softmax")
        to = dict(zip(contracted[1 - side], contracted[side], strict=True))
        to |= dict(zip(batch[1 - side], batch[side], strict=True))
        layout = [
            own[to[i]] if i in to else digits.whole(VALUE + i, size)
            for i, size in enumerate(other.shape)
        ]
        rows = [
            dim
            for i, dim in enumerate(own)
            if i not in (*contracted[side], *batch[side])
        ]
        free = [x for i, x in enumerate(layout) if i not in to]
        both = [rows, free] if side == 0 else [free, rows]
        out = tuple([*(own[i] for i in batch[side]), *both[0], *both[1]])
        operand = Operand(other, tuple(layout))
        weights = node.inputs[side]
        found = fact.replace(
            kind="weighted",
            layout=out,
            keys=keys,
            values=operand,
            weights=weights,
            second=node,
        )
        if fact.kind == "exp":
            self.facts[node] = found
        else:
            self._found(node, found)

    def _found(self, root: Node, fact: Fact) -> None:
        assert fact.values is not None and fact.weights is not None
        product = fact.second
        assert product is not None
        own = (root, product, fact, fact.values, fact.weights, fact.layout)
        self.found[root] = Found(*own), {}

    # Operations that keep the numbers.

    def _plain(self, node: Node, fact: Fact | None) -> Fact | None:
        assert fact is not None
        dtype = node.aval.dtype
        if fact.kind in ("row", "sum_test", "max_test"):
            return fact.replace(kind="row", shift=node)
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
            raise Lost(f"scores are converted to {dtype.name}")
        if fact.kind != "scores":
            return fact
        return fact.replace(steps=tuple(in_dtype(x, dtype) for x in fact.steps))

    def _moved(self, node: Node, fact: Fact | None) -> Fact | None:
        assert fact is not None
        layout, new = fact.layout, node.shape
        if node.name == "transpose":
            found = tuple(layout[i] for i in node.params["permutation"])
        elif node.name == "broadcast_in_dim":
            old, places = node.inputs[0].shape, node.params["broadcast_dimensions"]
            rows = [digits.free(x) for x in new]
            for i, to in enumerate(places):
                rows[to] = layout[i] if old[i] == new[to] else digits.free(new[to])
            found = tuple(rows)
            if fact.kind in (*OF_PAIRS, "weighted") and math.prod(old) != math.prod(
                new
            ):
                raise Lost("scores are repeated")
        else:
            found = digits.reshaped(layout, new)
            if found is None:
                raise Lost("a reshape divides an axis unevenly")
        return fact.replace(layout=found)


def _before_exponentials(nodes: list[Node]) -> set[Node]:
    """The products that exponentials are made of, with none in between."""
    found: set[Node] = set()
    seen: set[Node] = set()
    todo = [node for node in nodes if node.name in ("exp", "exp2")]
    while todo:
        for value in todo.pop().inputs:
            node = value.node
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.name == "dot_general":
                found.add(node)
            elif not node.inner:
                todo.append(node)
    return found


def _told_apart(node: Node, known: list[Fact | None]) -> list[Fact | None]:
    """Without the facts of a bias that is made of a product, too."""
    lost = [x for x in known if x is not None and x.kind == "lost"]
    pairs = [x for x in known if x is not None and x.kind in ("scores", "shifted")]
    if node.name not in ("add", "sub") or len(lost) + len(pairs) < 2 or not pairs:
        if lost:
            raise Lost(lost[0].reason)
        return known
    shape = node.shape

    def rank(fact: Fact) -> tuple:
        return fact.likely_pairs, node.inputs[known.index(fact)].shape == shape

    best = max(pairs, key=rank)
    if [rank(x) for x in pairs].count(rank(best)) > 1:
        raise Lost("two arrays of scores meet")
    return [x if x is best else None for x in known]
