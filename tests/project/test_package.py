"""What `python -m build` makes holds what a user needs."""

import subprocess
import sys
import tarfile
import zipfile

from tests.mutants import copy_project
from tests.project.test_layers import ROOT
from tests.tiers import deep

BUILD = """
import sys
from setuptools import build_meta as backend
print(backend.build_wheel(sys.argv[1]), backend.build_sdist(sys.argv[1]))
"""
SHIPPED = (
    "jax_flash2/RECIPES.md",
    "jax_flash2/py.typed",
    "jax_flash2/tune/__main__.py",
    "pallas_kernels/tuning/triton_nvidia_h200.json",
)


@deep
def test_a_wheel_and_an_sdist(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    copy_project(source)
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    wheel, sdist = done.stdout.split()[-2:]
    with zipfile.ZipFile(out / wheel) as file:
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
    with tarfile.open(out / sdist) as file:
        names = {x.partition("/")[2] for x in file.getnames()}
    assert {*SHIPPED, "README.md", "LICENSE", "pyproject.toml"} <= names
