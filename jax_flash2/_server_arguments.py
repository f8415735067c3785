"""Checks of what the calls in `servers` are given, by the names that they give it.

Every error names the argument, says what was given and what was expected, and is raised
before anything is written to a cache.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2._arrays import as_array, as_integers, clipped, unwrapped
from pallas_kernels.core.quantise import QUANTISED

_WIDE = (jnp.bfloat16, jnp.float16, jnp.float32)
_OF_CACHES = (*_WIDE, *(x for x in QUANTISED if jnp.issubdtype(x, jnp.floating)))
_LAST = np.iinfo(np.int32).max


def sizes(**given: Any) -> None:
    """Raises an error if one of these is no size."""
    for name, x in given.items():
        if isinstance(x, bool) or not isinstance(x, int | np.integer):
            raise TypeError(f"{name} must be an int, got {x!r}")
        if x < 1:
            raise ValueError(f"{name} must be at least 1, got {x}")


def of_caches(name: str, x: Any) -> np.dtype:
    """A dtype that caches may have, to which new rows are written."""
    try:
        dtype = jnp.dtype(x)
    except TypeError:
        dtype = None
    if dtype is None or dtype not in _OF_CACHES:
        names = ", ".join(jnp.dtype(x).name for x in _OF_CACHES)
        raise TypeError(f"{name} must be one of {names}, got {x!r}")
    return dtype


def queries(name: str, x: Any) -> jax.Array:
    """[tokens, N, H], of a dtype that products are made in."""
    x = _of_rank(name, x, "[tokens, N, H]", 3)
    if x.dtype not in _WIDE:
        raise TypeError(
            f"{name} must have dtype bfloat16, float16 or float32, got {x.dtype.name}"
        )
    return x


def cache(name: str, x: Any, axes: str, rank: int, of: jax.Array) -> jax.Array:
    """A cache of that rank, in the dtype of the queries `of` or quantised."""
    x = _of_rank(name, x, axes, rank)
    if x.dtype != of.dtype and x.dtype not in QUANTISED:
        raise TypeError(
            f"{name} must have the dtype of the queries, {of.dtype.name}, or int8, "
            f"float8_e4m3fn or float8_e5m2, got {x.dtype.name}"
        )
    return x


def new_rows(
    keys: Any, values: Any, of: jax.Array, of_cache: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [tokens, K, H] of the tokens that have the queries `of`."""
    keys, values = (
        _of_rank(name, x, "[tokens, K, H]", 3)
        for name, x in (("keys", keys), ("values", values))
    )
    tokens, _, h = of.shape
    if keys.shape[::2] != (tokens, h):
        raise ValueError(
            f"keys must have shape [{tokens}, K, {h}], as queries have tokens and head "
            f"size, got shape {keys.shape}"
        )
    if values.shape != keys.shape:
        raise ValueError(
            f"values must have the shape of keys, {keys.shape}, got {values.shape}"
        )
    check_heads("keys", keys.shape[1], "queries", of.shape[1])
    of_caches("the cache's dtype", of_cache.dtype)
    for name, x in (("keys", keys), ("values", values)):
        if x.dtype != of_cache.dtype:
            raise TypeError(
                f"{name} must have the dtype of the cache, {of_cache.dtype.name}, got "
                f"{x.dtype.name}: divide by the scale, if there is one, and cast"
            )
    return keys, values


def check_heads(name: str, k: int, of: str, n: int) -> None:
    if k == 0 or n % k:
        raise ValueError(
            f"{name} must have a number of heads that divides those of {of}, {n}, got "
            f"{k}"
        )


def integers(name: str, x: Any, *shape: int | str, why: str = "") -> jax.Array:
    """int32 numbers from -1 on; of `shape`, of which a text stands for any size."""
    x = as_integers(name, x)
    fits = x.ndim == len(shape) and all(
        isinstance(wanted, str) or size == wanted
        for size, wanted in zip(x.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} must have shape [{wanted}]{why}, got shape {x.shape}")
    return clipped(x, -1, _LAST)


def sequences(kv_lens: Any, cu_q_lens: Any, count: Any) -> tuple[jax.Array, jax.Array]:
    """Lengths and first tokens of sequences, of which only the first `count` are any.

    The length of another is 0, and it has no tokens.
    """
    lengths = integers("kv_lens", kv_lens, "sequences")
    size = lengths.shape[0]
    if not size:
        raise ValueError("kv_lens must have a sequence at least, got shape (0,)")
    cu = integers("cu_q_lens", cu_q_lens, size + 1, why=", one more than kv_lens")
    numbers = jnp.arange(size + 1, dtype=jnp.int32)
    cu = jnp.where(numbers <= count, cu, cu[count])
    return jnp.where(numbers[:-1] < count, lengths, 0), cu


def scales(sm_scale: Any, k_scale: Any, v_scale: Any) -> tuple[Any, Any, Any]:
    """Of scores, keys and values; the last two may be None."""
    of_keys = None if k_scale is None else _number("k_scale", k_scale)
    of_values = None if v_scale is None else _number("v_scale", v_scale)
    return _number("sm_scale", sm_scale), of_keys, of_values


def _number(name: str, x: Any) -> Any:
    """A finite number, or a scalar array of floats."""
    x = unwrapped(x)
    if isinstance(x, int | float) and not isinstance(x, bool):
        if not math.isfinite(x):
            raise ValueError(f"{name} must be finite, got {x}")
    elif np.shape(x) != () or not jnp.issubdtype(
        getattr(x, "dtype", np.bool_), jnp.floating
    ):
        shape = f" of shape {np.shape(x)}" if hasattr(x, "shape") else ""
        raise TypeError(
            f"{name} must be a number or a scalar array with a float dtype, got "
            f"{type(x).__name__}{shape}"
        )
    return x


def window(x: Any) -> tuple[int, int] | None:
    """`sliding_window`, which counts the query's own key, as `local_window_size`."""
    if x is None:
        return None
    try:
        size = operator.index(x)
    except TypeError as error:
        raise TypeError(
            f"sliding_window must be a Python int or None, got {x!r}"
        ) from error
    if size < 1 or isinstance(x, bool):
        raise ValueError(
            f"sliding_window must be at least 1, the query's own key, got {x!r}"
        )
    return size - 1, 0


def flag(name: str, x: Any) -> bool:
    """A bool that may be 0 or 1."""
    if not isinstance(x, int | np.bool_ | np.integer) or x not in (0, 1):
        raise TypeError(f"{name} must be 0 or 1, got {x!r}")
    return bool(x)


def sink(x: Any, heads: int) -> jax.Array:
    x = as_array("attention_sink", x)
    if x.shape != (heads,) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"attention_sink must have shape ({heads},), a float for each head, got "
            f"shape {x.shape} and dtype {x.dtype.name}"
        )
    return x


def result_dtype(x: Any) -> np.dtype | None:
    if x is None:
        return None
    try:
        dtype = jnp.dtype(x)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"out_dtype must be a float dtype or None, got {x!r}")
    return dtype


def _of_rank(name: str, x: Any, axes: str, rank: int) -> jax.Array:
    x = as_array(name, x)
    if x.ndim != rank:
        raise ValueError(f"{name} must have shape {axes}, got shape {x.shape}")
    return x
