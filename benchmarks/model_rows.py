"""Times and checks of one call of a model: what `benchmarks.models` runs for each."""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash2
from benchmarks import harness, profiles, programs
from benchmarks.harness import Program
from benchmarks.model_calls import Call
from benchmarks.peers import OURS

# A result is wrong if it is off by more than this part of its largest element.
_TOLERANCE = 2.0**-5
# Elements of a float32 array of scores that a check may make.
_MOST_SCORES = 2**29
# Below, a call may take a host longer than its kernels take a GPU.
_SHORT_SECONDS = 200e-6
# Those of all heads that XLA's standard attention may make to take part: with more it
# took 3 to 20 times as long as cuDNN, and minutes of autotuning (NVIDIA H100,
# 2026-11-25, benchmarks/lab/079-calls-of-models-on-hopper.md).
_MOST_SCORES_XLA = 2**26


def _ours(call: Call, q, k, v, arrays):
    return jax_flash2.attention(
        *(q, k, v),
        is_causal=call.causal,
        local_window_size=call.window,
        scale=call.scale,
        logits_soft_cap=call.soft_cap,
        query_offset=call.offset,
        **arrays,
    )


def _kept(call: Call, arrays) -> jax.Array | None:
    """A mask for documents, and for positions that do not start at 0; or None."""
    mask = None
    if "query_segment_ids" in arrays:
        ids = arrays["query_segment_ids"]
        mask = (ids[:, :, None] == ids[:, None])[:, None]
    if call.offset and call.t > 1:
        rows = jnp.arange(call.t)[:, None] + call.offset
        past = (rows >= jnp.arange(call.keys))[None, None]
        mask = past if mask is None else mask & past
    return mask


def _distances(call: Call, arrays) -> jax.Array:
    """ALiBi as a bias [1, N, T, S]."""
    rows = jnp.arange(call.t)[:, None] + call.offset
    distance = jnp.abs(rows - jnp.arange(call.keys)).astype(jnp.float32)
    return -arrays["alibi_slopes"][:, None, None] * distance


def _common(call: Call, arrays) -> dict:
    """Arguments in the form of `jax.nn.dot_product_attention`."""
    bias = arrays.get("bias")
    if "alibi_slopes" in arrays:
        bias = _distances(call, arrays)[None]
    found = {"bias": bias, "mask": _kept(call, arrays), "scale": call.scale}
    found["is_causal"] = call.causal and not call.offset
    if "key_value_seq_lengths" in arrays:
        found["key_value_seq_lengths"] = arrays["key_value_seq_lengths"]
    if call.window is not None:
        left, right = (call.keys if x is None else x for x in call.window)
        found["local_window_size"] = (left, 0 if call.causal else right)
    return found


def _jax_nn(implementation: str):
    def attention(call: Call, q, k, v, arrays):
        if call.soft_cap is not None or call.sinks:
            raise NotImplementedError("no soft cap and no sinks")
        scores = call.batch * call.n * call.t * call.keys
        if implementation == "xla" and scores > _MOST_SCORES_XLA:
            raise NotImplementedError(f"not run: {scores / 2**26:.0f} x 2^26 scores")
        options = _common(call, arrays)
        if options["bias"] is not None:
            options["bias"] = options["bias"].astype(q.dtype)
        return jax.nn.dot_product_attention(
            q, k, v, implementation=implementation, **options
        )

    return attention


def _tokamax(call: Call, q, k, v, arrays):
    import tokamax

    if call.sinks:
        raise NotImplementedError("no sinks")
    options = {n: x for n, x in _common(call, arrays).items() if x is not None}
    if call.soft_cap is not None:
        options["logits_soft_cap"] = call.soft_cap
    return tokamax.dot_product_attention(q, k, v, **options)


PEERS: dict[str, Callable] = {
    OURS: _ours,
    "cudnn": _jax_nn("cudnn"),
    "xla": _jax_nn("xla"),
    "tokamax": _tokamax,
}


def passes(call: Call, attention: Callable) -> dict[str, Callable]:
    """Functions of (query, key, value, output gradient, other arrays)."""

    def forward(q, k, v, do, arrays):
        del do
        return [attention(call, q, k, v, arrays)]

    def both(q, k, v, do, arrays):
        learnt = {n: x for n, x in arrays.items() if n in ("bias", "sinks")}

        def of(q, k, v, learnt):
            return attention(call, q, k, v, {**arrays, **learnt})

        out, vjp = jax.vjp(of, q, k, v, learnt)
        return [out, *vjp(do)]

    return {"forward": forward} | ({"forward_backward": both} if call.trained else {})


def _last_head(call: Call, operands, arrays) -> tuple[Call, list, dict]:
    """The last head of the last batch entry, as a call of its own, in float32."""
    one = dataclasses.replace(call, batch=1, n=1, k=1)
    made = [x[-1:, :, -1:].astype(jnp.float32) for x in operands]
    cut = {name: x[-1:] for name, x in arrays.items()}
    if "bias" in cut:
        cut["bias"] = cut["bias"][:, -1:].astype(jnp.float32)
    return one, made, cut


def exact(call: Call) -> Callable:
    """A function as those of `passes`, of the last head alone, in float32."""

    def reference(call, q, k, v, arrays):
        options = {"implementation": "reference", "precision": "highest"}
        return _ours(call, q, k, v, {**arrays, **options})

    def function(q, k, v, do, arrays):
        one, made, cut = _last_head(call, (q, k, v, do), arrays)
        *_, last = passes(one, reference).values()
        return last(*made, cut)

    return function


def named(results: Sequence) -> dict[str, np.ndarray]:
    """out and, of a trained call, dq of the only head that `exact` gives."""
    pairs = zip(("out", "dq"), results, strict=False)
    return {name: np.asarray(x[0, :, 0]) for name, x in pairs}


def wrong(results: Sequence, want: Mapping[str, np.ndarray]) -> bool:
    """Whether out or dq of the last head is far from what it should be."""
    for name, x in zip(("out", "dq"), results, strict=False):
        if name in want:
            got = np.asarray(x[-1, :, -1].astype(jnp.float32))
            error = np.abs(got - want[name]).max(initial=0.0)
            if not error <= _TOLERANCE * np.abs(want[name]).max(initial=1e-30):
                return True
    return False


@dataclasses.dataclass(frozen=True)
class Compiling:
    """Programs of a call that a pool compiles.

    Attributes:
      programs: by pass and peer.
      exact: what they are compared with; None where its scores would be too many.
    """

    programs: Mapping[tuple[str, str], Future]
    exact: Future | None


def start(call: Call, dtype: str, peers: Sequence[str], pool: Executor) -> Compiling:
    """Lowers now and compiles in `pool`."""
    operands, arrays = jax.eval_shape(functools.partial(call.operands, dtype))

    def compiled(function: Callable, options: dict | None = None) -> Future:
        try:
            lowered = programs.lower(function, *operands, arrays)
        except Exception as error:  # a peer's failure is a result, not the end
            failed = Future()
            failed.set_exception(error)
            return failed
        return pool.submit(lowered.compile, options)

    found = {
        (which, name): compiled(passes(call, attention)[which])
        for which in passes(call, _ours)
        for name, attention in PEERS.items()
        if name in peers
    }
    fits = call.t * call.keys <= _MOST_SCORES
    return Compiling(found, compiled(exact(call), harness.UNTUNED) if fits else None)


def started(calls: Sequence[Call], dtype: str, peers: Sequence[str]) -> list[Compiling]:
    """All programs of some calls. Nothing may be timed before: compilers autotune."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [start(call, dtype, peers, pool) for call in calls]


def _kernel_seconds(
    timed: Mapping[str, Program], timings: Mapping[str, harness.Timing]
) -> dict[str, float]:
    """Of a call by peer, if it is short for one of them; {} without a GPU."""
    medians = [statistics.median(x.seconds) for x in timings.values()]
    if not harness.is_gpu() or min(medians, default=1.0) > _SHORT_SECONDS:
        return {}
    found = {}
    for name, program in timed.items():
        events, calls = profiles.watched(program.call, seconds=0.02)
        found[name] = sum(x.length for x in events) / calls / 1e9
    return found if all(found.values()) else {}


def rows_of(
    call: Call, group: str, dtype: str, compiling: Compiling, *, rounds: int
) -> list[dict]:
    """A row for each pass and peer, of what `started` compiled."""
    operands, arrays = call.operands(dtype)
    want = {}
    if compiling.exact is not None:
        want = named(compiling.exact.result()(*operands, arrays))
    rows = []
    for which in passes(call, _ours):
        timed, failures, memory, is_wrong = {}, {}, {}, {}
        names = [name for name in PEERS if (which, name) in compiling.programs]
        for name in names:
            try:
                compiled = compiling.programs[which, name].result()
                programs.check_fits(compiled)
                results = jax.block_until_ready(compiled(*operands, arrays))
                is_wrong[name] = wrong(results, want)
                memory[name] = programs.memory(compiled)
                run = functools.partial(compiled, *operands, arrays)
                timed[name] = Program(run, jax.block_until_ready, lambda _: {}, {})
            except Exception as error:  # a peer's failure is a result, not the end
                failures[name] = harness.describe(error)
        timings, later = harness.time_interleaved(timed, rounds=rounds)
        alone = _kernel_seconds({n: timed[n] for n in timings}, timings)
        for name in names:
            row = {"call": call.name, "group": group, "sizes": str(call)}
            row |= {"source": call.source, "pass": which, "peer": name}
            row |= {"failure": {**failures, **later}.get(name)}
            if name in timings:
                row |= timings[name].row()
                row |= {"wrong": is_wrong[name], "memory": memory[name]}
                row |= {"kernel_seconds": alone.get(name)}
            rows.append(row)
    return rows
