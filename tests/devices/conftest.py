"""What several tests of divided programs need."""

import pytest

from tests.settings import configured


@pytest.fixture
def no_cache():
    """Each program is compiled: what its partitioner says or counts is of this run."""
    with configured({"jax_compilation_cache_dir": None}):
        yield
