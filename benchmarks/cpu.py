"""The plain-JAX implementation on a CPU, beside jax.nn's: time and memory.

    python -m benchmarks.cpu

jax_flash2's implementation "xla" and `jax.nn.dot_product_attention`, in float32, B 1,
4 heads of 64, causal, forward and backward in one program, against sequence length.
Timed interleaved. Memory is what the compiled program needs beyond operands and
results. Rows go to `cpu.jsonl`.
"""

import jax
from absl import flags

from benchmarks import comparison, cost_tables, options, records
from benchmarks.peers import OURS, PEERS
from benchmarks.shapes import Shape

_LENGTHS = options.integers("lengths", "512,1k,2k,4k,8k", "Sequence lengths, T.")
_HEADS = flags.DEFINE_integer("heads", 4, "N.", lower_bound=1)
_HEAD_SIZE = flags.DEFINE_integer("head_size", 64, "H.", lower_bound=1)
_REPEATS = options.repeats(9)
_RESULTS_DIR, _COMMIT = options.files()


def main():
    jax.config.update("jax_platforms", "cpu")
    heads = _HEADS.value
    shapes = [
        Shape(1, length, heads, heads, _HEAD_SIZE.value, True, "float32")
        for length in sorted(_LENGTHS.value)
    ]
    run = records.Run.start("cpu", _RESULTS_DIR.value, commit=_COMMIT.value)
    rows = comparison.compare(
        run,
        shapes,
        [PEERS[OURS], PEERS["xla"]],
        ["forward_backward"],
        rounds=_REPEATS.value,
    )
    print(f"\n{run.path}\n\n{cost_tables.cpu(rows)}")


if __name__ == "__main__":
    options.launch(main)
