#!/usr/bin/env bash
# On a CPU `jax.nn.dot_product_attention` of float16 works when it is called, and raises an error under `jax.jit`.
#
# It asks for products by the algorithm F16_F16_F32 and takes the default where that fails, in an `except` around the product.
# Called by itself the product is lowered there, fails there, and the default serves. Under `jit` nothing is lowered while the
# function is traced: the error comes later, out of reach of the `except`, from the lowering of the whole program. bfloat16 and
# float32 work both ways. So a model in float16 can pass its tests on a CPU and fail in its training step, without a change.
#
# Seen: float16: eager float16, jit ValueError: The precision 'F16_F16_F32' is not supported by dot_general on CPU.
#
# Versions: jax and jaxlib 0.12.0.1, Python 3.12, CPU (0.10.2 does the same); seen on 2026-11-30. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.2
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp


def attend(x):
    return jax.nn.dot_product_attention(x, x, x)


def seen(function, dtype):
    """The dtype of a result, or the error."""
    try:
        return str(function(jnp.ones((1, 8, 2, 16), dtype)).dtype)
    except ValueError as error:
        return f"ValueError: {error}"


found = {x: (seen(attend, x), seen(jax.jit(attend), x)) for x in ("float16", "bfloat16", "float32")}
for dtype, (eager, jitted) in found.items():
    print(f"{dtype}: eager {eager}, jit {jitted}")
assert all(found[x] == (x, x) for x in ("bfloat16", "float32"))
eager, jitted = found["float16"]
assert eager == "float16" and "'F16_F16_F32' is not supported by dot_general on CPU" in jitted
PYTHON
