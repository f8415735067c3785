"""Masks of which the text says that each query attends the key of its own number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jax_flash2 import attention
from pallas_kernels.core.pointwise import trace
from tests.core.test_pointwise import IDS, NATURAL, B, N, S, boolean
from tests.lowering import lower_for_gpu
from tests.tiers import deeply

FIRST, X = IDS[0], jnp.linspace(-1.0, 1.0, S)
Z = jnp.where(jnp.arange(S) == 3, jnp.nan, X).astype(jnp.complex64)
FAR, ROWS = 2**31 - 1, jnp.arange(16)
BYTES, TWO = ROWS.astype(jnp.uint8), jnp.stack([ROWS, ROWS + 1])
MASKS = {
    "causal": (lambda b, h, q, kv: q >= kv, True),
    "not after": (lambda b, h, q, kv: ~(kv > q), True),
    "before": (lambda b, h, q, kv: q > kv, False),
    "window": (lambda b, h, q, kv: (q >= kv) & (q - kv < 5), True),
    "a window behind": (lambda b, h, q, kv: (q - kv > 2) & (q - kv < 5), False),
    "prefix": (lambda b, h, q, kv: (kv < 9) | (q >= kv), True),
    "prefix alone": (lambda b, h, q, kv: kv < 9, False),
    "global keys": (lambda b, h, q, kv: (q >= kv) & ((q - kv < 5) | (kv < 3)), True),
    "neighbours": (lambda b, h, q, kv: abs(q // 4 - kv // 4) <= 1, True),
    "dilated": (lambda b, h, q, kv: (q // 2 - kv // 2) % 3 == 0, True),
    "others": (lambda b, h, q, kv: (q - kv) % 3 != 0, False),
    "documents": (lambda b, h, q, kv: IDS[b, q] == IDS[b, kv], True),
    "of another entry": (lambda b, h, q, kv: IDS[b, q] == FIRST[kv], False),
    "other documents": (lambda b, h, q, kv: IDS[b, q] != IDS[b, kv], False),
    "equal floats, or NaN": (lambda b, h, q, kv: X[q] == X[kv], False),
    "an even query": (lambda b, h, q, kv: (q % 2 == 0) & (q >= kv), False),
    "by head": (lambda b, h, q, kv: (h == 0) | (q >= kv), True),
    "all": (lambda b, h, q, kv: q == q, True),
    "equal complex numbers, or NaN": (lambda b, h, q, kv: Z[q] == Z[kv], False),
    "a sum that overflows": (lambda b, h, q, kv: ~(q - kv + (q + FAR) < 0), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_is_seen(name):
    mask, known = MASKS[name]
    assert trace(mask, None, NATURAL).keeps_own_key == known


@example(98, 0)  # of these two it is said, as of few random functions
@example(98, 2)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(0, 3))
def test_what_is_said_is_true(seed, depth):
    """Of random functions alone, and of those that are True of q = kv for certain."""
    mask = boolean(np.random.default_rng(seed), depth)
    if trace(mask, None, NATURAL).keeps_own_key:
        b, h, at = np.indices((B, N, S), dtype=np.int32)
        assert np.all(jax.jit(jnp.vectorize(mask))(b, h, at, at))
    certain = lambda *at: mask(*at) | (at[2] - at[3] <= 0)  # noqa: E731
    assert trace(certain, None, NATURAL).keeps_own_key


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (lambda b, h, q, kv: BYTES[q] == BYTES[kv], {"query_offset": 4}),
        (lambda b, h, q, kv: ROWS[q] == ROWS[kv], {"query_offset": np.int32([4])}),
        (lambda b, h, q, kv: TWO[0, q] == TWO[1, kv], {}),
        (lambda b, h, q, kv: ROWS[q] == ROWS[7 - kv] + 1, {}),
        *deeply(
            (lambda b, h, q, kv: Z[q] == Z[kv], {}),
            (lambda b, h, q, kv: ~(q - kv + (q + FAR) < 0), {}),
            (lambda b, h, q, kv: TWO[h, q] == TWO[h, kv], {"query_offset": 4}),
            (lambda b, h, q, kv: abs(BYTES[q] - BYTES[kv]) < 1, {"query_offset": 4}),
        ),
    ],
)
def test_nan_in_queries_without_keys(mask, options):
    """Where positions have an offset, or where arrays are compared at other rows."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 16))
    options = {**options, "mask_mod": mask, "implementation": "xla"}
    call = functools.partial(attention, **options)

    @jax.jit
    def gradients(q, k, v):
        _, lse = call(q, k, v, return_residual=True)
        is_empty = (lse == -jnp.inf)[..., None]
        q, do = (jnp.where(is_empty, jnp.nan, x) for x in (q, jnp.ones_like(q)))
        return is_empty, jax.vjp(call, q, k, v)[1](do)

    is_empty, found = gradients(q, k, v)
    assert is_empty.any()
    for x in found:
        assert np.isfinite(x).all()


@pytest.mark.parametrize(
    ("backend", "name", "rows", "keys", "offset", "copies"),
    [
        ("triton", "documents", 256, 256, 0, False),
        ("triton", "neighbours", 256, 128, 0, True),
        ("mosaic_gpu", "prefix", 256, 256, 0, False),
        ("mosaic_gpu", "before", 256, 256, 0, True),
        *deeply(
            ("triton", "prefix", 256, 256, 0, False),
            ("triton", "before", 256, 256, 0, True),
            ("triton", "neighbours", 256, 256, 3, True),
            ("mosaic_gpu", "documents", 256, 256, 0, False),
            ("mosaic_gpu", "neighbours", 256, 128, 0, True),
            ("mosaic_gpu", "neighbours", 256, 256, 3, True),
        ),
    ],
)
def test_queries_are_not_copied(backend, name, rows, keys, offset, copies):
    """Where each has a key, none needs to be cleared before the backward kernels."""
    shapes = ((2, n, 2, 64) for n in (rows, keys, keys))
    q, k, v = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes)
    mask = MASKS[name][0]
    options = {"mask_mod": mask, "query_offset": offset, "implementation": backend}

    def gradients(q, k, v):
        out, pull = jax.vjp(functools.partial(attention, **options), q, k, v)
        return pull(out)

    lines = lower_for_gpu(gradients, q, k, v).splitlines()
    selects = [x for x in lines if "stablehlo.select" in x and "bf16" in x]
    assert any(f"2x{rows}x2x64xbf16" in x for x in selects) == copies
