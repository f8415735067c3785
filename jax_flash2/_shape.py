"""The sizes of a call of attention: checks of arrays against them, and axes' names.

Every error names the argument, says what was given and what was expected.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2._arrays import (
    as_array,
    as_floats,
    as_integers,
    as_scale,
    check_array,
    clipped,
    unwrapped,
    words,
)
from jax_flash2._options import FAR, STATIC, check_bool
from pallas_kernels.core.axes import ALL_KEYS, Axes, Named
from pallas_kernels.core.dropout import Dropout, seeds
from pallas_kernels.core.masks import DenseMask, SegmentIds, Starts
from pallas_kernels.core.quantise import FP8


class Shape:
    """The sizes of a call, and checks of the other arguments against them.

    With rows that are divided over `parts` devices, `t` and `s` are those of one.
    """

    def __init__(self, query, key, parts: int = 1):
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
        self.key_heads = () if self.single else (key.shape[-2],)
        heads = (1, 1) if self.single else (query.shape[-2], key.shape[-2])
        self.group = heads[0] // max(heads[1], 1)
        self.head_axes = ("n",) if self.heads else ()

    def operands(self, query, key, value) -> list[Named]:
        def axes(rows: str, heads: str, head: str) -> Axes:
            return (*self.batch_axes, rows, *([] if self.single else [heads]), head)

        return [
            Named(query, axes("t", "n", "h")),
            Named(key, axes("s", "k", "h")),
            Named(value, axes("s", "k", "d")),
        ]

    def _integers(self, name: str, x, shape: tuple[int, ...]):
        """Integers (`as_integers`) of exactly this shape."""
        x = as_integers(name, x)
        if x.shape != shape:
            raise ValueError(
                f"{name} must have shape {shape} because query has batch shape "
                f"{self.batch}, got shape {x.shape}"
            )
        return x

    def lengths(self, name: str, x, size: int) -> Named | None:
        if x is None:
            return None
        x = self._integers(name, x, self.batch)
        return Named(clipped(x, 0, size), self.batch_axes)

    def starts(self, x) -> list[Starts]:
        """Zero atoms or one."""
        if x is None:
            return []
        x = self._integers("key_value_seq_starts", x, self.batch)
        return [Starts(Named(clipped(x, 0, self.parts * self.s), self.batch_axes))]

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
        if len({jax.dtypes.canonicalize_dtype(x.dtype) for x in (q, kv)}) > 1:
            raise TypeError(
                "query_segment_ids and key_value_segment_ids must have the same "
                f"dtype, got {q.dtype.name} and {kv.dtype.name}"
            )
        q_axes, kv_axes = (*self.batch_axes, "t"), (*self.batch_axes, "s")
        own = key_value_ids is query_ids
        return [
            SegmentIds(Named(a, q_axes), Named(b, kv_axes), own)
            for a, b in words(q, kv)
        ]

    def mask(self, x) -> DenseMask:
        x = as_array("mask", x)
        if x.dtype != jnp.bool_:
            raise TypeError(
                f"mask must have dtype bool (True = attend), got {x.dtype.name}: of a "
                "mask of 1 (attend) and 0 pass mask.astype(bool); one that is added to "
                "the scores, of which 0 attends, is a bias: pass it as bias="
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
        is_mask = name == "bias" and getattr(unwrapped(x), "dtype", None) == jnp.bool_
        hint = ": pass a boolean mask as mask=" if is_mask else ""
        return as_floats(name, x, max(4, self.dtype.itemsize), hint)

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

    def operand_scale(self, name: str, x, dtype) -> Named:
        """The scale of a quantised query, key or value of that dtype.

        Keys and values may have one for each row beside queries that are not quantised.
        """
        is_query = name == "query_scale"
        heads = self.heads if is_query else self.key_heads
        axes: Axes = () if self.single else ("n" if is_query else "k",)
        x = unwrapped(x)
        if x is None:
            raise TypeError(
                f"{name} must be given for a {name.split('_')[0]} in {dtype.name}, got "
                "None: what it is multiplied by, 1.0 for nothing"
            )
        x = as_scale(name, x, max(4, self.dtype.itemsize))
        shapes: dict[tuple[int, ...], Axes] = {
            (): (),
            heads: axes,
            (*self.batch, *heads): (*self.batch_axes, *axes),
        }
        of_rows = self.dtype != FP8
        if of_rows:
            rows, names = (*self.batch, self.s), (*self.batch_axes, "s")
            one = {} if self.single else {(*rows, 1): (*names, None)}
            shapes |= {**one, (*rows, *heads): (*names, *axes)}
        if x.shape not in shapes:
            expected = ", ".join(map(str, shapes))
            raise ValueError(
                f"{name} must have one of the shapes {expected}, got shape {x.shape}"
            )
        return Named(x if of_rows else x.astype(jnp.float32), shapes[x.shape])

    def bias(self, x) -> Named:
        return self._of_pairs("bias", self._float("bias", x))

    def dropout(self, rate, rng, broadcast) -> Dropout | None:
        """None if the rate rounds to 0."""
        check_bool("broadcast_dropout", broadcast)
        if isinstance(rate, bool) or not isinstance(rate, int | float | np.number):
            raise TypeError(
                f"dropout_rate must be a Python number {STATIC}, got "
                f"{type(rate).__name__}"
            )
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"dropout_rate must be in [0, 1), got {rate}")
        threshold = max(Dropout.threshold_of(float(rate)), 1)
        rng = unwrapped(rng)
        if rng is not None:
            _check_key(rng)
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
        x = unwrapped(x)
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
        x = unwrapped(x)
        if isinstance(x, int | np.integer) and not isinstance(x, bool):
            if x == 0:
                return None
            return Named(np.int32(min(max(x, -FAR), FAR)), ())
        if isinstance(x, bool | float) or x is None:
            raise TypeError(
                f"query_offset must be an int or an int32 array, got {type(x).__name__}"
            )
        check_array("query_offset", x)
        shape, axes = (self.batch, self.batch_axes) if x.shape else ((), ())
        x = self._integers("query_offset", x, shape)
        return Named(clipped(x, -FAR, FAR), axes)


def _broadcast(name: str, x, full: tuple[int, ...], names: Axes) -> Named:
    """Names the axes of `x`, which broadcasts to `full` (axes `names`)."""
    fits = x.ndim <= len(full) and all(
        size in (1, whole)
        for size, whole in zip(x.shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} must broadcast to {full}, got shape {x.shape}"
            f"{_missing_axes(name, x.shape, full, names)}"
        )
    last = len(full) - x.ndim
    axes = (
        None if size == 1 and whole != 1 else axis
        for size, whole, axis in zip(x.shape, full[last:], names[last:], strict=True)
    )
    return Named(x, tuple(axes))


def _missing_axes(name: str, shape, full: tuple[int, ...], names: Axes) -> str:
    """What to do about axes of heads or queries that a mask or bias lacks."""
    batch = len(names) - 3
    if batch < 1:
        return ""
    leading = ", ".join([":"] * batch)
    if shape == (*full[:batch], full[-1]):
        more = ", or lengths as key_value_seq_lengths" if name == "mask" else ""
        return f": of keys, pass {name}[{leading}, None, None, :]{more}"
    if shape == (*full[:batch], *full[-2:]):
        return f": for all heads, pass {name}[{leading}, None, :, :]"
    return ""


def _check_key(rng) -> None:
    """Raises a TypeError if `rng` is no array."""
    if isinstance(rng, int):
        raise TypeError(
            "dropout_rng must be a JAX random key, an array, got "
            f"{type(rng).__name__}: pass jax.random.key({rng})"
        )
    # Flax's `nnx.Rngs` has every attribute, also a dtype.
    if callable(rng) and not isinstance(getattr(rng, "shape", None), tuple):
        raise TypeError(
            "dropout_rng must be a JAX random key, an array, got "
            f"{type(rng).__name__}: of Flax's nnx.Rngs pass rngs.dropout()"
        )
    check_array("dropout_rng", rng)
