"""`and_masks`, `or_masks` and `not_mask`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import (
    and_masks,
    attention,
    explain,
    make_block_mask,
    not_mask,
    or_masks,
)

ROWS = 300
SHAPE = 1, 1, ROWS, ROWS
IDS = jnp.arange(ROWS) // 70
MASKS = {
    "causal": lambda b, h, q, kv: kv <= q,
    "near": lambda b, h, q, kv: abs(q - kv) < 40,
    "first": lambda b, h, q, kv: kv < 3,
    "documents": lambda b, h, q, kv: IDS[q] == IDS[kv],
}
AT = np.ogrid[:1, :1, :ROWS, :ROWS]
DENSE = {name: np.asarray(mask(*AT)) for name, mask in MASKS.items()}


def out(**mask) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, ROWS, 2, 16)) for key in keys)
    return attention(q, k, v, implementation="xla", **mask)


def kept(mask_mod) -> np.ndarray:
    return np.broadcast_to(mask_mod(*AT), SHAPE)


@pytest.mark.parametrize("names", [*itertools.combinations(MASKS, 2), tuple(MASKS)])
def test_of_several(names):
    own, dense = [MASKS[x] for x in names], [DENSE[x] for x in names]
    for join, expected in ((and_masks, np.logical_and), (or_masks, np.logical_or)):
        mask_mod, want = join(*own), expected.reduce(np.broadcast_arrays(*dense))
        np.testing.assert_array_equal(kept(mask_mod), want)
        np.testing.assert_allclose(out(mask_mod=mask_mod), out(mask=want), atol=2e-6)


@pytest.mark.parametrize("name", MASKS)
def test_of_none(name):
    mask_mod, want = not_mask(MASKS[name]), ~DENSE[name]
    np.testing.assert_array_equal(kept(mask_mod), np.broadcast_to(want, SHAPE))
    np.testing.assert_allclose(out(mask_mod=mask_mod), out(mask=want), atol=2e-6)
    np.testing.assert_array_equal(kept(not_mask(mask_mod)), kept(MASKS[name]))


def test_blocks_are_skipped_as_of_what_is_written_out():
    """By intervals, from lists, and as built-in masks."""
    far = and_masks(MASKS["causal"], not_mask(MASKS["near"]))
    far = or_masks(far, MASKS["first"])

    def by_hand(b, h, q, kv):
        return ((kv <= q) & ~(abs(q - kv) < 40)) | (kv < 3)

    size = dict(batch=None, heads=None, queries=1024, keys=1024)
    made, expected = (make_block_mask(x, **size) for x in (far, by_hand))
    assert str(made) == str(expected)
    x = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)
    joined, written, built_in = (
        explain(x, x, x, **more)
        for more in (
            {"mask_mod": and_masks(MASKS["causal"], MASKS["near"])},
            {"mask_mod": lambda b, h, q, kv: (kv <= q) & (abs(q - kv) < 40)},
            {"is_causal": True, "local_window_size": 39},
        )
    )
    assert joined == written
    assert joined.splitlines()[1] == built_in.splitlines()[1]  # operations of products


@pytest.mark.parametrize("join", [and_masks, or_masks])
def test_errors(join):
    name = join.__name__
    with pytest.raises(TypeError, match=f"{name} takes one mask_mod at least, got no"):
        join()
    text = rf"mask_mod of {name} must be a function of \(b, h, q, kv\)"
    with pytest.raises(TypeError, match=f"{text}, got BlockMask"):
        join(MASKS["near"], make_block_mask(MASKS["near"], None, None, 128, 128))
    with pytest.raises(TypeError, match=f"{text}: too many"):
        join(MASKS["near"], lambda q, kv: q >= kv)
    with pytest.raises(TypeError, match=r"of not_mask must be .*, got ndarray"):
        not_mask(np.ones((3, 3), bool))
