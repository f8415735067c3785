"""Attention as published models write it, in functions of a few arrays.

Each function of `MODELS` returns a function, its arrays, and words of the arguments of
`attention` that should be recognised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Model(NamedTuple):
    """A function of arrays with attention, and what `flashify` should say of it."""

    function: Callable
    arrays: tuple
    recognised: set[str]
    sites: int = 1


def _normal(seed: int, *shape: int, dtype=jnp.float32):
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x * 0.5, dtype)


def gemma() -> Model:
    """Grouped queries by reshape, soft cap, sliding window, a [B, T, S] mask."""

    def attend(x, q_weights, kv_weights, out_weights):
        q = jnp.einsum("btd,ndh->btnh", x, q_weights)
        k, v = jnp.einsum("bsd,ckdh->cbskh", x, kv_weights)
        b, t, n, h = q.shape
        kv_heads = k.shape[2]
        q = (q * h**-0.5).reshape(b, t, kv_heads, n // kv_heads, h)
        logits = jnp.einsum("btkgh,bskh->btkgs", q, k).reshape(b, t, n, t)
        logits = jnp.tanh(logits / 50.0) * 50.0
        positions = jnp.arange(t)
        causal = positions[None, :, None] >= positions[None, None, :]
        near = positions[None, None, :] > positions[None, :, None] - 4
        mask = jnp.broadcast_to(causal & near, (b, t, t))
        logits = jnp.where(mask[:, :, None, :], logits, -2.3819763e38)
        probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(k.dtype)
        probs = probs.reshape(b, t, kv_heads, n // kv_heads, t)
        out = jnp.einsum("btkgs,bskh->btkgh", probs, v).reshape(b, t, n, h)
        return jnp.einsum("btnh,nhd->btd", out, out_weights)

    arrays = (
        _normal(0, 2, 10, 16),
        _normal(1, 4, 16, 8),
        _normal(2, 2, 2, 16, 8),
        _normal(3, 4, 8, 16),
    )
    return Model(attend, arrays, {"is_causal", "local_window_size", "logits_soft_cap"})


def llama() -> Model:
    """Tunix's: heads in front of rows, float32 softmax, a mask of positions."""

    def attend(x, qw, kw, vw):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in (qw, kw, vw))
        b, t, n, h = q.shape
        g = n // k.shape[2]
        q = q.reshape(b, t, k.shape[2], g, h)
        scores = jnp.einsum("BTKGH,BSKH->BTKGS", q, k) * h**-0.5
        scores = scores.reshape(b, t, n, t)
        mask = jnp.tril(jnp.ones((t, t), dtype=jnp.bool_))[None]
        scores = jnp.where(jnp.expand_dims(mask, -2), scores, -2.3819763e38)
        weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(k.dtype)
        weights = weights.reshape(b, t, -1, g, t)
        return jnp.einsum("BTKGS,BSKH->BTKGH", weights, v).reshape(b, t, n, h)

    arrays = (
        _normal(0, 2, 8, 16, dtype=jnp.bfloat16),
        _normal(1, 16, 4, 8, dtype=jnp.bfloat16),
        _normal(2, 16, 2, 8, dtype=jnp.bfloat16),
        _normal(3, 16, 2, 8, dtype=jnp.bfloat16),
    )
    return Model(attend, arrays, {"is_causal"})


def t5() -> Model:
    """A learnt bias of distances, causal and padding in one added mask; no scale."""

    def attend(x, weights, table, valid):
        q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, weights)
        t = x.shape[1]
        distance = jnp.arange(t)[None, :] - jnp.arange(t)[:, None]
        bucket = jnp.clip(-distance, 0, table.shape[0] - 1)
        bias = jnp.transpose(table[bucket], (2, 0, 1))[None]
        causal = jnp.tril(jnp.ones((1, 1, t, t), bool))
        allowed = jnp.logical_and(causal, valid[:, None, None, :])
        low = jnp.finfo(x.dtype).min
        added = jnp.where(allowed, jnp.full((), 0.0), jnp.full((), low))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k)
        logits = logits + bias + added
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1), v)

    valid = jnp.arange(9) < jnp.array([9, 6])[:, None]
    arrays = (_normal(0, 2, 9, 16), _normal(1, 3, 16, 2, 8), _normal(2, 5, 2), valid)
    return Model(attend, arrays, {"bias", "is_causal", "mask"})


def swin() -> Model:
    """Windows as a batch, a bias of positions, and a mask for each shifted window."""

    def attend(x, weights, table, image):
        windows, rows, width = x.shape
        heads = table.shape[0]
        qkv = (x @ weights).reshape(windows, rows, 3, heads, width // heads)
        q, k, v = jnp.transpose(qkv, (2, 0, 3, 1, 4))
        scores = (q * (width // heads) ** -0.5) @ k.swapaxes(-2, -1)
        scores = scores + table[None]
        count = image.shape[0]
        masks = jnp.where(image[:, None, :] == image[:, :, None], 0.0, -1e9)
        scores = scores.reshape(windows // count, count, heads, rows, rows)
        scores = scores + masks[None, :, None]
        scores = scores.reshape(windows, heads, rows, rows)
        out = jax.nn.softmax(scores, axis=-1) @ v
        return out.transpose(0, 2, 1, 3).reshape(windows, rows, width)

    image = jnp.array([[0] * 9, [0, 0, 1, 0, 0, 1, 2, 2, 3]])
    arrays = (_normal(0, 4, 9, 16), _normal(1, 16, 48), _normal(2, 2, 9, 9), image)
    return Model(attend, arrays, {"bias", "query_segment_ids"})


def vit() -> Model:
    """One projection, an odd number of rows, `vmap` over the batch."""

    def one(x, weights, out_weights):
        t, width = x.shape
        q, k, v = (x @ weights).reshape(t, 3, 4, width // 4).transpose(1, 2, 0, 3)
        scores = jnp.matmul(q, k.transpose(0, 2, 1)) / np.sqrt(width // 4)
        out = jnp.matmul(jax.nn.softmax(scores), v)
        return out.transpose(1, 0, 2).reshape(t, width) @ out_weights

    def attend(x, *weights):
        return jax.vmap(lambda y: one(y, *weights))(x)

    arrays = (_normal(0, 3, 17, 32), _normal(1, 32, 96), _normal(2, 32, 32))
    return Model(attend, arrays, set())


def whisper() -> Model:
    """Cross-attention, scaled on both sides, heads in front."""

    def attend(x, audio, q_weights, kv_weights):
        heads, width = 2, x.shape[-1]
        scale = (width // heads) ** -0.25
        k, v = jnp.split(audio @ kv_weights, 2, axis=-1)

        def apart(y):
            return y.reshape(*y.shape[:2], heads, -1).transpose(0, 2, 1, 3)

        q, k, v = apart(x @ q_weights) * scale, apart(k) * scale, apart(v)
        scores = (q @ k.transpose(0, 1, 3, 2)).astype(jnp.float32)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)

    arrays = (
        _normal(0, 2, 5, 16),
        _normal(1, 2, 13, 16),
        _normal(2, 16, 16),
        _normal(3, 16, 32),
    )
    return Model(attend, arrays, set())


def evoformer() -> Model:
    """A row of AlphaFold's: gate, a bias of the mask and one of pairs."""

    def attend(msa, pair, mask, weights, pair_weights, gate_weights):
        bias = (1e9 * (mask - 1.0))[:, None, None, :]
        pair_bias = jnp.einsum("qkc,ch->hqk", pair, pair_weights)
        q, k, v = jnp.einsum("bqa,cahd->cbqhd", msa, weights)
        logits = jnp.einsum("bqhc,bkhc->bhqk", q * q.shape[-1] ** -0.5, k) + bias
        logits = logits + jnp.expand_dims(pair_bias, 0)
        averages = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(logits), v)
        gate = jax.nn.sigmoid(jnp.einsum("bqa,ahc->bqhc", msa, gate_weights))
        return averages * gate

    mask = np.ones((3, 7), np.float32)
    mask[1, 5:] = 0
    arrays = (
        _normal(0, 3, 7, 16),
        _normal(1, 7, 7, 4),
        jnp.asarray(mask),
        _normal(2, 3, 16, 2, 8),
        _normal(3, 4, 2),
        _normal(4, 16, 2, 8),
    )
    return Model(attend, arrays, {"bias"})


def packed_gpt() -> Model:
    """`scan` and `remat` over layers, with a mask of documents made outside."""

    def attend(x, ids, weights):
        t = x.shape[1]
        causal = np.tril(np.ones((t, t), bool))
        mask = (ids[:, None, :, None] == ids[:, None, None, :]) & causal

        @jax.checkpoint
        def layer(h, w):
            q, k, v = jnp.einsum("btd,cdnh->cbtnh", h, w)
            s = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
            s = jnp.where(mask, s, jnp.finfo(s.dtype).min)
            p = jax.nn.softmax(s)
            return h + jnp.einsum("bnts,bsnh->btnh", p, v).reshape(h.shape), None

        return jax.lax.scan(layer, x, weights)[0]

    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8])
    arrays = (_normal(0, 2, 8, 16), ids, _normal(1, 2, 3, 16, 2, 8))
    return Model(attend, arrays, {"is_causal", "query_segment_ids"})


def jax_nn() -> Model:
    """`jax.nn`'s own, whose rows without keys give the mean."""

    def attend(q, k, v, mask):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)

    mask = jnp.asarray(np.random.default_rng(0).random((2, 1, 6, 6)) < 0.6)
    x = (_normal(i, 2, 6, 4, 8) for i in range(3))
    return Model(attend, (*x, mask), {"mask"})


MODELS = (
    gemma,
    llama,
    t5,
    swin,
    vit,
    whisper,
    evoformer,
    packed_gpt,
    jax_nn,
)
