"""Speed of one long sequence with few heads, when there are few blocks to go round.

    python -m benchmarks.occupancy

B 1, T 16384, causal, against the number of heads. Checked, timed and written as in
`benchmarks.attention`, to `occupancy.jsonl`.
"""

from absl import flags

from benchmarks import comparison, options
from benchmarks.shapes import Shape

_HEADS = options.integers("heads", "1,2,4,8,32", "Numbers of heads, N.")
_LENGTH = options.integers("length", "16k", "Sequence length, T: one number.")
_HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "H.", lower_bound=1)
_FLAGS = options.comparison(["forward", "backward"])


def main():
    (length,) = _LENGTH.value
    shapes = [
        Shape(1, length, heads, heads, _HEAD_SIZE.value, True, _FLAGS.dtype.value)
        for heads in _HEADS.value
    ]
    comparison.measure("occupancy", shapes, _FLAGS)


if __name__ == "__main__":
    options.launch(main)
