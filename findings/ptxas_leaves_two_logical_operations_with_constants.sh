#!/usr/bin/env bash
# ptxas makes two LOP3 of (x & 0x7F007F) | 0x43004300, written as `and` and `or`, and one LOP3 of the same written as `lop3`.
#
# LOP3 computes any function of three words, of which one may be a constant in the instruction. With two constants ptxas puts each into an
# instruction of its own, however often the pair is repeated; a `lop3` whose third word is a constant register gets that constant once, by
# one move. In a kernel that reads keys and values of int8 (each pair of bytes becomes two bfloat16 by two such pairs of operations) the
# loop went from 562 instructions to 435, and decoding from 301 to 264 us (an H200, 16 sequences of 32,768 keys, 8 heads of 128).
#
# Seen here, without a GPU (instructions that nvdisasm shows), for 16 words, sm_80, sm_90 and sm_100, with 12.8.93, 13.0.88 and 13.5.37:
#   and, or: 32 LOP3; lop3: 16 LOP3
#
# Versions: ptxas of the wheels triton 3.6.0 (12.8.93) and nvidia-cuda-nvcc (13.0.88, 13.5.37), nvdisasm of triton 3.6.0, Python 3.12; seen on
# 2026-11-28. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/logic.py" <<'PYTHON'
import pathlib
import subprocess
import sys

ptxas, nvdisasm, folder = sys.argv[1:]
WORDS = 16
HEAD = """.version 8.7
.target {target}
.address_size 64
.visible .entry changed(.param .u64 a, .param .u64 b)
{{
    .reg .b32 %r<64>;
    .reg .b32 %c;
    .reg .b64 %d<3>;
    ld.param.u64 %d1, [a];
    ld.param.u64 %d2, [b];
    mov.b32 %c, 0x43004300;
"""
FORMS = {
    "and, or": "and.b32 %r{n}, %r{i}, 0x7F007F; or.b32 %r{n}, %r{n}, 0x43004300;",
    "lop3": "lop3.b32 %r{n}, %r{i}, 0x7F007F, %c, 0xEA;",
}
version = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
version = version.split("V")[-1].split()[0]
for target in ("sm_80", "sm_90", "sm_100"):
    found = {}
    for name, form in FORMS.items():
        lines = [HEAD.format(target=target)]
        lines += [f"ld.global.b32 %r{i}, [%d1+{4 * i}];" for i in range(WORDS)]
        lines += [form.format(i=i, n=i + WORDS) for i in range(WORDS)]
        lines += [f"st.global.b32 [%d2+{4 * i}], %r{i + WORDS};" for i in range(WORDS)]
        source, binary = pathlib.Path(folder, "one.ptx"), f"{folder}/one.cubin"
        source.write_text("\n".join([*lines, "ret;", "}"]))
        subprocess.run([ptxas, f"-arch={target}", source, "-o", binary], check=True)
        code = subprocess.run([nvdisasm, binary], capture_output=True, text=True, check=True)
        found[name] = code.stdout.count(" LOP3")
    print(version, target, found)
    assert found == {"and, or": 2 * WORDS, "lop3": WORDS}, found
PYTHON
python="${PYTHON:-python3.12}"
"$python" -m venv "$folder/triton"
"$folder/triton/bin/pip" install -q --no-deps triton==3.6.0
tools=$("$folder/triton/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/triton/backends/nvidia/bin
"$python" "$folder/logic.py" "$tools/ptxas" "$tools/nvdisasm" "$folder"
for version in 13.0.88 13.5.37; do
  "$python" -m venv --clear "$folder/nvcc"
  "$folder/nvcc/bin/pip" install -q --no-deps "nvidia-cuda-nvcc==$version"
  ptxas=$(find "$folder/nvcc" -name ptxas -path '*bin*' | head -n 1)
  "$python" "$folder/logic.py" "$ptxas" "$tools/nvdisasm" "$folder"
done
