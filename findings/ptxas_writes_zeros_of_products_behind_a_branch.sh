#!/usr/bin/env bash
# ptxas leaves out the zeros that a product (wgmma) begins with, unless a branch stands between the two.
#
# wgmma adds to its registers. A first product without a sum adds to zeros, or has a scale-d of 0. If registers are set to 0 and the product follows in
# the same block of code, ptxas gives it RZ in place of the sum (HGMMA ... RZ, !UPT), and no zero is written. If a wait at an mbarrier, which is a
# branch, stands between, each of the 64 zeros is written, behind the branch and right before the product. With a scale-d that is 0 as a constant no
# zero is written in either case. Libraries that have no such scale (Mosaic GPU's products always add) get the zeros back by the order of their text.
#
# Seen here, without a GPU (registers that are set to 0 in a loop, of 64):
#   13.0.88 and 13.5.37: 0 as it is, 64 with a branch; 0 and 0 with scale-d 0
#
# Versions: ptxas of the wheels nvidia-cuda-nvcc 13.0.88 and 13.5.37, nvdisasm of triton 3.6.0, Python 3.12; seen on 2026-11-30.
# Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/zeros.py" <<'PYTHON'
import pathlib
import re
import subprocess
import sys

PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry products(.param .u64 out, .param .u64 desc, .param .u32 count)
.maxntid 128, 1, 1
{{
    .reg .f32 %f<64>;
    .reg .b32 %lane, %i, %count;
    .reg .b64 %out, %desc, %own;
    .reg .pred %arrived, %more, %adds;
    .shared .align 8 .b64 bar;
    ld.param.u64 %out, [out];
    ld.param.u64 %desc, [desc];
    ld.param.u32 %count, [count];
    mov.u32 %lane, %tid.x;
    mul.wide.u32 %own, %lane, 512;
    add.u64 %out, %out, %own;
    setp.ne.b32 %adds, {adds}, 0;
    mov.u32 %i, 0;
LOOP:
    {zeros}
    {branch}
    wgmma.fence.sync.aligned;
    {product}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {stores}
    add.u64 %out, %out, 65536;
    add.u32 %i, %i, 1;
    setp.lt.u32 %more, %i, %count;
    @%more bra LOOP;
    ret;
}}
"""


SUMS = ", ".join(f"%f{i}" for i in range(64))
PRODUCT = f"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{SUMS}}}, %desc, %desc, %adds, 1, 1, 0, 0;"
BRANCH = "AGAIN: mbarrier.try_wait.parity.shared.b64 %arrived, [bar], 0; @!%arrived bra AGAIN;"


def lines(count: int, of) -> str:
    return "\n".join(of(i) for i in range(count))


ptxas, nvdisasm, folder = sys.argv[1:]
text = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
(version,) = re.findall(r"V([\d.]+)", text)
for adds in (1, 0):
    found = []
    for branch in ("", BRANCH):
        filled = {
            "branch": branch,
            "adds": adds,
            "product": PRODUCT,
            "zeros": lines(64, lambda i: f"mov.f32 %f{i}, 0f00000000;"),
            "stores": lines(64, lambda i: f"st.global.f32 [%out + {4 * i}], %f{i};"),
        }
        source, binary = pathlib.Path(folder, "one.ptx"), f"{folder}/one.cubin"
        source.write_text(PTX.format(**filled))
        subprocess.run([ptxas, "-arch=sm_90a", source, "-o", binary], check=True)
        code = subprocess.run([nvdisasm, "-c", binary], capture_output=True, text=True, check=True).stdout
        assert "HGMMA.64x128x16" in code, code
        pairs = len(re.findall(r"\bCS2R R\d+, SRZ\b", code))
        ones = len(re.findall(r"\b(?:MOV R\d+, RZ|CS2R\.32 R\d+, SRZ|IMAD\.MOV\.U32 R\d+, RZ, RZ, RZ)\s*;", code))
        found.append(2 * pairs + ones)
    print(version, f"scale-d {adds}, registers set to 0 as it is and with a branch:", found)
    assert found[0] < 8 and (found[1] >= 60 if adds else found[1] < 8), found
PYTHON
python="${PYTHON:-python3.12}"
"$python" -m venv "$folder/triton"
"$folder/triton/bin/pip" install -q --no-deps triton==3.6.0
tools=$("$folder/triton/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/triton/backends/nvidia/bin
for version in 13.0.88 13.5.37; do
  "$python" -m venv --clear "$folder/nvcc"
  "$folder/nvcc/bin/pip" install -q --no-deps "nvidia-cuda-nvcc==$version"
  ptxas=$(find "$folder/nvcc" -name ptxas -path '*bin*' | head -n 1)
  "$python" "$folder/zeros.py" "$ptxas" "$tools/nvdisasm" "$folder"
done
