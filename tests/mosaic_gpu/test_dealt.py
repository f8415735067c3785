"""What threads of the Mosaic GPU kernels make for their own pairs, on a CPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import dropout as core
from pallas_kernels.core.arithmetic import PLAIN
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import DenseMask, Tiling
from pallas_kernels.core.positions import Numbering, Positions
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.mosaic_gpu import dropout, gather, pairwise
from tests.mosaic_gpu.test_visits import evaluated
from tests.tiers import deeply

THREADS = 128
PRODUCT = plgpu.Layout.WGMMA


def dealt(x: np.ndarray, layout) -> np.ndarray:
    """[threads, registers, elements] of an array, as Mosaic GPU deals it."""
    layout = layout.to_mgpu()
    for tile in layout.tiling.tiles:
        kept = x.ndim - len(tile)
        cut = [(n // t, t) for n, t in zip(x.shape[kept:], tile, strict=True)]
        x = x.reshape(*x.shape[:kept], *itertools.chain(*cut))
        outer, inner = (range(kept + i, x.ndim, 2) for i in (0, 1))
        x = x.transpose(*range(kept), *outer, *inner)
    lost, sizes = [], []
    for dim in (*layout.warp_dims, *layout.lane_dims):
        if isinstance(dim, int):
            lost.append(dim)
            sizes.append(x.shape[dim])
        else:
            x = np.broadcast_to(x, (dim.times, *x.shape))
            lost.append(-x.ndim)
            sizes.append(dim.times)
    x = np.moveaxis(x, lost, range(len(lost)))
    return x.reshape(THREADS, -1, x.shape[-1])


def _wide_product(a: np.ndarray, b: np.uint32):
    product = np.uint64(a) * np.uint64(b)
    return np.uint32(product >> np.uint64(32)), np.uint32(product)


@pytest.mark.parametrize("order", [("t", "s"), ("s", "t")])
@pytest.mark.parametrize("striped", [False, True])
@pytest.mark.parametrize("columns", [96, 80])
def test_bits_of_threads(order, striped, columns):
    """The bits of every other backend, made of as few calls of the cipher."""
    rows = dict(zip(order, ((128, 64), (64, columns)), strict=True))
    numbering = Numbering(jnp.int32(32), stripe=32, parts=3) if striped else Numbering()
    numberings = dict.fromkeys("ts", numbering)
    seed = np.uint32([[123456789], [987654321]])
    own = core.Dropout(tuple(jnp.uint32(x[0]) for x in seed), 1 << 15)
    whole = jax.jit(lambda: own.bits(rows, numberings, order, PLAIN))()

    count = core.rows_of_calls(rows, order)
    assert count == {"t": 2, "s": 4 if order[0] == "t" and columns == 96 else 2}
    vectors = []
    for axis, name in enumerate(order):
        start, size = rows[name]

        def numbers_of(group, name=name, start=start):
            group = dropout.groups_of_rows(group, count[name])
            group = core.first_group(start, count[name]) + group
            return core.numbers_of_calls(name, group, numberings[name], count[name])

        numbers = jax.jit(numbers_of)(np.arange(size, dtype=np.int32))
        numbers = (dealt(np.asarray(x), PRODUCT.reduce(1 - axis)) for x in numbers)
        # [register][place][number]: each an array over all threads.
        vectors.append(np.stack(list(numbers), -1).transpose(1, 2, 3, 0))
    row, columns = list(vectors[0][0, 0]), [[list(x) for x in y] for y in vectors[1]]
    found = dropout.of_thread(
        row, columns, count, *seed, order, _wide_product, core.turned
    )
    np.testing.assert_array_equal(
        np.moveaxis(np.asarray(found), -1, 0), dealt(np.asarray(whole), PRODUCT)
    )


@pytest.mark.parametrize("name", ["t", "s"])
def test_words_of_masks(name):
    """A thread's words have a bit for each of its pairs, in the order it has them."""
    rows = np.random.default_rng(0).random((64, 128)) < 0.5
    mask = rows if name == "s" else rows.T
    words = jax.jit(
        lambda mask: pairwise.Packed.of(Named(mask, ("t", "s")), name).value
    )(mask)
    words = np.asarray(words if name == "s" else words.T, np.int32)
    pairs = dealt(rows, PRODUCT)  # by two neighbours, of rows r and r + 8 in turn
    for thread in range(THREADS):
        first = thread // 32 * 16 + thread % 32 // 4
        own = words[[first, first + 8], thread % 4 :: pairwise.WORDS]
        bits = own[..., None] >> np.arange(16) & 1
        expected = pairs[thread].reshape(-1, 2, 2).swapaxes(0, 1)
        np.testing.assert_array_equal(bits.reshape(expected.shape), expected)


@pytest.mark.parametrize("columns", ["t", "s"])
@pytest.mark.parametrize(
    "axes",
    [
        ("b0", "t", "s", "n"),
        *deeply((("t", "s"),), (("n", "s", "t"),), (("t", "s", "v0"),)),
    ],
)
def test_what_words_say_of_a_mask(columns, axes):
    """The keys and blocks that the mask itself has, but for a last block's `all`."""
    size = {"b0": 2, "v0": 2, "n": 3, "t": 300, "s": 450}
    shape = [size[a] for a in axes]
    place = dict(zip(axes, np.indices(shape, sparse=True), strict=True))
    t, s = place["t"], place["s"]
    mask = np.random.default_rng(1).random(shape) < 0.5
    mask = (mask | (t < 64)) & ~((t > 127) & (s < 128)) & (s != 130) & (s != 449)
    spec = AttentionSpec(Score(1.0), (DenseMask(Named(mask, axes)),))
    tiling = Tiling(64, 128, 300, 450)

    def said(spec):
        (plain,), (packed,) = spec.masks, pairwise.in_words(spec, columns).masks
        assert packed.mask.shape == mask.shape and packed.mask.dtype == bool
        both = packed, plain
        kept = [x.attended_keys(Positions(), 450) for x in both]
        return kept, [x.block_relation(tiling) for x in both]

    (kept, expected), relations = evaluated(said, spec)
    assert set(kept.axes) == set(expected.axes)
    np.testing.assert_array_equal(kept.to(expected.axes), expected.value)
    assert np.sum(~kept.value) in (2, 4)
    found, expected = relations
    assert found.some.axes == expected.some.axes == found.all.axes
    np.testing.assert_array_equal(found.some.value, expected.some.value)
    exact = np.array(expected.all.value)
    exact[..., -1, :] = exact[..., :, -1] = False
    assert np.any(exact) and np.any(~expected.some.value)
    assert np.all(found.all.value <= expected.all.value)
    np.testing.assert_array_equal(found.all.value[..., :-1, :-1], exact[..., :-1, :-1])


@pytest.mark.parametrize("transposed", [False, True])
def test_diagonals_of_threads(transposed):
    """From those of its first element a thread knows those of all others."""
    rows, columns = np.indices((64, 128))
    found = dealt(columns - rows if transposed else rows - columns, PRODUCT)
    for n in range(found.shape[1]):
        own = gather.diagonals_of_thread(n % 2 - n // 2, transposed=transposed)
        np.testing.assert_array_equal(found[:, n], found[:, 0, :1] + np.array(own))
