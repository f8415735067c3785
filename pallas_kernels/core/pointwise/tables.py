"""Arrays that programs read at computed places, and their gradients.

Where a place is computed of the distance between query and key alone, XLA reads the
array for all distances before the kernel. A program reads the result at the distance
of each pair (`Distances`): so it computes no place, its gradient is a sum along
diagonals, and what is left is a gradient of a few thousand places (`read`).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.core.axes import Axes, Named, is_whole, summed_to, varying_alike

# Elements of a table up to which a gradient takes no sorting.
_FEW = 512
# Of such a table: places that read a number at once, and numbers of a place that XLA
# adds in one kernel. It cuts a longer sum into ones of 132, each a warp's
# (98 us for 32 x 16,896 numbers and 257 places, H200, 2026-11-29, now 27: lab/125).
_AT_ONCE, _LONGEST = 4, 1 << 14
# Beyond the distances between rows: the last block of a kernel may overhang them.
OVERHANG = 256


@dataclasses.dataclass(frozen=True)
class Distances:
    """The number of the query less that of the key, of the pairs of a block.

    Attributes:
      first: that of the block's first query and first key, an int32 scalar, if both
        rows follow one another from there; else None.
      numbers: makes those of all pairs: int32, against the block.
      order: the axes of the block.
    """

    first: Any
    numbers: Callable[[], jax.Array]
    order: tuple[str, str]

    def plus(self, number: int) -> Distances:
        """The places of an array of distances, of which this one is 0."""
        first = None if self.first is None else self.first + number
        return Distances(first, lambda: self.numbers() + number, self.order)


class Table(abc.ABC):
    """An array that a kernel reads from memory at computed places."""

    @abc.abstractmethod
    def at(self, places: jax.Array | Distances) -> jax.Array:
        """The elements of its whole axis at int32 places, which it has."""

    def level(self, places: Distances) -> tuple[jax.Array, jax.Array]:
        """Whether all pairs of a block read equal elements, and one of these."""
        raise NotImplementedError(f"{type(self).__name__} does not compare elements")


@dataclasses.dataclass(frozen=True)
class Taken(Table):
    """A table of which what a block of pairs reads has been loaded."""

    block: jax.Array

    def at(self, places: jax.Array | Distances) -> jax.Array:
        del places
        return self.block


def take(table: Any, index: Any) -> jax.Array:
    """The elements of the last axis at `index`, which is clamped.

    Args:
      table: [*axes, size], or a `Table`.
      index: int32, broadcasts against `axes`; or `Distances`.
    """
    if isinstance(table, Table):
        return table.at(index)
    index = index.numbers() if isinstance(index, Distances) else index
    lead = table.shape[:-1]

    def along(axis: int) -> jax.Array:
        shape = [n if i == axis else 1 for i, n in enumerate(lead)]
        return jax.lax.broadcasted_iota(jnp.int32, shape, axis)

    return table.at[(*map(along, range(len(lead))), index)].get(mode="clip")


@jax.custom_jvp
def read(table: jax.Array, index: jax.Array) -> jax.Array:
    """As `take`, with a gradient that is summed in one order.

    Args:
      table: [*axes, size].
      index: int32, with as many axes as `axes`, each of them or the table's may be 1.
    """
    return take(table, index)


@read.defjvp
def _(primals, tangents):
    table, index = primals
    found = take(table, index)
    *lead, size = table.shape
    kept = [i for i, n in enumerate(lead) if n > 1]
    others = [i for i, n in enumerate(lead) if n == 1]

    def rows(x: jax.Array) -> jax.Array:
        x = jnp.transpose(x, (*kept, *others))
        return x.reshape(*x.shape[: len(kept)], -1)

    def summed(x: jax.Array) -> jax.Array:
        shape = [index.shape[i] if i in kept else n for i, n in enumerate(x.shape)]
        places = jnp.broadcast_to(index, shape)
        by_place = summed_by_comparison if size <= _FEW else summed_by_place
        return by_place(rows(x), rows(places), size).reshape(table.shape)

    # Its transpose: that of a gather would add in any order on a GPU.
    varying, _ = varying_alike((tangents[0], found))
    (tangent,) = jax.linear_transpose(summed, jax.typeof(found))(varying)
    return found, tangent


def of_distances(x: Named, first: jax.Array, axes: Axes) -> jax.Array:
    """What pairs add to the gradient of an array of distances.

    Args:
      x: of each pair of a block, with axes `t` and `s`.
      first: the place of its first query and first key (`Distances.first`).
      axes: of the array, one of them whole.

    Returns:
      As `gradient`.
    """
    (whole,) = (a for a in axes if is_whole(a))
    lead = tuple(a for a in axes if a != whole)
    found = diagonals(summed_to(x, (*lead, "t", "s")))
    t, s = (x.shape[x.axes.index(name)] for name in ("t", "s"))
    edge, size = t + s, int(str(whole)[1:])  # blocks may overhang the array
    zeros = jnp.zeros((*found.shape[:-1], size + 2 * edge), found.dtype)
    start = first - (s - 1) + edge
    found = jax.lax.dynamic_update_slice_in_dim(zeros, found, start, -1)
    found = jax.lax.slice_in_dim(found, edge, edge + size, axis=-1)
    return Named(found, (*lead, whole)).to(axes)


def diagonals(x: jax.Array) -> jax.Array:
    """Sums of [.., t, s] along diagonals: [.., t + s - 1], from the last column on."""
    *lead, t, s = x.shape
    # Row i of a matrix with one column more begins one place later in the flat one.
    x = jnp.pad(x[..., ::-1], [(0, 0)] * (len(lead) + 1) + [(0, t)])
    x = x.reshape(*lead, -1)[..., : t * (t + s - 1)]
    return jnp.sum(x.reshape(*lead, t, t + s - 1), axis=-2)


def of_tiles(sums: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Sums along the diagonals of a whole matrix, from those of diagonals of tiles.

    Args:
      sums: [.., diagonals, 2 b], as `diagonals` gives them and a 0, of tiles of b x b,
        from those of the first queries and last keys on.
      start: the place among the sums of the last key beside the first query.
      size: of the result.

    Returns:
      [.., size]; 0 where there is no pair.
    """
    *lead, count, width = sums.shape
    none, rows = [(0, 0)] * len(lead), width // 2
    lower, upper = sums[..., :rows], sums[..., rows:]
    sums = jnp.pad(lower, [*none, (0, 1), (0, 0)])
    sums += jnp.pad(upper, [*none, (1, 0), (0, 0)])
    sums = jnp.pad(sums.reshape(*lead, (count + 1) * rows), [*none, (size, size)])
    return jax.lax.dynamic_slice_in_dim(sums, size - start, size, -1)


def gradient(x: Named, places: Named, axes: Axes) -> jax.Array:
    """What pairs add to the gradient of a table.

    Args:
      x: of each pair.
      places: int32, where in the table each pair read, with some of the axes of x.
      axes: of the table, one of them whole.

    Returns:
      An array with these axes, of size 1 where neither x nor the places have one.
    """
    (whole,) = (a for a in axes if is_whole(a))
    lead = tuple(a for a in axes if a != whole)
    varied = tuple(a for a in x.axes if a in (*places.axes, "t", "s") and a not in lead)
    value, at = summed_to(x, (*lead, *varied)), places.to((*lead, *varied))
    n = len(lead)
    pairs = jnp.broadcast_shapes(value.shape[n:], at.shape[n:])
    value, at = (
        jnp.broadcast_to(y, (*y.shape[:n], *pairs)).reshape(*y.shape[:n], -1)
        for y in (value, at)
    )
    found = summed_by_place(value, at, int(str(whole)[1:]))
    return Named(found, (*lead, whole)).to(axes)


def summed_by_comparison(x: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """As `summed_by_place`, for few places: each number is compared with all of them.

    Args:
      x: [*axes, n], the numbers.
      places: int32 [*axes, n]; a number whose place is none of `size` is in no sum.
    """
    # XLA may not join what makes the numbers to sums that read each of them often.
    x, count = jax.lax.optimization_barrier(x), x.shape[-1]
    parts = max(1, -(-count // _LONGEST))
    rest = [(0, 0)] * (x.ndim - 1) + [(0, -count % parts)]

    def cut(x: jax.Array, filled: int) -> jax.Array:
        x = jnp.pad(x, rest, constant_values=filled)
        return x.reshape(*x.shape[:-1], parts, 1, -1)

    x, places = cut(x, 0), cut(places, -1)
    numbers = jnp.arange(size + -size % _AT_ONCE, dtype=places.dtype)
    found = [
        jnp.sum(jnp.where(places == some, x, 0), axis=-1)
        for some in numbers.reshape(_AT_ONCE, -1, 1)
    ]
    found = jax.lax.optimization_barrier(found)  # or XLA joins the parts and cuts anew
    found = [jnp.sum(y, axis=-2) for y in found]
    return jnp.concatenate(found, axis=-1)[..., :size]


def summed_by_place(x: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """For each of `size` places, the sum of the numbers that belong there.

    In one order, without atomic additions: sorted by place, then added within each.

    Args:
      x: [*axes, n], the numbers.
      places: int32 [*axes, n], where each belongs. Its axes may be 1 where those of x
        are not.

    Returns:
      [*axes, size].
    """
    places = jnp.clip(places, 0, size - 1)
    shape = jnp.broadcast_shapes(places.shape, x.shape)
    order = jnp.argsort(places, axis=-1, stable=True)
    places = jnp.take_along_axis(places, order, axis=-1)
    x = jnp.broadcast_to(x, shape)
    x = jnp.take_along_axis(x, jnp.broadcast_to(order, shape), axis=-1)
    begins = places[..., 1:] != places[..., :-1]
    lead = [(0, 0)] * (places.ndim - 1)
    begins = jnp.pad(begins, [*lead, (1, 0)], constant_values=True)

    def added(a, b):
        (a_begins, left), (b_begins, right) = a, b
        return a_begins | b_begins, jnp.where(b_begins, right, left + right)

    begins = jnp.broadcast_to(begins, shape)
    _, sums = jax.lax.associative_scan(added, (begins, x), axis=-1)
    numbers = jnp.arange(size, dtype=jnp.int32)

    def ends(row):
        return jnp.searchsorted(row, numbers, side="right").astype(jnp.int32)

    last = jnp.maximum(jnp.vectorize(ends, signature="(n)->(m)")(places) - 1, 0)
    is_met = jnp.take_along_axis(places, last, axis=-1) == numbers
    last = jnp.broadcast_to(last, (*shape[:-1], size))
    return jnp.where(is_met, jnp.take_along_axis(sums, last, axis=-1), 0)
