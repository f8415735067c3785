"""Markdown tables of rows of results."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.harness import PASSES, Shape
from benchmarks.peers import OURS, PEERS

_TITLES = {
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
    """Peers in the order in which they first come."""
    return list(dict.fromkeys(row["peer"] for row in rows))


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
    text = f"{row['device']}, {row['date']}, commit {row['commit'][:9]}{changed}"
    if row.get("matmul_tflops"):
        text += f"; matrix product {row['matmul_tflops']:.4g} TFLOP/s"
    return f"{text}; {packages}."


def failures(rows: Iterable[Mapping]) -> str:
    """Each failure, wrong result and note once, as lines of a list."""
    lines = {}
    for row in rows:
        text = row["failure"] or row.get("note")
        if row.get("wrong"):
            text = f"WRONG, row errors {row['row_error']}"
        if text:
            lines.setdefault(f"- {label(row['peer'])}: {text}", None)
    return "\n".join(lines)


def _pivot(rows, value: Callable[[Mapping], str]) -> str:
    """A line a shape, a column a peer."""
    peers = names(rows)

    def cell(row: Mapping | None) -> str:
        text = mark(row)
        return value(row) if text is None else text

    lines = [
        [str(shape), *(cell(found.get(peer)) for peer in peers)]
        for shape, found in by_shape(rows).items()
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
            table = _pivot(chosen, lambda row: f"{row['tflops']:.3g}")
            parts.append(f"{_TITLES[which]}, TFLOP/s\n\n{table}")
    parts += [ratios(rows), failures(rows)]
    return "\n\n".join(part for part in parts if part)


def in_overview(shape: Shape) -> bool:
    """T 4096 for every kind of head and mask; causal heads of 128 at every length."""
    plain = shape.head_size == 128 and shape.group == 1
    return shape.length == 4096 or (plain and shape.causal)


def overview(rows: Sequence[Mapping], peers: Sequence[str]) -> str:
    """A few shapes and peers of a comparison for the README, and ratios over all.

    Of the shapes two passes, as both in one lie between them.
    """

    rows = [row for row in rows if row["peer"] in peers]
    found = {
        which: by_shape(row for row in rows if row["pass"] == which) for which in PASSES
    }
    shapes = list(dict.fromkeys(shape for x in found.values() for shape in x))
    lines = []
    for shape in list(filter(in_overview, shapes)) or shapes:
        passes = [which for which in PASSES if shape in found[which]][:2]
        for which in passes:
            at = [found[which][shape].get(peer) for peer in peers]
            cells = [mark(row) or f"{row['tflops']:.3g}" for row in at]
            name = str(shape) if which == passes[0] else ""
            lines.append([name, _TITLES[which].lower(), *cells])
    table = markdown(["B x T, N (K) x H", "TFLOP/s", *map(label, peers)], lines)
    return "\n\n".join([origin(rows), table, ratios(rows, kinds=False)])


def heads(shape: Shape) -> str:
    group = f", {shape.heads} over {shape.kv_heads} heads" if shape.group > 1 else ""
    return f"head size {shape.head_size}{group}"


def kind(shape: Shape) -> str:
    """What shapes have in common that differ in lengths and batch alone."""
    return f"{heads(shape)}{', causal' if shape.causal else ''}"


def ratios(rows: Sequence[Mapping], *, kinds: bool = True) -> str:
    """How many times as fast as each peer jax_flash2 is: geometric means.

    Args:
      kinds: over the shapes of each kind too, not over all of them alone.
    """
    peers = [peer for peer in names(rows) if peer != OURS]
    lines = []
    for which in PASSES:
        shapes = by_shape(row for row in rows if row["pass"] == which)
        found_kinds = list(dict.fromkeys(map(kind, shapes))) if kinds else []
        for name in [*found_kinds, "all"]:
            found = [x for shape, x in shapes.items() if name in ("all", kind(shape))]
            cells = [_ratio(found, peer, spread=name == "all") for peer in peers]
            if any(cells):
                name = f"all {len(found)}" if name == "all" else name
                lines.append([_TITLES[which].lower(), name, *cells])
    if not lines:
        return ""
    return (
        "Speed of jax_flash2 divided by that of each peer, above 1 where jax_flash2 is "
        "faster: geometric mean over shapes (lowest to highest)\n\n"
        + markdown(["pass", "shapes", *map(label, peers)], lines)
    )


def _ratio(found: Iterable[Mapping[str, Mapping]], peer: str, *, spread: bool) -> str:
    """Over shapes; each item of `found` has the rows of one, by peer."""
    values = [
        rows[peer]["seconds"] / rows[OURS]["seconds"]
        for rows in found
        if mark(rows.get(peer)) is None and mark(rows.get(OURS)) is None
    ]
    if not values:
        return ""
    mean = f"{statistics.geometric_mean(values):.2f}"
    return f"{mean} ({min(values):.2f} to {max(values):.2f})" if spread else mean


def _mib(count: float | None) -> str:
    return "" if count is None else f"{count / 2**20:.4g}"


def _temp(row: Mapping | None) -> int | None:
    return ((row or {}).get("memory") or {}).get("temp")


def growths(rows: Sequence[Mapping], peer: str) -> dict[Shape, float]:
    """By what the memory grows per doubling of T, from the length before to this."""
    known = [
        (shape, temp)
        for shape, found in by_shape(rows).items()
        if (temp := _temp(found.get(peer)))
    ]
    known.sort(key=lambda pair: pair[0].length)
    return {
        shape: (temp / before) ** (1 / math.log2(shape.length / shorter.length))
        for (shorter, before), (shape, temp) in itertools.pairwise(known)
    }


def is_linear(growth: Mapping[Shape, float]) -> bool | None:
    """Whether memory at the longest lengths is linear in T; None if unknown."""
    last = list(growth.values())[-2:]
    return all(x < 2.2 for x in last) if last else None


def _linearity(rows: Sequence[Mapping], peer: str) -> str:
    growth = growths(rows, peer)
    answer = {True: "linear", False: "not linear", None: "unknown"}[is_linear(growth)]
    last = ", ".join(f"{x:.2f}" for x in list(growth.values())[-2:])
    return f"- {label(peer)}: {answer} in T" + (
        f" (last doublings: x {last})" if last else ""
    )


def memory(rows: Sequence[Mapping]) -> str:
    """Extra memory against T: MiB planned, MiB measured, bytes a query row and head."""
    peers = names(rows)
    header = ["B x T, N (K) x H"]
    for peer in peers:
        header += [
            f"{label(peer)}: MiB",
            "measured MiB",
            "bytes / row and head",
            "growth",
        ]
    growth = {peer: growths(rows, peer) for peer in peers}
    lines = []
    for shape, found in by_shape(rows).items():
        line = [str(shape)]
        for peer in peers:
            row = found.get(peer)
            temp = _temp(row)
            each = (
                None
                if temp is None
                else temp / (shape.batch * shape.length * shape.heads)
            )
            line += [
                _mib(temp) or mark(row) or "",
                _mib((row or {}).get("measured_bytes")),
                "" if each is None else f"{each:.4g}",
                f"x {growth[peer][shape]:.2f}" if shape in growth[peer] else "",
            ]
        lines.append(line)
    linear = "\n".join(_linearity(rows, peer) for peer in peers)
    title = (
        "Memory of forward and backward beyond operands, output and gradients; growth "
        "per doubling of T"
    )
    parts = [origin(rows), title, markdown(header, lines), linear, failures(rows)]
    return "\n\n".join(part for part in parts if part)


def cpu(rows: Sequence[Mapping]) -> str:
    """Milliseconds and extra MiB of jax_flash2 and of jax.nn, and their ratios."""
    growth = {peer: growths(rows, peer) for peer in (OURS, "xla")}
    lines = []
    for shape, found in by_shape(rows).items():
        ours, theirs = found[OURS], found["xla"]
        bad = mark(ours) or mark(theirs)
        times = [_milliseconds(row) for row in (ours, theirs)]
        ratio = bad or f"{ours['seconds'] / theirs['seconds']:.2f}"
        cells = [str(shape.length), *times, ratio]
        for peer, row in ((OURS, ours), ("xla", theirs)):
            grown = growth[peer].get(shape)
            cells.append(_mib(_temp(row)) + (f" (x {grown:.2f})" if grown else ""))
        lines.append(cells)
    header = [
        "T",
        "jax_flash2: ms (lowest to highest)",
        "jax.nn: ms",
        "time / jax.nn's",
        "jax_flash2: extra MiB (per doubling)",
        "jax.nn: extra MiB",
    ]
    linear = "\n".join(_linearity(rows, peer) for peer in growth)
    parts = [origin(rows), markdown(header, lines), linear, failures(rows)]
    return "\n\n".join(part for part in parts if part)


def _milliseconds(row: Mapping) -> str:
    if row["failure"]:
        return mark(row) or ""
    middle, low, high = (1e3 * row[f"seconds{x}"] for x in ("", "_min", "_max"))
    return f"{middle:.4g} ({low:.4g} to {high:.4g})"


def compile_time(rows: Sequence[Mapping]) -> str:
    """Seconds to lower and to compile a new shape."""
    lines = [
        [
            label(row["peer"]),
            _TITLES[row["pass"]].lower(),
            mark(row) or f"{row['lower_seconds']:.3g}",
            mark(row) or f"{row['compile_seconds']:.3g}",
        ]
        for row in rows
    ]
    header = ["peer", "pass", "trace and lower, s", "compile, s"]
    parts = [origin(rows), markdown(header, lines), failures(rows)]
    return "\n\n".join(part for part in parts if part)


def dispatch(rows: Sequence[Mapping]) -> str:
    """Microseconds of one small call."""

    def cells(row):
        if mark(row):
            return [mark(row), ""]
        low, high = (1e6 * row[f"seconds_{x}"] for x in ("p05", "p95"))
        return [f"{1e6 * row['seconds']:.4g}", f"{low:.4g} to {high:.4g}"]

    lines = []
    for row in rows:
        shape, which = str(Shape(**row["shape"])), _TITLES[row["pass"]].lower()
        lines.append([shape, which, label(row["peer"]), *cells(row)])
    header = ["B x T, N x H", "pass", "peer", "median, us", "5 to 95 %, us"]
    parts = [origin(rows), markdown(header, lines), failures(rows)]
    return "\n\n".join(part for part in parts if part)


def features(rows: Sequence[Mapping]) -> str:
    """Milliseconds with each feature, and times those of plain for each pair kept.

    The backward is forward and backward less the forward; plain attention is that with
    about as many pairs for each query.
    """
    by_feature: dict[str, dict[str, Mapping]] = {}
    for row in rows:
        by_feature.setdefault(row["feature"], {})[row["pass"]] = row

    def times(passes: Mapping[str, Mapping]) -> dict[str, float]:
        seconds = {which: row.get("seconds", math.nan) for which, row in passes.items()}
        forward = seconds["forward"]
        found = {"forward": forward, "backward": seconds["forward_backward"] - forward}
        if "with_operand" in seconds:
            found["with_operand"] = seconds["with_operand"] - forward
        return found

    lines, failed = [], []
    for name, passes in by_feature.items():
        pairs = passes["forward"]["pairs"]
        line = [name, f"{pairs:.3g}"]
        found = times(passes)
        others = by_feature[passes["forward"]["beside"]]
        beside = {"with_operand": times(others)["backward"]} | times(others)
        for which in ("forward", "backward", "with_operand"):
            ratio = math.nan
            if which in found:
                ratio = found[which] / beside[which]
                ratio *= others["forward"]["pairs"] / pairs
            text = f"{1e3 * found[which]:.3f} (x {ratio:.2f})" if which in found else ""
            line.append("fails" if which in found and math.isnan(ratio) else text)
        last = list(passes.values())[-1].get("memory") or {}
        line.append(f"{last['temp'] / 2**20:.4g}" if last.get("temp") else "")
        lines.append(line)
        failed += [f"- {name}: {r['failure']}" for r in passes.values() if r["failure"]]
    header = ["feature", "pairs kept", "forward, ms (x plain, per pair)", "backward"]
    header += ["backward, its operand's gradient too", "extra MiB"]
    shape = str(Shape(**rows[0]["shape"]))
    parts = [origin(rows), shape, markdown(header, lines), "\n".join(failed)]
    return "\n\n".join(part for part in parts if part)
