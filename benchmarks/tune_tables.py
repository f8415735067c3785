"""Writes what `benchmarks.tune` found into a GPU's table; what it has of others stays.

A GPU's first table begins as the one that the library takes for it on this machine.
"""

import copy
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from pallas_kernels import device, tables


def write(
    path: Path,
    backend: str,
    gpu: str,
    made: Mapping,
    blocks: Mapping[tuple[str, int, str], list],
    crossovers: Mapping[tuple[str, int, str], float] | None = None,
    bands: Iterable[int] = (),
) -> None:
    """Puts blocks and crossover points into the table of a GPU.

    Args:
      path: of the table.
      backend: whose table it is.
      gpu: its kind.
      made: "date", "commit" and "versions" of the run.
      blocks: by kernel, head size and regime.
      crossovers: keys by condition, head size and pass; infinite for never.
      bands: head sizes up to which crossover points are one number.
    """
    found = json.loads(path.read_text()) if path.exists() else None
    if found is None:
        found = copy.deepcopy(tables.read(backend, gpu, device.gpu().family))
        found.pop("measured", None)  # of a family's table: how that was made
    note = f"{gpu}, {made.get('date')}: benchmarks.tune, commit {made.get('commit')}"
    for (kernel, head_size, regime), numbers in blocks.items():
        heads = found["blocks"][kernel]
        key = _key(heads, head_size)
        heads[key][regime] = numbers
        if "blocks_measured" in found:
            found["blocks_measured"][f"{kernel}, {key}, {regime}"] = note
    _put_crossovers(found, crossovers or {}, tuple(bands), note)
    others = {k: x for k, x in found.items() if k not in ("gpu", *made)}
    path.write_text(_text({"gpu": gpu, **made, **others}) + "\n")


def _key(heads: Mapping[str, object], head_size: int) -> str:
    return str(min(int(x) for x in heads if head_size <= int(x)))


def _put_crossovers(
    found: dict, crossovers: Mapping, bands: tuple[int, ...], note: str
) -> None:
    """Of head sizes in the same band the largest number counts."""
    largest: dict[tuple[str, str, str], float] = {}
    for (condition, head_size, which), keys in crossovers.items():
        heads = _in_bands(found["crossovers"][condition], bands)
        found["crossovers"][condition] = heads
        at = condition, _key(heads, head_size), which
        largest[at] = max(keys, largest.get(at, 0))
    for (condition, key, which), keys in largest.items():
        entry = found["crossovers"][condition][key]
        entry[which] = None if math.isinf(keys) else keys
        entry["measured"] = _with_note(entry["measured"], which, note)


def _with_note(text: str, which: str, note: str) -> str:
    """What an entry says of where its numbers come from, with a new one of a pass."""
    passes: tuple[str, ...] = "forward", "backward"
    known: dict[str, str] = dict(
        (x, part.partition(": ")[2])
        for part in text.split("; ")
        for x in passes
        if part.startswith(f"{x}: ")
    )
    known = known or dict.fromkeys(passes, text)
    known[which] = note
    if len(set(known.values())) == 1:  # one for both
        return note
    return "; ".join(f"{x}: {known[x]}" for x in passes if x in known)


def _in_bands(heads: Mapping[str, dict], bands: tuple[int, ...]) -> dict[str, dict]:
    """The same entries, with one of its own for each band."""
    sizes = sorted({*map(int, heads), *bands})
    return {str(x): dict(heads[_key(heads, x)]) for x in sizes if x <= _last(heads)}


def _last(heads: Mapping[str, object]) -> int:
    return max(map(int, heads))


def _text(value, depth: int = 0) -> str:
    """JSON with a line for each entry of numbers."""
    is_dict = isinstance(value, dict)
    deep = is_dict and any(isinstance(x, dict) for x in value.values())
    if not is_dict or not (depth <= 1 or (depth == 2 and deep)):
        return json.dumps(value)
    pad = "  " * (depth + 1)
    entries = (f"{pad}{json.dumps(k)}: {_text(x, depth + 1)}" for k, x in value.items())
    return "{\n" + ",\n".join(entries) + "\n" + "  " * depth + "}"
