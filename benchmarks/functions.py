"""`score_mod` and `mask_mod` beside FlexAttention and FlashAttention-4.

    python -m benchmarks.functions                         # an hour of compiling
    python -m benchmarks.functions --lengths=8k --head_sizes=128 --calls="window|causal"
    python -m benchmarks.functions --peers=flash4

B x T is 16384 and N x H is 2048, in bfloat16. FlexAttention is torch's, compiled, with
its block mask made before. FlashAttention-4 is its package in CuTe, of the same text of
functions, with lists of blocks made before; at heads of 64 in two forms, of which the
table has the faster. Ours makes what it needs in the call. Forward, and forward with
the gradients of query, key and value; with "its gradient" that of the table, too.
Programs are timed side by side. Results of rows of at most 2048 are compared with exact
ones, longer ones with each other. Several processes can share the work
(--part, --run_id). Rows go to `functions.jsonl`.
"""

from __future__ import annotations

import itertools

from absl import flags

from benchmarks import options, records
from benchmarks.function_calls import examples
from benchmarks.function_rows import results, rows_of
from jax_flash2.tune.problems import Shape

_LENGTHS = options.integers("lengths", "2k,8k,32k", "Sequence lengths, T.")
_SIZES = options.integers("head_sizes", "64,128", "H.")
_TOKENS = options.integers("tokens", "16k", "B x T, of rows that are not longer.")
_WIDTH = options.integers("width", "2k", "N x H.")
_CALLS = flags.DEFINE_string("calls", "", "A regular expression: these examples alone.")
_PEERS = options.names(
    "peers",
    ["flex", "flash4"],
    ["flex", "flash4", "any_order"],
    "Who is timed beside ours; any_order: ours with Config(deterministic=False)",
)
_REPEATS = options.repeats(7)
_PART = options.part()
_RESULTS_DIR, _COMMIT = options.files()


def main():
    run = records.Run.start(
        "functions",
        _RESULTS_DIR.value,
        commit=_COMMIT.value,
        run_id=_PART.run_id.value,
    )
    calls = []
    for length, size in itertools.product(_LENGTHS.value, _SIZES.value):
        (tokens,), (width,) = _TOKENS.value, _WIDTH.value
        heads = max(1, width // size)
        batch = max(1, tokens // length)
        shape = Shape(batch, length, heads, heads, size, False, "bfloat16")
        named = options.calls_named(_CALLS.value, examples(shape))
        calls += [(shape, name) for name in named]
    calls = _PART.of(calls)
    rows = []
    with options.Progress(len(calls), "example") as progress:
        for shape, name in calls:
            own = rows_of(shape, name, peers=_PEERS.value, rounds=_REPEATS.value)
            rows += [run.write(row) for row in own]
            progress.step(f"{shape}: {name}")
    if not _PART.is_whole:
        rows = records.newest(_RESULTS_DIR.value, "functions")
    print(f"\n{run.path}\n\n{results(rows)}")


if __name__ == "__main__":
    options.launch(main)
