"""Integers of four bits, two in a byte: that of the even place in its low half.

Such bytes are uint8, and their axis has another name than that of the elements
(`core.axes.in_pairs`). They are two's complements, from -8 to 7: what `jax.lax` makes
of an array of int4 with `bitcast_convert_type`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The dtype of the bytes.
BYTES = jnp.uint8


def packed(x: jax.Array) -> jax.Array:
    """Integers [..., H] in pairs: uint8 [..., H / 2]."""
    low, high = (x[..., i::2].astype(jnp.int32) & 15 for i in (0, 1))
    return (low | high << 4).astype(BYTES)


def half(x: jax.Array, place: int) -> jax.Array:
    """The elements of one place in each byte, int8: the even ones (0), or the odd."""
    numbers = x.astype(jnp.int32) >> 4 * place & 15
    return ((numbers ^ 8) - 8).astype(jnp.int8)


def elements(x: jax.Array) -> jax.Array:
    """Bytes [..., H / 2] as int8 [..., H]."""
    both = jnp.stack([half(x, 0), half(x, 1)], -1)
    return both.reshape(*x.shape[:-1], 2 * x.shape[-1])
