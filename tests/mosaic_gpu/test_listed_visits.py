"""The order of additions where programs visit what lists of blocks number."""

import numpy as np
import pytest

from pallas_kernels.configs import Blocks
from pallas_kernels.core.arithmetic import PLAIN
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import DenseMask
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from tests.core.test_lists import listed
from tests.mosaic_gpu.test_visits import check_order, dense
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
