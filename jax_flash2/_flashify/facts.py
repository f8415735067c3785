"""What a value is of a softmax over scores: the record that the rules of `match` make.

A product of queries and keys becomes scores in steps, scores become exponentials, with
numbers of their rows (maximum, sum), and these become probabilities. Each such value
has a `Fact`, which names the axes of the product that its own axes are.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jax_flash2._flashify.conditions import Condition
from jax_flash2._flashify.digits import FREE, Digit, Layout, whole
from jax_flash2._flashify.graph import Node, Value

# Axes of a product are numbered as in its result; contracted axes, and axes that values
# alone have, count from these.
DEPTH, VALUE = 100, 200


class Lost(Exception):
    """Why a value is no part of attention any more."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array of the program, and the digits of its axes."""

    value: Value
    layout: Layout

    def digits(self) -> list[Digit]:
        return [x for dim in self.layout for x in dim if x.axis != FREE]


@dataclasses.dataclass(frozen=True)
class Scale:
    """scores * factor."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Cap:
    """tanh(scores)."""


@dataclasses.dataclass(frozen=True)
class Added:
    """scores + factor * operand."""

    operand: Operand
    factor: float


@dataclasses.dataclass(frozen=True)
class Moved:
    """scores + an amount that is the same for all: a number, or a scalar's value."""

    amount: Any
    sign: float = 1.0


@dataclasses.dataclass(frozen=True)
class Mask:
    """Scores where a condition on the axes of the layout holds, and elsewhere not.

    Attributes:
      condition: where a query attends to a key.
      predicate: an array of the program that is `dropped` elsewhere, and only there.
      fill: what stands elsewhere, or is added there.
      is_added: whether it is added.
      factor: what the predicate, if it is what is added, is multiplied by.
      vanishes: whether scores of usual size vanish beside what is added.
    """

    condition: Condition
    layout: Layout
    predicate: Value
    dropped: float
    fill: float
    is_added: bool = False
    factor: float = 1.0
    vanishes: bool = True


Step = Scale | Cap | Added | Moved | Mask
Kind = Literal[
    "scores",  # steps of the product
    "shifted",  # scores - a number of the row
    "exp",  # exp(shifted)
    "log_prob",
    "prob",
    "weighted",  # exp . values, to be divided by the sum
    "row",  # a number of each row, of any kind
    "max",
    "max_test",  # a comparison of it with -inf
    "sum",  # of exp over all keys
    "sum_test",  # a comparison of it with zero
    "inverse",  # 1 / sum
    "log_sum",
    "lse",  # log_sum + the number that was subtracted
    "lost",  # something else, for a reason
]
OF_PAIRS = ("scores", "shifted", "exp", "log_prob", "prob")
OF_ROWS = ("row", "max", "max_test", "sum", "sum_test", "inverse", "log_sum", "lse")
# What exponentials of dropped pairs are in a row that has no others.
Dropped = Literal["one", "zero", "unknown"]


@dataclasses.dataclass(frozen=True)
class Product:
    """A dot_general, which may be one of queries and keys."""

    node: Node

    @property
    def dimensions(self) -> Any:
        """((contracted left, right), (batch left, right))."""
        return self.node.params["dimension_numbers"]

    def operand(self, side: int) -> Operand:
        """With the digits of the product's axes."""
        contracted, batch = (x[side] for x in self.dimensions)
        value = self.node.inputs[side]
        others = [i for i in range(len(value.shape)) if i not in (*contracted, *batch)]
        left = self.dimensions[1][0]
        first = len(left)
        if side == 1:
            own = self.node.inputs[0].shape
            first += len(own) - len(left) - len(contracted)
        places = {axis: i for i, axis in enumerate(batch)}
        places |= {axis: DEPTH + i for i, axis in enumerate(contracted)}
        places |= {axis: first + i for i, axis in enumerate(others)}
        sizes = enumerate(value.shape)
        return Operand(value, tuple(whole(places[i], size) for i, size in sizes))

    def free_axes(self, side: int) -> range:
        """The axes of the result that one operand alone has."""
        batch = len(self.dimensions[1][0])
        left = self.node.inputs[0].shape
        between = len(left) - len(self.dimensions[0][0])
        total = len(self.node.shape)
        return range(batch, between) if side == 0 else range(between, total)


@dataclasses.dataclass(frozen=True)
class Fact:
    """What a value is.

    Attributes:
      steps: from the product to the scores in question.
      keys: the digits that the softmax is over, once that is known.
      shift: what was subtracted from the scores, by the value that it is;
        `shift_axes`: the axes along which that varies.
      is_zeroed: whether probabilities of pairs that the one mask drops are 0, in rows
        without keys too.
      is_safe: of a sum: whether it is no 0 where all exponentials are; of a maximum:
        whether it is finite where all scores are -inf. Of "sum_test" and "max_test":
        whether it is true there, and not false.
      values, weights, second: of "weighted": the operand of values, the exponentials or
        probabilities, and the product of both.
      exp_is_zeroed: whether exponentials of pairs that the one mask drops are 0.
      dropped: of probabilities: what the exponentials are that they were made of.
      total_dtype: where probabilities are exp(scores - lse), the type of lse.
      reason: of "lost".
    """

    product: Product
    kind: Kind
    layout: Layout
    steps: tuple[Step, ...] = ()
    keys: frozenset[Digit] = frozenset()
    shift: Value | None = None
    shift_axes: frozenset[int] = frozenset()
    is_zeroed: bool = False
    is_safe: bool = False
    values: Operand | None = None
    weights: Value | None = None
    second: Node | None = None
    exp_is_zeroed: bool = False
    dropped: Dropped = "one"
    total_dtype: Any = None
    reason: str = ""

    def replace(self, **changes) -> Fact:
        found = object.__new__(Fact)  # dataclasses.replace takes ten times as long
        found.__dict__.update(self.__dict__, **changes)
        return found

    @property
    def is_of_rows(self) -> bool:
        return self.kind in OF_ROWS

    @property
    def likely_pairs(self) -> int:
        """How many axes are all that one operand of the product has of its own."""
        shape = self.product.node.shape
        own = [
            {i for i in self.product.free_axes(side) if shape[i] > 1} for side in (0, 1)
        ]
        return sum({x.axis for x in dim} in own for dim in self.layout if dim)

    def same_exponents(self, other: Fact) -> bool:
        """Whether a sum is that of these exponentials."""
        own = (self.product, self.steps, self.shift)
        return own == (other.product, other.steps, other.shift)


def is_whole_row(row: Layout, pairs: Layout, keys: frozenset[Digit]) -> bool:
    """Whether an array of rows lies over one of pairs, axis by axis, with all rows."""
    for own, other in zip(row, pairs, strict=True):
        if any(x.axis != FREE for x in own):
            if own != other:
                return False
        elif any(x not in keys for x in other):
            return False
    return True
