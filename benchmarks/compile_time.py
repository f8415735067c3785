"""Seconds from a new shape to a program: tracing and lowering, then compiling.

    python -m benchmarks.compile_time

Forward, and forward with backward, 8 heads of 128, causal. Every program has a length
that none before it had, so that nothing is taken from a cache; a first program, not
counted, loads what is loaded once. Rows go to `compile_time.jsonl`.
"""

import statistics
import time
from dataclasses import asdict

import jax
from absl import flags

from benchmarks import cost_tables, harness, options, programs, records
from benchmarks.peers import PEERS
from benchmarks.shapes import Shape

_LENGTH = options.integers("length", "2k", "The first, T: others follow it.")
_HEADS = flags.DEFINE_integer("heads", 8, "N.", lower_bound=1)
_HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "H.", lower_bound=1)
_DTYPE = options.dtype("bfloat16")
_PEERS = options.jax_peers(["jax_flash2", "xla", "cudnn"])
_REPEATS = options.repeats(5)
_RESULTS_DIR, _COMMIT = options.files()
_PASSES = ("forward", "forward_backward")
_STEP = 64  # between two lengths


def seconds(peer: programs.JaxPeer, shape: Shape, which: str) -> tuple[float, float]:
    """Seconds to trace and lower a pass, and to compile it."""
    function = peer.passes(shape)[which]
    structs = shape.structs()[: 3 if which == "forward" else 4]
    begun = time.perf_counter()
    lowered = programs.lower(function, *structs)
    lowering = time.perf_counter() - begun
    lowered.compile()
    return lowering, time.perf_counter() - begun - lowering


def one(peer: programs.JaxPeer, shapes: list[Shape], which: str) -> dict:
    """The row of a peer and pass; the first shape only warms up."""
    row = {
        "shape": asdict(shapes[1]),
        "pass": which,
        "peer": peer.name,
        "failure": None,
    }
    try:
        timings = [seconds(peer, shape, which) for shape in shapes][1:]
        lowering, compiling = (list(x) for x in zip(*timings, strict=True))
        row |= {
            "lower_seconds": statistics.median(lowering),
            "compile_seconds": statistics.median(compiling),
            "lower_timings": lowering,
            "compile_timings": compiling,
        }
    except Exception as error:  # a peer's failure is a result, not the end
        row["failure"] = harness.describe(error)
    return row


def main():
    jax.config.update("jax_enable_compilation_cache", False)
    heads, head_size = _HEADS.value, _HEAD_SIZE.value
    peers = [PEERS[name] for name in _PEERS.value]
    run = records.Run.start("compile_time", _RESULTS_DIR.value, commit=_COMMIT.value)
    rows = []
    (length,) = _LENGTH.value
    with options.Progress(len(peers) * len(_PASSES), "program") as progress:
        for which in _PASSES:
            shapes = []
            for _ in range(1 + _REPEATS.value):
                sizes = (1, length, heads, heads, head_size)
                shapes.append(Shape(*sizes, causal=True, dtype=_DTYPE.value))
                length += _STEP
            for peer in peers:
                rows.append(run.write(one(peer, shapes, which)))
                progress.step(f"{peer.label}: {which}")
    print(f"\n{run.path}\n\n{cost_tables.compile_time(rows)}")


if __name__ == "__main__":
    options.launch(main)
