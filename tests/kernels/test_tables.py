"""Functions that read tables at computed places, in kernels."""

import functools

import jax
import pytest

from jax_flash2 import attention
from pallas_kernels.core.pointwise import binding
from tests.kernels.test_mods import ARRAYS, BACKENDS, SCORES, check, exact, results
from tests.tiers import deeply


@pytest.mark.parametrize("backend", ["triton", *deeply("blocks", "reference")])
def test_tables_at_places_of_pairs(backend, monkeypatch):
    """Kernels read them where there are too many pairs to find all beforehand."""
    monkeypatch.setattr(binding, "FEW_PAIRS", 0)
    make, captured = SCORES["swin"]
    options = {**BACKENDS[backend], "precision": "highest"}
    call = functools.partial(attention, **options)
    run = functools.partial(results, call, make, None)
    check(jax.jit(run)(ARRAYS, captured), exact(make, None, captured))


@pytest.mark.parametrize("score", ["table", "swin"])
def test_gradients_of_tables_have_one_order(score):
    """No scatter, which on a GPU adds as it goes."""
    make, captured = SCORES[score]
    run = jax.jit(functools.partial(results, attention, make, None))
    assert "scatter" not in run.lower(ARRAYS, captured).as_text()
