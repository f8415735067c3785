"""Rows gathered from their pages (`core.pages`), for backends of plain JAX."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.core import nibbles
from pallas_kernels.core.axes import (
    Axes,
    Named,
    batch_axes,
    first_of,
    fixed,
    in_pairs,
)
from pallas_kernels.core.pages import Pages
from pallas_kernels.core.spec import AttentionSpec

# Of a block that is gathered at once.
MOST_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Rows of all sequences, of which a block is gathered when it is asked for.

    Among `Named` it passes as one without axes until then.

    Attributes:
      pool: a `Named` array with axes `p` and `r`.
      pages: of `Named`.
      first, end: int32, of the rows that queries need; others are 0, whatever is there.
      entries: the axes of first and end.
      dtype: of the rows.
    """

    pool: Named
    pages: Pages
    first: Any
    end: Any
    entries: tuple[str, ...]
    dtype: Any
    axes = shape = ()

    @classmethod
    def of(cls, pool: Named, spec: AttentionSpec, size, dtype) -> Gathered:
        """The rows of an operand of a call (fields of the spec hold `Named`).

        Args:
          size: of the axes of the call.
          dtype: of the products of the call.
        """
        assert spec.pages is not None
        ranges = spec.for_ranges()
        axes = batch_axes(jax.tree.leaves(ranges))
        ranges = jax.tree.map(lambda x: x.to(axes), ranges)
        needed = ranges.keys_needed(0, size["t"], size["s"])
        shape = [size[a] for a in axes]
        first, end = (
            jnp.broadcast_to(jnp.int32(x), shape)
            for x in (needed.need_lo, needed.need_hi)
        )
        pool = _chosen(pool)
        if not {"h", "d", "hh", "dd"} & set(pool.axes):
            dtype = jnp.float32  # scales
        return cls(pool, spec.pages, first, end, axes, dtype)

    def split(self, name: str, inner: str, inner_size: int) -> Gathered:
        """Keys and values have no query heads (as `Named.split`)."""
        del name, inner, inner_size
        return self

    def renamed(self, old: str, new: str | None) -> Gathered:
        del old, new
        return self

    def rows(self, start, count: int) -> Named:
        """The block of so many rows from `start`, with axis `s` for `p` and `r`."""
        table = self.pages.table.squeezed()
        lead = tuple(a for a in table.axes if a != "c")
        numbers = start + jnp.arange(count, dtype=jnp.int32)
        entries = table.to((*lead, "c"))
        place, row = self.pages.place(numbers, entries.shape[-1])
        page = self.pages.page(jnp.take(entries, place, axis=-1, mode="clip"))
        index: dict[Any, Any] = {"p": page, "r": row}
        for i, name in enumerate(lead):
            size = entries.shape[i]
            shape = [size if j == i else 1 for j in range(len(lead) + 1)]
            index[name] = jnp.arange(size, dtype=jnp.int32).reshape(shape)
        found = _elements(_taken(self.pool, index, (*lead, "s")))
        inside = (numbers >= self.first[..., None]) & (numbers < self.end[..., None])
        axes = tuple(dict.fromkeys((*self.entries, *found.axes)))
        inside = Named(inside, (*self.entries, "s")).to(axes)
        value = found.to(axes).astype(self.dtype)
        return Named(jnp.where(inside, value, jnp.zeros((), self.dtype)), axes)


def blocks(spec: AttentionSpec, operands, size, dtype) -> tuple[AttentionSpec, list]:
    """A call without pages: its spec, and the operands, `Gathered` block by block."""
    if spec.pages is None:
        return spec, list(operands)

    def rows(x: Named) -> Named | Gathered:
        return Gathered.of(x, spec, size, dtype) if "p" in x.axes else x

    found = jax.tree.map(rows, dataclasses.replace(spec, pages=None))
    return found, list(map(rows, operands))


def whole(spec: AttentionSpec, operands, size, dtype) -> tuple[AttentionSpec, list]:
    """The same with all rows of the operands."""

    def rows(x: Named | Gathered) -> Named:
        return x.rows(0, size["s"]) if isinstance(x, Gathered) else x

    return jax.tree.map(rows, blocks(spec, operands, size, dtype))


def _chosen(x: Named) -> Named:
    """Without what is not meant of an axis, and without axes of size 1."""
    for name in x.axes:
        if first := first_of(name):
            kept = x.value[..., : first[1]]  # a head comes last
            x = Named(kept, (*x.axes[:-1], first[0]))
        if (element := fixed(name)) is not None:
            i = x.axes.index(name)
            axes = (*x.axes[:i], *x.axes[i + 1 :])
            x = Named(jax.lax.index_in_dim(x.value, element, i, keepdims=False), axes)
    return x.squeezed()


def _taken(x: Named, index: dict, axes: tuple[str, ...]) -> Named:
    """x at these indices, which broadcast to an array with `axes`."""
    places, found = indexed(x.axes, index, axes)
    value = bits(x.value).at[places].get(mode="promise_in_bounds")
    return Named(jax.lax.bitcast_convert_type(value, x.dtype), found)


def _elements(x: Named) -> Named:
    """Elements of a head, of bytes with two of them each; others as they are."""
    head = in_pairs(x.axes[-1])
    return Named(nibbles.elements(x.value), (*x.axes[:-1], head)) if head else x


def bits(x: jax.Array) -> jax.Array:
    """Floats of one byte as integers.

    XLA for CPUs widens a whole pool to move some rows of such floats, where it copies
    one of integers (JAX 0.12.0.1). For GPUs it does neither (benchmarks/lab/103).
    """
    is_float = x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    return jax.lax.bitcast_convert_type(x, jnp.int8) if is_float else x


def indexed(own: Axes, index: dict, axes: tuple[str, ...]) -> tuple[tuple, Axes]:
    """How NumPy and JAX index an array with arrays for some of its axes.

    Args:
      own: the axes of the array.
      index: arrays by name of an axis, which broadcast to one with `axes`.

    Returns:
      The index, and the axes of what it reads or writes.
    """
    arrays = [i for i, name in enumerate(own) if name in index]
    side_by_side = arrays[-1] - arrays[0] + 1 == len(arrays)
    before = arrays[0] if side_by_side else 0  # they come first otherwise
    others = [name for name in own if name not in index]
    places = tuple(index.get(name, slice(None)) for name in own)
    return places, (*others[:before], *axes, *others[before:])
