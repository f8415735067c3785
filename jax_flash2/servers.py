"""The attention calls of TPU servers, on GPUs: same arguments, same caches.

Servers in JAX call a function of their TPU kernels, `ragged_paged_attention`, with one
array for keys and values: vLLM's plugin (version 3), SGLang-JAX (a version of its own)
and Levanter (version 2). Here each is with `paged_attention` behind it: put it in that
function's place. Arguments that say how a TPU divides the work are taken and not used.
Queries are not rounded to one byte (`q_scale`), and a query without keys gets 0.
Levanter's Llama was run with it on a CPU (`tests/api/test_levanter.py`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_flash2 import _server_arguments as check
from jax_flash2._cache import append_to_pages, page_slots
from jax_flash2._options import check_bool
from jax_flash2._paged import paged_attention
from pallas_kernels.core.promotion import own_rules
from pallas_kernels.core.quantise import QUANTISED

_LANES = 128  # head sizes of a cache are multiples of it


def get_kv_cache_shape(
    total_num_pages: int,
    page_size: int,
    actual_num_kv_heads: int,
    actual_head_dim: int,
    kv_dtype: Any,
) -> tuple[int, int, int, int, int]:
    """The shape of a cache of `ragged_paged_attention`, as tpu-inference has it.

    Keys and values of a head follow one another, in words of 32 bits:

        [pages, page size, 2 * heads / packing, packing, head size]

    Args:
      total_num_pages, page_size: of the pool.
      actual_num_kv_heads, actual_head_dim: of keys; padded where words or lanes of 128
        are not filled.
      kv_dtype: of the cache: bfloat16, float16, float32, float8_e4m3fn, float8_e5m2.

    Raises:
      TypeError, ValueError: if an argument is wrong.

    Example:
      >>> from jax_flash2.servers import get_kv_cache_shape
      >>> get_kv_cache_shape(1000, 64, 8, 64, "bfloat16")
      (1000, 64, 8, 2, 128)
    """
    check.sizes(
        total_num_pages=total_num_pages,
        page_size=page_size,
        actual_num_kv_heads=actual_num_kv_heads,
        actual_head_dim=actual_head_dim,
    )
    packing = 4 // check.of_caches("kv_dtype", kv_dtype).itemsize
    heads = -(-2 * actual_num_kv_heads // packing)
    lanes = -(-actual_head_dim // _LANES) * _LANES
    return total_num_pages, page_size, heads, packing, lanes


@own_rules()
def ragged_paged_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    skip_kv_mask: bool = False,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: Any = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_prefill_size: int | None = None,
    d_block_sizes: tuple[int, int, int, int] | None = None,
    p_block_sizes: tuple[int, int, int, int] | None = None,
    m_block_sizes: tuple[int, int, int, int] | None = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
    disable_bounds_checks: bool = True,
    disable_semaphore_checks: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Writes the keys and values of new tokens, and attends to the cache (version 3).

    Args:
      queries: [tokens, N, H].
      keys, values: [tokens, K, H], in the dtype of the cache.
      kv_cache: of `get_kv_cache_shape`; donate it, and it is written in place.
      kv_lens: int32 [sequences], keys of each, the new ones among them.
      page_indices: int32 [sequences * pages of a sequence].
      cu_q_lens: int32 [sequences + 1], the first token of each sequence.
      distribution: int32 [3]; its last number is how many sequences there are.
      use_causal_mask: without it there is no window either.
      update_kv_cache: if False, the cache has the keys already.
      sm_scale, soft_cap, k_scale, v_scale: of scores, keys and values.
      sliding_window: a query attends to so many keys, itself among them.
      out_dtype: None is float32 for queries in it, bfloat16 for others.
      skip_kv_mask, mask_value, q_scale and what follows out_dtype: taken, not used.

    Returns:
      The output [tokens, N, H], 0 for tokens of no sequence, and the cache.

    Raises:
      TypeError, ValueError: if an argument is wrong, as `paged_attention`.

    References: vllm-project/tpu-inference, kernels/ragged_paged_attention/v3 (2026).
    """
    del skip_kv_mask, mask_value, q_scale, chunk_prefill_size, d_block_sizes
    del p_block_sizes, m_block_sizes, vmem_limit_bytes, debug_mode
    del disable_bounds_checks, disable_semaphore_checks
    check_bool("use_causal_mask", use_causal_mask)
    check_bool("update_kv_cache", update_kv_cache)
    scales = check.scales(sm_scale, k_scale, v_scale)
    window = check.window(sliding_window) if use_causal_mask else None
    dtype = check.result_dtype(out_dtype)
    queries = check.queries("queries", queries)
    kv_cache = check.cache(
        *("kv_cache", kv_cache, "as get_kv_cache_shape says", 5), of=queries
    )
    keys, values = check.new_rows(keys, values, queries, kv_cache)
    (_, n, h), k = queries.shape, keys.shape[1]
    pages, size = kv_cache.shape[:2]
    expected = get_kv_cache_shape(pages, size, k, h, kv_cache.dtype)
    if kv_cache.shape != expected:
        raise ValueError(
            f"kv_cache must have shape {expected} (get_kv_cache_shape), got shape "
            f"{kv_cache.shape}"
        )
    _, _, words, packing, lanes = kv_cache.shape
    cache = kv_cache.reshape(pages, size, words * packing // 2, 2, lanes)
    last = check.integers("distribution", distribution, 3)[-1]
    lengths, cu = check.sequences(kv_lens, cu_q_lens, last)
    table = check.integers("page_indices", page_indices, "sequences * pages of each")
    if table.shape[0] % lengths.shape[0]:
        raise ValueError(
            f"page_indices must have as many numbers for each of {lengths.shape[0]} "
            f"sequences, got shape {table.shape}"
        )
    table = table.reshape(lengths.shape[0], -1)
    if update_kv_cache:
        cache = _written(cache, keys, values, table, lengths, cu)
    out = _attend(
        _padded(queries, cache.shape[2] * (n // k), lanes),
        cache,
        table,
        lengths,
        cu,
        is_causal=use_causal_mask,
        window=window,
        soft_cap=soft_cap,
        scales=scales,
    )
    out = out[:, :n, :h].astype(dtype or _result_dtype(queries))
    return out, cache.reshape(kv_cache.shape)


@own_rules()
def ragged_paged_attention_sglang(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache_fused: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    distribution: jax.Array,
    custom_mask: jax.Array | None = None,
    attention_sink: jax.Array | None = None,
    *,
    causal: int = 1,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    xai_temperature_len: float | None = None,
    softmax_dtype: Any = None,
    chunk_prefill_size: int | None = None,
    d_block_sizes: tuple[int, int, int, int] | None = None,
    p_block_sizes: tuple[int, int, int, int] | None = None,
    m_block_sizes: tuple[int, int, int, int] | None = None,
    vmem_limit_bytes: int | None = None,
    out_dtype: Any = None,
    skip_kv_mask: bool = False,
    disable_semaphore_checks: bool = True,
    debug_mode: bool = False,
    mask_aligned_to_cu_kv: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Writes the keys and values of new tokens, and attends (SGLang-JAX's version).

    Pages of all sequences stand one after the other in `page_indices`; as many follow
    from a sequence's first as it has. The table that `paged_attention` takes has a row
    of them all for each sequence, sequences * len(page_indices) numbers.

    Args:
      queries, keys, values, kv_lens, cu_q_lens, distribution, sm_scale, sliding_window,
        soft_cap, k_scale, v_scale, out_dtype: as for `ragged_paged_attention`.
      kv_cache_fused: [pages, page size, 2 * K, head size], keys and values of a head in
        turns; head sizes of rows are padded to it. Donate it, and it is written in
        place.
      page_indices: int32 [pages of all sequences, and any after them].
      cu_kv_lens: int32 [sequences + 1], multiples of the page size; over it, the first
        page of each sequence.
      attention_sink: float [N], a logit for each head.
      causal: 1, or 0 for all keys of the sequence.
      custom_mask, xai_temperature_len: not served; must be None.
      mask_value, q_scale, softmax_dtype, chunk_prefill_size and what follows
        d_block_sizes but out_dtype: taken, not used. The softmax is in float32.

    Returns:
      The output [tokens, N, H], 0 for tokens of no sequence, and the cache.

    Raises:
      NotImplementedError: for `custom_mask` and `xai_temperature_len`.
      TypeError, ValueError: if an argument is wrong, as `paged_attention`.

    References: sgl-project/sglang-jax, kernels/ragged_paged_attention (2026).
    """
    del mask_value, q_scale, softmax_dtype, chunk_prefill_size, d_block_sizes
    del p_block_sizes, m_block_sizes, vmem_limit_bytes, skip_kv_mask
    del disable_semaphore_checks, debug_mode, mask_aligned_to_cu_kv
    for name, x, instead in (
        ("custom_mask", custom_mask, "paged_attention has tree_mask"),
        ("xai_temperature_len", xai_temperature_len, "scale the queries by positions"),
    ):
        if x is not None:
            raise NotImplementedError(
                f"{name} must be None, got {type(x).__name__}: {instead}"
            )
    scales = check.scales(sm_scale, k_scale, v_scale)
    window, dtype = check.window(sliding_window), check.result_dtype(out_dtype)
    queries = check.queries("queries", queries)
    kv_cache_fused = check.cache(
        *("kv_cache_fused", kv_cache_fused, "[pages, page size, 2 * K, H]", 4),
        of=queries,
    )
    keys, values = check.new_rows(keys, values, queries, kv_cache_fused)
    (_, n, h), k = queries.shape, keys.shape[1]
    if attention_sink is not None:
        attention_sink = check.sink(attention_sink, n)
    shape = kv_cache_fused.shape
    if shape[2] != 2 * k or shape[3] < h:
        raise ValueError(
            f"kv_cache_fused must have shape [pages, page size, {2 * k}, {h} or more], "
            f"got shape {shape}"
        )
    pages, size, _, lanes = shape
    cache = kv_cache_fused.reshape(pages, size, k, 2, lanes)
    last = check.integers("distribution", distribution, 3)[-1]
    lengths, cu = check.sequences(kv_lens, cu_q_lens, last)
    flat = check.integers("page_indices", page_indices, "pages of all sequences")
    first = check.integers("cu_kv_lens", cu_kv_lens, lengths.shape[0] + 1)[:-1] // size
    own = first[:, None] + jnp.arange(flat.shape[0], dtype=jnp.int32)
    # Beyond the end: never looked up, since no sequence is so long.
    table = flat.at[own].get(mode="fill", fill_value=0)
    cache = _written(cache, keys, values, table, lengths, cu)
    out = _attend(
        _padded(queries, n, lanes),
        cache,
        table,
        lengths,
        cu,
        is_causal=check.flag("causal", causal),
        window=window,
        soft_cap=soft_cap,
        scales=scales,
        sinks=attention_sink,
    )
    out = out[..., :h].astype(dtype or _result_dtype(queries))
    return out, cache.reshape(shape)


@own_rules()
def ragged_paged_attention_v2(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """Attends to a cache that has the new keys already (version 2, JAX's own).

    Args:
      q: [tokens, N, H].
      kv_pages: [pages, page size, 2 * K, H], keys and values of a head in turns.
      kv_lens, cu_q_lens, sm_scale, sliding_window, soft_cap, k_scale, v_scale: as for
        `ragged_paged_attention`.
      page_indices: int32 [sequences, pages of a sequence].
      num_seqs: int32 [1], how many sequences there are.
      mask_value and what follows v_scale: taken, not used.

    Returns:
      [tokens, N, H] in the dtype of q, 0 for tokens of no sequence.

    Raises:
      TypeError, ValueError: if an argument is wrong, as `paged_attention`.

    References: `jax.experimental.pallas.ops.tpu.ragged_paged_attention`.
    """
    del mask_value, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes
    q = check.queries("q", q)
    kv_pages = check.cache(
        *("kv_pages", kv_pages, "[pages, page size, 2 * K, H]", 4), of=q
    )
    pages, size, both, h = kv_pages.shape
    if both % 2 or h != q.shape[2]:
        raise ValueError(
            f"kv_pages must have shape [pages, page size, 2 * K, {q.shape[2]}], of the "
            f"head size of q, got shape {kv_pages.shape}"
        )
    check.check_heads("kv_pages", both // 2, "q", q.shape[1])
    last = check.integers("num_seqs", num_seqs, 1)[0]
    lengths, cu = check.sequences(kv_lens, cu_q_lens, last)
    table = check.integers(
        "page_indices", page_indices, lengths.shape[0], "pages of each"
    )
    return _attend(
        q,
        kv_pages.reshape(pages, size, both // 2, 2, h),
        table,
        lengths,
        cu,
        is_causal=True,
        window=check.window(sliding_window),
        soft_cap=soft_cap,
        scales=check.scales(sm_scale, k_scale, v_scale),
    )


def _result_dtype(queries: jax.Array) -> Any:
    return jnp.float32 if queries.dtype == jnp.float32 else jnp.bfloat16


def _padded(x: jax.Array, heads: int, lanes: int) -> jax.Array:
    """[tokens, heads, lanes], filled with zeros."""
    return jnp.pad(x, ((0, 0), (0, heads - x.shape[1]), (0, lanes - x.shape[2])))


def _written(cache, keys, values, table, lengths, cu) -> jax.Array:
    """The cache [pages, page size, K, 2, H] with the last rows of each sequence."""
    token = jnp.arange(keys.shape[0], dtype=jnp.int32)
    own = jnp.sum(cu[1:] <= token[:, None], axis=1, dtype=jnp.int32)
    of = jnp.minimum(own, lengths.shape[0] - 1)
    position = lengths[of] - cu[of + 1] + token
    position = jnp.where(token < cu[-1], position, -1)
    slots = page_slots(table[of], position, cache.shape[1])
    keys, values = (
        _padded(x.astype(cache.dtype), cache.shape[2], cache.shape[4])
        for x in (keys, values)
    )
    scale = 1.0 if cache.dtype in QUANTISED else None
    scales = {"key_scale": scale, "value_scale": scale}
    pools = cache, None
    return append_to_pages(*pools, keys, values, slots, kv_layout="PSK2H", **scales)[0]


def _attend(
    q,
    cache,
    table,
    lengths,
    cu,
    *,
    is_causal,
    window,
    soft_cap,
    scales,
    sinks=None,
) -> jax.Array:
    """`paged_attention` of a cache [pages, page size, K, 2, H]."""
    scale, of_keys, of_values = scales
    is_quantised = cache.dtype in QUANTISED
    out: Any = paged_attention(
        q,
        cache,
        None,
        table,
        lengths,
        cu_query_lengths=cu,
        value_scale=of_values if is_quantised else None,
        is_causal=is_causal,
        local_window_size=window,
        logits_soft_cap=soft_cap,
        sinks=sinks,
        scale=scale if of_keys is None else scale * of_keys,
        kv_layout="PSK2H",
    )
    return out if is_quantised or of_values is None else out * of_values
