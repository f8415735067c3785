"""Pictures for the site: a mask of each kind, and the pipeline of the Hopper kernel.

python .docs/pictures.py FOLDER
"""

import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import jax.numpy as jnp
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from jax_flash2 import plot_mask

# (title, what it is, arguments as written), of calls with 64 queries and keys.
MASKS = (
    ("Causal", "A query attends to the keys up to its own position.", "is_causal=True"),
    (
        "Causal, the last queries",
        "`query_offset` is the position of the first query: here 16 queries are the "
        "last of 64, as in decoding with a cache.",
        "is_causal=True, query_offset=48",
    ),
    (
        "Window",
        "A query attends to some keys before it and after it.",
        "local_window_size=(16, 8)",
    ),
    (
        "Causal window",
        "Sliding-window attention of a decoder.",
        "is_causal=True, local_window_size=(16, 0)",
    ),
    (
        "Lengths",
        "Padding at the end of queries and keys, for each batch entry.",
        "query_seq_lengths=jnp.array([56]), key_value_seq_lengths=jnp.array([44])",
    ),
    (
        "Packed documents",
        "Segment ids: a query attends to the keys of its own document.",
        "is_causal=True, query_segment_ids=jnp.repeat(jnp.arange(4), 16)[None]",
    ),
    (
        "A boolean mask",
        "Any pairs, of any broadcast shape. It takes memory for each pair.",
        "mask=jnp.tri(64, dtype=bool)[::-1]",
    ),
    (
        "A function of the pair",
        "`mask_mod`: here a prefix that all queries attend to, causal after it.",
        "mask_mod=lambda b, h, q, kv: (kv < 20) | (kv <= q)",
    ),
    (
        "Several together",
        "All masks of a call must keep a pair.",
        "is_causal=True, local_window_size=(24, 0), key_value_seq_lengths="
        "jnp.array([52]), query_segment_ids=jnp.repeat(jnp.arange(2), 32)[None]",
    ),
)
SIZES = {"Causal, the last queries": 16}  # queries, where they are not 64


def write_masks(folder: Path) -> str:
    """Draws all into a folder; returns a page that shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    page = [
        "# Masks in pictures",
        "Queries go downwards, keys to the right. White lines are blocks of 16 rows (a "
        "GPU's are larger). "
        "Each picture is drawn by the call beside it, from the library's own masks "
        "([recipe](jax_flash2/RECIPES.md#a-picture-of-a-mask)).",
        "```python\nimport jax.numpy as jnp\nfrom jax_flash2 import plot_mask\n\n"
        "query = key = jnp.zeros((1, 64, 1, 16))  # 64 queries and keys\n```",
    ]
    for i, (title, text, arguments) in enumerate(MASKS):
        rows = SIZES.get(title, 64)
        query, key = jnp.zeros((1, rows, 1, 16)), jnp.zeros((1, 64, 1, 16))
        figure = plt.figure(figsize=(7.2, 3.2 if rows == 64 else 1.8), layout="tight")
        code = f"plot_mask(query, key, key, {arguments}, block=16)"
        names = {"plot_mask": plot_mask, "jnp": jnp, "query": query, "key": key}
        names["ax"] = figure.add_subplot()
        eval(code.replace("block=16", "block=16, ax=ax"), names)
        figure.savefig(folder / f"mask{i}.png", dpi=150)
        plt.close(figure)
        first = "" if rows == 64 else f"query = jnp.zeros((1, {rows}, 1, 16))\n"
        code = "\n".join(textwrap.wrap(code, 78, subsequent_indent="    "))
        page += [f"## {title}", text, f"```python\n{first}{code}\n```"]
        page += [f"![{title}](pictures/mask{i}.png){{ width=640 }}"]
    return "\n\n".join(page) + "\n"


# Who does what when, in the order of BUILD_NOTES.md, "The Hopper kernels".
_COLOURS = {
    "loads (TMA)": "#7aa6c2",
    "products (wgmma)": "#1f5f8b",
    "exponents": "#e0a458",
    "store (TMA)": "#9aa5b1",
}
_LANES = ("consumer 1", "consumer 0", "producer")


# When a block is loaded, with two stages: a stage is free once both consumers read it.
_LOADS = {"k0": 0, "v0": 0.9, "k1": 1.8, "v1": 2.7, "k2": 3.6, "v2": 5.7}
_NEXT = {"k0": 6.6, "v0": 8.1, "k1": 9.0}  # of the next work tile


def _events() -> list[tuple[str, str, float, float, str]]:
    """(lane, kind, begin, length, label) of a work tile with three blocks of keys."""
    loads = [*_LOADS.items(), *((f"{x}'", at) for x, at in _NEXT.items())]
    found = [("producer", "loads (TMA)", at, 0.85, name) for name, at in loads]
    for lane, begin in (("consumer 0", 1.0), ("consumer 1", 2.2)):
        products = ("q k0", "q k1, p0 v0", "q k2, p1 v1")
        for i, label in enumerate(products):
            at = begin + 2.4 * i
            found.append((lane, "products (wgmma)", at, 1.1, label))
            found.append((lane, "exponents", at + 1.2, 1.1, f"softmax {i}"))
        found.append((lane, "products (wgmma)", begin + 7.2, 0.6, "p2 v2"))
        found.append((lane, "store (TMA)", begin + 7.85, 0.8, "o, lse"))
    return found


def write_pipeline(folder: Path) -> None:
    """Draws how the warpgroups of a thread block of the forward kernel take turns."""
    figure = plt.figure(figsize=(10, 3), layout="constrained")
    ax = figure.add_subplot()
    for lane, kind, begin, length, label in _events():
        y = _LANES.index(lane)
        ax.barh(y, length, 0.62, begin, color=_COLOURS[kind], edgecolor="white")
        dark = kind == "products (wgmma)"
        ax.text(
            *(begin + length / 2, y, label), ha="center", va="center", fontsize=9,
            color="white" if dark else "black",
        )  # fmt: skip
    ax.set_yticks(range(len(_LANES)), _LANES)
    ax.set_xticks([])
    ax.set_xlabel("time, not to scale")
    ax.spines[["top", "right", "left"]].set_visible(False)
    patches = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
    ax.legend(handles=patches, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "pipeline.png", dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    write_masks(Path(sys.argv[1]))
    write_pipeline(Path(sys.argv[1]))
