"""Tables and plots of the newest run of each benchmark.

    python -m benchmarks.figures --write

Prints Markdown tables; writes plots of speed against sequence length, of memory and of
occupancy to PNG files beside the results, and `speed.png`, a small one for the README.
With --write the tables also go into README.md and benchmarks/RESULTS.md, between marks
like `<!-- features -->` and `<!-- /features -->`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from absl import flags

from benchmarks import (
    context_tables,
    cost_tables,
    function_rows,
    model_tables,
    options,
    records,
    serving_tables,
    tables,
)
from benchmarks.peers import OURS
from benchmarks.shapes import PASSES, Shape

TABLES: dict[str, Callable[[Sequence[Mapping]], str]] = {
    "attention": tables.comparison,
    "attention_float32": tables.comparison,
    "attention_float32_highest": tables.comparison,
    "occupancy": tables.comparison,
    "memory": cost_tables.memory,
    "compile_time": cost_tables.compile_time,
    "first_calls": cost_tables.first_calls,
    "dispatch": cost_tables.dispatch,
    "features": cost_tables.features,
    "function_features": cost_tables.features,
    "functions": function_rows.results,
    "cpu": cost_tables.cpu,
    "context": context_tables.context,
    "models": model_tables.models,
    "serving": serving_tables.serving,
}
# Shorter ones, for the README.
OVERVIEWS = {"attention": tables.overview, "models": model_tables.overview}
NOT_MEASURED = "Not measured yet."
DOCUMENTS = ("README.md", "benchmarks/RESULTS.md")
# Colours of Okabe and Ito, told apart by the colour-blind, Tol's indigo, and greys; the
# peers that share a library share a colour.
_STYLES = {
    OURS: ("#D55E00", "o", "-"),
    "jax_flash2_any_order": ("#D55E00", "o", ":"),
    "flash4": ("#332288", "s", "-"),
    "flash4_deterministic": ("#332288", "s", ":"),
    "torch_cudnn": ("#0072B2", "^", "--"),
    "cudnn": ("#0072B2", "v", "-"),
    "tokamax_mosaic": ("#E69F00", "D", "-"),
    "torch_flash2": ("#009E73", "P", "-"),
    "pallas_mha": ("#CC79A7", "X", "-"),
    "tokamax_triton": ("#E69F00", "d", "--"),
    "torch_efficient": ("#555555", "<", "--"),
    "xla": ("#999999", ">", "-"),
}


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")  # draws to files: no window, no display needed
    import matplotlib.pyplot as plt

    return plt


def _style(name: str) -> dict:
    colour, marker, line = _STYLES.get(name, ("black", ".", ":"))
    ours = name == OURS
    return {
        "color": colour,
        "marker": marker,
        "linestyle": line,
        "linewidth": 2.5 if ours else 1.2,
        "markersize": 6 if ours else 4.5,
        "zorder": 3 if ours else 2,
        "label": tables.label(name),
    }


def _length(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _lines(axes, rows: Sequence[Mapping], peers: Sequence[str], x: str) -> None:
    """TFLOP/s against the attribute `x` of the shapes: a line a peer."""
    found = tables.by_shape(rows)
    for peer in peers:
        points = sorted(
            (getattr(shape, x), at[peer]["tflops"])
            for shape, at in found.items()
            if peer in at and tables.mark(at[peer]) is None
        )
        if points:
            axes.plot(*zip(*points, strict=True), **_style(peer))
    values = sorted({getattr(shape, x) for shape in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        values, [_length(v) if x == "length" else str(v) for v in values], minor=False
    )
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _panels(
    path: Path,
    panels: Sequence[Sequence[tuple[str, Sequence[Mapping]]]],
    peers: Sequence[str],
    *,
    title: str,
    x: str = "length",
) -> Path:
    """Saves a grid of panels (title, rows) for a page 8 inches wide."""
    plt = _pyplot()
    figure, grid = plt.subplots(
        len(panels),
        len(panels[0]),
        figsize=(8, 2.5 * len(panels) + 1.2),
        layout="constrained",
        squeeze=False,
    )
    names = {"length": "sequence length", "heads": "heads"}
    handles: dict[str, object] = {}
    flat = [panel for line in panels for panel in line]
    for axes, (name, rows) in zip(grid.flat, flat, strict=True):
        if not rows:
            axes.set_axis_off()
            continue
        _lines(axes, rows, peers, x)
        axes.set_title(name, fontsize=11)
        axes.set(xlabel=names[x], ylabel="TFLOP/s")
        found, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    figure.suptitle(title)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return _save(figure, path)


def _save(figure, path: Path) -> Path:
    """Saves with 64 colours: the file is a third as large, and kept with the code."""
    from PIL import Image  # comes with matplotlib

    figure.savefig(path, dpi=120)
    _pyplot().close(figure)
    with Image.open(path) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)
    return path


def _of(rows: Sequence[Mapping], **wanted) -> list[Mapping]:
    """Rows of a pass, of a kind of shapes, of a mask, as asked for."""

    def fits(row: Mapping) -> bool:
        shape = Shape(**row["shape"])
        has = {
            "which": row["pass"],
            "kind": tables.kind(shape),
            "causal": shape.causal,
        }
        return all(has[name] == value for name, value in wanted.items())

    return [row for row in rows if fits(row)]


def _kinds(rows: Sequence[Mapping]) -> list[str]:
    """Kinds of shapes, those with most lengths first, then in the order of tables."""
    lengths: dict[str, set[int]] = {}
    for shape in tables.by_shape(rows):
        lengths.setdefault(tables.kind(shape), set()).add(shape.length)
    return sorted(lengths, key=lambda kind: -len(lengths[kind]))


def _measured(rows: Sequence[Mapping]) -> list[str]:
    """Forward and backward if they were measured, or what was."""
    found = [which for which in PASSES if tables.present(_of(rows, which=which))]
    return found[:2]


def attention(rows: Sequence[Mapping], results_dir: Path) -> list[Path]:
    """A plot of all kinds of shapes for forward and backward, and the README's."""
    paths = []
    for which in _measured(rows):
        chosen = _of(rows, which=which)
        panels = [(kind, _of(chosen, kind=kind)) for kind in _kinds(chosen)]
        panels += [("", [])] * (len(panels) % 2)
        path = results_dir / f"attention_{which}.png"
        title = f"Attention, {which}, {_where(rows)} (higher is better)"
        pairs = [panels[i : i + 2] for i in range(0, len(panels), 2)]
        paths.append(_panels(path, pairs, tables.present(chosen), title=title))
    return [*paths, *_readme(rows, results_dir)]


def _where(rows: Sequence[Mapping]) -> str:
    return f"{rows[0]['shape']['dtype']}, {rows[0]['device']}"


def _readme(rows: Sequence[Mapping], results_dir: Path) -> list[Path]:
    """Forward and backward of the two kinds of causal shapes with most lengths."""
    rows = _of(rows, causal=True) or rows
    passes = _measured(rows)
    if not passes:
        return []
    columns = _kinds(rows)[:2]
    panels = [
        [(f"{which}, {kind}", _of(rows, which=which, kind=kind)) for kind in columns]
        for which in passes
    ]
    title = f"Attention, {_where(rows)} (higher is better)"
    path = results_dir / "speed.png"
    return [_panels(path, panels, tables.present(rows), title=title)]


def occupancy(rows: Sequence[Mapping], results_dir: Path) -> list[Path]:
    passes = _measured(rows)
    if not passes:
        return []
    shape = Shape(**rows[0]["shape"])
    panels = [[(which, _of(rows, which=which)) for which in passes]]
    title = (
        f"One sequence of {_length(shape.length)}, head size {shape.head_size}, "
        f"causal, {_where(rows)}"
    )
    path = results_dir / "occupancy.png"
    return [_panels(path, panels, tables.present(rows), title=title, x="heads")]


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
        if points:
            axes.plot(*zip(*points, strict=True), **_style(peer))
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
    return [_save(figure, results_dir / "memory.png")]


def context(rows: Sequence[Mapping], results_dir: Path) -> list[Path]:
    """Weak scaling of jax_flash2: a plot a pass, a line for each mask and number of P.

    Rows a device against the time of one device for all rows over P times that of P.
    """
    plt, paths = _pyplot(), []
    for which in dict.fromkeys(row["pass"] for row in rows):
        lines: dict[tuple, list] = {}
        for row in rows:
            ours = row["peer"] == OURS and row["scaling"] == "weak"
            if ours and row["pass"] == which and row.get("efficiency") is not None:
                point = row["rows"], row["efficiency"]
                lines.setdefault((row["mask"], row["devices"]), []).append(point)
        if not lines:
            continue
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        for (mask, devices), points in lines.items():
            name = f"{mask}, {devices} devices"
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
        axes.axhline(1.0, color="grey", ls="--")
        axes.set_xscale("log", base=2)
        lengths = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(lengths, map(_length, lengths))
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)
        axes.set(
            xlabel="rows a device",
            ylabel="of one device",
            title=f"Weak scaling, {tables.TITLES[which].lower()}\n{_where(rows)}",
        )
        axes.grid(alpha=0.3)
        axes.legend()
        paths.append(_save(figure, results_dir / f"context_{which}.png"))
    return paths


PLOTS = {
    "attention": attention,
    "occupancy": occupancy,
    "memory": memory,
    "context": context,
}


def sections(results_dir: Path) -> dict[str, str]:
    """Markdown of every benchmark, and overviews: `attention_overview` and so on.

    Of one without results it says so.
    """
    found = {}
    for name, table in TABLES.items():
        rows = records.newest(results_dir, name)
        found[name] = table(rows) if rows else NOT_MEASURED
        if name in OVERVIEWS:
            short = OVERVIEWS[name](rows) if rows else NOT_MEASURED
            found[f"{name}_overview"] = short
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
