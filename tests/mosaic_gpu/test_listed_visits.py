"""The order of additions where programs visit what lists of blocks number."""

import numpy as np
import pytest

from pallas_kernels.configs import Blocks
from pallas_kernels.core import visits
from pallas_kernels.core.arithmetic import PLAIN
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import DenseMask, SegmentIds
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.core.visits import Sharing
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import measured
from pallas_kernels.mosaic_gpu.hopper import tuning
from tests.mosaic import with_numbers
from tests.mosaic_gpu.test_turns import times
from tests.mosaic_gpu.test_visits import check_order, dense, listed
from tests.tiers import deep


@pytest.mark.parametrize(
    "block",
    [
        pytest.param((32, 64), id="larger"),
        pytest.param((16, 32), id="as_large", marks=deep),
        pytest.param((48, 48), id="of_other_rows"),
    ],
)
def test_blocks_of_lists(block):
    """Larger than the kernel's, as large, and of rows that it does not divide."""
    size = {"t": 72, "s": 90, "n": 2, "k": 1}
    mask = dense(np.random.default_rng(0), size, ("b0", "t", "s"))
    mask = DenseMask(Named(mask, ("b0", "t", "s")))
    spec = AttentionSpec(Score(1.0), (listed(mask, size, block),))
    launch = Launch(Blocks(16, 32, 8, 2), None, PLAIN, interpret=False, splits=2)
    check_order((size, spec, launch))


@pytest.mark.parametrize("block", [32, pytest.param(64, marks=deep)])
def test_keys_that_all_attend_to(block, monkeypatch, multiprocessors):
    """A window with global keys: programs do not wait for the one with most visits.

    Rows are so long that heads come one after the other.
    """
    multiprocessors(16)
    with_numbers(monkeypatch, cached_query_bytes=1)
    rows = np.arange(1024)
    apart = rows[:, None] - rows
    mask = (apart >= 0) & ((apart < 64) | (rows < 20))
    mask = DenseMask(Named(mask, ("t", "s")))
    size = {"t": 1024, "s": 1024, "n": 4, "k": 4}
    spec = AttentionSpec(Score(1.0), (listed(mask, size, (16, block)),))
    taken, least = times(size, spec, 16)
    assert taken < 1.4 * least
    assert times(size, spec, 16, Sharing(2, 4))[0] < taken - 30


@pytest.mark.parametrize("sharing", [None, Sharing(1, 2), Sharing(3, 4)])
def test_many_visits_beside_a_short_last_block(sharing):
    """The one with many visits comes before the last one, which has fewer rows."""
    size = {"t": 256, "s": 456, "n": 1, "k": 1}
    mask = (np.arange(456) < 20) | (np.arange(256)[:, None] < 16)
    mask = DenseMask(Named(mask, ("t", "s")))
    spec = AttentionSpec(Score(1.0), (listed(mask, size, (16, 64)),))
    launch = Launch(Blocks(16, 32, 8, 2), None, PLAIN, interpret=False, splits=1)
    check_order((size, spec, launch, sharing))


@pytest.mark.parametrize("sharing", [Sharing(1, 2), Sharing(2, 3)])
@pytest.mark.parametrize("block", [(16, 32), (32, 64)])
def test_blocks_that_programs_share(block, sharing, monkeypatch):
    """Some of each batch entry, not the same ones, nor as many."""
    monkeypatch.setattr(visits, "MANY_VISITS", 1)
    size = {"t": 72, "s": 170, "n": 2, "k": 1}
    mask = dense(np.random.default_rng(0), size, ("b0", "t", "s"))
    mask &= np.random.default_rng(1).random((mask.shape[0], 1, 170)) < 0.3
    mask[0, :, 40:60] = mask[1, :, 100:130] = True
    spec = AttentionSpec(
        Score(1.0), (listed(DenseMask(Named(mask, ("b0", "t", "s"))), size, block),)
    )
    launch = Launch(Blocks(16, 32, 8, 2), None, PLAIN, interpret=False, splits=1)
    check_order((size, spec, launch, sharing))


def test_programs_that_are_not_shared():
    """Where lists would be too large, masks have ranges in their place."""
    ids = (np.arange(57) // 8).astype(np.int32)
    masks = (SegmentIds(Named(ids[:40], ("t",)), Named(ids, ("s",))),)
    launch = Launch(Blocks(16, 32, 8, 2), None, PLAIN, interpret=False, splits=1)
    size = {"t": 40, "s": 57, "n": 2, "k": 1}
    check_order((size, AttentionSpec(Score(1.0), masks), launch, Sharing(2, 2)))


@pytest.mark.parametrize("keys", [100, 512, 1000, 2048, 8192, 1 << 17])
def test_parts_take_no_more_memory_than_gradients(keys):
    """Those of shared blocks, in float32; long rows have as many as were timed."""
    found, numbers = _sharing({"t": 1 << 17, "s": keys}), measured.here().numbers
    if keys < 512:  # not one more fits
        assert found is None
        return
    assert found is not None and found.blocks == numbers.shared_blocks
    assert 4 * 128 * found.more <= 2 * keys
    another = found._replace(parts=found.parts + 1)
    has_all = found.parts == numbers.parts_of_a_shared_block
    assert has_all or 4 * 128 * another.more > 2 * keys
    assert has_all == (keys >= 8192)


def _sharing(size: dict[str, int]) -> Sharing | None:
    """Of a list that data decides."""
    mask = DenseMask(Named(np.ones((128, 64), bool), ("t", "s")))
    mask = listed(mask, {"t": 128, "s": 64}, (32, 32))
    spec = AttentionSpec(Score(1.0), (mask,))
    return tuning.sharing(spec, {"n": 1, "k": 1, **size}, {"t": 64, "s": 128})


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        ({"t": 1024}, 1),
        ({"t": 2048}, 2),
        ({"t": 4096}, 4),
        ({"t": 1 << 16}, 8),
        ({"t": 1024, "n": 12, "k": 4}, 3),
    ],
)
def test_parts_are_not_too_small(size, parts):
    found = _sharing({"s": 1 << 14, **size})
    assert (1 if found is None else found.parts) == parts
