"""flax_attention(): attention() as an `attention_fn` for Flax's attention modules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_flash2._api import attention
from jax_flash2._arguments import Array, Precision
from jax_flash2._arrays import as_array, unwrapped


def flax_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Precision | None = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    is_causal: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    **arguments: Any,
) -> jax.Array:
    """`attention` with the signature of Flax's `dot_product_attention`.

    Pass it as attention_fn to `linen.MultiHeadDotProductAttention`,
    `linen.MultiHeadAttention` or `nnx.MultiHeadAttention`. Decoding with a cache works
    too. This module does not import Flax.

    A function of your own around it needs its signature (`functools.wraps`): linen
    reads the names of the parameters, and leaves out, in silence, the mask and the
    dropout of a function that does not name them.

    Args:
      query: [*B, T, N, H].
      key: [*B, S, K, H]. K must divide N.
      value: [*B, S, K, Hv].
      bias: any dtype. Broadcasts to [*B, N, T, S].
      mask: bool, or numbers of which 0 masks, as in Flax. (One that is added to the
        scores, of which 0 keeps, is a bias.) Broadcasts to [*B, N, T, S].
      broadcast_dropout: if True, every batch entry and head drops the same pairs.
      dropout_rng: a JAX random key.
      dropout_rate: the probability in [0, 1) of dropping each attention weight.
      deterministic: if True, no dropout.
      dtype: the dtype to compute in: bfloat16, float16, float32 or float64 (float64
        requires x64 mode). Default: the dtype that query, key and value promote to.
      precision: the precision of float32 products; see `attention`.
      module: must be None. Flax passes a module to sow attention weights, but
        jax_flash2 never materializes them.
      force_fp32_for_softmax: has no effect. The softmax always uses at least float32.
      is_causal: if True, a query attends only to keys at or before its position.
      qk_attn_weights_einsum, attn_weights_value_einsum: must be None. jax_flash2
        computes both products itself.
      **arguments: other arguments of `attention`, for use with `functools.partial`.

    Returns:
      [*B, T, N, Hv]. A row without keys is 0. (Flax returns the mean of the values.)

    Raises:
      TypeError, ValueError: if an argument is wrong, as `attention`; or if `module` or
        an einsum is not None.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_flash2 import flax_attention
      >>> layer = nnx.MultiHeadAttention(
      ...     num_heads=4,
      ...     in_features=32,
      ...     decode=False,
      ...     attention_fn=flax_attention,
      ...     rngs=nnx.Rngs(0),
      ... )
      >>> layer(jnp.ones((2, 10, 32)), is_causal=True).shape
      (2, 10, 32)
    """
    del force_fp32_for_softmax
    if module is not None:
        raise ValueError(
            f"module must be None, got {type(module).__name__}: jax_flash2 never "
            "materializes attention weights, so sow_weights=True is not supported; use "
            "Flax's own attention_fn to inspect them"
        )
    einsums = {
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    for name, einsum in einsums.items():
        if einsum is not None:
            raise ValueError(
                f"{name} must be None, got {einsum!r}: jax_flash2 computes this "
                "product itself; use Flax's own attention_fn to replace it"
            )
    query, key, value = map(unwrapped, (query, key, value))
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (
        as_array(name, x).astype(dtype)
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    bias, mask = unwrapped(bias), unwrapped(mask)
    if bias is not None and not jnp.issubdtype(jnp.asarray(bias).dtype, jnp.floating):
        bias = jnp.asarray(bias, dtype)
    if mask is not None:
        mask = jnp.asarray(mask).astype(bool)
    return attention(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        dropout_rate=0.0 if deterministic else dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        **arguments,
    )
