"""The order in which programs of the Mosaic GPU backward add to the same sums.

What the kernel does to find its blocks, and how many programs come before it at each,
is done here for all programs, one after the other.
"""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_flash2 import attention, explain
from pallas_kernels import program
from pallas_kernels.configs import Blocks
from pallas_kernels.core.arithmetic import PLAIN
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import DenseMask, Lengths, Listed, SegmentIds, Window
from pallas_kernels.core.positions import ALL_ROWS, Numbering
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.core.visits import Visits, blocks_of_keys_met, size_of_counts
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import memory
from pallas_kernels.mosaic_gpu.tiles import KeyGrid, Tiles, visits_of
from tests.cases import by_name
from tests.core import test_lists
from tests.core.programs import at_once
from tests.lowering import lower_for_gpu
from tests.mosaic import (
    MOSAIC,
    assert_same_bits,
    check,
    on_hopper,
    with_heads,
    with_numbers,
)
from tests.tiers import deeply

BATCH = {"b0": 2, "v0": 2}


def evaluated(function, given):
    """`at_once` of a tree of `Named`, with NumPy's arrays."""
    found = at_once(function, given)
    return jax.tree.map(lambda x: Named(np.asarray(x.value), x.axes), found)


def listed(mask: DenseMask, size, block: tuple[int, int]) -> Listed:
    return evaluated(lambda mask: test_lists.listed(mask, size, block), mask)


@st.composite
def calls(draw):
    """Shapes, a spec of `Named` and blocks; each array has batch axes of its own."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    size = {a: draw(st.integers(1, 120)) for a in "ts"}
    numbers = ALL_ROWS, ALL_ROWS
    if draw(st.booleans()):  # a device's, of stripes
        stripe, parts = draw(st.sampled_from([32, 64])), draw(st.integers(1, 3))
        size = {a: stripe * draw(st.integers(1, 3)) for a in "ts"}
        ranks = (draw(st.integers(0, parts - 1)) for _ in "ts")
        firsts = (Named(np.int32(rank * stripe), ()) for rank in ranks)
        numbers = tuple(Numbering(first, stripe, parts) for first in firsts)

    def integers(low, high, *rows):
        axes = tuple(a for a in BATCH if draw(st.booleans())) + rows
        shape = [(BATCH | size)[a] for a in axes]
        return Named(rng.integers(low, high, shape, np.int32), axes)

    side = st.none() | st.integers(0, 120)
    masks = [Window(draw(side), draw(side)) for _ in range(draw(st.integers(0, 1)))]
    if draw(st.booleans()):
        lengths = (
            integers(0, size[a] + 1) if draw(st.booleans()) else None for a in size
        )
        masks.append(Lengths(*lengths))
    if draw(st.integers(0, 3)):
        ids = [integers(0, draw(st.integers(1, 9)), a) for a in size]
        if draw(st.booleans()):
            ids = [Named(np.sort(x.value), x.axes) for x in ids]
        masks.append(SegmentIds(*ids))
    heads = draw(st.sampled_from([(2, 2), (2, 1)]))
    size |= dict(zip("nk", heads, strict=True))
    if not draw(st.integers(0, 2)):
        axes = tuple(a for a in (*BATCH, "n", "t", "s") if draw(st.booleans()))
        block = st.sampled_from([16, 32, 48, 64])
        mask = DenseMask(Named(dense(rng, size, axes), axes))
        is_listed = numbers == (ALL_ROWS, ALL_ROWS) and draw(st.booleans())
        blocks = draw(block), draw(block)
        masks = [listed(mask, size, blocks)] if is_listed else [*masks, mask]
    offset = integers(-120, 120) if draw(st.booleans()) else None
    block = st.sampled_from([16, 32])
    blocks = Blocks(draw(block), draw(block), 8, 2)
    splits = draw(st.sampled_from([1, 1, 2, 4]))
    launch = Launch(blocks, None, PLAIN, interpret=False, splits=splits)
    spec = AttentionSpec(Score(1.0), tuple(masks), offset)
    spec = dataclasses.replace(spec, query_rows=numbers[0], key_rows=numbers[1])
    return size, spec, launch


def dense(rng, size, axes) -> np.ndarray:
    """Squares of kept and of dropped pairs, with a few that are not alike."""
    shape = [(BATCH | size)[a] for a in axes]
    cut = [16 if a in ("t", "s") else 1 for a in axes]
    mask = rng.random([-(-n // by) for n, by in zip(shape, cut, strict=True)]) < 0.7
    for axis, by in enumerate(cut):
        mask = np.repeat(mask, by, axis)
    mask = mask[tuple(map(slice, shape))]
    return mask ^ (rng.random(shape) < rng.choice([0.0, 0.001]))


def operands(size, spec: AttentionSpec) -> list[Named]:
    def struct(*axes):
        shape = [(BATCH | size | {"h": 16, "d": 16})[a] for a in axes]
        return Named(jax.ShapeDtypeStruct(shape, jnp.bfloat16), axes)

    q = struct("b0", "t", "n", "h")
    k, v = struct("b0", "s", "k", "h"), struct("v0", "b0", "s", "k", "d")
    return [q, k, v, *jax.tree.leaves(spec)]


def views(tree, layout: memory.TileGrid, array=np.asarray):
    return jax.tree.map(
        lambda x: memory.View(array(x.value), x.axes, layout.rows), tree
    )


def programs(spec: AttentionSpec, layout: memory.TileGrid, array=np.asarray):
    """What gives the tiles of a program by its number, as the kernel finds them.

    Args:
      array: makes arrays of NumPy's; for a traced number, JAX's.
    """
    visits = evaluated(lambda spec: visits_of(spec, layout), spec)
    visits = views(visits, layout, array)
    spec = program.with_end(views(spec.without_lists(), layout, array), layout)

    def tiles_of(number) -> Tiles:
        there = layout.at_tile(number)
        own, where = program.key_program(spec, there, visits)
        return Tiles.of(own, where, there, visits)

    return tiles_of


def kept_pairs(size, spec: AttentionSpec) -> np.ndarray:
    """[b0, v0, n, t, s]"""
    axes = (*BATCH, "n", "t", "s")
    rows, keys = np.arange(size["t"])[:, None], np.arange(size["s"])[None, :]

    def kept(spec):
        spec = jax.tree.map(lambda x: x.to(axes), spec)
        found = jnp.asarray([True, *spec.keep(rows, keys)][-1])
        return Named(found.reshape((1,) * (5 - found.ndim) + found.shape), axes)

    shape = (*BATCH.values(), *(size[a] for a in "nts"))
    return np.broadcast_to(evaluated(kept, spec).value, shape)


@pytest.mark.parametrize("examples", [3, *deeply(10)])
def test_programs_wait_for_those_before_them(examples):
    settings(max_examples=examples)(given(calls())(check_order))()


def test_operands_with_axes_of_their_own():
    """Where a block's keys end is of both batch axes; where they start is of one."""
    ids = [np.array([[0, 1, 1, 2, 2], [0, 1, 2, 2, 2]]), np.arange(57) // 8]
    lengths = np.array([[34, 23], [45, 8]], np.int32)
    query, key = (x.astype(np.int32) for x in ids)
    masks = (
        Lengths(None, Named(lengths, ("b0", "v0"))),
        SegmentIds(Named(query, ("b0", "t")), Named(key, ("s",))),
    )
    launch = Launch(Blocks(16, 32, 8, 2), None, PLAIN, interpret=False, splits=4)
    size = {"t": 5, "s": 57, "n": 2, "k": 1}
    check_order((size, AttentionSpec(Score(1.0), masks), launch))


def check_order(call):
    """On a CPU: of so many small operations each takes longer on a GPU."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        _check_order_here(*call)


def _check_order_here(size, spec, launch, sharing=None):
    layout = KeyGrid.of("dkv", operands(size, spec), launch, sharing=sharing)
    kept = kept_pairs(size, spec)
    rows, keys = launch.blocks.block_q, launch.blocks.block_kv
    missed = kept.copy()
    added = collections.Counter()
    met = np.zeros((*kept.shape[:2], size["t"]), int)
    tiles_of = programs(spec, layout, jnp.asarray)
    count = jax.jit(lambda number: tiles_of(number).count)

    @jax.jit
    def found(number, tile):
        tiles = tiles_of(number)
        place = tiles.place(tile)
        at = tiles.at(place)
        where = at["b0"], at["v0"], at["n"], at["t"].start, at["s"].start
        said = tiles.number(place), tiles.before(place), tiles.masked(place)
        return where, said, tiles.turn(place, 3), tiles.all_sums

    for number in range(layout.tiles):
        for tile in range(int(count(number))):
            where, said, turn, all_sums = jax.tree.map(int, found(number, tile))
            block, before, masked = said
            assert 0 <= block < all_sums
            assert before == added[block]
            added[block] += 1
            _, _, own, before = turn
            assert 0 <= own < 3 and before == added[block, own]
            added[block, own] += 1
            *element, head, first, start = where
            part = (*element, head, np.s_[first : first + rows])
            part = (*part, np.s_[start : start + keys])
            missed[part] = False
            met[(*element, part[3])] += head == 0
            if not masked:
                assert start + keys <= size["s"]
                assert kept[part].all()
    assert not missed.any()
    said = evaluated(
        lambda spec: blocks_of_keys_met(
            *(spec, layout.size, layout.rows, visits_of(spec, layout))
        ),
        spec,
    )
    said = np.broadcast_to(said.to((*BATCH, "t")), met.shape)
    np.testing.assert_array_equal(said, met)


def test_windows_of_several_heads():
    """One head comes after the other; the last block of keys has rows that are none."""
    spec = AttentionSpec(Score(1.0), (Window(30, None),))
    launch = Launch(Blocks(16, 32, 8, 2), None, PLAIN, interpret=False, splits=1)
    check_order(({"t": 57, "s": 57, "n": 2, "k": 1}, spec, launch))


def _of_documents() -> SegmentIds:
    ids = np.arange(48, dtype=np.int32) // 20
    return SegmentIds(Named(ids, ("t",)), Named(ids, ("s",)))


def _of_pairs() -> DenseMask:
    return DenseMask(Named(np.tril(np.ones((48, 48), bool)), ("t", "s")))


@pytest.mark.parametrize("mask", [_of_documents, _of_pairs])
def test_axes_that_ranges_do_not_depend_on(mask):
    """Only the scores ask for the offset, which each batch entry has its own."""
    offset = Named(np.int32([3, 5]), ("b0",))
    spec = AttentionSpec(Score(1.0), (mask(),), offset)
    launch = Launch(Blocks(16, 32, 8, 2), None, PLAIN, interpret=False, splits=1)
    check_order(({"t": 48, "s": 48, "n": 1, "k": 1}, spec, launch))


def _documents(*lengths: int) -> np.ndarray:
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def test_visits_of_documents():
    """Blocks of 4 rows, documents of 6 and 10: each meets its own."""
    ids = _documents(6, 10)
    spec = AttentionSpec(
        Score(1.0), (SegmentIds(Named(ids, ("t",)), Named(ids, ("s",))),)
    )
    size, rows = {"t": 16, "s": 16}, {"t": 4, "s": 4}
    found = evaluated(lambda spec: Visits.of(spec, size, rows), spec)
    bounds = [x.value.tolist() for x in found.blocks]
    assert bounds == [[0, 0, 1, 1], [0, 4, 2, 2], [1, 4, 4, 4], [2, 4, 4, 4]]
    before = np.array([[0, 0, 0, 0], [1, 1, 0, 0], [2, 2, 1, 1], [2, 3, 2, 2]])
    np.testing.assert_array_equal(found.before.value, before)
    assert found.before.axes == ("j", "i")
    assert size_of_counts(spec, size, rows) == found.before.value.nbytes


def test_counts_that_are_too_large(monkeypatch, any_size):
    with_numbers(monkeypatch, most_order_bytes=1)
    arrays, arguments = with_heads(by_name("segments"), 64).inputs(jnp.bfloat16)
    texts = []

    def ask(q, k, v):
        texts.append(explain(q, k, v, **arguments, **MOSAIC))
        return q

    lower_for_gpu(ask, *arrays)
    assert "to order the sums of dq takes" in texts[0]


@pytest.mark.parametrize("ids", [False, True])
def test_rows_that_no_keys_meet(ids):
    """The first block of queries stands before all keys; the last is padding."""
    masks = [Window(None, 0), Lengths(Named(np.int32([48, 40]), ("b0",)), None)]
    if ids:
        same = Named(np.zeros(64, np.int32), ("t",))
        masks.append(SegmentIds(same, same.renamed("t", "s")))
    spec = AttentionSpec(Score(1.0), tuple(masks), Named(np.int32(-16), ()))
    size, rows = {"t": 64, "s": 64, "b0": 2}, {"t": 16, "s": 16}

    def met(spec):
        visits = Visits.of(spec, size, rows) if ids else None
        return blocks_of_keys_met(spec, size, rows, visits)

    found = evaluated(met, spec).to(("b0", "t"))
    number = np.arange(64)
    count = np.where((number >= 16) & (number < 48), number // 16, 0)
    expected = np.broadcast_to(count, (2, 64))
    np.testing.assert_array_equal(np.broadcast_to(found, (2, 64)), expected)


MAPPED = [
    x for x in itertools.product((None, 0), (None, 1), (None, 0)) if x != (None,) * 3
]


@pytest.mark.parametrize(
    "axes", [MAPPED[-1], *deeply(*((MAPPED[i],) for i in (0, 1, 3, 4)))]
)
def test_lowers_under_vmap(axes, any_size):
    """Ids that are mapped or not, with arrays that are or not."""
    of_query, of_ids, of_offset = axes

    def mapped(axis, *shape):
        return shape if axis is None else (*shape[:axis], 3, *shape[axis:])

    x = jax.ShapeDtypeStruct(mapped(of_query, 2, 300, 2, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 300, 1, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct(mapped(of_ids, 2, 300), jnp.int32)
    offset = jax.ShapeDtypeStruct(mapped(of_offset), jnp.int32)

    def run(q, k, ids, offset):
        found, vjp = jax.vjp(lambda q, k: _packed(q, k, k, ids, offset), q, k)
        return found, vjp(found)

    run = jax.vmap(run, (of_query, None, of_ids, of_offset))
    assert lower_for_gpu(run, x, k, ids, offset).count("custom_call @mosaic_gpu") == 2


def _packed(q, k, v, ids, offset=0):
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    positions = {"is_causal": True, "query_offset": offset}
    return attention(q, k, v, **segments, **positions, **MOSAIC)


IDS = {
    "documents": lambda rng, t: np.sort(rng.integers(0, 6, (2, t))),
    "one": lambda rng, t: np.zeros((2, t)),
    "unsorted": lambda rng, t: rng.integers(0, 3, (2, t)),
    "blocks": lambda rng, t: np.repeat(rng.integers(0, 3, (2, t // 64)), 64, axis=1),
}


@on_hopper
@pytest.mark.parametrize(
    ("head", "heads", "parts"),
    [(64, (1, 1), 1), (128, (2, 1), None), (64, (2, 1), 1)],
    ids=["64_whole", "128_groups_in_parts", "64_groups_whole"],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ids", IDS)
def test_same_bits(
    ids, causal, head, heads, parts, multiprocessors, any_size, record_property
):
    """Where many programs add to the same blocks, each in its turn; and right ones."""
    if parts == 1:  # else divided, where programs are few
        multiprocessors(1)
    n, k = heads
    case = with_heads(by_name("plain"), head)
    sizes = {"batch": (2,), "t": 1024, "s": 1024, "n": n, "k": k}
    made = IDS[ids](np.random.default_rng(0), 1024).astype(np.int32)
    # Queries of a document without keys, whole blocks of them.
    of_queries = np.where(np.arange(1024) // 128 == 3, 99, made).astype(np.int32)
    arguments = {
        "query_segment_ids": of_queries,
        "key_value_segment_ids": made,
        "is_causal": causal,
    }
    case = dataclasses.replace(case, **sizes, arguments=lambda rng, case: arguments)
    arrays, _ = case.inputs(jnp.bfloat16)
    jax.clear_caches()

    @jax.jit
    def run(q, k, v):
        call = functools.partial(attention, **arguments, **MOSAIC)
        out, vjp = jax.vjp(call, q, k, v)
        return out, vjp(out)

    assert not np.any(np.float32(run(*arrays)[1][0][:, 384:512]))
    assert_same_bits(run, arrays, 30)
    check(case, "bfloat16", record_property)


@on_hopper
@pytest.mark.parametrize("of_ids", [None, 0])
def test_under_vmap(of_ids, any_size):
    """Ids that are mapped alone with the queries: about what a loop gives."""
    rng = np.random.default_rng(0)
    q, do = (
        jnp.asarray(rng.standard_normal((3, 2, 300, 2, 64)), "bfloat16") for _ in "ab"
    )
    k, v = (jnp.asarray(rng.standard_normal((2, 300, 1, 64)), "bfloat16") for _ in "kv")
    ids = np.sort(rng.integers(0, 5, (3, 2, 300))).astype(np.int32)

    def run(q, do, ids):
        _, vjp = jax.vjp(lambda *x: _packed(*x, ids), q, k, v)
        return vjp(do)

    own = ids if of_ids == 0 else ids[0]
    mapped = jax.vmap(run, (0, 0, of_ids))(q, do, own)
    for i in range(3):
        alone = run(q[i], do[i], own[i] if of_ids == 0 else own)
        for a, b in zip(alone, mapped, strict=True):
            np.testing.assert_allclose(
                np.float32(a), np.float32(b[i]), rtol=2**-6, atol=2**-6
            )


@on_hopper
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["plain", "causal", "segments"])
def test_keys_beyond_the_array(name, dtype, head, any_size, record_property):
    """All scores are so low that a key of zeros would have an infinite probability."""
    case = dataclasses.replace(with_heads(by_name(name), head), t=400, s=1000)
    (q, k, v), _ = case.inputs(dtype)
    q, k = q.at[..., 0].set(20), k.at[..., 0].set(-20 * head**0.5)
    check(case, dtype, record_property, arrays=(q, k, v))
