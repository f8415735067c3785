"""The fastest blocks of a kernel, for a head size and a regime of a table."""

import collections
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import ModuleType
from typing import Any

from jax_flash2.tune.problems import Problem
from jax_flash2.tune.programs import Timed, times
from pallas_kernels.configs import Blocks, Config

# New blocks must take less than this part of the time of those that calls have now.
MARGIN = 0.99
# Blocks this much slower than the fastest on the first call are not tried on others.
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
    backend: ModuleType,
    regime: str,
    kernel: str,
    head_size: int,
    rounds: int,
    most_problems: int | None = None,
) -> Iterator[dict]:
    """Rows of all blocks of a kernel in a regime; none if there is only one choice.

    Of those slow on the first problem only that is known.

    Args:
      backend: `triton` or `hopper` of this package.
      rounds: as of `timing.time_interleaved`.
      most_problems: how many calls they are timed on, at most.
    """
    blocks = backend.candidates(kernel, head_size, regime)
    if len(blocks) == 1:
        return
    for problem in backend.problems_of(kernel, regime, head_size)[:most_problems]:
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
            yield row
        seconds = {b: timings[b].row()["seconds"] for b in timings}
        limit = _SLOW * min(seconds.values(), default=math.inf)
        blocks = [b for b in blocks if b == blocks[0] or seconds.get(b, limit) < limit]


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
      rows: of `measure`.
    """
    seconds: dict[tuple, list[float]] = collections.defaultdict(list)
    for row in rows:
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
