"""Calls of paged_attention, and of what writes into pages: errors and programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import (
    Config,
    append_to_pages,
    attention,
    page_slots,
    paged_attention,
    quantize_kv,
)
from pallas_kernels.core import nibbles
from tests.cases import ON_GPU
from tests.paged import by_name
from tests.tiers import deeply

ATOL = 2e-2 if ON_GPU else 2e-6  # TF32
B, T, N, K, H, P, PAGE, C = 2, 3, 4, 2, 16, 7, 8, 3
POOL = jnp.ones((P, PAGE, K, H))
BYTES = jnp.ones((P, PAGE, K, H), jnp.int8)
GOOD = {
    "query": jnp.ones((B, T, N, H)),
    "key_pages": POOL,
    "value_pages": POOL,
    "page_table": jnp.zeros((B, C), jnp.int32),
    "key_value_seq_lengths": jnp.array([5, 9]),
    "implementation": "xla",
}
QUANTISED = {"key_pages": BYTES, "value_pages": BYTES}
CU = {"query": jnp.ones((5, N, H)), "cu_query_lengths": jnp.array([0, 2, 5])}
# What is changed, the error, and words of its message.
WRONG = {
    "query_rank": ({"query": jnp.ones((T, N, H))}, ValueError, "query (3, 4, 16)"),
    "query_dtype": (
        {"query": jnp.ones((B, T, N, H), jnp.int32)},
        TypeError,
        "query int32",
    ),
    "query_batch": ({"query": jnp.ones((3, T, N, H))}, ValueError, "page_table (2, 3)"),
    "ragged_rank": (
        {"cu_query_lengths": CU["cu_query_lengths"]},
        ValueError,
        "query cu_query_lengths (2, 3, 4, 16)",
    ),
    "pages_rank": ({"key_pages": POOL[0]}, ValueError, "key_pages PSKH (8, 2, 16)"),
    "pages_dtype": (
        {"value_pages": POOL.astype(jnp.bfloat16)},
        TypeError,
        "value_pages float32 bfloat16",
    ),
    "pages_head_size": (
        {"key_pages": POOL[..., :8]},
        ValueError,
        "key_pages 16 8",
    ),
    "pages_heads": (
        {"key_pages": jnp.ones((P, PAGE, 3, H))},
        ValueError,
        "key_pages 4 3",
    ),
    "values_shape": (
        {"value_pages": POOL[1:]},
        ValueError,
        "value_pages (6, 8, 2, 16)",
    ),
    "no_values": ({"value_pages": None}, ValueError, "value_head_size None"),
    "value_head_size": (
        {"value_pages": None, "value_head_size": 17},
        ValueError,
        "value_head_size 16 17",
    ),
    "layout_letters": ({"kv_layout": "PSHK"}, ValueError, "kv_layout 'PSHK'"),
    "layout_both": ({"kv_layout": "P2SKH"}, ValueError, "value_pages None 'P2SKH'"),
    "layout_two": (
        {
            "kv_layout": "P2SKH",
            "value_pages": None,
            "key_pages": jnp.ones((P, 3, PAGE, K, H)),
        },
        ValueError,
        "key_pages 2 (7, 3, 8, 2, 16)",
    ),
    "table_rank": ({"page_table": jnp.zeros(2, jnp.int32)}, ValueError, "page_table"),
    "table_dtype": ({"page_table": jnp.zeros((B, C))}, TypeError, "page_table int32"),
    "lengths": (
        {"key_value_seq_lengths": jnp.array([5])},
        ValueError,
        "key_value_seq_lengths (2,) (1,)",
    ),
    "lengths_dtype": (
        {"key_value_seq_lengths": jnp.ones(2)},
        TypeError,
        "key_value_seq_lengths float32",
    ),
    "starts": (
        {"key_value_seq_starts": jnp.array(1)},
        ValueError,
        "key_value_seq_starts ()",
    ),
    "new": (
        {"query_seq_lengths": jnp.array([1, 2, 3])},
        ValueError,
        "query_seq_lengths (3,)",
    ),
    "cu": (
        {**CU, "cu_query_lengths": jnp.array([0, 2])},
        ValueError,
        "cu_query_lengths (3,) (2,)",
    ),
    "cu_and_new": (
        {**CU, "query_seq_lengths": jnp.array([1, 2])},
        ValueError,
        "query_seq_lengths cu_query_lengths",
    ),
    "scale_of_floats": ({"key_scale": 1.0}, ValueError, "key_scale float32"),
    "int4_in_bytes": (
        {"value_pages": POOL.astype(jnp.int4)},
        TypeError,
        "value_pages uint8 int4",
    ),
    "int4_head_size": (
        {"key_pages": POOL.astype(jnp.uint8)},
        ValueError,
        "key_pages 16 32",
    ),
    "int4_latent": (
        {
            "key_pages": POOL[..., :8].astype(jnp.uint8),
            "value_pages": None,
            "value_head_size": 4,
        },
        ValueError,
        "value_head_size key_pages uint8 4 value_pages",
    ),
    "scale_shape": (
        {**QUANTISED, "value_scale": jnp.ones((P, PAGE, 3))},
        ValueError,
        "value_scale (7, 8, 2) (7, 8, 3)",
    ),
    "scale_dtype": (
        {**QUANTISED, "key_scale": jnp.ones(K, jnp.int32)},
        TypeError,
        "key_scale int32",
    ),
    "slopes": ({"alibi_slopes": jnp.ones(3)}, ValueError, "alibi_slopes (4,) (3,)"),
    "sinks": ({"sinks": jnp.ones(3)}, ValueError, "sinks (4,) (3,)"),
    "tree_shape": (
        {"tree_mask": jnp.ones((T, N), bool)},
        ValueError,
        "tree_mask (3, 3) (2, 3, 3) (3, 4)",
    ),
    "tree_dtype": ({"tree_mask": jnp.ones((T, T))}, TypeError, "tree_mask float32"),
    "tree_size": (
        {"query": jnp.ones((B, 33, N, H)), "tree_mask": jnp.ones((33, 33), bool)},
        ValueError,
        "tree_mask 32 33",
    ),
    "tree_and_window": (
        {"tree_mask": jnp.ones((T, T), bool), "local_window_size": 3},
        ValueError,
        "local_window_size tree_mask",
    ),
    "tree_and_slopes": (
        {"tree_mask": jnp.ones((T, T), bool), "alibi_slopes": jnp.ones(N)},
        ValueError,
        "alibi_slopes tree_mask",
    ),
    "tree_and_cu": (
        {**CU, "tree_mask": jnp.ones((T, T), bool)},
        ValueError,
        "cu_query_lengths tree_mask",
    ),
    "causal": ({"is_causal": 1}, TypeError, "is_causal bool 1"),
    "scale_nan": (
        QUANTISED | {"key_scale": np.nan, "value_scale": 1.0},
        ValueError,
        "key_scale finite nan",
    ),
    "splits": ({"config": Config(splits=9)}, ValueError, "splits=9 24"),
    "implementation": (
        {"implementation": "flash"},
        ValueError,
        "implementation 'flash'",
    ),
    "no_kernel": (
        {"implementation": "mosaic_gpu", "config": Config(interpret=True)},
        ValueError,
        "implementation='mosaic_gpu'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    changes, error, words = WRONG[name]
    with pytest.raises(error) as caught:
        jax.eval_shape(lambda: paged_attention(**{**GOOD, **changes}))
    for word in words.split(" (")[0].split():
        assert word in str(caught.value), str(caught.value)
    for shape in words.split(" (")[1:]:
        assert f"({shape}".strip() in str(caught.value), str(caught.value)


SLOTS = jnp.zeros((2, 1), jnp.int32)
NEW = jnp.ones((2, 1, K, H))
WRONG_WRITES = {
    "rows": (POOL, NEW[..., :8], {}, ValueError, "key (2, 1, 2, 16) (2, 1, 2, 8)"),
    "dtype": (POOL, NEW.astype(jnp.float16), {}, TypeError, "float32 float16"),
    "scale": (POOL, NEW, {"key_scale": 1.0}, ValueError, "key_scale float32"),
    "no_scale": (BYTES, NEW, {}, TypeError, "key_scale NoneType"),
    "scale_shape": (
        BYTES,
        NEW,
        {"key_scale": jnp.ones(3)},
        ValueError,
        "key_scale (3,)",
    ),
    "slots": (POOL, NEW, {"slots": jnp.ones((2, 1))}, TypeError, "slots float32"),
    "layout": (POOL, NEW, {"kv_layout": "P"}, ValueError, "kv_layout 'P'"),
}


@pytest.mark.parametrize("name", WRONG_WRITES)
def test_wrong_write(name):
    pool, new, more, error, words = WRONG_WRITES[name]
    slots = more.pop("slots", SLOTS)
    with pytest.raises(error) as caught:
        append_to_pages(pool, pool, new, new, slots, **more)
    for word in words.replace(", ", ",").split():
        assert word in str(caught.value).replace(", ", ","), str(caught.value)


def test_wrong_slots_and_codes():
    table = jnp.zeros((2, 3), jnp.int32)
    for call, words in (
        (lambda: page_slots(table[0], SLOTS, 8), "page_table (3,)"),
        (lambda: page_slots(table, SLOTS[:1], 8), "positions (1, 1)"),
        (lambda: page_slots(table, SLOTS, 0), "page_size 0"),
        (lambda: page_slots(table, SLOTS, True), "page_size True"),
        (lambda: page_slots(table, SLOTS, 8.0), "page_size 8.0"),
        (lambda: quantize_kv(NEW, jnp.int8, 0), "axes 0"),
        (lambda: quantize_kv(NEW, jnp.float16), "dtype float16"),
        (lambda: quantize_kv(NEW[..., :5], jnp.int4), "x (2, 1, 2, 5)"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        name, got = words.split(" ", 1)
        assert name in str(caught.value) and got in str(caught.value)


def test_numbers_of_64_bits():
    """No kernel reads them: scales and slopes are float32 in it, as in attention."""
    pages = jnp.ones((P, PAGE, K, H), jnp.int8)
    with jax.enable_x64(True):
        wide = jnp.ones((P, PAGE, K), jnp.float64)
        given = GOOD | {"key_pages": pages, "value_pages": pages}
        given |= {"key_scale": wide, "value_scale": wide[0, 0]}
        given |= {"alibi_slopes": jnp.ones(N, jnp.float64)}
        program = jax.make_jaxpr(lambda: paged_attention(**given))()
    (call,) = (x for x in program.eqns if "flash2_forward" in str(x))
    assert not any(x.aval.dtype == jnp.float64 for x in call.invars)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("name", ["query", "key_pages", "sinks"])
def test_no_derivatives(name, backend):
    given = {**GOOD, "sinks": jnp.ones(N), "implementation": backend}

    def loss(x):
        return paged_attention(**{**given, name: x}).sum()

    with pytest.raises(TypeError, match=r"gather the pages.*jax_flash2\.attention"):
        jax.grad(loss)(given[name])


def _problem():
    """A call of query and pools, and these."""
    given = {**by_name("pages").made().arguments, "implementation": "xla"}
    names = ("query", "key_pages", "value_pages", "page_table", "key_value_seq_lengths")
    *arrays, table, lengths = map(given.pop, names)

    def call(query, key, value):
        return paged_attention(query, key, value, table, lengths, **given)

    return call, arrays


def test_heads_are_mapped():
    call, (query, *pools) = _problem()

    def of_head(query, key, value):
        return call(query, key[:, :, None], value[:, :, None])

    whole = call(query, *pools)
    group = query.reshape(*query.shape[:2], 2, 2, -1)
    mapped = jax.vmap(of_head, (2, 2, 2), 2)(group, *pools)
    np.testing.assert_allclose(mapped.reshape(whole.shape), whole, atol=ATOL)


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_heads_are_divided_over_devices():
    """By `jit`: no pool is gathered."""
    call, arrays = _problem()
    devices = jax.devices()[:2]
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=kinds, devices=devices)
    spec = jax.sharding.PartitionSpec(None, None, "heads")
    heads = jax.sharding.NamedSharding(mesh, spec)
    divided = [jax.device_put(x, heads) for x in arrays]
    compiled = jax.jit(call, out_shardings=heads).lower(*divided).compile()
    assert "all-gather" not in compiled.as_text()
    np.testing.assert_allclose(compiled(*divided), call(*arrays), atol=ATOL)


@pytest.mark.parametrize("kind", [None, jnp.int4, *deeply(jnp.int8, jnp.float8_e4m3fn)])
def test_tokens_one_by_one(kind):
    """A loop that samples is one program that copies no pool; as with a dense cache."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 9, K, H)), jnp.float32)
    table = jnp.array([[4, 1], [2, 6]])
    pool = jnp.zeros((1000, PAGE, K, H), kind or x.dtype)
    if kind == jnp.int4:
        pool = jnp.zeros((1000, PAGE, K, H // 2), jnp.uint8)
    scales = () if kind is None else (jnp.ones((1000, PAGE, K)),) * 2
    names = ("key_pages", "value_pages", "key_scale", "value_scale")

    def step(cache, token, length):
        slots = page_slots(table, length[:, None], PAGE)
        given = dict(zip(names[2:], cache[2:], strict=False))
        cache = append_to_pages(*cache[:2], token, token, slots, **given)
        given = dict(zip(names, cache, strict=False))
        out = paged_attention(
            token.repeat(2, 2),
            page_table=table,
            key_value_seq_lengths=length + 1,
            implementation="xla",
            **given,
        )
        return cache, out, length + 1

    cache = (pool, jnp.copy(pool), *map(jnp.copy, scales))
    length = jnp.zeros(2, jnp.int32)
    run = jax.jit(step, donate_argnums=0).lower(cache, x[:, :1], length).compile()
    if ON_GPU or kind != jnp.float8_e4m3fn:  # XLA for CPUs copies floats of one byte
        assert run.memory_analysis().temp_size_in_bytes < pool.nbytes / 4
    outputs = []
    for i in range(9):
        cache, out, length = run(cache, x[:, i : i + 1], length)
        outputs.append(out)
    y = x
    if kind is not None:
        q, scale = quantize_kv(x, kind)
        q = nibbles.elements(q) if kind == jnp.int4 else q
        y = q.astype(jnp.float32) * scale[..., None]
    dense = attention(x.repeat(2, 2), y, y, is_causal=True, implementation="xla")
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), dense, atol=ATOL)


@pytest.mark.parametrize(
    ("entry", "position", "page", "slot"),
    [
        (3, 1, 2**30, -1),  # this and the next two have no int32 number of a slot
        (2**28, 5, 16, -1),
        (2**31 - 1, 0, 2, -1),
        (2**31 - 1, 0, 1, 2**31 - 1),
        (-1, 5, 16, -1),
        (-(2**28), 5, 16, -1),
        (3, 2**32 + 5, 16, -1),
        (2**32, 5, 16, -1),
    ],
)
def test_slots_of_extreme_numbers(entry, position, page, slot):
    """What does not fit is no slot, and never that of another row."""
    found = page_slots(np.array([[entry, 3]]), np.array([[position]]), page)
    assert found.tolist() == [[slot]]


def test_no_sequences_and_no_heads():
    none = np.zeros((0, 3), np.int32)
    assert page_slots(none, none[:, :2], 16).shape == (0, 2)
    pool, new = jnp.zeros((4, 2, 0, 8)), jnp.zeros((3, 0, 8))
    found = append_to_pages(pool, pool, new, new, np.arange(3))
    assert [x.shape for x in found] == [pool.shape] * 2


@pytest.mark.parametrize("heads", [1, K])
def test_rows_are_rounded_by_the_scale_that_is_kept(heads):
    """Which a pool of scales in bfloat16 rounds: half a step is the most."""
    new = jax.random.normal(jax.random.key(0), (20, K, 64))
    pool, scales = (
        jnp.zeros((5, 4, K, 64), jnp.int8),
        jnp.ones((5, 4, heads), "bfloat16"),
    )
    more = {"key_scale": scales, "value_scale": scales}
    pools = jax.jit(append_to_pages)(pool, pool, new, new, jnp.arange(20), **more)
    steps = np.asarray(pools[2], np.float64).reshape(20, heads, 1)
    found = np.asarray(pools[0], np.float64).reshape(new.shape) * steps
    assert np.all(np.abs(found - np.asarray(new)) <= 0.501 * steps)


@pytest.mark.parametrize("layout", ["PKSH", "KPSH", "P2SKH", "PSK2H"])
def test_rows_are_written_where_the_layout_says(layout):
    size = {"P": 5, "S": 4, "K": K, "H": 8, "2": 2}
    rng = np.random.default_rng(0)
    new = jnp.asarray(rng.standard_normal((2, 3, K, 8)), jnp.float32)
    table, positions = np.array([[4, 1], [2, 0]]), np.array([[2, 3, 4], [-1, 0, 9]])
    slots = page_slots(table, positions, 4)
    assert slots.tolist() == [[18, 19, 4], [-1, 8, -1]]
    pool = jnp.zeros([size[x] for x in layout])
    both = "2" in layout
    append = functools.partial(append_to_pages, kv_layout=layout)
    found = jax.jit(append)(pool, None if both else pool, new, 2 * new, slots)
    for i, factor in enumerate((1, 2)):
        own, letters = np.asarray(found[0 if both else i]), layout
        if both:
            own = np.take(own, i, axis=layout.index("2"))
            letters = layout.replace("2", "")
        rows = np.transpose(own, [letters.index(x) for x in "PSKH"]).reshape(20, K, 8)
        expected = np.zeros((20, K, 8), np.float32)
        slots_and_rows = zip(np.ravel(slots), np.reshape(new, (-1, K, 8)), strict=True)
        for slot, row in slots_and_rows:
            if slot >= 0:
                expected[slot] = factor * row
        np.testing.assert_array_equal(rows, expected)
