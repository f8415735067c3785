#!/usr/bin/env bash
# ptxas moves exponents that depend on no product behind the wait for asynchronous products (wgmma), unless a branch stands between.
#
# A loop as in attention: it issues eight products whose left operand is in registers, computes 64 exponents of numbers that it has loaded, waits for the
# products, and packs the exponents as the next left operand. In PTX all exponents stand before wgmma.wait_group. ptxas schedules the wait after 6
# of them and mixes the others with packing (which must follow the wait, as it overwrites the operands). The tensor cores then have nothing
# to do while most exponents are computed. With a wait at an mbarrier, which is a branch, before wgmma.wait_group all 64 are computed first.
#
# Seen here, without a GPU (exponents before WARPGROUP.DEPBAR in the loop):
#   13.0.88 and 13.5.37: 6 of 64 as it is, 64 of 64 with the branch
# In a kernel for attention with heads of 128 the branch made the loop 1.02 times as fast on an H200 (JAX 0.11.2, ptxas 13.0.88).
#
# Versions: ptxas of the wheels nvidia-cuda-nvcc 13.0.88 and 13.5.37, nvdisasm of triton 3.6.0, Python 3.12; seen on 2026-11-30.
# Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/waits.py" <<'PYTHON'
import pathlib
import re
import subprocess
import sys

PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry sums(.param .u64 in, .param .u64 out, .param .u64 desc, .param .u32 count)
.maxntid 128, 1, 1
{{
    .reg .f32 %f<32>, %x<64>, %e<64>;
    .reg .b32 %a<32>, %lane, %i, %count;
    .reg .b64 %in, %out, %desc, %own;
    .reg .pred %arrived, %more;
    .shared .align 8 .b64 bar;
    ld.param.u64 %in, [in];
    ld.param.u64 %out, [out];
    ld.param.u64 %desc, [desc];
    ld.param.u32 %count, [count];
    mov.u32 %lane, %tid.x;
    mul.wide.u32 %own, %lane, 256;
    add.u64 %in, %in, %own;
    add.u64 %out, %out, %own;
    {start}
    mov.u32 %i, 0;
LOOP:
    {loads}
    add.u64 %in, %in, 32768;
    wgmma.fence.sync.aligned;
    {products}
    wgmma.commit_group.sync.aligned;
    {exponents}
    {branch}
    wgmma.wait_group.sync.aligned 0;
    {packing}
    add.u32 %i, %i, 1;
    setp.lt.u32 %more, %i, %count;
    @%more bra LOOP;
    {stores}
    ret;
}}
"""
SUMS = ", ".join(f"%f{i}" for i in range(32))
BRANCH = "AGAIN: mbarrier.try_wait.parity.shared.b64 %arrived, [bar], 0; @!%arrived bra AGAIN;"
PARTS = {
    "start": [f"mov.f32 %f{i}, 0f00000000; mov.b32 %a{i}, %lane;" for i in range(32)],
    "loads": [
        f"ld.global.v4.f32 {{%x{i}, %x{i + 1}, %x{i + 2}, %x{i + 3}}}, [%in + {4 * i}];"
        for i in range(0, 64, 4)
    ],
    "products": [
        f"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{SUMS}}}, "
        f"{{%a{i}, %a{i + 1}, %a{i + 2}, %a{i + 3}}}, %desc, 1, 1, 1, 0;"
        for i in range(0, 32, 4)
    ],
    "exponents": [f"ex2.approx.ftz.f32 %e{i}, %x{i};" for i in range(64)],
    "packing": [f"cvt.rn.bf16x2.f32 %a{i}, %e{2 * i + 1}, %e{2 * i};" for i in range(32)],
    "stores": [f"st.global.f32 [%out + {4 * i}], %f{i};" for i in range(32)],
}
ptxas, nvdisasm, folder = sys.argv[1:]
text = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
(version,) = re.findall(r"V([\d.]+)", text)
found = []
for branch in ("", BRANCH):
    source, binary = pathlib.Path(folder, "one.ptx"), f"{folder}/one.cubin"
    source.write_text(PTX.format(branch=branch, **{k: "\n".join(x) for k, x in PARTS.items()}))
    subprocess.run([ptxas, "-arch=sm_90a", source, "-o", binary], check=True)
    code = subprocess.run([nvdisasm, binary], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"\b(HGMMA|MUFU\.EX2|F2FP|WARPGROUP\.DEPBAR)\b", code)
    assert names.count("HGMMA") == 8 and names.count("MUFU.EX2") == 64, names
    wait = names.index("WARPGROUP.DEPBAR")
    assert "F2FP" not in names[:wait], names
    found.append(names[:wait].count("MUFU.EX2"))
print(version, "exponents before the wait, as it is and with a branch:", found)
assert found[0] < 16 and found[1] == 64, found
PYTHON
python="${PYTHON:-python3.12}"
"$python" -m venv "$folder/triton"
"$folder/triton/bin/pip" install -q --no-deps triton==3.6.0
tools=$("$folder/triton/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/triton/backends/nvidia/bin
for version in 13.0.88 13.5.37; do
  "$python" -m venv --clear "$folder/nvcc"
  "$folder/nvcc/bin/pip" install -q --no-deps "nvidia-cuda-nvcc==$version"
  ptxas=$(find "$folder/nvcc" -name ptxas -path '*bin*' | head -n 1)
  "$python" "$folder/waits.py" "$ptxas" "$tools/nvdisasm" "$folder"
done
