"""How the code is built, in numbers that may only shrink.

Each is the number of today. Who makes one smaller lowers it here; who must raise one
says why beside it. `test_layers` has the rules that hold without exception.
"""

import ast
import collections
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import _backends, attention
from pallas_kernels.backend import Plan
from tests.lowering import lower_for_gpu
from tests.project.test_layers import ROOT, packages, parsed

# Functions of more lines than this in `pallas_kernels`.
MOST_LINES = 80
LONG_FUNCTIONS: dict[str, int] = {}
# A function in a function in a function: no deeper.
MOST_DEPTH = 3
DEEP_FUNCTIONS = 0

# Where features are named outside of `pallas_kernels/core` and of what reads arguments:
# identifiers of the code, in how many files and how often (lab note 093).
TUNER = "jax_flash2/tune"  # its calls have features, as those of the tests
ARGUMENTS = ("_api", "_arguments", "_shape", "_options", "_mods", "_flax", "nn")
ARGUMENTS += ("_block_mask", "_make_block_mask", "_combine")
ARGUMENTS += ("_plot",)  # which draws masks
ARGUMENTS += ("_paged", "_pools", "_ragged", "_cache", "servers", "_server_arguments")
FEATURES = {
    "bias": (r"bias", 7, 35),  # its kernel's blocks, too: `gradient_blocks`
    "dropout": (r"dropout|drops_by_sign", 20, 36),
    "mask": (r"(?<!un)mask(?!ed|ing|s$)", 11, 62),
    "attended keys": (r"attended|(drops|kept|with|dropped|clear)_keys", 11, 33),
    "segments": (r"segment", 0, 0),
    "window": (r"window", 3, 8),
    "lengths": (r"length|(kv|q)_limit", 10, 21),
    "ALiBi": (r"slopes|alibi", 0, 0),
    "soft cap": (r"soft_?cap", 0, 0),
    "sinks": (r"sink", 12, 78),
}


def functions(path: Path) -> list[tuple[str, int, int]]:
    """(name, lines, depth) of each function of a file."""
    found = []

    def walk(node: ast.AST, depth: int) -> None:
        for child in ast.iter_child_nodes(node):
            own = depth + isinstance(child, ast.FunctionDef)
            if isinstance(child, ast.FunctionDef):
                lines = (child.end_lineno or child.lineno) - child.lineno + 1
                found.append((f"{path.name}: {child.name}", lines, own))
            walk(child, own)

    walk(parsed(path), 0)
    return found


KERNELS = [path for path in packages() if "pallas_kernels" in path.parts]


def test_functions_are_short():
    found = {
        name: lines
        for path in KERNELS
        for name, lines, _ in functions(path)
        if lines > MOST_LINES
    }
    assert found == LONG_FUNCTIONS


def test_functions_are_not_nested_deeply():
    deep = [x for path in KERNELS for x in functions(path) if x[2] > MOST_DEPTH]
    assert len(deep) == DEEP_FUNCTIONS, deep


@functools.cache
def identifiers(path: Path) -> list[str]:
    """Names of variables, attributes, arguments and definitions."""
    found = []
    for node in ast.walk(parsed(path)):
        for field in ("id", "attr", "arg", "name"):
            value = getattr(node, field, None)
            if isinstance(value, str) and not isinstance(node, ast.alias):
                found.append(value.lower())
    return found


@pytest.mark.parametrize("feature", FEATURES)
def test_few_files_name_a_feature(feature):
    """What it means is in one file of `core`; others ask what they need to know."""
    pattern, most_files, most = FEATURES[feature]
    counts = collections.Counter()
    for path in packages():
        inside = "core" in path.parts or path.stem in ARGUMENTS
        inside = inside or "_flashify" in path.parts
        inside = inside or path.is_relative_to(ROOT / TUNER)
        named = [] if inside else identifiers(path)
        counts[str(path.relative_to(ROOT))] = sum(
            bool(re.search(pattern, name)) for name in named
        )
    counts = +counts
    assert (len(counts), counts.total()) == (most_files, most), counts


def test_a_gradient_asks_few_questions(monkeypatch):
    """Each plan is made once for a lowering; before, 42 questions were asked."""
    asked = []
    for name in ("mosaic_gpu", "triton", "xla"):
        module = _backends.module(name)
        own = module.plan
        monkeypatch.setattr(
            module, "plan", lambda *x, own=own: asked.append(x[1]) or own(*x)
        )
    q = jax.ShapeDtypeStruct((2, 2048, 16, 128), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((16, 2048, 2048), jnp.bfloat16)

    def loss(*arrays):
        return attention(*arrays).astype(jnp.float32).sum()

    lower_for_gpu(jax.grad(loss, (0, 1, 2, 3)), q, q, q, bias)
    assert sorted(asked) == sorted(["forward", "backward", "operand_gradients"] * 3)
    assert Plan.slower is None
