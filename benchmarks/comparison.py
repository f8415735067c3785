"""Peers side by side in one run: checked, timed interleaved, written down."""

import gc
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from benchmarks import harness, options, records, tables
from benchmarks.harness import Shape, describe
from benchmarks.options import Progress
from benchmarks.peers import PEERS
from benchmarks.programs import JaxPeer, TorchPeer


def measure(
    benchmark: str, shapes: Sequence[Shape], chosen: options.Comparison
) -> None:
    """Compares as the flags say, writes rows to the benchmark's file, prints tables."""
    run = records.Run.start(
        benchmark,
        chosen.results_dir.value,
        commit=chosen.commit.value,
        resume=chosen.resume.value,
        run_id=chosen.part.run_id.value,
    )
    rows = compare(
        run,
        chosen.part.of(shapes),
        [PEERS[name] for name in chosen.peers.value],
        chosen.passes.value,
        rounds=chosen.repeats.value,
        budget_seconds=chosen.budget.value,
    )
    print(f"\n{run.path}\n\n{tables.comparison(rows)}")


def compare(
    run: records.Run,
    shapes: Sequence[Shape],
    peers: Sequence[JaxPeer | TorchPeer],
    passes: Sequence[str],
    *,
    rounds: int,
    budget_seconds: float | None = None,
) -> list[dict]:
    """Times every pass of every peer on every shape; each row is written at once.

    A peer that is absent, fails or is wrong has a row that says so.

    Args:
      run: takes the rows; shapes that it has done already are not done again.
      shapes, peers, passes: what to compare.
      rounds: batches of calls of each peer and pass; their median counts.
      budget_seconds: no further shape is begun after this long.

    Returns:
      All rows of the run, with those from before.
    """
    begun = time.monotonic()
    wanted = [s for s in shapes if not _is_done(run, s, peers, passes)]
    rows = list(run.done)
    if not wanted:
        return rows
    with harness.alone():
        ceiling = harness.matmul_tflops()
    with Progress(len(wanted), "shape") as progress:
        progress.say(f"{run.facts['device']}: matrix product {ceiling:.4g} TFLOP/s")
        for count, shape in enumerate(wanted):
            spent = time.monotonic() - begun
            if budget_seconds is not None and spent > budget_seconds:
                progress.say(
                    f"{spent:.0f} s are spent, of {budget_seconds:.0f}: "
                    f"{len(wanted) - count} shapes not begun, from {shape} on"
                )
                break
            for row in _one_shape(shape, peers, passes, rounds):
                rows.append(run.write({**row, "matmul_tflops": ceiling}))
            _release()
            progress.step(f"{shape} ({time.monotonic() - begun - spent:.1f} s)")
    return rows


def _is_done(run, shape, peers, passes) -> bool:
    done = {records.key(row) for row in run.done}
    about = {"shape": asdict(shape)}
    return all(
        records.key({**about, "pass": which, "peer": peer.name}) in done
        for which in passes
        for peer in peers
    )


def _one_shape(shape, peers, passes, rounds) -> Iterable[dict]:
    operands = shape.operands()
    expected = harness.reference(shape, operands)
    started, failures = {}, {}
    # Leaving the pool waits for the compiler: its autotuning runs on the same GPU, and
    # would slow whatever is timed beside it.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for which in passes:
            for peer in peers:
                try:
                    finish = peer.start(shape, operands, which, pool)
                    started[which, peer.name] = finish
                except Exception as error:  # a peer's failure is a result, not the end
                    failures[which, peer.name] = describe(error)
    for which in passes:
        failed = {name: text for (w, name), text in failures.items() if w == which}
        finishers = {name: f for (w, name), f in started.items() if w == which}
        yield from _one_pass(
            shape, which, peers, finishers, failed, expected, rounds=rounds
        )
        # What the backward keeps is not needed any more.
        started = {key: f for key, f in started.items() if key[0] != which}
        del finishers
        _release()


def _one_pass(shape, which, peers, finishers, failed, expected, *, rounds):
    """Rows of one pass; `failed` says why some peers have no finisher."""
    programs, errors = {}, {}

    def attempt(name, step, kept):
        try:
            kept[name] = step()
        except Exception as error:  # a peer's failure is a result, not the end
            failed[name] = describe(error)
            programs.pop(name, None)

    for name, finish in finishers.items():
        attempt(name, finish, programs)
    with harness.alone():
        for name, program in list(programs.items()):
            attempt(name, lambda p=program: _errors(p, expected, shape), errors)
        timings, failed_later = harness.time_interleaved(programs, rounds=rounds)
    failed = {**failed, **failed_later}
    for peer in peers:
        row = {
            "shape": asdict(shape),
            "pass": which,
            "peer": peer.name,
            "failure": failed.get(peer.name),
        }
        if peer.name in timings:
            row |= timings[peer.name].row()
            row["tflops"] = shape.flops(which) / row["seconds"] / 1e12
        if peer.name in programs:
            row |= errors[peer.name]
            row["memory"] = programs[peer.name].memory
            row["note"] = programs[peer.name].note
        yield row


def _errors(program: harness.Program, expected, shape: Shape) -> dict:
    return harness.check(program.results(program.call()), expected, shape.dtype)


def _release() -> None:
    """Gives memory that is not used any more back to the GPU, for the other peers."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
