"""Imports run one way, and importing the library stays light."""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNTIME = {"jax", "jaxlib", "numpy"}
# What each layer may import of the project, innermost first.
LAYERS = {
    "pallas_kernels/core": {"pallas_kernels.core"},
    "pallas_kernels/configs.py": set(),
    "pallas_kernels/device.py": set(),
    "pallas_kernels/triton": {
        "pallas_kernels",  # `from pallas_kernels import configs`
        "pallas_kernels.configs",
        "pallas_kernels.device",
        "pallas_kernels.core",
        "pallas_kernels.triton",
    },
    "jax_flash2": {"jax_flash2", "pallas_kernels"},
}
PALLAS = "jax.experimental.pallas"


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at the top level of the file) of each import."""
    tree = ast.parse(path.read_text())
    top = set(tree.body)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", node in top))
    return found


def files(where: str) -> list[Path]:
    path = ROOT / where
    return [path] if path.is_file() else sorted(path.glob("*.py"))


def test_imports_run_one_way():
    for layer, allowed in LAYERS.items():
        assert files(layer), layer
        for path in files(layer):
            for module, top in imports(path):
                first = module.split(".")[0]
                where = f"{path.relative_to(ROOT)} imports {module}"
                if first in ("jax_flash2", "pallas_kernels"):
                    inside = any(
                        module == a or module.startswith(f"{a}.") for a in allowed
                    )
                    assert inside, where
                    if layer == "jax_flash2" and "triton" in module:
                        assert not top, f"{where} at the top: GPU code is lazy"
                elif first not in sys.stdlib_module_names:
                    assert first in RUNTIME, where
                if module.startswith(PALLAS):
                    assert layer == "pallas_kernels/triton", where


def test_core_is_jax_numpy_and_lax_only():
    for path in files("pallas_kernels/core"):
        for module, _ in imports(path):
            assert module.split(".")[0] != "jax" or module in ("jax", "jax.numpy"), path


def test_files_stay_short():
    for layer in [*LAYERS, "tests", "benchmarks"]:
        for path in files(layer):
            assert len(path.read_text().splitlines()) <= 450, path


def _output(code: str, **environment) -> list[str]:
    """Words that a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    return done.stdout.split()


def _gpu_modules(names) -> list[str]:
    kernels = ("pallas_kernels.triton", PALLAS)
    return [m for m in names if m.startswith(kernels)]


CALL = """
import sys, jax
from jax_flash2 import attention, explain
x = jax.numpy.ones((1, 20, 2, 16))
jax.grad(lambda x: attention(x, x, x).sum())(x)
"""


def test_a_call_on_a_cpu_loads_no_kernels():
    code = CALL + "explain(x, x, x)\nprint(*sys.modules)"
    assert not _gpu_modules(_output(code, JAX_PLATFORMS="cpu"))


def test_without_the_triton_backend_every_call_works():
    """Should JAX drop what is deprecated: also on a GPU, and the reason is said."""
    block = "import sys; sys.modules['jax.experimental.pallas.triton'] = None\n"
    on_gpu = "from pallas_kernels import device; device.platform = lambda: 'cuda'\n"
    assert _output(block + CALL + "print('done')") == ["done"]
    code = block + on_gpu + CALL + "print(explain(x, x, x))"
    text = _output(code, PYTHONWARNINGS="ignore")
    assert text[:2] == ["implementation:", "xla"]
    assert " ".join(text).count("triton: it cannot be imported") == 1


def test_import_is_light():
    """No GPU code is imported, nor anything that is not needed at run time."""
    code = (
        "import sys, jax; before = set(sys.modules); import jax_flash2; "
        "print(*sorted(set(sys.modules) - before))"
    )
    new = _output(code)
    assert "jax_flash2._api" in new
    assert not _gpu_modules(new)
    third = {m.split(".")[0] for m in new} - set(sys.stdlib_module_names)
    assert third <= {
        *RUNTIME,
        "jax_flash2",
        "pallas_kernels",
        "ml_dtypes",
        "opt_einsum",
    }
