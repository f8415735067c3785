"""A function of one pair as a static list of steps, which runs on blocks of pairs.

A `Program` is frozen and hashable: equal text makes equal programs, whatever Python
objects they came from. Its numbers are those of its inputs, then those of its steps.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.pointwise.tables import Distances, take

# What a function is of: entry of the batch, query head, positions of query and key.
INDICES = ("b", "h", "q", "kv")
SCORE = "score"
# An input of programs that are bound: the `tables.Distances` of the pairs.
DISTANCE = "distance"

_NAMES = (
    "abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type cbrt "
    "ceil clamp clz convert_element_type cos cosh digamma div eq erf erf_inv erfc "
    "exp exp2 expm1  floor ge gt integer_pow is_finite le lgamma log log1p logistic "
    "lt max min mul ne  neg nextafter not or population_count pow rem round rsqrt "
    "select_n shift_left  shift_right_arithmetic shift_right_logical sign sin sinh "
    "sqrt square sub tan  tanh xor"
)
POINTWISE = frozenset(_NAMES.split())  # of JAX's primitives
FLOAT_REMAINDERS = "rem of floats"
# Without `TABLES`.
OPERATIONS = POINTWISE | {"read", FLOAT_REMAINDERS}
# Of finite numbers these give finite numbers (products of two unknown ones may not).
_TOTAL = (
    "abs add and ceil clamp convert_element_type eq floor ge gt le logistic "
    "lt max min ne neg not or population_count read round select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sub tanh xor"
)
_PLAIN_DTYPES = ("bool", "int32", "float32")
_FLOATS = ("bfloat16", "float16")
TABLES = "an array read at a computed index"
# What JAX binds a product with: its transpose asks for it.
PRODUCT = {"out_dtype": None}


class Constant(NamedTuple):
    """A number that is compiled in: its bytes, so that NaN equals itself."""

    data: bytes
    dtype: str

    @classmethod
    def of(cls, x) -> Constant:
        x = np.asarray(x)
        return cls(x.tobytes(), x.dtype.name)

    @property
    def value(self) -> np.ndarray:
        return np.frombuffer(self.data, jnp.dtype(self.dtype)).reshape(())


Argument = int | Constant


class Step(NamedTuple):
    """A pointwise operation, or the read of an element of a captured array.

    Attributes:
      primitive: of JAX; None for a read.
      params: of the primitive; of a read, the number of the array, and where the index
        is a distance, the place of distance 0.
      args: numbers of values, and constants. Those of a read are indices.
      dtype: of the result.
    """

    primitive: Any
    params: tuple
    args: tuple[Argument, ...]
    dtype: str

    @property
    def name(self) -> str:
        return "read" if self.primitive is None else self.primitive.name

    def bound(self, *args) -> jax.Array:
        """The result, of arrays that broadcast against each other.

        They are given to the primitive in one shape, as Mosaic GPU asks.
        """
        primitive = self.primitive
        if (self.name, self.dtype) == ("not", "bool"):  # Mosaic GPU cannot lower it
            primitive, args = jax.lax.xor_p, (*args, np.True_)
        shape = jnp.broadcast_shapes(*map(np.shape, args))
        same = (x if np.shape(x) == shape else jnp.broadcast_to(x, shape) for x in args)
        return primitive.bind(*same, **dict(self.params))


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps from inputs to outputs.

    Attributes:
      inputs: their names.
      steps: in order; each takes inputs and the results of steps before it.
      outputs: numbers of values, or constants.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Argument, ...]

    @property
    def reads(self) -> list[Step]:
        return [step for step in self.steps if step.primitive is None]

    def run(
        self, inputs: Sequence, read: Callable[[Step, list], Any], rule: Callable
    ) -> list:
        """The outputs.

        Args:
          inputs: of the program; those that no step takes may be None.
          read: gives what a read finds, from the step and its indices.
          rule: gives the result of a step, from the step and its arguments.
        """
        values = list(inputs)

        def of(argument: Argument):
            known = isinstance(argument, Constant)
            return argument.value if known else values[argument]

        for step in self.steps:
            args = [of(x) for x in step.args]
            found = read if step.primitive is None else rule
            values.append(found(step, args))
        return [of(x) for x in self.outputs]

    def on_blocks(
        self, inputs: Sequence, arrays: Sequence, tanh: Callable | None = None
    ) -> list[jax.Array]:
        """The outputs for blocks, or whole arrays, that broadcast with each other.

        Args:
          inputs: of the program.
          arrays: what reads take: blocks, or tables whose last axis is read at the
            index that the program computed.
          tanh: a backend's own, of blocks of float32; None for JAX's.
        """

        def read(step: Step, index: list):
            found = arrays[step.params[0]]
            found = take(found, _place(step, index[0])) if index else found
            return as_dtype(found, step.dtype)

        def rule(step: Step, args: list):
            is_block = len(np.shape(args[0])) > 1 and 1 not in np.shape(args[0])[-2:]
            if is_block and tanh and (step.name, step.dtype) == ("tanh", "float32"):
                return tanh(args[0])
            return step.bound(*args)

        return compared_by_sign(self).run(inputs, read, rule)

    def found(self, inputs: Sequence, arrays: Sequence) -> list[jax.Array]:
        """What each read finds, as `on_blocks` does."""
        first = len(self.inputs)
        numbers = [i + first for i, x in enumerate(self.steps) if x.primitive is None]
        return only_live(self, numbers).on_blocks(inputs, arrays)

    def asks(self, *names: str) -> bool:
        """Whether some step, or an output, takes one of these inputs."""
        own = {i for i, x in enumerate(self.inputs) if x in names}
        taken = [x for step in self.steps for x in step.args] + list(self.outputs)
        return any(x in own for x in taken)

    def places(self, number: int, inputs: Sequence, arrays: Sequence):
        """Which elements of a table the pairs of a block read; None of no table."""
        step = self.reads[number]
        if not step.args:
            return None
        (found,) = only_live(self, step.args).on_blocks(inputs, arrays)
        return _place(step, found)

    def zero(self, number: int) -> int | None:
        """Of an array of distances, the place of 0; None of any other."""
        params = self.reads[number].params
        return params[1] if len(params) > 1 else None

    def depends(
        self, reads: Sequence[frozenset[str]] = (), *, by_index: bool = True
    ) -> list[frozenset[str]]:
        """The names of the inputs on which each output depends.

        Args:
          reads: on what the captured arrays depend, beside indices of reads.
          by_index: whether what is read depends on what its indices do.
        """
        nothing: frozenset[str] = frozenset()

        def read(step: Step, index: list):
            own = reads[step.params[0]] if reads else nothing
            return functools.reduce(operator.or_, index if by_index else [], own)

        def rule(_, args: list):
            return functools.reduce(operator.or_, args, nothing)

        def named(x):
            return x if isinstance(x, frozenset) else nothing

        names = [frozenset([name]) for name in self.inputs]
        found = self.run(
            names,
            lambda step, args: read(step, list(map(named, args))),
            lambda step, args: rule(step, list(map(named, args))),
        )
        return list(map(named, found))

    @property
    def operations(self) -> frozenset[str]:
        """What a kernel must have: primitives, and what is unusual, in words."""
        return frozenset().union(*map(_operations, self.steps))

    def words(self, arrays: Sequence) -> str:
        """What it is, for a reader.

        Args:
          arrays: what reads take, `Named`.
        """
        count = sum(step.primitive is not None for step in self.steps)
        found = [f"{count} operations for a pair"]
        for step, x in zip(self.reads, arrays, strict=True):
            along = ", ".join(map(str, x.axes[: len(x.axes) - len(step.args)]))
            kind = f"a table of {x.shape[-1]}" if step.args else "an array"
            if len(step.params) > 1:
                kind = "an array of all distances q - kv, made before the kernels,"
            found.append(f"{kind} along {along}" if along else kind.rstrip(","))
        return ", ".join(found)

    @property
    def is_total(self) -> bool:
        """Whether finite inputs and arrays are known to give no NaN."""

        def known(step: Step) -> bool:
            numbers = [x.value for x in step.args if isinstance(x, Constant)]
            if step.name == "mul":
                return len(numbers) > 0 and bool(np.all(np.isfinite(numbers)))
            if step.name in ("div", "rem"):
                return isinstance(step.args[1], Constant) and numbers[-1] != 0
            if step.name == "integer_pow":
                return dict(step.params)["y"] >= 0
            return step.name in _TOTAL.split() or step.dtype in ("int32", "bool")

        return all(map(known, self.steps))


def _operations(step: Step) -> set[str]:
    if step.primitive is None:
        is_plain = step.dtype in _PLAIN_DTYPES or step.dtype in _FLOATS
        found = {"read"} if is_plain else {f"arrays of {step.dtype}"}
        return {*found, TABLES} if step.args else found
    found = {step.name}
    if step.name == "rem" and step.dtype not in _PLAIN_DTYPES[:2]:
        found = {FLOAT_REMAINDERS}
    if step.dtype not in _PLAIN_DTYPES:
        found.add(f"arithmetic in {step.dtype}")
    if all(isinstance(x, Constant) for x in step.args):
        found.add(f"{step.name} of a constant")
    return found


def _place(step: Step, index: Any) -> Any:
    """Where a read finds its element, of an index or of distances."""
    return index.plus(step.params[1]) if isinstance(index, Distances) else index


def as_dtype(x, dtype: str):
    return x if x.dtype == jnp.dtype(dtype) else x.astype(dtype)


def live(program: Program, outputs: Sequence[Argument]) -> list[int]:
    """The numbers of the steps that these outputs need, in order."""
    first = len(program.inputs)
    needed = {x for x in outputs if not isinstance(x, Constant)}
    for number in reversed(range(len(program.steps))):
        if first + number in needed:
            args = program.steps[number].args
            needed |= {x for x in args if not isinstance(x, Constant)}
    return sorted(x - first for x in needed if x >= first)


def only_live(program: Program, outputs: Sequence[Argument]) -> Program:
    """The program with these outputs, and the steps that they need.

    Captured arrays keep their numbers.
    """
    first = len(program.inputs)
    new: dict[int, int] = {i: i for i in range(first)}
    steps: list[Step] = []
    for number in live(program, outputs):
        new[first + number] = first + len(steps)
        step = program.steps[number]
        steps.append(step._replace(args=renumbered(step.args, new)))
    return Program(program.inputs, tuple(steps), renumbered(outputs, new))


@functools.lru_cache(maxsize=1024)
def compared_by_sign(program: Program) -> Program:
    """The same with x <= y and -x <= y in place of |x| <= y, of integers.

    For the lowest integer, too, whose absolute value is itself. XLA writes |x| as
    max(x, -x), joins two such comparisons to one with the larger number, and of that
    ptxas before CUDA 13.4 loses the sign on Hopper and Blackwell (`build.Build`).
    """
    first = len(program.inputs)
    new: dict[int, int] = {i: i for i in range(first)}
    steps: list[Step] = []

    def add(step: Step) -> int:
        steps.append(step)
        return first + len(steps) - 1

    def moved(x: Argument) -> Argument:
        return x if isinstance(x, Constant) else new[x]

    def by_sign(step: Step, side: int, absolute: Step) -> Step:
        """Of a comparison with |x| at that side."""
        x = moved(absolute.args[0])
        opposite = add(Step(jax.lax.neg_p, (), (x,), absolute.dtype))
        other = step.args[1 - side]
        args = [(y, other) if side == 0 else (other, y) for y in (x, opposite)]
        each = tuple(add(step._replace(args=pair)) for pair in args)
        is_bound = (step.name in ("le", "lt")) == (side == 0)  # from above
        return Step(jax.lax.and_p if is_bound else jax.lax.or_p, (), each, "bool")

    for number, step in enumerate(program.steps):
        found = step._replace(args=tuple(map(moved, step.args)))
        if step.name in ("le", "lt", "ge", "gt"):
            absolutes = [made_by(program, x, "abs") for x in step.args]
            for side, absolute in enumerate(absolutes):
                if absolute is not None and absolute.dtype.startswith("int"):
                    found = by_sign(found, side, absolute)
                    break  # the other side is of the comparisons that this makes
        new[first + number] = add(found)
    outputs = tuple(map(moved, program.outputs))
    changed = dataclasses.replace(program, steps=tuple(steps), outputs=outputs)
    if len(steps) == len(program.steps):
        return program
    return compared_by_sign(only_live(changed, outputs))


def made_by(program: Program, value: Argument, *names: str) -> Step | None:
    """The step that makes a value, if it has one of these names."""
    first = len(program.inputs)
    if isinstance(value, Constant) or value < first:
        return None
    step = program.steps[value - first]
    return step if step.name in names else None


def compact(program: Program) -> tuple[Program, list[int]]:
    """The program with live steps alone, and which captured arrays it still reads.

    These have the numbers 0, 1 and so on in the new program.
    """
    found = only_live(program, program.outputs)
    kept = [step.params[0] for step in found.reads]
    order = {number: i for i, number in enumerate(kept)}
    steps = (
        x._replace(params=(order[x.params[0]], *x.params[1:]))
        if x.primitive is None
        else x
        for x in found.steps
    )
    return dataclasses.replace(found, steps=tuple(steps)), kept


def renumbered(args: Sequence[Argument], new: Mapping[int, int]):
    return tuple(x if isinstance(x, Constant) else new[x] for x in args)
