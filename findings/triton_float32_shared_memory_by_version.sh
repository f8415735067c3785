#!/usr/bin/env bash
# One Pallas kernel in float32 takes up to a quarter more shared memory with JAX 0.11.2 than with 0.12.0.1 (Triton, A100).
#
# A loop loads a block of keys [16, 128] and multiplies it with one or with two tiles [32, 128]; num_stages=2, num_warps=4. It is
# compiled for an A100 that is only described. XLA's Triton of JAX 0.11.2 keeps one more copy of the block where two products in
# TF32 read it (8 KiB), and by BF16_BF16_F32_X6 even where one does (8 KiB of float32, and 12 KiB, three pieces of bfloat16, where
# two do). So blocks that fit a GPU with the newer JAX may not fit it with the older one: on a GPU of 99 KiB a kernel to which 0.12.0.1
# gave 98 KiB asked for 108 with 0.11.2, and did not compile.
#
# Seen (one product, two products):
#   jax 0.11.2: (24576, 49152) bytes by TF32, (40960, 69632) by six bfloat16 products
#   jax 0.12.0.1: (24576, 40960) bytes by TF32, (32768, 57344) by six bfloat16 products
#
# Versions: jax, jaxlib and its CUDA 13 plugin as above, Python 3.12, no GPU; seen on 2026-11-28. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/shared_memory.py" <<'PYTHON'
import glob
import os
import re
import tempfile

dump = tempfile.mkdtemp()
os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import triton
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

GPU = """
gpu_device_info {
  cuda_compute_capability { major: 8 minor: 0 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 167936
  shared_memory_per_block_optin: 166912
  threads_per_core_limit: 2048
  core_count: 108
  fpus_per_core: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 2039000000000
  l2_cache_size: 41943040
  clock_rate_ghz: 1.41
  device_memory_size: 80000000000
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA A100-SXM4-80GB"
"""
described = topologies.get_topology_desc(platform="cuda", target_config=GPU, topology="1x1x1")
sharding = NamedSharding(Mesh(np.array(described.devices), ("x",)), PartitionSpec())
device = AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", num_cores=None, platform="cuda")
kind = AbstractMesh((), (), abstract_device=device)
ROWS, KEYS, SIZE = 32, 16, 128


def compiled(precision, count):
    """Bytes of shared memory."""

    def kernel(*refs):
        *left, keys, out = refs
        left = [x[...] for x in left]

        def visit(j, total):
            block = keys.at[pl.ds(j * KEYS, KEYS), :][...]
            found = [jax.lax.dot_general(x, block, (((1,), (1,)), ((), ())), precision=precision) for x in left]
            return total + sum(found)

        out[...] = jax.lax.fori_loop(0, 64, visit, jnp.zeros((ROWS, KEYS)))

    parameters = triton.CompilerParams(num_warps=4, num_stages=2)
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((ROWS, KEYS), jnp.float32),
        compiler_params=parameters,
        name=f"products_{count}",
    )
    x = jax.ShapeDtypeStruct((ROWS, SIZE), jnp.float32, sharding=sharding)
    keys = jax.ShapeDtypeStruct((64 * KEYS, SIZE), jnp.float32, sharding=sharding)
    for path in glob.glob(f"{dump}/*"):
        os.unlink(path)
    with jax.sharding.use_abstract_mesh(kind):
        lowered = jax.jit(call).trace(*[x] * count, keys).lower()
    lowered.compile()
    (path,) = glob.glob(f"{dump}/*thunk_sequence.txt")
    (size,) = re.findall(r"shared_memory: (\d+) bytes", open(path).read())
    return int(size)


versions = {"0.11.2": ((24576, 49152), (40960, 69632)), "0.12.0.1": ((24576, 40960), (32768, 57344))}
precisions = (None, jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6)
found = tuple(tuple(compiled(x, n) for n in (1, 2)) for x in precisions)
print(f"jax {jax.__version__}: {found[0]} bytes by TF32, {found[1]} by six bfloat16 products")
assert found == versions[jax.__version__], found
PYTHON
for version in 0.11.2 0.12.0.1; do
  "${PYTHON:-python3.12}" -m venv --clear "$folder/venv"
  "$folder/venv/bin/pip" install -q "jax==$version" "jaxlib==$version" "jax-cuda13-pjrt==$version" "jax-cuda13-plugin==$version" \
    nvidia-cuda-nvcc==13.5.37 numpy==2.5.2
  "$folder/venv/bin/python" "$folder/shared_memory.py"
done
