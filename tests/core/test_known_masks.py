"""Which parts of a `mask_mod` become built-in masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import _api, attention
from pallas_kernels.core.masks import MaskMod, SegmentIds, Window

T = 40
X = jnp.zeros((2, T, 4, 16))
IDS = jnp.asarray(np.cumsum(np.arange(2 * T).reshape(2, T) % 9 == 0, axis=1), jnp.int32)
LATER = IDS[::-1]
STEP = jnp.int32(3)


def masks_of(mask_mod, **more):
    found = []
    jax.eval_shape(
        lambda x: found.extend(
            _api.given(x, x, x, mask_mod=mask_mod, **more).checked().spec.masks
        ),
        X,
    )
    return found


WINDOWS = {
    "q >= kv": (lambda b, h, q, kv: q >= kv, None, 0),
    "not": (lambda b, h, q, kv: ~(q < kv), None, 0),
    "reversed": (lambda b, h, q, kv: (kv <= q) & (kv > q - 7), 6, 0),
    "distance": (lambda b, h, q, kv: (q - kv < 7) & (kv - q <= 2), 6, 2),
    "abs": (lambda b, h, q, kv: abs(kv - q) < 5, 4, 4),
    "shifted": (lambda b, h, q, kv: (q + 3 >= kv + 1) & (q - kv <= 9), 9, 2),
    "narrowest": (lambda b, h, q, kv: (q - kv <= 9) & ~(q - kv > 4), 4, None),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name):
    mask_mod, left, right = WINDOWS[name]
    assert masks_of(mask_mod) == [Window(left, right)]


def test_equal_ids_are_segments():
    (causal, ids) = masks_of(
        lambda b, h, q, kv: ~((IDS[b, q] != IDS[b, kv]) | (q < kv))
    )
    assert causal == Window(None, 0)
    assert isinstance(ids, SegmentIds) and ids.are_shared
    (ids,) = masks_of(lambda b, h, q, kv: LATER[b, kv] == IDS[b, q])
    assert isinstance(ids, SegmentIds) and not ids.are_shared
    assert ids.query.axes[-1] == "t"
    (ids,) = masks_of(lambda b, h, q, kv: IDS[b, q] == IDS[b, kv], query_offset=3)
    assert isinstance(ids, SegmentIds) and not ids.are_shared


OTHERS = {
    "a side without the query": lambda b, h, q, kv: q - kv >= 3,
    "or": lambda b, h, q, kv: (q >= kv) | (kv < 3),
    "a sum": lambda b, h, q, kv: q + kv <= 30,
    "twice": lambda b, h, q, kv: q - 2 * kv <= 3,
    "a traced number": lambda b, h, q, kv: q - kv <= STEP,
    "floats": lambda b, h, q, kv: (q - kv).astype(jnp.float32) <= 2.5,
    "ids that differ": lambda b, h, q, kv: IDS[b, q] != IDS[b, kv],
    "ids of two queries": lambda b, h, q, kv: IDS[b, q] == LATER[b, q],
    "ids by heads": lambda b, h, q, kv: IDS[h % 2, q] == IDS[h % 2, kv],
    "far": lambda b, h, q, kv: abs(q - kv) > 3,
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_functions(name):
    (found,) = masks_of(OTHERS[name])
    assert isinstance(found, MaskMod)


def test_what_is_left_reads_only_its_own_arrays():
    window, left = masks_of(lambda b, h, q, kv: (q >= kv) & (LATER[b, q] <= IDS[b, kv]))
    assert window == Window(None, 0)
    assert len(left.arrays) == 2 and left.entry is None
    window, ids, left = masks_of(
        lambda b, h, q, kv: (
            (q - kv < 9) & (IDS[b, q] == IDS[b, kv]) & ((q + h) % 2 == 0)
        )
    )
    assert (window, type(ids)) == (Window(8, None), SegmentIds)
    assert left.arrays == () and left.head is not None


def test_the_same_numbers():
    """As by whole matrices, with a part that is left."""
    q = jax.random.normal(jax.random.key(0), X.shape)

    def mask_mod(b, h, q, kv):
        near = (q - kv < 9) & ~(kv > q)
        return near & (IDS[b, kv] == IDS[b, q]) & ((q + kv + h) % 3 > 0)

    at = np.indices((2, 4, T, T), dtype=np.int32)
    kept = jax.jit(jnp.vectorize(mask_mod))(*at)
    options = {"implementation": "xla", "precision": "highest"}
    found = attention(q, q, q, mask_mod=mask_mod, **options)
    expected = attention(q, q, q, mask=kept, **options)
    assert np.max(np.abs(found - expected)) < 1e-5
