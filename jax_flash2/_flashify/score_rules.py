"""Rules for scores, exponentials and probabilities: an operation at a time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_flash2._flashify import digits
from jax_flash2._flashify.conditions import (
    Choice,
    Condition,
    Data,
    Number,
    Unread,
    negated,
)
from jax_flash2._flashify.digits import FREE
from jax_flash2._flashify.facts import (
    VALUE,
    Added,
    Cap,
    Fact,
    Lost,
    Mask,
    Moved,
    Operand,
    Scale,
    Step,
    is_whole_row,
)
from jax_flash2._flashify.graph import Node, Value
from jax_flash2._flashify.row_rules import RowRules

# A number that masks: no score comes near it.
LEAST_MASK = -1e4
# Of an added one: a score of this size vanishes beside it in rounding.
_VANISHING_SCORE = 16.0


class ScoreRules(RowRules):
    """Rules by the name of an operation."""

    def _found(self, root: Node, fact: Fact) -> None:
        raise NotImplementedError

    def _sides(self, node: Node, known) -> tuple[Fact, Fact | None, Value, bool]:
        """The fact of pairs, that of the other operand, it, whether the first is it."""
        first = known[0] is not None and not known[0].is_of_rows
        if first and known[1] is not None and not known[1].is_of_rows:
            raise Lost("two arrays of scores meet")
        own, other = (0, 1) if first else (1, 0)
        return known[own], known[other], node.inputs[other], first

    def _factor(self, fact: Fact, factor: float) -> Fact:
        if fact.kind != "scores":
            raise Lost(f"{_WORDS[fact.kind]} are multiplied")
        masks = [x for x in fact.steps if isinstance(x, Mask)]
        if any(not x.fill * factor <= LEAST_MASK for x in masks):
            raise Lost("masked scores are multiplied")
        if not math.isfinite(factor):
            raise Lost(f"scores are multiplied by {factor:g}")
        return fact.replace(steps=_scaled(fact.steps, factor))

    def _mul(self, node: Node, known) -> Fact | None:
        fact, other, value, _ = self._sides(node, known)
        if other is not None:
            if fact.kind in ("exp", "weighted") and other.kind == "inverse":
                return self._divided(node, fact, other)
            raise Lost("scores are multiplied by numbers of their rows")
        number = self._meanings.number(value)
        if number is not None:
            return self._factor(fact, number)
        if fact.kind in ("exp", "prob"):
            found = self._meanings.of(value)
            if isinstance(found, Choice) and (found.true, found.false) == (1, 0):
                layout = over(value, fact.layout)
                mask = Mask(found.condition, layout, value, 0.0, -np.inf)
                return self._zeroed(fact, mask)
            raise Lost("probabilities are multiplied, as by dropout")
        raise Lost("scores are multiplied by an array")

    def _div(self, node: Node, known) -> Fact | None:
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
        return self._factor(fact, 1 / number)

    def _divided(self, node: Node, fact: Fact, total: Fact) -> Fact | None:
        is_weighted = fact.kind == "weighted"
        if not fact.same_exponents(total) or fact.keys != (
            total.keys if is_weighted else frozenset()
        ):
            raise Lost("the divisor is not the sum of these exponentials")
        own = frozenset(x for dim in fact.layout for x in dim if x.axis >= VALUE)
        if not is_whole_row(total.layout, fact.layout, own or total.keys):
            raise Lost("the sum lies over other axes")
        dropped = self._dropped(total)
        is_zeroed = fact.is_zeroed or (total.is_safe and dropped == "zero")
        found = fact.replace(
            kind="prob", keys=total.keys, is_zeroed=is_zeroed, dropped=dropped
        )
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
            axes = frozenset(x.axis for dim in other.layout for x in dim)
            return fact.replace(kind="shifted", shift=other.shift, shift_axes=axes)
        is_same = other.steps == fact.steps and other.product == fact.product
        is_whole = is_whole_row(other.layout, fact.layout, other.keys)
        if other.kind == "lse" and fact.kind == "scores" and is_same and is_whole:
            found = fact.replace(total_dtype=value.aval.dtype)
            return self._log_prob(found, other)
        is_same &= is_whole and fact.shift is other.shift
        if other.kind == "log_sum" and fact.kind == "shifted" and is_same:
            return self._log_prob(fact, other)
        raise Lost("something else than a softmax is made of the scores")

    def _log_prob(self, fact: Fact, total: Fact) -> Fact:
        """Where exponentials are 0, so is their sum, and its logarithm -inf."""
        dropped = self._dropped(total)
        is_zeroed = dropped == "zero" and total.is_safe
        fills = [x.fill for x in fact.steps if isinstance(x, Mask)]
        if dropped == "zero" and not all(map(np.isneginf, fills)):
            dropped = "unknown"
        own = fact.replace(is_zeroed=is_zeroed, dropped=dropped)
        return own.replace(kind="log_prob", keys=total.keys)

    def _moved_by(self, fact: Fact, value: Value, sign: float) -> Fact:
        """Scores and the same amount for all of them."""
        number = self._meanings.number(value)
        if number is None:
            return fact.replace(steps=(*fact.steps, Moved(value, sign)))
        masks = (x for x in fact.steps if isinstance(x, Mask))
        if any(not x.fill + sign * number <= LEAST_MASK for x in masks):
            raise Lost(f"{sign * number:g} is added to masked scores")
        if not math.isfinite(number):
            raise Lost(f"{sign * number:g} is added to scores")
        return fact.replace(steps=(*fact.steps, Moved(sign * number)))

    def _added(self, fact: Fact, value: Value, sign: float) -> Fact:
        if fact.kind not in ("scores", "shifted"):
            raise Lost(f"something is added to {_WORDS[fact.kind]}")
        if value.shape == ():
            return self._moved_by(fact, value, sign)
        if len(value.shape) != len(fact.layout):
            raise Lost("an array of fewer axes is added")
        for term, factor in self._terms(value, sign, len(fact.steps) + 8):
            found = self._meanings.of(term)
            if isinstance(found, Number):
                fact = self._moved_by(fact, term, factor)
                continue
            mask = None
            if isinstance(found, Choice):
                mask = _added_mask(term, found, factor, fact.layout)
            bias = Added(Operand(term, over(term, fact.layout)), factor)
            steps = (*fact.steps, bias if mask is None else mask)
            fact = fact.replace(steps=steps)
        return fact

    def _terms(self, value: Value, factor: float, most: int) -> list:
        """What an added array is the sum of, as far as its shape stays."""
        node = value.node
        if most and node and node.name in ("add", "sub") and self._is_data(value):
            left, right = node.inputs
            if len(left.shape) == len(right.shape):
                other = factor if node.name == "add" else -factor
                return [
                    *self._terms(left, factor, most - 1),
                    *self._terms(right, other, most - 1),
                ]
        return [(value, factor)]

    def _is_data(self, value: Value) -> bool:
        return isinstance(self._meanings.of(value), Data)

    def _tanh(self, node: Node, known) -> Fact:
        del node
        (fact,) = known
        if fact.kind != "scores" or any(not isinstance(x, Scale) for x in fact.steps):
            raise Lost("a soft cap of something else than scaled products")
        return fact.replace(steps=(*fact.steps, Cap()))

    def _neg(self, node: Node, known) -> Fact:
        del node
        return self._factor(known[0], -1.0)

    # The softmax.

    def _exp(self, node: Node, known) -> Fact:
        (fact,) = known
        if fact.kind == "log_prob":
            return fact.replace(kind="prob")
        if fact.kind not in ("scores", "shifted"):
            raise Lost("exponentials of exponentials")
        return fact.replace(kind="exp", shift=fact.shift or fact.product.node)

    def _exp2(self, node: Node, known) -> Fact:
        (fact,) = known
        if fact.kind != "scores":
            raise Lost("exp2 of shifted scores")
        return self._exp(node, [self._factor(fact, math.log(2.0))])

    def _reduce_max(self, node: Node, known) -> Fact:
        (fact,) = known
        if fact.kind != "scores":
            raise Lost("a maximum of something else than scores")
        axes = node.params["axes"]
        layout = tuple(x for i, x in enumerate(fact.layout) if i not in axes)
        return fact.replace(kind="max", layout=layout, shift=node)

    def _reduce_sum(self, node: Node, known) -> Fact:
        (fact,) = known
        axes = node.params["axes"]
        summed = [x for i in axes for x in fact.layout[i]]
        if fact.kind != "exp":
            raise Lost(f"{_WORDS[fact.kind]} are summed")
        if not summed:
            raise Lost("a softmax over one key")
        if fact.shift_axes & {x.axis for x in summed}:
            raise Lost("what is subtracted from scores differs from key to key")
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
        if which.shape != node.shape:
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
            every = {test for x in masks for test in x.condition.tests}
            is_every = len(masks) == 1 or (
                {*mask.condition.tests} == every
                and {x.layout for x in masks} == {mask.layout}
            )
            if is_every or fact.is_zeroed:
                return fact.replace(is_zeroed=True)
            return fact.replace(dropped="unknown")
        if alike and len(masks) == 1:
            return fact.replace(exp_is_zeroed=True)
        return fact.replace(steps=(*fact.steps, mask), exp_is_zeroed=not masks)


_WORDS = {
    "scores": "scores",
    "shifted": "scores less their maximum",
    "exp": "exponentials",
    "prob": "probabilities",
    "log_prob": "logarithms of probabilities",
    "weighted": "sums of values",
}


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
    if not row.layout:
        return row.product == pairs.product  # one number for all
    in_place = all(
        all(x.axis == FREE for x in a) or a == b
        for a, b in zip(row.layout, pairs.layout, strict=True)
    )
    return row.product == pairs.product and in_place and len(own) < len(all_of)


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
    return Mask(
        Condition((Unread(),)) if condition is None else condition,
        over(term, layout),
        term,
        dropped,
        false,
        is_added=True,
        factor=factor,
        vanishes=_vanish(false, term.aval.dtype),
    )


def _vanish(fill: float, dtype: Any) -> bool:
    """Whether scores of usual size are rounded away beside a number."""
    return -fill * float(jnp.finfo(dtype).eps) / 4 >= _VANISHING_SCORE


def in_dtype(step: Step, dtype: Any) -> Step:
    """A step of scores that are converted to a type after it."""
    if not isinstance(step, Mask):
        return step
    with np.errstate(over="ignore"):
        fill = float(np.asarray(step.fill).astype(dtype))
    vanishes = step.vanishes or _vanish(fill, dtype)
    return dataclasses.replace(step, fill=fill, vanishes=vanishes)
