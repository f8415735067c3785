#!/usr/bin/env bash
# jax.random.normal in bfloat16 has 128 different numbers, of mean -0.011, none beyond 2.9.
#
# Four million draws take 128 values in bfloat16, 1,024 in float16. The uniform number below has as many bits as the mantissa
# of the dtype, and it is the inverse error function of it that is returned. So the tails are cut (float32 reaches 5.2), the
# smallest value is larger in size than the largest one, and the mean is not 0: the standard error of so many draws is 0.0005.
# A test that quantises such inputs, or averages thousands of them, sees that mean: the rounding of these few numbers to
# float8_e4m3fn has one, too. Draw in float32 and round.
#
# Seen (key 0, 2**22 draws): bfloat16 128 values, mean -0.0110, from -2.891 to 2.516; float16 1024 values, mean -0.0018,
# from -3.486 to 3.182; float32 more than 3 million values, mean within 0.001 of 0.
#
# Versions: jax and jaxlib 0.12.0.1, Python 3.12, CPU; seen on 2026-11-28. Exits with 0 while this is so.
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

found = {}
for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
    x = np.asarray(jax.random.normal(jax.random.key(0), (2**22,), dtype), np.float64)
    found[dtype.__name__] = len(np.unique(x)), x.mean(), x.min(), x.max()
    print(dtype.__name__, found[dtype.__name__])
count, mean, low, high = found["bfloat16"]
assert count == 128 and -0.013 < mean < -0.009 and (low, high) == (-2.890625, 2.515625)
count, mean, *_ = found["float16"]
assert count == 1024 and -0.004 < mean < -0.0005
count, mean, *_ = found["float32"]
assert count > 3_000_000 and abs(mean) < 0.001
PYTHON
