#!/usr/bin/env bash
# ptxas up to 13.3 inverts min(x, c) == c of 16-bit integers with a constant c on sm_90, and of max, too.
#
# Minimum and comparison become one VIMNMX.U16x2 (or S16x2), which also says in a predicate which operand it took. The code uses the predicate
# as "the result is c" where it says "the result is x". ptxas 13.4 and later, and every version for sm_80 and sm_89, have a comparison of its own.
# Comparisons by ne, lt and ge, two registers, and 32 bits were right.
#
# Run on an H200 (ptxas 13.0.88, as inline assembly in a Triton kernel of JAX 0.11.2): min.u16 h, x, 24; setp.eq.b16 p, h, 24 was true for each x from 10
# to 24, and false for 25 to 41. XLA gets there from int32, where LLVM knows that few threads run: of [i, j] with minimum(16 i + 16, 40) - 1 >= 16 j
# or 16 j < p[b] the largest j + 1 and three more reductions became one kernel, with these two instructions; it gave 3, 3, 2 for 1, 2, 3.
#
# Seen here, without a GPU (what the value that is selected depends on):
#   13.0.88, sm_89: a comparison; sm_90: the predicate of VIMNMX, for min and max, u16 and s16
#   13.5.37, sm_89 and sm_90: a comparison
#
# Versions: ptxas of the wheels nvidia-cuda-nvcc 13.0.88 and 13.5.37 (12.8.93, 12.9.86 and 13.1.80 to 13.3.73 as 13.0.88; 13.4.59 as 13.5.37),
# nvdisasm of triton 3.6.0, Python 3.12; seen on 2026-11-30. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/equal.py" <<'PYTHON'
import itertools
import pathlib
import re
import subprocess
import sys

PTX = """
.version 8.0
.target {target}
.address_size 64
.visible .entry reached(.param .u64 a, .param .u64 b)
{{
    .reg .b16 %h<3>;
    .reg .b32 %r<3>;
    .reg .b64 %d<3>;
    .reg .pred %p<2>;
    ld.param.u64 %d1, [a];
    ld.param.u64 %d2, [b];
    ld.global.u32 %r1, [%d1];
    cvt.u16.u32 %h1, %r1;
    {operation} %h2, %h1, 24;
    setp.eq.b16 %p1, %h2, 24;
    selp.b32 %r2, 77, 55, %p1;
    st.global.u32 [%d2], %r2;
    ret;
}}
"""
ptxas, nvdisasm, folder = sys.argv[1:]
text = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
(version,) = re.findall(r"V([\d.]+)", text)
found = {}
for target, (kind, sign) in itertools.product(("sm_89", "sm_90"), itertools.product(("min", "max"), "us")):
    source, binary = pathlib.Path(folder, "one.ptx"), f"{folder}/one.cubin"
    source.write_text(PTX.format(target=target, operation=f"{kind}.{sign}16"))
    subprocess.run([ptxas, f"-arch={target}", source, "-o", binary], check=True)
    code = subprocess.run([nvdisasm, binary], capture_output=True, text=True, check=True).stdout
    joined = re.search(rf"VIMNMX\.{sign.upper()}16x2 \w+, (P\d), P\d, \w+, 0x18, !?PT", code)
    compared = re.search(r"ISETP\.(?:NE|EQ)\S* P\d, PT, \w+, 0x18, PT", code)
    assert (joined is None) != (compared is None), code
    if joined:  # 77 is selected where x was taken: the code should negate the predicate
        assert re.search(rf"SEL \w+, \w+, 0x37, {joined[1]} ;", code), code
    found.setdefault(target, set()).add("the predicate of VIMNMX" if joined else "a comparison")
print(version, found)
wrong = tuple(map(int, version.split("."))) < (13, 4)
on_hopper = {"the predicate of VIMNMX"} if wrong else {"a comparison"}
assert found == {"sm_89": {"a comparison"}, "sm_90": on_hopper}, found
PYTHON
python="${PYTHON:-python3.12}"
"$python" -m venv "$folder/triton"
"$folder/triton/bin/pip" install -q --no-deps triton==3.6.0
tools=$("$folder/triton/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/triton/backends/nvidia/bin
for version in 13.0.88 13.5.37; do
  "$python" -m venv --clear "$folder/nvcc"
  "$folder/nvcc/bin/pip" install -q --no-deps "nvidia-cuda-nvcc==$version"
  ptxas=$(find "$folder/nvcc" -name ptxas -path '*bin*' | head -n 1)
  "$python" "$folder/equal.py" "$ptxas" "$tools/nvdisasm" "$folder"
done
