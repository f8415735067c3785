"""The Mosaic GPU backend: that every variant lowers, and on Hopper what it computes."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash2 import Blocks, Config, attention, explain
from pallas_kernels import device
from pallas_kernels.mosaic_gpu import shared_memory, support
from pallas_kernels.mosaic_gpu.barriers import NamedBarrier, NamedBarriers, PingPong
from pallas_kernels.mosaic_gpu.hopper.forward_plan import Plan, Storage
from pallas_kernels.mosaic_gpu.pipeline import Pipeline
from pallas_kernels.mosaic_gpu.shared_memory import Tile
from tests.cases import by_name
from tests.lowering import lower_for_gpu, string_attributes
from tests.modules import without_locations
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
from tests.tiers import deep, deeply

NAMED = ("head_72_24", "everything_served", "one_query")  # the last is deep


def _lowered() -> Iterator:
    """A quarter of the cases of the error rule on a GPU; a few in the first tier.

    But in bfloat16 those of other heads alone: `test_backward_lowers` has the rest.
    """
    for number, one in enumerate(in_both_dtypes(SERVED)):
        case, dtype = one.values
        named = case.name in NAMED and dtype == "bfloat16"
        of_heads = dtype == "float16" or not case.h == case.d == 16
        if named or (number % 8 in (1, 6) and of_heads):
            marks = [] if named and case.name != NAMED[-1] else deep
            yield pytest.param(case, dtype, id=one.id, marks=marks)


@pytest.mark.parametrize(
    ("heads", "columns", "most"),
    [
        ((128, 128), 128, 128),
        ((256, 256), 0, 128),  # half of the columns fit beside the queries
        ((128, 64), 64, 64),  # queries have another size
    ],
)
def test_columns_of_output(heads, columns, most, monkeypatch):
    monkeypatch.setattr(device, "shared_memory_limit", lambda: 227 << 10)
    blocks = Blocks(128, 64, num_warps=8, num_stages=2)
    storage = Storage(blocks, heads, jnp.bfloat16, jnp.bfloat16)
    assert storage.with_output_tile().output_columns == columns
    assert storage.with_output_tile(halves=True).output_columns == most


@pytest.mark.parametrize(
    "name", ["lengths", *deeply("mask_full", "bias_half", "head_256")]
)
def test_shared_memory_is_the_sum_of_what_is_declared(name, monkeypatch):
    """The bytes that the lowered forward asks for, of every kind of schedule."""
    plans, of = [], Plan.of
    keep = staticmethod(lambda *call: plans.append(of(*call)) or plans[-1])
    monkeypatch.setattr(Plan, "of", keep)
    (kernel, *_) = string_attributes(lowered(by_name(name), jnp.bfloat16), "module")
    module = without_locations(kernel)
    (size,) = re.findall(r'gpu\.launch"\(.*(%\w+)\)', module)
    (asked,) = re.findall(size + r" = .*constant.*value = (\d+) : i32", module)
    (plan,) = plans
    assert int(asked) == plan.storage.num_bytes
    assert plan.storage.fits


class Rows(NamedTuple):
    queries: Tile
    lse: Tile


def test_tiles_that_come_together():
    """They share two barriers a stage. Forms of a tile lie in the same place."""
    queries = Tile(support.tile((3, 64, 64), jnp.bfloat16, array=(100, 60)))
    assert isinstance(queries.forms, plgpu.RefUnion)
    tiles = Rows(queries, lse=Tile(plgpu.SMEM((3, 64), jnp.float32)))
    pipeline = Pipeline.declare(tiles, stages=3, readers=2)
    assert (pipeline.full.num_arrivals, pipeline.empty.num_arrivals) == (2, 2)
    assert shared_memory.num_bytes(pipeline) == (3 * 64 * 64 * 2) + 1024 + 2 * 3 * 8


def test_named_barriers_are_given_out_once():
    """Above those of the thread block and of its warpgroups, and no more than 16."""
    barriers = NamedBarriers(warpgroups=3)
    assert barriers.ping_pong(2) == PingPong(first=4, count=2)
    assert barriers.barrier(2) == NamedBarrier(number=6, warpgroups=2)
    with pytest.raises(AssertionError, match="no named barrier is left"):
        barriers.ping_pong(10)


@off_hopper
@pytest.mark.parametrize(("case", "dtype"), list(_lowered()))
def test_lowers(case, dtype):
    text = lowered(case, dtype)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "flash2_forward" in text and "__gpu$xla.gpu.triton" in text


@pytest.mark.parametrize("name", [*[*BLOCKS][:2], *deeply(*[*BLOCKS][2:])])
def test_blocks_lower(name):
    config = Config(forward=BLOCKS[name])
    text = lowered(by_name("causal"), jnp.bfloat16, config=config)
    assert text.count("custom_call @mosaic_gpu") == 1


def test_barriers_take_shared_memory(multiprocessors):
    """27 stages of small heads leave no room for barriers and a tile of output."""
    multiprocessors(3)
    case = dataclasses.replace(by_name("lengths"), h=32, d=32)
    config = Config(forward=Blocks(64, 64, num_warps=4, num_stages=27))
    assert "flash2_forward" in lowered(case, jnp.bfloat16, config=config)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("lengths_causal", 1),
        *deeply(("segments", 1), ("causal", 1), ("head_192_128", 2), ("head_256", 3)),
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
    "barriers": (
        {"config": Config(forward=Blocks(64, 64, 4, 33))},
        {},
        "num_stages=33",
    ),
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
    multiprocessors(1 if any(word in case.name for word in UNSORTED) else 3)
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
