"""The examples of RECIPES.md run, each section by itself after the page's opening."""

import re
from pathlib import Path

import pytest

import jax_flash2
from tests.tiers import deep

PAGE = Path(jax_flash2.__file__).parent / "RECIPES.md"


def sections() -> dict[str, str]:
    """The Python of each section by its title, with that of the page's opening."""
    opening, *rest = re.split(r"^## (.+)\n", PAGE.read_text(), flags=re.MULTILINE)

    def python(text: str) -> str:
        return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S))

    titles, texts = rest[::2], rest[1::2]
    return {
        title: python(opening) + "\n" + python(text)
        for title, text in zip(titles, texts, strict=True)
    }


@deep
@pytest.mark.parametrize("title", sections())
def test_recipe(title):
    code = compile(sections()[title], f"RECIPES.md, {title}", "exec")
    exec(code, {"__name__": "recipe"})


def test_the_page_is_a_page():
    """Every block is Python that runs, and lines fit a screen."""
    text = PAGE.read_text()
    assert len(sections()) <= text.count("```python\n")
    assert len(re.findall(r"^```", text, re.M)) == 2 * text.count("```python\n")
    assert max(map(len, text.splitlines())) <= 88
