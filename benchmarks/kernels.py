"""Where a call spends its time on a GPU: its kernels, and the pauses between them.

    python -m benchmarks.kernels                     # B 2, T 8192, N 16, H 128, causal
    python -m benchmarks.kernels --batch=8 --length=2k --nocausal --peers=cudnn
    python -m benchmarks.kernels --calls="text|BERT" --implementation=mosaic_gpu
    python -m benchmarks.kernels --calls=ecode --passes=forward --peers=jax_flash2,read

JAX's profiler looks on while each peer is called for some time, first for a tenth of
it: clocks fall under load, so a short run flatters. Prints microseconds a call, by
kernel; how long none ran; and what calls took without the profiler. The peer "read"
only reads the keys and values, and gives their maximum; beside it, the rate at which
kernels came through them is printed, too. Keeps no rows.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from absl import flags

from benchmarks import harness, model_rows, options, profiles
from benchmarks.model_calls import GROUPS, Call
from benchmarks.peers import OURS, PEERS
from benchmarks.shapes import Shape

_BATCH = flags.DEFINE_integer("batch", 2, "B.", lower_bound=1)
_LENGTH = options.integers("length", "8k", "Sequence length, T: one number.")
_HEADS = flags.DEFINE_integer("heads", 16, "N.", lower_bound=1)
_KV_HEADS = flags.DEFINE_integer("kv_heads", None, "K; N if not given.", lower_bound=1)
_HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "H.", lower_bound=1)
_CAUSAL = flags.DEFINE_bool("causal", True, "Causal masking.")
_CALLS = flags.DEFINE_string(
    "calls",
    None,
    "In place of that shape, a regular expression: the calls of `benchmarks.models` in "
    "whose names it is found, by --peers among jax_flash2, cudnn, xla and read.",
)
_IMPLEMENTATION = flags.DEFINE_string(
    "implementation", None, "Of jax_flash2, for --calls."
)
_SMALL = flags.DEFINE_bool("small", False, "Few rows and heads, for --calls on a CPU.")
_DTYPE = options.dtype("bfloat16")
_READ = "read"
_PEERS = options.jax_peers([OURS], _READ)
_PASSES = options.names(
    "passes", ["forward_backward"], ["forward", "forward_backward"], "What is called"
)
_SECONDS = flags.DEFINE_float("seconds", 1.0, "Of calls that are looked at.")

# A function, and its operands.
_Pass = tuple[Callable, Sequence]


def _largest(q, k, v, *others) -> tuple[jax.Array, jax.Array]:
    """A plain read of the keys and values."""
    del q, others
    return jnp.max(k), jnp.max(v)


def _of_shape(shape: Shape, operands: Sequence, peer: str, which: str) -> _Pass:
    made = operands[: 3 if which == "forward" else 4]
    return _largest if peer == _READ else PEERS[peer].passes(shape)[which], made


def _of_model(call: Call, operands: Sequence, peer: str, which: str) -> _Pass:
    if peer == _READ:
        return _largest, operands
    more = {"implementation": _IMPLEMENTATION.value} if peer == OURS else {}

    def attention(call, q, k, v, arrays):
        return model_rows.PEERS[peer](call, q, k, v, {**arrays, **more})

    return model_rows.passes(call, attention)[which], operands


def _calls() -> Iterator[tuple[str, Callable[[str, str], _Pass]]]:
    """Each call in words, and what gives a pass of it by a peer."""
    if _CALLS.value is not None:
        by_name = {call.name: call for group in GROUPS.values() for call in group}
        for call in options.calls_named(_CALLS.value, by_name).values():
            call = call.small() if _SMALL.value else call
            made, arrays = call.operands(_DTYPE.value)
            name = f"{call.name} ({call})"
            yield name, functools.partial(_of_model, call, [*made, arrays])
        return
    if _IMPLEMENTATION.value is not None:
        raise ValueError(f"--implementation={_IMPLEMENTATION.value}: only with --calls")
    (length,) = _LENGTH.value
    heads = _HEADS.value, _KV_HEADS.value or _HEADS.value
    sizes = _BATCH.value, length, *heads, _HEAD_SIZE.value
    shape = Shape(*sizes, _CAUSAL.value, _DTYPE.value)
    yield str(shape), functools.partial(_of_shape, shape, shape.operands())


def main():
    for call, of in _calls():
        for which in _PASSES.value:
            for name in _PEERS.value:
                print(f"\n{name}, {call}, {which.replace('_', ' and ')}")
                try:
                    function, given = of(name, which)
                    program = jax.jit(function).lower(*given).compile()
                except Exception as error:  # a peer's failure is a result, not the end
                    print(harness.describe(error))
                    continue
                with harness.alone():
                    run = functools.partial(program, *given)
                    _, each = profiles.repeated(run, _SECONDS.value)
                    events, count = profiles.watched(run, _SECONDS.value)
                    print("\n".join(profiles.lines(events, count)))
                if events and _READ in _PEERS.value:
                    read = given[1].nbytes + given[2].nbytes
                    rate = read * count / sum(event.length for event in events)
                    print(f"{rate / 1e3:10.2f} TB/s  of {read / 1e9:.3f} GB")
                print(
                    f"{1e6 * each:10.1f} us  a call, without the profiler", flush=True
                )


if __name__ == "__main__":
    options.launch(main)
