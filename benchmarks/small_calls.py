"""Small calls on a CPU beside jax.nn's: the first call, and every call after it.

    python -m benchmarks.small_calls

jax_flash2's implementation "xla" and `jax.nn.dot_product_attention` in float32:
decoding (one query against a cache), short sequences, and causal gradients. First calls
count tracing, lowering and compiling, with nothing in JAX's caches. Later calls are
timed in turns; medians. Prints a table and keeps no rows.
"""

import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import options
from jax_flash2 import attention

_ROUNDS = flags.DEFINE_integer("rounds", 30, "Timed rounds of each.", lower_bound=1)
_FIRST_CALLS = flags.DEFINE_integer("first_calls", 3, "First calls.", lower_bound=1)


class Call(NamedTuple):
    """batch, query rows, key rows, query heads, key/value heads, head size."""

    batch: int
    t: int
    s: int
    n: int
    k: int
    h: int
    gradient: bool = False

    def inputs(self):
        rng = np.random.default_rng(0)
        shapes = ((self.t, self.n), (self.s, self.k), (self.s, self.k))
        shapes = [(self.batch, rows, heads, self.h) for rows, heads in shapes]
        return [jnp.asarray(rng.standard_normal(x), jnp.float32) for x in shapes]

    def program(self, call):
        call = functools.partial(call, is_causal=self.gradient)
        if not self.gradient:
            return jax.jit(call)
        return jax.jit(jax.grad(lambda *x: jnp.sum(call(*x) ** 2), (0, 1, 2)))


CALLS = (
    Call(1, 1, 1024, 8, 8, 64),
    Call(4, 1, 2048, 16, 4, 64),
    Call(16, 1, 512, 8, 8, 64),
    Call(1, 1, 8192, 8, 2, 128),
    Call(64, 16, 16, 8, 8, 64),
    Call(64, 16, 16, 8, 8, 64, gradient=True),
    Call(2, 64, 64, 4, 4, 16, gradient=True),
    Call(2, 256, 256, 4, 4, 64, gradient=True),
    Call(2, 1024, 1024, 8, 2, 64, gradient=True),
)
PEERS = {
    "jax_flash2": functools.partial(attention, implementation="xla"),
    "jax.nn": jax.nn.dot_product_attention,
}


def first_seconds(program, inputs) -> float:
    jax.clear_caches()
    begin = time.perf_counter()
    program.lower(*inputs).compile()
    return time.perf_counter() - begin


def later_seconds(programs, inputs, rounds: int) -> dict[str, float]:
    found = {name: [] for name in programs}
    for _ in range(rounds + 1):  # the first compiles
        for name, program in programs.items():
            begin = time.perf_counter()
            for _ in range(3):
                result = program(*inputs)
            jax.block_until_ready(result)
            found[name].append((time.perf_counter() - begin) / 3)
    return {name: float(np.median(x[1:])) for name, x in found.items()}


def main():
    jax.config.update("jax_platforms", "cpu")
    print(
        "| B, T, S, N (K), H | first call, s | jax.nn | a call, us | jax.nn | ratio |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for call in CALLS:
        inputs = call.inputs()
        programs = {name: call.program(f) for name, f in PEERS.items()}
        firsts = {name: [] for name in programs}
        for _ in range(_FIRST_CALLS.value):
            for name, program in programs.items():
                firsts[name].append(first_seconds(program, inputs))
        later = later_seconds(programs, inputs, _ROUNDS.value)
        us, them = (1e6 * later[name] for name in PEERS)
        first, other = (np.median(firsts[name]) for name in PEERS)
        batch, t, s, n, k, h, gradient = call
        shape = f"{batch}, {t}, {s}, {n} ({k}), {h}" + " gradient" * gradient
        cells = f"{first:.2f} | {other:.2f} | {us:.0f} | {them:.0f} | {us / them:.2f}"
        print(f"| {shape} | {cells} |", flush=True)


if __name__ == "__main__":
    options.launch(main)
