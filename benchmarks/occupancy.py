"""Speed of one long sequence with few heads, when there are few blocks to go round.

    python -m benchmarks.occupancy

B 1, T 16384, causal, against the number of heads. Checked, timed and written as in
`benchmarks.attention`, to `occupancy.jsonl`.
"""

from absl import flags

from benchmarks import comparison, options, records, tables
from benchmarks.harness import Shape
from benchmarks.peers import PEERS

_HEADS = options.integers("heads", "1,2,4,8,32", "Numbers of heads, N.")
_LENGTH = options.integers("length", "16k", "Sequence length, T: one number.")
_HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "H.", lower_bound=1)
_DTYPE = options.dtype("bfloat16")
_PEERS = options.peers(list(PEERS))
_PASSES = options.passes(["forward", "backward"])
_REPEATS = options.repeats(5)
_BUDGET = flags.DEFINE_float(
    "budget_seconds", None, "Begin no further shape after this long."
)
_RESULTS_DIR, _COMMIT = options.files()


def main():
    (length,) = _LENGTH.value
    shapes = [
        Shape(1, length, heads, heads, _HEAD_SIZE.value, True, _DTYPE.value)
        for heads in _HEADS.value
    ]
    run = records.Run.start("occupancy", _RESULTS_DIR.value, commit=_COMMIT.value)
    rows = comparison.compare(
        run,
        shapes,
        [PEERS[name] for name in _PEERS.value],
        _PASSES.value,
        rounds=_REPEATS.value,
        budget_seconds=_BUDGET.value,
    )
    print(f"\n{run.path}\n\n{tables.comparison(rows)}")


if __name__ == "__main__":
    options.launch(main)
