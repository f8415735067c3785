"""What `pytest` runs, and what only `pytest -m ''` does (continuous integration).

The first tier covers every feature on every backend in both directions, in minutes on
two cores. What takes longer and sees little more is marked `deep`.
"""

from __future__ import annotations

import pytest

from tests.cases import BACKENDS, ON_GPU

deep = pytest.mark.deep


def deeply(*values) -> list:
    """Parameters of the deep tier; a tuple is several."""
    return [
        pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=deep) for x in values
    ]


def compiled(*values) -> tuple:
    """Parameters for GPUs alone: what interpreted kernels would repeat slowly."""
    return values if ON_GPU else ()


# Where the backends share what is tested: the kernels, slow when interpreted, are deep.
MAINLY_XLA = ["xla", *deeply(*(name for name in BACKENDS if name != "xla"))]
