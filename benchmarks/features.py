"""What each feature of `attention` costs, against plain causal attention.

    python -m benchmarks.features
    python -m benchmarks.features --functions

B 2, T 8192, N 16, H 128, bfloat16 unless flags say otherwise, every feature by itself
on top of the causal mask. Forward; backward to query, key and value; and, for a bias,
slopes or sinks, backward to these too. Times are given for each pair that the masks
keep, relative to plain: a window or documents are faster, and the figure says whether
by as much as they should. Their plain is one of about as many pairs for each query:
shorter sequences in a larger batch. The boolean masks are one that keeps nine pairs in
ten at random, so that no block can be skipped or taken as full; documents; and padding.
Rows go to `features.jsonl`.

`--functions` times functions of pairs instead, beside the features that they stand for
(`benchmarks.function_features`); rows go to `function_features.jsonl`.
"""

from absl import flags

from benchmarks import cost_tables, options, records
from benchmarks.feature_calls import features
from benchmarks.feature_rows import rows_of
from benchmarks.function_features import function_features
from jax_flash2.tune.problems import Shape

_BATCH = flags.DEFINE_integer("batch", 2, "B.", lower_bound=1)
_LENGTH = options.integers("length", "8k", "Sequence length, T: one number.")
_HEADS = flags.DEFINE_integer("heads", 16, "N.", lower_bound=1)
_HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "H.", lower_bound=1)
_FUNCTIONS = flags.DEFINE_bool("functions", False, "Functions of pairs instead.")
_DTYPE = options.dtype("bfloat16")
_REPEATS = options.repeats(7)
_RESULTS_DIR, _COMMIT = options.files()


def main():
    (length,) = _LENGTH.value
    heads = _HEADS.value
    shape = Shape(
        *(_BATCH.value, length, heads, heads, _HEAD_SIZE.value, True, _DTYPE.value)
    )
    name = "function_features" if _FUNCTIONS.value else "features"
    run = records.Run.start(name, _RESULTS_DIR.value, commit=_COMMIT.value)
    found = (function_features if _FUNCTIONS.value else features)(shape)
    rows = [run.write(row) for row in rows_of(shape, found, rounds=_REPEATS.value)]
    print(f"\n{run.path}\n\n{cost_tables.features(rows)}")


if __name__ == "__main__":
    options.launch(main)
