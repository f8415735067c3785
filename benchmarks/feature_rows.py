"""Rows of `benchmarks.features`."""

import functools
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import jax

from benchmarks import harness, options, programs
from benchmarks.feature_calls import Feature, passes
from benchmarks.harness import Program
from benchmarks.peers import OURS
from jax_flash2.tune.problems import Shape


def _program(compiled: jax.stages.Compiled, arguments: tuple) -> Program:
    """After its first call."""
    jax.block_until_ready(compiled(*arguments))
    run = functools.partial(compiled, *arguments)
    return Program(
        run, jax.block_until_ready, lambda _: {}, memory=programs.memory(compiled)
    )


def _started(shape: Shape, found: Mapping[str, Feature]) -> tuple[dict, dict]:
    """Programs by feature and pass, compiled side by side, and failures."""
    compiling, started, failures = {}, {}, {}
    whole = shape.operands()
    with (
        options.Progress(len(found), "feature") as progress,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        for name, feature in found.items():
            operands = [
                x.reshape(x.shape[0] * feature.split, -1, *x.shape[2:]) for x in whole
            ]
            arguments = (*operands, feature.arrays)
            for which, function in passes(shape, feature).items():
                try:
                    lowered = programs.lower(function, *arguments)
                    compiling[name, which] = pool.submit(lowered.compile), arguments
                except Exception as error:  # one feature's failure is a result
                    failures[name, which] = harness.describe(error)
            progress.step(f"lowered: {name}")
    for at, (future, arguments) in compiling.items():
        try:
            started[at] = _program(future.result(), arguments)
        except Exception as error:  # as above
            failures[at] = harness.describe(error)
    return started, failures


def rows_of(shape: Shape, found: Mapping[str, Feature], *, rounds: int) -> list[dict]:
    """A row for each feature and pass."""
    with harness.compiling():
        timed, failures = _started(shape, found)
    print(f"timing {len(timed)} programs, {rounds} rounds", flush=True)
    with harness.alone():
        timings, later = harness.time_interleaved(timed, rounds=rounds)
    rows = []
    for name, feature in found.items():
        for which in passes(shape, feature):
            at = name, which
            row = {"shape": asdict(shape), "feature": name, "pass": which}
            row |= {"peer": OURS}
            row |= {"pairs": feature.pairs, "beside": feature.beside}
            row |= {"failure": {**failures, **later}.get(at)}
            if at in timings:
                row |= timings[at].row() | {"memory": timed[at].memory}
            rows.append(row)
    return rows
