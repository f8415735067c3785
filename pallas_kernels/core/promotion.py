"""How dtypes and ranks meet here, whatever a caller's rules for their own code are.

`jax.numpy_dtype_promotion("strict")` and `jax.numpy_rank_promotion("raise")` are rules
for all that is traced while they hold.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np


@contextlib.contextmanager
def own_rules():
    """A context, or a decorator, in which JAX's usual rules hold."""
    rank, dtype = jax.numpy_rank_promotion, jax.numpy_dtype_promotion
    with rank("allow"), dtype("standard"):
        yield


def at_least_float32(dtype) -> np.dtype:
    """In which numbers of a dtype are added: float64 in itself, others in float32."""
    is_wider = jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize > 4
    return jnp.dtype(dtype if is_wider else jnp.float32)
