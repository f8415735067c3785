"""Attention calls of published models, beside what JAX has already.

    python -m benchmarks.models                     # every call, on a GPU
    python -m benchmarks.models --peers=jax_flash2,cudnn,xla  # a quarter of the time
    python -m benchmarks.models --small --repeats=1 # the same, small, anywhere
    python -m benchmarks.models --part=0/4          # a quarter of the calls: processes
                                                    # compile beside each other

Each call of `benchmarks.model_calls` runs forward, and forward and backward if the
model is trained (with the gradient of a learnt bias): jax_flash2, jax.nn (cuDNN, XLA's
standard attention) and tokamax. A peer that has a feature only in another form gets it
in that form, as its users would write it: documents and positions as a mask, ALiBi as a
bias. Results are compared with float32 attention for the last head. Where a call takes
less than 0.2 ms, the time of its kernels counts, by the profiler: starting it may take
a host longer. Prints times, the ratio to the best of jax.nn, its lowest and its
geometric mean. Rows go to `models.jsonl`.
"""

import time

from absl import flags

from benchmarks import harness, model_rows, model_tables, options, records
from benchmarks.model_calls import GROUPS

_GROUPS = options.names("groups", list(GROUPS), GROUPS, "Which calls")
_PEERS = options.names(
    "peers", list(model_rows.PEERS), model_rows.PEERS, "Who takes part"
)
_SMALL = flags.DEFINE_bool("small", False, "Few rows and heads, as for a CPU.")
_DTYPE = options.dtype("bfloat16")
_REPEATS = options.repeats(5)
_PART = options.part()
_BUDGET = flags.DEFINE_float("budget_seconds", None, "Begin no call after this long.")
_RESULTS_DIR, _COMMIT = options.files()
# Calls whose programs are compiled at the same time, before any of them is timed.
_TOGETHER = 12


def main():
    begun = time.monotonic()
    run = records.Run.start(
        *("models", _RESULTS_DIR.value),
        commit=_COMMIT.value,
        run_id=_PART.run_id.value,
    )
    calls = [(group, call) for group in _GROUPS.value for call in GROUPS[group]]
    calls = _PART.of(calls)
    if _SMALL.value:
        calls = [(group, call.small()) for group, call in calls]
    rows = []
    with options.Progress(len(calls), "call") as progress:
        for together in harness.batched(calls, _TOGETHER):
            if _BUDGET.value and time.monotonic() - begun > _BUDGET.value:
                name = together[0][1].name
                progress.say(f"no time is left for {name} and what comes after")
                break
            dtype, rounds = _DTYPE.value, _REPEATS.value
            own_calls = [call for _, call in together]
            with harness.compiling():
                compiled = model_rows.started(own_calls, dtype, _PEERS.value)
            for (group, call), own in zip(together, compiled, strict=True):
                with harness.alone():
                    found = model_rows.rows_of(call, group, dtype, own, rounds=rounds)
                rows += [run.write(row) for row in found]
                progress.step(f"{call.name} ({time.monotonic() - begun:.0f} s)")
    print(f"\n{run.path}\n\n{model_tables.models(rows)}")


if __name__ == "__main__":
    options.launch(main)
