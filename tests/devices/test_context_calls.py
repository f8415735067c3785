"""Divided rows under JAX's transformations; what lies beside them stays there."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_flash2 import (
    LSE_NAME,
    OUTPUT_NAME,
    Context,
    attention,
    flax_attention,
    stripe,
    unstripe,
)
from tests.cases import BACKENDS, INTERPRETED, ON_GPU
from tests.divided import Divided
from tests.tiers import deep, deeply

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="fewer than 4 devices")

RING = Divided(Context("x", 16, "ring"), (4,))
GATHER = Divided(Context("x", 16, "gather"), (4,))
HEADS = Divided(Context("x", 16, "heads"), (4,))
XLA = {"implementation": "xla"}


def operands(rows=128, heads=4, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    shape = (2, rows, heads, 8)
    return tuple(rng.standard_normal(shape).astype(dtype) for _ in range(3))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def close(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-11)


def loss(call, **options):
    """(query, key, value) -> a number."""

    def run(*arrays):
        out, lse = call(*arrays, is_causal=True, return_residual=True, **XLA, **options)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    return run


def gradients(call, **options):
    return jax.jit(jax.grad(loss(call, **options), (0, 1, 2)))


# Transformations.


@pytest.mark.parametrize("call", [RING, *deeply(GATHER, HEADS)])
def test_vmap_over_heads_around_it(call, x64):
    """As over the whole call: devices exchange rows of all that is mapped over."""
    arrays = operands(heads=8)
    whole = gradients(attention)(*arrays)

    def one(*heads):
        return gradients(call)(*heads)

    apart = [x.reshape(2, 128, 2, 4, 8) for x in arrays]
    mapped = jax.vmap(one, in_axes=2, out_axes=2)(*apart)
    close([np.reshape(x, (2, 128, 8, 8)) for x in mapped], whole)


def test_types_need_not_be_checked(x64):
    """`shard_map(check_vma=False)` sums gradients of what devices share by itself."""
    sinks = np.linspace(-1, 1, 4)

    def run(call):
        def of_sinks(sinks, *arrays):
            return loss(call, sinks=sinks)(*arrays)

        return jax.jit(jax.grad(of_sinks, (0, 1, 2, 3)))(sinks, *operands())

    unchecked = Divided(RING.context, (4,), checked=False)
    close(run(unchecked), run(attention))


@pytest.mark.parametrize("stripes", [16, *deeply(None)])
def test_two_axes(stripes, x64):
    """Between hosts a ring; within a host heads are divided, if they can be."""
    arrays, heads = operands(), []
    expected = gradients(attention)(*arrays)
    for method in (None, "ring", "gather"):
        context = Context(("hosts", "gpus"), stripes, method)
        close(gradients(Divided(context, (2, 2)))(*arrays), expected)
        call = functools.partial(Divided(context, (2, 2)), **XLA)
        text = str(jax.make_jaxpr(call)(*arrays))
        heads.append("all_to_all" in text)
    assert heads == [True, False, False]


@pytest.mark.filterwarnings("ignore:.*dtype float64")  # on a GPU
def test_gathering_is_permutations(x64):
    """Of keys and values once around; of each gradient straight to its device."""
    arrays = operands()
    for call, count in ((GATHER, 2 * 3), (gradients(GATHER), 2 * 3 + 2 * 3)):
        text = str(jax.make_jaxpr(call)(*arrays))
        assert len(re.findall(r" = ppermute\[", text)) == count
        assert not re.search("all_gather|all_to_all|psum", text)


def test_pmap(x64):
    arrays = operands()
    call = jax.pmap(
        functools.partial(attention, context=Context("x", None, "ring"), **XLA),
        axis_name="x",
        in_axes=1,
        out_axes=1,
    )
    apart = [x.reshape(2, 4, 32, 4, 8) for x in arrays]
    whole = jax.jit(functools.partial(attention, **XLA))(*arrays)
    close(np.reshape(call(*apart), (2, 128, 4, 8)), whole)


@pytest.mark.parametrize("call", [RING, *deeply(GATHER, HEADS)])
def test_an_axis_of_vmap(call, x64):
    """It has a name like one of `shard_map`."""
    mapped = dataclasses.replace(call, mapped=True)
    close(gradients(mapped)(*operands()), gradients(attention)(*operands()))


def test_one_device_is_the_plain_call(x64):
    arrays = operands()
    call = Divided(Context("x", 16), (1,))
    text = str(jax.make_jaxpr(functools.partial(call, **XLA))(*arrays))
    assert "ppermute" not in text
    assert "all_to_all" not in text
    close(gradients(call)(*arrays), gradients(attention)(*arrays))


@deep
@jax.default_matmul_precision("highest")
def test_flax_module():
    """With the whole layer inside `shard_map`, its parameters on all devices."""

    def layer(context):
        function = functools.partial(flax_attention, context=context, **XLA)
        made = nnx.MultiHeadAttention(
            4, 32, decode=False, attention_fn=function, rngs=nnx.Rngs(0)
        )
        graph, state = nnx.split(made)
        return state, lambda state, x: nnx.merge(graph, state)(x, is_causal=True)

    x = jax.random.normal(jax.random.key(0), (2, 128, 32))
    state, apply = layer(RING.context)
    rows = P(None, "x")
    on_devices = jax.shard_map(
        apply, mesh=RING.mesh, in_specs=(P(), rows), out_specs=rows
    )
    out = unstripe(jax.jit(on_devices)(state, stripe(x, 4, 16)), 4, 16)
    state, apply = layer(None)
    np.testing.assert_allclose(out, apply(state, x), rtol=0, atol=1e-5)


def layers(call, remat=None):
    """A loss of two layers, one after the other."""

    def run(*arrays):
        def layer(x, _):
            out = call(x, *arrays[1:], is_causal=True, **XLA)
            return x + jnp.sin(out), None

        body = layer if remat is None else jax.checkpoint(layer, policy=remat)
        x, _ = jax.lax.scan(body, arrays[0], None, length=2)
        return jnp.sum(x**2)

    return jax.grad(run, (0, 1, 2))


SAVED = jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, LSE_NAME)


@pytest.mark.parametrize("remat", [SAVED, *deeply(None)])
def test_scan_over_layers(remat, x64):
    arrays = operands()
    close(jax.jit(layers(RING, remat))(*arrays), jax.jit(layers(attention))(*arrays))


def test_remat_runs_no_ring_again():
    """With the names saved there is one forward ring and one backward."""
    arrays = operands(dtype=jnp.float32)

    def rings(policy):
        """Permutations of the forward; rings of the backward."""
        text = str(jax.make_jaxpr(layers(RING, policy))(*arrays))
        return text.count("ppermute["), text.count("flash2_ring_gradient[")

    rounds = RING.parts - 1
    assert rings(SAVED) == rings(None) == (rounds, 1)
    nothing = jax.checkpoint_policies.nothing_saveable
    assert rings(nothing) == (2 * rounds, 1)


# What lies in keys that a query may not look at.


@pytest.mark.parametrize("call", [RING, *deeply(GATHER)])
@pytest.mark.parametrize("backend", ["xla", *deeply("triton")])
def test_nan_stays_in_its_document(call, backend):
    """Not a bit of other documents changes, on whatever device they are."""
    documents = np.repeat(np.arange(4, dtype=np.int32), 32)
    ids = np.broadcast_to(documents, (2, 128))
    q, k, v = operands(dtype=jnp.float32)
    poison = np.float32(np.where((ids == 1)[..., None, None], np.nan, 0.0))
    others = documents != 1
    options = BACKENDS["triton"] if backend == "triton" else XLA
    # Blocks of 16, so that none has two documents.
    config = dataclasses.replace(INTERPRETED, interpret=not ON_GPU)
    options = {**options, "config": config}

    @jax.jit
    def run(k, v):
        def one(*arrays):
            return call(*arrays, is_causal=True, query_segment_ids=ids, **options)

        out, vjp = jax.vjp(one, q, k, v)
        return out, *vjp(jnp.ones_like(out) * others[None, :, None, None])

    clean, poisoned = jax.device_get([run(k, v), run(k + poison, v + poison)])
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a[:, others], b[:, others])
    assert np.isnan(poisoned[0][:, ~others]).any()


def test_padding_is_never_touched():
    """On the right and on the left of keys."""
    q, k, v = operands(dtype=jnp.float32)
    ends, starts = np.int32([50, 90]), np.int32([3, 70])
    numbers = np.arange(128)
    padding = (numbers >= ends[:, None]) | (numbers < starts[:, None])
    poison = np.float32(np.where(padding[..., None, None], np.nan, 0.0))
    run = gradients(RING, key_value_seq_lengths=ends, key_value_seq_starts=starts)
    clean, poisoned = run(q, k, v), run(q, k + poison, v + poison)
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)


@deep
def test_same_bits_every_time():
    run, arrays = gradients(RING), operands(dtype=jnp.float32)
    for a, b in zip(run(*arrays), run(*arrays), strict=True):
        np.testing.assert_array_equal(a, b)
