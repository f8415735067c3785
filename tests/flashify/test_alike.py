"""`flashify` of equal layers: what it finds in one holds of others that are like it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import flashify
from jax_flash2._flashify.layers import Layers
from jax_flash2._flashify.match import Matcher

T, H = 6, 4
CAUSAL = np.tril(np.ones((T, T), bool))
DATA = np.random.default_rng(0).random((4, T, T)) > 0.3
DATA[:, :, 0] = True


def attend(x, k, v, mask, extra=lambda p: 0.0):
    """Of sin(x) as queries; what is made of the probabilities is added."""
    p = jax.nn.softmax(jnp.where(mask, jnp.sin(x) @ k.mT, -1e9))
    return jnp.cos(x + p @ v + extra(p))


def equal(x, masks):
    mask = jnp.tril(jnp.ones((T, T), bool))
    for _ in range(5):
        x = attend(x, x, x, mask)
    return x


# The last of four layers differs from the third in what it reads, not in what it does.


def masks_made_outside(x, masks):
    i, j = jnp.arange(T)[:, None], jnp.arange(T)
    for mask in (j <= i, j <= i, j <= i, (j <= i) & (i - j < 2)):
        x = attend(x, x, x, mask)
    return x


def masks_that_are_constants(x, masks):
    for mask in (CAUSAL, CAUSAL, CAUSAL, DATA[0]):
        x = attend(x, x, x, mask)
    return x


def scales_made_outside(x, masks):
    scale = jnp.full((T, T), 2.0)
    for own in (scale, scale, scale, scale + 1.0):
        x = jnp.cos(jax.nn.softmax(x @ x.mT * own) @ x)
    return x


def keys_repeated_outside(x, masks):
    x = jnp.stack([x, jnp.cos(x)])
    k = [jnp.broadcast_to(x[:1], x.shape), jnp.broadcast_to(x[1:], x.shape)]
    for own in (k[0], k[1], k[0], jnp.sin(x)):
        x = attend(x, own, own, CAUSAL)
    return x


def ids_in_a_checkpoint(x, masks):
    """Two inputs of the checkpoint are one array outside of it, and then are not."""
    ids = jnp.asarray(jnp.arange(T) * x.sum() > 3.0, jnp.int32)
    other = jnp.asarray(x[:, 0] > 0, jnp.int32)

    @jax.checkpoint
    def layers(x, *ids):
        for i in range(4):
            mask = ids[2 * i][:, None] == ids[2 * i + 1]
            x = attend(x, x, x, mask)
        return x

    return layers(x, *[ids] * 6, ids, other)


DIFFERENT = (
    masks_made_outside,
    masks_that_are_constants,
    scales_made_outside,
    keys_repeated_outside,
    ids_in_a_checkpoint,
)

# Layers that are alike, with something else beside.


def masks_that_are_inputs(x, masks):
    for mask in masks:
        x = attend(x, x, x, mask)
    return x


def probabilities_used_twice(x, masks):
    for _ in range(4):
        x = attend(x, x, x, CAUSAL, lambda p, x=x: p @ jnp.sin(x))
    return x


def probabilities_of_the_last(x, masks):
    kept = []
    for _ in range(4):
        x = attend(x, x, x, CAUSAL, lambda p: kept.append(p) or 0.0)
    return x, kept[-1]


def scores_of_the_last_in_another_softmax(x, masks):
    """The product is made before the last root, and its exponentials after it."""
    for _ in range(4):
        scores = jnp.cos(x) @ x.mT
        x = attend(x, x, x, CAUSAL)
    return x + jax.nn.softmax(scores) @ x


def one_left_alone_in_each(x, masks):
    for _ in range(4):
        x = jnp.cos(jax.nn.softmax(x @ x.mT) * DATA[0] / 0.9) @ x
        x = attend(x, x, x, CAUSAL)
    return x


def narrow_results(x, masks):
    for i in range(4):
        out = jax.nn.softmax(x @ x.mT) @ x
        x = x + (out.astype(jnp.bfloat16).astype(jnp.float32) if i < 3 else out)
    return x


OTHERS = (
    equal,
    masks_that_are_inputs,
    probabilities_used_twice,
    probabilities_of_the_last,
    scores_of_the_last_in_another_softmax,
    one_left_alone_in_each,
    narrow_results,
)


def inputs():
    return 0.5 * jax.random.normal(jax.random.key(0), (T, H)), [*jnp.asarray(DATA)]


@pytest.mark.parametrize("function", DIFFERENT + OTHERS, ids=lambda f: f.__name__)
def test_results_and_reports_are_those_of_each_layer_alone(function, monkeypatch):
    given = inputs()
    fast = flashify(function, must_find=True)
    found, report = jax.jit(fast)(*given), fast.report(*given)
    rounding = 1e-2 if function is narrow_results else 1e-5
    for a, b in zip(*map(jax.tree.leaves, (found, function(*given))), strict=True):
        np.testing.assert_allclose(a, b, atol=rounding)
    monkeypatch.setattr(Layers, "like", lambda *_: None)
    assert str(report) == str(fast.report(*given))


@pytest.mark.parametrize("function", [equal, masks_that_are_inputs, narrow_results])
def test_equal_layers_are_searched_once(function, monkeypatch):
    """The first has nothing before it, and what follows the last has no root."""
    starts, own = [], Matcher._searched

    def searched(self, start):
        starts.append(start)
        return own(self, start)

    monkeypatch.setattr(Matcher, "_searched", searched)
    flashify(function).report(*inputs())
    assert len(starts) == 3
