"""Puts a table that a user sent into the tables that the library ships.

    python -m benchmarks.adopt FILE

FILE is what `python -m jax_flash2.tune` wrote. Its entries go into the table of its GPU
in `pallas_kernels/tuning`, each with a note of where it was measured; what it lacks
stays. A GPU's first table begins as the one that the library takes for it.
"""

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path

from absl import app

from jax_flash2.tune.table import text
from pallas_kernels import tables, user_tables


def adopt(path: Path, folder: Path = tables.TUNING) -> Path:
    """Puts the table of a file into those of a folder; returns which it is in."""
    sent = json.loads(path.read_text())
    gpu, backend = sent["gpu"], sent["backend"]
    into = folder / tables.table_path(backend, gpu).name
    found = json.loads(into.read_text()) if into.exists() else None
    found = found or copy.deepcopy(tables.read(backend, gpu))
    note = f"{gpu}, {sent['date']}: jax_flash2.tune {sent['versions']['jax_flash2']}"
    for kernel, heads in sent["blocks"].items():
        found["blocks"][kernel] = user_tables.over(found["blocks"][kernel], heads)
        for size, regimes in heads.items():
            for regime in regimes if "blocks_measured" in found else ():
                found["blocks_measured"][f"{kernel}, {size}, {regime}"] = note
    for condition, heads in sent["crossovers"].items():
        points = found["crossovers"][condition]
        own = {size: _noted(points, size, x, note) for size, x in heads.items()}
        merged = user_tables.over(points, own)
        found["crossovers"][condition] = dict(sorted(merged.items(), key=_size))
    about = {name: sent[name] for name in ("date", "versions")}
    others = {k: x for k, x in found.items() if k not in ("gpu", "commit", *about)}
    into.write_text(text({"gpu": gpu, **about, **others}) + "\n")
    return into


def _size(entry: tuple[str, Mapping]) -> int:
    return int(entry[0])


def _noted(points: Mapping[str, dict], size: str, own: dict, note: str) -> dict:
    """An entry with where its numbers come from, those of a pass that it lacks too."""
    before = user_tables.over(points, {size: {}})[size]["measured"]
    known = {
        which: note if which in own else _of_pass(before, which)
        for which in ("forward", "backward")
    }
    if len(set(known.values())) == 1:  # one for both
        return {**own, "measured": note}
    return {**own, "measured": "; ".join(f"{x}: {y}" for x, y in known.items())}


def _of_pass(text: str, which: str) -> str:
    """What a note says of a pass, if it says more of it than of both."""
    parts = re.split(r"; (?=(?:forward|backward): )", text)
    named = dict(part.split(": ", 1) for part in parts if ": " in part)
    return named.get(which, text)


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("expected one FILE")
    print(adopt(Path(argv[1])))


if __name__ == "__main__":
    app.run(main)
