"""What `pytest` runs, and what only `pytest -m ''` does (continuous integration).

The first tier covers every feature on every backend in both directions, in minutes on
two cores. What takes longer and sees little more is marked `deep`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from tests.cases import BACKENDS, Case

deep = pytest.mark.deep


def deeply(*values) -> list:
    """Parameters of the deep tier; a tuple is several."""
    return [
        pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=deep) for x in values
    ]


def mostly_deep(cases: Sequence[Case], first: Collection[str]) -> list:
    """Cases as parameters: those named in `first` in the first tier, others deep."""
    return [
        pytest.param(x, id=x.name, marks=() if x.name in first else deep) for x in cases
    ]


# Where the backends share what is tested: the kernels, slow when interpreted, are deep.
MAINLY_XLA = ["xla", *deeply(*(name for name in BACKENDS if name != "xla"))]
