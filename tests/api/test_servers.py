"""The calls of TPU servers, beside JAX's own reference of one of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as of_jax

from jax_flash2 import servers
from tests.cases import ON_GPU
from tests.tiers import deeply

ATOL = 2e-2 if ON_GPU else 4e-6  # TF32
PAGES, PAGE, K, N, H = 12, 8, 3, 6, 128
LENGTHS, COUNTS = [20, 9, 1, 0], [3, 9, 1, 0]  # the last is no sequence
TOKENS = 16
OPTIONS = {"sm_scale": 0.1, "sliding_window": 6, "soft_cap": 4.0}


def test_a_cache_of_another_shape():
    q, cache, k, v, *given = inputs()
    with pytest.raises(ValueError, match=r"\(12, 8, 6, 1, 128\).*\(12, 8, 1, 6, 128\)"):
        servers.ragged_paged_attention(q, k, v, cache[:, :, None], *given, given[0])
    with pytest.raises(ValueError, match=r"kv_cache .*got shape \(12, 8, 6, 128\)"):
        servers.ragged_paged_attention(q, k, v, cache, *given, given[0])


def of_sglang(q, cache, k, v, lengths, table, cu):
    """The same sequences as SGLang gives them: the pages of all in a row."""
    counts = -(-np.asarray(lengths) // PAGE)
    flat = [int(x) for row, n in zip(table, counts, strict=True) for x in row[:n]]
    starts = np.cumsum([0, *counts]) * PAGE
    rest = lengths, jnp.array([*flat, 99, -7]), cu, jnp.asarray(starts)
    return q, k, v, cache, *rest, jnp.array([1, 1, 3])


@pytest.mark.parametrize("wrong", ["custom_mask", "xai_temperature_len"])
def test_what_of_sglang_is_not_served(wrong):
    given = of_sglang(*inputs())
    with pytest.raises(NotImplementedError, match=f"{wrong} must be None, got int"):
        servers.ragged_paged_attention_sglang(*given, **{wrong: 3})
    with pytest.raises(ValueError, match=r"kv_cache_fused .* 6, 128 or more\]"):
        servers.ragged_paged_attention_sglang(
            *given[:3], given[3][:, :, 1:], *given[4:]
        )


@pytest.mark.parametrize("size", [H, *deeply(64)])
def test_sglang_is_version_3_of_other_pages(size):
    """A head size of 64 has rows of 128 in the cache, 64 of them zeros."""
    q, cache, k, v, lengths, table, cu = inputs()
    q, k, v = (x[..., :size] for x in (q, k, v))
    cache = cache.at[..., size:].set(0)
    options = {"sm_scale": 0.1, "sliding_window": 6, "soft_cap": 4.0}
    call = functools.partial(servers.ragged_paged_attention_sglang, **options)
    found, after = jax.jit(call)(*of_sglang(q, cache, k, v, lengths, table, cu))
    shape = servers.get_kv_cache_shape(PAGES, PAGE, K, size, q.dtype)
    given = cache.reshape(shape), lengths, table.ravel(), cu, jnp.array([1, 1, 3])
    call = functools.partial(servers.ragged_paged_attention, **options)
    expected, of_version_3 = jax.jit(call)(q, k, v, *given)
    # The tables differ in length, so that XLA may sum products in another order.
    np.testing.assert_allclose(found, expected, atol=ATOL)
    np.testing.assert_array_equal(after, of_version_3.reshape(after.shape))


def test_sinks_of_sglang():
    """A sink as large as all other weights together halves what is left."""
    q, k, v, cache, *rest = of_sglang(*inputs())
    q = jnp.zeros_like(q)  # each key weighs 1
    keys = np.arange(1, 10)  # of the second sequence: its queries are all of its keys
    call = jax.jit(servers.ragged_paged_attention_sglang)
    for n, sink in ((2, 5), (0, 1)):
        sinks = np.full(N, -np.inf, np.float32)
        sinks[n] = np.log(sink)
        with_sink, _ = call(q, k, v, cache, *rest, attention_sink=sinks)
        plain, _ = call(q, k, v, cache, *rest)
        part = (keys / (keys + sink))[:, None]
        np.testing.assert_allclose(with_sink[3:12, n], plain[3:12, n] * part, atol=ATOL)


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = (TOKENS, N, H), (PAGES, PAGE, 2 * K, H), (TOKENS, K, H), (TOKENS, K, H)
    q, cache, k, v = (jnp.asarray(rng.standard_normal(x), dtype) for x in shapes)
    table = jnp.asarray(rng.permutation(PAGES).reshape(4, 3), jnp.int32)
    cu = np.cumsum([0, *COUNTS]).astype(np.int32)
    cu[-1] = 99  # of no sequence
    return q, cache, k, v, jnp.array(LENGTHS), table, jnp.asarray(cu)


@pytest.mark.parametrize(
    "options", [OPTIONS, *deeply({"sm_scale": 0.1})], ids=["window", "plain"]
)
def test_version_2_is_the_reference_of_jax(options):
    q, cache, _, _, *given = inputs()
    given = *map(np.asarray, given), np.int32([3])  # of which the reference has loops
    found, expected = (
        jax.jit(lambda q, cache, call=call: call(q, cache, *given, **options))(q, cache)
        for call in (
            servers.ragged_paged_attention_v2,
            of_jax.ref_ragged_paged_attention,
        )
    )
    np.testing.assert_allclose(found[:13], expected, atol=ATOL)
    assert not np.any(found[13:])


@pytest.mark.parametrize(
    "dtype", [jnp.float8_e4m3fn, *deeply(jnp.float32, jnp.bfloat16)]
)
def test_version_3_writes_and_attends(dtype):
    """The cache is that with new rows, bit for bit; results are those of version 2."""
    q, cache, k, v, lengths, table, cu = inputs()
    cache, k, v = (x.astype(dtype) for x in (cache, k, v))
    q = q if dtype == jnp.float8_e4m3fn else q.astype(dtype)
    shape = servers.get_kv_cache_shape(PAGES, PAGE, K, H, dtype)
    heads = shape[2] * shape[3] - 2 * K
    whole = jnp.pad(cache.astype(jnp.float32), ((0, 0),) * 2 + ((0, heads), (0, 0)))
    given = q, k, v, whole.astype(dtype).reshape(shape), lengths, table.ravel(), cu
    scales = {} if dtype != jnp.float8_e4m3fn else {"k_scale": 0.5, "v_scale": 2.0}
    names = ("sm_scale", "k_scale", "v_scale")
    call = jax.jit(servers.ragged_paged_attention, static_argnames=names)
    found, after = call(*given, jnp.array([1, 1, 3]), sm_scale=0.1, **scales)
    expected = np.array(cache.astype(jnp.float32))
    for b, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        for i in range(count):
            page, row = divmod(length - count + i, PAGE)
            pair = (np.asarray(x.astype(jnp.float32))[cu[b] + i] for x in (k, v))
            both = np.stack(list(pair), 1).reshape(2 * K, H)
            expected[table[b, page], row] = both
    rows = after.reshape(PAGES, PAGE, -1, H)[:, :, : 2 * K].astype(jnp.float32)
    np.testing.assert_array_equal(rows, expected)
    call = jax.jit(servers.ragged_paged_attention_v2, static_argnames=names)
    given = q, jnp.asarray(expected, dtype), lengths, table, cu, jnp.array([3])
    again = call(*given, sm_scale=0.1, **scales)
    assert found.dtype == q.dtype
    found, again = (x.astype(jnp.float32) for x in (found, again))
    unit = float(jnp.finfo(q.dtype).eps)  # they are rounded in programs of their own
    np.testing.assert_allclose(found, again, atol=max(ATOL, 4 * unit))


# By function: what is changed, the error, and what its message says.
WRONG = {
    "ragged_paged_attention": [
        ("queries", np.zeros((TOKENS, N), "f4"), ValueError, r"queries .*\(16, 6\)"),
        ("queries", jnp.zeros((TOKENS, N, H), int), TypeError, "queries .*int32"),
        ("queries", jnp.zeros((TOKENS, 4, H)), ValueError, "keys .*queries, 4, got 3"),
        ("keys", jnp.zeros((TOKENS, K, 64)), ValueError, r"keys .*\[16, K, 128\]"),
        ("keys", jnp.zeros((9, K, H)), ValueError, r"keys .*got shape \(9, 3, 128\)"),
        ("keys", jnp.zeros((TOKENS, K, H), "bfloat16"), TypeError, "keys .*bfloat16"),
        ("values", jnp.zeros((TOKENS, 1, H)), ValueError, r"values .*\(16, 1, 128\)"),
        ("values", jnp.zeros((TOKENS, K, 64)), ValueError, r"values .*\(16, 3, 64\)"),
        ("values", jnp.zeros((TOKENS, K, H), int), TypeError, "values .*int32"),
        ("kv_cache", [1], TypeError, "kv_cache .*list"),
        ("kv_cache", jnp.zeros((1,) * 5, int), TypeError, "kv_cache .*int32"),
        ("kv_lens", jnp.zeros(3), TypeError, "kv_lens .*float32"),
        ("kv_lens", jnp.zeros(0, int), ValueError, "kv_lens .*sequence"),
        ("kv_lens", jnp.zeros((4, 1), int), ValueError, r"kv_lens .*\(4, 1\)"),
        ("page_indices", jnp.zeros(11, int), ValueError, r"page_indices .*\(11,\)"),
        ("page_indices", jnp.zeros(12), TypeError, "page_indices .*float32"),
        ("cu_q_lens", jnp.zeros(4, int), ValueError, r"cu_q_lens .*\[5\].*\(4,\)"),
        ("distribution", jnp.int32(3), ValueError, r"distribution .*\[3\].*\(\)"),
        ("sliding_window", 0, ValueError, "sliding_window .*got 0"),
        ("sliding_window", 1.5, TypeError, "sliding_window .*got 1.5"),
        ("sm_scale", None, TypeError, "sm_scale .*NoneType"),
        ("sm_scale", np.nan, ValueError, "sm_scale .*nan"),
        ("k_scale", "1", TypeError, "k_scale .*str"),
        ("v_scale", jnp.ones(2), TypeError, r"v_scale .*\(2,\)"),
        ("use_causal_mask", 1, TypeError, "use_causal_mask .*got 1"),
        ("update_kv_cache", None, TypeError, "update_kv_cache .*None"),
        ("out_dtype", "int8", TypeError, "out_dtype .*int8"),
    ],
    "ragged_paged_attention_sglang": [
        ("keys", jnp.zeros((TOKENS, K)), ValueError, r"keys .*\(16, 3\)"),
        ("kv_cache_fused", jnp.zeros(3), ValueError, r"kv_cache_fused .*\(3,\)"),
        ("page_indices", jnp.zeros((4, 3), int), ValueError, "page_indices"),
        ("cu_kv_lens", jnp.zeros(3, int), ValueError, r"cu_kv_lens .*\[5\].*\(3,\)"),
        ("distribution", 3, TypeError, "distribution .*int"),
        ("attention_sink", jnp.zeros(K), ValueError, r"attention_sink .*\(3,\)"),
        ("causal", 2, TypeError, "causal .*got 2"),
    ],
    "ragged_paged_attention_v2": [
        ("q", jnp.zeros((TOKENS, 4, H)), ValueError, "kv_pages .*of q, 4, got 3"),
        ("q", jnp.zeros((TOKENS, N, 64)), ValueError, "kv_pages .*64"),
        ("kv_pages", jnp.zeros((1, 8, 5, H)), ValueError, "kv_pages .*5, 128"),
        ("kv_pages", jnp.zeros((1, 8, 6, H), "u1"), TypeError, "kv_pages .*uint8"),
        ("page_indices", jnp.zeros((3, 4), int), ValueError, r"page_indices .*\[4, "),
        ("num_seqs", jnp.int32(3), ValueError, r"num_seqs .*\[1\].*\(\)"),
    ],
    "get_kv_cache_shape": [
        ("kv_dtype", "int4", TypeError, "kv_dtype .*float8_e4m3fn.*int4"),
        ("kv_dtype", np.float64, TypeError, "kv_dtype .*float64"),
        ("kv_dtype", "x", TypeError, "kv_dtype .*'x'"),
        ("page_size", 0, ValueError, "page_size .*got 0"),
        ("actual_num_kv_heads", 2.0, TypeError, "actual_num_kv_heads .*2.0"),
    ],
}


def right(name: str) -> dict:
    """Arguments that the function takes."""
    q, cache, k, v, lengths, table, cu = inputs()
    of_rows = {"queries": q, "keys": k, "values": v}
    own = {"kv_lens": lengths, "cu_q_lens": cu}
    if name == "get_kv_cache_shape":
        sizes = ("total_num_pages", "page_size", "actual_num_kv_heads")
        return dict.fromkeys((*sizes, "actual_head_dim"), 8) | {"kv_dtype": "bfloat16"}
    if name == "ragged_paged_attention_v2":
        few = {"page_indices": table, "num_seqs": jnp.array([3])}
        return {"q": q, "kv_pages": cache, **own, **few}
    if name == "ragged_paged_attention":
        shape = servers.get_kv_cache_shape(PAGES, PAGE, K, H, q.dtype)
        own |= {"kv_cache": cache.reshape(shape), "page_indices": table.ravel()}
    else:
        flat, starts = jnp.zeros(9, int), jnp.array([0, 24, 40, 48, 48])
        own |= {"kv_cache_fused": cache, "page_indices": flat, "cu_kv_lens": starts}
    return {**of_rows, **own, "distribution": jnp.array([1, 1, 3])}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    """Each error names the argument, what was given and what was expected."""
    function, given = getattr(servers, name), right(name)
    jax.eval_shape(lambda: function(**given))
    for argument, wrong, error, words in WRONG[name]:
        with pytest.raises(error, match=words):
            jax.eval_shape(lambda x=given | {argument: wrong}: function(**x))


@pytest.mark.parametrize("name", [x for x in WRONG if x != "get_kv_cache_shape"])
def test_rules_of_promotion(name):
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(lambda: getattr(servers, name)(**right(name)))
