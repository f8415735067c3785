"""Tables in the user's folder: what `python -m jax_flash2.tune` found on this machine.

There is a file for each backend and GPU, and its entries take the place of those of the
table that the library ships. The folder is that of the user's data ("jax_flash2" in
`$XDG_DATA_HOME` or `~/.local/share`; `~/Library/Application Support` on macOS,
`%LOCALAPPDATA%` on Windows). The environment variable `JAX_FLASH2_TUNING` names another
one, or is "off". A file is read once in a process.

A file that does not parse, that has a field which is not known, or blocks that do not
fit the GPU is not used at all, and a warning says which file, GPU and field.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from pallas_kernels import tables
from pallas_kernels.configs import Blocks

VARIABLE = "JAX_FLASH2_TUNING"
OFF = "off"


class Known(NamedTuple):
    """What a backend's table may have.

    Attributes:
      sizes: of heads, by kernel.
      regimes: by kernel.
      conditions: of crossover points.
      unfit: why a kernel cannot have blocks for heads of a size in a regime, or None.
    """

    sizes: Mapping[str, Collection[int]]
    regimes: Mapping[str, Collection[str]]
    conditions: Collection[str]
    unfit: Callable[[str, int, str, Blocks], str | None]


# By backend. One that has tables says here what they may have, when it is imported.
KNOWN: dict[str, Known] = {}


def folder() -> Path | None:
    """Where the user's tables are; None if they are to be ignored."""
    given = os.environ.get(VARIABLE)
    if given:
        return None if given == OFF else Path(given).expanduser()
    if sys.platform == "win32":
        data = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        data = "~/Library/Application Support"
    else:
        data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "jax_flash2"


def path(backend: str, gpu: str | None) -> Path | None:
    """The user's table of a GPU, if there is one."""
    where = folder()
    if where is None or gpu is None:
        return None
    found = where / tables.table_path(backend, gpu).name
    return found if found.is_file() else None


@functools.cache
def read(backend: str, gpu: str | None) -> dict:
    """ "blocks" and "crossovers" of the user's table, each maybe empty.

    Warns:
      UserWarning: if the table cannot be used. Then both are empty.
    """
    nothing = {"blocks": {}, "crossovers": {}}
    where = path(backend, gpu)
    if where is None:
        return nothing
    try:
        found = json.loads(where.read_text())
        _check(found, backend, gpu)
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{where}, a table of blocks for {gpu}, is not used: {error}. The table of "
            f"jax_flash2 serves in its place. `python -m jax_flash2.tune` writes a new "
            f"one, and {VARIABLE}={OFF} ignores all",
            stacklevel=2,
        )
        return nothing
    return {name: found.get(name, {}) for name in nothing}


def used(backend: str, gpu: str | None) -> Path | None:
    """The user's table that calls on a GPU use, if there is a good one."""
    if backend not in KNOWN or not any(read(backend, gpu).values()):
        return None
    return path(backend, gpu)


def over(shipped: Mapping[str, Mapping], own: Mapping[str, Mapping]) -> dict:
    """Entries by head size, up to which each is for: the user's over the shipped."""

    def serving(size: str) -> Mapping:
        return shipped[min((x for x in shipped if int(size) <= int(x)), key=int)]

    return {**shipped, **{size: {**serving(size), **x} for size, x in own.items()}}


def _check(found, backend: str, gpu: str | None) -> None:
    """Raises ValueError, which names the field that is wrong."""
    known = KNOWN[backend]
    _expect(isinstance(found, dict), "the file", "an object", type(found).__name__)
    _expect(found.get("gpu") == gpu, "gpu", repr(gpu), repr(found.get("gpu")))
    _expect(found.get("blocks") or found.get("crossovers"), "blocks", "entries", "none")
    for at, kernel, size, entries in _entries(found, "blocks", known.regimes):
        sizes = known.sizes[kernel]
        _expect(size in sizes, at, f"one of {sorted(sizes)}", size)
        for regime, numbers in entries.items():
            field = f"{at}, {regime}"
            regimes = known.regimes[kernel]
            _expect(regime in regimes, field, f"one of {', '.join(regimes)}", regime)
            why_not = known.unfit(kernel, size, regime, _blocks(field, numbers))
            if why_not is not None:
                raise ValueError(f"{field}: {why_not}")
    for at, _, size, entries in _entries(found, "crossovers", known.conditions):
        most = max(max(sizes) for sizes in known.sizes.values())
        _expect(size <= most, at, f"a head size up to {most}", size)
        for name in ("forward", "backward"):
            keys = entries.get(name, 0)
            is_count = isinstance(keys, int | float) and keys >= 0
            what = "a number of keys or null"
            _expect(keys is None or is_count, f"{at}, {name}", what, repr(keys))


def _entries(found: dict, part: str, names: Collection[str]):
    """(field, name, head size, entries) of each head size in a part of a table."""
    heads_by_name = found.get(part, {})
    _expect(isinstance(heads_by_name, dict), part, "an object", repr(heads_by_name))
    for name, heads in heads_by_name.items():
        field = f"{part}, {name}"
        _expect(name in names, field, f"one of {', '.join(names)}", name)
        _expect(isinstance(heads, dict), field, "an object", repr(heads))
        for size, entries in heads.items():
            at = f"{field}, {size}"
            is_size = size.isdecimal() and 1 <= int(size) <= tables.HEADS[-1]
            _expect(is_size, at, "a head size", repr(size))
            _expect(isinstance(entries, dict), at, "an object", repr(entries))
            yield at, name, int(size), entries


def _blocks(field: str, numbers) -> Blocks:
    try:
        return Blocks(*numbers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{field}: {numbers!r} are no blocks: {error}") from None


def _expect(holds: object, field: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{field}: expected {expected}, got {got}")
