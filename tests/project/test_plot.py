"""Pictures of masks show the pairs that the oracle keeps."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from jax_flash2.plot import plot_mask
from tests import oracle
from tests.cases import by_name

CASES = (
    "causal_more_keys",
    "window_causal",
    "lengths",
    "segments_unsorted",
    "mask_full",
)


@pytest.mark.parametrize("name", CASES)
def test_a_picture_shows_the_kept_pairs(name):
    case = by_name(name)
    (q, k, _), arguments = case.inputs(np.float32)
    position = np.arange(case.t)[:, None] + arguments.get("query_offset", 0)
    shape = (*case.batch, case.n, case.t, case.s)
    kept = oracle.kept_pairs(arguments, shape, position)
    axes = plot_mask(q, k, **arguments, entry=1, head=1, block=16)
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), kept[1, 1])
    assert len(axes.lines) == sum((size - 1) // 16 for size in kept.shape[-2:])
    plt.close(axes.figure)
