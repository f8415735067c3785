"""Errors of `score_mod` and `mask_mod`: what is no function of one pair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jax_flash2 import attention
from tests.kernels.test_mods import ARRAYS

X = jnp.zeros((3, 4))
KEY = jax.random.key(0)
WORDS = jax.random.PRNGKey(0)


def _printed(score):
    jax.debug.print("{}", score)
    return score


def _called_back(score):
    return io_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), score)


# Of a number and two arrays' places; both functions say so.
NOT_POINTWISE = {
    "uses a captured array of shape (3, 4) whole ('sort', test_mod_errors.py:": (
        lambda x, q, kv: x + jnp.sort(X[q])[kv]
    ),
    "uses a captured array of shape (3, 4) whole ('cumsum', test_mod_errors.py:": (
        lambda x, q, kv: x + jnp.cumsum(X, axis=1)[q, kv]
    ),
    "uses a captured array of shape (3, 4) whole ('reduce_max', test_mod_errors.py:": (
        lambda x, q, kv: x + jax.nn.softmax(X[q])[kv]
    ),
    "uses a captured array of shape (3, 4) whole ('argmax', test_mod_errors.py:": (
        lambda x, q, kv: x + jnp.argmax(X[q])
    ),
    "uses 'sort' (test_mod_errors.py:": lambda x, q, kv: jnp.sort(x[None])[0],
    "uses 'cumsum' (test_mod_errors.py:": lambda x, q, kv: jnp.cumsum(x)[0],
    "uses 'iota' (test_mod_errors.py:": lambda x, q, kv: x + jnp.arange(1)[0],
    "called with numbers (scalars without axes), raised ValueError: axis -1": (
        lambda x, q, kv: jnp.sort(x)
    ),
    "called with numbers (scalars without axes), raised IndexError: Too many": (
        lambda x, q, kv: x[0]
    ),
    "uses 'random_wrap' (": lambda x, q, kv: x + jax.random.normal(WORDS),
    "captures a random key: pass dropout_rate": (
        lambda x, q, kv: x + jax.random.normal(KEY)
    ),
    "uses 'random_seed' (": lambda x, q, kv: x + jax.random.normal(jax.random.key(0)),
    "has a side effect, 'debug_print' (test_mod_errors.py:": (
        lambda x, q, kv: jax.jit(_printed)(x)
    ),
    "has a side effect, 'io_callback' (test_mod_errors.py:": (
        lambda x, q, kv: _called_back(x)
    ),
}
WRONG = {
    "must be a function of (score, b, h, q, kv), got int": 3,
    "must be a function of (score, b, h, q, kv): too many": lambda s, b, h, q: s,
    "must return a float32 scalar, got int32 of shape (): convert": (
        lambda s, b, h, q, kv: q
    ),
    "must return a float32 scalar, got float32 of shape (1,)": (
        lambda s, b, h, q, kv: s[None]
    ),
    "must return one float32 scalar": lambda s, b, h, q, kv: (s, s),
    "uses a captured array of shape (3, 4) whole ('reduce_sum', test_mod_errors.py:": (
        lambda s, b, h, q, kv: s + jnp.sum(X)
    ),
    "uses 'cond' (test_mod_errors.py:": (
        lambda s, b, h, q, kv: jax.lax.cond(q > 1, lambda: s, lambda: 2 * s)
    ),
    "use jnp.where in place of jnp.select": (
        lambda s, b, h, q, kv: jnp.select([q > kv, q == kv], [s, 2 * s], -s)
    ),
    "reads an array with fill_value=7.0 (test_mod_errors.py:": (
        lambda s, b, h, q, kv: s + X.at[0, kv].get(mode="fill", fill_value=7.0)
    ),
    "must be a function of numbers that JAX can trace": (
        lambda s, b, h, q, kv: s if q > kv else -s
    ),
    "jnp.asarray(x)[q] of a NumPy array": (lambda s, b, h, q, kv: s + np.zeros(3)[kv]),
}


@pytest.mark.parametrize("text", WRONG)
def test_errors(text):
    with pytest.raises((TypeError, ValueError), match="score_mod") as error:
        attention(*ARRAYS, score_mod=WRONG[text])
    assert text in str(error.value)


@pytest.mark.parametrize("text", NOT_POINTWISE)
def test_errors_of_both(text):
    """A function of numbers has no axes to work along, and no effects."""
    function = NOT_POINTWISE[text]
    for name, mod in (
        ("score_mod", lambda s, b, h, q, kv: function(s, q, kv)),
        ("mask_mod", lambda b, h, q, kv: function((q - kv) * 1.0, q, kv) > 0),
    ):
        with pytest.raises((TypeError, ValueError, IndexError)) as error:
            attention(*ARRAYS, **{name: mod})
        assert str(error.value).startswith(name) and text in str(error.value)


def test_an_error_of_the_function_is_told():
    """By its own type, or a built-in one that it is of, in full."""

    class Unknown(ValueError):
        pass

    def score_mod(score, b, h, q, kv):
        raise Unknown("no such tokens:\n 3")

    with pytest.raises(
        ValueError, match="raised Unknown: no such tokens:\n 3"
    ) as error:
        attention(*ARRAYS, score_mod=score_mod)
    assert isinstance(error.value.__cause__, Unknown)


def test_errors_of_masks():
    with pytest.raises(
        TypeError, match="mask_mod must return a bool scalar, got int32"
    ):
        attention(*ARRAYS, mask_mod=lambda b, h, q, kv: q)
    with pytest.raises(
        TypeError, match=r"mask_mod must be a function of \(b, h, q, kv\)"
    ):
        attention(*ARRAYS, mask_mod=lambda s, b, h, q, kv: True)
