"""Sums over many pairs stay in float32, and so do differences that cancel.

Elements of two bytes keep three digits. What is summed in them stops growing once a
block adds less than a digit: so rows are long, and all that a block adds has one sign.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, attention
from pallas_kernels.configs import KERNELS
from tests.cases import ON_GPU

LONG, SHORT, HEAD = 4096, 16, 16
ROUNDING = 2.0**-8  # twice bfloat16's: p and dz are rounded too, and the result


_BLOCKS = Blocks(16, 16, 4, 1)
# Undivided, so that one program sums them all.
_CONFIG = Config(**dict.fromkeys(KERNELS, _BLOCKS), splits=1, interpret=not ON_GPU)
# The kernels in loops of 256 blocks; the others have 16 larger ones.
CALLS = {
    "xla": {"implementation": "xla"},
    "triton": {"implementation": "triton", "config": _CONFIG},
}


def _exact(q, k, v, do):
    """Output and gradients of one head in float64, in NumPy."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    p = np.exp(scale * (q @ k.T))
    p /= p.sum(1, keepdims=True)
    dp, o = do @ v.T, p @ v
    ds = scale * p * (dp - (o * do).sum(1, keepdims=True))
    return {"out": o, "dq": ds @ k, "dk": ds.T @ q, "dv": p.T @ do}


def _found(q, k, v, do, options):
    @jax.jit
    def run(q, k, v, do):
        out, vjp = jax.vjp(functools.partial(attention, **options), q, k, v)
        return out, *vjp(do)

    return dict(zip(("out", "dq", "dk", "dv"), run(q, k, v, do), strict=True))


def _normal(seed: int, rows: int):
    x = jax.random.normal(jax.random.key(seed), (rows, HEAD))
    return x.astype(jnp.bfloat16)


def _assert_near(found, exact, names):
    for name in names:
        error = np.abs(np.asarray(found[name], np.float64) - exact[name]).max()
        assert error <= ROUNDING * np.abs(exact[name]).max(), name


@pytest.mark.parametrize("backend", CALLS)
def test_long_rows_of_keys(backend):
    """out and dq: values and keys are alike, so that each key adds to dq's size."""
    q, k = _normal(0, SHORT), _normal(1, LONG)
    v, do = jnp.abs(k), jnp.ones_like(q)
    k = v - 0.75
    found = _found(q, k, v, do, CALLS[backend])
    _assert_near(found, _exact(q, k, v, do), ("out", "dq"))


@pytest.mark.parametrize("backend", CALLS)
def test_long_rows_of_queries(backend):
    """dk and dv: each query adds to the same keys."""
    k, q = _normal(0, SHORT), jnp.abs(_normal(1, LONG))
    v, do = k, jnp.abs(_normal(2, LONG))
    found = _found(q, k, v, do, CALLS[backend])
    _assert_near(found, _exact(q, k, v, do), ("dk", "dv"))


@pytest.mark.parametrize("backend", CALLS)
def test_a_difference_of_large_products(backend):
    """dp is 1024 or a little more, delta 1024: bfloat16 knows nothing between them."""
    sign = jnp.where(jnp.arange(32) % 2 == 0, 1.0, -1.0)
    v = jnp.full((32, HEAD), 64.0).at[:, 0].add(sign / 2).astype(jnp.bfloat16)
    k = jnp.broadcast_to(sign[:, None], v.shape).astype(jnp.bfloat16)
    # Scores are 0, and all else is exact.
    q = jnp.broadcast_to(sign[:HEAD], (SHORT, HEAD)).astype(jnp.bfloat16)
    found = _found(q, k, v, jnp.ones_like(q), CALLS[backend])
    assert np.all(np.asarray(found["dq"], np.float32) == 0.125)
    assert np.all(np.abs(np.asarray(found["dk"], np.float32)) == 0.0625)
