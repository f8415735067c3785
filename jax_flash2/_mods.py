"""`score_mod` and `mask_mod`: from Python functions to a term and a mask.

Both are traced once, on scalars. What they capture becomes operands with named axes
(`core.pointwise`), so that `vmap`, `grad` and meshes see arrays like any others.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash2._rows import RowSharding
from jax_flash2._shape import Shape
from pallas_kernels.core.axes import ALL_KEYS, Named, undivided
from pallas_kernels.core.masks import Atom, MaskMod, split
from pallas_kernels.core.pointwise import (
    INDICES,
    SCORE,
    NotPointwise,
    Place,
    Positions,
    Program,
    Traced,
    bind,
    compact,
    float_reads,
    of_bound,
    trace,
)
from pallas_kernels.core.pointwise.tables import OVERHANG
from pallas_kernels.core.promotion import at_least_float32
from pallas_kernels.core.scores import ScoreMod


class Mods:
    """The functions of a call, traced and bound to its axes.

    Args:
      shape: of the call.
      offset: the position of query row 0, or None for 0.
      sharding: how rows are divided over devices, or None.
    """

    def __init__(
        self, shape: Shape, offset: Named | None, sharding: RowSharding | None
    ):
        self._shape = shape
        is_start = offset is None
        self._natural = frozenset(INDICES if is_start else set(INDICES) - {"q"})
        parts = shape.parts
        query, key = (_Rows(n, parts, sharding) for n in (shape.t, shape.s))
        batch, heads = (
            Named(jnp.arange(math.prod(sizes), dtype=jnp.int32).reshape(sizes), axes)
            for sizes, axes in (
                (shape.batch, shape.batch_axes),
                (shape.heads, shape.head_axes),
            )
        )
        self._numbers = batch, heads
        places = {
            "b": Place(
                shape.batch_axes, batch, lambda x, i: _resized(x, i, shape.batch)
            ),
            "h": Place(
                shape.head_axes, heads, lambda x, i: _resized(x, i, shape.heads)
            ),
            "q": Place(("t",), query.numbers("t", offset), query.reader(offset)),
            "kv": Place(("s",), key.numbers("s", None), key.reader(None)),
        }
        whole, name = (parts * shape.s,), ALL_KEYS if parts > 1 else "s"
        pairs = Place((name,), places["kv"].numbers, lambda x, i: _resized(x, i, whole))
        zero = parts * shape.s + OVERHANG
        beyond = parts * shape.t + OVERHANG
        distances = Named(jnp.arange(-zero, beyond, dtype=jnp.int32), ("t",))
        distances = _after(distances, offset)
        count = shape.t * shape.s if parts == 1 else None
        self._positions = Positions(places, pairs, distances, zero, count)

    def score(self, function: Any) -> ScoreMod:
        """The term that is a function of the score.

        Raises:
          TypeError, ValueError: if it is none of one pair.
        """
        dtype = at_least_float32(self._shape.dtype)
        traced = self._traced("score_mod", function, dtype)
        floats = float_reads(traced.program)
        bound = bind(traced, self._positions, fixed=False)
        try:
            derivative = traced.derivative(dtype)
        except NotPointwise as error:
            raise TypeError(f"score_mod has a derivative that {error}") from None
        derivative = of_bound(derivative, bound, traced, floats)
        entry, head = self._asked(bound.program, derivative)
        return ScoreMod(bound.arrays, entry, head, bound.program, derivative)

    def masks(self, function: Any, unknown: Sequence[str] = ()) -> tuple[Atom, ...]:
        """The mask that is a function of indices: built-in masks, and what is left.

        Args:
          unknown: the indices that it must not ask for.

        Raises:
          TypeError, ValueError: if it is none of one pair, or asks for one of these.
        """
        traced = self._traced("mask_mod", function, None)
        for name in unknown:
            if traced.program.asks(name):
                full = {"b": "batch", "h": "heads"}[name]
                raise ValueError(
                    f"mask_mod asks for {name}, and make_block_mask got {full}=None: "
                    f"pass {full}"
                )
        bound = bind(traced, self._positions, fixed=True)
        captured = [traced.program.reads[i].params[0] for i in bound.reads]
        # Arrays are bound to an offset, after which a mask may not ask for positions.
        keeps_own_key = traced.keeps_own_key and "q" in self._natural
        may_share = keeps_own_key and self._shape.t == self._shape.s

        def are_shared(a: int, b: int) -> bool:
            return may_share and captured[a] == captured[b]

        known, rest = split(bound.program, bound.arrays, are_shared)
        if rest is None:
            return known
        program, kept = compact(rest)
        arrays = tuple(
            Named(_bits(bound.arrays[i].value, step.dtype), bound.arrays[i].axes)
            for i, step in zip(kept, program.reads, strict=True)
        )
        entry, head = self._asked(program)
        return (*known, MaskMod(arrays, entry, head, program, keeps_own_key))

    def _asked(self, *programs: Program) -> list[Named | None]:
        """The numbers of entries and heads that programs ask for."""
        pairs = zip(("b", "h"), self._numbers, strict=True)
        return [x if any(p.asks(n) for p in programs) else None for n, x in pairs]

    def _traced(self, name: str, function: Any, score_dtype) -> Traced:
        check_function(name, function, score_dtype is not None)
        try:
            traced = trace(function, score_dtype, self._natural)
        except NotPointwise as error:
            raise TypeError(f"{name} {error}") from None
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            raise TypeError(
                f"{name} must be a function of numbers that JAX can trace, with "
                "jnp.where in place of if, and jnp.asarray(x)[q] of a NumPy array: "
                f"{str(error).splitlines()[0]}"
            ) from error
        except (TypeError, ValueError, IndexError) as error:
            # JAX's of a number that is taken for an array, or the function's own.
            kinds = IndexError, TypeError, ValueError
            kind = next(x for x in kinds if isinstance(error, x))
            raise kind(
                f"{name}, called with numbers (scalars without axes), raised "
                f"{type(error).__name__}: {error}"
            ) from error
        for x in traced.captured:
            _check_captured(name, x)
        return traced


class _Rows:
    """The rows of queries or of keys that a device has, among all positions.

    Args:
      rows: of the device.
      parts: devices.
      sharding: of the rows on them.
    """

    def __init__(self, rows: int, parts: int, sharding: RowSharding | None):
        self._rows, self._all, self._parts = rows, rows * parts, parts
        self._sharding = sharding if parts > 1 else None

    def numbers(self, name: str, offset: Named | None) -> Named:
        """The positions of the rows."""
        rows = Named(jnp.arange(self._rows, dtype=jnp.int32), (name,))
        if self._sharding is not None:
            numbering = self._sharding.numbering(self._sharding.rank(), self._rows)
            first = numbering.first.value
            numbering = type(numbering)(first, numbering.stripe, numbering.parts)
            rows = Named(numbering.at(rows.value), (name,))
        return _after(rows, offset)

    def reader(self, offset: Named | None) -> Callable:
        """`Place.own` for these rows."""

        def own(x: jax.Array, axis: int) -> jax.Array | None:
            if offset is None:
                x = _resized(x, axis, (self._all,))
                return x if self._sharding is None else self._sharding.own(x, axis)
            if offset.axes or self._sharding is not None:
                return None
            # Slices have a gradient without a sum; gathers of rows would add.
            size, rows = x.shape[axis], self._rows
            start = jnp.clip(jnp.asarray(offset.value) + rows, 0, size + rows)
            wide = _edged(x, axis, rows, rows)
            return lax.dynamic_slice_in_dim(wide, start, rows, axis)

        return own


def _after(rows: Named, offset: Named | None) -> Named:
    """Numbers along one axis, from an offset on."""
    if offset is None:
        return rows
    axes, first = (*offset.axes, *rows.axes), undivided(jnp.asarray(offset.value))
    return Named(rows.to(axes) + first[..., None], axes)


def _edged(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    """x with its first and last elements repeated."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (before, after)
    x = undivided(x)
    return jnp.pad(x, pad, mode="edge")


def _resized(x: jax.Array, axis: int, sizes: tuple[int, ...]) -> jax.Array:
    """x with such axes in place of one; what it lacks is its last element again."""
    size = math.prod(sizes)
    if not isinstance(size, int):  # a symbol (`jax.export`)
        x = jnp.take(x, jnp.arange(size), axis=axis, mode="clip")
    elif x.shape[axis] > size:
        x = lax.slice_in_dim(x, 0, size, axis=axis)
    elif x.shape[axis] < size:
        x = _edged(x, axis, 0, size - x.shape[axis])
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def _bits(x: jax.Array, dtype: str) -> jax.Array:
    """Integers in place of floats, which would have gradients, as a read gives them."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    x = x.astype(dtype)
    return lax.bitcast_convert_type(x, f"int{jnp.finfo(x.dtype).bits}")


def check_function(name: str, function: Any, has_score: bool) -> None:
    """Raises a TypeError with that name unless it is a function of a pair."""
    names = (SCORE, *INDICES) if has_score else INDICES
    expected = f"a function of ({', '.join(names)})"
    if not callable(function):
        raise TypeError(f"{name} must be {expected}, got {type(function).__name__}")
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise TypeError(f"{name} must be {expected}: {error}") from None
    except ValueError:  # a builtin, whose signature is not known
        pass


def _check_captured(name: str, x: Any) -> None:
    kind = np.dtype(x.dtype)
    if kind in (np.dtype(np.int64), np.dtype(np.uint64)):
        raise TypeError(
            f"{name} captures an array of {kind.name}, shape {x.shape}: convert it to "
            "int32, as x.astype('int32')"
        )
