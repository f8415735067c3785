"""`flashify` on the attention layers of other packages (extra `test-models`)."""

import importlib

import pytest

from tests.flashify.packages import PACKAGES
from tests.flashify.test_flashify import check_model
from tests.tiers import deep

MODULES = {
    "linen": "flax",
    "nnx": "flax",
    "gemma": "gemma.gm.nn",
    "tunix": "tunix.models.llama3.model",
}


@deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES, ids=lambda x: x.__name__)
def test_packages(package):
    name = MODULES.get(package.__name__, package.__name__)
    try:
        importlib.import_module(name)
    except ImportError:
        pytest.skip(f"{name} is not here: pip install -e '.[test-models]'")
    model = package()
    report = check_model(model)
    for site in report.replaced:
        assert model.recognised <= set(site.arguments), str(report)
