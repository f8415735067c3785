#!/usr/bin/env bash
# Pallas's interpreter of Mosaic GPU kernels cannot store to a WGMMA accumulator; the lowering for GPUs can.
#
# A product may start from numbers of the kernel's own: `acc[...] = start` before `plgpu.wgmma(acc, a, b)`. Such a kernel lowers for
# an H200. The same kernel without the store runs in the interpreter (`InterpretGPUParams`), with the store it ends in an error of
# shapes: what stands for the accumulator there is a key of six numbers, and the store is checked against that. So the part of a
# kernel that starts a sum is not tested on a CPU unless the interpreter is changed.
#
# Seen:
#   without a store: lowered True; interpreted, off by 0.0
#   with a store: lowered True; ValueError: Accumulator shape (6,) does not match value shape (64, 64)
#
# Versions: jax and jaxlib 0.12.0.1, Python 3.12, CPU; seen on 2026-11-29. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.2
cat >"$folder/accumulator.py" <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

SHAPE, F32, HALF = (64, 64), jnp.float32, jnp.bfloat16
GPU = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
STRUCTS = [jax.ShapeDtypeStruct(SHAPE, x) for x in (HALF, HALF, F32)]


def product(stores, **more):
    """a b, or start + a b."""

    def body(a, b, start, out, a_tile, b_tile, start_tile, out_tile, barrier):
        for source, tile in ((a, a_tile), (b, b_tile), (start, start_tile)):
            plgpu.copy_gmem_to_smem(source, tile, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(acc):
            if stores:
                acc[...] = plgpu.load(start_tile, layout=plgpu.Layout.WGMMA)
            plgpu.wgmma(acc, a_tile, b_tile)
            return acc[...]

        out_tile[...] = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(SHAPE, F32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, out)
        plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    operands = [plgpu.SMEM(SHAPE, HALF, transforms=swizzled)] * 2
    others = [plgpu.SMEM(SHAPE, F32)] * 2
    barrier = plgpu.Barrier(num_arrivals=3)
    scratch = [*operands, *others, barrier]
    return plgpu.kernel(body, out_type=STRUCTS[2], scratch_types=scratch, **more)


def lowers(stores):
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=GPU)):
        traced = jax.jit(lambda *x: product(stores)(*x)).trace(*STRUCTS)
        return "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def interpreted(stores):
    keys = jax.random.split(jax.random.key(0), 3)
    pairs = zip(keys, STRUCTS, strict=True)
    a, b, start = (jax.random.normal(key, x.shape, x.dtype) for key, x in pairs)
    try:
        found = product(stores, interpret=plgpu.InterpretGPUParams())(a, b, start)
    except ValueError as error:
        return f"ValueError: {error}"
    expected = jnp.dot(a, b, preferred_element_type=F32) + stores * start
    return f"interpreted, off by {float(jnp.max(jnp.abs(found - expected))):.1f}"


seen = {stores: (lowers(stores), interpreted(stores)) for stores in (False, True)}
print("without a store: lowered {}; {}".format(*seen[False]))
print("with a store: lowered {}; {}".format(*seen[True]))
assert seen[False] == (True, "interpreted, off by 0.0")
assert seen[True][0] and "Accumulator shape (6,) does not match" in seen[True][1]
PYTHON
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/accumulator.py"
