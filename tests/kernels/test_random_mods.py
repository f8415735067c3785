"""Random functions of pairs by the error rule; more of them: `tests.random_mods`."""

import pytest

from tests import mosaic_interpreter, random_mods
from tests.cases import ON_GPU
from tests.tiers import deep

SEEDS = [
    *(("xla", seed) for seed in (3, 0, 1, 5, 6, 7, 8)),
    *(("triton", seed) for seed in (4, 30, 31)),
    *(("mosaic_gpu", seed) for seed in (40, 42)),
]


@deep
@pytest.mark.parametrize(("implementation", "seed"), SEEDS)
def test_error_rule(implementation, seed, monkeypatch):
    is_interpreted = implementation == "mosaic_gpu" and not ON_GPU
    if is_interpreted and not mosaic_interpreter.IS_SUPPORTED:
        pytest.skip("JAX cannot interpret it")
    assert random_mods.check(seed, implementation, monkeypatch)
