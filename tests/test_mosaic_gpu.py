"""The Mosaic GPU backend: that every variant lowers, and on Hopper what it computes."""

import dataclasses
import functools
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, attention, explain
from pallas_kernels import device
from pallas_kernels.mosaic_gpu import support, tuning
from tests.cases import by_name
from tests.lowering import lower_for_gpu, string_attributes
from tests.mosaic import (
    BLOCKS,
    MOSAIC,
    SERVED,
    assert_same_bits,
    check,
    in_both_dtypes,
    lowered,
    off_hopper,
    on_hopper,
)
from tests.tiers import deep

FIRST = ("plain", "one_query", "head_72_24", "head_192_128", "everything_served")


def _lowered() -> Iterator:
    """The cases of the error rule on a GPU; in the first tier a few of them.

    But in bfloat16 those of other heads alone: `test_backward_lowers` has the rest.
    """
    for one in in_both_dtypes(SERVED):
        case, dtype = one.values
        first = case.name in FIRST and dtype == "bfloat16"
        if first or dtype == "float16" or not case.h == case.d == 16:
            yield pytest.param(case, dtype, id=one.id, marks=[] if first else deep)


@pytest.mark.parametrize(
    ("heads", "of_output", "columns", "most"),
    [
        ((128, 128), 2, 128, 128),
        ((256, 256), 2, 0, 128),  # half of the columns fit beside the queries
        ((128, 64), 2, 64, 64),  # queries have another size
    ],
)
def test_columns_of_output(heads, of_output, columns, most, monkeypatch):
    monkeypatch.setattr(device, "shared_memory_limit", lambda: 227 << 10)
    blocks = Blocks(128, 64, num_warps=8, num_stages=2)
    find = functools.partial(tuning.output_columns, blocks, heads, of_output)
    assert find() == columns
    assert find(halves=True) == most


@off_hopper
@pytest.mark.parametrize(("case", "dtype"), list(_lowered()))
def test_lowers(case, dtype):
    text = lowered(case, dtype)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "flash2_forward" in text and "__gpu$xla.gpu.triton" in text


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_blocks_lower(blocks):
    text = lowered(by_name("causal"), jnp.bfloat16, config=Config(forward=blocks))
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("causal", 1),
        ("lengths_causal", 1),
        ("segments", 1),
        ("head_192_128", 2),
        ("head_256", 3),
    ],
)
def test_many_tiles_a_program_lower(name, kernels, multiprocessors):
    multiprocessors(3)
    text = lowered(by_name(name), jnp.bfloat16)
    assert text.count("custom_call @mosaic_gpu") == kernels


BIAS = dataclasses.replace(by_name("bias_half"), h=128, d=128)


def test_pairs_are_loaded_before_the_next_come():
    """Those that come by TMA. On a GPU the bits show it; here, the instruction."""
    for case, finishes in ((BIAS, True), (by_name("causal"), False)):
        (kernel, *_) = string_attributes(lowered(case, jnp.bfloat16), "module")
        assert (b"fence.proxy.async.shared::cta" in kernel) == finishes


@on_hopper
@pytest.mark.parametrize("blocks", [(192, 64, 12, 3), (128, 128, 8, 2)], ids=str)
def test_same_bits_of_a_bias(blocks):
    """A bias that comes by TMA while products keep shared memory busy."""
    case = dataclasses.replace(BIAS, batch=(4,), t=4096, s=4096, n=16, k=16)
    config = Config(forward=Blocks(*blocks))
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = *case.shapes, case.broadcast("nts")
    pairs = zip(keys, shapes, strict=True)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in pairs]
    run = jax.jit(functools.partial(attention, config=config, **MOSAIC))
    assert_same_bits(run, arrays, 100)


WRONG = {
    "float32": ({}, {"dtype": jnp.float32}, "dtype float32 is not"),
    "head_size": ({}, {"h": 264}, "head size 264 is above 256"),
    "splits": ({"config": Config(splits=2)}, {}, "are not divided"),
    "rows": ({"config": Config(forward=Blocks(32, 64, 2, 2))}, {}, "block_q=32"),
    "keys": ({"config": Config(forward=Blocks(64, 32, 4, 2))}, {}, "block_kv=32"),
    "warps": ({"config": Config(forward=Blocks(128, 64, 4, 2))}, {}, "num_warps=4"),
    "stages": ({"config": Config(forward=Blocks(128, 64, 8, 1))}, {}, "num_stages=1"),
    "memory": ({"config": Config(forward=Blocks(128, 128, 8, 8))}, {}, "KiB of shared"),
    "backward": ({"config": Config(dq=Blocks(48, 64, 4, 2))}, {}, "makes its grad"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_declined(name):
    arguments, shape, words = WRONG[name]
    dtype = shape.get("dtype", jnp.bfloat16)
    x = jax.ShapeDtypeStruct((2, 64, 4, shape.get("h", 128)), dtype)
    texts = []

    def ask(x):
        texts.append(explain(x, x, x, **arguments, **MOSAIC))
        texts.append(explain(x, x, x, **arguments))
        return x

    lower_for_gpu(ask, x)
    asked, chosen = texts
    assert asked.startswith("error: implementation='mosaic_gpu'") and words in asked
    assert not chosen.startswith("implementation: mosaic_gpu")


def _choice(shape: tuple[int, ...], keys=None, key_heads=None, **arguments) -> str:
    batch, rows, heads, head = shape
    found = []
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    other = (batch, keys or rows, key_heads or heads, head)
    k = jax.ShapeDtypeStruct(other, jnp.bfloat16)

    def ask(q, k):
        found.append(explain(q, k, k, **arguments).splitlines()[0])
        return q

    lower_for_gpu(ask, q, k)
    return found[0].removeprefix("implementation: ")


def test_calls_go_to_the_backend_that_measured_faster():
    assert _choice((2, 8192, 16, 128)) == "mosaic_gpu"
    assert _choice((2, 8192, 16, 128), is_causal=True) == "mosaic_gpu"
    assert _choice((32, 512, 16, 128), is_causal=True) == "mosaic_gpu"
    assert _choice((2, 128, 4, 64)) == "triton"
    assert _choice((8, 2048, 32, 64), is_causal=True) == "mosaic_gpu"
    assert _choice((8, 1024, 32, 64), is_causal=True) == "mosaic_gpu"
    assert _choice((8, 1022, 32, 64), is_causal=True) == "triton"
    assert _choice((1, 2048, 1, 128)) == "triton"  # programs on a few multiprocessors
    assert _choice((16, 1024, 8, 256), is_causal=True) == "mosaic_gpu"
    assert _choice((32, 512, 8, 256), is_causal=True) == "mosaic_gpu"
    assert _choice((32, 256, 8, 256), is_causal=True) == "triton"
    assert _choice((64, 256, 16, 64)) == "mosaic_gpu"
    assert _choice((64, 256, 16, 64), is_causal=True) == "triton"
    assert _choice((32, 512, 21, 96), is_causal=True) == "mosaic_gpu"
    for size, chosen in ((511, "mosaic_gpu"), (255, "triton")):
        window = {"is_causal": True, "local_window_size": (size, 0)}
        assert _choice((4, 4096, 16, 128), **window) == chosen
        assert _choice((4, 4096, 32, 64), **window) == "triton"
    for rows, head, chosen in (
        (2048, 128, "mosaic_gpu"),
        (2046, 128, "triton"),
        (8192, 64, "triton"),
    ):
        ids = {"query_segment_ids": jnp.zeros((2, rows), jnp.int32)}
        assert _choice((2, rows, 16, head), is_causal=True, **ids) == chosen


def _kernels_under_vmap(axes: int, which: str, **options) -> set[str]:
    """Custom calls of 16 heads and 2 batch entries, of which so many are mapped."""
    q = jax.ShapeDtypeStruct((2, 16, 4096, 128)[-2 - axes :], jnp.bfloat16)

    def one(q, k, v, do):
        call = functools.partial(attention, is_causal=True, **options)
        rows = [x[:, None] for x in (q, k, v, do)]  # [T, 1, H]
        out, vjp = jax.vjp(call, *rows[:3])
        return out if which == "forward" else vjp(rows[3])

    for _ in range(axes):
        one = jax.vmap(one)
    text = lower_for_gpu(one, q, q, q, q)
    return set(re.findall(r"custom_call @([\w$.]+)", text))


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_mapped_calls_go_to_the_backend_that_measured_faster(which):
    """`vmap` over heads: one of them would leave most multiprocessors idle."""
    mosaic_gpu, triton = {"mosaic_gpu_v2"}, {"__gpu$xla.gpu.triton"}
    assert _kernels_under_vmap(0, which) == triton
    assert _kernels_under_vmap(2, which) == mosaic_gpu
    assert _kernels_under_vmap(2, which, implementation="triton") == triton


@pytest.mark.parametrize("shape", [(2, 8, 4, 64), (0, 8, 4, 64), (2, 0, 4, 64)])
def test_nothing_to_do_on_hopper(shape):
    """The choice of a backend divides work, of which there may be none."""
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    k = jax.ShapeDtypeStruct((shape[0], 0, *shape[2:]), jnp.bfloat16)

    def both(q, k):
        out, vjp = jax.vjp(attention, q, k, k)
        return out, vjp(out)

    assert "custom_call" not in lower_for_gpu(both, q, k)


def test_operands_that_must_be_copied():
    """For TMA; at heads of 64 rows may end anywhere, and smaller ones of 8 be whole."""
    for rows, chosen in ((1500, "triton"), (1504, "mosaic_gpu"), (4095, "mosaic_gpu")):
        assert _choice((8, rows, 16, 128)) == chosen
    small = "mosaic_gpu" if support.COPIES_ANY_WIDTH else "triton"
    of_heads = {72: "triton", 80: "mosaic_gpu", 40: small, 36: "triton"}
    for head, chosen in of_heads.items():
        assert _choice((8, 2048, 16, head)) == chosen
    assert _choice((8, 1500, 16, 64)) == "mosaic_gpu"
    assert _choice((8, 1500, 16, 40)) == small


def test_gradients_go_to_the_backend_that_measured_faster():
    """Unless the caller names the backend of the forward."""
    q = jax.ShapeDtypeStruct((2, 512, 16, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    texts = []

    def ask(q, k):
        texts.extend(explain(q, k, k, **options) for options in ({}, MOSAIC))
        return q

    def loss(q, k, **options):
        return attention(q, k, k, **options).astype(jnp.float32).sum()

    lower_for_gpu(ask, q, k)
    chosen, named = texts
    assert "gradients: triton, since about 512 keys" in chosen
    assert "gradients: triton" not in named
    # The division is that of the kernel that makes them.
    assert ["dkv: heads of a group" in text for text in texts] == [False, True]
    gradients = [
        lower_for_gpu(jax.grad(functools.partial(loss, **options)), q, k)
        for options in ({}, MOSAIC)
    ]
    assert ["__gpu$xla.gpu.triton" in text for text in gradients] == [True, False]
    # Few keys that many queries look at.
    q = jax.ShapeDtypeStruct((2, 4096, 16, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 77, 16, 64), jnp.bfloat16)
    lower_for_gpu(ask, q, k)
    assert texts[-2].startswith("implementation: mosaic_gpu")
    assert "gradients: triton" not in texts[-2]


def test_short_rows_with_lengths():
    lengths = {"is_causal": True, "key_value_seq_lengths": np.full(32, 300, np.int32)}
    assert _choice((32, 512, 16, 128), **lengths) == "mosaic_gpu"
    assert _choice((32, 510, 16, 128), **lengths) == "triton"
    assert _choice((32, 512, 16, 64), **lengths) == "triton"
    q = jax.ShapeDtypeStruct((32, 512, 16, 128), jnp.bfloat16)
    texts = []
    lower_for_gpu(lambda q: texts.append(explain(q, q, q, **lengths)) or q, q)
    assert "gradients: triton, since about 256 keys" in texts[0]


def _features(rows: int) -> dict[str, dict]:
    return {
        "dropout": {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)},
        "mask": {"mask": np.ones((2, 1, 1, rows), bool)},
        "bias of keys": {"bias": np.zeros((16, 1, rows), np.float32)},
        "bias of pairs": {"bias": np.zeros((16, rows, rows), jnp.bfloat16)},
        "wide bias of pairs": {"bias": np.zeros((16, rows, rows), np.float32)},
    }


@pytest.mark.parametrize("name", _features(1))
def test_features_go_to_the_backend_that_measured_faster(name):
    def choice(rows: int, head: int) -> str:
        return _choice((2, rows, 16, head), **_features(rows)[name])

    small = "triton" if name == "wide bias of pairs" else "mosaic_gpu"
    assert choice(2048, 128) == "mosaic_gpu"
    assert choice(2048, 64) == small
    few = "triton" if name in ("mask", "wide bias of pairs") else "mosaic_gpu"
    assert choice(512, 128) == few


@pytest.mark.parametrize("rows", [1, 8, 64, 127])
@pytest.mark.parametrize("key_heads", [1, 8, 32])
def test_few_queries_go_to_triton(rows, key_heads):
    """It divides their keys, and reads keys once for the heads of a group."""
    shape = (64, rows, 32, 128)
    assert _choice(shape, 4096, key_heads) == "triton"
    assert _choice((64, 128, 32, 128), 4096, key_heads) == "mosaic_gpu"


@on_hopper
@pytest.mark.parametrize(("case", "dtype"), in_both_dtypes(SERVED))
def test_error_rule(case, dtype, record_property):
    check(case.full(), dtype, record_property)


# Programs take tiles here: how long each runs is not known before.
UNSORTED = ("offset_batch", "lengths", "segments", "mask")
MANY_TILES = [
    case
    for i, case in enumerate(SERVED)
    if i % 3 == 0 or any(word in case.name for word in UNSORTED)
]


@on_hopper
@pytest.mark.parametrize("case", MANY_TILES, ids=lambda case: case.name)
def test_error_rule_of_many_tiles_a_program(case, multiprocessors, record_property):
    multiprocessors(3)
    check(case.full(), "bfloat16", record_property)


@on_hopper
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("name", ["plain", "everything_served"])
def test_blocks(name, blocks, record_property):
    (case,) = (case for case in SERVED if case.name == name)
    config = Config(forward=blocks)
    check(case.full(), "bfloat16", record_property, config=config)


# What is added to the scores of each quarter of the keys.
LEVELS = {
    "falling": (0, -90, -60, -30),
    "rising": (0, 3, 6, 9),
    "beyond_float16": (0, 20, 0, 0),
    "beyond_float32": (0, 0, 0, 300),
    "far_below": (-300, -300, -300, -300),
}


@on_hopper
@pytest.mark.parametrize(
    ("dtype", "rows", "blocks"),
    [
        ("bfloat16", "all", None),
        ("float16", "all", None),
        ("float16", "some", None),
        *(("bfloat16", "some", name) for name in BLOCKS),
    ],
)
@pytest.mark.parametrize("levels", LEVELS)
def test_rows_that_leave_their_range(
    levels, dtype, rows, blocks, any_size, record_property
):
    """A head element carries the level: 1 of a query, or 0 where rows are spared."""
    case = dataclasses.replace(by_name("plain"), t=400, s=1024, h=64, d=64)
    (q, k, v), _ = case.inputs(dtype)
    scale = case.h**-0.5
    level = np.repeat(np.float32(LEVELS[levels]), case.s // 4) / scale
    own = np.ones(case.t) if rows == "all" else np.arange(case.t) % 192 < 64
    q = q.at[..., 0].set(own[None, :, None].astype(q.dtype))
    k = k.at[..., 0].set(level[None, :, None].astype(k.dtype))
    config = None if blocks is None else Config(forward=BLOCKS[blocks])
    more = {"arrays": (q, k, v), "config": config}
    check(case, dtype, record_property, **more)


def _kept(name: str, rows: int, keys: int) -> np.ndarray:
    """Masks of pairs that leave some rows nothing in the first block of keys."""
    mask = np.random.default_rng(0).random((rows, keys)) < 0.7
    own = np.arange(rows) % 50 < 9
    if name == "empty":
        mask[own] = False
    elif name == "late":
        mask[own, :300] = False
    elif name == "one":
        mask[own] = np.arange(keys) == keys - 1
    elif name == "prefix":
        mask = np.arange(keys) <= np.arange(rows)[:, None] + 300
    return mask


@on_hopper
@pytest.mark.parametrize("name", ["random", "empty", "late", "one", "prefix"])
@pytest.mark.parametrize("level", [0, -30, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_masks_of_pairs(name, level, dtype, multiprocessors, record_property):
    """After the first block the maximum stays, whatever a row has kept of that."""
    multiprocessors(3)
    case = dataclasses.replace(by_name("plain"), t=400, s=1024, h=64, d=64)
    (q, k, v), _ = case.inputs(dtype)
    q = q.at[..., 0].set(1)
    levels = np.where(np.arange(case.s) < 128, 0, level).astype(np.float32)
    k = k.at[..., 0].set((levels * case.h**0.5)[None, :, None].astype(k.dtype))
    mask = _kept(name, case.t, case.s)
    case = dataclasses.replace(case, arguments=lambda rng, case: {"mask": mask})
    check(case, dtype, record_property, arrays=(q, k, v))


@on_hopper
@pytest.mark.parametrize(
    ("head", "blocks"),
    [(256, None), (64, None), *((64, blocks) for blocks in BLOCKS.values())],
    ids=["head_256", "chosen", *BLOCKS],
)
@pytest.mark.parametrize("share", [0.05, 0.5])
@pytest.mark.parametrize(
    ("name", "levels"), [("plain", "beyond_float32"), ("causal", "falling")]
)
def test_many_tiles_a_program(
    name, levels, share, head, blocks, multiprocessors, record_property
):
    """Rows leave their range in some tiles: the same bits as of a tile a program."""
    case = dataclasses.replace(by_name(name), t=1024, s=1024, h=head, d=head)
    (q, k, v), arguments = case.inputs("float16")
    level = np.repeat(np.float32(LEVELS[levels]), case.s // 4) * case.h**0.5
    rng = np.random.default_rng(0)
    own = rng.random((q.shape[0], case.t // 64, q.shape[2])) < share
    q = q.at[..., 0].set(np.repeat(own, 64, axis=1).astype(q.dtype))
    k = k.at[..., 0].set(level[None, :, None].astype(k.dtype))
    more = {"config": None if blocks is None else Config(forward=blocks)}

    def results(count, times=1):
        multiprocessors(count)
        call = functools.partial(attention, **arguments, **MOSAIC, **more)
        run = jax.jit(functools.partial(call, return_residual=True))
        return [jax.device_get(run(q, k, v)) for _ in range(times)]

    (alone,) = results(1 << 20)
    for count in (1, 2, 7):
        for found in results(count, times=20):
            for a, b in zip(found, alone, strict=True):
                np.testing.assert_array_equal(a, b)
    check(case, "float16", record_property, arrays=(q, k, v), **more)
