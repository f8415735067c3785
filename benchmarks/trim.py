"""Cuts the files of results down to what tables and plots are made of.

    python -m benchmarks.trim

Each file keeps its newest run, without the single timings behind a median. A run's
date, commit, versions and device stand in its first row alone. `tune.jsonl` has many
runs: of every kernel, regime and problem it keeps the fastest blocks. Run it before
results are committed.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from absl import flags

from benchmarks import options, records

# Of every problem that a kernel was tuned on, so many blocks stay.
_FASTEST = 4
_DIGITS = 8
# Figures that no table shows: single timings, and a second measure of the error.
_UNSHOWN = {"timings", "lower_timings", "compile_timings", "max_abs_error"}


def shortened(value):
    """`value` with every number in it rounded to eight significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: shortened(x) for name, x in value.items()}
    if isinstance(value, list):
        return [shortened(x) for x in value]
    return value


def trimmed(rows: Iterable[Mapping]) -> list[dict]:
    """Rows without what no table shows; facts of a run in its first row alone."""
    seen, found = set(), []
    for row in rows:
        left_out = set(_UNSHOWN)
        if row["run_id"] in seen:
            left_out |= set(records.FACTS) - {"run_id"}
        seen.add(row["run_id"])
        found.append(
            {name: shortened(x) for name, x in row.items() if name not in left_out}
        )
    return found


def fastest(rows: Iterable[Mapping]) -> list[Mapping]:
    """The fastest blocks of every problem of the tuner, in the order of the runs.

    Of blocks that several runs timed the newest timing counts.
    """
    problems: dict[str, dict[str, Mapping]] = {}
    for place, row in enumerate(rows):
        if row["failure"] is None:
            about = [row["pass"], row["peer"], row["shape"], row["arguments"]]
            blocks = problems.setdefault(json.dumps(about, sort_keys=True), {})
            blocks[json.dumps(row["feature"])] = {"place": place, **row}
    kept = [
        row
        for blocks in problems.values()
        for row in sorted(blocks.values(), key=lambda row: row["seconds"])[:_FASTEST]
    ]
    kept.sort(key=lambda row: row["place"])
    return [{k: x for k, x in row.items() if k != "place"} for row in kept]


def trim(path: Path) -> None:
    """Rewrites a file of results; done again it changes nothing."""
    if path.stem == "tune":
        rows = fastest(records.read(path))
    else:
        rows = records.newest(path.parent, path.stem)
    lines = [json.dumps(row, allow_nan=False) for row in trimmed(rows)]
    path.write_text("".join(f"{line}\n" for line in lines))


def main():
    for path in sorted(Path(_RESULTS_DIR.value).glob("*.jsonl")):
        before = path.stat().st_size
        trim(path)
        print(f"{path}: {before / 1e3:.0f} kB, now {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    _RESULTS_DIR = flags.DEFINE_string(
        "results_dir", records.RESULTS_DIR, "Of the files."
    )
    options.launch(main)
