"""attention() in the words of Flax: an `attention_fn` for its attention modules."""

from __future__ import annotations

import jax.numpy as jnp

from jax_flash2._api import attention


def flax_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    broadcast_dropout: bool = True,
    dropout_rng=None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype=None,
    precision=None,
    module=None,
    force_fp32_for_softmax: bool = False,
    is_causal: bool = False,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
    **arguments,
):
    """`attention` with the signature of Flax's `dot_product_attention`.

    For `linen.MultiHeadDotProductAttention`, `linen.MultiHeadAttention` and
    `nnx.MultiHeadAttention`, decoding with a cache included. Flax is not imported.

    Args:
      query: [*B, T, N, H].
      key: [*B, S, K, H], K divides N.
      value: [*B, S, K, Hv].
      bias: any dtype, broadcasts against [*B, N, T, S].
      mask: bool, or numbers of which 0 masks; broadcasts against [*B, N, T, S].
      broadcast_dropout: drop the same pairs in every batch entry and head.
      dropout_rng: a JAX key.
      dropout_rate: chance in [0, 1) that a probability is dropped.
      deterministic: no dropout.
      dtype: to compute in; by default what query, key and value promote to.
      precision: of products of float32, see `attention`.
      module: must be None: attention weights cannot be sown, for they are never made.
      force_fp32_for_softmax: the softmax is in float32 either way.
      is_causal: attend only to keys at or before the query's position.
      qk_attn_weights_einsum, attn_weights_value_einsum: must be None: the products are
        the kernels' own.
      **arguments: more arguments of `attention`, as by `functools.partial`.

    Returns:
      [*B, T, N, Hv]. Where Flax gives the mean of the values to a row without keys,
      this gives 0.

    Raises:
      TypeError, ValueError: as `attention`; and for a `module` or an einsum.

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
            "sow_weights=True is not supported (module must be None): jax_flash2 never "
            "makes the weights; use Flax's own attention_fn to inspect them"
        )
    einsums = {
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    for name, einsum in einsums.items():
        if einsum is not None:
            raise ValueError(
                f"{name} must be None, got {einsum!r}: jax_flash2 computes the "
                "products in its kernels; use Flax's own attention_fn to replace them"
            )
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
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
