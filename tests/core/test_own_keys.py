"""Masks of which the text says that each query attends the key of its own number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_flash2 import attention
from pallas_kernels.core.pointwise import trace
from tests.core.test_pointwise import IDS, NATURAL, B, N, S, boolean
from tests.lowering import lower_for_gpu

FIRST, X = IDS[0], jnp.linspace(-1.0, 1.0, S)
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
}


@pytest.mark.parametrize("name", MASKS)
def test_what_is_seen(name):
    mask, known = MASKS[name]
    assert trace(mask, None, NATURAL).keeps_own_key == known


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(0, 3))
def test_what_is_said_is_true(seed, depth):
    """Of random functions alone, and of those that are True of q = kv for certain."""
    mask = boolean(np.random.default_rng(seed), depth)
    for kept in (mask, lambda *at: mask(*at) | (at[2] - at[3] <= 0)):
        if trace(kept, None, NATURAL).keeps_own_key:
            b, h, at = np.indices((B, N, S), dtype=np.int32)
            assert np.all(jax.jit(jnp.vectorize(kept))(b, h, at, at))
    assert trace(kept, None, NATURAL).keeps_own_key


@pytest.mark.parametrize(
    ("name", "rows", "keys", "offset", "copies"),
    [
        ("prefix", 256, 256, 0, False),
        ("documents", 256, 256, 0, False),
        ("before", 256, 256, 0, True),
        ("neighbours", 256, 128, 0, True),
        ("neighbours", 256, 256, 3, True),
    ],
)
@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_queries_are_not_copied(name, rows, keys, offset, copies, backend):
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
