"""Which tiles the thread blocks of a Mosaic GPU kernel go through."""

import dataclasses
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device, program
from pallas_kernels.configs import Blocks
from pallas_kernels.core.arithmetic import PLAIN
from pallas_kernels.core.axes import Named
from pallas_kernels.core.lists import BlockList
from pallas_kernels.core.masks import DenseMask, Lengths, SegmentIds, Window
from pallas_kernels.core.positions import Numbering
from pallas_kernels.core.scores import Bias, Score
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import memory
from pallas_kernels.mosaic_gpu.hopper import forward_plan, tuning
from pallas_kernels.mosaic_gpu.tile_scheduler import (
    MOST_TILES,
    Schedule,
    has,
    has_next,
    has_previous,
    heads_per_wave,
)
from tests.mosaic import with_numbers
from tests.tiers import deeply


def _tiles(schedule: Schedule) -> list[np.ndarray]:
    """Those of each program, in its order.

    Arrays have one size for most schedules, so that JAX compiles each operation once.
    """
    programs = jnp.arange(-(-schedule.thread_blocks // 1024) * 1024)
    r = jnp.arange(MOST_TILES)
    tiles, slots = jax.vmap(
        lambda p: (jax.vmap(lambda r: schedule.tile(p, r))(r), schedule.slots(p))
    )(programs)
    own = np.array(has(slots[:, None], r))[: schedule.thread_blocks]
    return [x[y] for x, y in zip(np.array(tiles)[: len(own)], own, strict=True)]


@pytest.mark.parametrize("count", [3, 132, *deeply(1, 114)])
@pytest.mark.parametrize("blocks", [1, 2, 5, 16, 64, 129])
@pytest.mark.parametrize("heads", [1, 3, 32, 128])
def test_schedule(heads, blocks, count):
    """Every tile once, and programs whose causal tiles sum to about as much."""
    tiles = heads * blocks
    schedule = Schedule.of(tiles, count, uniform_cost=True)
    assert schedule.resident == min(tiles, count)
    assert schedule.thread_blocks % schedule.resident == 0
    assert schedule.most_tiles <= MOST_TILES
    if tiles <= MOST_TILES * count:
        assert schedule.thread_blocks <= count

    dealt = _tiles(schedule)
    np.testing.assert_array_equal(np.sort(np.concatenate(dealt)), range(tiles))
    lengths = blocks - np.arange(tiles) // heads  # the longest first
    all_sums = np.array([lengths[own].sum() for own in dealt])
    for sums in all_sums.reshape(-1, schedule.resident):  # those at the same time
        assert sums.max() - sums.mean() <= blocks
        if schedule.most_tiles >= 4:  # without the way back a third more than the mean
            assert sums.max() <= 1.08 * sums.mean() + 1


@pytest.mark.parametrize(
    ("heads", "rows", "together"), [(64, 64, 4), (128, 32, 8), (1024, 8, 64)]
)
def test_schedule_of_many_tiles(heads, rows, together):
    """Multiprocessors are busy when there are more tiles than slots."""
    schedule = Schedule.of(heads * rows, 132, uniform_cost=True)
    assert schedule.thread_blocks > schedule.resident == 132
    free = np.zeros(132)
    for own in _tiles(schedule):
        heads_before, block = np.divmod(own // together, rows)
        length = np.where(heads_before & 1, block, rows - 1 - block) + 1
        free[free.argmin()] += length.sum()
    assert free.mean() > 0.93 * free.max()


@pytest.mark.parametrize("tiles", [1, 132, 133, 1000, 31 * 132, 31 * 132 + 1, 9999])
def test_schedule_of_unknown_work(tiles):
    """Thread blocks take tiles, of which there are never more than slots."""
    schedule = Schedule.of(tiles, 132, uniform_cost=False)
    assert schedule.is_static == (tiles <= 132)
    assert schedule.thread_blocks % schedule.resident == 0
    assert schedule.thread_blocks <= max(132, tiles)
    assert schedule.most_tiles <= MOST_TILES
    assert schedule.thread_blocks * schedule.most_tiles >= tiles
    # Some thread blocks take more tiles than others. But none is there for nothing.
    assert schedule.is_static or 26 * schedule.thread_blocks >= tiles
    assert 26 * (schedule.thread_blocks - schedule.resident) < tiles


@pytest.mark.parametrize("tiles", [2048, 3200, 3840, 4092, 8184])
def test_programs_that_take_tiles_end_together(tiles):
    """As if slots had no end. Of causal documents, by a simulation.

    A free multiprocessor takes the next tile: none is free while tiles are left, so
    that all end within the longest one.
    """
    rng = np.random.default_rng(0)
    schedule = Schedule.of(tiles, 132, uniform_cost=False)
    lengths = rng.lognormal(1.5, 0.8, tiles).astype(int) + 1  # in tiles
    work = np.concatenate([1 + np.arange(n) for n in lengths])[:tiles]
    taken, to_start = 0, schedule.thread_blocks
    # Multiprocessors: free from when, and how many slots are left.
    running = [(0.0, 0)] * schedule.resident
    ends = []
    while running:
        time, slots = heapq.heappop(running)
        if not slots and to_start:
            to_start, slots = to_start - 1, schedule.most_tiles
        if slots and taken < tiles:
            heapq.heappush(running, (time + work[taken], slots - 1))
            taken += 1
        else:
            ends.append(time)
    assert taken == tiles
    assert max(ends) <= work.sum() / schedule.resident + work.max()


def test_sets_of_slots():
    slots = (1 << MOST_TILES) - 1 - 0b100
    for r in range(MOST_TILES):
        assert has(slots, r) == (r != 2)
        assert has_next(slots, r) == (r + 1 != 2 and r + 1 < MOST_TILES)
        assert has_previous(np.int32(slots), np.int32(r)) == (r - 1 != 2 and r > 0)


FOUR = np.zeros(4, np.int32)


@pytest.mark.parametrize(
    ("masks", "offset", "monotone"),
    [
        ((), None, True),
        ((Window(None, 0),), None, True),
        ((Window(5, 0),), Named(FOUR[0], ()), True),
        ((Window(5, None),), None, False),
        ((Window(None, 0),), Named(FOUR, ("b",)), False),
        ((Window(None, 0), Lengths(key_value=Named(FOUR, ("b",)))), None, False),
        ((SegmentIds(Named(FOUR, ("t",)), Named(FOUR, ("s",))),), None, False),
    ],
)
def test_cost_is_monotone(masks, offset, monotone):
    spec = AttentionSpec(Score(1.0), masks, offset)
    assert spec.cost_is_monotone == monotone


@pytest.mark.parametrize(
    ("heads", "blocks", "programs", "most"),
    [
        (128, 16, 132, 20),
        (32, 64, 132, 5),
        (16, 128, 132, 2),
        (6, 1, 132, 4),
        (7, 3, 5, 1),
    ],
)
def test_heads_per_wave(heads, blocks, programs, most):
    """As many as the cache holds, but enough for all programs."""
    found = heads_per_wave(heads, blocks, programs, most)
    assert heads % found == 0
    enough = found * blocks >= programs
    assert enough or found == heads
    assert found <= most or all(
        n * blocks < programs for n in range(1, found) if heads % n == 0
    )


@pytest.mark.parametrize(("alike", "together"), [(None, 1), (16, 16), (512, 1)])
def test_heads_of_documents_lie_side_by_side(alike, together, monkeypatch):
    """Few blocks of a document's keys run at a time: they wait for each other."""
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    rows = jax.ShapeDtypeStruct((1, 32768, 16, 128), jnp.bfloat16)
    operands = [Named(rows, ("b0", *axes)) for axes in ("tnh", "skh", "skd")]
    launch = Launch(Blocks(64, 128, num_warps=8, num_stages=2), None, PLAIN, False)
    options = {"by_block": True, "blocks_alike": alike}
    layout = memory.TileGrid.of("dkv", operands, launch, **options)
    assert layout.together == together


@pytest.mark.parametrize(("size", "heads", "together"), [(64, 32, 4), (128, 16, 2)])
def test_diagonals_of_heads_lie_side_by_side(size, heads, together, monkeypatch):
    """As many as the cache holds: the longest one of the last head is not alone."""
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    rows = jax.ShapeDtypeStruct((2, 8192, heads, size), jnp.bfloat16)
    operands = [Named(rows, ("b0", *axes)) for axes in ("tnh", "skh", "skd")]
    operands.append(Named(jax.ShapeDtypeStruct((heads, 127), jnp.float32), ("n", "e")))
    launch = Launch(Blocks(128, 128, num_warps=8, num_stages=2), None, PLAIN, False)
    options = {"own": ("e",), "looped": ("b0",), "by_block": True}
    layout = memory.TileGrid.of("dbias", operands, launch, **options)
    assert layout.together == together
    numbers = jnp.arange(layout.tiles, dtype=jnp.int32)
    ids = layout.at_tile(numbers).program_ids()
    assert (
        len({*zip(*(ids[name].tolist() for name in "en"), strict=True)}) == 127 * heads
    )
    assert {*np.diff(ids["e"])} == {0, 1, -126}


@pytest.mark.parametrize("left", [None, 0, 63, 64, 65, 200])
@pytest.mark.parametrize("right", [None, 0, 1, 130])
def test_diagonals_out_of_reach(left, right):
    """Those without a pair, and no others."""
    spec, block, tiles = AttentionSpec(Score(1.0), (Window(left, right),)), 64, 5
    q, kv = np.indices((tiles * block, tiles * block))
    kept = spec.masks[0].keep(q, kv, q, kv)
    kept = np.broadcast_to(True if kept is None else kept, q.shape)
    for after in range(1 - tiles, tiles):
        is_far = any(program.out_of_reach(spec, after, block))
        assert is_far != kept[(q // block - kv // block) == after].any()
    moved = dataclasses.replace(spec, offset=DATA)
    assert not [*program.out_of_reach(moved, -3, block)]


DATA = Named(np.zeros(1, np.int32), ("b0",))


@pytest.mark.parametrize(
    ("expected", "masks", "rows", "block_q", "offset"),
    [
        (True, [Window(None, 0)], 512, 128, None),
        (True, [Window(None, 0)], 500, 128, None),
        (True, [], 512, 192, None),
        (False, [Window(None, 0)], 576, 192, None),
        (False, [Window(100, 0)], 512, 128, None),
        (False, [Window(None, 0)], 128 * 257, 128, None),
        (False, [Window(None, 0)], 512, 128, DATA),
        (False, [Lengths(DATA, None)], 512, 128, None),
    ],
)
def test_one_edge(expected, masks, rows, block_q, offset):
    """Calls whose work tiles are known to have one edge each."""
    struct = jax.ShapeDtypeStruct((1, rows, 2, 64), jnp.bfloat16)
    operands = [Named(struct, ("b0", *axes)) for axes in ("tnh", "skh", "skd")]
    launch = Launch(Blocks(block_q, 128, num_warps=8, num_stages=2), None, PLAIN, False)
    layout = memory.TileGrid.of("forward", operands, launch)
    spec = AttentionSpec(Score(1.0), tuple(masks), offset)
    assert forward_plan.have_one_edge(spec, layout) == expected


def test_keys_are_awaited_early_where_that_is_faster(monkeypatch):
    def early(*, head=128, keys=None, stages=2, **more):
        spec = AttentionSpec(**{"score": Score(1.0), "masks": (), **more})
        blocks = Blocks(128, 128, num_warps=8, num_stages=stages)
        width = {"h": keys or head, "d": head}
        return tuning.awaits_keys_early(width, spec, blocks)

    found = [head for head in (32, 64, 96, 128, 160, 256) if early(head=head)]
    assert found == [96, 128]
    listed = BlockList(*[None] * 5, own=128, visited=128, size=512)
    assert early(head=64, table=listed) and not early(head=32, table=listed)
    assert early(masks=(Window(None, 0), Lengths(DATA, None)))
    assert not early(stages=1) and not tuning.may_await_keys_early(Blocks(64, 64, 4, 1))
    assert not early(keys=64) and not early(keys=256)
    kept, bias = (Named(np.zeros((9, 9), x), ("t", "s")) for x in (bool, np.float32))
    assert not early(masks=(DenseMask(kept),))
    score = Score(1.0, (Bias(bias),))
    assert not early(score=score)
    by_distance = Named(np.zeros(9, np.float32), ("t",))
    score = Score(1.0, (Bias(by_distance),))
    assert early(score=score)
    monkeypatch.setattr(Bias, "zero", lambda *_: 4)
    assert not early(score=score)


def test_windows_of_all_rows_lie_side_by_side():
    """Not those of a part, whose programs do not keep step."""

    def alike(*masks, **more):
        return tuning.blocks_alike(AttentionSpec(Score(1.0), masks, **more))

    window, causal = Window(100, 0), Window(None, 0)
    ids = SegmentIds(*(Named(jnp.zeros(9, jnp.int32), (a,)) for a in "ts"))
    part = Numbering(jnp.int32(3))
    assert alike(window) == alike(window, ids) == alike(ids, causal) == 16
    assert alike(ids, causal, query_rows=part, key_rows=part) == 16
    assert alike(causal) is alike(causal, query_rows=part, key_rows=part) is None
    assert alike(window, offset=Named(jnp.int32(5), ())) is None
    for rows in (part, Numbering(stripe=64, parts=2)):
        assert alike(window, query_rows=rows, key_rows=rows) is None


@pytest.mark.parametrize("pairs", [(), ("n", "t", "s"), ("b0", "t", "s")], ids="".join)
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("group", [1, 4, 32])
def test_tiles_of_a_layout(by_block, group, pairs, monkeypatch):
    """Every block of every head once, in parts if the work is divided, side by side."""
    monkeypatch.setattr(device, "multiprocessors", lambda: 40)
    with_numbers(monkeypatch, cached_key_bytes=1 << 18)

    def rows(*axes):
        size = {"b0": 3, "t": 700, "s": 600, "n": 4 * group, "k": 4, "h": 64, "d": 64}
        shape = [size[a] for a in axes]
        return Named(jax.ShapeDtypeStruct(shape, jnp.bfloat16), axes)

    q, k = rows("b0", "t", "n", "h"), rows("b0", "s", "k", "h")
    operands = [q, k, rows("b0", "s", "k", "d"), *([rows(*pairs)] if pairs else [])]
    blocks = Blocks(64, 128, num_warps=8, num_stages=2)
    launch = Launch(blocks, None, PLAIN, False)
    for kernel, own, head in (("forward", "t", "n"), ("dkv", "s", "k")):
        layout = memory.TileGrid.of(kernel, operands, launch, by_block=by_block)
        numbers = jnp.arange(layout.tiles, dtype=jnp.int32)
        ids = {a: np.array(x) for a, x in layout.at_tile(numbers).program_ids().items()}
        names = [*layout.parts, own, head, "b0"]
        found = np.stack([ids[name] for name in names], axis=-1)
        count = layout.size | layout.num_blocks | layout.parts
        expected = np.indices([count[name] for name in names])
        np.testing.assert_array_equal(
            np.unique(found, axis=0), expected.reshape(len(names), -1).T
        )
        if "k" in ids and head == "n":
            np.testing.assert_array_equal(ids["k"], ids["n"] // group)
        # Programs that read the same pairs run together.
        assert layout.names[-2:] == (("b0", head) if "n" in pairs else (head, "b0"))
        steps = np.diff(ids[own])
        if by_block and kernel == "forward":  # neighbours take about equally long
            assert np.abs(steps).max() <= 1
        elif by_block:  # those of a head come in the order of their blocks
            assert set(steps) <= {0, 1, 1 - layout.num_blocks[own]}
