"""Finds the fastest blocks of every kernel on this GPU, and when which backend wins.

    python -m benchmarks.tune
    python -m benchmarks.tune --what=crossovers --conditions=causal --head_sizes=64

Times blocks that fit the GPU, kernel by kernel, for each head size and regime
(`pallas_kernels.tables.REGIMES`, `pallas_kernels.mosaic_gpu.measured.REGIMES`), each on
a few shapes side by side. On Hopper it also times the same calls by the Mosaic GPU and
by the Triton kernels, and finds from how many keys on the first are at least as fast
(`benchmarks.tune_crossover`). Every timing goes to `tune.jsonl`; the blocks with the
smallest geometric mean and the crossover points go into the GPU's table in
`pallas_kernels/tuning`, which the library reads. What was not measured stays. A table
is only as good as the shapes below; a GPU without one takes the H200's (Triton) or the
H100's (Mosaic GPU), where it fits.
"""

import collections
import dataclasses
import math
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import flags

from benchmarks import (
    options,
    records,
    tune_crossover,
    tune_mosaic,
    tune_tables,
    tune_triton,
)
from benchmarks.tune_problems import Problem
from benchmarks.tune_programs import Timed, times
from pallas_kernels import device, tables
from pallas_kernels.configs import Blocks, Config
from pallas_kernels.mosaic_gpu import measured

_BACKENDS = {"triton": tune_triton, "mosaic_gpu": tune_mosaic}
_ALL_REGIMES = [*tune_triton.REGIMES, *tune_mosaic.REGIMES]
_ALL_KERNELS = list(dict.fromkeys([*tune_triton.KERNELS, *tune_mosaic.KERNELS]))
_WHAT = ("blocks", "crossovers")

_BACKEND = flags.DEFINE_enum(
    "backend", None, list(_BACKENDS), "Whose kernels; without, the GPU's own."
)
_DO = options.names("what", list(_WHAT), _WHAT, "What is measured")
_HEAD_SIZES = options.integers("head_sizes", None, "Sizes, H; without, the backend's.")
_REGIMES = options.names("regimes", _ALL_REGIMES, _ALL_REGIMES, "Which")
_KERNELS = options.names("kernels", _ALL_KERNELS, _ALL_KERNELS, "Which")
_CONDITIONS = options.names(
    "conditions", list(measured.CONDITIONS), measured.CONDITIONS, "Of crossover points"
)
_PASSES = options.names(
    "passes", list(tune_crossover.PASSES), tune_crossover.PASSES, "Of crossover points"
)
_LADDER = options.integers(
    "ladder", ",".join(map(str, tune_crossover.LADDER)), "Keys for a query."
)
_REPEATS = options.repeats(3)
_BUDGET = flags.DEFINE_float("budget_seconds", None, "Begin nothing after this long.")
_TABLES_DIR = flags.DEFINE_string("tables_dir", str(tables.TUNING), "Of the table.")
_RESULTS_DIR, _COMMIT = options.files()

# New blocks must be this much faster than those in the table to take their place.
_MARGIN = 0.99
# Blocks this much slower than the fastest on the first shape are not tried on others.
_SLOW = 1.2
# Which gradients a kernel makes: of q, k, v and an operand of the score.
_GRADIENTS = {
    "dq": (0,),
    "dkv": (1, 2),
    "dk": (1,),
    "dv": (2,),
    "dbias": (3,),
    "backward": (0, 1, 2),
}


def timed(
    backend: ModuleType, problem: Problem, kernel: str, blocks: Blocks | None
) -> Timed:
    """A pass that runs `kernel`."""
    cut = None if blocks is None else problem.cut(blocks)
    fields: dict[str, Any] = {backend.field(kernel): cut}
    config = None if cut is None else Config(**fields)
    attention = problem.attention(backend.BACKEND, config)
    return Timed(problem, attention, _GRADIENTS.get(kernel))


def measure(
    run: records.Run,
    backend: ModuleType,
    regime: str,
    kernel: str,
    head_size: int,
    rounds: int,
):
    """Rows of all blocks of a kernel in a regime.

    Of those slow on the first problem only that is known.
    """
    blocks = backend.candidates(kernel, head_size, regime)
    for problem in backend.problems_of(kernel, regime, head_size):
        plain = timed(backend, problem, kernel, None)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            saving = plain.compile_saving(pool)
            compiling = {
                b: timed(backend, problem, kernel, b).compile(pool) for b in blocks
            }
        arguments = plain.arguments(saving)  # the same whatever the blocks
        timings, failures = times(compiling, lambda _, x=arguments: x, rounds)
        for b in blocks:
            row = {"shape": asdict(problem.shape), "pass": kernel, "peer": regime}
            row |= {"feature": _numbers(b), "failure": failures.get(b)}
            row |= {"arguments": [*problem.static, *problem.arrays]}
            row |= timings[b].row() if b in timings else {}
            yield run.write(row)
        seconds = {b: timings[b].row()["seconds"] for b in timings}
        limit = _SLOW * min(seconds.values(), default=math.inf)
        blocks = [b for b in blocks if b == blocks[0] or seconds.get(b, limit) < limit]


def _numbers(blocks: Blocks) -> list[int | None]:
    """As in a table: without what is left out of `Blocks`."""
    numbers = list(dataclasses.astuple(blocks))
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def best(rows: Iterable[dict]) -> dict[tuple[str, int, str], list[int]]:
    """The fastest blocks by (kernel, head size, regime).

    The first of a regime's blocks, those of the table, stay unless others are faster by
    a margin.
    """
    seconds: dict = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        at = row["pass"], row["shape"]["head_size"], row["peer"]
        found = row.get("seconds", math.inf)
        seconds[at][tuple(row["feature"])].append(found)

    def mean(times):
        return math.exp(sum(map(math.log, times)) / len(times))

    chosen = {}
    for at, timings in seconds.items():
        most = max(map(len, timings.values()))
        means = {b: mean(times) for b, times in timings.items() if len(times) == most}
        now = next(iter(means))
        fastest = min(means, key=lambda b: means[b])
        better = means[fastest] < _MARGIN * means[now]
        chosen[at] = list(fastest if better else now)
    return chosen


class _Clock:
    """Whether the time that was given is spent."""

    def __init__(self):
        self._begun = time.monotonic()

    def is_spent(self) -> bool:
        spent = time.monotonic() - self._begun
        return _BUDGET.value is not None and spent > _BUDGET.value


def _find_blocks(run: records.Run, backend: ModuleType, clock: _Clock) -> dict:
    """`best`, of what the flags ask for."""
    wanted = [
        (regime, kernel, head_size)
        for regime in backend.REGIMES
        if regime in _REGIMES.value
        for head_size in _HEAD_SIZES.value or backend.HEAD_SIZES
        for kernel in backend.kernels(regime, head_size)
        if kernel in _KERNELS.value
    ]
    rows: list[dict] = []
    with options.Progress(len(wanted), "kernel") as progress:
        for count, (regime, kernel, head_size) in enumerate(wanted):
            if clock.is_spent():
                progress.say(f"time is spent: {len(wanted) - count} not begun")
                break
            every = measure(run, backend, regime, kernel, head_size, _REPEATS.value)
            found = list(every)
            for at, chosen in best(found).items():
                tried = len({tuple(row["feature"]) for row in found})
                now = found[0]["feature"]
                progress.step(f"{at}: {chosen} of {tried}, now {now}")
            rows += found
    return best(rows)


def _find_crossovers(run: records.Run, clock: _Clock) -> dict:
    """Keys by (condition, head size, pass), of what the flags ask for."""
    wanted = [
        (condition, head_size, which)
        for condition in _CONDITIONS.value
        for head_size in _HEAD_SIZES.value or tune_mosaic.CROSSOVER_SIZES
        for which in tune_crossover.passes(condition)
        if which in _PASSES.value
    ]
    chosen = {}
    with options.Progress(len(wanted), "crossover") as progress:
        for count, at in enumerate(wanted):
            if clock.is_spent():
                progress.say(f"time is spent: {len(wanted) - count} not begun")
                break
            every = tune_crossover.measure(run, *at, _LADDER.value, _REPEATS.value)
            rows = list(every)
            keys = tune_crossover.crossover(rows)
            if keys is not None:
                chosen[at] = keys
            progress.step(f"{at}: {keys} ({tune_crossover.ratios(rows)})")
    return chosen


def main():
    gpu = device.device_kind()
    if gpu is None:
        raise SystemExit("benchmarks.tune times kernels on a GPU: there is none here")
    own = "mosaic_gpu" if device.capability() == 90 else "triton"
    backend = _BACKENDS[_BACKEND.value or own]
    clock = _Clock()
    run = records.Run.start("tune", _RESULTS_DIR.value, commit=_COMMIT.value)
    blocks, crossovers = {}, {}
    if "blocks" in _DO.value:
        blocks = _find_blocks(run, backend, clock)
    if "crossovers" in _DO.value and backend is tune_mosaic:
        crossovers = _find_crossovers(run, clock)
    name = tables.table_path(backend.BACKEND, gpu).name
    path = Path(_TABLES_DIR.value) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {name: run.facts[name] for name in ("date", "commit", "versions")}
    bands = tune_mosaic.BANDS
    tune_tables.write(path, backend.BACKEND, gpu, made, blocks, crossovers, bands)
    print(f"\n{run.path}\n{path}")


if __name__ == "__main__":
    options.launch(main)
