"""The calls of TPU servers, beside JAX's own reference of one of them."""

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
    q, cache, _, _, lengths, table, cu = inputs()
    given = q, cache, lengths, table, cu, jnp.array([3])
    found = servers.ragged_paged_attention_v2(*given, **options)
    np.testing.assert_allclose(
        found[:13], of_jax.ref_ragged_paged_attention(*given, **options), atol=ATOL
    )
    assert not found[13:].any()


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
    again = servers.ragged_paged_attention_v2(
        *(q, jnp.asarray(expected, dtype), lengths, table, cu, jnp.array([3])),
        sm_scale=0.1,
        **scales,
    )
    assert found.dtype == q.dtype
    np.testing.assert_array_equal(found, again)
