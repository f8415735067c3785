"""Tables and plots of the newest run of each benchmark.

    python -m benchmarks.figures --write

Prints Markdown tables; writes bar plots of speed against sequence length as in the
FlashAttention-2 paper, memory and occupancy to PNG files beside the results, and
`speed.png`, a small one for the README. With --write the tables also go into README.md
and BUILD_NOTES.md, between marks like `<!-- features -->` and `<!-- /features -->`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from absl import flags

from benchmarks import options, records, tables
from benchmarks.harness import PASSES, Shape
from benchmarks.peers import OURS

TABLES: dict[str, Callable[[Sequence[Mapping]], str]] = {
    "attention": tables.comparison,
    "occupancy": tables.comparison,
    "memory": tables.memory,
    "compile_time": tables.compile_time,
    "dispatch": tables.dispatch,
    "features": tables.features,
    "cpu": tables.cpu,
}
DOCUMENTS = ("README.md", "BUILD_NOTES.md")
# Colours of Okabe and Ito, told apart by the colour-blind, and Tol's indigo. Peers that
# share a kernel's maker differ in the hatch.
_STYLES = {
    OURS: ("#D55E00", ""),
    "xla": ("#999999", ""),
    "cudnn": ("#0072B2", ""),
    "tokamax_triton": ("#F0E442", ""),
    "tokamax_mosaic": ("#E69F00", ""),
    "pallas_mha": ("#CC79A7", ""),
    "torch_flash2": ("#009E73", ""),
    "torch_cudnn": ("#56B4E9", "///"),
    "torch_efficient": ("#DDDDDD", "///"),
    "flash4": ("#332288", ""),
}
_README_PEERS = (OURS, "torch_flash2", "cudnn", "tokamax_triton", "pallas_mha", "xla")


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")  # draws to files: no window, no display needed
    import matplotlib.pyplot as plt

    return plt


def _style(name: str) -> dict:
    colour, hatch = _STYLES.get(name, ("#FFFFFF", "..."))
    ours = name == OURS
    return {
        "color": colour,
        "hatch": hatch,
        "edgecolor": "black",
        "linewidth": 1.2 if ours else 0.3,
        "label": tables.label(name),
    }


def _length(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _bars(axes, rows: Sequence[Mapping], peers: Sequence[str], x: str) -> None:
    """Groups of bars, TFLOP/s against the attribute `x` of the shapes."""
    found = tables.by_shape(rows)
    shapes = sorted(found, key=lambda shape: getattr(shape, x))
    width = 0.85 / len(peers)
    for i, peer in enumerate(peers):
        places = [j + width * (i - (len(peers) - 1) / 2) for j in range(len(shapes))]
        cells = [found[shape].get(peer) for shape in shapes]
        marks = [tables.mark(row) for row in cells]
        heights = [
            row["tflops"] if text is None else 0.0
            for row, text in zip(cells, marks, strict=True)
        ]
        axes.bar(places, heights, width, **_style(peer))
        for place, height, text in zip(places, heights, marks, strict=True):
            axes.annotate(
                f"{height:.3g}" if text is None else text,
                (place, height),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90,
                fontsize=6,
                fontweight="bold" if peer == OURS else "normal",
            )
    values = [getattr(shape, x) for shape in shapes]
    axes.set_xticks(
        range(len(shapes)), [_length(v) if x == "length" else str(v) for v in values]
    )
    axes.margins(y=0.18)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _panels(
    path: Path,
    panels: Sequence[Sequence[tuple[str, Sequence[Mapping]]]],
    peers: Sequence[str],
    *,
    title: str,
    x: str = "length",
    size: tuple[float, float] = (6.5, 3.0),
) -> Path:
    """Saves a grid of bar panels (title, rows); one without rows stays empty."""
    plt = _pyplot()
    width, height = size[0] * len(panels[0]), size[1] * len(panels) + 0.8
    figure, grid = plt.subplots(
        len(panels),
        len(panels[0]),
        figsize=(width, height),
        layout="constrained",
        squeeze=False,
    )
    names = {"length": "sequence length T", "heads": "heads N"}
    handles: dict[str, object] = {}
    flat = [panel for line in panels for panel in line]
    for axes, (name, rows) in zip(grid.flat, flat, strict=True):
        if not rows:
            axes.set_axis_off()
            continue
        _bars(axes, rows, peers, x)
        axes.set(title=name, xlabel=names[x], ylabel="speed (TFLOP/s)")
        found, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    figure.suptitle(title)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(peers), 5 if width > 8 else 3),
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _present(rows: Sequence[Mapping]) -> list[str]:
    """Peers that have a figure to show, ours first."""
    found = tables.names(row for row in rows if row.get("tflops"))
    return sorted(found, key=lambda name: name != OURS)


def _of(rows: Sequence[Mapping], **wanted) -> list[Mapping]:
    """Rows of a pass, of a group of shapes, of a mask, as asked for."""

    def fits(row: Mapping) -> bool:
        shape = Shape(**row["shape"])
        has = {
            "which": row["pass"],
            "heads": tables.heads(shape),
            "causal": shape.causal,
        }
        return all(has[name] == value for name, value in wanted.items())

    return [row for row in rows if fits(row)]


def _lines(rows: Sequence[Mapping]) -> list[str]:
    shapes = {Shape(**row["shape"]) for row in rows}
    ordered = sorted(shapes, key=lambda shape: (shape.group > 1, shape.head_size))
    return list(dict.fromkeys(map(tables.heads, ordered)))


def attention(rows: Sequence[Mapping], results_dir: Path) -> list[Path]:
    """A plot for each pass, and the README's."""
    paths = []
    for which in PASSES:
        chosen = _of(rows, which=which)
        if not _present(chosen):
            continue
        masks = sorted({row["shape"]["causal"] for row in chosen})
        panels = [
            [
                (
                    f"{heads}, {'causal' if causal else 'not causal'}",
                    _of(chosen, heads=heads, causal=causal),
                )
                for causal in masks
            ]
            for heads in _lines(chosen)
        ]
        path = results_dir / f"attention_{which}.png"
        title = f"Attention {which.replace('_', ' and ')}, {rows[0]['device']}"
        paths.append(_panels(path, panels, _present(chosen), title=title))
    return [*paths, *_readme(rows, results_dir)]


def _readme(rows: Sequence[Mapping], results_dir: Path) -> list[Path]:
    """Forward and backward, causal, head sizes 64 and 128 where they were measured."""
    rows = [row for row in rows if row["peer"] in _README_PEERS]
    causal = _of(rows, causal=True) or rows
    usual = [h for h in _lines(causal) if h in ("head size 64", "head size 128")]
    columns = usual or _lines(causal)[:2]
    passes = [which for which in PASSES if _present(_of(causal, which=which))][:2]
    if not passes:
        return []
    panels = [
        [(f"{which}, {h}", _of(causal, which=which, heads=h)) for h in columns]
        for which in passes
    ]
    present = _present(causal)
    peers = [name for name in _README_PEERS if name in present]
    kind = "Causal attention" if _of(rows, causal=True) else "Attention"
    device, dtype = rows[0]["device"], rows[0]["shape"]["dtype"]
    title = f"{kind}, {dtype}, {device} (higher is better)"
    path = results_dir / "speed.png"
    return [_panels(path, panels, peers, title=title, size=(5.0, 2.6))]


def occupancy(rows: Sequence[Mapping], results_dir: Path) -> list[Path]:
    present = _present(rows)
    if not present:
        return []
    shape = Shape(**rows[0]["shape"])
    panels = [[(which, _of(rows, which=which))] for which in PASSES]
    panels = [panel for panel in panels if panel[0][1]]
    title = (
        f"B 1, T {_length(shape.length)}, head size {shape.head_size}, causal, "
        f"{rows[0]['device']}"
    )
    path = results_dir / "occupancy.png"
    return [_panels(path, panels, present, title=title, x="heads")]


def memory(rows: Sequence[Mapping], results_dir: Path) -> list[Path]:
    """Extra memory against T, both axes logarithmic: slope 1 is linear."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for peer in tables.names(rows):
        points = sorted(
            (row["shape"]["length"], row["memory"]["temp"] / 2**20)
            for row in rows
            if row["peer"] == peer and (row.get("memory") or {}).get("temp")
        )
        colour = _STYLES.get(peer, ("black", ""))[0]
        if points:
            axes.plot(
                *zip(*points, strict=True), "o-", color=colour, label=tables.label(peer)
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({row["shape"]["length"] for row in rows})
    axes.set_xticks(lengths, map(_length, lengths))
    axes.set(
        xlabel="sequence length T",
        ylabel="memory beyond operands and results (MiB)",
        title=f"Forward and backward, {rows[0]['device']}",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    path = results_dir / "memory.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return [path]


PLOTS = {"attention": attention, "occupancy": occupancy, "memory": memory}


def sections(results_dir: Path) -> dict[str, str]:
    """Markdown of every benchmark that has results, and the README's `overview`."""
    found = {}
    for name, table in TABLES.items():
        rows = records.newest(results_dir, name)
        if rows:
            found[name] = table(rows)
        if rows and name == "attention":
            present = [peer for peer in _README_PEERS if peer in tables.names(rows)]
            found["overview"] = tables.overview(rows, present)
    return found


def plots(results_dir: Path) -> list[Path]:
    """Writes them, of every benchmark that has results."""
    paths = []
    for name, plot in PLOTS.items():
        rows = records.newest(results_dir, name)
        if rows:
            paths += plot(rows, results_dir)
    return paths


def filled(text: str, parts: Mapping[str, str]) -> str:
    """`text` with the parts between their marks.

    Raises:
      ValueError: if a mark is not closed, or there is no part for it.
    """
    for name in re.findall(r"<!-- (\w+) -->", text):
        if name not in parts:
            raise ValueError(f"no results for the mark {name!r}")
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        old, closed, after = rest.partition(end)
        if not closed or "<!--" in old:
            raise ValueError(f"the mark {name!r} is not closed")
        text = f"{before}{begin}\n\n{parts[name]}\n\n{end}{after}"
    return text


def main():
    results_dir = Path(_RESULTS_DIR.value)
    parts = sections(results_dir)
    for name, part in parts.items():
        print(f"## {name}\n\n{part}\n")
    if not parts:
        print(f"no results in {results_dir}")
    try:
        for path in plots(results_dir):
            print(f"plot: {path}")
    except ImportError as error:
        print(f"No plots: {error}.")
    if _WRITE.value:
        for name in DOCUMENTS:
            path = records.ROOT / name
            path.write_text(filled(path.read_text(), parts))
            print(f"tables: {path}")


if __name__ == "__main__":
    _RESULTS_DIR = flags.DEFINE_string(
        "results_dir", records.RESULTS_DIR, "Of the rows; the plots go there too."
    )
    _WRITE = flags.DEFINE_bool("write", False, f"Tables into {', '.join(DOCUMENTS)}.")
    options.launch(main)
