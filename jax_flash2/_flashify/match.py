"""Finds attention in a graph: rules from values to `Fact`s, an operation at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jax_flash2._flashify import digits
from jax_flash2._flashify.digits import FREE
from jax_flash2._flashify.facts import (
    OF_PAIRS,
    OF_ROWS,
    VALUE,
    Bias,
    Cap,
    Fact,
    Lost,
    Mask,
    Operand,
    Product,
    Scale,
    is_whole_row,
)
from jax_flash2._flashify.graph import Graph, Node, Value
from jax_flash2._flashify.meaning import (
    Choice,
    Condition,
    Data,
    Meanings,
    Number,
    Unread,
    negated,
)

# A number that masks: no score comes near it.
LEAST_MASK = -1e4
# Of an added one: a score of this size vanishes beside it in rounding.
_VANISHING_SCORE = 16.0
_MOST_EPSILON = 1e-6
_PLAIN = (
    "copy",
    "copy_p",
    "convert_element_type",
    "optimization_barrier",
    "name",
    "sharding_constraint",
    "pvary",
    "pcast",
)
_MOVES = ("reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim")


@dataclasses.dataclass(frozen=True)
class Found:
    """A root, whose value is softmax(scores) . values, and what is known of it."""

    root: Node
    product: Node  # of weights and values
    fact: Fact
    values: Operand
    weights: Value
    layout: digits.Layout


class Matcher:
    """Facts of the values of one graph."""

    def __init__(self, graph: Graph, meanings: Meanings):
        self._graph, self._meanings = graph, meanings
        self.facts: dict[Value, Fact] = {}
        self.found: list[Found] = []
        # Where exponentials of something lost are: node of the exponential -> reason.
        self.lost: dict[Node, tuple[Product, str]] = {}

    def run(self) -> None:
        facts = self.facts
        nodes = list(self._graph.nodes())
        products = _before_exponentials(nodes)
        if not products:
            return
        for node in nodes:
            known = [facts.get(x) for x in node.inputs]
            is_known = any(x is not None for x in known)
            if node.name == "dot_general":
                if is_known or node in products:
                    self._product(node, known, node in products)
            elif is_known:
                self._step(node, known)

    def _step(self, node: Node, known: list[Fact | None]) -> None:
        if len(node.outputs) != 1:
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
            if math.prod(node.outputs[0].shape) != digits.size_of(
                x for dim in found.layout for x in dim
            ):
                found = self._loss(node, known, "scores are repeated")
        if found is not None:
            self.facts[node.outputs[0]] = found

    def _loss(self, node: Node, known: list[Fact | None], reason: str) -> Fact | None:
        """A fact that keeps the first reason, as long as it may be of scores."""
        first = next(x for x in known if x is not None)
        kept = ("scores", "shifted", "exp", "prob", "log_prob", "lost")
        if first.kind not in kept or node.name.startswith(("reduce", "arg")):
            return None
        if node.name in ("exp", "exp2") or first.kind in ("exp", "prob"):
            self.lost.setdefault(node, (first.product, reason))
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
                self.lost.setdefault(node, (fact.product, str(why)))
            return
        value = node.outputs[0]
        if (
            may_be_scores
            and jnp.issubdtype(value.aval.dtype, jnp.floating)
            and 0 not in value.shape
        ):
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
            self.facts[node.outputs[0]] = found
        else:
            self._found(node, found)

    def _found(self, root: Node, fact: Fact) -> None:
        assert fact.values is not None and fact.weights is not None
        product = fact.second
        assert product is not None
        own = (root, product, fact, fact.values, fact.weights, fact.layout)
        self.found.append(Found(*own))

    # Operations that keep the numbers.

    def _plain(self, node: Node, fact: Fact | None) -> Fact | None:
        assert fact is not None
        dtype = node.outputs[0].aval.dtype
        if fact.kind in ("row", "sum_test"):
            return fact.replace(kind="row", shift=node.outputs[0])
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
            raise Lost(f"scores are converted to {dtype.name}")
        return fact

    def _moved(self, node: Node, fact: Fact | None) -> Fact | None:
        assert fact is not None
        layout, new = fact.layout, node.outputs[0].shape
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

    # Arithmetic.

    def _sides(self, node: Node, known) -> tuple[Fact, Fact | None, Value, bool]:
        """The fact of pairs, that of the other operand, it, whether the first is it."""
        first = known[0] is not None and not known[0].is_of_rows
        if first and known[1] is not None and not known[1].is_of_rows:
            raise Lost("two arrays of scores meet")
        own, other = (0, 1) if first else (1, 0)
        return known[own], known[other], node.inputs[other], first

    def _factor(self, node: Node, fact: Fact, factor: float) -> Fact:
        del node
        if fact.kind != "scores":
            raise Lost(f"{_WORDS[fact.kind]} are multiplied")
        masks = [x for x in fact.steps if isinstance(x, Mask)]
        if any(not x.fill * factor <= LEAST_MASK for x in masks):
            raise Lost("masked scores are multiplied")
        return fact.replace(steps=_scaled(fact.steps, factor))

    def _mul(self, node: Node, known) -> Fact:
        fact, other, value, _ = self._sides(node, known)
        if other is not None:
            if fact.kind in ("exp", "weighted") and other.kind == "inverse":
                return self._divided(node, fact, other)
            raise Lost("scores are multiplied by numbers of their rows")
        number = self._meanings.number(value)
        if number is not None:
            return self._factor(node, fact, number)
        if fact.kind in ("exp", "prob"):
            found = self._meanings.of(value)
            if isinstance(found, Choice) and (found.true, found.false) == (1, 0):
                layout = over(value, fact.layout)
                mask = Mask(found.condition, layout, value, 0.0, -np.inf)
                return self._zeroed(fact, mask)
            raise Lost("probabilities are multiplied, as by dropout")
        raise Lost("scores are multiplied by an array")

    def _div(self, node: Node, known) -> Fact:
        fact, other, value, first = self._sides(node, known)
        if not first:
            raise Lost("something is divided by scores")
        if other is not None:
            if fact.kind in ("exp", "weighted") and other.kind == "sum":
                return self._divided(node, fact, other)
            raise Lost("scores are divided by numbers of their rows")
        number = self._meanings.number(value)
        if number is None or number == 0:
            raise Lost("scores are divided by an array")
        return self._factor(node, fact, 1 / number)

    def _divided(self, node: Node, fact: Fact, total: Fact) -> Fact | None:
        is_weighted = fact.kind == "weighted"
        if not fact.same_exponents(total) or fact.keys != (
            total.keys if is_weighted else frozenset()
        ):
            raise Lost("the divisor is not the sum of these exponentials")
        own = frozenset(x for dim in fact.layout for x in dim if x.axis >= VALUE)
        if not is_whole_row(total.layout, fact.layout, own or total.keys):
            raise Lost("the sum lies over other axes")
        is_zeroed = fact.is_zeroed or (total.is_safe and fact.exp_is_zeroed)
        found = fact.replace(kind="prob", keys=total.keys, is_zeroed=is_zeroed)
        if fact.kind == "weighted":
            self._found(node, found)
            return None
        return found

    def _add(self, node: Node, known) -> Fact:
        fact, other, value, _ = self._sides(node, known)
        if other is not None:
            raise Lost("scores and numbers of their rows are added")
        return self._added(fact, value, 1.0)

    _add_any = _add

    def _sub(self, node: Node, known) -> Fact:
        fact, other, value, first = self._sides(node, known)
        if not first:
            raise Lost("scores are subtracted from something")
        if other is None:
            return self._added(fact, value, -1.0)
        if not is_whole_row_or_less(other, fact):
            raise Lost("what is subtracted is not one number of each row")
        if other.kind in ("row", "max") and fact.kind == "scores":
            return fact.replace(kind="shifted", shift=other.shift)
        is_same = other.steps == fact.steps and other.product == fact.product
        is_whole = is_whole_row(other.layout, fact.layout, other.keys)
        if other.kind == "lse" and fact.kind == "scores" and is_same and is_whole:
            dtype = value.aval.dtype
            return fact.replace(kind="log_prob", keys=other.keys, total_dtype=dtype)
        if other.kind == "log_sum" and fact.kind == "shifted" and is_same and is_whole:
            if fact.shift is other.shift:
                return fact.replace(kind="log_prob", keys=other.keys)
        raise Lost("something else than a softmax is made of the scores")

    def _added(self, fact: Fact, value: Value, sign: float) -> Fact:
        if fact.kind not in ("scores", "shifted"):
            raise Lost(f"something is added to {_WORDS[fact.kind]}")
        steps = fact.steps
        if value.shape == ():
            return fact  # the same for all keys
        if len(value.shape) != len(fact.layout):
            raise Lost("an array of fewer axes is added")
        for term, factor in self._terms(value, sign, len(steps) + 8):
            found = self._meanings.of(term)
            if isinstance(found, Number):
                continue  # the same for all keys
            mask = None
            if isinstance(found, Choice):
                mask = _added_mask(term, found, factor, fact.layout)
            bias = Bias(Operand(term, over(term, fact.layout)), factor)
            steps = (*steps, bias if mask is None else mask)
        return fact.replace(steps=steps)

    def _terms(self, value: Value, factor: float, most: int) -> list:
        """What an added array is the sum of, as far as its shape stays."""
        node = value.node
        if most and node and node.name in ("add", "sub") and not _is_known(self, value):
            left, right = node.inputs
            if len(left.shape) == len(right.shape):
                other = factor if node.name == "add" else -factor
                return [
                    *self._terms(left, factor, most - 1),
                    *self._terms(right, other, most - 1),
                ]
        return [(value, factor)]

    def _tanh(self, node: Node, known) -> Fact:
        del node
        (fact,) = known
        if fact.kind != "scores" or any(not isinstance(x, Scale) for x in fact.steps):
            raise Lost("a soft cap of something else than scaled products")
        return fact.replace(steps=(*fact.steps, Cap()))

    def _neg(self, node: Node, known) -> Fact:
        return self._factor(node, known[0], -1.0)

    # The softmax.

    def _exp(self, node: Node, known) -> Fact:
        (fact,) = known
        if fact.kind == "log_prob":
            return fact.replace(kind="prob")
        if fact.kind not in ("scores", "shifted"):
            raise Lost("exponentials of exponentials")
        return fact.replace(
            kind="exp", shift=fact.shift or fact.product.node.outputs[0]
        )

    def _exp2(self, node: Node, known) -> Fact:
        (fact,) = known
        if fact.kind != "scores":
            raise Lost("exp2 of shifted scores")
        return self._exp(node, [self._factor(node, fact, math.log(2.0))])

    def _reduce_max(self, node: Node, known) -> Fact:
        (fact,) = known
        if fact.kind != "scores":
            raise Lost("a maximum of something else than scores")
        axes = node.params["axes"]
        layout = tuple(x for i, x in enumerate(fact.layout) if i not in axes)
        return fact.replace(kind="max", layout=layout, shift=node.outputs[0])

    def _reduce_sum(self, node: Node, known) -> Fact:
        (fact,) = known
        axes = node.params["axes"]
        summed = [x for i in axes for x in fact.layout[i]]
        if fact.kind != "exp":
            raise Lost(f"{_WORDS[fact.kind]} are summed")
        if not summed:
            raise Lost("a softmax over one key")
        layout = tuple(x for i, x in enumerate(fact.layout) if i not in axes)
        keys = frozenset(summed)
        return fact.replace(kind="sum", layout=layout, keys=keys)

    def _select_n(self, node: Node, known) -> Fact:
        which, *cases = node.inputs
        own = [i for i, x in enumerate(known[1:]) if x is not None]
        if known[0] is not None or len(cases) != 2 or len(own) != 1:
            raise Lost("scores are selected")
        (side,) = own
        fact = known[1 + side]
        fill = self._meanings.number(cases[1 - side])
        if fill is None:
            raise Lost("where of something else than a number")
        when = side == 1
        condition = self._meanings.condition(which, when)
        if which.shape != node.outputs[0].shape:
            raise Lost("one condition for all pairs")
        mask = Mask(condition, fact.layout, which, float(not when), fill)
        if fact.kind in ("exp", "prob"):
            if fill != 0:
                raise Lost("probabilities are replaced by a number")
            return self._zeroed(fact, dataclasses.replace(mask, fill=-np.inf))
        if fact.kind not in ("scores", "shifted"):
            raise Lost(f"{_WORDS[fact.kind]} are selected")
        if not fill <= LEAST_MASK:
            raise Lost(f"where(..., {fill:g}): a number that does not mask")
        return fact.replace(steps=(*fact.steps, mask))

    def _zeroed(self, fact: Fact, mask: Mask) -> Fact:
        """Exponentials or probabilities that are 0 where a mask drops a pair."""
        masks = [x for x in fact.steps if isinstance(x, Mask)]
        alike = [x for x in masks if same_mask(x, mask)]
        if fact.kind == "prob":
            if not alike:
                raise Lost("probabilities are masked")
            return fact.replace(is_zeroed=len(masks) == 1 or fact.is_zeroed)
        if alike and len(masks) == 1:
            return fact.replace(exp_is_zeroed=True)
        return fact.replace(steps=(*fact.steps, mask), exp_is_zeroed=not masks)

    # Numbers of rows.

    def _of_rows(self, node: Node, known) -> Fact | None:
        first = next(x for x in known if x is not None)
        kinds = [None if x is None else x.kind for x in known]
        numbers = [
            None if x is not None else self._meanings.number(v)
            for x, v in zip(known, node.inputs, strict=True)
        ]
        name = node.name
        rule = getattr(self, f"_row_{name}", None)
        found = rule(known, kinds, numbers) if rule else None
        if found is not None:
            return found
        is_number = [x is not None for x in numbers]
        own = [k in ("row", "max") for k in kinds]
        if all(a or b for a, b in zip(is_number, own, strict=True)):
            if node.outputs[0].shape != node.inputs[kinds.index(first.kind)].shape:
                return None
            is_same = name == "stop_gradient" or (name == "max" and -np.inf in numbers)
            return first.replace(
                kind=first.kind if is_same else "row",
                shift=first.shift if is_same else node.outputs[0],
            )
        return None

    def _row_stop_gradient(self, known, kinds, numbers) -> Fact | None:
        del numbers
        return known[0] if kinds[0] in ("row", "max") else None

    def _row_log(self, known, kinds, numbers) -> Fact | None:
        del numbers
        return known[0].replace(kind="log_sum") if kinds[0] == "sum" else None

    def _row_abs(self, known, kinds, numbers) -> Fact | None:
        del numbers
        return known[0] if kinds[0] == "sum" else None

    def _row_add(self, known, kinds, numbers) -> Fact | None:
        if set(kinds) <= {"log_sum", "row", "max"} and "log_sum" in kinds:
            total = known[kinds.index("log_sum")]
            other = known[1 - kinds.index("log_sum")]
            if other.kind == "log_sum" or total.shift is not other.shift:
                return None
            return total.replace(kind="lse") if other.layout == total.layout else None
        return self._guarded(known, kinds, numbers)

    def _row_max(self, known, kinds, numbers) -> Fact | None:
        return self._guarded(known, kinds, numbers)

    def _guarded(self, known, kinds, numbers) -> Fact | None:
        """A sum with a small number added, or at least that."""
        if "sum" not in kinds or kinds.count(None) != 1:
            return None
        total, number = known[kinds.index("sum")], numbers[kinds.index(None)]
        if (
            number is None
            or not 0 < number <= _MOST_EPSILON
            or not self._is_exact(total)
        ):
            return None
        return total.replace(is_safe=True)

    def _is_exact(self, total: Fact) -> bool:
        """Whether the largest of the exponentials is 1, so that their sum is not small."""
        largest = None if total.shift is None else self.facts.get(total.shift)
        if largest is None or largest.kind != "max" or largest.steps != total.steps:
            return False
        rows = digits.size_of(x for dim in largest.layout for x in dim)
        pairs = math.prod(total.product.node.outputs[0].shape)
        return rows * digits.size_of(total.keys) == pairs

    def _row_div(self, known, kinds, numbers) -> Fact | None:
        if numbers[0] == 1 and kinds[1] == "sum":
            return known[1].replace(kind="inverse")
        return None

    def _row_eq(self, known, kinds, numbers) -> Fact | None:
        if kinds == ["sum", None] and numbers[1] == 0:
            return known[0].replace(kind="sum_test", is_safe=True)
        return None

    def _row_gt(self, known, kinds, numbers) -> Fact | None:
        if kinds == ["sum", None] and numbers[1] == 0:
            return known[0].replace(kind="sum_test", is_safe=False)
        return None

    _row_ne = _row_gt

    def _row_select_n(self, known, kinds, numbers) -> Fact | None:
        """where(sum == 0, number, sum), or the other way round."""
        if kinds[0] != "sum_test" or kinds.count("sum") != 1 or None not in kinds:
            return None
        test, total = known[0], known[kinds.index("sum")]
        in_place = kinds[1 if test.is_safe else 2] == "sum"
        number = numbers[2 if test.is_safe else 1]
        if not in_place or number is None or not number > 0:
            return None
        return total.replace(is_safe=True) if total.same_exponents(test) else None


_WORDS = {
    "scores": "scores",
    "shifted": "scores less their maximum",
    "exp": "exponentials",
    "prob": "probabilities",
    "log_prob": "logarithms of probabilities",
    "weighted": "sums of values",
}
assert set(OF_ROWS).isdisjoint(_WORDS)


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


def over(value: Value, layout: digits.Layout) -> digits.Layout:
    """The layout of an array that is broadcast, as scores have this one."""
    pairs = zip(value.shape, layout, strict=True)
    return tuple(dim if size > 1 else () for size, dim in pairs)


def same_mask(a: Mask, b: Mask) -> bool:
    return a.layout == b.layout and a.condition == b.condition


def is_whole_row_or_less(row: Fact, pairs: Fact) -> bool:
    """Whether an array is constant along the axis of keys, whichever that is."""
    own = [x for dim in row.layout for x in dim if x.axis != FREE]
    all_of = [x for dim in pairs.layout for x in dim]
    in_place = all(
        all(x.axis == FREE for x in a) or a == b
        for a, b in zip(row.layout, pairs.layout, strict=True)
    )
    return row.product == pairs.product and in_place and len(own) < len(all_of)


def _told_apart(node: Node, known: list[Fact | None]) -> list[Fact | None]:
    """Without the facts of a bias that is made of a product, too."""
    lost = [x for x in known if x is not None and x.kind == "lost"]
    pairs = [x for x in known if x is not None and x.kind in ("scores", "shifted")]
    if node.name not in ("add", "sub") or len(lost) + len(pairs) < 2 or not pairs:
        if lost:
            raise Lost(lost[0].reason)
        return known
    shape = node.outputs[0].shape

    def rank(fact: Fact) -> tuple:
        return fact.likely_pairs, node.inputs[known.index(fact)].shape == shape

    best = max(pairs, key=rank)
    if [rank(x) for x in pairs].count(rank(best)) > 1:
        raise Lost("two arrays of scores meet")
    return [x if x is best else None for x in known]


def _is_known(matcher: Matcher, value: Value) -> bool:
    found = matcher._meanings.of(value)
    return not isinstance(found, Data)


def _scaled(steps: tuple, factor: float) -> tuple:
    if steps and isinstance(steps[-1], Scale):
        return (*steps[:-1], Scale(steps[-1].factor * factor))
    return (*steps, Scale(factor))


def _added_mask(
    term: Value, found: Choice, factor: float, layout: digits.Layout
) -> Mask | None:
    """The mask that adding one of two numbers is, if it is one."""
    true, false = float(found.true) * factor, float(found.false) * factor
    condition: Condition | None = found.condition
    dropped = float(found.false)
    if false == 0:  # true where it drops
        true, false, dropped = false, true, float(found.true)
        condition = negated(found.condition)
    if true != 0 or not false <= LEAST_MASK:
        return None
    half = -false * float(jnp.finfo(term.aval.dtype).eps) / 4
    return Mask(
        Condition((Unread(),)) if condition is None else condition,
        over(term, layout),
        term,
        dropped,
        false,
        is_added=True,
        factor=factor,
        vanishes=half >= _VANISHING_SCORE,
    )
