"""Attention layers of other packages, as these ship them (extra `test-models`).

Each function of `PACKAGES` imports its package and returns a `Model`; parameters are
arrays of it, so that gradients are theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.flashify.models import Model, _normal


def _with_leaves(
    function: Callable, tree: Any, x: jax.Array, recognised: set[str], sites: int = 1
) -> Model:
    """A model whose arrays are x and the leaves of a tree of parameters."""
    leaves, structure = jax.tree.flatten(tree)

    def call(x, *leaves):
        return function(jax.tree.unflatten(structure, leaves), x)

    return Model(call, (x, *leaves), recognised, sites)


def haiku() -> Model:
    import haiku as hk

    def attend(x):
        layer = hk.MultiHeadAttention(4, 8, w_init=hk.initializers.RandomNormal(0.3))
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1])))
        return layer(x, x, x, mask=mask)

    model = hk.without_apply_rng(hk.transform(attend))
    x = _normal(0, 2, 9, 32)
    return _with_leaves(model.apply, model.init(jax.random.key(0), x), x, {"is_causal"})


def equinox() -> Model:
    import equinox as eqx

    layer = eqx.nn.MultiheadAttention(4, 32, key=jax.random.key(0))
    arrays, others = eqx.partition(layer, eqx.is_array)

    def attend(arrays, x):
        own = eqx.combine(arrays, others)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        return jax.vmap(lambda y: own(y, y, y, mask=mask))(x)

    return _with_leaves(attend, arrays, _normal(0, 2, 9, 32), {"is_causal"})


def linen() -> Model:
    """Flax's own attention, without a hook."""
    import flax.linen as nn

    layer = nn.MultiHeadDotProductAttention(4, dropout_rate=0.0, deterministic=True)
    x = _normal(0, 2, 9, 32)
    mask = nn.make_causal_mask(x[..., 0])
    parameters = layer.init(jax.random.key(0), x, x, mask=mask)
    call = functools.partial(layer.apply, mask=mask)
    return _with_leaves(lambda p, y: call(p, y, y), parameters, x, {"is_causal"})


def nnx() -> Model:
    """The attention function that `nnx` has where weights are asked for."""
    from flax import nnx as flax_nnx
    from flax.nnx.nn.attention import dot_product_attention as own

    def attend(weights, x):
        q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, weights)
        mask = flax_nnx.make_causal_mask(x[..., 0])
        bias = jnp.where(mask > 0, 0.0, -1e10).astype(x.dtype)
        return own(q, k, v, bias=bias, module=None)

    return _with_leaves(attend, _normal(1, 3, 32, 4, 8), _normal(0, 2, 9, 32), set())


def gemma() -> Model:
    from gemma.gm.nn import _modules

    layer = _modules.Attention(
        num_heads=4,
        num_kv_heads=2,
        features=32,
        head_dim=8,
        attn_type=_modules.AttentionType.LOCAL_SLIDING,
        query_pre_attn_scalar=8**-0.5,
        attn_logits_soft_cap=50.0,
        sliding_window_size=4,
        use_qk_norm=True,
    )
    x = _normal(0, 2, 9, 32)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((9, 9), bool)), (2, 9, 9))
    parameters = layer.init(jax.random.key(0), x, positions, None, mask)

    def attend(parameters, x):
        return layer.apply(parameters, x, positions, None, mask)[1]

    return _with_leaves(attend, parameters, x, {"logits_soft_cap", "is_causal"})


def tunix() -> Model:
    from flax import nnx as flax_nnx
    from tunix.models.llama3 import model as llama

    config = llama.ModelConfig(
        num_layers=1,
        vocab_size=16,
        embed_dim=32,
        hidden_dim=32,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    layer = llama.Attention(config, rngs=flax_nnx.Rngs(0))
    structure, state = flax_nnx.split(layer)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((9, 9), bool)), (2, 9, 9))

    def attend(state, x):
        own = flax_nnx.merge(structure, state)
        return own(x, positions, None, mask)[1]

    return _with_leaves(attend, state, _normal(0, 2, 9, 32), {"is_causal"})


def penzai() -> Model:
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as common

    config = common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=32,
        projection_dim=8,
        mlp_hidden_dim=32,
        num_decoder_blocks=2,
        vocab_size=16,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    model = common.build_llamalike_transformer(config, jax.random.key(0))
    model, parameters = pz.unbind_variables(model, freeze=True)
    tokens = pz.nx.wrap(jnp.arange(18).reshape(2, 9) % 16).tag("batch", "seq")

    def attend(parameters, x):
        own = pz.bind_variables(model, parameters)
        positions = pz.nx.arange("seq", 9)
        out = own(tokens, token_positions=positions)
        return out.unwrap("batch", "seq", "vocabulary") * x

    return _with_leaves(attend, parameters, jnp.ones(()), {"is_causal"}, sites=2)


def haliax() -> Model:
    import haliax as hax
    from haliax.nn import attention as own

    batch, rows, keys, heads, depth = hax.make_axes(
        batch=2, rows=9, keys=9, heads=4, depth=8
    )

    def attend(weights, x):
        q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, weights)
        query = hax.named(q, (batch, rows, heads, depth))
        key, value = (hax.named(y, (batch, keys, heads, depth)) for y in (k, v))
        mask = own.causal_mask(rows, keys)
        out = own.dot_product_attention(keys, depth, query, key, value, mask=mask)
        return out.rearrange((batch, rows, heads, depth)).array

    return _with_leaves(
        attend, _normal(1, 3, 32, 4, 8), _normal(0, 2, 9, 32), {"is_causal"}
    )


PACKAGES = (haiku, equinox, linen, nnx, gemma, tunix, penzai, haliax)
