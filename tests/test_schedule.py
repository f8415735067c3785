"""Which tiles the programs of a Mosaic GPU kernel go through."""

import numpy as np
import pytest

from pallas_kernels.core.axes import Named
from pallas_kernels.core.mask import Lengths, SegmentIds, Window
from pallas_kernels.core.score import Score
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.mosaic_gpu.schedule import (
    MOST_ROUNDS,
    Schedule,
    has,
    has_last,
    has_next,
)


@pytest.mark.parametrize("count", [1, 3, 114, 132])
@pytest.mark.parametrize("blocks", [1, 2, 5, 16, 64, 129])
@pytest.mark.parametrize("heads", [1, 3, 32, 128])
def test_schedule(heads, blocks, count):
    """Every tile once, and programs whose causal tiles sum to about as much."""
    tiles = heads * blocks
    schedule = Schedule.of(tiles, count, alike=True)
    assert schedule.programs == tiles or schedule.programs % count == 0
    assert schedule.most_rounds <= MOST_ROUNDS
    if tiles <= MOST_ROUNDS * count:
        assert schedule.programs <= count

    dealt = [
        [int(schedule.tile(p, r)) for r in range(MOST_ROUNDS) if has(rounds, r)]
        for p in range(schedule.programs)
        for rounds in [int(schedule.rounds(p))]
    ]
    np.testing.assert_array_equal(np.sort(np.concatenate(dealt)), range(tiles))
    lengths = blocks - np.arange(tiles) // heads  # the longest first
    sums = np.array([lengths[own].sum() for own in dealt])
    assert sums.max() - sums.mean() <= blocks


def test_schedule_of_unknown_work():
    schedule = Schedule.of(1000, 132, alike=False)
    assert schedule.programs == 1000 and schedule.most_rounds == 1


def test_sets_of_rounds():
    rounds = (1 << MOST_ROUNDS) - 1 - 0b100
    for r in range(MOST_ROUNDS):
        assert has(rounds, r) == (r != 2)
        assert has_next(rounds, r) == (r + 1 != 2 and r + 1 < MOST_ROUNDS)
        assert has_last(np.int32(rounds), np.int32(r)) == (r - 1 != 2 and r > 0)


FOUR = np.zeros(4, np.int32)


@pytest.mark.parametrize(
    ("masks", "offset", "sorted_"),
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
def test_rows_are_sorted(masks, offset, sorted_):
    spec = AttentionSpec(Score(1.0), masks, offset)
    assert spec.rows_are_sorted == sorted_
