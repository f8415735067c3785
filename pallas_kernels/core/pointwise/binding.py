"""Reads of a traced program, bound to operands: by named axes, or as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.axes import Named, whole_axis
from pallas_kernels.core.pointwise.program import (
    Argument,
    Constant,
    Program,
    Step,
    compact,
    only_live,
    renumbered,
)
from pallas_kernels.core.pointwise.trace import Traced


@dataclasses.dataclass(frozen=True)
class Place:
    """How an index of a function lies in a call.

    Attributes:
      axes: the names of the call's axes that it counts: several of a batch, row-major.
      numbers: int32, the index at each place of these axes, and perhaps of others.
      own: of an array and one of its axes, the elements at the index, with `axes` in
        place of that axis; None if that takes a gather. What lies beyond is clamped.
    """

    axes: tuple[str, ...]
    numbers: Named
    own: Callable[[jax.Array, int], jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Bound:
    """A program whose reads take operands.

    Attributes:
      program: a read has no index, or one, of a table.
      arrays: what reads take.
      reads: which of the reads of the traced program each array is.
    """

    program: Program
    arrays: tuple[Named, ...]
    reads: tuple[int, ...]


def bind(traced: Traced, places: Mapping[str, Place], pairs: Place, *, fixed: bool):
    """Binds the reads of a program.

    An array is read by named axes if each index is b, h, q or kv. One whose indices are
    computed without either q or kv is read beforehand, if it has no gradient. All other
    reads are of tables.

    Args:
      traced: of the function.
      places: of `INDICES`.
      pairs: of the keys, for arrays that q indexes too.
      fixed: whether captured arrays have no gradients.
    """
    program = traced.program
    reads = _Reads(traced, places, pairs, fixed)
    first = len(program.inputs)
    new: dict[int, int] = {i: i for i in range(first)}
    steps: list[Step] = []
    arrays: list[Named] = []

    def add(step: Step) -> int:
        steps.append(step)
        return first + len(steps) - 1

    for number, step in enumerate(program.steps):
        args = renumbered(step.args, new)
        if step.primitive is None:
            found, tabled = reads.operand(step)
            index = (_flat(tabled, args, reads.shape(step), add),) if tabled else ()
            step = Step(None, (len(arrays),), index, step.dtype)
            arrays.append(found)
        else:
            step = step._replace(args=args)
        new[first + number] = add(step)
    outputs = renumbered(program.outputs, new)
    bound, kept = compact(Program(program.inputs, tuple(steps), outputs))
    return Bound(bound, tuple(arrays[i] for i in kept), tuple(kept))


def _flat(tabled: list[int], args, shape, add: Callable) -> Argument:
    """The steps that make one index of those of several axes, each clamped."""
    flat: Argument | None = None
    int32 = jnp.dtype(jnp.int32)
    for axis in tabled:
        end = Constant.of(np.int32(shape[axis] - 1))
        zero = Constant.of(np.int32(0))
        convert = (("new_dtype", int32), ("sharding", None), ("weak_type", False))
        place = args[axis]
        if not isinstance(place, Constant):
            wide = Step(jax.lax.convert_element_type_p, convert, (place,), "int32")
            place = add(wide)
        place = add(Step(jax.lax.clamp_p, (), (zero, place, end), "int32"))
        if flat is not None:
            size = Constant.of(np.int32(shape[axis]))
            rows = add(Step(jax.lax.mul_p, (), (flat, size), "int32"))
            place = add(Step(jax.lax.add_p, (), (rows, place), "int32"))
        flat = place
    assert flat is not None
    return flat


class _Reads:
    """Makes the operand of each read."""

    def __init__(self, traced: Traced, places, pairs: Place, fixed: bool):
        self._traced, self._program = traced, traced.program
        self._places, self._pairs, self._fixed = places, pairs, fixed

    def _array(self, step: Step) -> jax.Array:
        return jnp.asarray(self._traced.captured[step.params[0]])

    def shape(self, step: Step) -> tuple[int, ...]:
        return tuple(self._traced.captured[step.params[0]].shape)

    def _names(self, step: Step) -> list[str | None]:
        """Of each axis, the input that is its index, or None."""
        inputs = self._program.inputs
        return [
            inputs[x] if not isinstance(x, Constant) and x < len(inputs) else None
            for x in step.args
        ]

    def operand(self, step: Step) -> tuple[Named, list[int]]:
        """What a read takes, and the axes that it reads at a computed index."""
        array, names = self._array(step), self._names(step)
        kept = [i for i, x in enumerate(step.args) if not isinstance(x, Constant)]
        for axis in reversed(range(array.ndim)):
            index = step.args[axis]
            if isinstance(index, Constant):
                at = int(np.clip(index.value, 0, array.shape[axis] - 1))
                array = jax.lax.index_in_dim(array, at, axis, keepdims=False)
        names = [names[i] for i in kept]
        if None not in names and len(set(names)) == len(names):
            found = self._by_name(array, names)
            if found is not None:
                return Named(*found), []
        live = only_live(self._program, step.args)
        depends = frozenset().union(*live.depends())
        has_gradient = not self._fixed and jnp.issubdtype(array.dtype, jnp.floating)
        if not {"q", "kv"} <= depends and not has_gradient:
            return self._gathered(step, live, depends), []
        lead = [
            i for i, x in enumerate(names) if x in ("b", "h") and x not in names[:i]
        ]
        rest = [i for i in range(len(names)) if i not in lead]
        sizes = [array.shape[i] for i in lead]
        array = jnp.transpose(array, (*lead, *rest)).reshape(*sizes, -1)
        found = self._by_name(array, [names[i] for i in lead])
        assert found is not None
        array, axes = found
        return Named(array, (*axes, whole_axis(array.shape[-1]))), [
            kept[i] for i in rest
        ]

    def _by_name(self, array: jax.Array, names: Sequence):
        """An array whose first indices are these inputs, each once; their axes' names.

        None if it takes a gather.
        """
        axes: tuple[str, ...] = ()
        is_pair = {"q", "kv"} <= set(names)
        for axis, name in reversed(list(enumerate(names))):
            place = self._pairs if name == "kv" and is_pair else self._places[name]
            found = place.own(array, axis)
            if found is None:
                return None
            array, axes = found, (*place.axes, *axes)
        return array, axes

    def _gathered(self, step: Step, live: Program, depends: frozenset[str]) -> Named:
        """What is read, for all of the rows and heads on which the indices depend."""
        own = {x: self._places[x].numbers for x in live.inputs if x in depends}
        axes = tuple(dict.fromkeys(a for x in own.values() for a in x.axes))
        axes = tuple(a for a in axes if a not in ("t", "s")) + tuple(
            a for a in axes if a in ("t", "s")
        )
        inputs = [own[x].to(axes) if x in own else None for x in live.inputs]

        def read(step: Step, index: list):
            return self._array(step).at[tuple(index)].get(mode="clip")

        index = live.run(inputs, read, lambda step, args: step.bound(*args))
        found = self._array(step).at[tuple(index)].get(mode="clip")
        return Named.broadcast(found, axes)


def of_bound(derivative: Program, bound: Bound, traced: Traced, floats: Sequence[int]):
    """The derivatives by the score and by those arrays of a bound program with them.

    Its inputs are those of the function, then what the bound reads find.

    Args:
      derivative: of the traced function (`Traced.derivative`).
      bound: of the function.
      floats: the reads of the traced program that have derivatives.
    """
    first = len(traced.program.inputs)
    wanted = [0, *(1 + i for i, x in enumerate(floats) if x in bound.reads)]
    live = only_live(derivative, [derivative.outputs[i] for i in wanted])
    count = first + len(bound.reads)
    new = {i: i for i in range(first)}
    new |= {first + x: first + i for i, x in enumerate(bound.reads)}
    moved = len(live.inputs) - count
    new |= {
        len(live.inputs) + i: len(live.inputs) + i - moved
        for i in range(len(live.steps))
    }
    names = tuple(live.inputs[:first]) + tuple(f"r{i}" for i in range(len(bound.reads)))
    steps = tuple(x._replace(args=renumbered(x.args, new)) for x in live.steps)
    return Program(names, steps, renumbered(live.outputs, new))
