"""From a Python function to a `Program`: its jaxpr of scalars, made flat.

Jitted and custom functions are walked into, equal steps are merged, and what is known
of constants and of numbers that are not negative is used: it folds JAX's wrap of
negative indices, so that `x[h, q]` is seen to be indexed by h and q.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.pointwise.build import Build
from pallas_kernels.core.pointwise.program import (
    INDICES,
    SCORE,
    Constant,
    Program,
    live,
    only_live,
)
from pallas_kernels.core.pointwise.walk import NotPointwise, Part, Walk


class _Evaluate(Walk):
    """Runs the steps, with given numbers in place of reads."""

    def __init__(self, reads: Sequence):
        self._reads = iter(reads)

    def number(self, value: Any, dtype):
        return np.asarray(value, dtype)

    def emit(self, primitive, params: dict, args: Sequence, dtype):
        del dtype
        return primitive.bind(*args, **params)

    def read(self, part: Part):
        del part
        return next(self._reads)

    def special(self, equation, args: Sequence):
        """Custom derivatives of numbers are kept."""
        if not equation.primitive.name.startswith("custom_"):
            return None
        if any(isinstance(x, Part | list) for x in args):
            return None
        found = equation.primitive.get_bind_params(equation.params)
        functions, params = found if isinstance(found, tuple) else ((), found)
        found = equation.primitive.bind(*functions, *args, **params)
        return found if equation.primitive.multiple_results else [found]


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a function is.

    Attributes:
      program: of numbers; reads have the indices of all axes of their arrays.
      captured: the arrays, as the function closed over them.
      closed: its jaxpr.
      natural: the names of the inputs that are not negative.
      read_order: for each read that the jaxpr has, which read of the program it is, or
        None of one that nothing needs; and the dtype.
    """

    program: Program
    captured: tuple
    closed: Any
    natural: frozenset[str]
    read_order: tuple[tuple[int | None, Any], ...]

    @property
    def keeps_own_key(self) -> bool:
        """Whether a mask is True of q = kv, whatever the rest, as far as its text says.

        The steps are made once more, of one number in place of both.
        """
        counted = [i for i, x in enumerate(INDICES) if x in self.natural]
        dtypes = [x.aval.dtype for x in self.closed.jaxpr.invars]
        build = Build(dtypes, counted, self.closed.consts, widens=True)
        query = INDICES.index("q")
        of_one = [query if x == "kv" else i for i, x in enumerate(INDICES)]
        return build.run(self.closed, of_one) == [Constant.of(np.True_)]

    def derivative(self, score_dtype) -> Program:
        """The derivatives by the score and by each read of a float.

        Its inputs are those of the function, then what the reads find (`r0`, ...).
        """
        reads, floats = self.program.reads, float_reads(self.program)

        def gradients(score, b, h, q, kv, *found):
            def value(score, *chosen):
                own = [*found]
                for i, x in zip(floats, chosen, strict=True):
                    own[i] = x
                values = [
                    jnp.zeros((), dtype) if i is None else own[i]
                    for i, dtype in self.read_order
                ]
                walk = _Evaluate(values)
                return walk.run(self.closed, [score, b, h, q, kv])[0]

            _, pull = jax.vjp(value, score, *(found[i] for i in floats))
            return pull(jnp.ones((), score_dtype))

        structs = [jax.ShapeDtypeStruct((), jnp.dtype(x.dtype)) for x in reads]
        inputs = (SCORE, *INDICES, *(f"r{i}" for i in range(len(reads))))
        closed = jax.make_jaxpr(gradients)(*_scalars(score_dtype), *structs)
        return _built(closed, inputs, self.natural)[0]


def float_reads(program: Program) -> list[int]:
    """The numbers of the reads that have derivatives."""
    return [
        i
        for i, step in enumerate(program.reads)
        if jnp.issubdtype(jnp.dtype(step.dtype), jnp.floating)
    ]


def _scalars(score_dtype=None) -> list[jax.ShapeDtypeStruct]:
    """What a function takes."""
    dtypes = [jnp.int32] * len(INDICES)
    dtypes = dtypes if score_dtype is None else [score_dtype, *dtypes]
    return [jax.ShapeDtypeStruct((), x) for x in dtypes]


def _built(closed, inputs: tuple[str, ...], natural: frozenset[str], *, widens=True):
    """The program of a jaxpr, and `Traced.read_order`."""
    dtypes = [x.aval.dtype for x in closed.jaxpr.invars]
    counted = [i for i, x in enumerate(inputs) if x in natural]
    build = Build(dtypes, counted, closed.consts, widens=widens)
    outputs = build.run(closed, list(range(len(inputs))))
    whole = Program(inputs, tuple(build.steps), tuple(outputs))
    kept = [i for i in live(whole, outputs) if whole.steps[i].primitive is None]
    if any(narrow in kept and wide in kept for narrow, wide in build.wide.items()):
        return _built(closed, inputs, natural, widens=False)
    numbers = {step: i for i, step in enumerate(kept)}
    steps = [
        build.wide[i] if build.wide.get(i) in kept else i for i in build.read_order
    ]
    order = ((numbers.get(i), jnp.dtype(whole.steps[i].dtype)) for i in steps)
    return only_live(whole, outputs), tuple(order)


def trace(
    function: Callable, score_dtype=None, natural: frozenset[str] = frozenset()
) -> Traced:
    """Traces a function of one pair.

    Args:
      function: of (score, b, h, q, kv), or without a score of the rest.
      score_dtype: of the score, or None without one.
      natural: the names of the inputs that are not negative.

    Raises:
      NotPointwise: if it is not one of numbers alone, or of another result.
    """
    scalars = _scalars(score_dtype)
    inputs = INDICES if score_dtype is None else (SCORE, *INDICES)
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*scalars)
    wanted = jnp.dtype(jnp.bool_ if score_dtype is None else score_dtype)
    leaves = jax.tree.leaves(shape)
    if len(leaves) != 1 or not hasattr(shape, "dtype"):
        raise NotPointwise(f"must return one {wanted.name} scalar, got {shape!r}")
    if shape.shape != () or shape.dtype != wanted:
        hint = "" if shape.shape else f": convert it, as x.astype({wanted.name!r})"
        raise NotPointwise(
            f"must return a {wanted.name} scalar, got {shape.dtype.name} of shape "
            f"{shape.shape}{hint}"
        )
    program, order = _built(closed, inputs, natural)
    return Traced(program, tuple(closed.consts), closed, natural, order)
