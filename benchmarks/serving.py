"""Decoding against caches, in pages or not, beside whatever reads as many bytes.

    python -m benchmarks.serving --quick            # at most 200 s on a GPU
    python -m benchmarks.serving                    # every page size, kind and T
    python -m benchmarks.serving --only="S 32768"   # scenarios in whose names this is
    python -m benchmarks.serving --small            # few rows, as a test on a CPU

In each scenario all programs are compiled first. Each is then called for some time in
every round, and the profiler says how long its kernels ran; without a GPU it is the
time of a call. Small caches lie beside copies that calls take in turns, so that none
stays in the GPU's cache. Results are compared with exact ones of the last sequence.

GB/s counts the keys, values and scales that a call reads. "of the read" is this rate
beside that of a plain read of as many bytes, "of dense" beside our call of rows in
order; "times bfloat16" is how many times as fast as the same pages in bfloat16. All are
of one run. Goals and what was found end the tables. Rows go to `serving.jsonl`.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from absl import flags

from benchmarks import (
    harness,
    options,
    profiles,
    programs,
    records,
    serving_calls,
    serving_peers,
    serving_tables,
)
from benchmarks.serving_calls import Case, Program

_QUICK = flags.DEFINE_bool("quick", False, "Fewer pages, kinds, scenarios and rounds.")
_SMALL = flags.DEFINE_bool("small", False, "Few rows and heads.")
_ONLY = flags.DEFINE_string("only", "", "A regular expression: these scenarios alone.")
_PEERS = flags.DEFINE_bool("others", True, "Other libraries' calls, too.")
_ROUNDS = flags.DEFINE_integer(
    "rounds", None, "Over the programs; 1 with --quick, else 3.", lower_bound=1
)
_SECONDS = flags.DEFINE_float("seconds", 0.03, "Of calls of a program in each round.")
_RESULTS_DIR, _COMMIT = options.files()

LARGE = Case(16, 32768, 32, 8, 128)
SHAPES = (
    LARGE,
    Case(64, 4096, 32, 8, 128),
    Case(32, 8192, 8, 1, 128),
    Case(1, 4096, 32, 8, 128),
)
PAGES = (128, 64, 16, 1)
# Of a row's largest element.
_TOLERANCE = 2.0**-5

# What a scenario gives: programs, and what peers failed with, by name.
_Programs = tuple[list[Program], dict[str, str]]


def uniform(case: Case, pages: Sequence[int], kinds: Sequence[str]) -> _Programs:
    """Sequences of equal length: every page size in bfloat16, some in other kinds."""
    case = case.small() if _SMALL.value else case
    cache = serving_calls.Cache.of(case, "bfloat16")
    found, failures = [serving_calls.dense(case, cache)], {}
    found.append(serving_calls.read("read", found[0].size, case.copies))
    found += serving_calls.ours(case, "bfloat16", cache, pages)
    peers: list[tuple[str, Callable]] = []
    if _PEERS.value:
        peers += [(f.__name__, f) for f in serving_peers.DENSE]
        peers += [
            (f"{f.__name__}, {page}", functools.partial(f, page))
            for f, page in itertools.product(serving_peers.PAGED, pages[:3])
        ]
    for name, peer in peers:
        try:
            found.append(peer(case, cache))
        except Exception as error:  # a peer's failure is a result, not the end
            failures[name] = harness.describe(error)
    for kind in kinds:
        own = serving_calls.Cache.of(case, kind)
        chosen = pages if kind == "int8" else [64]
        one = [*serving_calls.ours(case, kind, own, [x for x in chosen if x > 1])]
        found += one
    if kinds:
        found.append(serving_calls.read("read, one byte", one[0].size, case.copies))
    return found, failures


def _of(programs: Callable[..., Iterator[Program]], *sizes: int) -> _Programs:
    return [*programs(*sizes)], {}


def appending() -> _Programs:
    kinds = ("bfloat16", "int8")
    return [serving_calls.appended(Case(64, 64, 32, 8, 128), x) for x in kinds], {}


def scenarios(quick: bool, small: bool) -> dict[str, Callable[[], _Programs]]:
    found: dict[str, Callable[[], _Programs]] = {}
    for case in SHAPES:
        pages, kinds = PAGES, ["int8", "e4m3", "e5m2"]
        if quick and case is not LARGE:
            pages, kinds = (64,), ["int8"] if case.batch > 1 else []
        found[str(case)] = functools.partial(uniform, case, pages, kinds)
    for t in (8,) if quick else (2, 8):
        case = Case(LARGE.batch, LARGE.s, LARGE.n, LARGE.k, LARGE.h, t)
        found[str(case)] = functools.partial(uniform, case, (64,), [])
    sizes = (5, 64, 512) if small else (63, 2048, 32768)
    found["ragged"] = functools.partial(_of, serving_calls.uneven, *sizes)
    count, prefix = (4, 128) if small else (64, 32768)
    for own in (64, 256):
        name = f"{count} requests, {prefix} keys in common, {own} of their own"
        found[name] = functools.partial(_of, serving_calls.shared, count, prefix, own)
    rows = 128 if small else 8192
    found[f"a prompt of {rows}"] = functools.partial(_of, serving_calls.prompt, rows)
    found["append"] = appending
    return found


def compiled(found: Sequence[Program], failures: dict[str, str]) -> dict[str, Callable]:
    """What runs each program, by its name."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {}
        for x in found:
            try:
                if x.is_traced:
                    lowered = programs.lower(x.function, *x.arguments[0])
                    waiting[x.peer] = pool.submit(lowered.compile)
            except Exception as error:  # a peer's failure is a result, not the end
                failures[x.peer] = harness.describe(error)
    ready = {x.peer: x.function for x in found if not x.is_traced}
    for name, future in waiting.items():
        try:
            ready[name] = programs.check_fits(future.result())
        except Exception as error:  # as above
            failures[name] = harness.describe(error)
    return ready


def error_of(program: Program, out) -> float | None:
    """The largest error of a row, as a part of its length; None if none is known."""
    if program.want is None:
        return None
    got = np.asarray(program.last(out), np.float32).reshape(program.want.shape)
    return harness.row_error(got, program.want)


def seconds_of(call: Callable[[], object]) -> tuple[float, float]:
    """Of the kernels of a call, and how many; of the call itself without a GPU."""
    if not harness.is_gpu():
        return profiles.repeated(call, 0.0)[1], 0.0
    events, count = profiles.watched(call, _SECONDS.value)
    return sum(x.length for x in events) / count / 1e9, len(events) / count


def rows_of(name: str, made: _Programs, progress) -> list[dict]:
    """A row for each program and failure."""
    found, failures = made
    with harness.compiling():
        ready = compiled(found, failures)
    progress.say(f"{name}: {len(ready)} programs compiled")
    calls, errors = {}, {}
    for x in found:
        if x.peer not in ready:
            continue
        try:
            out = jax.block_until_ready(ready[x.peer](*x.arguments[0]))
            errors[x.peer] = error_of(x, out)
            turns = itertools.cycle(x.arguments)
            calls[x.peer] = functools.partial(_next, ready[x.peer], turns)
        except Exception as error:  # a peer's failure is a result, not the end
            failures[x.peer] = harness.describe(error)
    taken = {peer: [] for peer in calls}
    rounds = _ROUNDS.value or (1 if _QUICK.value else 3)
    with harness.alone():
        for _, (peer, call) in itertools.product(range(rounds), calls.items()):
            taken[peer].append(seconds_of(call))
    about = {"call": name, "pass": "forward", "failure": None}
    rows = [about | {"peer": x, "failure": why} for x, why in failures.items()]
    for x in found:
        if x.peer in taken:
            seconds, kernels = zip(*taken[x.peer], strict=True)
            error = errors[x.peer]
            row = about | {"peer": x.peer, "size": x.size, "row_error": error}
            row |= {"seconds": statistics.median(seconds), "timings": [*seconds]}
            row |= {"kernels": kernels[0]}
            row["wrong"] = error is not None and not error < _TOLERANCE
            rows.append(row)
    return rows


def _next(run: Callable, turns: Iterator[tuple]):
    return run(*next(turns))


def main():
    every = scenarios(_QUICK.value, _SMALL.value)
    chosen = {n: x for n, x in every.items() if re.search(_ONLY.value, n)}
    if not chosen:
        raise ValueError(f"--only={_ONLY.value}: found in none of {', '.join(every)}")
    run = records.Run.start("serving", _RESULTS_DIR.value, commit=_COMMIT.value)
    rows = []
    with options.Progress(len(chosen), "scenario") as progress:
        for name, make in chosen.items():
            own = [run.write(row) for row in rows_of(name, make(), progress)]
            rows += own
            progress.step(serving_tables.scenario(own))
            jax.clear_caches()
    print(f"\n{run.path}\n\n{serving_tables.serving(rows)}")


if __name__ == "__main__":
    options.launch(main)
