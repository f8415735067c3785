"""Divided rows where rows are few."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Context, attention
from tests.divided import Divided

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="fewer than 4 devices")

XLA = {"implementation": "xla"}


@pytest.mark.parametrize("method", ["ring", "gather", "heads"])
def test_a_mask_of_rows_where_each_device_has_one(method):
    """A device's mask of its only row has one element, and is no constant of all."""
    query, key = (jax.random.normal(jax.random.key(t), (1, t, 4, 8)) for t in (4, 8))
    mask = np.array([[True], [False], [True], [False]])
    call = Divided(Context("x", None, method), (4,))
    out = jax.jit(lambda *x: call(*x, mask=mask, **XLA))(query, key, key)
    expected = attention(query, key, key, mask=mask, **XLA)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    assert not jnp.any(out[:, 1])
