"""Products of float32 are of float32, as the bounds of these tests are, on GPUs too."""

import jax
import pytest

from tests.cases import ON_GPU


@pytest.fixture(autouse=True)
def products_of_float32():
    if not ON_GPU:
        yield
        return
    with jax.default_matmul_precision("highest"):
        yield
