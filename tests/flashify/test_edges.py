"""`flashify` on what was once replaced wrongly, or stopped it: one function each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from jax_flash2 import flashify

softmax = jax.nn.softmax
KEEP = (np.arange(42).reshape(6, 7) % 3 > 0) & np.isin(np.arange(6), (0, 1, 4))[:, None]


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((6, 4), (7, 4), (7, 5))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def normalised(e, total=None):
    total = jnp.sum(e, axis=-1, keepdims=True) if total is None else total
    return e / total


def without_zero(x):
    return jnp.where(x == 0, 1.0, x)


def top(s):
    return jnp.max(s, axis=-1, keepdims=True)


# Probabilities of scores that `attention` has not: left alone.


def moved_before_the_cap(s):
    return softmax(2.0 * jnp.tanh(s + 1.0))


def moved_but_not_in_the_sum(s):
    e = jnp.exp(s - top(s))
    return normalised(jnp.exp(s - top(s) + 1.0), jnp.sum(e, -1, keepdims=True))


def masked_scores_come_back(s):
    return softmax(jnp.where(KEEP, s, -1e9) + 1e9)


def a_maximum_with_another_gradient(s):
    largest = top(s)
    e = jnp.exp(s - lax.stop_gradient(largest))
    return normalised(jnp.exp(s - largest), jnp.sum(e, -1, keepdims=True))


def one_of_two_masks_again(s):
    both = jnp.where(KEEP.any(1)[:, None], jnp.where(KEEP, s, -1e9), -1e9)
    return jnp.where(KEEP, softmax(both), 0.0)


def a_maximum_that_is_cut(s):
    s = jnp.where(KEEP, s, -1e9)
    e = jnp.exp(s - jnp.maximum(top(s), -1e4))
    return normalised(e, without_zero(jnp.sum(e, -1, keepdims=True)))


def a_window_without_keys(s):
    i, j = jnp.arange(6)[:, None], jnp.arange(7)
    return softmax(jnp.where((j >= i + 3) & (j <= i + 2), s, -1e9))


def infinite_scale(s):
    return softmax(s * jnp.float32(np.inf))


LEFT = (
    moved_before_the_cap,
    moved_but_not_in_the_sum,
    masked_scores_come_back,
    a_maximum_with_another_gradient,
    one_of_two_masks_again,
    a_maximum_that_is_cut,
    a_window_without_keys,
    infinite_scale,
)

# Replaced, with what the function gives in rows without keys: the mean, 0 or NaN.


def without_a_maximum(s):
    return normalised(jnp.exp(jnp.where(KEEP, s, -1e9)))


def the_maximum_of_all(s):
    return normalised(jnp.exp(s - jnp.max(s)))


def a_maximum_before_the_mask(s):
    e = jnp.exp(jnp.where(KEEP, s, -1e9) - top(s))
    return normalised(e, without_zero(jnp.sum(e, -1, keepdims=True)))


def a_finite_maximum(s):
    s = jnp.where(KEEP, s, -jnp.inf)
    largest = top(s)
    e = jnp.exp(s - jnp.where(jnp.isfinite(largest), largest, 0.0))
    return normalised(e, without_zero(jnp.sum(e, -1, keepdims=True)))


def a_mask_on_exponentials(s):
    s = jnp.where(KEEP, s, -1e9)
    return normalised(jnp.exp(s - top(s)) * KEEP)


def a_mask_beyond_float16(s):
    s = s + jnp.where(KEEP, 0.0, -1e9)
    return softmax(s.astype(jnp.float16)).astype(jnp.float32)


def positions_that_overflow(s):
    i, j = jnp.arange(6)[:, None], jnp.arange(7)
    return softmax(jnp.where((i + j) * 1103515245 + 12345 >= 0, s, -1e9))


def positions_that_are_rounded(s):
    i, j = (jnp.arange(n, dtype=jnp.float32) + 2.0**24 for n in s.shape)
    return softmax(jnp.where(i[:, None] >= j, s, -1e9))


def a_bias_of_many_operations(s):
    bias = jnp.sin(jnp.arange(42.0).reshape(6, 7))
    for _ in range(400):
        bias = bias * 0.999
    return softmax(s + bias)


RIGHT = (
    without_a_maximum,
    the_maximum_of_all,
    a_maximum_before_the_mask,
    a_finite_maximum,
    a_mask_on_exponentials,
    a_mask_beyond_float16,
    positions_that_overflow,
    positions_that_are_rounded,
    a_bias_of_many_operations,
)


def attends(probabilities):
    return lambda q, k, v: probabilities(q @ k.T) @ v


@pytest.mark.parametrize("probabilities", LEFT, ids=lambda x: x.__name__)
def test_left_alone(probabilities):
    report = flashify(attends(probabilities)).report(*arrays())
    assert not report.replaced and report.left, str(report)


@pytest.mark.parametrize("probabilities", RIGHT, ids=lambda x: x.__name__)
def test_right(probabilities):
    own = attends(probabilities)
    fast = flashify(own, must_find=True)
    found, expected = (jax.jit(f)(*arrays()) for f in (fast, own))
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_operands_of_eight_bits():
    def own(q, k, v):
        q, k = (x.astype(jnp.float8_e4m3fn) for x in (q, k))
        s = jnp.einsum("td,sd->ts", q, k, preferred_element_type=jnp.float32)
        return softmax(s) @ v

    fast = flashify(own, must_find=True)
    found, expected = (jax.jit(f)(*arrays()) for f in (fast, own))
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_ids_of_keys_in_another_order():
    """ids[b, t] == ids[s, b]: rows may have no keys."""
    ids = jnp.arange(16).reshape(4, 4)
    x = jax.random.normal(jax.random.key(0), (4, 4, 2, 8))

    def own(x, ids):
        s = jnp.einsum("btnd,bsnd->bnts", x, x)
        same = ids[:, None, :, None] == ids.T[:, None, None]
        return jnp.einsum("bnts,bsnd->btnd", softmax(jnp.where(same, s, -1e9)), x)

    found, expected = (jax.jit(f)(x, ids) for f in (flashify(own), own))
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("is_causal", [False, True])
def test_known_lengths_are_no_positions(is_causal):
    """Of two batch entries any lengths are numbers in steps, as positions are."""
    lengths = jnp.array([3, 7])
    q, k = jax.random.normal(jax.random.key(0), (2, 2, 7, 2, 8))

    def own(q, k):
        keep = (jnp.arange(7) < lengths[:, None])[:, None, None]
        keep &= jnp.tril(jnp.ones((7, 7), bool)) | (not is_causal)
        s = jnp.where(keep, jnp.einsum("btnd,bsnd->bnts", q, k), -jnp.inf)
        return jnp.einsum("bnts,bsnd->btnd", softmax(s), k)

    fast = flashify(own)
    (site,) = fast.report(q, k).replaced
    assert ("is_causal" in site.arguments) == is_causal and "mask" in site.arguments
    found, expected = (jax.jit(f)(q, k) for f in (fast, own))
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_a_users_derivative_of_a_function_of_jax():
    own = jax.custom_jvp(jnp.exp)
    own.defjvp(lambda x, t: (own(*x), 3.0 * t[0]))
    function = attends(lambda s: normalised(own(s - top(s))))
    assert not flashify(function).report(*arrays()).replaced


def test_symbols_are_left_alone():
    (n,) = export.symbolic_shape("n")
    q, k, v = (jax.ShapeDtypeStruct((n, *x.shape), x.dtype) for x in arrays())
    fast = flashify(jax.vmap(attends(softmax)))
    assert "symbols" in fast.report(q, k, v).left[0].reason
    exported = export.export(jax.jit(fast), platforms=["cpu", "cuda"])(q, k, v)
    assert exported.out_avals[0].shape[1:] == (6, 5)


def test_methods():
    class Layer:
        scale = 0.5

        @flashify
        def attend(self, q, k, v):
            return softmax(q @ k.T * self.scale) @ v

    layer = Layer()
    assert layer.attend.report(*arrays()).replaced[0].arguments["scale"] == 0.5
    assert layer.attend(*arrays()).shape == (6, 5)
