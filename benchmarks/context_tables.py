"""Tables of attention with rows divided over devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks import tables
from benchmarks.context_peers import PEERS
from benchmarks.shapes import Shape

HEADER = [
    *("mask", "P x T, N (K) x H", "peer", "ms", "TFLOP/s a device"),
    *("of one device", "of its kernels", "MiB received", "peak MiB", "error"),
]
NOTE = (
    "P devices have T rows each. TFLOP/s count the pairs that the mask keeps. `of one "
    "device` is parallel efficiency: one device's time for all rows, divided by P "
    "times the time of P devices. `~`: one device did fewer rows, and its time is "
    "extrapolated by its TFLOP/s. `of its kernels`: time of the busiest device's "
    "share on one device, by the same code without communication, divided by the time "
    "of P devices. `MiB received`: by a device, computed, not measured. `peak MiB`: "
    "of a device's memory, as its allocator saw it, or (planned) as the compiler "
    "reckons. `error`: the largest relative error of a row of a result, measured on "
    "few rows."
)


def _mib(count: float | None) -> str:
    return "" if count is None else f"{count / 2**20:.4g}"


def _part(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _peak(row: Mapping) -> str:
    if row.get("peak_bytes") is not None:
        return _mib(row["peak_bytes"])
    planned = (row.get("memory") or {}).get("total")
    return "" if planned is None else f"{_mib(planned)} (planned)"


def _error(row: Mapping) -> str:
    found = (row.get("row_error") or {}).values()
    if any(x is None for x in found):
        return "not finite"
    return f"{max(found):.1e}" if found else ""


def _label(row: Mapping) -> str:
    name = row["peer"]
    label = PEERS[name].label if name in PEERS else name
    is_choice = row["method"] not in (None, name)
    return f"{label} ({row['method']})" if is_choice else label


def sizes(row: Mapping) -> str:
    shape = Shape(**row["shape"])
    heads = f"{shape.heads} ({shape.kv_heads}) x {shape.head_size}"
    return f"{row['devices']} x {row['rows']}, {heads}"


def line(row: Mapping) -> list[str]:
    """The cells of a row."""
    about = [row["mask"], sizes(row), _label(row)]
    mark = tables.mark(row)
    if mark is not None or "seconds" not in row:
        return [*about, mark or "", "", "", "", _mib(row.get("bytes")), "", _error(row)]
    efficiency = _part(row.get("efficiency"))
    if efficiency and row["one_device"]["rows"] != row["devices"] * row["rows"]:
        efficiency = f"~{efficiency}"
    return [
        *about,
        f"{1e3 * row['seconds']:.4g}",
        f"{row['tflops']:.3g}",
        *(efficiency, _part(row.get("of_kernels")), _mib(row.get("bytes"))),
        *(_peak(row), _error(row)),
    ]


def _by_mask(rows: Sequence[Mapping]) -> list[Mapping]:
    """In the order of masks as they first come, then of devices and rows."""
    masks = list(dict.fromkeys(row["mask"] for row in rows))
    return sorted(
        rows, key=lambda row: (masks.index(row["mask"]), row["devices"], row["rows"])
    )


def context(rows: Sequence[Mapping]) -> str:
    """A table for each scaling and pass, then what failed."""
    if not rows:
        return "no rows"
    parts = [tables.origin(rows), NOTE]
    for scaling in dict.fromkeys(row["scaling"] for row in rows):
        for which in dict.fromkeys(row["pass"] for row in rows):
            found = [
                row
                for row in rows
                if row["scaling"] == scaling and row["pass"] == which
            ]
            if found:
                title = (
                    f"{scaling.capitalize()} scaling, {tables.TITLES[which].lower()}"
                )
                shown = [row for row in found if not tables.is_absent(row)]
                table = tables.markdown(HEADER, map(line, _by_mask(shown)))
                parts.append(f"{title}\n\n{table}")
    return "\n\n".join(x for x in [*parts, tables.failures(rows)] if x)
