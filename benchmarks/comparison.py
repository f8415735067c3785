"""Peers side by side in one run: checked, timed interleaved, written down."""

import dataclasses
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks import harness, options, records, tables
from benchmarks.harness import describe
from benchmarks.options import Progress
from benchmarks.peers import PEERS
from benchmarks.programs import JaxPeer, TorchPeer
from benchmarks.shapes import Shape


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
    shapes = chosen.part.of(shapes)
    rows = compare(
        run,
        shapes,
        [PEERS[name] for name in chosen.peers.value],
        chosen.passes.value,
        rounds=chosen.repeats.value,
        together=1 if chosen.part.is_whole else max(1, len(shapes)),
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
    together: int = 1,
    budget_seconds: float | None = None,
) -> list[dict]:
    """Times every pass of every peer on every shape; each row is written at once.

    A peer that is absent, fails or is wrong has a row that says so.

    Args:
      run: takes the rows; shapes that it has done already are not done again.
      shapes, peers, passes: what to compare.
      rounds: batches of calls of each peer and pass; their median counts.
      together: so many shapes are compiled before the first of them is timed. Their
        operands lie on the GPU meanwhile.
      budget_seconds: no further shape is begun after this long.

    Returns:
      All rows of the run, with those from before.
    """
    begun = time.monotonic()
    wanted = [s for s in shapes if not _is_done(run, s, peers, passes)]
    rows = list(run.done)
    if not wanted:
        return rows
    left, ceiling = list(wanted), None
    with Progress(len(wanted), "shape") as progress:

        def is_late() -> bool:
            spent = time.monotonic() - begun
            if budget_seconds is None or spent <= budget_seconds:
                return False
            progress.say(
                f"{spent:.0f} s are spent, of {budget_seconds:.0f}: "
                f"{len(left)} shapes not begun, from {left[0]} on"
            )
            return True

        for group in harness.batched(wanted, together):
            if is_late():
                return rows
            with harness.compiling():
                compiled = _compiled(group, peers, passes)
            if ceiling is None:
                with harness.alone():
                    ceiling = harness.matmul_tflops()
                device = run.facts["device"]
                progress.say(f"{device}: matrix product {ceiling:.4g} TFLOP/s")
            while compiled:
                if is_late():
                    return rows
                one = compiled.pop(0)
                left.pop(0)
                for which in passes:
                    with harness.alone():
                        found = list(_one_pass(one, which, peers, rounds))
                    for row in found:
                        rows.append(run.write({**row, "matmul_tflops": ceiling}))
                    one.forget(which)
                progress.step(f"{one.shape} ({time.monotonic() - begun:.0f} s)")
    return rows


def _is_done(run, shape, peers, passes) -> bool:
    done = {records.key(row) for row in run.done}
    about = {"shape": dataclasses.asdict(shape)}
    return all(
        records.key({**about, "pass": which, "peer": peer.name}) in done
        for which in passes
        for peer in _timed(which, peers)
    )


def _timed(which: str, peers):
    """Peers that have a program of a pass of their own."""
    return [x for x in peers if which != "forward" or not x.same_forward]


@dataclasses.dataclass
class _Compiled:
    """Programs of a shape, by pass and peer.

    Attributes:
      shape: what they are of.
      expected: of their results, by `harness.reference`.
      finishers: what `JaxPeer.start` gave.
      failures: why others are missing.
    """

    shape: Shape
    expected: dict
    finishers: dict[tuple[str, str], Callable[[], harness.Program]]
    failures: dict[tuple[str, str], str]

    def forget(self, which: str) -> None:
        """Gives back what a pass keeps on the GPU, for the other peers."""
        self.finishers = {k: x for k, x in self.finishers.items() if k[0] != which}
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()


def _compiled(shapes, peers, passes) -> list[_Compiled]:
    """Of some shapes, compiled side by side."""
    found = []
    # Leaving the pool waits for the compiler.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for shape in shapes:
            operands = shape.operands()
            one = _Compiled(shape, harness.reference(shape, operands), {}, {})
            for which, peer in ((x, p) for x in passes for p in _timed(x, peers)):
                at = which, peer.name
                try:
                    one.finishers[at] = peer.start(shape, operands, which, pool)
                except Exception as error:  # a peer's failure is a result, not the end
                    one.failures[at] = describe(error)
            found.append(one)
    return found


def _one_pass(one: _Compiled, which: str, peers, rounds: int) -> Iterable[dict]:
    """Rows of a pass."""
    shape, programs, errors = one.shape, {}, {}
    failed = {name: text for (w, name), text in one.failures.items() if w == which}
    finishers = {name: f for (w, name), f in one.finishers.items() if w == which}
    for name, finish in finishers.items():
        try:
            program = finish()
            got = program.results(program.call())
            errors[name] = harness.check(got, one.expected, shape.dtype)
            programs[name] = program
        except Exception as error:  # a peer's failure is a result, not the end
            failed[name] = describe(error)
    timings, failed_later = harness.time_interleaved(programs, rounds=rounds)
    failed = {**failed, **failed_later}
    for peer in _timed(which, peers):
        row = {
            "shape": dataclasses.asdict(shape),
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
