#!/usr/bin/env bash
# With one JAX flag the compilation cache finds the wrong program, in silence.
#
# A program with `custom_partitioning` holds the address of a Python object, so that the persistent compilation cache never
# finds it again. `jax_remove_custom_partitioning_ptr_from_cache_key` takes the address out of the cache's key. Then nothing
# in the key says what is computed: two programs of the same name and shapes, one that adds 1 and one that multiplies by 100,
# have the same key, and the second call returns the results of the first.
#
# Seen, flag off and on:
#   [1. 2. 3. 4.] [  0. 100. 200. 300.]
#   [1. 2. 3. 4.] [1. 2. 3. 4.]
#
# Versions: jax and jaxlib 0.12.0.1, Python 3.12, CPU; seen on 2026-11-27. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.2
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import os
import tempfile

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp(dir="."))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def divided(function):
    def partition(mesh, arguments, result):
        return mesh, function, result.sharding, (arguments[0].sharding,)

    call = custom_partitioning(function)
    call.def_partition(partition, sharding_rule="i -> i")
    return call


mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("x")))
results = {}
for flag in (False, True):
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", flag)
    found = []
    for function in (lambda x: x + 1, lambda x: x * 100):

        def program(x):
            return divided(function)(x)

        found.append(jax.jit(program)(x).tolist())
        jax.clear_caches()
    results[flag] = found
    print("flag", flag, *found)
assert results[False] == [[1.0, 2.0, 3.0, 4.0], [0.0, 100.0, 200.0, 300.0]]
assert results[True] == [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]
PYTHON
