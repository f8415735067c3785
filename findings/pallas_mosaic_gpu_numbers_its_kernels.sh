#!/usr/bin/env bash
# JAX 0.11.2 lowers a Mosaic GPU kernel to another program if the process lowered a kernel before it; 0.12.0.1 does not.
#
# The module of a kernel has the name of its dumps in an attribute (`mosaic_gpu.dump_basename`), with the number of kernels that the
# process has lowered so far: body_0, body_1, ... The text of the program, and the hash of the kernel in it, differ for it. JAX's
# persistent compilation cache names a program by its text. So a process that lowers the same kernels in another order, or one more
# before them, does not find what it compiled last time.
#
# Seen (the same kernel lowered twice, with another one in between):
#   0.11.2 equal: False ['body_0', 'body_2']
#   0.12.0.1 equal: True []
#
# Versions: jax and jaxlib 0.11.2 and 0.12.0.1, Python 3.12, no GPU; seen on 2026-11-29. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/twice.py" <<'PYTHON'
import re

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

GPU = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
STRUCT = jax.ShapeDtypeStruct((128,), jnp.float32)


def lowered(number):
    def body(x, out):
        out[...] = x[...] + number

    kernel = plgpu.kernel(body, out_type=STRUCT)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=GPU)):
        traced = jax.jit(lambda x: kernel(x)).trace(STRUCT)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


first, _, again = lowered(1.0), lowered(2.0), lowered(1.0)
names = [name for text in (first, again) for name in re.findall(r"body_\d+", text)]
print(jax.__version__, "equal:", first == again, names)
assert (first == again) == (jax.__version__ != "0.11.2")
assert names == ([] if first == again else ["body_0", "body_2"])
PYTHON
for version in 0.11.2 0.12.0.1; do
  "${PYTHON:-python3.12}" -m venv --clear "$folder/venv"
  "$folder/venv/bin/pip" install -q "jax==$version" "jaxlib==$version" numpy==2.5.2
  JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/twice.py"
done
