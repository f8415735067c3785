"""Random functions of pairs by the error rule; more of them: `tests.random_mods`."""

import pytest

from tests import mosaic_interpreter, random_mods
from tests.cases import ON_GPU
from tests.tiers import deeply

SEEDS = [
    *(("xla", seed) for seed in range(1, 4)),
    *deeply(*(("xla", seed) for seed in (0, *range(5, 15)))),
    *deeply(*(("triton", seed) for seed in (4, *range(30, 35)))),
    *deeply(*(("mosaic_gpu", seed) for seed in (40, 42, 43))),
]


@pytest.mark.parametrize(("implementation", "seed"), SEEDS)
def test_error_rule(implementation, seed, monkeypatch):
    is_interpreted = implementation == "mosaic_gpu" and not ON_GPU
    if is_interpreted and not mosaic_interpreter.IS_SUPPORTED:
        pytest.skip("JAX cannot interpret it")
    assert random_mods.check(seed, implementation, monkeypatch) != 0
