"""Markdown tables of what calls cost: memory, compiling, dispatch, features."""

import itertools
import math
from collections.abc import Mapping, Sequence

from benchmarks import tables
from benchmarks.peers import OURS
from benchmarks.shapes import Shape


def _mib(count: float | None) -> str:
    return "" if count is None else f"{count / 2**20:.4g}"


def _temp(row: Mapping | None) -> int | None:
    return ((row or {}).get("memory") or {}).get("temp")


def growths(rows: Sequence[Mapping], peer: str) -> dict[Shape, float]:
    """By what the memory grows per doubling of T, from the length before to this."""
    known = [
        (shape, temp)
        for shape, found in tables.by_shape(rows).items()
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
    return f"- {tables.label(peer)}: {answer} in T" + (
        f" (last doublings: x {last})" if last else ""
    )


def memory(rows: Sequence[Mapping]) -> str:
    """Extra memory against T: MiB planned, MiB measured, bytes a query row and head."""
    peers = tables.names(rows)
    header = ["B x T, N (K) x H"]
    for peer in peers:
        header += [
            f"{tables.label(peer)}: MiB",
            "measured MiB",
            "bytes / row and head",
            "growth",
        ]
    growth = {peer: growths(rows, peer) for peer in peers}
    lines = []
    for shape, found in tables.by_shape(rows).items():
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
                _mib(temp) or tables.mark(row) or "",
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
    parts = [
        tables.origin(rows),
        title,
        tables.markdown(header, lines),
        linear,
        tables.failures(rows),
    ]
    return "\n\n".join(part for part in parts if part)


def cpu(rows: Sequence[Mapping]) -> str:
    """Milliseconds and extra MiB of jax_flash2 and of jax.nn, and their ratios."""
    growth = {peer: growths(rows, peer) for peer in (OURS, "xla")}
    lines = []
    for shape, found in tables.by_shape(rows).items():
        ours, theirs = found[OURS], found["xla"]
        bad = tables.mark(ours) or tables.mark(theirs)
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
    parts = [
        tables.origin(rows),
        tables.markdown(header, lines),
        linear,
        tables.failures(rows),
    ]
    return "\n\n".join(part for part in parts if part)


def _milliseconds(row: Mapping) -> str:
    if row["failure"]:
        return tables.mark(row) or ""
    middle, low, high = (1e3 * row[f"seconds{x}"] for x in ("", "_min", "_max"))
    return f"{middle:.4g} ({low:.4g} to {high:.4g})"


def compile_time(rows: Sequence[Mapping]) -> str:
    """Seconds to lower and to compile a new shape."""
    lines = [
        [
            tables.label(row["peer"]),
            tables.TITLES[row["pass"]].lower(),
            tables.mark(row) or f"{row['lower_seconds']:.3g}",
            tables.mark(row) or f"{row['compile_seconds']:.3g}",
        ]
        for row in rows
    ]
    header = ["peer", "pass", "trace and lower, s", "compile, s"]
    parts = [tables.origin(rows), tables.markdown(header, lines), tables.failures(rows)]
    return "\n\n".join(part for part in parts if part)


def first_calls(rows: Sequence[Mapping]) -> str:
    """Seconds of a first call and of a second shape, and those of another process."""

    def cells(row):
        names = ("lower", "compile", "second", "cached", "exported")
        figures = [row.get(x, math.nan) for x in names]
        figures.insert(2, figures[0] + figures[1])
        return [tables.mark(row) or f"{x:.3g}" for x in figures]

    lines = [[row["call"], tables.label(row["peer"]), *cells(row)] for row in rows]
    header = ["call", "peer", "trace and lower, s", "compile", "both", "a second shape"]
    header += ["another process, from the cache", "and from an export"]
    parts = [
        tables.origin(rows),
        str(Shape(**rows[0]["shape"])),
        tables.markdown(header, lines),
        tables.failures(rows),
    ]
    return "\n\n".join(part for part in parts if part)


def dispatch(rows: Sequence[Mapping]) -> str:
    """Microseconds of one small call."""

    def cells(row):
        if tables.mark(row):
            return [tables.mark(row), ""]
        low, high = (1e6 * row[f"seconds_{x}"] for x in ("p05", "p95"))
        return [f"{1e6 * row['seconds']:.4g}", f"{low:.4g} to {high:.4g}"]

    lines = []
    for row in rows:
        shape, which = str(Shape(**row["shape"])), tables.TITLES[row["pass"]].lower()
        lines.append([shape, which, tables.label(row["peer"]), *cells(row)])
    header = ["B x T, N x H", "pass", "peer", "median, us", "5 to 95 %, us"]
    parts = [tables.origin(rows), tables.markdown(header, lines), tables.failures(rows)]
    return "\n\n".join(part for part in parts if part)


def features(rows: Sequence[Mapping]) -> str:
    """Milliseconds with each feature, and times those beside it for each pair kept.

    The backward is forward and backward less the forward. A table for each shape.
    """
    parts = [tables.origin(rows)]
    shapes = dict.fromkeys(Shape(**row["shape"]) for row in rows)
    for shape in shapes:
        own = [row for row in rows if Shape(**row["shape"]) == shape]
        parts += [str(shape), _features(own)]
    lines = [
        f"- {row['feature']}, {row['pass'].replace('_', ' ')}, "
        f"{Shape(**row['shape'])}: {row['failure']}"
        for row in rows
        if row["failure"]
    ]
    return "\n\n".join(filter(None, [*parts, "\n".join(lines)]))


def _features(rows: Sequence[Mapping]) -> str:
    """The table of a shape."""
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

    lines = []
    for name, passes in by_feature.items():
        pairs, other = passes["forward"]["pairs"], passes["forward"]["beside"]
        line = [name, f"{pairs:.3g}", other]
        found = times(passes)
        others = by_feature[other]
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
    header = ["feature", "pairs kept", "beside", "forward, ms (x beside, per pair)"]
    header += ["backward", "backward with the operand's gradient", "extra MiB"]
    return tables.markdown(header, lines)
