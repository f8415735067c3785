"""The fastest blocks of a kernel, for a head size and a regime of a table."""

import collections
import dataclasses
import math
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from types import ModuleType
from typing import Any

from jax_flash2.tune.problems import Problem
from jax_flash2.tune.programs import Timed, times
from pallas_kernels.configs import Blocks, Config

# New blocks must take less than this part of the time of those that calls have now.
MARGIN = 0.99
# How many of the fastest in bursts are timed in settled clocks, beside those of now.
_FINALISTS = 5
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


@dataclasses.dataclass(frozen=True)
class _Programs:
    """A kernel with each of several blocks, on one problem.

    Attributes:
      kernel, regime, problem: what is timed.
      compiling: by blocks.
      arguments: the same whatever the blocks.
    """

    kernel: str
    regime: str
    problem: Problem
    compiling: Mapping[Blocks, Future]
    arguments: list

    @classmethod
    def start(
        cls,
        backend: ModuleType,
        kernel: str,
        regime: str,
        problem: Problem,
        blocks: Iterable[Blocks],
    ) -> "_Programs":
        plain = timed(backend, problem, kernel, None)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            saving = plain.compile_saving(pool)
            compiling = {
                b: timed(backend, problem, kernel, b).compile(pool) for b in blocks
            }
        return cls(kernel, regime, problem, compiling, plain.arguments(saving))

    def rows(
        self, rounds: int, blocks: Sequence[Blocks], *, in_bursts: bool
    ) -> Iterator[dict]:
        """A row of each of the blocks."""
        chosen: dict[Hashable, Future] = {b: self.compiling[b] for b in blocks}
        options = {"rounds": rounds, "in_bursts": in_bursts}
        timings, failures = times(chosen, lambda _: self.arguments, **options)
        for b in blocks:
            row = {"shape": asdict(self.problem.shape), "pass": self.kernel}
            row |= {"peer": self.regime, "feature": _numbers(b)}
            row |= {"arguments": [*self.problem.static, *self.problem.arrays]}
            row |= {"in_bursts": in_bursts, "failure": failures.get(b)}
            row |= timings[b].row() if b in timings else {}
            yield row


def measure(
    backend: ModuleType,
    regime: str,
    kernel: str,
    head_size: int,
    rounds: int,
    most_problems: int | None = None,
) -> Iterator[dict]:
    """Rows of the blocks of a kernel in a regime; none if there is only one choice.

    All are timed in bursts on the first problem, the fastest of these and those of now
    in settled clocks on every problem: some blocks win in a burst, and lose once the
    power that they draw has lowered the clocks.

    Args:
      backend: `triton` or `hopper` of this package.
      rounds: as of `timing.time_interleaved`.
      most_problems: how many calls they are timed on, at most.
    """
    blocks = backend.candidates(kernel, head_size, regime)
    if len(blocks) == 1:
        return
    problems = backend.problems_of(kernel, regime, head_size)[:most_problems]
    for i, problem in enumerate(problems):
        programs = _Programs.start(backend, kernel, regime, problem, blocks)
        if i == 0 and len(blocks) > 1 + _FINALISTS:
            rows = list(programs.rows(rounds, blocks, in_bursts=True))
            yield from rows
            blocks = _finalists(blocks, rows)
        yield from programs.rows(rounds, blocks, in_bursts=False)


def _finalists(blocks: Sequence[Blocks], rows: Sequence[dict]) -> list[Blocks]:
    """The blocks of now, the first, and the fastest others."""
    seconds = [row.get("seconds", math.inf) for row in rows]
    others = sorted(range(1, len(blocks)), key=lambda i: seconds[i])
    return [blocks[0], *(blocks[i] for i in others[:_FINALISTS])]


def _numbers(blocks: Blocks) -> list[int | None]:
    """As in a table: without what is left out of `Blocks`."""
    numbers = list(dataclasses.astuple(blocks))
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def best(rows: Iterable[dict], margin: float = MARGIN) -> tuple[list, float]:
    """The blocks to take, and how many times as fast they are as those of now.

    Those of now are the first; they stay unless others are faster by a margin in the
    geometric mean over all calls.

    Args:
      rows: of `measure`; what was timed in bursts counts for nothing.
    """
    seconds: dict[tuple, list[float]] = collections.defaultdict(list)
    for row in rows:
        if not row.get("in_bursts"):
            seconds[tuple(row["feature"])].append(row.get("seconds", math.inf))
    most = max(map(len, seconds.values()))
    means = {
        blocks: math.exp(sum(map(math.log, own)) / most)
        for blocks, own in seconds.items()
        if len(own) == most
    }
    now = next(iter(means))
    fastest = min(means, key=lambda blocks: means[blocks])
    if not means[fastest] < margin * means[now]:
        fastest = now
    gain = means[now] / means[fastest] if math.isfinite(means[now]) else math.inf
    return list(fastest), gain
