"""Imports run one way, and importing the library stays light."""

import ast
import functools
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

from pallas_kernels.core import masks, scores

ROOT = Path(__file__).parents[2]
RUNTIME = {"jax", "jaxlib", "numpy"}
# What a file imports that nothing else does, of an extra.
EXTRAS = {"jax_flash2/_plot.py": {"matplotlib"}}
# Every file of the packages, innermost first: each imports what stands before it, or
# in its own line. A name without ".py" is a folder, whose files may import each other,
# as those may that a name with "*.py" stands for.
FLASHIFY = (  # of `flashify`, in the order of its stages
    "digits",
    "graph",
    "alike",
    "conditions",
    "arithmetic",
    "meaning",
    "facts",
    "axes",
    "row_rules",
    "score_rules",
    "layers",
    "match",
    "masks",
    "sites",
    "plan",
    "runs",
    "rewrite",
    "evaluate",
    "report",
    "transform",
    "__init__",
)
LAYERS = (
    ("pallas_kernels/__init__.py",),
    ("pallas_kernels/core",),
    ("pallas_kernels/configs.py",),
    ("pallas_kernels/device.py",),
    ("pallas_kernels/tables.py", "pallas_kernels/tuning"),
    ("pallas_kernels/user_tables.py",),
    ("pallas_kernels/backend.py",),
    ("pallas_kernels/division.py",),
    ("pallas_kernels/layout.py",),
    ("pallas_kernels/program.py",),
    ("pallas_kernels/passes.py",),
    ("pallas_kernels/triton",),
    ("pallas_kernels/mosaic_gpu/*.py",),
    ("pallas_kernels/mosaic_gpu/ampere",),
    ("pallas_kernels/mosaic_gpu/blackwell",),
    ("pallas_kernels/mosaic_gpu/hopper",),
    ("jax_flash2/_version.py",),
    ("jax_flash2/_backends.py",),
    ("jax_flash2/_loops.py",),
    ("jax_flash2/_chunked.py",),
    ("jax_flash2/_ahead.py",),
    ("jax_flash2/_kept.py",),
    ("jax_flash2/_partitioner.py",),
    ("jax_flash2/_sharding.py",),
    ("jax_flash2/_operation.py",),
    ("jax_flash2/_reference.py",),
    ("jax_flash2/_vjp.py",),
    ("jax_flash2/_derivatives.py", "jax_flash2/_taylor.py"),
    ("jax_flash2/_options.py", "jax_flash2/_arrays.py"),
    ("jax_flash2/_shape.py", "jax_flash2/_rows.py", "jax_flash2/_merge.py"),
    ("jax_flash2/_mods.py", "jax_flash2/_block_mask.py"),
    ("jax_flash2/_arguments.py",),
    ("jax_flash2/_make_block_mask.py", "jax_flash2/_combine.py"),
    ("jax_flash2/_pools.py", "jax_flash2/_ragged.py"),
    ("jax_flash2/_paged.py", "jax_flash2/_cache.py"),
    ("jax_flash2/_server_arguments.py",),
    ("jax_flash2/servers.py",),
    ("jax_flash2/_linear.py",),
    ("jax_flash2/_ring.py",),
    ("jax_flash2/_context.py",),
    ("jax_flash2/_fp8.py",),
    ("jax_flash2/_api.py",),
    ("jax_flash2/_explain.py",),
    ("jax_flash2/_flax.py", "jax_flash2/nn.py", "jax_flash2/_plot.py"),
    *((f"jax_flash2/_flashify/{name}.py",) for name in FLASHIFY),
    ("jax_flash2/__init__.py",),
    ("jax_flash2/tune",),
)
CORE = (  # of the folder, likewise
    "promotion",
    "arithmetic",
    "axes",
    "known",
    "ranges",
    "lists",
    "positions",
    "flash2",
    "parts",
    "pointwise",
    "scores",
    "dropout",
    "masks",
    "block_tables",
    "pages",
    "spec",
    "exact",
    "clear",
    "nibbles",
    "quantise",
    "gather",
    "visits",
    "pairs",
    "tangent",
)
# Nothing else imports a backend: they are modules of a list (`jax_flash2._backends`).
BACKENDS = {
    "jax_flash2._chunked",
    "pallas_kernels.mosaic_gpu",
    "pallas_kernels.triton",
}
PALLAS = "jax.experimental.pallas"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at the top level of the file) of each import."""
    tree = parsed(path)
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
    if "*" in where:
        return sorted(ROOT.glob(where))
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@functools.cache
def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


@functools.cache
def modules_imported(path: Path) -> set[str]:
    """Modules of the project that a file imports, `from package import module` too."""
    known = {module_of(p) for p in packages()}
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= inner or ({node.module} & known)
    return found


@functools.cache
def packages() -> list[Path]:
    return [
        path
        for package in ("jax_flash2", "pallas_kernels")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def test_every_file_has_a_layer():
    listed = [path for layer in LAYERS for where in layer for path in files(where)]
    assert sorted(listed) == sorted(packages())
    core = {path.stem for path in (ROOT / "pallas_kernels/core").iterdir()}
    core -= {"__init__", "__pycache__"}
    assert set(CORE) == core


def test_imports_run_one_way():
    below: set[str] = set()
    for layer in LAYERS:
        own = {module_of(path) for where in layer for path in files(where)}
        for where in layer:
            inside = set() if (ROOT / where).is_file() else own
            for path in files(where):
                others = modules_imported(path) - {module_of(path)}
                assert others <= below | inside, (path, others - below - inside)
        below |= own


def test_imports_inside_core_run_one_way():
    below = ("pallas_kernels.core",)
    for name in CORE:
        below = (*below, f"pallas_kernels.core.{name}")
        folder = ROOT / "pallas_kernels" / "core"
        for path in [folder / f"{name}.py", *files(f"pallas_kernels/core/{name}")]:
            for module in modules_imported(path) if path.is_file() else ():
                parts = module.split(".")[:3]
                assert ".".join(parts) in below, (path, module)


def subclasses(kind: type) -> list[type]:
    """It and all that are made of it."""
    return [kind, *(x for own in kind.__subclasses__() for x in subclasses(own))]


@pytest.mark.parametrize(
    ("folder", "kind"), [("masks", masks.Atom), ("scores", scores.Term)]
)
def test_no_code_asks_for_the_type_of_a_mask_or_a_term(folder, kind):
    """They answer for themselves, so that a new one is a file of its own."""
    names = {x.__name__ for x in subclasses(kind)}
    assert len(names) > 3
    for path in packages():
        if path.parent.name == folder:
            continue
        for node in ast.walk(parsed(path)):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if called and node.func.id in ("isinstance", "issubclass", "type"):
                asked = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
                assert not asked & names, (path, node.lineno)


def test_no_file_imports_a_backend():
    """But the tuner, which knows the kernels that it times."""
    for path in set(packages()) - set(files("jax_flash2/tune")):
        own = module_of(path)
        others = tuple(name for name in BACKENDS if not own.startswith(name))
        assert not any(m.startswith(others) for m in modules_imported(path)), path


def test_architectures_import_what_they_share_and_not_each_other():
    shared = ROOT / "pallas_kernels/mosaic_gpu"
    folders = [x for x in shared.iterdir() if x.is_dir() and list(x.glob("*.py"))]
    assert folders
    for path in shared.rglob("*.py"):
        others = {f"pallas_kernels.mosaic_gpu.{x.name}" for x in folders}
        others -= {f"pallas_kernels.mosaic_gpu.{path.parent.name}"}
        for module in modules_imported(path):
            assert ".".join(module.split(".")[:3]) not in others, (path, module)


def test_only_backends_need_more_than_jax():
    for path in packages():
        for module, _ in imports(path):
            first = module.split(".")[0]
            where = f"{path.relative_to(ROOT)} imports {module}"
            if first not in sys.stdlib_module_names:
                extra = EXTRAS.get(str(path.relative_to(ROOT)), set())
                known = {*RUNTIME, *extra, "jax_flash2", "pallas_kernels"}
                assert first in known, where
            if module.startswith(PALLAS):
                folder = path.relative_to(ROOT / "pallas_kernels").parts[0]
                assert folder in ("triton", "mosaic_gpu"), where


def test_core_is_jax_numpy_and_lax_only():
    """And the primitive of products, which no one replaces (`axes.product`)."""
    for path in files("pallas_kernels/core"):
        allowed = {"jax", "jax.numpy"}
        if path.stem == "axes":
            allowed.add("jax.extend.core.primitives")
        for module, _ in imports(path):
            assert module.split(".")[0] != "jax" or module in allowed, path


def test_files_stay_short():
    for path in [*packages(), *files("tests"), *files("benchmarks")]:
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
    kernels = ("pallas_kernels.mosaic_gpu", "pallas_kernels.triton", PALLAS)
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
    """Should JAX drop what is deprecated: also on a GPU, and the reasons are said."""
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


def test_wheels_hold_every_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = find_namespace_packages(
        str(ROOT), **project["tool"]["setuptools"]["packages"]["find"]
    )
    folders = {path.parent for path in packages()} | {
        ROOT / "pallas_kernels" / "tuning"
    }
    found = {str(x.relative_to(ROOT)).replace(os.sep, ".") for x in folders}
    assert set(listed) == found


def test_wheels_hold_what_is_no_python():
    """Tables of block sizes, the recipes, and the mark of a typed package in both."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = {
        str(path.relative_to(ROOT))
        for package, patterns in project["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", os.sep)).glob(pattern)
    }
    found = {
        str(path.relative_to(ROOT))
        for package in ("jax_flash2", "pallas_kernels")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert listed == found
    assert {"jax_flash2/py.typed", "pallas_kernels/py.typed"} <= found
