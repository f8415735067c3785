"""From how many keys on the Mosaic GPU kernels are faster than the Triton kernels.

The same call is timed by both, side by side, over a ladder of keys for each condition
(`pallas_kernels.mosaic_gpu.measured.CONDITIONS`) and head size, forward and backward.
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from jax_flash2.tune import hopper
from jax_flash2.tune.problems import Problem
from jax_flash2.tune.programs import Timed, times

PASSES = ("forward", "backward")
BACKENDS = ("mosaic_gpu", "triton")
LADDER = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


def timed(problem: Problem, which: str, backend: str) -> Timed:
    """A pass of a problem by a backend: all gradients that the problem asks for."""
    wanted = None
    if which == "backward":
        wanted = (0, 1, 2) if problem.operand is None else (0, 1, 2, 3)
    return Timed(problem, problem.attention(backend, None), wanted)


@dataclasses.dataclass(frozen=True)
class _Sides:
    """A pass of a problem by each backend, while it compiles."""

    sides: Mapping[str, Timed]
    compiling: Mapping[str, Future]
    saving: Mapping[str, Future | None]

    @classmethod
    def start(cls, sides: Mapping[str, Timed], pool: Executor) -> "_Sides":
        compiling = {x: side.compile(pool) for x, side in sides.items()}
        served = [x for x, future in compiling.items() if not _has_failed(future)]
        saving = {x: sides[x].compile_saving(pool) for x in served}
        return cls(sides, compiling, saving)

    def arguments(self, backend) -> list:
        return self.sides[backend].arguments(self.saving[backend])


def _has_failed(future: Future) -> bool:
    return future.done() and future.exception() is not None


def measure(
    condition: str,
    head_size: int,
    which: str,
    ladder: Sequence[int],
    rounds: int,
) -> Iterator[dict]:
    """Rows of both backends, a pair for each problem of the ladder."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        started = []
        for keys in ladder:
            for problem in hopper.ladder(condition, head_size, keys):
                sides = {x: timed(problem, which, x) for x in BACKENDS}
                started.append((keys, problem, _Sides.start(sides, pool)))
    for keys, problem, sides in started:
        timings, failures = times(
            sides.compiling, sides.arguments, rounds, in_bursts=True
        )
        about = {"keys": keys, "mean_keys": hopper.mean_keys(problem)}
        about |= {"shape": dataclasses.asdict(problem.shape), "pass": which}
        about |= {"arguments": [*problem.static, *problem.arrays]}
        for backend in BACKENDS:
            row = {**about, "peer": backend, "failure": failures.get(backend)}
            row |= {"feature": f"crossover: {condition}"}
            row |= timings[backend].row() if backend in timings else {}
            yield row


def crossover(rows: Iterable[dict]) -> float | None:
    """From how many keys on the Mosaic GPU kernels are to be taken.

    The choice with the smallest geometric mean of times over the ladder, which does not
    hang on one timing where both take as long. Below it lies a number of keys with
    which the Triton kernels are faster: the point is where the line between both
    numbers (of logarithms) says that both take as long. A call that these kernels do
    not serve is one that they are slower in; one that the Triton kernels do not serve
    says nothing.

    Args:
      rows: of `measure`.

    Returns:
      Infinite if they are slower with the most keys; None if nothing was timed.
    """
    seconds: dict[tuple, dict[str, float]] = {}
    for row in rows:
        at = row["mean_keys"], str(row["shape"]), str(row["arguments"])
        seconds.setdefault(at, {})[row["peer"]] = row.get("seconds", math.inf)
    gains: dict[int, float] = {}  # logarithms
    for (keys, *_), own in seconds.items():
        if math.isfinite(own.get("triton", math.inf)):
            speed = own["triton"] / own.get("mosaic_gpu", math.inf)
            gain = math.log(speed) if speed else -math.inf
            gains[keys] = gains.get(keys, 0.0) + gain
    if not gains:
        return None
    found: float = math.inf
    most = gain = 0.0
    for keys in sorted(gains, reverse=True):
        gain += gains[keys]
        if gain >= most:
            found, most = keys, gain
    below = max((keys for keys in gains if keys < found), default=None)
    if math.isinf(found) or below is None:
        return found
    slower, faster = gains[below], max(gains[int(found)], 0.0)
    part = 1.0 if math.isinf(slower) else slower / (slower - faster)
    return round(below * (found / below) ** part)


def ratios(rows: Iterable[dict]) -> str:
    """Triton's time over that of these kernels, by keys, for a reader."""
    seconds: dict[int, dict[str, float]] = {}
    for row in rows:
        own = seconds.setdefault(row["mean_keys"], {})
        own[row["peer"]] = max(own.get(row["peer"], 0), row.get("seconds", math.inf))
    found = (
        f"{keys}: {own['triton'] / own['mosaic_gpu']:.2f}"
        for keys, own in sorted(seconds.items())
        if all(math.isfinite(own.get(x, math.inf)) for x in BACKENDS)
    )
    return ", ".join(found)
