"""Reads of a traced program, bound to operands.

What an index says decides how an array is read. In the order in which they are tried:

| each index is | the operand is |
| --- | --- |
| b, h, q or kv | the array, with named axes |
| computed of b, h and one of q and kv | what is found for all rows, or all keys |
| computed of b, h and q - kv | what is found for all distances (`tables.Distances`) |
| computed of q and kv, of few pairs | what is found for all, if it has a gradient |
| any other | a table, which programs read at the places that they compute |

XLA finds it before the kernel; gradients go the same way back (`tables.read`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.axes import (
    Named,
    is_whole,
    undivided,
    varying_alike,
    whole_axis,
)
from pallas_kernels.core.pointwise import tables
from pallas_kernels.core.pointwise.program import (
    DISTANCE,
    PRODUCT,
    Argument,
    Constant,
    Program,
    Step,
    compact,
    only_live,
    renumbered,
)
from pallas_kernels.core.pointwise.trace import Traced

# Windows of an image and the like: an array of all of them is small.
FEW_PAIRS = 2**16


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


class Positions(NamedTuple):
    """What the indices of a function may be, in a call.

    Attributes:
      places: of `INDICES`.
      pairs: of the keys, for arrays that q indexes too.
      distances: all that are between a query and a key, along `t`, as int32.
      zero: the place among them of rows with the same number.
      count: how many pairs there are of a head, if one device has them all.
    """

    places: Mapping[str, Place]
    pairs: Place
    distances: Named
    zero: int
    count: int | None


@dataclasses.dataclass(frozen=True)
class Bound:
    """A program whose reads take operands.

    Attributes:
      program: a read has no index, or one, of a table. Its last input is `DISTANCE`.
      arrays: what reads take.
      reads: which of the reads of the traced program each array is.
    """

    program: Program
    arrays: tuple[Named, ...]
    reads: tuple[int, ...]


def bind(traced: Traced, positions: Positions, *, fixed: bool) -> Bound:
    """Binds the reads of a program.

    Args:
      traced: of the function.
      positions: of the call.
      fixed: whether captured arrays have no gradients.
    """
    program = traced.program
    reads = _Reads(traced, positions, fixed)
    distance = len(program.inputs)
    first = distance + 1
    new: dict[int, int] = {i: i for i in range(distance)}
    steps: list[Step] = []
    arrays: list[Named] = []

    def add(step: Step) -> int:
        steps.append(step)
        return first + len(steps) - 1

    for number, step in enumerate(program.steps):
        args = renumbered(step.args, new)
        if step.primitive is None:
            found, tabled, zero = reads.operand(step)
            index = (_flat(tabled, args, reads.shape(step), add),) if tabled else ()
            params: tuple[int, ...] = (len(arrays),)
            if zero is not None:
                index, params = (distance,), (*params, zero)
            step = Step(None, params, index, step.dtype)
            arrays.append(found)
        else:
            step = step._replace(args=args)
        new[distance + number] = add(step)
    outputs = renumbered(program.outputs, new)
    inputs = (*program.inputs, DISTANCE)
    bound, kept = compact(Program(inputs, tuple(steps), outputs))
    return Bound(bound, tuple(arrays[i] for i in kept), tuple(kept))


def _flat(tabled: Sequence[int], args, shape, add: Callable) -> Argument:
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
            product = jax.lax.mul_p, tuple(PRODUCT.items())
            rows = add(Step(*product, (flat, size), "int32"))
            place = add(Step(jax.lax.add_p, (), (rows, place), "int32"))
        flat = place
    assert flat is not None
    return flat


class _Operand(NamedTuple):
    """What a read takes.

    Attributes:
      array: the operand.
      tabled: the axes of the captured array that it reads at a computed index.
      zero: of an array of distances, the place of distance 0; else None.
    """

    array: Named
    tabled: Sequence[int] = ()
    zero: int | None = None


class _Reads:
    """Makes the operand of each read."""

    def __init__(self, traced: Traced, positions: Positions, fixed: bool):
        self._traced, self._program, self._fixed = traced, traced.program, fixed
        self._positions = positions

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

    def operand(self, step: Step) -> _Operand:
        """What a read takes."""
        array, names = self._array(step), self._names(step)
        kept = [i for i, x in enumerate(step.args) if not isinstance(x, Constant)]
        if len(kept) < array.ndim:
            array = undivided(array)
        for axis in reversed(range(array.ndim)):
            index = step.args[axis]
            if isinstance(index, Constant):
                at = int(np.clip(index.value, 0, array.shape[axis] - 1))
                array = jax.lax.index_in_dim(array, at, axis, keepdims=False)
        names = [names[i] for i in kept]
        if None not in names and len(set(names)) == len(names):
            found = self._by_name(array, names)
            if found is not None:
                return _Operand(Named(*found))
        array = undivided(array)
        lead = [
            i for i, x in enumerate(names) if x in ("b", "h") and x not in names[:i]
        ]
        rest = [i for i in range(len(names)) if i not in lead]
        sizes = [array.shape[i] for i in lead]
        array = jnp.transpose(array, (*lead, *rest)).reshape(*sizes, -1)
        found = self._by_name(array, [names[i] for i in lead])
        assert found is not None
        array, axes = found
        table = Named(array, (*axes, whole_axis(array.shape[-1])))
        return self._of_table(step, table, [kept[i] for i in rest])

    def _of_table(self, step: Step, table: Named, tabled: list[int]) -> _Operand:
        """A table, or what is found in it beforehand."""
        live = only_live(self._program, [step.args[i] for i in tabled])
        depends, positions = frozenset().union(*live.depends()), self._positions
        own = {x: positions.places[x].numbers for x in live.inputs if x in depends}
        if not {"q", "kv"} <= depends:
            return _Operand(self._found(step, table, tabled, live, own))
        if not self._fixed and _is_of_distance(live):
            own |= {"q": positions.distances, "kv": Named(jnp.int32(0), ())}
            found = self._found(step, table, tabled, live, own)
            name = whole_axis(positions.distances.shape[-1])
            return _Operand(found.renamed("t", name), zero=positions.zero)
        has_gradient = not self._fixed and jnp.issubdtype(table.dtype, jnp.floating)
        if has_gradient and positions.count and positions.count <= FEW_PAIRS:
            return _Operand(self._found(step, table, tabled, live, own))
        return _Operand(table, tabled)

    def _by_name(self, array: jax.Array, names: Sequence):
        """An array whose first indices are these inputs, each once; their axes' names.

        None if it takes a gather.
        """
        axes: tuple[str, ...] = ()
        is_pair = {"q", "kv"} <= set(names)
        for axis, name in reversed(list(enumerate(names))):
            place = self._positions.places[name]
            place = self._positions.pairs if name == "kv" and is_pair else place
            found = place.own(array, axis)
            if found is None:
                return None
            array, axes = found, (*place.axes, *axes)
        return array, axes

    def _found(
        self,
        step: Step,
        table: Named,
        tabled: list[int],
        live: Program,
        own: Mapping[str, Named],
    ) -> Named:
        """What is read, for all of the rows and heads on which the indices depend.

        Args:
          tabled: the axes of the array that the table joins.
          live: the program of their indices.
          own: its inputs.
        """
        names = (a for x in (table, *own.values()) for a in x.axes if not is_whole(a))
        names = tuple(dict.fromkeys(names))
        rows = tuple(a for a in ("t", "s") if a in names)
        axes = (*(a for a in names if a not in rows), *rows)
        inputs = [own[x].to(axes) if x in own else None for x in live.inputs]

        def read(step: Step, index: list):
            return undivided(self._array(step)).at[tuple(index)].get(mode="clip")

        flat = jnp.zeros([1] * len(axes), jnp.int32)
        index = live.run(inputs, read, _bound_alike)
        for place, axis in zip(index, tabled, strict=True):
            size = self.shape(step)[axis]
            end = min(size - 1, jnp.iinfo(place.dtype).max)
            flat = flat * size + jnp.clip(place, 0, end).astype(jnp.int32)
        return Named.broadcast(tables.read(table.to(axes), flat), axes)


def _bound_alike(step: Step, args: Sequence) -> jax.Array:
    """A step of arrays of which some may vary along mesh axes (`shard_map`)."""
    if any(jax.typeof(x).manual_axis_type.varying for x in args):
        args = varying_alike(tuple(map(jnp.asarray, args)))
    return step.bound(*args)


def _is_of_distance(program: Program) -> bool:
    """Whether a program asks for q and kv only in the difference of the two."""
    rows = {program.inputs.index(name) for name in ("q", "kv")}
    differs = (x for x in program.steps if x.name == "sub" and {*x.args} == rows)
    others = {*program.steps} - {*differs}
    taken = {x for step in others for x in step.args} | {*program.outputs}
    return not rows & taken


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
