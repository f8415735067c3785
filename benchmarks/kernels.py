"""Where a call spends its time on a GPU: its kernels, and the pauses between them.

    python -m benchmarks.kernels                     # B 2, T 8192, N 16, H 128, causal
    python -m benchmarks.kernels --batch=8 --length=2k --nocausal --peers=cudnn

JAX's profiler looks on while each peer is called for some time, first for a tenth of
it: clocks fall under load, so a short run flatters. Prints microseconds a call, by
kernel; how long none ran; and what calls took without the profiler. Keeps no rows.
"""

import functools

import jax
from absl import flags

from benchmarks import harness, options, profiles
from benchmarks.harness import Shape
from benchmarks.peers import PEERS

_BATCH = flags.DEFINE_integer("batch", 2, "B.", lower_bound=1)
_LENGTH = options.integers("length", "8k", "Sequence length, T: one number.")
_HEADS = flags.DEFINE_integer("heads", 16, "N.", lower_bound=1)
_KV_HEADS = flags.DEFINE_integer("kv_heads", None, "K; N if not given.", lower_bound=1)
_HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "H.", lower_bound=1)
_CAUSAL = flags.DEFINE_bool("causal", True, "Causal masking.")
_DTYPE = options.dtype("bfloat16")
_PEERS = options.jax_peers(["jax_flash2"])
_PASSES = options.names(
    "passes", ["forward_backward"], ["forward", "forward_backward"], "What is called"
)
_SECONDS = flags.DEFINE_float("seconds", 1.0, "Of calls that are looked at.")


def main():
    (length,) = _LENGTH.value
    heads = _HEADS.value, _KV_HEADS.value or _HEADS.value
    shape = Shape(
        *(_BATCH.value, length, *heads, _HEAD_SIZE.value),
        *(_CAUSAL.value, _DTYPE.value),
    )
    operands = shape.operands()
    for which in _PASSES.value:
        for name in _PEERS.value:
            print(f"\n{name}, {shape}, {which.replace('_', ' and ')}")
            try:
                passes = PEERS[name].passes(shape)
                given = operands[: 3 if which == "forward" else 4]
                program = jax.jit(passes[which]).lower(*given).compile()
            except Exception as error:  # a peer's failure is a result, not the end
                print(harness.describe(error))
                continue
            with harness.alone():
                call = functools.partial(program, *given)
                _, each = profiles.repeated(call, _SECONDS.value)
                events, count = profiles.watched(call, _SECONDS.value)
                print("\n".join(profiles.lines(events, count)))
            print(f"{1e6 * each:10.1f} us  a call, without the profiler", flush=True)


if __name__ == "__main__":
    options.launch(main)
