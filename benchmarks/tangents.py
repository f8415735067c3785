"""Forward mode: output and tangent beside the forward pass alone.

    python -m benchmarks.tangents
    python -m benchmarks.tangents --length=512,2k,8k --calls=causal --repeats=5

8,192 positions, or one longer sequence, of 32 x 64 and of 16 x 128 in bfloat16, causal
and full. The forward is that of the default. "mosaic_gpu" is that backend by name,
whose tangent is a kernel for Hopper; "triton" has the default's forward and Triton's
tangent, with the blocks that it has by default. A line says which of these makes the
default's tangent. All are timed side by side, in settled clocks; medians. The tangents
of the last head are compared with exact ones, in float32: an exit code of 1 says that
one is wrong. Keeps no rows.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import harness, options
from jax_flash2 import Config, _api, attention, explain
from jax_flash2.tune.timing import Program
from pallas_kernels import device, tables
from pallas_kernels.triton import tuning

_LENGTHS = options.integers("length", "8k", "Sequence lengths, T.")
_WIDTH = options.integers("width", "2k", "N x H: one number.")
_CALLS = flags.DEFINE_string("calls", ".", "Names found by this regular expression.")
_PEERS = options.names(
    "peers",
    ["triton", "mosaic_gpu"],
    ("triton", "mosaic_gpu", "xla"),
    "Who makes the tangent",
)
_REPEATS = options.repeats(9)
_POSITIONS = 8192  # of all sequences of a call
_BLOCK = 512  # query rows of the exact tangent at a time


@functools.partial(jax.jit, static_argnames="is_causal")
def exact(operands, tangents, *, is_causal: bool) -> jax.Array:
    """The tangent of the output of the last head, [T, H], products in full float32."""
    primals, along = (
        [x[0, :, -1].astype(jnp.float32) for x in arrays]
        for arrays in (operands, tangents)
    )
    length, size = primals[0].shape
    rows = math.gcd(length, _BLOCK)
    product = functools.partial(jnp.einsum, precision="highest")

    def block(start):
        def out(q, k, v):
            scores = product("th,sh->ts", q, k) * size**-0.5
            kept = start + jnp.arange(rows)[:, None] >= jnp.arange(length)
            scores = jnp.where(kept | (not is_causal), scores, -jnp.inf)
            return product("ts,sh->th", jax.nn.softmax(scores), v)

        def own(q, k, v):
            return jax.lax.dynamic_slice_in_dim(q, start, rows), k, v

        return jax.jvp(out, own(*primals), own(*along))[1]

    return jax.lax.map(block, jnp.arange(0, length, rows)).reshape(length, size)


def maker(operands, **arguments) -> str:
    """Who makes the default's tangent, and why not another, as `explain` says."""
    lines = map(str.strip, explain(*operands, **arguments).splitlines())
    return next(x for x in lines if x.startswith("tangent: "))


def with_triton(operands, *, is_causal: bool) -> dict[str, Any]:
    """Arguments with which the default has Triton's tangent, as fast as it is.

    These are the blocks of that kernel, which the kernel for Hopper cannot have.

    Raises:
      ValueError: if it can.
    """
    call = _api.given(*operands, is_causal=is_causal).checked()
    blocks = tuning.choose(
        "tangent",
        None,
        rows=(call.size["t"], call.size["s"]),
        heads=call.head_sizes,
        itemsize=call.dtype.itemsize,
        gpu=device.gpu(),
        regime=tables.regime([call.query, call.key, call.value], call.spec),
    )
    arguments = {"config": Config(dq=blocks)}
    made = maker(operands, is_causal=is_causal, **arguments)
    if not made.startswith("tangent: triton"):
        raise ValueError(f"with {blocks} {made}")
    return arguments


def programs(operands, tangents, *, is_causal: bool) -> dict[str, Program]:
    """The forward by the default, and output and tangent of each peer."""

    def of(**arguments):
        return functools.partial(attention, is_causal=is_causal, **arguments)

    peers = list(_PEERS.value)
    forward = jax.jit(of(implementation="xla" if peers == ["xla"] else None))
    found = {
        "forward": Program(lambda: forward(*operands), jax.block_until_ready),
    }
    for peer in peers:
        by_name = {"implementation": peer}
        is_triton = peer == "triton"
        arguments = with_triton(operands, is_causal=is_causal) if is_triton else by_name
        call = of(**arguments)
        run = jax.jit(lambda x, along, call=call: jax.jvp(call, x, along))
        start = functools.partial(run, tuple(operands), tuple(tangents))
        found[peer] = Program(start, jax.block_until_ready)
    return found


def shapes() -> dict[str, tuple[tuple[int, ...], bool]]:
    """Shapes of the operands, and whether the call is causal, by name."""
    (width,) = _WIDTH.value
    found = {
        f"{batch} x {length}, {width // size} x {size} {name}": (
            (batch, length, width // size, size),
            causal,
        )
        for length in _LENGTHS.value
        for batch in (max(1, _POSITIONS // length),)
        for size in (64, 128)
        for name, causal in (("causal", True), ("full", False))
    }
    return options.calls_named(_CALLS.value, found)


def main() -> None:
    wrong = False
    for name, (shape, is_causal) in shapes().items():
        keys = jax.random.split(jax.random.key(0), 6)
        arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
        operands, tangents = arrays[:3], arrays[3:]
        print(f"{name}: {maker(operands, is_causal=is_causal)}", flush=True)
        made = programs(operands, tangents, is_causal=is_causal)
        want = np.asarray(exact(operands, tangents, is_causal=is_causal))
        notes = {"forward": ""}
        for peer in [peer for peer in made if peer != "forward"]:
            found: Any = made[peer].call()
            _, along = found
            error = harness.row_error(np.asarray(along[0, :, -1], np.float32), want)
            is_wrong = not error <= harness.TOLERANCE["bfloat16"]
            wrong |= is_wrong
            notes[peer] = f"row error {error:.4f}{' WRONG' * is_wrong}"
        timings, failures = harness.time_interleaved(made, rounds=_REPEATS.value)
        seconds = {x: statistics.median(t.seconds) for x, t in timings.items()}
        for peer in made:
            if peer in failures:
                print(f"{name}, {peer}: {failures[peer]}", flush=True)
                wrong = True
                continue
            share = seconds[peer] / seconds.get("forward", math.nan)
            figures = f"{seconds[peer] * 1e3:.3f} ms, {share:.2f} forwards"
            print(f"{name}, {peer}: {figures} {notes[peer]}".rstrip(), flush=True)
    sys.exit(int(wrong))


if __name__ == "__main__":
    options.launch(main)
