"""Mask atoms against literal matrices; block ranges against the masks they imply."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import DenseMask, Lengths, SegmentIds, Window
from pallas_kernels.core.positions import Numbering
from pallas_kernels.core.ranges import Range, block_ends
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from tests.core.programs import at_once
from tests.tiers import deeply


def matrix(text: str) -> np.ndarray:
    """Rows of 1 (kept) and . (masked)."""
    return np.array(
        [[x == "1" for x in row.split()] for row in text.split("\n") if row]
    )


def keep(atoms, t: int, s: int, offset: int = 0) -> np.ndarray:
    return kept_pairs(AttentionSpec(Score(1.0), tuple(atoms), offset), t, s)


def kept_pairs(spec: AttentionSpec, t: int, s: int) -> np.ndarray:
    kept = [True, *spec.keep(np.arange(t)[:, None], np.arange(s)[None, :])]
    return np.broadcast_to(kept[-1], (t, s))


LITERAL = [
    (
        [Window(None, 0)],
        0,
        """
1 . . .
1 1 . .
1 1 1 .
""",
    ),
    (
        [Window(None, 0)],
        1,
        """
1 1 . .
1 1 1 .
1 1 1 1
""",
    ),
    (
        [Window(1, 0)],
        0,
        """
1 . . .
1 1 . .
. 1 1 .
""",
    ),
    (
        [Window(0, 1)],
        -1,
        """
1 . . .
1 1 . .
. 1 1 .
""",
    ),
    (
        [Window(None, None)],
        0,
        """
1 1
1 1
""",
    ),
    (
        [Lengths(query=2, key_value=3)],
        0,
        """
1 1 1 .
1 1 1 .
. . . .
""",
    ),
    (
        [SegmentIds(np.array([[1], [1], [2]]), np.array([[1, 2, 2, 3]]))],
        0,
        """
1 . . .
1 . . .
. 1 1 .
""",
    ),
    (
        [DenseMask(np.array([[True, False, True]])), Window(None, 0)],
        0,
        """
1 . .
1 . .
1 . 1
""",
    ),
]


@pytest.mark.parametrize(("atoms", "offset", "text"), LITERAL)
def test_keep_is_the_literal_matrix(atoms, offset, text):
    expected = matrix(text)
    np.testing.assert_array_equal(keep(atoms, *expected.shape, offset), expected)


def test_range_keeps_python_integers():
    """What is empty for every block must be seen to be so while tracing."""
    rows = Range(0, 0, 64, 64) & Range(0, 0, 50, 50)
    assert rows == Range(0, 0, 50, 50)
    assert rows.blocks(16, 64) == Range(0, 0, 3, 4)
    assert Range(40, 40, 20, 20).blocks(16, 64).count == 0
    assert Range(24, 24, 24, 24).blocks(16, 64).count == 0


@pytest.mark.parametrize("bounds", [(1, 2, 4, 6), (2, 2, 4, 6), (1, 3, 4, 4)])
@pytest.mark.parametrize(
    "traced", [(), (0, 1, 2, 3), (3,), *deeply(((0, 1),), ((2, 3),))]
)
def test_fold_visits_full_blocks_then_the_edges(bounds, traced):
    def visit(masked, block, state):
        seen, count = state
        return seen.at[block].add(10 * count + (1 if masked else 2)), count + 1

    rows = Range(*(jnp.int32(x) if i in traced else x for i, x in enumerate(bounds)))
    seen, _ = rows.fold(visit, (jnp.zeros(7, jnp.int32), jnp.int32(1)))
    need_lo, full_lo, full_hi, need_hi = bounds
    order = [(b, 2) for b in range(full_lo, full_hi)]
    edges = (*range(need_lo, full_lo), *range(full_hi, need_hi))
    expected = np.zeros(7, np.int32)
    for i, (block, kind) in enumerate(order + [(b, 1) for b in edges]):
        expected[block] = 10 * (i + 1) + kind
    np.testing.assert_array_equal(seen, expected)


def _visited(rows: Range, fold: str) -> list[tuple[int, bool]]:
    """(block, masked) in order; `fold` is a method of `Range`."""

    def visit(masked, block, state):
        seen, count = state
        return seen.at[count].set(jnp.asarray([block, masked, 1])), count + 1

    start = jnp.zeros((9, 3), jnp.int32), jnp.int32(0)
    seen, _ = getattr(rows, fold)(visit, start)
    return [(int(block), bool(masked)) for block, masked, used in seen if used]


@pytest.mark.parametrize(
    ("bounds", "edges"),
    [
        ((0, 0, 4, 4), [0]),  # no mask: the first becomes an edge
        ((1, 2, 4, 6), [1, 4, 5]),
        ((0, 0, 3, 4), [3]),
        ((2, 2, 2, 5), [2, 3, 4]),
        ((3, 3, 3, 3), []),
    ],
)
def test_with_an_edge(bounds, edges):
    needed = range(bounds[0], bounds[3])
    for one in (1, jnp.int32(1)):
        rows = Range(*bounds).with_an_edge(one)
        assert _visited(rows, "fold_edges") == [(b, True) for b in edges]
        full = [b for b in needed if b not in edges]
        assert _visited(rows, "fold_full") == [(b, False) for b in full]
        again = _visited(rows.all_edges(), "fold_edges")
        assert again == [(b, True) for b in needed]
        assert _visited(rows.all_edges(), "fold_full") == []


def test_with_an_edge_where_a_mask_may_be():
    """Where bounds are data the last block: a length says that it is there."""
    rows = Range(0, 0, jnp.int32(4), jnp.int32(4)).with_an_edge(1)
    assert _visited(rows, "fold_edges") == [(3, True)]
    assert _visited(rows, "fold_full") == [(b, False) for b in range(3)]


sizes = st.integers(1, 50)
side = st.none() | st.integers(0, 40)
blocks = st.sampled_from([4, 8, 16])


@st.composite
def numberings(draw):
    """All rows, those from one on, or stripes of them."""
    first = draw(st.none() | st.integers(0, 40))
    if draw(st.booleans()):
        return Numbering(first)
    stripe = draw(st.sampled_from([1, 3, 8, 16]))
    return Numbering(first, stripe, draw(st.integers(1, 4)))


@st.composite
def specs(draw):
    """A spec of random atoms for one head, and its sizes."""
    t, s = draw(sizes), draw(sizes)
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    atoms = []
    if draw(st.booleans()):
        atoms.append(Window(draw(side), draw(side)))
    if draw(st.booleans()):
        query = draw(st.none() | st.integers(0, t))
        atoms.append(Lengths(query, draw(st.none() | st.integers(0, s))))
    if draw(st.booleans()):
        q, kv = (rng.integers(0, 4, n).astype(np.int32) for n in (t, s))
        if draw(st.booleans()):
            q, kv = np.sort(q), np.sort(kv)
        atoms.append(SegmentIds(Named(q, ("t",)), Named(kv, ("s",))))
    if draw(st.booleans()):
        shape = (draw(st.sampled_from([1, t])), draw(st.sampled_from([1, s])))
        blockwise = rng.random((-(-t // 8), -(-s // 8))) < 0.5
        dense = np.kron(blockwise, np.ones((8, 8), bool))[: shape[0], : shape[1]]
        axes = ("t" if shape[0] == t else None, "s" if shape[1] == s else None)
        atoms.append(DenseMask(Named(dense, axes)))
    offset = draw(st.integers(-60, 60))
    spec = AttentionSpec(
        Score(1.0),
        tuple(atoms),
        offset,
        query_rows=draw(numberings()),
        key_rows=draw(numberings()),
    )
    return spec, t, s


def test_numbers_of_striped_rows():
    rows = Numbering(3, stripe=2, parts=3)
    assert [int(rows.at(i)) for i in range(5)] == [3, 4, 9, 10, 15]
    assert [int(rows.before(n)) for n in (-1, 3, 4, 5, 7, 9, 10, 15)] == [
        *(0, 0, 1, 2, 2, 2, 3, 4)
    ]
    assert int(rows.after(1, 2)) == 6
    groups = Numbering(32, stripe=16, parts=3).of_groups(8)
    assert [int(groups.at(i)) for i in range(5)] == [4, 5, 10, 11, 16]


@given(st.data())
def test_numberings_count_what_comes_before(data):
    rows = data.draw(numberings())
    numbers = [int(rows.at(i)) for i in range(60)]
    assert numbers == sorted(set(numbers))
    number = data.draw(st.integers(numbers[0], numbers[-1]))
    assert int(rows.before(number)) == sum(n < number for n in numbers)


@pytest.mark.parametrize("examples", [6, *deeply(40)])
def test_block_ranges_are_sound(examples):
    """Nothing is kept outside `need`, everything inside `full`, in both directions."""
    search = settings(max_examples=examples)(
        given(specs(), blocks, blocks)(_check_soundness)
    )
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        search()


def _check_soundness(made, block_q, block_kv):
    spec, t, s = made

    def loaded(leaf):
        if not isinstance(leaf, Named):
            return leaf
        return np.asarray(leaf.to(("t", "s")))

    dense = kept_pairs(jax.tree.map(loaded, spec), t, s)

    def table_at(table, index):
        def at(leaf):
            return int(np.asarray(leaf.value)[index if leaf.axes[-1] else 0])

        return None if table is None else Range(*map(at, table))

    for rows, size, block, other, other_block, method, looped in (
        (dense, t, block_q, s, block_kv, "kv_blocks", "s"),
        (dense.T, s, block_kv, t, block_q, "q_blocks", "t"),
    ):
        sizes = looped, block_q, block_kv, t, s
        tabled = at_once(lambda sizes=sizes: spec.with_table(*sizes))
        for index in range(-(-size // block)):
            lo, hi = index * block, min((index + 1) * block, size)
            table = table_at(tabled.table, index)
            at = dataclasses.replace(spec, table=table)
            found = getattr(at, method)(lo, hi, other, other_block)
            need_lo, full_lo, full_hi, need_hi = map(int, found)
            assert 0 <= need_lo <= full_lo <= full_hi <= need_hi
            walked = [tuple(map(int, found.at(n))) for n in range(int(found.count))]
            edges = (*range(need_lo, full_lo), *range(full_hi, need_hi))
            full = [(0, n) for n in range(full_lo, full_hi)]
            assert walked == [*((1, n) for n in edges), *full]
            kept = rows[lo:hi]
            assert not kept[:, : need_lo * other_block].any()
            assert not kept[:, need_hi * other_block :].any()
            assert full_lo == full_hi or full_hi * other_block <= other
            assert kept[:, full_lo * other_block : full_hi * other_block].all()


@pytest.mark.parametrize("window", [(None, 0), (16, 0), (8, 8)])
def test_ranges_are_tight_for_windows(window):
    """No block without a kept pair is visited, none wholly kept is masked."""
    spec, size, block = AttentionSpec(Score(1.0), (Window(*window),)), 96, 8
    dense = keep(spec.masks, size, size)
    for index in range(size // block):
        lo, hi = index * block, (index + 1) * block
        found = spec.kv_blocks(lo, hi, size, block)
        tiles = dense[lo:hi].reshape(block, -1, block)
        some, every = tiles.any(axis=(0, 2)), tiles.all(axis=(0, 2))
        assert int(found.need_hi - found.need_lo) == some.sum()
        assert int(found.full_hi - found.full_lo) == every.sum()


@given(st.data())
@settings(max_examples=50)
def test_blocks_meet_from_both_sides(data):
    """A block meets another if and only if that one meets it, and if pairs are kept."""
    draw = data.draw
    t, s = (draw(st.integers(1, 90)) for _ in range(2))
    numbers = {}
    if draw(st.booleans()):  # a device's, of stripes
        stripe, parts = 64, draw(st.integers(1, 3))
        t, s = (stripe * draw(st.integers(1, 3)) for _ in range(2))
        ranks = (draw(st.integers(0, parts - 1)) for _ in range(2))
        of_both = (Numbering(rank * stripe, stripe, parts) for rank in ranks)
        numbers = dict(zip(("query_rows", "key_rows"), of_both, strict=True))
    side = st.none() | st.integers(0, 100)
    windows = [Window(draw(side), draw(side)) for _ in range(draw(st.integers(0, 2)))]
    lengths = [draw(st.none() | st.integers(0, n)) for n in (t, s)]
    offset = draw(st.integers(-120, 120))
    rows, keys = (draw(st.sampled_from([4, 16, 64])) for _ in range(2))
    masks = (*windows, Lengths(*lengths))
    spec = AttentionSpec(Score(1.0), masks, offset, **numbers)
    _check_both_sides(spec, t, s, rows, keys)


def test_blocks_beyond_a_window_meet_from_both_sides():
    """Queries from 96 on look back to key 85, and the last one is 82."""
    spec = AttentionSpec(Score(1.0), (Window(11, 0),))
    _check_both_sides(spec, 112, 83, 16, 16)


def _check_both_sides(spec: AttentionSpec, t: int, s: int, rows: int, keys: int):
    kept = kept_pairs(spec, t, s)
    q_limit = spec.q_limit(t)
    met = {}
    for j in range(-(-s // keys)):
        span = j * keys, min(j * keys + keys, s)
        first, end = spec.query_blocks_met(*span, t, rows)
        assert first <= end
        met[j] = set(range(first, end))
        pairs = kept[:, slice(*span)].any(axis=1)
        assert {i // rows for i in np.flatnonzero(pairs)} <= met[j]
    for i in range(-(-q_limit // rows)):
        span = i * rows, min(i * rows + rows, t)
        first, end = spec.key_blocks_met(*span, s, keys)
        assert {j for j in met if i in met[j]} == set(range(first, end))


@given(st.data())
@settings(max_examples=200)
def test_sides_that_reach_every_row_have_no_bound(data):
    t, s = (data.draw(st.integers(1, 12)) for _ in range(2))
    side = st.none() | st.integers(0, 14)
    window = Window(data.draw(side), data.draw(side))
    found = window.among(t, s)
    np.testing.assert_array_equal(
        keep([window], t, s), keep([found] if found else [], t, s)
    )
    assert found is None or found.left is None or found.left < t - 1
    assert found is None or found.right is None or found.right < s - 1


@pytest.mark.parametrize(
    ("block", "size"), [(16, 40), (16, 48), (16, 5), (128, 320), (128, 128), (64, 65)]
)
def test_ends_of_blocks_are_no_minima(block, size):
    """On Hopper ptxas up to 13.3 makes wrong tables of these (benchmarks/lab/145)."""
    first, end = block_ends(block, size)
    assert first.dtype == end.dtype == np.int32
    rows = [min(block, size - x) for x in range(0, size, block)]
    np.testing.assert_array_equal(first, range(0, size, block))
    np.testing.assert_array_equal(end - first, rows)
    traced = jax.make_jaxpr(lambda: block_ends(block, size))()
    operations = {one.primitive.name for one in traced.eqns}
    assert "iota" in operations and not operations & {"min", "max", "clamp"}
