"""Divided rows: few of them, long windows, and what no ring is for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jax_flash2 import Context, attention
from jax_flash2._rows import copied, sharding_of
from tests.cases import INTERPRETED
from tests.devices.test_context_errors import explained
from tests.divided import Divided

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="fewer than 4 devices")

XLA = {"implementation": "xla"}


@pytest.mark.parametrize("method", ["ring", "gather", "heads"])
def test_a_mask_of_rows_where_each_device_has_one(method):
    """A device's mask of its only row has one element, and is no constant of all."""
    rng = np.random.default_rng(0)
    query, key = (np.float32(rng.standard_normal((1, t, 4, 8))) for t in (4, 8))
    mask = np.array([[True], [False], [True], [False]])
    call = Divided(Context("x", None, method), (4,))
    out = jax.jit(lambda *x: call(*x, mask=mask, **XLA))(query, key, key)
    expected = jax.jit(lambda *x: attention(*x, mask=mask, **XLA))(query, key, key)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    assert not np.any(np.asarray(out)[:, 1])


@pytest.mark.parametrize(
    ("window", "method"),
    [
        ((12287, 0), "halo"),
        ((12288, 0), "ring"),
        ((6144, 6144), "ring"),
        ((2**20, 2**20), "ring"),
    ],
)
def test_a_window_that_needs_all_rows_has_no_halo(window, method):
    """Not by choice: of 4 devices with 4096 rows each one would hold more than all."""
    lines = explained(Context("x", None), 16384, local_window_size=window)
    assert lines[0].startswith(f"context: {method}, ")


def test_the_reference_has_no_ring():
    """It is refused, and many rows do not choose it."""
    query = jax.ShapeDtypeStruct((1, 4 * 2048, 4, 8), jnp.float32)

    def call(method):
        divided = Divided(Context("x", 16, method), (4,))
        return lambda x: divided(x, x, x, implementation="reference")

    assert jax.eval_shape(call(None), query).shape == query.shape
    with pytest.raises(ValueError, match=r"'ring' cannot.*'reference' wants all keys"):
        jax.eval_shape(call("ring"), query)


def test_gradients_of_gathered_rows_are_summed_in_float32():
    """In bfloat16, 1 + 2**-8 is 1, whichever device has which of them."""
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,))

    def local(x, cotangents):
        sharding = sharding_of(Context("x", None))
        _, pull = jax.vjp(sharding.of_all, x)
        return pull(cotangents[0])[0]

    rows = PartitionSpec("x")
    gradient = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)
    cotangents = np.zeros((devices, devices, 1), jnp.bfloat16)
    cotangents[:3] = np.array([1, 2.0**-8, 2.0**-8])[:, None, None]
    found = jax.jit(gradient)(jnp.ones(devices, jnp.bfloat16), cotangents)
    expected = cotangents.astype(np.float32).sum(0)[:, 0].astype(jnp.bfloat16)
    assert np.all(np.asarray(found) == expected) and np.all(expected > 1)


def test_gradients_of_copies_are_added_in_float32():
    """Of rows that several devices need."""
    cotangents = [jnp.asarray(x, jnp.bfloat16) for x in (1, 2.0**-8, 2.0**-8)]
    _, pull = jax.vjp(lambda x: copied(x, 3), jnp.asarray(3, jnp.bfloat16))
    assert pull(cotangents)[0] == 1 + 2.0**-7


def test_parts_of_keys_are_of_the_keys_of_all_devices():
    query = jax.ShapeDtypeStruct((1, 4 * 16, 4, 8), jnp.float32)
    call = Divided(Context("x", 16, "gather"), (4,))

    def shape(splits):
        config = dataclasses.replace(INTERPRETED, splits=splits)
        options = {"implementation": "triton", "config": config}
        return jax.eval_shape(lambda x: call(x, x, x, **options), query).shape

    assert shape(4) == query.shape
    with pytest.raises(ValueError, match=r"does not fit 64 keys.* from 1 to 4"):
        shape(5)
