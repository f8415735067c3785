"""Operations for which a backend may have an instruction of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


def wide_product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 32 bits of a product of uint32.

    From products of 16 bits: `lax.mulhi` does not compile on a mesh (JAX 0.12.0.1).
    """
    low, half = jnp.uint32(0xFFFF), jnp.uint32(16)
    a1, a0, b1, b0 = a >> half, a & low, b >> half, b & low
    middle = a1 * b0 + (a0 * b0 >> half)
    carry = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> half) + (carry >> half), a * b


def exp2(x: jax.Array, scale: float, shift) -> jax.Array:
    """2 ** (scale * x - shift); shift, a number or an array, broadcasts against x."""
    return jnp.exp2(x * scale - shift)


def where_below(x: jax.Array, bits: jax.Array, limit: int) -> jax.Array:
    """x where the uint32 bits are below the limit, 0 elsewhere."""
    return jnp.where(bits < jnp.uint32(limit), x, 0.0)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a backend computes; by default, as JAX does.

    Attributes:
      exp2: of a scaled and shifted block.
      where_below: a choice of elements by random bits.
      tanh: the hyperbolic tangent, as accurate as the scores it is taken of.
      wide_product: upper and lower half of a product of uint32.
    """

    exp2: Callable = exp2
    where_below: Callable = where_below
    tanh: Callable = jnp.tanh
    wide_product: Callable = wide_product


PLAIN = Arithmetic()
