"""Rules for numbers of rows: maxima, sums and what is made of them."""

from __future__ import annotations

import math

import numpy as np

from jax_flash2._flashify import digits
from jax_flash2._flashify.facts import Dropped, Fact, Mask
from jax_flash2._flashify.graph import Node, Value
from jax_flash2._flashify.meaning import Meanings

_MOST_EPSILON = 1e-6


class RowRules:
    """A rule takes a node and the facts of its inputs."""

    def __init__(self, meanings: Meanings):
        self._meanings = meanings
        self.facts: dict[Value, Fact] = {}

    def _of_rows(self, node: Node, known) -> Fact | None:
        first = next(x for x in known if x is not None)
        kinds = [None if x is None else x.kind for x in known]
        numbers = [
            None if x is not None else self._meanings.number(v)
            for x, v in zip(known, node.inputs, strict=True)
        ]
        name = node.name
        rule = getattr(self, f"_row_{name}", None)
        found = rule(node, known, kinds, numbers) if rule else None
        if found is not None:
            return found
        is_number = [x is not None for x in numbers]
        own = [k in ("row", "max") for k in kinds]
        if all(a or b for a, b in zip(is_number, own, strict=True)):
            if node.shape != node.inputs[kinds.index(first.kind)].shape:
                return None
            is_same = name == "max" and -np.inf in numbers
            return first.replace(
                kind=first.kind if is_same else "row",
                shift=first.shift if is_same else node,
            )
        return None

    def _row_stop_gradient(self, node, known, kinds, numbers) -> Fact | None:
        """Scores less it have another gradient than scores less the maximum itself."""
        del numbers
        if kinds[0] not in ("row", "max"):
            return None
        return known[0].replace(shift=node)

    def _row_log(self, node, known, kinds, numbers) -> Fact | None:
        del node, numbers
        return known[0].replace(kind="log_sum") if kinds[0] == "sum" else None

    def _row_abs(self, node, known, kinds, numbers) -> Fact | None:
        del node, numbers
        return known[0] if kinds[0] == "sum" else None

    def _row_add(self, node, known, kinds, numbers) -> Fact | None:
        if set(kinds) <= {"log_sum", "row", "max"} and "log_sum" in kinds:
            total = known[kinds.index("log_sum")]
            other = known[1 - kinds.index("log_sum")]
            if other.kind == "log_sum" or total.shift is not other.shift:
                return None
            return total.replace(kind="lse") if other.layout == total.layout else None
        return self._row_max(node, known, kinds, numbers)

    def _row_max(self, node, known, kinds, numbers) -> Fact | None:
        """A sum with a small number added, or at least that."""
        del node
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

    def _shift_of(self, fact: Fact) -> Fact | None:
        return None if fact.shift is None else self.facts.get(fact.shift)

    def _is_exact(self, total: Fact) -> bool:
        """Whether the largest exponential is 1, so that their sum is not small."""
        largest = self._shift_of(total)
        if largest is None or largest.kind != "max" or largest.steps != total.steps:
            return False
        rows = digits.size_of(x for dim in largest.layout for x in dim)
        pairs = math.prod(total.product.node.shape)
        return rows * digits.size_of(total.keys) == pairs

    def _dropped(self, total: Fact) -> Dropped:
        """What exponentials of dropped pairs are in a row that has no others.

        Less the maximum of such a row they are 1; less a number that masks have no
        part in they are 0, as are those of -inf less a finite number.
        """
        masks = [x for x in total.steps if isinstance(x, Mask)]
        shift = self._shift_of(total)
        if total.exp_is_zeroed or not masks:
            return "zero" if masks else "one"
        if shift is None:
            return "unknown"
        if not any(isinstance(x, Mask) for x in shift.steps):
            return "zero"
        if not self._is_exact(total):
            return "unknown"
        is_zero = shift.is_safe and all(np.isneginf(x.fill) for x in masks)
        return "zero" if is_zero else "one"

    def _row_div(self, node, known, kinds, numbers) -> Fact | None:
        if numbers[0] == 1 and kinds[1] == "sum":
            return known[1].replace(kind="inverse")
        return None

    def _row_eq(self, node, known, kinds, numbers) -> Fact | None:
        """Whether a sum is 0, or a maximum -inf: then true, or false."""
        is_true = node.name == "eq"
        if kinds == ["sum", None] and numbers[1] == 0:
            return known[0].replace(kind="sum_test", is_safe=is_true)
        if kinds == ["max", None] and numbers[1] == -np.inf:
            return known[0].replace(kind="max_test", is_safe=is_true)
        return None

    _row_gt = _row_ne = _row_eq

    def _row_is_finite(self, node, known, kinds, numbers) -> Fact | None:
        return self._row_eq(node, known, [*kinds, None], [*numbers, -np.inf])

    def _row_select_n(self, node, known, kinds, numbers) -> Fact | None:
        """where(sum == 0, number, sum), where(maximum == -inf, number, maximum)."""
        kind = str(kinds[0]).removesuffix("_test")
        if kind == kinds[0] or kinds.count(kind) != 1 or None not in kinds:
            return None
        test, own = known[0], known[kinds.index(kind)]
        in_place = kinds[1 if test.is_safe else 2] == kind
        number = numbers[2 if test.is_safe else 1]
        if not in_place or number is None or not own.same_exponents(test):
            return None
        if kind == "max":
            is_finite = np.isfinite(number)
            return own.replace(is_safe=True, shift=node) if is_finite else None
        return own.replace(is_safe=True) if number > 0 else None
