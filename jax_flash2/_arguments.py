"""Checks the arguments of attention and names their axes.

Every error names the argument, says what was given and what was expected, and is
raised before anything else happens.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2 import _backends
from pallas_kernels.core.axes import ALL_KEYS, Axes, Named
from pallas_kernels.core.dropout import Dropout, seeds
from pallas_kernels.core.mask import DenseMask, SegmentIds, Window

# Positions stay below this, so that int32 sums of a few of them do not overflow.
_FAR = 1 << 28
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
# Why an argument may not be traced.
_STATIC = "because it is compiled into the program"


class Shape:
    """The sizes of a call, and checks of the other arguments against them.

    With rows that are divided over `parts` devices, `t` and `s` are those of one.
    """

    def __init__(self, query, key, value, parts: int = 1):
        del value
        self.parts = parts
        self.dtype = query.dtype
        self.head_size = query.shape[-1]
        self.single = query.ndim == 2
        self.batch = query.shape[:-3]
        self.batch_axes = tuple(f"b{i}" for i in range(len(self.batch)))
        self.t, self.s = (
            x.shape[0] if self.single else x.shape[-3] for x in (query, key)
        )
        self.heads = () if self.single else (query.shape[-2],)
        self.head_axes = ("n",) if self.heads else ()

    def operands(self, query, key, value) -> list[Named]:
        def axes(rows: str, heads: str, head: str) -> Axes:
            return (*self.batch_axes, rows, *([] if self.single else [heads]), head)

        return [
            Named(query, axes("t", "n", "h")),
            Named(key, axes("s", "k", "h")),
            Named(value, axes("s", "k", "d")),
        ]

    def _integers(self, name: str, x, shape: tuple[int, ...]) -> jax.Array:
        """An integer array of exactly this shape."""
        x = _as_array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(
                f"{name} must have an integer dtype such as int32, got {x.dtype.name}"
            )
        if x.shape != shape:
            raise ValueError(
                f"{name} must have shape {shape} because query has batch shape "
                f"{self.batch}, got shape {x.shape}"
            )
        return x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)

    def lengths(self, name: str, x, size: int) -> Named | None:
        if x is None:
            return None
        x = self._integers(name, x, self.batch)
        return Named(_clipped(x, 0, size), self.batch_axes)

    def segments(self, query_ids, key_value_ids) -> list[SegmentIds]:
        """Zero atoms, one, or one for each half of 64-bit ids."""
        if query_ids is None and key_value_ids is None:
            return []
        if query_ids is None:
            raise ValueError(
                "key_value_segment_ids requires query_segment_ids, got None: pass both"
            )
        if key_value_ids is None:
            if self.t != self.s:
                raise ValueError(
                    "key_value_segment_ids defaults to query_segment_ids, which "
                    f"requires T == S, got T={self.t} and S={self.s}: pass "
                    "key_value_segment_ids"
                )
            key_value_ids = query_ids
        q = self._integers("query_segment_ids", query_ids, (*self.batch, self.t))
        kv = self._integers(
            "key_value_segment_ids", key_value_ids, (*self.batch, self.s)
        )
        if q.dtype != kv.dtype:
            raise TypeError(
                "query_segment_ids and key_value_segment_ids must have the same "
                f"dtype, got {q.dtype.name} and {kv.dtype.name}"
            )
        q_axes, kv_axes = (*self.batch_axes, "t"), (*self.batch_axes, "s")
        return [
            SegmentIds(Named(a, q_axes), Named(b, kv_axes))
            for a, b in zip(_words(q), _words(kv), strict=True)
        ]

    def mask(self, x) -> DenseMask:
        x = _as_array("mask", x)
        if x.dtype != jnp.bool_:
            raise TypeError(
                f"mask must have dtype bool (True = attend), got {x.dtype.name}: pass "
                "mask.astype(bool) or mask != 0"
            )
        return DenseMask(self._of_pairs("mask", x))

    def _of_pairs(self, name: str, x) -> Named:
        """An array that broadcasts to [*B, N, T, S]."""
        full = (*self.batch, *self.heads, self.t, self.s)
        names = (*self.batch_axes, *self.head_axes, "t", "s")
        rows, keys = (1, 1, *x.shape)[-2:]
        if self.parts > 1:
            all_keys = self.parts * self.s
            # An element for the only row of a device is no constant of all devices.
            of_one_row = self.t == keys == 1 != self.s
            if keys == all_keys:
                full, names = (*full[:-1], all_keys), (*names[:-1], ALL_KEYS)
            elif rows == 1 and not of_one_row:  # of keys, or of neither
                full, names = (*full[:-2], 1, self.s), (*names[:-2], None, "s")
            elif keys == 1:
                full, names = (*full[:-1], 1), (*names[:-1], None)
            else:
                raise ValueError(
                    f"{name} with rows of queries must have the {all_keys} keys of all "
                    f"{self.parts} devices, got shape {x.shape}"
                )
        return _broadcast(name, x, full, names)

    def _float(self, name: str, x) -> jax.Array:
        """A float array, converted to float32 if it is wider than that and query."""
        x = _as_array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must have a float dtype, got {x.dtype.name}")
        wide = x.dtype.itemsize > max(4, self.dtype.itemsize)
        return x.astype(jnp.float32) if wide else x

    def _per_head(self, name: str, x, batched: bool) -> Named:
        x = self._float(name, x)
        shapes: dict[tuple[int, ...], Axes] = {self.heads: self.head_axes}
        if batched:
            shapes[self.batch + self.heads] = self.batch_axes + self.head_axes
        if x.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"{name} must have shape {expected}, got shape {x.shape}")
        return Named(x, shapes[x.shape])

    def slopes(self, x) -> Named:
        return self._per_head("alibi_slopes", x, batched=True)

    def sinks(self, x) -> Named:
        return self._per_head("sinks", x, batched=False)

    def bias(self, x) -> Named:
        return self._of_pairs("bias", self._float("bias", x))

    def dropout(self, rate, rng, broadcast) -> Dropout | None:
        """None if the rate rounds to 0."""
        check_bool("broadcast_dropout", broadcast)
        if isinstance(rate, bool) or not isinstance(rate, int | float | np.number):
            raise TypeError(
                f"dropout_rate must be a Python number {_STATIC}, got "
                f"{type(rate).__name__}"
            )
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"dropout_rate must be in [0, 1), got {rate}")
        threshold = max(Dropout.threshold_of(float(rate)), 1)
        if rng is not None:
            check_array("dropout_rng", rng)
        if rate == 0.0:
            return None
        if rng is None:
            raise ValueError(
                f"dropout_rate={rate} requires dropout_rng, a JAX random key, got None"
            )
        typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
        raw = jax.eval_shape(jax.random.PRNGKey, 0)
        one = () if typed else raw.shape
        if rng.shape != one or not (typed or rng.dtype == raw.dtype):
            raise ValueError(
                "dropout_rng must be a single key from jax.random.key or "
                f"jax.random.PRNGKey, got shape {rng.shape} and dtype {rng.dtype}"
            )
        if threshold == Dropout.threshold_of(0.0):
            return None
        if jax.config.jax_debug_key_reuse:
            jax.random.bits(rng)  # what `jax.debug_key_reuse` takes for a use
        words = jax.random.key_data(rng) if typed else jnp.asarray(rng)
        axes = () if broadcast else (*self.batch_axes, *self.head_axes)
        found = seeds(words) if broadcast else seeds(words, self.batch, self.heads)
        first, second = (Named(x, axes) for x in found)
        return Dropout((first, second), threshold)

    def scale(self, x) -> tuple[float, Named | None]:
        """The scale as a static number and a factor that is data."""
        if x is None:
            return 1.0 / math.sqrt(self.head_size), None
        if isinstance(x, jax.Array) and x.shape == ():
            return 1.0, Named(self._float("scale", x), ())
        try:
            if isinstance(x, bool | str):
                raise TypeError
            x = float(x)
        except (TypeError, ValueError) as error:
            shape = f" of shape {np.shape(x)}" if hasattr(x, "shape") else ""
            raise TypeError(
                "scale must be a number or a scalar array with a float dtype, got "
                f"{type(x).__name__}{shape}"
            ) from error
        if not math.isfinite(x):
            raise ValueError(f"scale must be finite, got {x}")
        return x, None

    def offset(self, x) -> Named | None:
        """query_offset as data, so that a new value compiles nothing; None for 0."""
        if isinstance(x, int | np.integer) and not isinstance(x, bool):
            if x == 0:
                return None
            return Named(np.int32(min(max(x, -_FAR), _FAR)), ())
        if not hasattr(x, "shape"):
            raise TypeError(
                f"query_offset must be an int or an int32 array, got {type(x).__name__}"
            )
        x = jnp.asarray(x)
        shape, axes = (self.batch, self.batch_axes) if x.ndim else ((), ())
        x = self._integers("query_offset", x, shape)
        return Named(_clipped(x, -_FAR, _FAR), axes)


def _broadcast(name: str, x, full: tuple[int, ...], names: Axes) -> Named:
    """Names the axes of `x`, which broadcasts to `full` (axes `names`)."""
    fits = x.ndim <= len(full) and all(
        size in (1, whole)
        for size, whole in zip(x.shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must broadcast to {full}, got shape {x.shape}")
    last = len(full) - x.ndim
    axes = (
        None if size == 1 and whole != 1 else axis
        for size, whole, axis in zip(x.shape, full[last:], names[last:], strict=True)
    )
    return Named(x, tuple(axes))


def _as_array(name: str, x) -> jax.Array:
    check_array(name, x)
    return jnp.asarray(x)


def _clipped(x: jax.Array, lo: int, hi: int) -> jax.Array:
    """Clips `x`, which has at least 32 bits, before it becomes int32."""
    lo = max(lo, 0) if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else lo
    return jnp.clip(x, jnp.array(lo, x.dtype), jnp.array(hi, x.dtype)).astype(jnp.int32)


def _words(x: jax.Array) -> list[jax.Array]:
    """32-bit or 64-bit integers as int32 arrays, which are equal where `x` is."""
    words = jax.lax.bitcast_convert_type(x, jnp.int32)
    return [words] if words.ndim == x.ndim else [words[..., 0], words[..., 1]]


def check_soft_cap(x) -> float | None:
    if x is None:
        return None
    try:
        if isinstance(x, bool | str):
            raise TypeError
        x = float(x)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            f"logits_soft_cap must be a Python number {_STATIC}, got {type(x).__name__}"
        ) from error
    if not (math.isfinite(x) and x > 0):
        raise ValueError(f"logits_soft_cap must be finite and > 0, got {x}")
    return x


def check_array(name: str, x) -> None:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")


def check_operands(query, key, value):
    operands = {"query": query, "key": key, "value": value}
    for name, x in operands.items():
        check_array(name, x)
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{name} must have dtype bfloat16, float16, float32 or float64, got "
                f"{x.dtype.name}"
            )
        if x.dtype != query.dtype:
            raise TypeError(
                "query, key and value must have the same dtype, got query "
                f"{query.dtype.name} and {name} {x.dtype.name}"
            )
        if x.ndim == 1 or x.ndim == 0:
            raise ValueError(
                f"{name} must have shape [*B, rows, heads, head size] or [rows, head "
                f"size], got shape {x.shape}"
            )
        if x.ndim != query.ndim:
            raise ValueError(
                "query, key and value must have the same rank, got query "
                f"{query.shape} and {name} {x.shape}"
            )
        if not all(isinstance(n, int) for n in x.shape[-3:]):
            raise ValueError(
                f"{name} must have constant numbers of rows and heads and a constant "
                f"head size (only batch axes may be symbolic), got shape {x.shape}"
            )
        if x.shape[-1] == 0:
            raise ValueError(
                f"{name} must have a head size of at least 1, got shape {x.shape}"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same head size, got query {query.shape} and "
            f"key {key.shape}"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            "key and value must have the same shape except for the head size, got key "
            f"{key.shape} and value {value.shape}"
        )
    if query.ndim > 2:
        if query.shape[:-3] != key.shape[:-3]:
            raise ValueError(
                "query and key must have the same batch shape, got query "
                f"{query.shape} and key {key.shape}"
            )
        n, k = query.shape[-2], key.shape[-2]
        if (k == 0 and n != 0) or (k != 0 and n % k):
            raise ValueError(
                "the number of key heads must divide the number of query heads, got "
                f"{k} key heads (key {key.shape}) and {n} query heads (query "
                f"{query.shape})"
            )
    return tuple(jnp.asarray(x) for x in operands.values())


def check_bool(name: str, x) -> None:
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be a Python bool, got {x!r}")


def check_implementation(implementation) -> None:
    if implementation is not None and implementation not in _backends.names():
        raise ValueError(
            f"implementation must be None or one of {_backends.names()}, got "
            f"{implementation!r}"
        )


def check_precision(precision) -> jax.lax.Precision | None:
    """Returns the first precision that is at least as exact as the one requested."""
    if precision is None or precision == (None, None):
        # As jax.numpy does.
        precision = jax.config.jax_default_matmul_precision
        if precision is None:
            return None
    pair = precision if isinstance(precision, tuple | list) else (precision,)
    found = [_precision(x) for x in pair]
    if len(pair) not in (1, 2) or None in found:
        raise ValueError(
            "precision must be None, 'default', 'high', 'highest', a "
            "jax.lax.Precision, a jax.lax.DotAlgorithmPreset or a pair of these, got "
            f"{precision!r}"
        )
    return max(found, key=_PRECISIONS.index)


_PRECISIONS = (
    jax.lax.Precision.DEFAULT,
    jax.lax.Precision.HIGH,
    jax.lax.Precision.HIGHEST,
)


def _precision(x) -> jax.lax.Precision | None:
    """The precision for one operand; None if `x` is not a precision."""
    if isinstance(x, bool):
        return None
    try:
        return jax.lax.Precision(x)
    except (TypeError, ValueError):
        pass
    name = x.name if isinstance(x, jax.lax.DotAlgorithmPreset) else x
    if not isinstance(name, str) or name not in jax.lax.DotAlgorithmPreset.__members__:
        return None
    # TF32, the default, is as exact as bfloat16 and float16; several products of
    # those, float32 and float64 are more exact.
    wide = name.startswith(("F32", "F64")) or name[:-1].endswith("_X")
    return jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT


def check_window(window: Any, is_causal: bool) -> Window | None:
    if window is None:
        return Window(None, 0) if is_causal else None
    sides = (window, window) if not isinstance(window, tuple | list) else window
    if len(sides) != 2:
        raise ValueError(
            f"local_window_size must be an int or a pair (left, right), got {window!r}"
        )
    bounds: list[int | None] = []
    for side in sides:
        if side is not None:
            if isinstance(side, bool):
                raise TypeError(f"local_window_size must contain ints, got {window!r}")
            try:
                side = operator.index(side)
            except TypeError as error:
                raise TypeError(
                    "local_window_size must contain Python ints or None, got "
                    f"{window!r}"
                ) from error
            if side < 0:
                raise ValueError(
                    f"local_window_size must not be negative, got {window!r}"
                )
            side = side if side < _FAR else None
        bounds.append(side)
    left, right = bounds
    return Window(left, 0 if is_causal else right)
