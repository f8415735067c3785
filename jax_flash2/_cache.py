"""A cache in pages: where rows go, how they are quantised, and writing them."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2._arguments import Array
from jax_flash2._arrays import (
    as_array,
    as_floats,
    as_integers,
    as_scale,
    clipped,
    unwrapped,
)
from jax_flash2._pools import AXES, letters_of
from pallas_kernels.core.axes import Axes, Named
from pallas_kernels.core.gather import bits, indexed
from pallas_kernels.core.promotion import own_rules
from pallas_kernels.core.quantise import STORED, largest_of, narrowed

_LAST = np.iinfo(np.int32).max


@own_rules()
def page_slots(page_table: Array, positions: Array, page_size: int) -> jax.Array:
    """Where in a pool the rows at some positions of sequences lie.

        slot = page_table[b, position // page_size] * page_size + position % page_size

    Args:
      page_table: int32 [B, C], as of `paged_attention`.
      positions: int32 [B] or [B, T]. For tokens of several sequences in a row, pass
        page_table[sequence] with a line for each token.
      page_size: rows of a page.

    Returns:
      int32 in the shape of positions; -1 where a position is negative, or no entry of
      the table has it, or the entry is negative or its page lies beyond 2**31 rows.
      `append_to_pages` leaves those out.

    Raises:
      TypeError, ValueError: if an argument is wrong.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_flash2 import page_slots
      >>> page_slots(jnp.array([[7, 3]]), jnp.array([[0, 15, 16, 40]]), 16).tolist()
      [[112, 127, 48, -1]]
    """
    table, positions = (
        clipped(as_integers(name, x), -1, _LAST)
        for name, x in (("page_table", page_table), ("positions", positions))
    )
    if table.ndim != 2:
        raise ValueError(f"page_table must have shape [B, C], got shape {table.shape}")
    fits = positions.ndim in (1, 2) and positions.shape[0] == table.shape[0]
    if not fits:
        raise ValueError(
            f"positions must have shape [B] or [B, T] with B={table.shape[0]}, got "
            f"shape {positions.shape}"
        )
    if isinstance(page_size, bool) or not isinstance(page_size, int | np.integer):
        raise TypeError(f"page_size must be an int, got {page_size!r}")
    if not 1 <= page_size <= _LAST:
        raise ValueError(f"page_size must be from 1 to {_LAST}, got {page_size}")
    places = table.shape[1]
    if not places:
        return jnp.full(positions.shape, -1, jnp.int32)
    inside = (positions >= 0) & (positions // page_size < places)
    at = jnp.where(inside, positions, 0)
    entry = (at if at.ndim == 2 else at[:, None]) // page_size
    page = jnp.take_along_axis(table, entry, axis=1).reshape(at.shape)
    # Of a later page, slots would not be int32 numbers.
    inside &= (page >= 0) & (page <= (_LAST + 1) // page_size - 1)
    return jnp.where(inside, page * page_size + at % page_size, -1)


@own_rules()
def quantize_kv(
    x: Array, dtype: Any, axes: int | tuple[int, ...] = -1
) -> tuple[jax.Array, jax.Array]:
    """Keys or values in few bits, and their scale: x is about q * scale.

    The scale is the largest size of an element over `axes`, divided by the largest
    number of the dtype (127 of int8, 7 of int4).

    Args:
      x: [..., K, H], of any float dtype.
      dtype: int8, float8_e4m3fn, float8_e5m2, or int4 for `paged_attention`.
      axes: over which elements share a scale; the last is one of them. -1 gives one for
        each row and head, (-2, -1) for each row.

    Returns:
      q: in the shape of x and the dtype. Of int4 it is uint8 with two elements a byte,
        [..., K, H / 2]: element 2 i in the low half of byte i, 2 i + 1 in the high one.
      scale: float32 in the shape of x without its last axis, of size 1 along the others
      of axes; q * scale[..., None] is near x.

    Raises:
      TypeError, ValueError: if an argument is wrong.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash2 import quantize_kv
      >>> x = jax.random.normal(jax.random.key(0), (2, 30, 4, 64))
      >>> q, scale = quantize_kv(x, jnp.int8)
      >>> q.dtype.name, scale.shape
      ('int8', (2, 30, 4))
      >>> q, scale = quantize_kv(x, jnp.int4)  # two elements a byte
      >>> q.dtype.name, q.shape
      ('uint8', (2, 30, 4, 32))
    """
    x = as_floats("x", x)
    dtype = _quantised("dtype", dtype)
    given = axes if isinstance(axes, tuple) else (axes,)
    try:
        numbers = {operator.index(a) % x.ndim for a in given if -x.ndim <= a < x.ndim}
    except TypeError as error:
        raise TypeError(f"axes must be ints, got {axes!r}") from error
    if len(numbers) != len(given) or x.ndim - 1 not in numbers:
        raise ValueError(
            f"axes must be different axes of x, shape {x.shape}, and the last among "
            f"them, got {axes!r}"
        )
    if dtype == jnp.int4 and x.shape[-1] % 2:
        raise ValueError(
            f"x must have an even last axis for int4, two a byte, got shape {x.shape}"
        )
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=tuple(numbers), keepdims=True, initial=0.0)
    scale = largest / largest_of(dtype)
    return narrowed(x, scale, dtype), jnp.squeeze(scale, -1)


@own_rules()
def append_to_pages(
    key_pages: Array,
    value_pages: Array | None,
    key: Array,
    value: Array,
    slots: Array,
    *,
    key_scale: float | Array | None = None,
    value_scale: float | Array | None = None,
    kv_layout: str = "PSKH",
) -> tuple[Any, ...]:
    """Writes keys and values of new tokens into pages of a pool.

    Donate the pools (`donate_argnums` of `jax.jit`, or as what a loop carries): XLA
    then writes in place and copies no pool.

    Args:
      key_pages, value_pages: pools, as of `paged_attention`.
      key, value: [*, K, H] and [*, K, Hv], new rows; * stands for any axes. Of
        quantised pools they have any float dtype, of others that of the pool.
      slots: int32 [*], the slot of each row, page * page_size + its row there
        (`page_slots`). Rows with a negative slot, or one beyond the pool, are left out.
        No slot may come twice.
      key_scale, value_scale: of quantised pools, the scales. Pools of scales, [P, page,
        K] or [P, page, 1], get those of the new rows, which are made here
        (`quantize_kv`). With a number, (), or [K], rows are divided by it, and what is
        out of range becomes the largest number of the dtype.
      kv_layout: of the pools. With a "2", value_pages is None.

    Returns:
      key_pages and value_pages with the new rows; if one is quantised, also key_scale
      and value_scale. What was None or a number is returned as it is.

    Raises:
      TypeError, ValueError: if an argument is wrong.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash2 import append_to_pages, page_slots
      >>> pages = jnp.zeros((10, 16, 2, 64))
      >>> table, positions = jnp.array([[7, 3], [2, 0]]), jnp.array([[20], [4]])
      >>> new = jnp.ones((2, 1, 2, 64))
      >>> slots = page_slots(table, positions, 16)
      >>> pages, _ = append_to_pages(pages, pages, new, new, slots)
      >>> bool((pages[3, 4] == 1).all() and (pages[2, 4] == 1).all())
      True
    """
    letters = letters_of(kv_layout)
    slots = clipped(as_integers("slots", slots), -1, _LAST)
    if "2" in letters and value_pages is not None:
        raise ValueError(
            f"value_pages must be None with kv_layout={kv_layout!r}, of which "
            "key_pages has both, got an array"
        )
    sides = (
        ("key", "u0", key_pages, key, key_scale),
        ("value", "u1", value_pages, value, value_scale),
    )
    pools, scales, both = [], [], None
    for name, side, pages, rows, scale in sides:
        if "2" in letters:
            pages = key_pages if both is None else both
        names: Axes = tuple(({**AXES, "2": side, "H": "h"})[x] for x in letters)
        pool = _Pool(f"{name}_pages", as_array(f"{name}_pages", pages), names)
        found, scale = pool.written(name, rows, slots, scale)
        both = found if "2" in letters else None
        pools.append(found)
        scales.append(scale)
    if "2" in letters:
        pools = [both, None]
    is_quantised = any(x is not None and x.dtype in STORED for x in pools)
    return (*pools, *scales) if is_quantised else tuple(pools)


class _Pool:
    """A pool that rows are written into."""

    def __init__(self, name: str, pages: jax.Array, axes: Axes):
        if pages.ndim != len(axes):
            raise ValueError(
                f"{name} must have {len(axes)} axes, as kv_layout says, got shape "
                f"{pages.shape}"
            )
        self.pages, self.axes = pages, axes
        self.size = dict(zip(axes, pages.shape, strict=True))

    def written(self, name: str, rows, slots: jax.Array, scale):
        """The pool with these rows, and the scale."""
        rows, (k, h) = as_floats(name, rows), (self.size["k"], self.size["h"])
        kind = STORED.get(self.pages.dtype)
        h *= 2 if kind == jnp.int4 else 1
        if rows.shape != (*slots.shape, k, h):
            raise ValueError(
                f"{name} must have shape {(*slots.shape, k, h)}, from slots and "
                f"{name}_pages, got {rows.shape}"
            )
        rows, slots = rows.reshape(slots.size, k, h), slots.reshape(-1)
        if kind is None:
            if scale is not None:
                raise ValueError(
                    f"{name}_scale must be None for pages in {self.pages.dtype.name}, "
                    "which are not quantised, got a scale"
                )
            if rows.dtype != self.pages.dtype:
                raise TypeError(
                    f"{name} must have the dtype of {name}_pages, "
                    f"{self.pages.dtype.name}, got {rows.dtype.name}"
                )
            return self._put(self.pages, self.axes, rows, slots), None
        rows = rows.astype(jnp.float32)
        is_pool = scale is not None and jnp.ndim(unwrapped(scale)) == 3
        of_rows = self._scale(f"{name}_scale", scale)
        if is_pool:
            axes = (-2, -1) if of_rows.shape[-1] == 1 != k else -1
            found = quantize_kv(rows, kind, axes)[1].astype(of_rows.dtype)
            scale = self._put(of_rows, ("p", "r", "k"), found, slots)
            # By the scale that is kept, which the pool's dtype may have rounded.
            rows = narrowed(rows, found.astype(jnp.float32)[..., None], kind)
        else:
            of_rows = of_rows.astype(jnp.float32)
            of_rows = of_rows[:, None] if of_rows.ndim else of_rows
            rows = narrowed(rows, of_rows, kind)
        return self._put(self.pages, self.axes, rows, slots), scale

    def _scale(self, name: str, x) -> jax.Array:
        x = as_scale(name, x)
        pages = (self.size["p"], self.size["r"])
        k = self.size["k"]
        shapes = ((), (k,), (*pages, 1), (*pages, k))
        if x.shape not in shapes:
            expected = ", ".join(map(str, shapes))
            raise ValueError(
                f"{name} must have one of the shapes {expected}, got shape {x.shape}"
            )
        return x

    def _put(self, pool: jax.Array, axes: Axes, rows: jax.Array, slots) -> jax.Array:
        """The pool with rows [tokens, k, h], or scales [tokens, k], at their slots."""
        size, count = self.size["r"], self.size["p"] * self.size["r"]
        slots = jnp.where((slots >= 0) & (slots < count), slots, count)
        page = slots // size
        index = {"p": page, "r": slots - page * size, "u0": 0, "u1": 1}
        places, names = indexed(axes, {a: index[a] for a in axes if a in index}, ("s",))
        rows = Named(rows, ("s", "k", "h")[: rows.ndim]).to(names)
        found = bits(pool).at[places].set(bits(rows), mode="drop")
        return jax.lax.bitcast_convert_type(found, pool.dtype)


def _quantised(name: str, dtype) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found not in STORED.values():
        raise TypeError(
            f"{name} must be int8, int4, float8_e4m3fn or float8_e5m2, got {dtype!r}"
        )
    return found
