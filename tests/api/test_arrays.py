"""Arrays as callers have them: wrapped, weakly typed, of 64 bits; and their names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_flash2 import _api, attention, explain, flax_attention, merge
from tests.cases import BACKENDS, ON_GPU
from tests.tiers import MAINLY_XLA, deeply

T = 20


class Wrapped:
    """Of a library of named axes, say: an array, and nothing but that."""

    def __init__(self, x):
        self.x = x

    def __jax_array__(self):
        return self.x


def operands():
    rng = np.random.default_rng(0)
    return [jnp.float32(rng.standard_normal((2, T, 2, 16))) for _ in range(3)]


def arguments():
    rng = np.random.default_rng(1)
    return {
        "bias": jnp.float32(rng.standard_normal((2, T, T))),
        "mask": jnp.asarray(rng.random((T, T)) < 0.8),
        "scale": jnp.float32(0.3),
        "query_seq_lengths": jnp.int32([T, 15]),
        "key_value_seq_lengths": jnp.int32([17, T]),
        "query_segment_ids": jnp.int32(rng.integers(0, 2, (2, T))),
        "query_offset": jnp.int32([2, 3]),
        "is_causal": True,
        "alibi_slopes": jnp.float32([0.1, 0.2]),
        "sinks": jnp.float32([0.5, 1.0]),
        "dropout_rate": 0.2,
        "dropout_rng": jax.random.key(5),
    }


def wrapped(tree, kind):
    return jax.tree.map(lambda x: kind(x) if isinstance(x, jax.Array) else x, tree)


def results(x, more):
    return attention(*x, **more, implementation="xla", return_residual=True)


def test_objects_that_are_arrays():
    """Every argument that may be an array, by `__jax_array__` alone."""
    expected = results(operands(), arguments())
    found = results(wrapped(operands(), Wrapped), wrapped(arguments(), Wrapped))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    text = explain(*wrapped(operands(), Wrapped), **wrapped(arguments(), Wrapped))
    assert text == explain(*operands(), **arguments())
    x = jax.ShapeDtypeStruct((2, T, 2, 16), jnp.float32)
    parameter = nnx.Param(x)
    assert explain(*[parameter] * 3) == explain(x, x, x)


def test_parameters_of_flax():
    """As such, traced by `nnx.jit`, and with gradients."""
    x, more = operands(), arguments()
    fixed = {k: more.pop(k) for k in ("is_causal", "dropout_rate")}
    run = nnx.jit(lambda x, more: results(x, {**more, **fixed}))
    expected = jax.jit(lambda x, more: results(x, {**more, **fixed}))(x, more)
    found = run(wrapped(x, nnx.Param), wrapped(more, nnx.Param))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected
    )
    scale = nnx.Param(jnp.float32(0.3))
    gradient = nnx.grad(lambda scale: jnp.sum(attention(*x, scale=scale)))(scale)
    plain = jax.grad(lambda scale: jnp.sum(attention(*x, scale=scale)))(scale[...])
    np.testing.assert_allclose(gradient[...], plain, rtol=1e-5)
    rngs = nnx.Rngs(dropout=7)
    keys = {"dropout_rate": 0.5, "dropout_rng": rngs.dropout.key}
    same = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(7)}
    np.testing.assert_array_equal(attention(*x, **keys), attention(*x, **same))


def test_wrapped_arrays_of_the_other_functions():
    x = operands()
    part = results(x, {})
    expected = merge(part, part, sinks=jnp.ones(2))
    given = wrapped((part, jnp.ones(2)), Wrapped)
    found = merge(given[0], given[0], sinks=given[1])
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    bias, mask = jnp.ones((T, T)), jnp.tril(jnp.ones((T, T)))
    given = wrapped((*x, bias, mask), Wrapped)
    np.testing.assert_array_equal(
        flax_attention(*given), flax_attention(*x, bias, mask)
    )


def weak(shape, value):
    x = jnp.full(shape, value)
    assert x.weak_type
    return x


def weak_operands():
    return {
        "query": weak((2, T, 2, 16), 0.5),
        "key": weak((2, T, 2, 16), 0.25),
        "value": weak((2, T, 2, 16), 1.5),
        "bias": weak((T, T), 0.5),
        "scale": weak((), 0.25),
        "alibi_slopes": weak((2,), 0.5),
        "sinks": weak((2,), 0.5),
    }


def strongly_typed(tree):
    return [not x.weak_type for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("backend", "way"),
    [
        *(("xla", "eager"), ("xla", "jit"), ("reference", "jit")),
        *deeply(("reference", "eager")),
        *deeply(
            *((x, way) for x in BACKENDS if x != "xla" for way in ("eager", "jit"))
        ),
    ],
)
def test_weak_types_go_no_further(backend, way):
    """Results, gradients and tangents are float32 for good, as other arrays are."""
    options = BACKENDS.get(backend, {"implementation": "reference"})

    def call(arrays):
        return attention(**arrays, **options, return_residual=True)

    def run(arrays):
        outs, vjp = jax.vjp(call, arrays)
        found = [outs, vjp(jax.tree.map(jnp.ones_like, outs))]
        if backend in ("xla", "reference"):
            found.append(jax.jvp(call, (arrays,), (arrays,)))
        return found

    run = jax.jit(run) if way == "jit" else run
    found = run(weak_operands())
    assert all(strongly_typed(found))
    strong = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), weak_operands())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, run(strong)
    )
    product = found[0][0] * jnp.ones(16, jnp.bfloat16)
    assert product.dtype == jnp.float32


def test_weak_types_of_the_other_functions():
    x = weak_operands()
    logs = weak((2, T, 2), 0.5)

    def merged(o, lse, sinks):
        return merge((o, lse), (o, lse), sinks=sinks)

    outs, vjp = jax.vjp(merged, x["value"], logs, x["sinks"])
    assert all(strongly_typed((outs, vjp(jax.tree.map(jnp.ones_like, outs)))))
    three = [x[name] for name in ("query", "key", "value")]
    out, vjp = jax.vjp(flax_attention, *three)
    assert all(strongly_typed((out, vjp(jnp.ones_like(out)))))
    # A weakly typed array gives way to others, as elsewhere in JAX.
    half = three[1].astype(jnp.bfloat16)
    assert flax_attention(three[0], half, half).dtype == jnp.bfloat16


def call_with(backend, **more):
    x = operands()
    return attention(*x, **more, **BACKENDS[backend])


@pytest.mark.parametrize("backend", MAINLY_XLA)
@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_wide_ids_of_numpy_are_compared_whole(dtype, backend):
    """Without x64, where JAX would cut them to their lower 32 bits."""
    small = np.repeat(np.arange(5) % 3, T // 5)[None].repeat(2, 0)
    expected = call_with(backend, query_segment_ids=small.astype(np.int32))
    assert not jax.config.jax_enable_x64
    for factor in (2**31, 2**32, 2**32 + 1):
        wide = (small * factor).astype(dtype)
        found = call_with(backend, query_segment_ids=wide)
        np.testing.assert_array_equal(found, expected)
    fits = small.astype(dtype)
    found = call_with(backend, query_segment_ids=fits)
    np.testing.assert_array_equal(found, expected)
    traced = jax.jit(lambda: call_with(backend, query_segment_ids=wide))()
    # Products of constants are made at once, on a GPU in another precision.
    np.testing.assert_allclose(traced, expected, atol=5e-3 if ON_GPU else 1e-6)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_wide_ids_beside_narrow_ones(dtype):
    """Negative ones too: the same numbers, of whichever width and kind of array."""
    signed = dtype == np.int64
    few = np.array([3, -5 if signed else 2**32 - 5, 7])
    narrow = few[np.arange(2 * T).reshape(2, T) % 3]
    other = narrow + 2**32 * (np.arange(T) % 2)
    expected = call_with("xla", mask=(narrow[:, :, None] == other[:, None])[:, None])
    thin = jnp.asarray(narrow.astype(np.int32 if signed else np.uint32))
    wide = other.astype(dtype)
    for q, kv in ((thin, wide), (narrow.astype(dtype), wide)):
        found = call_with("xla", query_segment_ids=q, key_value_segment_ids=kv)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    back = call_with("xla", query_segment_ids=wide, key_value_segment_ids=thin)
    again = call_with("xla", mask=(other[:, :, None] == narrow[:, None])[:, None])
    np.testing.assert_allclose(back, again, atol=1e-6)
    with pytest.raises(TypeError, match="must have the same dtype"):
        call_with(
            "xla",
            query_segment_ids=wide,
            key_value_segment_ids=narrow.astype(np.uint64 if signed else np.int64),
        )


def test_wide_numbers_of_numpy_are_clipped():
    """Lengths and offsets, one for each entry or one for all."""
    call = functools.partial(call_with, "xla", is_causal=True)

    def same(wide, narrow):
        np.testing.assert_array_equal(call(**wide), call(**narrow))

    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        same({name: np.int64([2**32, 7])}, {name: np.int32([T, 7])})
        same({name: np.uint64([2**63 + 3, 7])}, {name: np.int32([T, 7])})
        same({name: np.int64([-(2**40) + 1, 7])}, {name: np.int32([0, 7])})
    far, near = np.int64([2**32, -(2**33)]), np.int32([T, -T])
    same({"query_offset": far}, {"query_offset": near})
    for wide, narrow in ((2**32, T), (-(2**32), -T)):
        for kind in (np.asarray, np.int64, int):
            same({"query_offset": kind(wide)}, {"query_offset": np.int32(narrow)})
    same({"query_offset": np.uint64(2**63)}, {"query_offset": np.int32(T)})


def test_operands_have_the_names_of_their_arguments():
    q, ids = jnp.ones((2, 8, 4, 16)), jnp.zeros((2, 8), jnp.int32)
    of_entries = {
        "query_seq_lengths": ids[:, 0],
        "key_value_seq_lengths": ids[:, 0],
        "key_value_seq_starts": ids[:, 0],
        "query_offset": ids[:, 0],
    }
    per_head = {"alibi_slopes": jnp.ones(4), "sinks": jnp.ones(4)}
    pairs = {"bias": jnp.ones((2, 4, 8, 8)), "mask": jnp.ones((8, 8), bool)}
    dropout = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
    arguments = {"scale": jnp.float32(2), **of_entries, **per_head, **pairs, **dropout}
    ids = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    call = _api.given(q, q, q, **arguments, **ids, is_causal=True).checked()
    found = {call.argument(i) for i in range(len(call.operands))}
    captured = " (or what mask_mod captures)"
    expected = {"query", "key", "value", *arguments, *(x + captured for x in ids)}
    assert found == expected - {"dropout_rate"}
