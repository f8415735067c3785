"""What the documentation shows runs as shown."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = (
    "jax_flash2",
    "jax_flash2._api",
    "jax_flash2._block_mask",
    "jax_flash2._cache",
    "jax_flash2._explain",
    "jax_flash2._flashify.transform",
    "jax_flash2._flax",
    "jax_flash2._make_block_mask",
    "jax_flash2._merge",
    "jax_flash2._paged",
    "jax_flash2._plot",
    "jax_flash2._rows",
    "jax_flash2.nn",
    "jax_flash2.servers",
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
    functions = {name: getattr(jax_flash2, name) for name in public}
    functions |= {k: x for k, x in vars(jax_flash2.nn).items() if _is_own(x)}
    assert "dot_product_attention" in functions
    for name, function in functions.items():
        (test,) = finder.find(function, name)
        assert test.examples, name


def test_the_reference_has_every_public_name():
    import jax_flash2

    shown = (ROOT / ".docs/pages/reference.md").read_text().splitlines()
    for name in jax_flash2.__all__:
        if callable(getattr(jax_flash2, name)):
            assert f"::: jax_flash2.{name}" in shown


def _is_own(x) -> bool:
    """Whether it is a public function of `jax_flash2.nn`."""
    own = getattr(x, "__module__", None) == "jax_flash2.nn"
    return own and not x.__name__.startswith("_")


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


def lines(name: str) -> list[str]:
    return (ROOT / name).read_text().splitlines()


def test_documents_stay_short():
    """The README is a page; the build notes are read beside code."""
    assert len(lines("README.md")) <= 244
    assert len(lines("CONTRIBUTING.md")) <= 80
    notes = lines("BUILD_NOTES.md")
    assert len(notes) <= 300
    # Of what a reader sees: without the targets of links.
    shown = [re.sub(r"\]\([^)]*\)", "]", line) for line in notes]
    assert [line for line in shown if len(line) > 100] == []


LAB = ROOT / "benchmarks" / "lab"


def test_every_lab_note_has_a_verdict_and_a_line_in_the_index():
    text = (ROOT / "BUILD_NOTES.md").read_text()
    index = (LAB / "README.md").read_text()
    notes = {path.name: path for path in LAB.glob("[0-9]*.md")}
    link = r"\[(\d+)\]\((?:benchmarks/lab/)?([^)\s]+)\)"
    entries = re.findall(rf"^- {link} .+$", index, flags=re.M)
    # Each note once, by its own number.
    assert sorted(name for _, name in entries) == sorted(notes)
    for number, name in re.findall(link, text + index):
        assert name.startswith(f"{number}-"), name
    assert re.findall(r"\[\d+\](?!\()", text) == []  # each number is a link
    for name, path in notes.items():
        assert "**Verdict" in path.read_text(), name


FOLDERS = (".", "jax_flash2", "benchmarks", "benchmarks/lab")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))


def links(text: str) -> list[str]:
    """Where a Markdown text points: inline links, pictures and definitions."""
    inline = re.findall(r"\]\(([^)\s]+)\)", text)
    return inline + re.findall(r"^\[[^\]]+\]: (\S+)$", text, flags=re.M)


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page):
    for link in links(page.read_text()):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def test_the_site_has_what_its_pages_link_to():
    """Or makes text of the link, as of links to code (`.docs/hooks.py`)."""
    text = (ROOT / ".docs/hooks.py").read_text()
    patterns = ast.literal_eval(re.search(r"^FILES = (\(.*?^\))", text, re.M | re.S)[1])
    files = {path for x in patterns for path in ROOT.glob(x)}
    for page in (x for x in files if x.suffix == ".md"):
        for link in links(page.read_text()):
            path = link.partition("#")[0]
            is_code = re.match(r"\w+:", link) or path.endswith((".py", "/run"))
            if path and not is_code:
                assert (page.parent / path).resolve() in files, (page.name, link)


def test_readme_sections():
    """The order in which a reader needs them."""
    titles = [x[3:] for x in lines("README.md") if x.startswith("## ")]
    assert titles == [
        "Install",
        "Try it",
        "Quick start",
        "In Flax",
        "Sequences longer than one GPU",
        "What it does",
        "How fast",
        "Limits",
        "Versions and the deprecation upstream",
        "Reading and changing it",
        "Licence and citation",
    ]


def test_readme_names_every_argument():
    """The table of features is complete."""
    import inspect

    import jax_flash2

    text = (ROOT / "README.md").read_text()
    for name in inspect.signature(jax_flash2.attention).parameters:
        if name not in ("query", "key", "value"):
            assert f"`{name}" in text, name
