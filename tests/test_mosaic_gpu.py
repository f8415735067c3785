"""The Mosaic GPU backend: that every variant lowers, and on Hopper what it computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, attention, explain
from pallas_kernels import device
from pallas_kernels.mosaic_gpu import tuning
from tests import tolerances
from tests.cases import CASES, ON_GPU, Case, by_name
from tests.lowering import lower_for_gpu
from tests.tiers import deeply

MOSAIC = {"implementation": "mosaic_gpu"}
DECLINED = ("bias", "mask", "dropout_rate")
SERVED = [
    case
    for case in CASES
    if max(case.h, case.d) <= 256 and not any(map(case.has, DECLINED))
]
FIRST = ("plain", "one_query", "head_72_24", "head_192_128", "everything_served")

# What the backend serves, all together: no case of the common ones has just that.
EVERYTHING = dataclasses.replace(
    by_name("plain"),
    name="everything_served",
    arguments=lambda rng, case: {
        **by_name("segments").arguments(rng, case),
        **by_name("alibi_batch").arguments(rng, case),
        **by_name("lengths").arguments(rng, case),
        "sinks": np.float32(rng.standard_normal(case.n)),
        "logits_soft_cap": 4.0,
        "local_window_size": (25, None),
    },
    n=4,
    d=24,
)
SERVED.append(EVERYTHING)

on_hopper = pytest.mark.skipif(
    not (ON_GPU and device.capability() == 90), reason="runs on Hopper GPUs"
)


def lowered(case: Case, dtype, **more) -> str:
    """The module of a call's forward pass for a Hopper GPU, and of its gradients."""
    arrays, arguments = case.full().inputs(dtype)
    data = {n: x for n, x in arguments.items() if isinstance(x, np.ndarray | jax.Array)}
    static = {n: x for n, x in arguments.items() if n not in data}

    def run(arrays, data):
        call = functools.partial(attention, **static, **data, **MOSAIC, **more)
        out, vjp = jax.vjp(call, *arrays)
        return out, vjp(out)

    return lower_for_gpu(run, arrays, data)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *deeply(jnp.float16)])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=() if case.name in FIRST else pytest.mark.deep,
        )
        for case in SERVED
    ],
)
def test_lowers(case, dtype):
    text = lowered(case, dtype)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "flash2_forward" in text and "__gpu$xla.gpu.triton" in text


@pytest.fixture
def any_size(monkeypatch):
    """Calls that are too small for the backward kernel to be fast go to it, too."""
    monkeypatch.setattr(tuning, "_ENOUGH", 0)


# Cases whose gradients the backend makes itself, where it has the head size.
WIDER = {"head_96": (96, 96), "head_48": (48, 40), "head_100": (100, 128)}
BACKWARD = [
    case
    for case in SERVED
    if case.h == case.d == 16
    and not case.has("alibi_slopes")
    and not isinstance(case.inputs("float32")[1].get("scale"), np.ndarray)
]
FIRST_BACKWARD = ("causal", "lengths_causal", "soft_cap", "segments_causal_gqa")


def with_heads(case: Case, size: int) -> Case:
    return dataclasses.replace(case, h=size, d=size)


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=() if case.name in FIRST_BACKWARD else pytest.mark.deep,
        )
        for case in BACKWARD
    ],
)
def test_backward_lowers(case, head, any_size):
    text = lowered(with_heads(case, head), jnp.bfloat16)
    assert text.count("custom_call @mosaic_gpu") == 2
    assert "flash2_backward" in text and "__gpu$xla.gpu.triton" not in text


OTHER = {
    "head_size": (by_name("head_80"), "head sizes (80, 80)"),
    "alibi": (with_heads(by_name("alibi"), 64), "no gradient of slopes"),
    "few": (with_heads(by_name("plain"), 64), "few blocks of keys"),
}


@pytest.mark.parametrize("name", OTHER)
def test_gradients_of_another_backend(name):
    case, words = OTHER[name]
    arrays, arguments = case.inputs(jnp.bfloat16)
    texts = []

    def ask(q, k, v):
        texts.append(explain(q, k, v, **arguments, **MOSAIC))
        return q

    lower_for_gpu(ask, *arrays)
    (line,) = (
        x for x in texts[0].splitlines() if x.startswith("    gradients: triton")
    )
    assert words in line


BLOCKS = {
    "one_warpgroup": Blocks(64, 64, num_warps=4, num_stages=1),
    "three_warpgroups": Blocks(192, 128, num_warps=12, num_stages=3),
    "few_keys": Blocks(128, 64, num_warps=8, num_stages=4),
}


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_blocks_lower(blocks):
    text = lowered(by_name("causal"), jnp.bfloat16, config=Config(forward=blocks))
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.fixture
def multiprocessors(monkeypatch):
    """Sets how many the GPU is said to have: with few, programs have many tiles."""

    def set_count(count: int) -> None:
        jax.clear_caches()
        monkeypatch.setattr(device, "multiprocessors", lambda: count)

    yield set_count
    jax.clear_caches()


@pytest.mark.parametrize("name", ["causal", "head_192_128", "head_256"])
def test_many_tiles_a_program_lower(name, multiprocessors):
    multiprocessors(3)
    text = lowered(by_name(name), jnp.bfloat16)
    assert text.count("custom_call @mosaic_gpu") == 1


# Of one tile of keys, and divided by heads, by queries and by both.
DIVIDED = {
    "whole": (1, {}, ()),
    "heads": (40, {}, ("heads of a group in 4 parts",)),
    "queries": (100, {"n": 2}, ("queries in 2 parts",)),
    "both": (4000, {}, ("heads of a group in 4 parts", "queries in 2 parts")),
}


def divided_case(name: str, head: int, shape: dict) -> Case:
    sizes = {"t": 1100, "s": 900, "n": 8, "k": 2, "h": head, "d": head} | shape
    return dataclasses.replace(by_name(name), **sizes)


@pytest.mark.parametrize("name", DIVIDED)
def test_divided_backward_lowers(name, multiprocessors, any_size):
    count, shape, words = DIVIDED[name]
    multiprocessors(count)
    case = divided_case("causal", 64, shape)
    arrays, arguments = case.inputs(jnp.bfloat16)
    texts = []

    def run(q, k, v):
        texts.append(explain(q, k, v, **arguments, **MOSAIC))
        call = functools.partial(attention, **arguments, **MOSAIC)
        out, vjp = jax.vjp(call, q, k, v)
        return vjp(out)

    lowered = lower_for_gpu(run, *arrays)
    assert lowered.count("custom_call @mosaic_gpu") == 2
    for part in words:
        assert part in texts[0]
    assert ("parts" in texts[0]) == bool(words)


WRONG = {
    "float32": ({}, {"dtype": jnp.float32}, "dtype float32 is not"),
    "head_size": ({}, {"h": 264}, "head size 264 is above 256"),
    "dropout": (
        {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
        {},
        "no dropout",
    ),
    "bias": ({"bias": jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.float32)}, {}, "no bias"),
    "mask": ({"mask": jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.bool_)}, {}, "no mask"),
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


def _choice(shape: tuple[int, ...], **arguments) -> str:
    found = []
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def ask(x):
        found.append(explain(x, x, x, **arguments).splitlines()[0])
        return x

    lower_for_gpu(ask, x)
    return found[0].removeprefix("implementation: ")


def test_calls_go_to_the_backend_that_measured_faster():
    assert _choice((2, 8192, 16, 128)) == "mosaic_gpu"
    assert _choice((2, 8192, 16, 128), is_causal=True) == "mosaic_gpu"
    assert _choice((32, 512, 16, 128), is_causal=True) == "mosaic_gpu"
    assert _choice((2, 128, 4, 64)) == "triton"
    assert _choice((8, 2048, 32, 64), is_causal=True) == "mosaic_gpu"
    assert _choice((8, 1024, 32, 64), is_causal=True) == "triton"
    assert _choice((1, 2048, 1, 128)) == "triton"  # programs on a few multiprocessors


@on_hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_error_rule(case, dtype, record_property):
    check(case.full(), dtype, record_property)


@on_hopper
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_error_rule_of_many_tiles_a_program(case, multiprocessors, record_property):
    multiprocessors(3)
    check(case.full(), "bfloat16", record_property)


@pytest.mark.parametrize("name", WIDER)
def test_tiles_wider_than_heads_lower(name, any_size):
    h, d = WIDER[name]
    case = dataclasses.replace(by_name("causal"), h=h, d=d)
    assert lowered(case, jnp.bfloat16).count("custom_call @mosaic_gpu") == 2


@on_hopper
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("name", WIDER)
def test_tiles_wider_than_heads(name, group, any_size, record_property):
    h, d = WIDER[name]
    sizes = {"h": h, "d": d, "n": 2 * group, "k": 2, "t": 300, "s": 333}
    case = dataclasses.replace(by_name("causal"), **sizes)
    check(case, "bfloat16", record_property)


@on_hopper
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: case.name)
def test_error_rule_of_gradients(case, dtype, head, any_size, record_property):
    check(with_heads(case.full(), head), dtype, record_property)


def check(case: Case, dtype, record_property, arrays=None, **more):
    made, arguments = case.inputs(dtype)
    arrays = made if arrays is None else arrays
    cotangents = tolerances.cotangents_for(case, dtype)
    exact = tolerances.exact(arrays, cotangents, arguments)
    plain = tolerances.plain(arrays, cotangents, arguments)
    actual = tolerances.evaluate(arrays, cotangents, {**arguments, **MOSAIC, **more})
    found = tolerances.check(actual, exact, plain, tolerances.unit_roundoff(dtype))
    worst = float(max(found.values(), default=0.0))
    record_property("share of the allowed error", worst)


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
@pytest.mark.parametrize("blocks", [None, *BLOCKS.values()], ids=["chosen", *BLOCKS])
@pytest.mark.parametrize("rows", ["all", "some"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
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
    config = None if blocks is None else Config(forward=blocks)
    more = {"arrays": (q, k, v), "config": config}
    check(case, dtype, record_property, **more)


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


@on_hopper
@pytest.mark.parametrize("packed", [False, True], ids=["", "segments"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_padding_never_comes_through(poison, packed, any_size):
    """What lies beyond the lengths changes no bit of any result."""
    case = dataclasses.replace(by_name("lengths_causal"), t=300, s=333, h=64, d=64)
    (q, k, v), _ = case.inputs(jnp.bfloat16)
    cotangents = tolerances.cotangents_for(case, jnp.bfloat16)
    q_lengths = np.int32([300, 121, 16, 0])
    kv_lengths = np.int32([177, 333, 0, 128])
    arguments = {
        "query_seq_lengths": q_lengths,
        "key_value_seq_lengths": kv_lengths,
        "is_causal": True,
        **MOSAIC,
    }
    if packed:
        arguments |= by_name("segments").arguments(np.random.default_rng(0), case)

    def poisoned(x, lengths):
        rows = np.arange(x.shape[1])[None, :] >= lengths[:, None]
        return jnp.where(rows.reshape(*rows.shape, *[1] * (x.ndim - 2)), poison, x)

    clean = tolerances.evaluate((q, k, v), cotangents, arguments)
    arrays = poisoned(q, q_lengths), poisoned(k, kv_lengths), poisoned(v, kv_lengths)
    cotangents = tuple(poisoned(x, q_lengths) for x in cotangents)
    dirty = tolerances.evaluate(arrays, cotangents, arguments)
    for name, a in clean.items():
        np.testing.assert_array_equal(a, dirty[name], err_msg=name)
        assert name == "lse" or np.all(np.isfinite(a)), name


@on_hopper
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("name", ["plain", "causal", "gqa", "lengths_causal"])
def test_same_bits(name, head, any_size):
    """Where many programs add to the same blocks of a gradient."""
    case = dataclasses.replace(with_heads(by_name(name), head), t=2048, s=2048)
    arrays, arguments = case.inputs(jnp.bfloat16)

    @jax.jit
    def run(q, k, v):
        call = functools.partial(attention, **arguments, **MOSAIC)
        out, vjp = jax.vjp(functools.partial(call, return_residual=True), q, k, v)
        return out, vjp(out)

    first = jax.device_get(run(*arrays))
    for _ in range(100):
        found = jax.device_get(run(*arrays))
        for a, b in zip(*map(jax.tree.leaves, (found, first)), strict=True):
            np.testing.assert_array_equal(a, b)


@on_hopper
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("mask", ["plain", "causal", "lengths_causal", "segments"])
@pytest.mark.parametrize("name", DIVIDED)
def test_divided_gradients(
    name, mask, head, multiprocessors, any_size, record_property
):
    count, shape, _ = DIVIDED[name]
    multiprocessors(count)
    case = divided_case(mask, head, shape)
    arrays, arguments = case.inputs(jnp.bfloat16)

    @jax.jit
    def run(q, k, v):
        call = functools.partial(attention, **arguments, **MOSAIC)
        out, vjp = jax.vjp(call, q, k, v)
        return vjp(out)

    first = jax.device_get(run(*arrays))
    for _ in range(20):
        for a, b in zip(jax.device_get(run(*arrays)), first, strict=True):
            np.testing.assert_array_equal(a, b)
    check(case, "bfloat16", record_property)


@on_hopper
@pytest.mark.parametrize("axes", [(0, 0, 0), (2, None, None), (3, 1, 1), (None, 2, 2)])
def test_under_vmap(axes, any_size):
    """Wherever the mapped axis lies, the bits of a loop."""
    rng = np.random.default_rng(0)
    shape = (2, 136, 3, 64)

    def operand(axis):
        full = shape if axis is None else (*shape[:axis], 4, *shape[axis:])
        return jnp.asarray(rng.standard_normal(full), jnp.bfloat16)

    arrays = [operand(axis) for axis in axes]
    call = functools.partial(attention, is_causal=True, return_residual=True, **MOSAIC)

    def run(*arrays):
        found, vjp = jax.vjp(call, *arrays)
        return found, vjp(found)

    mapped = jax.vmap(run, axes)(*arrays)
    for i in range(4):
        one = [
            x if axis is None else jnp.take(x, i, axis)
            for x, axis in zip(arrays, axes, strict=True)
        ]
        found = jax.tree.leaves(run(*one))
        pairs = zip(found, jax.tree.leaves(mapped), strict=True)
        for number, (a, b) in enumerate(pairs):
            # XLA sums delta, in an order that may change with the shape.
            close = {} if number < 2 else {"rtol": 2**-6, "atol": 2**-6}
            check = np.testing.assert_allclose if close else _equal
            check(np.float32(a), np.float32(b[i]), **close)


def _equal(a, b):
    np.testing.assert_array_equal(a, b)
