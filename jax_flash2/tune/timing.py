"""Times programs side by side, in rounds, after the GPU's clocks have settled."""

import dataclasses
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping

import jax


@dataclasses.dataclass(frozen=True)
class Program:
    """What is timed.

    Attributes:
      call: starts it; its results, maybe not there yet.
      wait: returns when the results are there.
    """

    call: Callable[[], object]
    wait: Callable[[object], object]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds a call in each round; a round is a batch of `calls` calls."""

    calls: int
    seconds: list[float]

    def row(self) -> dict:
        return {
            "seconds": statistics.median(self.seconds),
            "seconds_min": min(self.seconds),
            "seconds_max": max(self.seconds),
            "timings": self.seconds,
            "calls": self.calls,
        }


def _seconds(program: Program, calls: int) -> float:
    """Of a batch of calls, begun on an idle device and waited for at its end."""
    begun = time.perf_counter()
    for _ in range(calls):
        results = program.call()
    program.wait(results)
    return time.perf_counter() - begun


def time_interleaved(
    programs: Mapping[str, Program],
    *,
    rounds: int,
    min_seconds: float = 0.03,
    settle_seconds: float | None = None,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Times programs side by side: in each round a batch of calls of every one.

    A GPU's clocks follow the power that its work draws, some time later. So each batch
    comes after other calls of the same program, and the order is drawn anew in every
    round, from the same seed: no program always follows the same other.

    Args:
      programs: by name.
      rounds: batches of each program.
      min_seconds: a batch is as many calls as take this long, one at least.
      settle_seconds: how long the calls before each batch take, one at least; None is
        0.1 on a GPU and 0 elsewhere.

    Returns:
      Timings by name, and the failures of programs that did not get through.
    """
    if settle_seconds is None:
        settle_seconds = 0.1 if jax.default_backend() == "gpu" else 0.0
    calls, settling, failures = {}, {}, {}
    seconds: dict[str, list[float]] = {name: [] for name in programs}

    def attempt(name: str, count: int) -> float:
        try:
            return _seconds(programs[name], count)
        except Exception as error:  # a peer's failure is a result, not the end
            failures[name] = describe(error)
            return math.nan

    for name in programs:
        attempt(name, 1)  # warms up
        once = math.nan if name in failures else attempt(name, 1)
        if once < min_seconds:  # too short to be told from its own start and end
            few = min(10, math.ceil(min_seconds / once))
            once = attempt(name, few) / few
        if name not in failures:
            calls[name] = max(1, math.ceil(min_seconds / once))
            settling[name] = max(1, math.ceil(settle_seconds / once))
    names = [name for name in programs if name not in failures]
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            if name not in failures:
                attempt(name, settling[name])
            if name not in failures:
                seconds[name].append(attempt(name, calls[name]) / calls[name])
    timings = {n: Timing(calls[n], seconds[n]) for n in names if n not in failures}
    return timings, failures


def describe(error: Exception) -> str:
    """A failure in one line, cut; `not installed: ...` for an ImportError."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # some compilers write in colours
    first = next(filter(None, map(str.strip, plain.splitlines())), "")[:200]
    if isinstance(error, ImportError):
        return f"not installed: {first}"
    return f"{type(error).__name__}: {first}"
