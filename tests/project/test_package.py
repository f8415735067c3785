"""What `python -m build` makes holds what a user needs."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.mutants import copy_project
from tests.project.test_layers import ROOT
from tests.tiers import deep

SHIPPED = (
    "jax_flash2/RECIPES.md",
    "jax_flash2/py.typed",
    "jax_flash2/tune/__main__.py",
    "pallas_kernels/tuning/triton_nvidia_h200.json",
)


def built(what: str, source: Path, out: Path) -> Path:
    """What setuptools builds in a Python of its own, as `python -m build` has it."""
    code = (
        f"from setuptools import build_meta as x; print(x.build_{what}({str(out)!r}))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@deep
def test_a_wheel_and_an_sdist(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    copy_project(source)
    out.mkdir()
    with zipfile.ZipFile(built("wheel", source, out)) as file:
        names = set(file.namelist())
        (metadata,) = (x for x in names if x.endswith(".dist-info/METADATA"))
        text = file.read(metadata).decode()
    assert set(SHIPPED) <= names
    assert {x.split("/")[0] for x in names} == {
        "jax_flash2",
        "pallas_kernels",
        metadata.split("/")[0],
    }
    assert "Description-Content-Type: text/markdown" in text
    assert (ROOT / "README.md").read_text().strip() in text
    with tarfile.open(built("sdist", source, out)) as file:
        names = {x.partition("/")[2] for x in file.getnames()}
    assert {*SHIPPED, "README.md", "LICENSE", "pyproject.toml"} <= names
