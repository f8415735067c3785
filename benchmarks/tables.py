"""Markdown tables of comparisons, and what all tables share."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.peers import OURS, PEERS
from benchmarks.shapes import PASSES, Shape

TITLES = {
    "forward": "Forward",
    "backward": "Backward",
    "forward_backward": "Forward and backward",
}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its columns aligned for readers of the source too."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = (
        " | ".join(x.ljust(width) for x, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(f"| {line} |" for line in padded)


def label(name: str) -> str:
    return PEERS[name].label if name in PEERS else name


def is_absent(row: Mapping) -> bool:
    return (row["failure"] or "").startswith("not installed")


def is_out_of_memory(row: Mapping) -> bool:
    text = (row["failure"] or "").lower()
    if "shared memory" in text:  # of a multiprocessor: its blocks are too large
        return False
    signs = ("resource_exhausted", "out of memory", "outofmemory")
    return any(sign in text for sign in signs)


def mark(row: Mapping | None) -> str | None:
    """What stands in the place of a number that should not be read; None if it may."""
    if row is None:
        return ""
    if row["failure"]:
        if is_absent(row):
            return "absent"
        if row["failure"].startswith("MemoryError"):
            return "too large"
        return "OOM" if is_out_of_memory(row) else "fails"
    return "WRONG" if row.get("wrong") else None


def names(rows: Iterable[Mapping]) -> list[str]:
    """Peers in the order of `PEERS`, then others as they first come."""
    known = {name: place for place, name in enumerate(PEERS)}
    found = dict.fromkeys(row["peer"] for row in rows)
    return sorted(found, key=lambda name: known.get(name, len(known)))


def present(rows: Iterable[Mapping]) -> list[str]:
    """Peers that have a figure to show."""
    return names(row for row in rows if mark(row) is None)


def by_shape(rows: Iterable[Mapping]) -> dict[Shape, dict[str, Mapping]]:
    """Rows of one pass by shape, in order, then by peer."""
    found: dict[Shape, dict[str, Mapping]] = {}
    for row in rows:
        found.setdefault(Shape(**row["shape"]), {})[row["peer"]] = row

    def order(shape: Shape):
        return shape.group, shape.head_size, shape.causal, shape.length, shape.heads

    return {shape: found[shape] for shape in sorted(found, key=order)}


def origin(rows: Sequence[Mapping]) -> str:
    """Where rows come from, in a line."""
    row = rows[0]
    packages = ", ".join(f"{name} {x}" for name, x in row["versions"].items())
    changed = " with changes" if row["dirty"] else ""
    text = f"{row['device']}, {row['date'][:10]}, commit {row['commit'][:9]}{changed}"
    if row.get("matmul_tflops"):
        text += f"; a matrix product runs at {row['matmul_tflops']:.4g} TFLOP/s"
    return f"{text}; {packages}."


def failures(rows: Iterable[Mapping]) -> str:
    """Every mark that stands for a number, with its reason, and every note: a list."""
    lines, needs = {}, {}
    for row in rows:
        text, name = row["failure"] or row.get("note"), label(row["peer"])
        if row.get("wrong"):
            text = f"row errors {row['row_error']}"
        if size := re.search(r"needs ([\d.]+) GiB of ([\d.]+)", text or ""):
            needs.setdefault((name, size[2]), []).append(float(size[1]))
        elif text:
            # Of failures that differ in their numbers alone the first is enough.
            about = f"{name}: {mark(row) or 'note'}: {re.sub('[0-9]+', '', text)}"
            lines.setdefault(about, f"- {mark(row) or 'note'}: {name}: {text}")
    for (name, limit), sizes in needs.items():
        low, high = f"{min(sizes):.3g}", f"{max(sizes):.3g}"
        span = low if low == high else f"{low} to {high}"
        lines[name, limit] = (
            f"- too large: {name}: needs {span} GiB and was not run; JAX may use "
            f"{limit} GiB, which the programs timed beside it share."
        )
    return "\n".join(lines.values())


def _cells(found: Mapping[str, Mapping], peers: Sequence[str]) -> list[str]:
    """TFLOP/s of a shape, or marks; the fastest is bold."""
    speeds = [found[p]["tflops"] for p in peers if p in found and not mark(found[p])]
    cells = []
    for peer in peers:
        row = found.get(peer)
        text = mark(row)
        if row is not None and text is None:
            text = f"{row['tflops']:.3g}"
            text = f"**{text}**" if row["tflops"] == max(speeds) else text
        cells.append(text or "")
    return cells


def _pivot(rows: Sequence[Mapping]) -> str:
    """A line a shape, a column a peer."""
    peers = names(rows)
    lines = [
        [str(shape), *_cells(found, peers)] for shape, found in by_shape(rows).items()
    ]
    return markdown(["B x T, N (K) x H", *map(label, peers)], lines)


def comparison(rows: Sequence[Mapping]) -> str:
    """TFLOP/s by shape and peer for each pass, then ratios, then what failed."""
    if not rows:
        return "no rows"
    parts = [origin(rows)]
    for which in PASSES:
        chosen = [row for row in rows if row["pass"] == which]
        if chosen:
            parts.append(f"{TITLES[which]}, TFLOP/s\n\n{_pivot(chosen)}")
    parts += [ratios(rows), failures(rows)]
    return "\n\n".join(part for part in parts if part)


def in_overview(shape: Shape) -> bool:
    """T 4096 for every kind of head and mask; causal heads of 128 at every length."""
    plain = shape.head_size == 128 and shape.group == 1
    return shape.length == 4096 or (plain and shape.causal)


def overview(rows: Sequence[Mapping]) -> str:
    """A few shapes of a comparison for the README, and ratios over all shapes.

    Two passes, forward / backward, as both in one lie between them.
    """
    rows = [row for row in rows if row["peer"] in present(rows)]
    peers = [x for x in names(rows) if not _has_same_forward(x)]
    found = {
        which: by_shape(row for row in rows if row["pass"] == which) for which in PASSES
    }
    shapes = list(dict.fromkeys(shape for x in found.values() for shape in x))
    lines, shown = [], []
    for shape in list(filter(in_overview, shapes)) or shapes:
        cells = []
        for which in [which for which in PASSES if shape in found[which]][:2]:
            cells.append(_cells(found[which][shape], peers))
            shown += found[which][shape].values()
        both = zip(*cells, strict=True)
        words = (" / ".join(dict.fromkeys(x) if "fails" in x else x) for x in both)
        lines.append([str(shape), *words])
    table = markdown(["B x T, N (K) x H", *map(label, peers)], lines)
    parts = [origin(rows), table, failures(shown), by_peer(rows)]
    return "\n\n".join(part for part in parts if part)


def _has_same_forward(name: str) -> bool:
    return name in PEERS and PEERS[name].same_forward


def by_peer(rows: Sequence[Mapping]) -> str:
    """How many times as fast as each peer jax_flash2 is, and on how many shapes."""
    found = {
        which: by_shape(row for row in rows if row["pass"] == which) for which in PASSES
    }
    passes = [which for which in PASSES if found[which]][:2]
    lines = []
    for peer in present(rows):
        if peer != OURS:
            line = [label(peer)]
            for which in passes:
                values = _quotients(found[which].values(), peer)
                line += [_spread(values), str(len(values) or "")]
            lines.append(line)
    if not lines:
        return ""
    header = ["peer"]
    for which in passes:
        header += [TITLES[which].lower(), "shapes"]
    return (
        "Speed of jax_flash2 divided by the peer's: geometric mean over the shapes "
        "that both ran (lowest to highest). Above 1, jax_flash2 is faster.\n\n"
        + markdown(header, lines)
    )


def heads(shape: Shape) -> str:
    group = f", {shape.heads} over {shape.kv_heads} heads" if shape.group > 1 else ""
    return f"head size {shape.head_size}{group}"


def kind(shape: Shape) -> str:
    """What shapes have in common that differ in lengths and batch alone."""
    return f"{heads(shape)}{', causal' if shape.causal else ''}"


def ratios(rows: Sequence[Mapping]) -> str:
    """How many times as fast as each peer jax_flash2 is, over each kind of shapes."""
    peers = [peer for peer in present(rows) if peer != OURS]
    lines = []
    for which in PASSES:
        shapes = by_shape(row for row in rows if row["pass"] == which)
        for name in [*dict.fromkeys(map(kind, shapes)), "all"]:
            found = [x for shape, x in shapes.items() if name in ("all", kind(shape))]
            line, values = [], [_quotients(found, peer) for peer in peers]
            for x in values:
                text = _spread(x) if name == "all" else _spread(x).partition(" ")[0]
                few = f", {len(x)} of {len(found)}" if 0 < len(x) < len(found) else ""
                line.append(text + few)
            if any(values):
                name = f"all {len(found)}" if name == "all" else name
                lines.append([TITLES[which].lower(), name, *line])
    if not lines:
        return ""
    return (
        "Speed of jax_flash2 divided by that of each peer: geometric mean over shapes "
        "(lowest to highest). Above 1, jax_flash2 is faster. `5 of 6`: the peer ran on "
        "five of six shapes.\n\n"
        + markdown(["pass", "shapes", *map(label, peers)], lines)
    )


def _quotients(found: Iterable[Mapping[str, Mapping]], peer: str) -> list[float]:
    """Of a peer's time and ours, by shape; `found` has a shape's rows by peer."""
    return [
        rows[peer]["seconds"] / rows[OURS]["seconds"]
        for rows in found
        if mark(rows.get(peer)) is None and mark(rows.get(OURS)) is None
    ]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = statistics.geometric_mean(values)
    return f"{mean:.2f} ({min(values):.2f} to {max(values):.2f})"
