"""Layouts of divided rows, what is refused, and what `explain` says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_flash2 import (
    Context,
    attention,
    explain,
    stripe,
    stripe_positions,
    unstripe,
)
from pallas_kernels import device
from tests.devices.test_context_calls import GATHER, HEADS, RING, XLA, operands
from tests.divided import Divided

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="fewer than 4 devices")


# Layouts.


def test_stripes_are_undone():
    x = np.arange(2 * 96 * 3).reshape(2, 96, 3)
    for parts, size in ((2, 16), (3, 8), (1, 96), (6, 1)):
        striped = stripe(x, parts, size)
        assert isinstance(striped, np.ndarray)
        np.testing.assert_array_equal(unstripe(striped, parts, size), x)
        positions = stripe_positions(96, parts, size)
        np.testing.assert_array_equal(striped, x[:, positions])
    first = stripe_positions(12, 2, 3)[:6]
    np.testing.assert_array_equal(first, [0, 1, 2, 6, 7, 8])
    jitted = jax.jit(functools.partial(stripe, parts=2, size=16))
    np.testing.assert_array_equal(jitted(x), stripe(x, 2, 16))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"parts": 5, "size": 16}, ValueError, r"multiple of parts \* size = 80 rows"),
        ({"parts": 0}, ValueError, "parts must be at least 1, got 0"),
        ({"parts": 2, "size": 1.5}, TypeError, "size must be an int, got float"),
        ({"parts": 2, "axis": 3}, ValueError, "axis must be an axis of x"),
    ],
)
def test_wrong_stripes(arguments, error, words):
    with pytest.raises(error, match=words):
        stripe(np.zeros((2, 96, 3)), **arguments)


# What is refused.


def refused(call: Divided, error=ValueError, rows=128, heads=4, arrays=(), **options):
    """The message for a call."""
    made = operands(rows=rows, heads=heads, dtype=jnp.float32)
    with pytest.raises(error) as caught:
        jax.eval_shape(functools.partial(call, **XLA, **options), *made)
    return str(caught.value)


@pytest.mark.parametrize(
    ("attributes", "error", "words"),
    [
        ({"axis": 3}, TypeError, "Context.axis must be the name of a mesh axis"),
        ({"axis": ()}, TypeError, "Context.axis must be the name"),
        ({"axis": ("a", "a")}, ValueError, "must name each axis once"),
        ({"axis": "a", "stripe": 0}, ValueError, "stripe must be at least 1, got 0"),
        ({"axis": "a", "stripe": 2.0}, TypeError, "stripe must be an int, got float"),
        ({"axis": "a", "method": "rings"}, ValueError, r"got 'rings'"),
    ],
)
def test_wrong_contexts(attributes, error, words):
    with pytest.raises(error, match=words):
        Context(**attributes)


def test_context_is_a_context():
    x = jnp.zeros((2, 16, 2, 8))
    with pytest.raises(TypeError, match=r"context must be a jax_flash2\.Context"):
        attention(x, x, x, context="x")


def test_the_axis_is_manual():
    x = jnp.zeros((2, 16, 2, 8))
    with pytest.raises(ValueError, match="axis 'x' must be a manual mesh axis here"):
        attention(x, x, x, context=Context("x"))


def test_stripes_divide_rows():
    def call(*arrays):
        return attention(*arrays, context=Context("x", 48))

    rows = P(None, "x")
    call = jax.shard_map(call, mesh=RING.mesh, in_specs=rows, out_specs=rows)
    with pytest.raises(ValueError, match=r"stripe=48 must divide the rows of query"):
        call(*operands(dtype=jnp.float32))


@pytest.mark.parametrize("name", ["query", "key"])
def test_query_and_keys_are_divided_alike(name):
    def call(*arrays):
        return attention(*arrays, context=Context("x", None))

    rows, whole = P(None, "x"), P()
    specs = (rows, whole, whole) if name == "query" else (whole, rows, rows)
    call = jax.shard_map(call, mesh=RING.mesh, in_specs=specs, out_specs=P())
    with pytest.raises(ValueError, match=rf"rows of {name} are divided along mesh"):
        call(*operands(dtype=jnp.float32))


def test_methods_that_cannot_serve_name_one_that_can():
    mask = np.ones((128, 128), bool)
    message = refused(RING, mask=mask)
    assert "mask has an element for each pair of rows" in message
    assert "method='gather' or method='heads' can" in message
    message = refused(RING, bias=np.zeros((1, 1, 128, 128), np.float32))
    assert "bias has a number for each pair of rows" in message
    message = refused(HEADS, heads=2)
    assert "4 devices do not divide 2 key/value heads" in message
    halo = Divided(Context("x", 16, "halo"), (4,))
    assert "however far" in refused(halo)
    assert "must be causal and not longer" in refused(halo, local_window_size=(20, 0))
    window = {"local_window_size": (9, 0), "query_offset": np.int32(3)}
    assert "query_offset moves queries" in refused(halo, **window)
    odd = Divided(Context("x", None, "ring"), (4,))
    dropout = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    message = refused(odd, rows=96, **dropout)
    assert "dropout needs multiples of 32 rows of a device, got 24" in message
    assert "method='heads' can" in message


def test_pairs_have_all_keys():
    mask = np.ones((128, 32), bool)
    message = refused(GATHER, mask=mask)
    assert (
        "mask with rows of queries must have the 128 keys of all 4 devices" in message
    )


# What is chosen.


def explained(context, rows: int, heads=4, kv_heads=None, shape=(4,), **options):
    struct = jax.ShapeDtypeStruct((1, rows, heads, 64), jnp.bfloat16)
    texts = []

    def call(q):
        k = q[:, :, :kv_heads]
        texts.append(explain(q, k, k, context=context, **options))
        return q

    mesh = Divided(context, shape).mesh
    on_devices = jax.shard_map(
        call, mesh=mesh, in_specs=P(None, context.axes), out_specs=P(None, context.axes)
    )
    jax.eval_shape(on_devices, struct)
    return texts[0].splitlines()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("NVIDIA H100 80GB HBM3", "gather"),
        ("NVIDIA A100-SXM4-80GB", "gather"),
        ("NVIDIA H100 PCIe", "ring"),
        ("NVIDIA H200 NVL", "ring"),
    ],
)
def test_keys_are_gathered_over_fast_links(kind, method, monkeypatch):
    monkeypatch.setattr(device, "device_kind", lambda: kind)
    found = explained(Context("x"), 16384, 8, 2)[0]
    assert found.startswith(f"context: {method}, since")


def test_a_window_of_all_rows_has_a_halo_where_it_is_named():
    window = {"is_causal": True, "local_window_size": (127, 0)}
    context = Context("x", None, "halo")
    assert explained(context, 128, **window)[0].startswith("context: halo")


def test_explain_names_the_method():
    first, second, *_ = explained(Context("x"), 16384, is_causal=True)
    assert first == (
        "context: ring, since queries may look at all rows (4 devices along 'x', "
        "stripes of 128 rows)"
    )
    assert second.startswith("implementation: ")
    few = explained(Context("x"), 4096, is_causal=True)[0]
    assert few.startswith("context: gather, since 1024 key rows a device are few")
    # One process has these devices.
    for rows, heads, kv_heads, method in (
        (16384, 8, 2, "gather"),
        (2**19 - 1024, 8, 2, "gather"),
        (2**19, 8, 2, "ring"),
        (16384, 6, 2, "ring"),
    ):
        found = explained(Context("x"), rows, heads, kv_heads)[0]
        assert found.startswith(f"context: {method}, since"), found
    window = {"is_causal": True, "local_window_size": (100, 0)}
    assert explained(Context("x", None), 16384, **window)[0].startswith("context: halo")
    assert explained(Context("x"), 16384, **window)[0].startswith("context: halo")
    long = {"is_causal": True, "local_window_size": (1000, 0)}
    assert explained(Context("x"), 16384, **long)[0].startswith("context: ring")
    first, second, *_ = explained(Context("x", None), 16384, is_causal=True)
    assert first.startswith("context: ring")
    assert second == "    later devices have more to do: stripes would balance it"
    mask = np.ones((1, 1, 1, 1), bool)
    assert explained(Context("x"), 16384, mask=mask)[0].startswith("context: ring")
    pairs = np.ones((4096, 16384), bool)
    gathered = explained(Context("x"), 16384, mask=pairs)[0]
    assert gathered.startswith("context: gather, since mask has an element for each")
    two = explained(Context(("hosts", "gpus")), 16384, shape=(2, 2))
    assert two[0].startswith("context: heads, since the last of several axes")
    assert two[1].startswith("context: ring")
    assert "stripes of 256 rows" in two[1]
    assert explained(Context("x"), 256, shape=(1,))[0].startswith("context: none")
