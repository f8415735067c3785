"""The notebooks of the site run, each in a Python of its own, as Jupyter runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import deep

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / ".docs/pages/notebooks").glob("*.ipynb"))


def code(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join(
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"
    )


@deep
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path):
    others = {k: x for k, x in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code(path)],
        cwd=tmp_path,
        env={**others, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_notebooks_have_no_results():
    """Results would go out of date: the site makes them when it is built."""
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs") and not cell.get("execution_count"), path
