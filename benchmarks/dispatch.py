"""Wall time of one small jitted call: Python, dispatch, the device, the way back.

    python -m benchmarks.dispatch

B 1, T 128, 8 heads of 64, causal: the kernels take next to no time. Each call is waited
for. Rows go to `dispatch.jsonl`.
"""

import statistics
import time
from dataclasses import asdict

import jax
from absl import flags

from benchmarks import cost_tables, harness, options, records
from benchmarks.peers import PEERS
from benchmarks.shapes import Shape

_LENGTHS = options.integers("lengths", "128", "Sequence lengths, T.")
_HEADS = flags.DEFINE_integer("heads", 8, "N.", lower_bound=1)
_HEAD_SIZE = flags.DEFINE_integer("head_size", 64, "H.", lower_bound=1)
_DTYPE = options.dtype("bfloat16")
_PEERS = options.jax_peers(["jax_flash2", "xla", "cudnn"])
_REPEATS = options.repeats(50)
_CALLS = flags.DEFINE_integer("calls", 50, "Of each peer a round.", lower_bound=1)
_RESULTS_DIR, _COMMIT = options.files()
_PASSES = ("forward", "forward_backward")


def call_seconds(functions: dict, *, rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds of each call, `calls` of each function by turns in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, (function, operands) in functions.items():
            for _ in range(calls):
                begun = time.perf_counter()
                jax.block_until_ready(function(*operands))
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def rows_of(shape: Shape, which: str, peers, *, rounds: int, calls: int) -> list[dict]:
    """Rows of a pass, one a peer. Their percentiles are of single calls, in seconds."""
    operands = shape.operands()[: 3 if which == "forward" else 4]
    functions, failures = {}, {}
    for peer in peers:
        try:
            function = jax.jit(peer.passes(shape)[which])
            jax.block_until_ready(function(*operands))
            functions[peer.name] = (function, operands)
        except Exception as error:  # a peer's failure is a result, not the end
            failures[peer.name] = harness.describe(error)
    seconds = call_seconds(functions, rounds=rounds, calls=calls)
    rows = []
    for peer in peers:
        row = {"shape": asdict(shape), "pass": which, "peer": peer.name}
        row["failure"] = failures.get(peer.name)
        if peer.name in seconds:
            ordered = sorted(seconds[peer.name])
            row |= {
                "seconds": statistics.median(ordered),
                "seconds_p05": ordered[len(ordered) // 20],
                "seconds_p95": ordered[-1 - len(ordered) // 20],
                "timings": seconds[peer.name],
            }
        rows.append(row)
    return rows


def main():
    heads, head_size = _HEADS.value, _HEAD_SIZE.value
    peers = [PEERS[name] for name in _PEERS.value]
    run = records.Run.start("dispatch", _RESULTS_DIR.value, commit=_COMMIT.value)
    rows = []
    for length in _LENGTHS.value:
        shape = Shape(1, length, heads, heads, head_size, True, _DTYPE.value)
        for which in _PASSES:
            found = rows_of(
                shape, which, peers, rounds=_REPEATS.value, calls=_CALLS.value
            )
            rows += map(run.write, found)
    print(f"\n{run.path}\n\n{cost_tables.dispatch(rows)}")


if __name__ == "__main__":
    options.launch(main)
