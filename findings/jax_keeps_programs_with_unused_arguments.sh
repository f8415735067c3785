#!/usr/bin/env bash
# JAX keeps each program loaded that is lowered with keep_unused=True and compiled, though nothing refers to it any more.
#
# jax.jit(f, keep_unused=True).lower(x).compile() of a function that is then dropped: the executable stays in the client's list
# (`client.live_executables()`) until `jax.clear_caches()`, one for each such function, on a GPU with its code in the GPU's memory.
# With keep_unused=False it goes when the function goes, and so it did with both in JAX 0.10.2. One of the tracing caches has
# a value that refers to its own weak key.
#
# Seen (ten functions, counted after gc.collect()): keep_unused=False 1 (the last, which a variable still names), True 10, after
# jax.clear_caches() 0. JAX 0.10.2 gives 1, 1, 0.
#
# Versions: jax and jaxlib 0.12.0.1, Python 3.12, CPU (0.11.2 does the same); seen on 2026-11-29. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.2
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import gc

import jax
import jax.numpy as jnp

client = jax.devices()[0].client
x = jax.ShapeDtypeStruct((4,), jnp.float32)


def loaded():
    gc.collect()
    return len(client.live_executables())


def left(keep_unused):
    """How many of ten compiled programs are still loaded once they are dropped."""
    before = loaded()
    for i in range(10):

        def scaled(x, factor=i + 1.5):
            return x * factor

        jax.jit(scaled, keep_unused=keep_unused).lower(x).compile()
    return loaded() - before


without, with_it = left(False), left(True)
jax.clear_caches()
print(f"keep_unused=False {without}, True {with_it}, after clear_caches {loaded()}")
assert without <= 1 and with_it == 10 and loaded() == 0
PYTHON
