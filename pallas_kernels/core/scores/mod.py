"""A caller's function of the score (`score_mod`, as FlexAttention has it)."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.flash2 import Scores
from pallas_kernels.core.pointwise import DISTANCE, SCORE, Program, float_reads
from pallas_kernels.core.pointwise.program import made_by, only_live
from pallas_kernels.core.pointwise.tables import Distances, Taken, take
from pallas_kernels.core.scores.base import Setting, Term, TermTraits, term_dataclass


@term_dataclass(data=("arrays", "entry", "head"), meta=("program", "derivative"))
class ScoreMod(Term):
    """s' = f(s, b, h, q, kv), with the arrays that f captures.

    The derivative is used only where the cotangent is not 0, and so only where the
    probability is not: of a masked pair it may be NaN.

    Attributes:
      arrays: what the program reads: against the block, or tables.
      entry, head: the numbers of the batch entry and of the query head; None where they
        are not asked for.
      program: of the score and its place (static).
      derivative: of the same, and what the reads find: the derivatives by the score and
        by each array of floats (static).
    """

    arrays: tuple[Any, ...]
    entry: Any
    head: Any
    program: Program
    derivative: Program
    arguments: ClassVar = {"arrays": "an array that score_mod captures"}

    @property
    def traits(self) -> TermTraits:
        return TermTraits(
            is_positional=self._is_positional,
            is_absolute=self._is_positional,
            may_mask=True,
            keeps_lowest=False,
            is_additive=False,
            is_heavy=True,
            maximum_may_grow=self._counts_positions,
        )

    @functools.cached_property
    def _counts_positions(self) -> bool:
        """Whether positions decide the value, and not only what is read."""
        (names,) = self.program.depends(by_index=False)
        return not names.isdisjoint(("q", "kv"))

    @functools.cached_property
    def _is_positional(self) -> bool:
        asked = self.program.asks("q", "kv", DISTANCE)
        return asked or self.derivative.asks("q", "kv")

    @property
    def kept(self):
        return "argument" if self.derivative.asks(SCORE) else "nothing"

    @property
    def operations(self) -> frozenset[str]:
        return self.program.operations | self.derivative.operations

    @property
    def words(self) -> str:
        asks = "asks" if self.derivative.asks(SCORE) else "does not ask"
        found = self.program.words(self.arrays)
        return f"score_mod: {found}; its derivative {asks} for the score"

    @property
    def is_total(self) -> bool:
        """Whether it makes no NaN of finite numbers, as far as is known."""
        return self.program.is_total

    @property
    def operands(self) -> dict[str, Any]:
        return {self._name(i): self.arrays[i] for i in self._floats}

    @property
    def _floats(self) -> list[int]:
        return float_reads(self.program)

    @staticmethod
    def _name(number: int) -> str:
        return f"score_mod {number}"

    def _inputs(self, score, setting: Setting) -> list:
        positions: tuple = (None, None)
        if self._is_positional:
            assert setting.positions is not None
            positions = setting.positions()
        return [score, self.entry, self.head, *positions]

    def _bound_inputs(self, score, setting: Setting) -> list:
        """Those of the program, whose reads may ask for distances."""
        distances = None
        if self.program.asks(DISTANCE):
            assert setting.distances is not None
            distances = setting.distances()
        return [*self._inputs(score, setting), distances]

    def apply(self, scores: Scores, setting: Setting) -> Scores:
        x = scores.value
        inputs, arrays = self._bound_inputs(x, setting), self.arrays
        if setting.kept is not None:
            steps = self.program.reads
            own = [y for y, step in zip(arrays, steps, strict=True) if not step.args]
            shape = jnp.broadcast_shapes(*map(np.shape, (x, setting.kept, *own)))
            inputs = [_of_kept(y, setting.kept, shape) for y in inputs]
            arrays = [
                y if step.args else _of_kept(y, setting.kept, shape)
                for y, step in zip(arrays, steps, strict=True)
            ]
        (found,) = self.program.on_blocks(inputs, arrays, setting.tanh)
        # An array may be mapped (`jax.vmap`) where the product is not.
        shape = jnp.broadcast_shapes(x.shape, np.shape(found))
        found = jnp.broadcast_to(found, shape)
        # A score of -inf has no tangent, whatever the function's derivative is.
        return Scores(jnp.where(found == -jnp.inf, -jnp.inf, found), 1.0)

    def masks(self, shape: tuple[int, ...]) -> None:
        del shape  # what the function gives is a mask already

    def _derivatives(self, kept: Scores | None, setting: Setting) -> list:
        score = None if kept is None else kept.value
        inputs, reads = self._inputs(score, setting), []
        if self._reads_again:
            bound = self._bound_inputs(score, setting)
            reads = self.program.found(bound, self.arrays)
        inputs += reads if reads else [None] * len(self.arrays)
        return self.derivative.on_blocks(inputs, (), setting.tanh)

    @functools.cached_property
    def _reads_again(self) -> bool:
        return self.derivative.asks(*self.derivative.inputs[5:])

    def pull(self, ds, kept, setting, may_mask):
        return _product(ds, self._derivatives(kept, setting)[0])

    def pull_operand(self, name, ds, kept, setting):
        number = 1 + list(self.operands).index(name)
        return _product(ds, self._derivatives(kept, setting)[number])

    def places(self, name: str, setting: Setting):
        inputs = self._bound_inputs(None, setting)
        return self.program.places(self._number(name), inputs, self.arrays)

    def at(self, distances: Callable[[], Distances]) -> ScoreMod:
        if not self.program.asks(DISTANCE):
            return self
        found, arrays = distances(), list(self.arrays)
        for i, x in enumerate(arrays):
            zero = self.program.zero(i)
            if zero is not None:
                arrays[i] = Taken(take(x, found.plus(zero)))
        return dataclasses.replace(self, arrays=tuple(arrays))

    @functools.cached_property
    def _addend(self) -> Program | None:
        """Of s + g, the program of g if it does not ask for s; else None."""
        step = made_by(self.program, self.program.outputs[0], "add")
        if step is None or 0 not in step.args:
            return None
        other = step.args[1 - step.args.index(0)]
        found = only_live(self.program, (other,))
        return None if found.asks(SCORE) else found

    @property
    def may_be_level(self) -> bool:
        if self._addend is None:
            return False
        (names,) = self._addend.depends([frozenset(x.axes) for x in self.arrays])
        return DISTANCE in names and not names & {"q", "kv", "t", "s"}

    def level(self, distances):
        assert self._addend is not None
        place, arrays, flags = distances(), list(self.arrays), []
        for i, x in enumerate(arrays):
            zero = self.program.zero(i)
            if zero is not None:
                flag, number = x.level(place.plus(zero))
                flags.append(flag)
                arrays[i] = Taken(number)
        inputs = [None, self.entry, self.head, None, None, place]
        (found,) = self._addend.on_blocks(inputs, arrays)
        return functools.reduce(operator.and_, flags), found

    def zero(self, name: str) -> int | None:
        return self.program.zero(self._number(name))

    def _number(self, name: str) -> int:
        """Of a read."""
        return self._floats[list(self.operands).index(name)]

    def push(self, ds, tangents, kept, setting):
        by_score, *by_operand = self._derivatives(kept, setting)
        found = _product(ds, by_score)
        for name, slope in zip(self.operands, by_operand, strict=True):
            if name in tangents:
                along, places = tangents[name], self.places(name, setting)
                along = along if places is None else take(along, places)
                found = found + _product(along, slope)
        return found


def _of_kept(x: Any, kept: jax.Array, shape: tuple[int, ...]) -> Any:
    """An argument of all pairs, with that of a kept pair for each that is not kept.

    JAX's derivative of a function may be NaN where a mask drops the pair, and NaN times
    a cotangent of 0 is NaN.
    """
    if x is None:
        return None
    if isinstance(x, Distances):
        numbers = _of_kept(x.numbers(), kept, shape)
        return Distances(None, lambda: numbers, x.order)
    whole, kept = (jnp.broadcast_to(y, shape) for y in (x, kept))
    return jnp.where(kept, whole, whole.reshape(-1)[jnp.argmax(kept)])


def _product(ds: jax.Array, slope) -> jax.Array:
    """ds times a derivative, of which NaN and infinity do not count where ds is 0."""
    if isinstance(slope, np.ndarray):
        return ds if slope == 1 else ds * slope
    # Not the product's zero: that would have no tangent along ds.
    is_finite = jnp.abs(slope) < jnp.inf
    return ds * jnp.where((ds != 0.0) | is_finite, slope, 0.0)
