"""The command line of the tuner (`python -m jax_flash2.tune --help`)."""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from jax_flash2 import _ahead
from jax_flash2.tune import blocks, crossover, hopper, triton
from jax_flash2.tune.table import Table, versions
from jax_flash2.tune.timing import describe
from pallas_kernels import device, user_tables
from pallas_kernels.mosaic_gpu import measured

# What most calls have: these steps come first.
_COMMON_SIZES = (128, 64)
_COMMON_REGIMES = ("many keys", "few keys", "any", "plain")
_COMMON_CONDITIONS = ("plain", "causal")
_QUICK_MINUTES = 5.0
# Timed on one call alone, blocks must gain more than timings scatter.
_QUICK_MARGIN = 0.97


@dataclasses.dataclass(frozen=True)
class Step:
    """What is measured at once.

    Attributes:
      name: for the reader, and for `--only`.
      backend: whose table it is for.
      rank: the smallest come first.
      measure: times it; called with the arguments of the command line.
      found: from these rows, what to put into a table and what to say; None if nothing
        was timed.
    """

    name: str
    backend: str
    rank: int
    measure: Callable[[argparse.Namespace], Iterator[dict]]
    found: Callable[[argparse.Namespace, list[dict]], tuple[str, tuple, str] | None]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jax_flash2.tune",
        description="Finds the fastest blocks of the kernels on this GPU. Calls use "
        f"them from then on; {user_tables.VARIABLE}={user_tables.OFF} ignores them.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="each on one call, for five minutes")
    add("--minutes", type=float, help="begin nothing after so long")
    add("--only", default="", metavar="PATTERN", help="steps whose name has this")
    add("--list", action="store_true", help="print the names of the steps, and end")
    add("--rounds", type=int, default=3, help="timings of each program; the median")
    add("--folder", type=Path, help="of the table; without it, where calls look")
    add("--timings", type=Path, help="append every timing to this file, as JSON lines")
    given = parser.parse_args(argv)
    if given.quick and given.minutes is None:
        given.minutes = _QUICK_MINUTES
    given.folder = given.folder or user_tables.folder()
    if given.folder is None:
        parser.error(f"{user_tables.VARIABLE}={user_tables.OFF}: pass --folder")
    return given


def _common_first(sizes: Sequence[int]) -> list[int]:
    return [*_COMMON_SIZES, *(x for x in sizes if x not in _COMMON_SIZES)]


def _block_steps(backend) -> Iterator[Step]:
    for head_size in _common_first(backend.HEAD_SIZES):
        for regime in backend.REGIMES:
            rank = 0 if regime in _COMMON_REGIMES else 2
            rank = rank if head_size in _COMMON_SIZES else 3
            for kernel in backend.kernels(regime, head_size):
                at = regime, kernel, head_size
                yield Step(
                    f"{backend.BACKEND} {kernel}, heads of {head_size}, {regime}",
                    backend.BACKEND,
                    rank,
                    functools.partial(_measure_blocks, backend, *at),
                    functools.partial(_found_blocks, backend, *at),
                )


def _measure_blocks(backend, regime, kernel, head_size, given) -> Iterator[dict]:
    most = 1 if given.quick else None
    at = regime, kernel, head_size
    return blocks.measure(backend, *at, given.rounds, most)


def _found_blocks(backend, regime, kernel, head_size, given, rows):
    margin = _QUICK_MARGIN if given.quick else blocks.MARGIN
    numbers, gain = blocks.best(rows, margin)
    if not any("seconds" in row for row in rows):
        return None
    tried = len({tuple(row["feature"]) for row in rows})
    how = f"{gain:.2f} times as fast as before" if gain > 1 else "as before"
    entry = kernel, backend.key(kernel, head_size), {regime: numbers}
    return "blocks", entry, f"{numbers}, the fastest of {tried}, {how}"


def _crossover_steps() -> Iterator[Step]:
    for head_size in _common_first(hopper.CROSSOVER_SIZES):
        for condition in measured.CONDITIONS:
            for which in crossover.PASSES:
                at = condition, head_size, which
                is_common = head_size in _COMMON_SIZES
                is_common = is_common and condition in _COMMON_CONDITIONS
                yield Step(
                    f"crossover, {condition}, heads of {head_size}, {which}",
                    hopper.BACKEND,
                    1 if is_common else 4,
                    functools.partial(_measure_crossover, *at),
                    functools.partial(_found_crossover, *at),
                )


def _measure_crossover(condition, head_size, which, given) -> Iterator[dict]:
    ladder = crossover.LADDER[:: 2 if given.quick else 1]
    return crossover.measure(condition, head_size, which, ladder, given.rounds)


def _found_crossover(condition, head_size, which, given, rows):
    del given
    keys = crossover.crossover(rows)
    if keys is None:
        return None
    entry = condition, hopper.band(head_size), {which: keys}
    return "crossovers", entry, f"from {keys} keys ({crossover.ratios(rows)})"


def steps(capability: int) -> list[Step]:
    """All of a GPU, those for what most calls have first.

    Crossover points come after the blocks that they are measured with.
    """
    found = [*_block_steps(triton)]
    if capability == 90:
        found = [*_block_steps(hopper), *found, *_crossover_steps()]
    return sorted(found, key=lambda step: step.rank)


def _chosen(given: argparse.Namespace) -> list[Step]:
    found = steps(device.capability())
    return [step for step in found if re.search(given.only, step.name)]


def run(given: argparse.Namespace, gpu: str) -> list[Path]:
    """Runs the steps; returns the tables that have something new."""
    begun, chosen = time.monotonic(), _chosen(given)
    tables = {x: Table(given.folder, x, gpu) for x in {x.backend for x in chosen}}
    now, written = datetime.datetime.now(datetime.UTC), []
    facts = {"benchmark": "tune", "run_id": f"{now:%Y%m%dT%H%M%SZ}", "device": gpu}
    facts |= {"date": now.isoformat(timespec="seconds"), "versions": versions()}
    for i, step in enumerate(chosen):
        minutes = (time.monotonic() - begun) / 60
        if given.minutes is not None and minutes > given.minutes:
            print(f"{minutes:.1f} minutes are over: {len(chosen) - i} steps not begun")
            break
        place = f"[{i + 1}/{len(chosen)}, {minutes:.1f} min]"
        print(f"{place} {step.name}:", end=" ", flush=True)
        try:
            rows = list(step.measure(given))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            # The GPU has too little memory, or no blocks fit it.
            print(f"skipped, {describe(error)}", flush=True)
            continue
        if given.timings:
            _append(given.timings, facts, rows)
        found = step.found(given, rows) if rows else None
        if found is None:
            print("nothing to choose from", flush=True)
            continue
        part, entry, words = found
        table = tables[step.backend]
        table.put(part, *entry)
        written += [table.path] if table.path not in written else []
        _forget()
        print(words, flush=True)
    return written


def _forget() -> None:
    """So that the next step is measured with what was found before."""
    user_tables.read.cache_clear()
    measured.of_gpu.cache_clear()
    jax.clear_caches()


def _append(path: Path, facts: dict, rows: Sequence[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps({**facts, **row}) + "\n" for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Tunes the kernels for the GPU of this process."""
    given, gpu = _arguments(argv), device.device_kind()
    if gpu is None:
        raise SystemExit("jax_flash2.tune times kernels on a GPU, and JAX sees none")
    if device.capability() < 80:
        raise SystemExit(f"{gpu} runs no kernels: they need Ampere or newer")
    if given.list:
        print(*(step.name for step in _chosen(given)), sep="\n")
        return
    usual = user_tables.folder()
    os.environ[user_tables.VARIABLE] = str(given.folder)
    os.environ[_ahead.VARIABLE] = _ahead.OFF  # no thread beside what is timed
    _forget()
    written = run(given, gpu)
    if not written:
        raise SystemExit("no table was written")
    print("\nFor this GPU, calls in new processes use:", *written, sep="\n  ")
    if given.folder != usual:
        print(f"  with {user_tables.VARIABLE}={given.folder}")
    print(
        f"{user_tables.VARIABLE}={user_tables.OFF} ignores tables, and "
        "jax_flash2.explain names them.\nSo that others with this GPU have it, too, "
        "attach the files to an issue of the jax_flash2 project."
    )


if __name__ == "__main__":
    main()
