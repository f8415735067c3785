"""Pages of the site that are elsewhere in the repository, or made of what is there.

Each page keeps its path, so that the links between pages are right as they are.
"""

import re
import sys
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parent
# Pages, and what they link to.
FILES = (
    "*.md",
    "LICENSE",
    "jax_flash2/RECIPES.md",
    "benchmarks/*.md",
    "benchmarks/lab/*.md",
    "benchmarks/results/*.png",
    "findings/*.sh",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the repository's pages and what is made here."""
    sys.path.insert(0, str(HERE))
    import pictures

    for path in (path for pattern in FILES for path in sorted(ROOT.glob(pattern))):
        files.append(_file(path.relative_to(ROOT), ROOT, config))
    made = Path(tempfile.mkdtemp(prefix="jax_flash2_docs_"))
    (made / "masks.md").write_text(pictures.write_masks(made / "pictures"))
    pictures.write_pipeline(made / "pictures")
    (made / "hopper.md").write_text(_hopper())
    for path in sorted(x for x in made.rglob("*") if x.is_file()):
        files.append(_file(path.relative_to(made), made, config))
    return files


def _file(path: Path, folder: Path, config: MkDocsConfig) -> File:
    return File(str(path), str(folder), config.site_dir, config.use_directory_urls)


def _section(title: str) -> str:
    """The text of a section of the build notes."""
    text = (ROOT / "BUILD_NOTES.md").read_text()
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
    if found is None:
        raise ValueError(f"BUILD_NOTES.md has no section {title!r}")
    return found[1]


def _hopper() -> str:
    picture = (
        "The forward kernel computes a work tile of three blocks of keys, here with "
        "two consumers, and two stages for keys and for values. Loads with a prime are "
        "the next work tile's.\n\n"
        "![The pipeline of the forward kernel](pictures/pipeline.png)"
    )
    return f"# The Hopper kernels\n\n{picture}\n\n{_section('The Hopper kernels')}"


def on_page_markdown(markdown: str, page, **_) -> str:
    """Links to code, which is no page of the site, become plain text."""
    if page.file.src_uri.startswith("notebooks/"):
        return markdown
    return re.sub(r"\[([^\]]+)\]\([^)\s:]*(?:\.py|/run)\)", r"\1", markdown)
