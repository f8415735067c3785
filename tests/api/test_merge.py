"""`flash2.merge`: whole rows from results over parts of the keys."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_flash2
from jax_flash2 import attention
from pallas_kernels.core import flash2
from tests.cases import Case, by_name
from tests.tiers import deep, deeply
from tests.tolerances import exact

CASE = Case("merged", t=20, s=48)


def _parts(case, borders, **options):
    """Outputs and log-sum-exps over the keys between each two borders."""
    (q, k, v), arguments = case.inputs(jnp.float32)
    mask, sinks = (arguments.pop(name, None) for name in ("mask", "sinks"))
    found = []
    for i, (lo, hi) in enumerate(itertools.pairwise(borders)):
        more = {} if sinks is None or i else {"sinks": sinks}  # in one part only
        if mask is not None:
            more["mask"] = mask[..., lo:hi]
        if "is_causal" in arguments:
            more["query_offset"] = -lo
        result = attention(
            *(q, k[:, lo:hi], v[:, lo:hi]),
            implementation="xla",
            precision="highest",
            return_residual=True,
            **arguments,
            **more,
            **options,
        )
        found.append(result)
    o, lse = map(jnp.stack, zip(*found, strict=True))
    return o, lse


@pytest.mark.parametrize("borders", [(0, 5, 6, 40, 48), *deeply(((0, 48),))])
@pytest.mark.parametrize("name", ["plain", "causal", "mask_keys", "sinks"])
def test_parts_of_the_keys_merge_to_the_whole(name, borders):
    case = by_name(name)
    case = Case(case.name, case.arguments, t=20, s=48, n=case.n, k=case.k)
    arrays, arguments = case.inputs(jnp.float32)
    zeros = np.zeros((2, 20, case.n, 16)), np.zeros((2, 20, case.n))
    expected = exact(arrays, zeros, arguments)
    o, lse = jax.jit(lambda: flash2.merge(*_parts(case, borders)))()
    np.testing.assert_allclose(o, expected["out"], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse, expected["lse"], rtol=2e-5, atol=2e-6)


@functools.cache
def _three_parts():
    return jax.jit(lambda: _parts(CASE, (0, 7, 30, 48)))()


def test_order_of_parts_is_no_matter():
    o, lse = _three_parts()
    whole, again = flash2.merge(o, lse), flash2.merge(o[::-1], lse[::-1])
    for a, b in zip(whole, again, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_merged_parts_merge_again():
    o, lse = _three_parts()
    first = flash2.merge(o[:2], lse[:2])
    pairs = zip(first, (o[2], lse[2]), strict=True)
    found = flash2.merge(*(jnp.stack(x) for x in pairs))
    for a, b in zip(flash2.merge(o, lse), found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_empty_parts_and_far_log_sum_exps():
    """What a part without keys holds, NaN too, is no part of the result."""
    o = jnp.asarray([[[1.0], [np.nan], [np.nan]], [[5.0], [3.0], [np.inf]]])
    lse = jnp.asarray([[200.0, -np.inf, -np.inf], [-200.0, -300.0, -np.inf]])
    merged, total = flash2.merge(o, lse)
    assert merged[:, 0].tolist() == [1.0, 3.0, 0.0]
    assert total.tolist() == [200.0, -300.0, -np.inf]


def test_merge_has_a_gradient():
    """That of the softmax over the parts' log-sum-exps, also beside empty parts."""
    rng = np.random.default_rng(0)
    o = jnp.asarray(rng.standard_normal((3, 4, 2)), jnp.float32)
    lse = jnp.asarray(rng.standard_normal((3, 4)), jnp.float32).at[0, 1].set(-np.inf)

    def merged(o, lse):
        out, total = flash2.merge(o, lse)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(total))

    def plain(o, lse):
        out = jnp.einsum("pr,prd->rd", jax.nn.softmax(lse, 0), o)
        total = jax.scipy.special.logsumexp(lse, 0)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(total))

    found, expected = (jax.jit(jax.grad(f, (0, 1)))(o, lse) for f in (merged, plain))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def _public(o, lse, **more):
    return jax_flash2.merge(*zip(o, lse, strict=True), **more)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_merge_of_pairs(dtype):
    """The public function: sums in float32, the outputs' dtype, any batch axes."""
    rng = np.random.default_rng(0)
    o = jnp.asarray(rng.standard_normal((3, 2, 5, 4, 8)), dtype)
    lse = jnp.asarray(rng.standard_normal((3, 2, 5, 4)), jnp.float32)
    sinks = jnp.asarray(rng.standard_normal(4), jnp.float32)
    for more in ({}, {"sinks": sinks}):
        found = jax.jit(_public)(o, lse, **more)
        expected = jax.jit(flash2.merge)(o.astype(jnp.float32), lse, *more.values())
        assert [x.dtype for x in found] == [jnp.dtype(dtype), jnp.float32]
        np.testing.assert_array_equal(found[0], expected[0].astype(dtype))
        np.testing.assert_array_equal(found[1], expected[1])
    one = _public(o[:1, 0, :, 0], lse[:1, 0, :, 0])
    np.testing.assert_allclose(one[0], o[0, 0, :, 0], rtol=1e-6)
    np.testing.assert_allclose(one[1], lse[0, 0, :, 0], rtol=1e-6)


@deep
def test_second_derivatives_of_merge():
    """Also of rows without keys in some parts, or in all."""
    rng = np.random.default_rng(0)
    o = jnp.asarray(rng.standard_normal((3, 4, 2, 2)), jnp.float32)
    lse = jnp.asarray(rng.standard_normal((3, 4, 2)), jnp.float32)
    none = jnp.zeros_like(lse, bool).at[0, 1].set(True).at[:, 2].set(True)
    sinks = jnp.asarray(rng.standard_normal(2), jnp.float32)

    def merged(o, lse, sinks):
        out, total = _public(o, jnp.where(none, -jnp.inf, lse), sinks=sinks)
        return jnp.sin(out), jnp.where(total == -jnp.inf, 0.0, jnp.sin(total))

    check_grads(merged, (o, lse, sinks), order=2, rtol=1e-2, atol=1e-2)


def test_gradients_of_parts_are_those_of_the_whole():
    """Of queries, keys and values, through the log-sum-exps of the parts too."""
    (q, k, v), _ = CASE.inputs(jnp.float32)
    options = {"implementation": "xla", "precision": "highest", "is_causal": True}

    def whole(q, k, v):
        return attention(q, k, v, **options, return_residual=True)

    def in_parts(q, k, v):
        def part(lo, hi):
            keys, values = k[:, lo:hi], v[:, lo:hi]
            more = {"query_offset": -lo, "return_residual": True}
            return attention(q, keys, values, **options, **more)

        return jax_flash2.merge(part(0, 7), part(7, 30), part(30, 48))

    rng = np.random.default_rng(0)
    cotangents = [rng.standard_normal(x).astype("f4") for x in (q.shape, q.shape[:-1])]

    def results(function):
        def run(*arrays):
            out, vjp = jax.vjp(function, *arrays)
            return out, vjp(tuple(map(jnp.asarray, cotangents)))

        return jax.jit(run)(q, k, v)

    found, expected = map(results, (in_parts, whole))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_gradients_beside_parts_without_keys():
    """One part empty for some batch entries, all of them for others: never NaN."""
    (q, k, v), _ = CASE.inputs(jnp.float32)
    options = {"implementation": "xla", "precision": "highest"}
    options["return_residual"] = True
    lengths = np.int32([[20, 0], [0, 0]])  # of the first part, the second

    def in_parts(q, k, v):
        parts = ((0, 20, lengths[:, 0]), (20, 48, lengths[:, 1]))
        return jax_flash2.merge(
            *(
                attention(q, k[:, a:b], v[:, a:b], key_value_seq_lengths=n, **options)
                for a, b, n in parts
            )
        )

    def whole(q, k, v):
        return attention(q, k, v, key_value_seq_lengths=lengths.sum(1), **options)

    def gradients(function):
        def loss(*x):
            out, lse = function(*x)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(lse[0]))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    for a, b in zip(gradients(in_parts), gradients(whole), strict=True):
        assert np.all(np.isfinite(a))
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


PART = jnp.zeros((2, 5, 4, 8)), jnp.zeros((2, 5, 4))
WRONG = {
    "no parts": ((), {}, ValueError, "at least one pair"),
    "no pair": ((PART[0],), {}, TypeError, r"parts\[0\] must be a pair"),
    "no array": ((PART, (1.0, PART[1])), {}, TypeError, r"parts\[1\]\[0\] must be an"),
    "integers": (
        ((PART[0].astype(int), PART[1]),),
        {},
        TypeError,
        "floating-point dtype, got int32",
    ),
    "narrow log": (
        ((PART[0], PART[1].astype("bfloat16")),),
        {},
        TypeError,
        "float32 or float64, got bfloat16",
    ),
    "log of another shape": (
        ((PART[0], PART[1][:1]),),
        {},
        ValueError,
        r"must have shape \(2, 5, 4\)",
    ),
    "outputs of two shapes": (
        (PART, (PART[0][:1], PART[1][:1])),
        {},
        ValueError,
        r"parts\[1\]\[0\] must have the shape of parts\[0\]\[0\]",
    ),
    "sinks": ((PART,), {"sinks": jnp.zeros(3)}, ValueError, r"\[N\]=\(4,\), got"),
    "integer sinks": ((PART,), {"sinks": jnp.zeros(4, int)}, TypeError, "sinks must"),
    "sinks without heads": (
        ((PART[0][0, :, 0], PART[1][0, :, 0]),),
        {"sinks": jnp.zeros(5)},
        ValueError,
        "sinks must be None for outputs without heads",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parts(name):
    parts, more, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        jax_flash2.merge(*parts, **more)
