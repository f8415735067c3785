"""Operations for which a backend may have an instruction of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


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


def masked(x: jax.Array, kept: jax.Array) -> jax.Array:
    """x where a boolean array, or what a backend loads in its place, says so; -inf."""
    return jnp.where(kept, x, -jnp.inf)


def where_below(x: jax.Array, bits: jax.Array, limit: int) -> jax.Array:
    """x where the uint32 bits are below the limit, 0 elsewhere."""
    return jnp.where(bits < jnp.uint32(limit), x, 0.0)


def widened(x: jax.Array, dtype) -> jax.Array:
    """A block of keys or values in the dtype of products."""
    return x if x.dtype == dtype else x.astype(jnp.float32).astype(dtype)


def along(x: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """A vector along one axis of a block, so that it broadcasts against the block.

    Args:
      x: the vector, after the axes of batch and heads if there are any.
      axis: of the block: -2 for its rows, -1 for its columns.
      shape: of the block, for a backend whose operands must have equal shapes.
    """
    del shape
    return jnp.expand_dims(x, -3 - axis)


def numbers(start, axis: int, shape: tuple[int, int]) -> jax.Array:
    """int32 numbers from `start` on along one axis of a block of this shape.

    Args:
      axis: 0 or 1.
    """
    return jnp.expand_dims(start + lax.iota(jnp.int32, shape[axis]), 1 - axis)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a backend computes; by default, as JAX does.

    Attributes:
      exp2: of a scaled and shifted block.
      masked: a choice of scores by masks (`AttentionSpec.keep`).
      where_below: a choice of elements by random bits.
      widened: elements of one byte in the dtype of products.
      tanh: the hyperbolic tangent, as accurate as the scores it is taken of.
      wide_product: upper and lower half of a product of uint32.
      along: a vector against a block.
      numbers: row numbers against a block.
      bits: of dropout, in place of the method `Dropout.bits` and with its arguments;
        None for that method.
      constant: a shift on which results do not depend, taken out of derivatives. That
        of a maximum would ask which scores equal it; XLA may round those anew for the
        question, and find none: 0 / 0.
      drops_by_sign: whether the backward keeps what dropout drops as the sign of p, so
        that no registers hold bits while it waits for the next product.
    """

    exp2: Callable = exp2
    masked: Callable = masked
    where_below: Callable = where_below
    widened: Callable = widened
    tanh: Callable = jnp.tanh
    wide_product: Callable = wide_product
    along: Callable = along
    numbers: Callable = numbers
    bits: Callable | None = None
    constant: Callable = lax.stop_gradient
    drops_by_sign: bool = False


PLAIN = Arithmetic()
