#!/usr/bin/env bash
# On a CPU, x * s - max(x * s) can be above 0 in a compiled loop: by 3e-8 for normal numbers, by 31,724 for numbers of 1e12.
#
# The maximum is of rounded products. In the body of a loop the product is computed once more where it is used, and with the
# subtraction it becomes one instruction with one rounding (a fused multiply-add): what is left is the rounding error of the
# product. Called operation by operation the difference is never above 0. exp of it, as a softmax has it, is at most 1 for
# normal numbers but for the last bit; for scores of some 1e10 and more it overflows, and the softmax is NaN. A scale that is a
# power of two rounds nothing, so tests with such scales do not see it.
#
# Seen (16 rows of 64 in each of 4 rounds, s = 0.3, float32): by operations 0.0; in the loop 2.8e-8, and 31724 for 1e12 x.
#
# Versions: jax and jaxlib 0.12.0.1, Python 3.12, CPU (x86-64 with FMA); seen on 2026-11-28. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.2
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

numbers = np.random.default_rng(0).standard_normal((4, 16, 64))
x, s = jnp.asarray(numbers, jnp.float32), jnp.float32(0.3)


def largest(z, s):
    """The largest of the differences, which are at most 0."""
    z = z * s
    return jnp.max(z - jnp.max(z, axis=-1, keepdims=True))


def in_a_loop(x, s):
    def body(i, found):
        return jnp.maximum(found, largest(x[i], s))

    return jax.lax.fori_loop(0, len(x), body, jnp.float32(-1.0))


by_operations = max(float(largest(z, s)) for z in x)
normal, huge = (float(jax.jit(in_a_loop)(f * x, s)) for f in (1.0, 1e12))
print(f"by operations {by_operations}; in a loop {normal}, and {huge} for 1e12 x")
assert by_operations == 0.0 and 0.0 < normal < 1e-6 and huge > 1000.0
PYTHON
