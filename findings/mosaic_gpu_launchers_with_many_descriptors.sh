#!/usr/bin/env bash
# In JAX 0.11.2 the time to compile a Mosaic GPU kernel grows with the square of its TMA descriptors; in 0.12.0.1 it does not.
#
# Each array that is copied by TMA has a descriptor of 128 bytes. The code on the CPU that launches the kernel has all of them in one array of
# bytes, which it loads and stores whole. LLVM optimizes that code, and with 0.11.2 most of its time there is in the SLP vectorizer and in
# the elimination of dead stores (perf), for one byte at a time. The code of the GPU is not concerned. In a backward pass of attention with nine descriptors
# the launcher took half of what one process computes to compile it, without ptxas: 0.39 of 0.8 CPU s; with 0.12.0.1 a twentieth.
#
# Seen here, without a GPU (a kernel that copies 1 or 15 arrays of 64 x 64 to shared memory and one back, CPU s of three, the least):
#   jax 0.11.2: 0.04 and 1.22, with 2 and 16 descriptors
#   jax 0.12.0.1: 0.02 and 0.05
#
# The compiler asks the driver for the kind of GPU: a library of a few lines answers. Versions: jax, jaxlib, jax-cuda13-plugin and jax-cuda13-pjrt
# 0.11.2 and 0.12.0.1, nvidia-cuda-nvcc 13.0.88, Python 3.12, a C compiler; seen on 2026-11-30. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/driver.c" <<'C'
#include <stdlib.h>
#define ANSWER(name, arguments, body) int name arguments { body; return 0; }
ANSWER(cuInit, (unsigned f), )
ANSWER(cuDriverGetVersion, (int *v), *v = 13000)
ANSWER(cuDeviceGet, (int *d, int i), *d = 0)
ANSWER(cuDeviceGetCount, (int *n), *n = 1)
ANSWER(cuCtxGetDevice, (int *d), *d = 0)
ANSWER(cuDeviceGetAttribute, (int *x, int a, int d), *x = a == 75 ? 9 : a == 16 ? 132 : a == 97 ? 232448 : 0)
ANSWER(cuModuleLoadData, (void **m, const void *x), *m = (void *)1)
ANSWER(cuModuleGetFunction, (void **f, void *m, const char *n), *f = (void *)1)
ANSWER(cuFuncSetAttribute, (void *f, int a, int v), )
ANSWER(cuGetErrorString, (int e, const char **s), *s = "none")
C
cc -w -shared -fPIC -o "$folder/libcuda.so.1" "$folder/driver.c" -Wl,-soname,libcuda.so.1
cat >"$folder/descriptors.py" <<'PYTHON'
import ctypes
import functools
import re
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import core, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

del core  # it says where Mosaic GPU's runtime library lies
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from jax_plugins import xla_cuda13  # noqa: E402

compile_module = ctypes.CDLL(str(xla_cuda13._get_library_path())).MosaicGpuCompile
compile_module.argtypes = [ctypes.c_char_p, ctypes.c_int]
compile_module.restype = ctypes.c_void_p
utils._infer_arch = lambda: (9, 0)
SHAPE = (64, 64)


def body(count, *refs):
    inputs, output, tile, barrier = refs[:count], *refs[count:]

    def copied(ref):
        plgpu.copy_gmem_to_smem(ref, tile, barrier)
        plgpu.barrier_wait(barrier)

    for ref in inputs:
        copied(ref)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, output)
    plgpu.wait_smem_to_gmem(0)


def seconds(count):
    kernel = plgpu.kernel(
        functools.partial(body, count),
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16),
        scratch_types=[plgpu.SMEM(SHAPE, jnp.bfloat16), plgpu.Barrier()],
    )
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=gpu)):
        arrays = [jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)] * count
        text = jax.jit(kernel).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    (escaped,) = re.findall(r'\bmodule = "((?:[^"\\]|\\.)*)"', text)
    module = re.sub(
        rb'\\([0-9A-Fa-f]{2}|[\\"])',
        lambda m: bytes.fromhex(m[1].decode()) if len(m[1]) == 2 else m[1],
        escaped.encode("latin-1"),
    )
    found = []
    for _ in range(3):
        begun = time.process_time()
        assert compile_module(module, len(module))
        found.append(time.process_time() - begun)
    return min(found)


few, many = seconds(1), seconds(15)
print(f"jax {jax.__version__}: {few:.2f} and {many:.2f} CPU s, with 2 and 16 descriptors")
quadratic = jax.__version_info__ < (0, 12)
assert (many > 8 * few and many > 0.5) == quadratic, (few, many)
PYTHON
python="${PYTHON:-python3.12}"
for version in 0.11.2 0.12.0.1; do
  "$python" -m venv --clear "$folder/venv"
  "$folder/venv/bin/pip" install -q "jax==$version" "jaxlib==$version" "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version" nvidia-cuda-nvcc==13.0.88
  ptxas=$(find "$folder/venv" -name ptxas -path '*bin*' | head -n 1)
  cuda=$(dirname "$(dirname "$ptxas")")
  JAX_PLATFORMS=cpu MOSAIC_GPU_CUDA_ROOT="$cuda" "$folder/venv/bin/python" "$folder/descriptors.py" "$folder/libcuda.so.1" 2>/dev/null
done
