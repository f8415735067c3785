#!/usr/bin/env bash
# A Pallas kernel that asks for its program's number raises under `jax.ensure_compile_time_eval`.
#
# The context evaluates at once what has no traced operand. `pl.program_id` has no operand, and a kernel is traced, so it is
# evaluated outside of any program: "Evaluation rule for 'program_id' not implemented". A `jit` around the call changes
# nothing, since it is compiled within the context. The kernel is interpreted here; lowered for a GPU it raises the same.
#
# Seen: NotImplementedError: Evaluation rule for 'program_id' not implemented (with and without jit).
#
# Versions: jax and jaxlib 0.12.0.1, Python 3.12, CPU; seen on 2026-11-27. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.2
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def kernel(x_ref, o_ref):
    i = pl.program_id(0)
    o_ref[i] = x_ref[i] + 1


def call(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, grid=x.shape, out_shape=shape, interpret=True)(x)


x = jnp.arange(4.0)
assert call(x).tolist() == [1.0, 2.0, 3.0, 4.0]
for function in (call, jax.jit(call)):
    try:
        with jax.ensure_compile_time_eval():
            function(x)
    except NotImplementedError as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        assert "'program_id'" in str(error)
    else:
        raise SystemExit("no error: this has changed")
PYTHON
