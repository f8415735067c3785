"""Operations for which a backend may have an instruction of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def wide_product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 32 bits of a product of uint32."""
    a, b = jnp.broadcast_arrays(a, b)
    return lax.mulhi(a, b), a * b


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a backend computes; by default, as JAX does.

    Attributes:
      tanh: the hyperbolic tangent, as accurate as the scores it is taken of.
      wide_product: upper and lower half of a product of uint32.
    """

    tanh: Callable = jnp.tanh
    wide_product: Callable = wide_product


PLAIN = Arithmetic()
