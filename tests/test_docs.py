"""What the documentation shows runs as shown."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = (
    "jax_flash2",
    "jax_flash2._api",
    "jax_flash2._flax",
    "pallas_kernels.configs",
)


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.failed == 0


def test_public_functions_have_examples():
    import jax_flash2

    finder = doctest.DocTestFinder(recurse=False)
    public = [
        name for name in jax_flash2.__all__ if callable(getattr(jax_flash2, name))
    ]
    assert "attention" in public
    for name in public:
        (test,) = finder.find(getattr(jax_flash2, name), name)
        assert test.examples, name


def code_blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("index", range(len(code_blocks("python"))))
def test_readme_examples(index):
    exec(compile(code_blocks("python")[index], "README.md", "exec"), {})


def test_readme_commands_are_single_lines():
    commands = [x for x in code_blocks("sh") if "venv" in x]
    assert len(commands) == 2
    for command in commands:
        assert len(command.strip().splitlines()) == 1
    assert "benchmarks.train_gpt" in commands[0]
    assert "pytest" in commands[1]


def test_readme_names_every_argument():
    """The table of features is complete."""
    import inspect

    import jax_flash2

    text = (ROOT / "README.md").read_text()
    for name in inspect.signature(jax_flash2.attention).parameters:
        if name not in ("query", "key", "value"):
            assert f"`{name}" in text, name
