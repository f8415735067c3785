"""What looks like attention and is not: what `flashify` must leave alone.

Each takes scores, the steps that scale and mask them, a softmax with what weighs values
by its result, and the dtype of these (see `spellings.random_case`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def _all_steps(s, steps):
    for step in steps:
        s = step(s)
    return s


def _over_queries(s, steps, softmax, weigh, dtype):
    return weigh(jax.nn.softmax(_all_steps(s, steps), axis=-2).astype(dtype))


def _dropped(s, steps, softmax, weigh, dtype):
    p = jax.nn.softmax(_all_steps(s, steps))
    keep = jax.random.bernoulli(jax.random.key(0), 0.8, p.shape)
    return weigh(jnp.where(keep, p / 0.8, 0.0).astype(dtype))


def _dropped_by_product(s, steps, softmax, weigh, dtype):
    p = jax.nn.softmax(_all_steps(s, steps))
    keep = jax.random.bernoulli(jax.random.key(0), 0.8, p.shape)
    return weigh((p * keep / 0.8).astype(dtype))


def _weakly_masked(s, steps, softmax, weigh, dtype):
    mask = jnp.arange(s.shape[-1]) % 2 == 0
    return softmax(jnp.where(mask, _all_steps(s, steps), -3.0), weigh, dtype)


def _one_more_in_the_sum(s, steps, softmax, weigh, dtype):
    s = _all_steps(s, steps)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return weigh((e / (1.0 + e.sum(-1, keepdims=True))).astype(dtype))


def _other_sum(s, steps, softmax, weigh, dtype):
    top = s.max(-1, keepdims=True)
    total = jnp.sum(jnp.exp(s - top), -1, keepdims=True)
    s = jnp.where(jnp.arange(s.shape[-1]) > 0, _all_steps(s, steps), -1e9)
    return weigh((jnp.exp(s - top) / total).astype(dtype))


def _other_maximum(s, steps, softmax, weigh, dtype):
    s = _all_steps(s, steps)
    e = jnp.exp(s - s.max(-2, keepdims=True))
    total = jnp.exp(s - s.max(-1, keepdims=True)).sum(-1, keepdims=True)
    return weigh((e / total).astype(dtype))


def _shifted_by_keys(s, steps, softmax, weigh, dtype):
    s = _all_steps(s, steps)
    e = jnp.exp(s - s.max(-2, keepdims=True))
    return weigh((e / e.sum(-1, keepdims=True)).astype(dtype))


def _sigmoid(s, steps, softmax, weigh, dtype):
    return weigh(jax.nn.sigmoid(_all_steps(s, steps)).astype(dtype))


def _squared(s, steps, softmax, weigh, dtype):
    p = jax.nn.softmax(_all_steps(s, steps))
    return weigh((p * p).astype(dtype))


def _clipped(s, steps, softmax, weigh, dtype):
    return softmax(jnp.clip(_all_steps(s, steps), -0.5, 0.5), weigh, dtype)


def _bias_after_cap(s, steps, softmax, weigh, dtype):
    bias = jnp.linspace(0.0, 1.0, s.shape[-1], dtype=s.dtype)
    return softmax(_all_steps(2.0 * jnp.tanh(s) + bias, steps), weigh, dtype)


def _cap_after_bias_and_masks(s, steps, softmax, weigh, dtype):
    bias = jnp.linspace(0.0, 1.0, s.shape[-1], dtype=s.dtype)
    return softmax(2.0 * jnp.tanh(_all_steps(s + bias, steps)), weigh, dtype)


def _masked_late(s, steps, softmax, weigh, dtype):
    p = jax.nn.softmax(_all_steps(s, steps))
    return weigh(jnp.where(jnp.arange(s.shape[-1]) > 0, p, 0.0).astype(dtype))


def _without_gradient(s, steps, softmax, weigh, dtype):
    return softmax(lax.stop_gradient(_all_steps(s, steps)), weigh, dtype)


def _probabilities_used(s, steps, softmax, weigh, dtype):
    p = jax.nn.softmax(_all_steps(s, steps))
    entropy = -jnp.sum(p * jnp.log(p + 1e-6))
    return weigh(p.astype(dtype)) + (0.1 * entropy).astype(dtype)


def _scores_used(s, steps, softmax, weigh, dtype):
    spread = jnp.mean(s**2).astype(dtype)
    return softmax(_all_steps(s, steps), weigh, dtype) + spread


def _mixed_heads(s, steps, softmax, weigh, dtype):
    mix = jnp.eye(s.shape[1], dtype=s.dtype) + 0.1
    s = jnp.einsum("bnts,nm->bmts", s, mix)
    return softmax(_all_steps(s, steps), weigh, dtype)


def _with_a_sink(s, steps, softmax, weigh, dtype):
    s = _all_steps(s, steps)
    s = jnp.concatenate([s, jnp.ones_like(s[..., :1])], axis=-1)
    return weigh(jax.nn.softmax(s)[..., :-1].astype(dtype))


def _hot(s, steps, softmax, weigh, dtype):
    """exp(2 s) / sum exp(s)."""
    s = _all_steps(s, steps)
    top = s.max(-1, keepdims=True)
    total = jnp.sum(jnp.exp(s - top), -1, keepdims=True)
    return weigh((jnp.exp(2.0 * (s - top)) / total).astype(dtype))


def _by_row_lengths(s, steps, softmax, weigh, dtype):
    """Probabilities of each head are shared with the one before it."""
    p = jax.nn.softmax(_all_steps(s, steps))
    return weigh((0.5 * (p + jnp.roll(p, 1, axis=-1))).astype(dtype))


FAULTS = (
    _over_queries,
    _dropped,
    _dropped_by_product,
    _weakly_masked,
    _one_more_in_the_sum,
    _other_sum,
    _other_maximum,
    _shifted_by_keys,
    _sigmoid,
    _squared,
    _clipped,
    _bias_after_cap,
    _cap_after_bias_and_masks,
    _masked_late,
    _without_gradient,
    _probabilities_used,
    _scores_used,
    _mixed_heads,
    _with_a_sink,
    _hot,
    _by_row_lengths,
)
