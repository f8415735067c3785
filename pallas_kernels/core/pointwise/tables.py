"""Arrays that programs read at computed places, and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.axes import Axes, Named, is_whole, summed_to


def take(table: jax.Array, index: jax.Array) -> jax.Array:
    """The elements of the last axis at `index`, which is clamped.

    Args:
      table: [*axes, size].
      index: int32, broadcasts against `axes`.
    """
    lead = table.shape[:-1]

    def along(axis: int) -> jax.Array:
        shape = [n if i == axis else 1 for i, n in enumerate(lead)]
        return jax.lax.broadcasted_iota(jnp.int32, shape, axis)

    return table.at[(*map(along, range(len(lead))), index)].get(mode="clip")


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
    pairs = np.broadcast_shapes(value.shape[n:], at.shape[n:])
    value, at = (
        jnp.broadcast_to(y, (*y.shape[:n], *pairs)).reshape(*y.shape[:n], -1)
        for y in (value, at)
    )
    found = summed_by_place(value, at, int(str(whole)[1:]))
    return Named(found, (*lead, whole)).to(axes)


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
    shape = np.broadcast_shapes(places.shape, x.shape)
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
