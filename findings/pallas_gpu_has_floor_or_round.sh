#!/usr/bin/env bash
# Pallas on GPUs has `floor` in one lowering and `round` in the other, in no lowering both.
#
# One elementwise kernel, lowered for an H100 without a GPU. The Triton lowering takes floor, ceil, log1p, expm1, pow, is_finite,
# cbrt, tan and atan2, but not round. The Mosaic GPU lowering (warpgroup semantics) takes round, and none of those nine. Neither
# takes erf. exp, exp2, log, tanh, sin, cos, sqrt, rsqrt, sign and logistic are in both. Of atan2 and erf Mosaic GPU finds out
# late: they have lowering rules, and then no rule for their layouts. So a kernel that is to run on both must make floor, log1p
# or erf of what they share.
#
# Seen:
#   mosaic_gpu lowers: cos exp exp2 log logistic round rsqrt sign sin sqrt tanh
#   triton lowers: atan2 cbrt ceil cos exp exp2 expm1 floor is_finite log log1p logistic pow rsqrt sign sin sqrt tan tanh
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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu, triton
from jax.sharding import AbstractDevice, AbstractMesh

one = "cbrt ceil cos erf exp exp2 expm1 floor log log1p logistic rsqrt sign sin sqrt tan tanh"
functions = {name: getattr(lax, name) for name in one.split()}
functions["round"] = jnp.round
functions["is_finite"] = lambda x: lax.is_finite(x).astype(jnp.float32)
functions |= {"pow": lambda x: lax.pow(x, x), "atan2": lambda x: lax.atan2(x, x)}
x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
gpu = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda")
mesh = AbstractMesh((1,), ("x",), abstract_device=gpu)


def call(backend, kernel):
    if backend == "triton":
        return pl.pallas_call(kernel, out_shape=x, compiler_params=triton.CompilerParams())
    semantics = mosaic_gpu.LoweringSemantics.Warpgroup
    params = mosaic_gpu.CompilerParams(lowering_semantics=semantics)
    return mosaic_gpu.kernel(kernel, out_type=x, compiler_params=params)


def lowers(backend, function):
    def kernel(x_ref, out_ref):
        out_ref[...] = function(x_ref[...])

    try:
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(call(backend, kernel)).trace(x)
            traced.lower(lowering_platforms=("cuda",))
    except NotImplementedError:
        return False
    return True


found = {}
for backend in ("mosaic_gpu", "triton"):
    names = sorted(name for name, f in functions.items() if lowers(backend, f))
    found[backend] = " ".join(names)
    print(backend, "lowers:", *names)
both = "cos exp exp2 log logistic rsqrt sign sin sqrt tanh"
assert found["mosaic_gpu"] == " ".join(sorted([*both.split(), "round"]))
alone = "atan2 cbrt ceil expm1 floor is_finite log1p pow tan"
assert found["triton"] == " ".join(sorted([*both.split(), *alone.split()]))
PYTHON
