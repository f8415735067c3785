"""What callers give for arrays, as JAX arrays: wrapped, weakly typed, or of NumPy."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def unwrapped(x: Any) -> Any:
    """The array that an object stands for (`__jax_array__`, as of `nnx.Param`)."""
    while hasattr(type(x), "__jax_array__") and not isinstance(x, jax.Array):
        x = x.__jax_array__()
    return x


def check_array(name: str, x: Any) -> None:
    """Raises a TypeError if `x` is no array."""
    x = unwrapped(x)
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        made = f": pass jnp.array({name})" if isinstance(x, list | tuple) else ""
        raise TypeError(f"{name} must be an array, got {type(x).__name__}{made}")


def as_array(name: str, x: Any) -> jax.Array:
    """A JAX array of what must be an array, not weakly typed.

    Raises:
      TypeError: if it is none.
    """
    x = unwrapped(x)
    check_array(name, x)
    return strong(jnp.asarray(x))


def as_floats(name: str, x: Any, widest: int = 8, hint: str = "") -> jax.Array:
    """A float array, converted to float32 if its numbers have more bytes than `widest`.

    Raises:
      TypeError: if it is no array, or has no float dtype; `hint` is for others.
    """
    x = as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must have a float dtype, got {x.dtype.name}{hint}")
    return x.astype(jnp.float32) if x.dtype.itemsize > widest else x


def as_scale(name: str, x: Any, widest: int = 8) -> jax.Array:
    """The scale of a quantised operand: a number, or as `as_floats`.

    Raises:
      TypeError, ValueError: if it is neither, or a number that is not finite.
    """
    x = unwrapped(x)
    if isinstance(x, int | float) and not isinstance(x, bool):
        if not math.isfinite(x):
            raise ValueError(f"{name} must be finite, got {x}")
        x = np.float32(x)
    return as_floats(name, x, widest)


def strong(x: jax.Array) -> jax.Array:
    """The same, not weakly typed: nor are its gradient and its tangent.

    A conversion's gradient would be weakly typed again, so this is a product with 1,
    which XLA leaves away.
    """
    if not x.weak_type:
        return x
    return jax.lax.mul(x, jnp.ones_like(x, dtype=x.dtype))


def as_integers(name: str, x: Any) -> jax.Array | np.ndarray:
    """An integer array of at least 32 bits.

    Integers of NumPy that need 64 bits stay so, for without x64 JAX would cut them to
    32 in silence.

    Raises:
      TypeError: if it is no array, or has no integer dtype.
    """
    x = unwrapped(x)
    check_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(
            f"{name} must have an integer dtype such as int32, got {x.dtype.name}"
        )
    if isinstance(x, np.ndarray | np.generic) and x.dtype.itemsize > 4:
        narrow = jax.dtypes.canonicalize_dtype(x.dtype)
        if np.any(x != x.astype(narrow)):
            return np.asarray(x)
    x = jnp.asarray(x)
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)


def clipped(x: jax.Array | np.ndarray, lo: int, hi: int) -> jax.Array:
    """Clips integers of `as_integers` before they become int32."""
    if isinstance(x, np.ndarray):
        # Of uint64, none is below lo.
        bounds = (max(lo, 0) if x.dtype == np.uint64 else lo), hi
        return jnp.asarray(np.clip(x, *bounds).astype(np.int32))
    lo = max(lo, 0) if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else lo
    return jnp.clip(x, jnp.array(lo, x.dtype), jnp.array(hi, x.dtype)).astype(jnp.int32)


def words(*arrays: jax.Array | np.ndarray) -> list[tuple[jax.Array, ...]]:
    """Integers of one signedness as int32 arrays, all equal where the integers are.

    Returns:
      An array of each, or two where the integers of one need 64 bits.
    """
    if all(isinstance(x, jax.Array) for x in arrays):
        made = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in arrays]
        if made[0].ndim == arrays[0].ndim:
            return [tuple(made)]
        return [tuple(x[..., i] for x in made) for i in range(2)]

    def halves(x) -> tuple[jax.Array, ...]:
        if isinstance(x, np.ndarray):
            low, high = x.astype(np.uint32), (x >> 32).astype(np.uint32)
            return tuple(jnp.asarray(y.view(np.int32)) for y in (low, high))
        signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
        high = x >> 31 if signed else jnp.zeros_like(x)
        return tuple(jax.lax.bitcast_convert_type(y, jnp.int32) for y in (x, high))

    return list(zip(*map(halves, arrays), strict=True))
