"""Lists of blocks: what they number, and how programs walk them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import _api, make_block_mask
from pallas_kernels.core.axes import Named
from pallas_kernels.core.lists import BlockList, number_of
from pallas_kernels.core.masks import Listed, Tiling
from pallas_kernels.core.positions import Numbering, Positions
from tests.core.programs import at_once
from tests.core.test_pointwise import boolean
from tests.tiers import deeply

SEEDS = (1, 10, 31)  # of `test_blocks_of_other_rows`
CPU = jax.local_devices(backend="cpu")[0]


@dataclasses.dataclass
class Elements:
    """As `layout.Elements`, of an array."""

    array: np.ndarray

    def number(self, index):
        is_traced = isinstance(index, jax.core.Tracer)
        return (jnp.asarray(self.array) if is_traced else self.array)[index]


def random_mask(rng, t: int, s: int) -> np.ndarray:
    """Rectangles that are kept, and pairs that are not as their rectangle is."""
    size = rng.integers(1, 40, 2)
    shape = [-(-n // x) for n, x in zip((t, s), size, strict=True)]
    mask = rng.random(shape) < rng.choice([0.0, 0.3, 0.7, 1.0])
    for axis, n in enumerate(size):
        mask = np.repeat(mask, n, axis)
    return mask[:t, :s] ^ (rng.random((t, s)) < rng.choice([0.0, 0.002]))


def codes_of(kept: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    """0, 1 or 2 of each block of [t, s]: none of its pairs is kept, some are, all."""
    rows, keys = kept.shape
    blocks = [
        [kept[i : i + block_q, j : j + block_kv] for j in range(0, keys, block_kv)]
        for i in range(0, rows, block_q)
    ]
    return np.array([[int(x.any()) + int(x.all()) for x in row] for row in blocks])


def listed(mask, size, block: tuple[int, int]) -> Listed:
    """A mask with its lists, in blocks of so many queries and keys."""
    tiling = Tiling(*block, size["t"], size["s"])
    return Listed.of(mask, mask.block_relation(tiling), tiling)


def check_list(found: BlockList, code: np.ndarray) -> None:
    """That it numbers blocks as their codes [own, others] say."""
    code = code.copy()
    if found.size % found.visited:
        code[:, -1] = np.minimum(code[:, -1], 1)
    order = np.asarray(number_of(found.order.value)).reshape(code.shape)
    np.testing.assert_array_equal(np.asarray(found.codes().value), code)
    for row, numbers, edges, count in zip(
        code, order, found.edges.value, found.count.value, strict=True
    ):
        expected = [np.flatnonzero(row == x) for x in (1, 2, 0)]
        np.testing.assert_array_equal(numbers, np.concatenate(expected))
        assert (edges, count) == (len(expected[0]), (row > 0).sum())


@pytest.mark.parametrize("seeds", [4, *deeply(1000)])
def test_lists_are_what_masks_keep(seeds):
    """In both directions, of shapes that blocks do not divide."""
    shapes = [(100, 120), (33, 200)]
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        (t, s), block = shapes[seed % 2], [(16, 48), (32, 16)][seed % 2]
        kept = random_mask(rng, t, s)
        made = make_block_mask(None, None, None, t, s, mask=kept, block_size=block)
        mask, _ = made.named()
        code = codes_of(kept, *block)
        check_list(mask.keys, code)
        check_list(mask.queries, code.T)


@pytest.mark.parametrize("seeds", [1, *deeply(30)])
def test_lists_of_functions_are_exact(seeds):
    """What intervals leave open is evaluated: no block is visited in vain."""
    functions = [boolean(np.random.default_rng(seed), 2) for seed in range(seeds)]
    # Of rows beyond the last alone, which intervals cannot tell.
    functions.append(lambda b, h, q, kv: (q ^ (kv // 64)) >= 24)
    for function in functions:
        made = make_block_mask(function, 2, 2, 24, 30, block_size=16)
        mask, _ = made.named()
        at = np.indices((2, 2, 24, 30), dtype=np.int32)
        kept = np.asarray(jax.jit(jnp.vectorize(function))(*at))
        found = mask.keys.codes().to(("b0", "n", "own", "others"))
        found = np.broadcast_to(found, (2, 2, *found.shape[2:]))
        for b, h in np.ndindex(2, 2):
            code = codes_of(kept[b, h], 16, 16)
            code[:, -1] = np.minimum(code[:, -1], 1)  # beyond 30 keys
            np.testing.assert_array_equal(found[b, h], code)


def visits(walk, take) -> list:
    """(whether a block may be masked, its number), as `at` or `in_order` gives them."""
    return [tuple(map(int, take(np.int32(i)))) for i in range(int(walk.count))]


@pytest.mark.parametrize("seeds", [8, *deeply(300)])
def test_walks_are_those_of_the_kernels_blocks(seeds):
    """Parts of the list's blocks, but none beyond the rows; edges come first."""
    with jax.default_device(CPU):
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            # The first: a full block, and one that ends beyond the rows.
            drawn = _random_list(rng) if seed else (3, np.int32([[0, 1], [2, 1]]), 56)
            found = _walks(*drawn, own=int(rng.integers(0, 2)) if seed else 1)
            _check_walks(rng, *found)
            if seed < 2:
                _check_folds(found[0], found[-1])


def _random_list(rng) -> tuple[int, np.ndarray, int]:
    """Blocks of 16 rows in one of the list, codes, and rows."""
    parts, others = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    size = int(rng.integers((others - 1) * parts * 16 + 1, others * parts * 16 + 1))
    code = np.int32(rng.integers(0, 3, (2, others)))
    if not rng.integers(0, 3):
        code[:] = rng.choice([0, 1, 2])
    return parts, code, size


def _walks(parts: int, code: np.ndarray, size: int, own: int):
    """Of a block of own rows, in blocks of 16 rows: by `at` and by `in_order`.

    And the code of each of these blocks.
    """
    visited = 16 * parts
    make = functools.partial(BlockList.of, own=32, visited=visited, size=size)
    arrays = at_once(make, Named(np.array(code), ("i", "j")))
    listed = jax.tree.map(lambda x: Elements(np.asarray(x.value)), arrays)
    if size % visited:
        code[:, -1] = np.minimum(code[:, -1], 1)
    first = np.int32(own * 32 + 16)
    walks = (listed.read(in_order=x).walk(first, 16) for x in (False, True))
    return *walks, np.repeat(code[own], parts)[: -(-size // 16)]


def _check_walks(rng, walk, in_order, fine: np.ndarray) -> None:
    edges, full = ([int(x) for x in np.flatnonzero(fine == n)] for n in (1, 2))
    expected = [*((1, x) for x in edges), *((0, x) for x in full)]
    assert visits(walk, walk.at) == expected
    ascending = sorted(expected, key=lambda x: x[1])
    assert visits(in_order, in_order.in_order) == ascending
    assert int(walk.edges) == len(edges) and bool(walk.any_full) == bool(full)
    for number, value in enumerate(fine):
        one = walk.only(np.int32(number))
        assert (int(one.count), int(one.edges)) == (value > 0, value == 1)
    count = int(rng.integers(2, 5))
    pieces = [walk.part(np.int32(i), count) for i in range(count)]
    found = [visits(x, x.at) for x in pieces]
    assert [y for x in found for y in x] == expected
    assert [int(x.edges) for x in pieces] == [sum(m for m, _ in x) for x in found]
    all_edges = [(1, x) for _, x in expected]
    pieces = [in_order.part(np.int32(i), count) for i in range(count)]
    found = [y for x in pieces for y in visits(x, x.in_order)]
    assert found == ascending
    assert visits(walk, walk.all_edges().at) == all_edges
    found = in_order.all_edges().part(np.int32(0), 2)
    assert all(masked for masked, _ in visits(found, found.in_order))
    assert visits(walk, walk.all_edges(jnp.int32(0)).at) == expected
    first = walk.with_an_edge(1)
    with_edge = expected if edges else all_edges[:1] + expected[1:]
    assert visits(walk, first.at) == with_edge
    more = walk.with_a_block()
    found = visits(more, more.at)
    assert found == expected or (not expected and len(found) == 1 and found[0][0])


def _check_folds(walk, fine: np.ndarray) -> None:
    folded = walk.fold_full(
        lambda masked, x, state: state.at[x].add(1 - masked), jnp.zeros(99, int)
    )
    folded = walk.fold_edges(lambda masked, x, state: state.at[x].add(9), folded)
    np.testing.assert_array_equal(
        folded[: fine.size], np.where(fine == 2, 1, 9 * (fine == 1))
    )


# A run of rows, and stripes, of which blocks straddle those of the lists.
@pytest.mark.parametrize("seeds", [SEEDS, *deeply(range(200))])
def test_blocks_of_other_rows(seeds):
    """Lists of all rows, for other blocks, and for a device's rows: they miss no pair.

    Where rows are runs that a list's blocks divide they are exact.
    """
    for seed in seeds:
        _check_other_rows(seed)


def _check_other_rows(seed: int) -> None:
    t, s = 96, 128
    rng = np.random.default_rng(seed)
    kept, block = random_mask(rng, t, s), [(16, 32), (32, 16), (48, 64)][seed % 3]
    make = functools.partial(make_block_mask, None, None, None, t, s, block_size=block)
    mask, _ = jax.jit(lambda kept: make(mask=kept))(kept).named()
    tiles = [int(rng.choice([16, 32, 48])) for _ in range(2)]
    numbers = [_numbering(rng, n) for n in (t, s)]
    rows = [np.asarray(x.at(np.arange(n))) for x, n in numbers]
    named = (
        x
        if x.first is None
        else dataclasses.replace(x, first=Named(jnp.int32(x.first), ()))
        for x, _ in numbers
    )
    tiling = Tiling(*tiles, *(n for _, n in numbers), Positions(0, *named))
    some, every = at_once(
        lambda: [x.to(("i", "j")) for x in mask.block_relation(tiling)]
    )
    code = codes_of(kept[np.ix_(*rows)], *tiles)
    assert np.all(some | (code == 0)) and np.all(~every | (code == 2))
    if block == (16, 32) and tiles == [16, 32]:
        is_run = all(x.first is None for x, _ in numbers)
        assert not is_run or np.all(some == (code > 0))


def _numbering(rng, size: int) -> tuple[Numbering, int]:
    """Of all rows, of a run of them, or of stripes; how many rows there are."""
    kind = rng.integers(0, 3)
    if kind == 0:
        return Numbering(), size
    if kind == 1:
        first = int(rng.integers(0, size // 2))
        return Numbering(first), int(rng.integers(1, size - first))
    stripe = int(rng.choice([8, 16]))
    return Numbering(int(rng.integers(0, 2)) * stripe, stripe, 2), size // 2


RUNS = {
    "causal": (lambda b, h, q, kv: q >= kv, True),
    "window": (lambda b, h, q, kv: (q >= kv) & (q - kv < 9), True),
    "two_sided": (lambda b, h, q, kv: abs(kv - q) <= 4 << h, True),
    "prefix": (lambda b, h, q, kv: (kv <= q) | (kv < LENGTHS[b]), True),
    "rows_of_an_image": (lambda b, h, q, kv: abs(q // 8 - kv // 8) <= 1, True),
    "not_before": (lambda b, h, q, kv: ~(q < kv) & (2 * kv != 5 * b), False),
    "global_keys": (lambda b, h, q, kv: (q - kv < 9) & ((q >= kv) | (kv < 3)), True),
    "window_and_global_keys": (lambda b, h, q, kv: (abs(q - kv) < 9) | (kv < 3), False),
    "outside": (lambda b, h, q, kv: abs(q - kv) > 4, False),
    "dilated": (lambda b, h, q, kv: (q - kv) % 3 == 0, False),
    "of_data": (lambda b, h, q, kv: IDS[b, q] <= IDS[b, kv], False),
}
LENGTHS = jnp.array([3, 9], jnp.int32)
IDS = jnp.zeros((2, 30), jnp.int32)


@pytest.mark.parametrize("name", RUNS)
def test_masks_that_keep_runs_have_ranges(name):
    function, keeps_runs = RUNS[name]
    q, kv = jnp.zeros((2, 24, 2, 16)), jnp.zeros((2, 30, 2, 16))
    spec = _api.given(q, kv, kv, mask_mod=function).checked().spec
    assert spec.lists_blocks != keeps_runs
