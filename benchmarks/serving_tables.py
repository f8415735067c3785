"""Tables of `benchmarks.serving`: times, rates, ratios, and which goals are met."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.serving_calls import UNSHARED
from benchmarks.tables import markdown, origin

_DENSE = "jax_flash2, dense"
_ONE_BYTE = ("int8", "e4m3", "e5m2")
# Of paged bfloat16 beside the dense call, by rows of a page, from so many bytes.
_OF_DENSE, _LARGE = {128: 0.97, 64: 0.97, 16: 0.92, 1: 0.70}, 256e6
# How many times as fast as bfloat16 one-byte kinds are, from so many of their bytes.
_TIMES, _HALF = 1.7, 128e6
_SMALL_CALL, _MOST_US = "B 1, S 4096", 10.0
# A ragged call beside its two halves; a prefix that is read once beside one of each.
_MOST_OF_APART, _LEAST_SHARED = 1.1, 20.0
_PROMPT_OF_DENSE = 0.95

_Rows = Mapping[str, Mapping]


def serving(rows: Sequence[Mapping]) -> str:
    """A table of each scenario, and the goals."""
    if not rows:
        return "no rows"
    groups = [[*g] for _, g in itertools.groupby(rows, lambda row: row["call"])]
    found = [line for group in groups for line in goals(group)]
    parts = [origin(rows), *map(scenario, groups)]
    return "\n\n".join(
        [*parts, markdown(["goal", "least or most", "found", ""], found)]
    )


def scenario(rows: Sequence[Mapping]) -> str:
    """The table of one scenario, and a list of what failed."""
    at = {row["peer"]: row for row in rows}
    lines = [_line(peer, at) for peer, row in at.items() if not row["failure"]]
    failed = [f"- {n}: {row['failure']}" for n, row in at.items() if row["failure"]]
    header = [rows[0]["call"], "us", "kernels", "GB/s", "of the read", "of dense"]
    found = markdown([*header, "times bfloat16", "error"], lines)
    return "\n".join([found, *([""] if failed else []), *failed])


def _line(peer: str, at: _Rows) -> list[str]:
    row, plain = at[peer], _same_in_bfloat16(peer, at)
    reads = "read, one byte" if _kind(peer) in _ONE_BYTE else "read"
    ratios = [_beside(row, at.get(name)) for name in (reads, _DENSE)]
    ratios.append(plain["seconds"] / row["seconds"] if plain else None)
    numbers = [f"{x:.2f}" if x else "-" for x in ratios]
    error = "-" if row["row_error"] is None else f"{row['row_error']:.1e}"
    error = f"{error} WRONG" if row["wrong"] else error
    us, gb = f"{1e6 * row['seconds']:.1f}", f"{_rate(row) / 1e9:.0f}"
    return [peer, us, f"{row['kernels']:.0f}", gb, *numbers, error]


def _kind(peer: str) -> str:
    return peer.split(",")[0]


def _page(peer: str) -> int | None:
    found = re.search(r"pages of (\d+)", peer)
    return int(found[1]) if found else None


def _rate(row: Mapping) -> float:
    return row["size"] / row["seconds"]


def _beside(row: Mapping, other: Mapping | None) -> float | None:
    return None if other is None or other["failure"] else _rate(row) / _rate(other)


def _same_in_bfloat16(peer: str, at: _Rows) -> Mapping | None:
    """The row of the same pages that a quantised cache is compared with."""
    row = at.get(f"bfloat16, pages of {_page(peer)}")
    return row if row and _kind(peer) in _ONE_BYTE and not row["failure"] else None


def goals(rows: Sequence[Mapping]) -> Iterator[list[str]]:
    """Of a scenario: the goal, its number, what was found, and whether it is met."""
    at = {row["peer"]: row for row in rows if not row["failure"]}
    call = rows[0]["call"]
    for peer, row in at.items():
        page, name, plain = _page(peer), f"{call}: {peer}", _same_in_bfloat16(peer, at)
        if plain and row["size"] >= _HALF:
            found = plain["seconds"] / row["seconds"]
            yield _goal(f"{name}, times bfloat16", _TIMES, found)
        if page is not None and call.startswith("a prompt"):
            found, is_named = _beside(row, at.get(_DENSE)), peer.count(",") > 1
            if found and not is_named:
                yield _goal(f"{name}, of dense", _PROMPT_OF_DENSE, found)
        elif page is not None and _kind(peer) == "bfloat16":
            if call == _shape(_SMALL_CALL, call):
                yield _goal(f"{name}, us", _MOST_US, 1e6 * row["seconds"], most=True)
            found = _beside(row, at.get(_DENSE))
            if row["size"] >= _LARGE and found:
                yield _goal(f"{name}, of dense", _OF_DENSE[page], found)
    seconds = [row["seconds"] for row in at.values()]
    if call == "ragged" and len(seconds) == 3:
        found = seconds[0] / (seconds[1] + seconds[2])
        yield _goal(
            "ragged: one call, of the two apart", _MOST_OF_APART, found, most=True
        )
    if UNSHARED in at and "read once" in at:
        found = at[UNSHARED]["seconds"] / at["read once"]["seconds"]
        name = f"{call}: times as fast as without sharing"
        yield _goal(name, _LEAST_SHARED, found)


def _shape(start: str, call: str) -> str:
    """The call itself if its name starts so, and it has one query."""
    return call if call.startswith(start) and ", T" not in call else ""


def _goal(name: str, number: float, found: float, *, most: bool = False) -> list[str]:
    met = found <= number if most else found >= number
    return [name, f"{number:g}", f"{found:.2f}", "met" if met else "MISSED"]
