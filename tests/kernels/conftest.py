"""What the tests of every backend share."""

import pytest


@pytest.fixture
def runner(request, monkeypatch):
    """A backend that runs here until the test ends (`runners.Runner`)."""
    with request.param.prepared(monkeypatch) as runner:
        yield runner
