"""Tables of calls of published models: times, and ratios to what JAX has already."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.model_calls import GROUPS
from benchmarks.peers import OURS
from benchmarks.tables import markdown, origin

_JAX_NN = {"cudnn": "cuDNN", "xla": "XLA"}
_ORDER = [call.name for calls in GROUPS.values() for call in calls]
_Cells = dict[tuple[str, str, str, str], dict[str, Mapping]]


def models(rows: Sequence[Mapping]) -> str:
    """Every call, then a summary of each group."""
    if not rows:
        return "no rows"
    parts = [origin(rows), _calls(rows), _summary(rows)]
    if missing := [name for name in _ORDER if name not in {x["call"] for x in rows}]:
        parts.append(f"Not timed in this run: {'; '.join(missing)}.")
    return "\n\n".join(parts)


def overview(rows: Sequence[Mapping]) -> str:
    """The summary alone."""
    return f"{origin(rows)}\n\n{_summary(rows)}"


def _by_call(rows: Sequence[Mapping]) -> _Cells:
    """Rows by group, call, sizes and pass, then by peer; in the order of `GROUPS`."""
    cells: _Cells = {}
    place = {name: i for i, name in enumerate(_ORDER)}
    for row in sorted(rows, key=lambda row: place.get(row["call"], len(place))):
        at = row["group"], row["call"], row["sizes"], row["pass"]
        cells.setdefault(at, {})[row["peer"]] = row
    return cells


def _seconds(row: Mapping) -> float:
    """Of its kernels alone if the call is short."""
    return row.get("kernel_seconds") or row["seconds"]


def _fastest(at: Mapping[str, Mapping], names) -> tuple[float, str] | None:
    """Seconds and name of the fastest of some peers that have right results."""
    found = [
        (_seconds(row), name)
        for name, row in at.items()
        if name in names and "seconds" in row and not row["wrong"]
    ]
    return min(found, default=None)


def _ratio(at: Mapping[str, Mapping], names) -> float | None:
    """How many times as fast jax_flash2 is as the fastest of some peers."""
    other, ours = _fastest(at, names), _fastest(at, [OURS])
    return other[0] / ours[0] if other and ours else None


def _time(row: Mapping) -> str:
    if "seconds" not in row:
        return "-"
    return f"{1e6 * _seconds(row):.4g}{' WRONG' if row['wrong'] else ''}"


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _calls(rows: Sequence[Mapping]) -> str:
    lines = []
    for (_, name, sizes, which), at in _by_call(rows).items():
        best = _fastest(at, _JAX_NN)
        line = [name, sizes, which.replace("_", " and "), _time(at.get(OURS, {}))]
        line.append(f"{1e6 * best[0]:.4g} ({_JAX_NN[best[1]]})" if best else "-")
        line.append(_time(at.get("tokamax", {})))
        line += [_number(_ratio(at, x)) for x in (_JAX_NN, ["tokamax"])]
        lines.append(line)
    header = ["call", "B x T, N (K) x H", "pass", "jax_flash2, us", "best of jax.nn"]
    header += ["tokamax", "times as fast as jax.nn", "as tokamax"]
    return markdown(header, lines)


def _summary(rows: Sequence[Mapping]) -> str:
    """Ratios to the best of jax.nn, by group and pass."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for (group, _, _, which), at in _by_call(rows).items():
        ratio = _ratio(at, _JAX_NN)
        if ratio is not None:
            ratios.setdefault((group, which.replace("_", " and ")), []).append(ratio)
    if everything := [x for found in ratios.values() for x in found]:
        ratios["all", "both passes"] = everything
    lines = [
        [*key, str(len(x)), f"{min(x):.2f}", _number(_mean(x))]
        for key, x in ratios.items()
    ]
    return markdown(["group", "pass", "calls", "lowest", "geometric mean"], lines)


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
