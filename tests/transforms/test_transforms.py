"""jit, vmap, grad, pmap, remat and scan compose, and vmap moves no data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash2
from jax_flash2 import attention
from tests.cases import BACKENDS, ON_GPU
from tests.lowering import lower_for_gpu
from tests.tiers import MAINLY_XLA, deeply

SHAPE = (2, 20, 3, 16)  # V (mapped), T, N, H


def operands(shape=SHAPE, count=3):
    """Of NumPy: what tests make of them compiles nothing."""
    rng = np.random.default_rng(0)
    return [np.float32(rng.standard_normal(shape)) for _ in range(count)]


def assert_same(a, b):
    """Equal but for float32's last digits, or TF32's where a GPU tunes its programs."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if ON_GPU:
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-2)
        else:
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=2e-6)


def outputs_and_gradients(call):
    """(arrays, cotangent) -> output and gradients of `call`."""

    def run(*arrays):
        *arrays, cotangent = arrays
        out, vjp = jax.vjp(call, *arrays)
        return out, *vjp(cotangent)

    return run


def looped(function, in_axes, out_axes, size, args):
    """What `jax.vmap` means, as a Python loop."""
    results = []
    for i in range(size):
        taken = [
            x if axis is None else np.take(x, i, axis)
            for x, axis in zip(args, in_axes, strict=True)
        ]
        results.append(function(*taken))
    return jax.tree.map(lambda *xs: np.stack(xs, out_axes), *results)


@pytest.mark.parametrize("backend", MAINLY_XLA)
@pytest.mark.parametrize(
    ("in_axes", "out_axes"),
    [
        *deeply(((0, 0, 0), 0), ((1, 1, 1), 1)),
        ((2, 0, 1), 0),
        ((0, None, None), 0),
        ((None, 1, None), 2),
        *deeply(((None, None, 2), 0)),
    ],
)
def test_vmap_is_the_loop(backend, in_axes, out_axes):
    call = functools.partial(attention, is_causal=True, **BACKENDS[backend])
    base = operands()
    args = [
        x[0] if axis is None else np.moveaxis(x, 0, axis)
        for x, axis in zip(base, in_axes, strict=True)
    ]
    run = jax.jit(outputs_and_gradients(call))
    cotangent = operands(count=4)[3]
    axes = (*in_axes, 0)
    mapped = jax.vmap(run, axes, out_axes)(*args, cotangent)
    loop = looped(run, axes, out_axes, SHAPE[0], (*args, cotangent))
    assert_same(mapped, loop)


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_grad_of_vmap_is_vmap_of_grad(backend):
    call = functools.partial(attention, is_causal=True, **BACKENDS[backend])
    q, k, v = operands()

    def gradient(function):
        total = lambda *arrays: jnp.sum(jnp.sin(function(*arrays)))  # noqa: E731
        return jax.grad(total, (0, 1, 2))

    outside = jax.jit(gradient(jax.vmap(call)))(q, k, v)
    inside = jax.jit(jax.vmap(gradient(call)))(q, k, v)
    assert_same(outside, inside)
    # A shared key has one gradient from outside, one for each element from inside.
    shared = jax.vmap(call, (0, None, None))
    outside = jax.jit(gradient(shared))(q, k[0], v[0])
    inside = jax.jit(jax.vmap(gradient(call), (0, None, None)))(q, k[0], v[0])
    assert_same(outside[1:], tuple(np.sum(x, axis=0) for x in inside[1:]))


@pytest.mark.parametrize("backend", deeply(*BACKENDS))
def test_nested_vmap_over_heads_and_batch(backend):
    """A single-head function over heads, then batch, is the call on all of them."""
    options = BACKENDS[backend]
    q, k, v, cotangent = operands(count=4)
    head = functools.partial(attention, is_causal=True, **options)
    mapped = jax.vmap(jax.vmap(head, 1, 1))
    assert_same(
        jax.jit(outputs_and_gradients(mapped))(q, k, v, cotangent),
        jax.jit(outputs_and_gradients(head))(q, k, v, cotangent),
    )


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_three_maps_within_each_other(backend):
    """Each has an axis of its own: two of batch and one of heads, written out."""
    arrays = operands((2, 3, 2, 20, 16), count=4)
    head = functools.partial(attention, is_causal=True, **BACKENDS[backend])

    def whole(*arrays):
        rows_first = (jnp.swapaxes(x, 2, 3) for x in arrays)
        return jnp.swapaxes(head(*rows_first), 2, 3)

    mapped = jax.vmap(jax.vmap(jax.vmap(head)))
    assert_same(
        jax.jit(outputs_and_gradients(mapped))(*arrays),
        jax.jit(outputs_and_gradients(whole))(*arrays),
    )


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_vmap_over_other_arguments(backend):
    """Lengths, segment ids, masks and offsets may be mapped, with or without q."""
    q, k, v = (x[0] for x in operands())
    t = q.shape[0]
    rng = np.random.default_rng(1)
    mapped = {
        "key_value_seq_lengths": np.int32([5, 20]),
        "query_offset": np.int32([3, -2]),
        "query_segment_ids": np.int32(rng.integers(0, 3, (2, t))),
        "mask": rng.random((2, 1, t, t)) < 0.7,
    }
    options = {"is_causal": True, **BACKENDS[backend]}

    def call(arguments):
        return attention(q, k, v, **arguments, **options)

    together = jax.jit(jax.vmap(call))(mapped)
    for i in range(2):
        one = jax.jit(call)(jax.tree.map(lambda x, i=i: x[i], mapped))
        assert_same(together[i], one)


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_vmap_over_masks_that_drop_keys(backend):
    """Keys that all elements share: each drops its own, and one is dropped by all."""
    q, k, v = operands((2, 20, 2, 16))
    mask = np.random.default_rng(0).random((20, 3)) < 0.6  # mapped over its last axis
    mask[3] = False

    def gradients(k, v, mask):
        def loss(*arrays):
            out = attention(*arrays, mask=mask, **BACKENDS[backend])
            return jnp.sum(out**2)

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    dirty = k.copy(), v.copy()
    for x in dirty:
        x[:, 3] = np.nan
    found = jax.jit(jax.vmap(gradients, (None, None, 1)))(*dirty, mask)
    alone = [jax.jit(gradients)(k, v, mask[:, i]) for i in range(3)]
    assert_same(found, jax.tree.map(lambda *x: np.stack(x), *alone))


@pytest.mark.parametrize("backend", MAINLY_XLA)
@pytest.mark.parametrize("mapped", ["query", "operands", *deeply("both")])
def test_vmap_over_learnt_operands(backend, mapped):
    """Bias, slopes and sinks, mapped or shared, and their gradients."""
    rng = np.random.default_rng(2)

    def normal(*shape):
        return np.float32(rng.standard_normal(shape))

    inputs = {"query": normal(2, 20, 4, 16)}
    operands = {
        "bias": normal(2, 4, 20, 20),
        "alibi_slopes": np.abs(normal(2, 4)),
        "sinks": normal(2, 4),
    }
    k = normal(20, 2, 16)

    def call(inputs, operands):
        inputs = {**inputs, "key": k, "value": k, **operands}
        out = attention(**inputs, is_causal=True, **BACKENDS[backend])
        return jnp.sum(jnp.sin(out))

    axes = tuple(
        0 if mapped in (name, "both") else None for name in ("query", "operands")
    )
    args = [
        tree if axis == 0 else jax.tree.map(lambda x: x[0], tree)
        for tree, axis in zip((inputs, operands), axes, strict=True)
    ]
    run = jax.jit(jax.grad(call, (0, 1)))
    together = jax.jit(jax.vmap(run, axes))(*args)
    for i in range(2):
        one = [
            jax.tree.map(lambda x, i=i: x[i], tree) if axis == 0 else tree
            for tree, axis in zip(args, axes, strict=True)
        ]
        assert_same(jax.tree.map(lambda x, i=i: x[i], together), run(*one))


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_single_heads_with_learnt_operands(backend):
    """vmap of a single-head call over heads is the call on all of them."""
    rng = np.random.default_rng(3)
    q, k, v = (x[0] for x in operands())
    heads = q.shape[1]
    bias = np.float32(rng.standard_normal((heads, 20, 20)))
    slopes, sinks = np.float32(rng.random((2, heads)))

    def call(q, k, v, bias, slopes, sinks):
        options = {"logits_soft_cap": 5.0, "is_causal": True, **BACKENDS[backend]}
        return attention(q, k, v, bias, alibi_slopes=slopes, sinks=sinks, **options)

    mapped = jax.vmap(call, (1, 1, 1, 0, 0, 0), 1)
    args = (q, k, v, bias, slopes, sinks, v)
    assert_same(
        jax.jit(outputs_and_gradients(mapped))(*args),
        jax.jit(outputs_and_gradients(call))(*args),
    )


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_what_no_mapped_operand_reaches_stays_unmapped(backend):
    """Results of rows depend neither on value nor on dropout, dv not on value."""
    q, k, v, cotangent = (x[0] for x in operands(count=4))
    values, keys = np.stack([v, 2 * v]), jax.random.split(jax.random.key(0))
    options = {"return_residual": True, "return_max_logit": True, **BACKENDS[backend]}

    def call(q, v, key=None):
        rate = 0.0 if key is None else 0.3
        return attention(q, k, v, dropout_rate=rate, dropout_rng=key, **options)

    def alone(q, v, key=None):
        return jax.jit(call)(q, v, key)

    unmapped = None, None
    out, *rows = jax.jit(jax.vmap(call, (None, 0), (0, *unmapped)))(q, values)
    assert_same((out[0], *rows), alone(q, v))
    assert_same(out[1], alone(q, 2 * v)[0])
    out, *rows = jax.jit(jax.vmap(call, (None, None, 0), (0, *unmapped)))(q, v, keys)
    assert_same((out[1], *rows), alone(q, v, keys[1]))
    # Of two maps they have the one over the query.
    queries = np.stack([q, -q, 2 * q])
    inner = jax.vmap(call, (0, None), 0)
    out, *rows = jax.jit(jax.vmap(inner, (None, 0), (1, *unmapped)))(queries, values)
    assert_same((out[2, 1], *(x[2] for x in rows)), alone(2 * q, 2 * v))

    def tangents(v):
        return jax.jvp(call, (q, v), (cotangent, v))[1][:2]

    def of_value(v):
        _, pull = jax.vjp(lambda v: call(q, v)[0], v)
        return pull(cotangent)[0]

    def both(v):
        return *tangents(v), of_value(v)

    found = jax.jit(jax.vmap(both, 0, (0, None, None)))(values)
    assert_same((found[0][0], *found[1:]), jax.jit(both)(v))


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_jacobian_maps_cotangents_alone(backend):
    q, k, v = (x[0, :4, :1, :2] for x in operands())
    call = functools.partial(attention, **BACKENDS[backend])
    reference = functools.partial(attention, implementation="reference")
    found, expected = (jax.jit(jax.jacrev(f))(q, k, v) for f in (call, reference))
    assert_same(found, expected)


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_pmap(backend):
    devices = min(2, jax.local_device_count())
    shape = (devices, *SHAPE)
    args = operands(shape, count=4)
    call = functools.partial(attention, is_causal=True, **BACKENDS[backend])
    run = outputs_and_gradients(call)
    mapped = jax.pmap(run)(*args)
    assert_same(mapped, jax.jit(jax.vmap(run))(*args))


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_remat_scan_and_eager(backend):
    q, k, v = operands()
    call = functools.partial(attention, is_causal=True, **BACKENDS[backend])

    def layers(wrap):
        def step(x, _):
            return wrap(call)(x, k, v), None

        def total(q):
            return jnp.sum(jnp.sin(jax.lax.scan(step, q, None, length=2)[0]))

        return jax.jit(jax.grad(total))(q)

    assert_same(layers(jax.checkpoint), layers(lambda f: f))
    expected = jax.jit(call)(q, k, v)
    with jax.disable_jit():
        assert_same(call(q, k, v), expected)


def test_checkpoint_policy_saves_the_forward_kernel():
    """With output and lse saved by name the forward kernel is not run twice."""
    q, k, v = (x.astype(jnp.bfloat16) for x in operands())

    def loss(q, k, v, policy):
        call = functools.partial(attention, implementation="triton")
        out = jax.checkpoint(call, policy=policy)(q, k, v)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    names = (jax_flash2.OUTPUT_NAME, jax_flash2.LSE_NAME)
    save = jax.checkpoint_policies.save_only_these_names(*names)
    counts = []
    for policy in (save, jax.checkpoint_policies.nothing_saveable):
        gradient = jax.grad(functools.partial(loss, policy=policy), (0, 1, 2))
        counts.append(lower_for_gpu(gradient, q, k, v).count("flash2_forward"))
    assert counts[0] < counts[1]


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_over_heads_has_no_transpose(axis):
    """Heads first or in the middle, forward and gradient: the module moves no data."""
    shape = (4, 100, 64) if axis == 0 else (100, 4, 64)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    head = functools.partial(attention, is_causal=True, implementation="triton")
    mapped = outputs_and_gradients(jax.vmap(head, axis, axis))
    text = lower_for_gpu(mapped, x, x, x, x)
    assert text.count("__gpu$xla.gpu.triton") == 3
    assert "stablehlo.transpose" not in text


def test_unmapped_keys_are_shared():
    """An unmapped key reaches the kernel in its own shape: it is not repeated."""
    q = jax.ShapeDtypeStruct((8, 100, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((100, 4, 64), jnp.bfloat16)
    call = functools.partial(attention, implementation="triton")
    text = lower_for_gpu(jax.vmap(call, (0, None, None)), q, k, k)
    assert "stablehlo.broadcast_in_dim" not in text
    (line,) = (x for x in text.splitlines() if "__gpu$xla.gpu.triton" in x)
    types = line.split(" : ")[-1]
    assert types.count("tensor<100x4x64xbf16>") == 2
