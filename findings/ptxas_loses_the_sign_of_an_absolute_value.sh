#!/usr/bin/env bash
# ptxas up to 13.3 computes max(max(x, -x), y) of integers without the minus sign, on sm_90 and sm_100: max(|x|, y) is max(x, y).
#
# The two maxima become one instruction of three operands, VIMNMX3, which gets x twice. On sm_80 and sm_89 there are two instructions,
# with x and its negative, and ptxas 13.4 and later give x and its negative to VIMNMX3. XLA writes |x| of int32 as max(x, -x): on an H200 with
# ptxas 13.0.88, jax.jit of jnp.maximum(abs(x), -y) was wrong for 507 of 1,024 pairs (x -511, y 7: -7), and so was plain CUDA C++
# (m = x > -x ? x : -x; max(m, -y)) by nvcc 13.0. max(abs(x), y) and min(-abs(x), y) were wrong, too; floats were right, and
# so was CUDA's abs(), which is an instruction of its own.
#
# Seen here, without a GPU (operands of the instructions that nvdisasm shows):
#   12.8.93 and 13.0.88, sm_89: two instructions; sm_90 and sm_100: x, x
#   13.5.37, sm_89: two instructions; sm_90 and sm_100: x, another register
#
# Versions: ptxas of the wheels triton 3.6.0 (12.8.93) and nvidia-cuda-nvcc (13.0.48 to 13.3.73 as 13.0.88, 13.4.59 as 13.5.37), nvdisasm of
# triton 3.6.0, Python 3.12; seen on 2026-11-28. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/max.ptx" <<'PTX'
.version 8.7
.target TARGET
.address_size 64
.visible .entry larger(.param .u64 a, .param .u64 b, .param .u64 c)
{
    .reg .b32 %r<6>;
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [a];
    ld.param.u64 %d2, [b];
    ld.param.u64 %d3, [c];
    ld.global.s32 %r1, [%d1];
    ld.global.s32 %r2, [%d2];
    neg.s32 %r3, %r1;
    max.s32 %r4, %r1, %r3;
    max.s32 %r5, %r4, %r2;
    st.global.s32 [%d3], %r5;
    ret;
}
PTX
cat >"$folder/maxima.py" <<'PYTHON'
import pathlib
import re
import subprocess
import sys

ptxas, nvdisasm, folder = sys.argv[1:]
text = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
(version,) = re.findall(r"V([\d.]+)", text)
found = {}
for target in ("sm_89", "sm_90", "sm_100"):
    source, binary = pathlib.Path(folder, "one.ptx"), f"{folder}/one.cubin"
    source.write_text(pathlib.Path(folder, "max.ptx").read_text().replace("TARGET", target))
    subprocess.run([ptxas, f"-arch={target}", source, "-o", binary], check=True)
    code = subprocess.run([nvdisasm, binary], capture_output=True, text=True, check=True).stdout
    maxima = re.findall(r"V?IMNMX3? \w+, (\w+), (\w+)[,;]", code)
    if len(maxima) == 2:
        found[target] = "two instructions"
    else:
        ((one, other),) = maxima
        found[target] = "x, x" if one == other else "x, another register"
print(version, found)
wrong = tuple(map(int, version.split("."))) < (13, 4)
three = "x, x" if wrong else "x, another register"
assert found == {"sm_89": "two instructions", "sm_90": three, "sm_100": three}, found
PYTHON
python="${PYTHON:-python3.12}"
"$python" -m venv "$folder/triton"
"$folder/triton/bin/pip" install -q --no-deps triton==3.6.0
tools=$("$folder/triton/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/triton/backends/nvidia/bin
"$python" "$folder/maxima.py" "$tools/ptxas" "$tools/nvdisasm" "$folder"
for version in 13.0.88 13.5.37; do
  "$python" -m venv --clear "$folder/nvcc"
  "$folder/nvcc/bin/pip" install -q --no-deps "nvidia-cuda-nvcc==$version"
  ptxas=$(find "$folder/nvcc" -name ptxas -path '*bin*' | head -n 1)
  "$python" "$folder/maxima.py" "$ptxas" "$tools/nvdisasm" "$folder"
done
