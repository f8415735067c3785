"""GPUs by class: their names, their memory, and blocks that fit it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import Blocks, Config, attention
from jax_flash2.tune import triton as tune_triton
from pallas_kernels import device, tables
from pallas_kernels.device import Gpu
from pallas_kernels.triton import estimates, tuning
from tests.lowering import lower_for_gpu
from tests.tiers import deep

KIB = 1 << 10
HEADS = (*((n, n) for n in (16, 64, 80, 96, 128, 160, 192, 256, 320, 512)), (192, 128))
# One of each family, and Thor, of which little is known.
CLASSES = {
    name: Gpu.named(f"NVIDIA {name}")
    for name in ("A10", "A100", "H100", "B200", "Thor")
}


def _itemsize(regime: str) -> float:
    return {"float32": 4, "float32 highest": estimates.SPLIT_ITEMSIZE}.get(regime, 2)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("regime", tables.REGIMES)
def test_what_is_chosen_fits_every_class(name, regime):
    gpu, size = CLASSES[name], _itemsize(regime)
    limit, room = gpu.shared_memory, {"products": gpu.family.products}
    for head in (*HEADS, (64, 256)):
        heads = sum(tables.pieces(head[0])), sum(tables.pieces(head[1]))
        for kernel in tuning.kernels(heads):
            if tuning.smallest(kernel, heads, size, gpu) > limit:
                small = limit == 99 * KIB and max(head) > 256 and size >= 4
                assert small or size == estimates.SPLIT_ITEMSIZE  # as float32 then
                continue
            for pairs, dropout in ((0, 0), (0, 1), (1, 0), (2, 1), (4, 0), (9, 1)):
                options = {"rows": (8192, 8192), "heads": heads, "itemsize": size}
                options |= {"pair_bytes": pairs, "regime": regime, "gpu": gpu}
                options["dropout"] = bool(dropout)
                blocks = tuning.choose(kernel, None, **options)
                sizes = kernel, blocks, heads, size
                more = {**room, "has_bits": bool(dropout)}
                need = estimates.shared_memory(*sizes, pairs, **more)
                assert need <= limit, (kernel, head, blocks)
                if gpu.tensor_memory:
                    need = estimates.tensor_memory(*sizes)
                    assert need <= gpu.tensor_memory, (kernel, head, blocks)


# Compiled for a B200 by XLA's Triton (JAX 0.12.0.1, 2026-11-27): kernel, blocks, head
# size, bytes of an element, bytes for each pair, dropout; bytes of shared memory, and
# columns of tensor memory as allocated, in powers of two, or asked for. 0 is not known:
# XLA had refused the kernel for the other one.
COMPILED = [
    ("forward", (64, 128, 4, 3), 128, 2, 0, 0, 214016, 256),
    ("forward", (128, 64, 8, 3), 128, 2, 0, 0, 135200, 256),
    ("forward", (128, 64, 8, 3), 128, 2, 0, 1, 140288, 256),
    ("forward", (128, 64, 8, 3), 128, 2, 2, 1, 173056, 256),
    ("forward", (128, 128, 8, 3), 128, 2, 0, 0, 233504, 0),
    ("forward", (64, 64, 4, 3), 256, 2, 0, 0, 230400, 512),
    ("forward", (64, 64, 4, 3), 256, 2, 0, 1, 234496, 0),
    ("forward", (64, 64, 8, 2), 256, 2, 0, 0, 166912, 512),
    ("forward", (64, 64, 8, 2), 256, 2, 0, 1, 173056, 512),
    ("forward", (64, 64, 8, 2), 256, 2, 4, 0, 183296, 512),
    ("forward", (128, 32, 8, 2), 256, 2, 0, 0, 135200, 512),
    ("forward", (128, 32, 8, 3), 256, 2, 0, 0, 167968, 512),
    ("forward", (128, 32, 8, 3), 256, 2, 2, 0, 184352, 512),
    ("forward", (32, 32, 4, 2), 64, 4, 0, 0, 28672, 0),
    ("forward", (128, 128, 8, 1), 96, 4, 0, 0, 49160, 512),
    ("forward", (64, 32, 4, 1), 192, 5.5, 0, 0, 98312, 256),
    ("dq", (256, 64, 8, 3), 64, 4, 0, 0, 0, 768),
    ("dq", (64, 128, 4, 3), 64, 2, 0, 0, 132096, 256),
    ("dq", (64, 64, 4, 3), 128, 2, 0, 0, 148480, 256),
    ("dq", (64, 128, 4, 2), 128, 2, 0, 0, 197632, 512),
    ("dq", (64, 128, 4, 3), 128, 2, 0, 0, 263168, 0),
    ("dq", (64, 32, 4, 2), 256, 2, 0, 0, 148480, 512),
    ("dq", (64, 32, 4, 3), 256, 2, 0, 0, 181248, 512),
    ("dq", (128, 32, 8, 2), 256, 2, 0, 0, 213040, 512),
    ("dq", (128, 32, 8, 2), 256, 2, 1, 1, 225456, 512),
    ("dq", (128, 32, 8, 2), 256, 2, 3, 0, 225456, 512),
    ("dq", (32, 64, 4, 1), 64, 4, 0, 0, 32768, 0),
    ("dq", (32, 64, 4, 1), 128, 4, 0, 0, 65536, 0),
    ("dq", (32, 32, 4, 1), 256, 4, 0, 0, 98304, 0),
    ("dq", (32, 32, 8, 1), 128, 5.5, 0, 0, 65536, 0),
    ("dkv", (32, 128, 8, 2), 128, 4, 0, 0, 0, 640),
    ("dkv", (64, 64, 4, 3), 64, 2, 0, 0, 83968, 256),
    ("dkv", (128, 64, 4, 3), 64, 2, 0, 0, 150528, 256),
    ("dkv", (128, 64, 4, 3), 64, 2, 4, 0, 215104, 256),
    ("dkv", (32, 32, 4, 1), 128, 2, 0, 0, 40960, 0),
    ("dkv", (64, 64, 4, 2), 128, 2, 0, 0, 132160, 512),
    ("dkv", (64, 64, 4, 3), 128, 2, 0, 0, 165888, 256),
    ("dkv", (64, 128, 8, 2), 128, 2, 0, 0, 164928, 512),
    ("dkv", (64, 128, 8, 2), 128, 2, 0, 1, 180800, 512),
    ("dkv", (64, 128, 8, 2), 128, 2, 1, 0, 172608, 512),
    ("dkv", (64, 128, 8, 2), 128, 2, 2, 0, 180800, 512),
    ("dkv", (64, 128, 8, 2), 128, 2, 4, 1, 213568, 512),
    ("dkv", (32, 32, 4, 2), 64, 4, 0, 0, 24832, 0),
    ("dkv", (32, 128, 8, 2), 96, 4, 5, 1, 79296, 512),
    ("dkv", (32, 32, 4, 2), 128, 4, 0, 0, 49408, 0),
    ("dkv", (32, 64, 8, 1), 192, 4, 0, 0, 0, 0),
    ("dk", (64, 128, 8, 2), 192, 2, 0, 0, 173056, 512),
    ("dk", (16, 128, 8, 1), 256, 2, 0, 0, 147464, 512),
    ("dk", (32, 64, 4, 2), 256, 2, 0, 0, 148480, 512),
    ("dk", (32, 64, 8, 2), 256, 2, 0, 0, 148480, 512),
    ("dk", (32, 128, 8, 2), 256, 2, 3, 0, 225712, 512),
    ("dk", (32, 128, 8, 3), 256, 2, 0, 0, 246320, 0),
    ("dk", (64, 64, 4, 2), 256, 2, 0, 0, 230448, 512),
    ("dk", (64, 64, 4, 2), 256, 2, 1, 0, 234032, 0),
    ("dk", (64, 64, 4, 3), 256, 2, 1, 0, 304176, 0),
    ("dk", (32, 32, 4, 1), 192, 5.5, 0, 0, 90112, 0),
    ("dv", (64, 128, 8, 3), 192, 2, 0, 0, 173056, 512),
    ("dv", (32, 64, 4, 2), 256, 2, 0, 0, 98464, 512),
    ("dv", (32, 64, 4, 3), 256, 2, 1, 0, 135456, 512),
    ("dv", (32, 128, 8, 3), 256, 2, 0, 0, 164128, 512),
    ("dv", (64, 64, 4, 3), 256, 2, 0, 0, 230432, 512),
    ("dv", (64, 128, 8, 2), 256, 2, 0, 0, 196896, 512),
    ("dv", (64, 128, 8, 2), 256, 2, 0, 1, 213280, 512),
    ("dv", (64, 128, 8, 2), 256, 2, 2, 0, 213280, 512),
    ("dv", (32, 32, 4, 1), 256, 5.5, 0, 0, 81920, 0),
    ("dv", (16, 16, 8, 2), 512, 5.5, 0, 0, 116288, 0),
    ("dbias", (64, 128, 4, 2), 64, 2, 2, 0, 102432, 128),
    ("dbias", (64, 128, 8, 2), 64, 2, 2, 0, 102432, 128),
    ("dbias", (128, 64, 4, 3), 64, 2, 2, 0, 151584, 128),
    ("dbias", (256, 16, 8, 3), 64, 2, 4, 0, 213024, 64),
    ("dbias", (64, 64, 4, 2), 128, 2, 2, 0, 133152, 64),
    ("dbias", (64, 64, 4, 2), 128, 2, 4, 0, 135200, 64),
    ("dbias", (256, 16, 8, 1), 64, 4, 5, 1, 16384, 256),
    ("dbias", (64, 32, 4, 3), 160, 4, 4, 0, 262160, 0),
    ("dbias", (16, 16, 8, 1), 512, 4, 2, 0, 81920, 0),
    ("dbias", (64, 64, 4, 1), 128, 5.5, 2, 0, 49160, 256),
    ("dbias", (64, 64, 4, 1), 160, 5.5, 2, 0, 49160, 512),
    ("dbias", (64, 64, 4, 1), 160, 5.5, 3, 0, 49160, 512),
]


@pytest.mark.parametrize(
    ("kernel", "blocks", "head", "itemsize", "pairs", "dropout", "bytes_", "columns"),
    COMPILED,
)
def test_estimates_for_tensor_memory(
    kernel, blocks, head, itemsize, pairs, dropout, bytes_, columns
):
    """Never below what the compiler took, nor far above it for most calls."""
    heads = (sum(tables.pieces(head)),) * 2
    blocks = Blocks(*blocks)
    estimate = estimates.shared_memory(
        kernel,
        blocks,
        heads,
        itemsize,
        pairs,
        products="tcgen05",
        has_bits=bool(dropout),
    )
    assert bytes_ <= estimate
    if bytes_:
        assert estimate <= 1.31 * bytes_
        least = estimates.least_shared_memory(kernel, blocks, heads, itemsize)
        assert least <= bytes_
    need = estimates.tensor_memory(kernel, blocks, heads, itemsize)
    assert columns <= tables.padded(max(need, 1))


# Compiled for an RTX 4090 in the same way (JAX 0.12.0.1, 2026-11-27; the last ones with
# 0.11.2, which takes more for them): kernel, blocks, head size, bytes of an element,
# bytes for each pair, dropout; bytes of shared memory.
COMPILED_FOR_MMA_SYNC = [
    ("dbias", (32, 64, 4, 2), 64, 4, 4, 0, 53248),
    ("dbias", (64, 32, 4, 1), 256, 2, 5, 1, 69632),
    ("dbias", (64, 32, 4, 2), 64, 4, 4, 0, 57344),
    ("dbias", (64, 32, 8, 1), 128, 4, 4, 0, 73728),
    ("dbias", (64, 64, 4, 1), 80, 2, 4, 0, 28672),
    ("dbias", (64, 64, 4, 2), 64, 2, 5, 1, 36864),
    ("dbias", (64, 64, 8, 1), 128, 2, 5, 1, 36864),
    ("dk", (32, 32, 4, 2), 192, 2, 0, 1, 53504),
    ("dk", (32, 64, 4, 1), 192, 2, 5, 1, 63488),
    ("dk", (32, 64, 4, 2), 192, 2, 0, 0, 73984),
    ("dk", (32, 64, 8, 1), 256, 2, 0, 0, 98304),
    ("dk", (32, 64, 8, 2), 192, 2, 0, 0, 73984),
    ("dk", (32, 128, 8, 1), 192, 2, 0, 0, 114688),
    ("dk", (64, 32, 8, 1), 256, 2, 4, 0, 98304),
    ("dk", (64, 32, 8, 2), 192, 2, 0, 0, 78336),
    ("dk", (64, 64, 4, 1), 192, 2, 4, 0, 75776),
    ("dk", (64, 64, 8, 1), 192, 2, 0, 0, 77824),
    ("dkv", (32, 64, 4, 2), 96, 2, 0, 1, 37120),
    ("dkv", (32, 64, 8, 1), 128, 4, 4, 1, 81920),
    ("dkv", (32, 64, 8, 2), 128, 2, 4, 0, 61696),
    ("dkv", (64, 32, 4, 2), 64, 4, 0, 0, 33280),
    ("dkv", (64, 64, 4, 2), 96, 2, 0, 1, 49664),
    ("dkv", (64, 64, 8, 1), 128, 2, 4, 0, 81920),
    ("dkv", (64, 64, 8, 2), 80, 2, 1, 0, 45568),
    ("dq", (32, 32, 4, 2), 64, 4, 0, 0, 32768),
    ("dq", (32, 64, 4, 2), 64, 4, 0, 0, 49152),
    ("dq", (32, 64, 8, 1), 256, 2, 0, 0, 98304),
    ("dq", (64, 32, 4, 1), 64, 4, 0, 0, 40960),
    ("dq", (64, 32, 4, 2), 192, 2, 0, 1, 73728),
    ("dq", (64, 32, 8, 1), 256, 2, 4, 0, 98304),
    ("dq", (64, 32, 8, 2), 128, 2, 5, 1, 67584),
    ("dq", (64, 64, 4, 1), 192, 2, 0, 1, 75776),
    ("dq", (64, 64, 4, 2), 96, 2, 1, 0, 53248),
    ("dq", (64, 64, 8, 1), 128, 2, 4, 0, 65536),
    ("dq", (64, 64, 8, 2), 128, 2, 4, 0, 90112),
    ("dv", (32, 64, 4, 1), 192, 2, 0, 0, 36864),
    ("dv", (32, 64, 4, 2), 192, 2, 0, 1, 49280),
    ("dv", (32, 128, 8, 2), 192, 2, 0, 0, 73856),
    ("dv", (64, 64, 4, 1), 192, 2, 0, 0, 49152),
    ("dv", (64, 64, 4, 2), 192, 2, 4, 0, 90368),
    ("dv", (64, 64, 8, 1), 256, 2, 0, 1, 81920),
    ("dv", (64, 128, 8, 1), 192, 2, 0, 0, 73728),
    ("forward", (32, 32, 8, 2), 192, 2, 5, 1, 46080),
    ("forward", (64, 32, 4, 2), 192, 2, 0, 0, 49152),
    ("forward", (64, 32, 8, 2), 128, 4, 0, 0, 73728),
    ("forward", (64, 64, 4, 2), 80, 2, 0, 1, 30720),
    ("forward", (64, 64, 8, 1), 192, 2, 0, 1, 49152),
    ("forward", (128, 32, 8, 2), 128, 2, 5, 1, 69632),
    ("forward", (128, 64, 4, 2), 96, 2, 0, 1, 49152),
    ("forward", (128, 64, 8, 1), 192, 2, 4, 0, 73728),
    ("forward", (128, 64, 8, 2), 128, 2, 0, 0, 65792),
    ("dkv", (16, 32, 8, 2), 128, 5.5, 0, 0, 60544),
    ("dkv", (32, 32, 4, 2), 64, 5.5, 0, 0, 39168),
    ("dq", (16, 16, 8, 1), 256, 5.5, 0, 0, 67072),
    ("dq", (32, 32, 8, 1), 128, 5.5, 0, 0, 71680),
    ("forward", (32, 32, 8, 1), 128, 5.5, 0, 0, 47104),
    ("forward", (64, 32, 4, 2), 64, 5.5, 0, 0, 49152),
    ("tangent", (16, 16, 8, 2), 128, 5.5, 0, 0, 69632),
    ("tangent", (16, 32, 8, 2), 128, 4, 0, 0, 98304),
    ("tangent", (32, 16, 4, 2), 96, 4, 0, 0, 55296),
    ("tangent", (32, 32, 4, 2), 64, 5.5, 0, 0, 71680),
]


@pytest.mark.parametrize(
    ("kernel", "blocks", "head", "itemsize", "pairs", "dropout", "bytes_"),
    COMPILED_FOR_MMA_SYNC,
)
def test_estimates_of_mma_sync(kernel, blocks, head, itemsize, pairs, dropout, bytes_):
    """Never below what the compiler took, nor far above it."""
    heads = (sum(tables.pieces(head)),) * 2
    sizes = kernel, Blocks(*blocks), heads, itemsize, pairs
    more = {"products": "mma.sync", "has_bits": bool(dropout)}
    assert bytes_ <= estimates.shared_memory(*sizes, **more) <= 1.3 * bytes_


# Of forwards for a GH200 (JAX 0.11.2): their blocks, head size, bytes of shared memory.
COMPILED_FOR_WGMMA = [
    ((128, 32, 4, 2), 64, 49152),
    ((128, 32, 8, 3), 64, 49152),
    ((128, 32, 4, 3), 128, 98304),
    ((64, 32, 4, 3), 128, 65536),
    ((128, 64, 4, 3), 128, 131072),
]


@pytest.mark.parametrize(("blocks", "head", "bytes_"), COMPILED_FOR_WGMMA)
def test_estimates_of_wgmma(blocks, head, bytes_):
    """Blocks of few keys take as much as q and the output, in float32, beside it."""
    found = estimates.shared_memory("forward", Blocks(*blocks), (head, head), 2)
    assert bytes_ <= found <= 1.05 * bytes_


# Of calls that could not be compiled for a B200 when its memory was taken for an H200's
# (JAX 0.11.2 and 0.12.0.1): kernel, head, bytes of an element, regime, and what was
# asked for, of shared memory or of columns of tensor memory.
REFUSED = [
    ("forward", 128, 2, "few", 233504),
    ("forward", 128, 2, "dropout", 246784),
    ("dq", 128, 2, "single", 263168),
    ("dk", 256, 2, "few", 246320),
    ("dq", 256, 2, "plain", 245808),
    ("dq", 64, 4, "plain", 768),
    ("dkv", 128, 4, "plain", 640),
]


@pytest.mark.parametrize(("kernel", "head", "itemsize", "regime", "asked"), REFUSED)
def test_blocks_of_an_h200_that_do_not_fit_a_b200(
    kernel, head, itemsize, regime, asked
):
    dropout = regime == "dropout"
    options = {"rows": (8192, 8192), "heads": (head, head), "itemsize": itemsize}
    options |= {"regime": regime, "dropout": dropout}
    before = tuning.choose(kernel, None, gpu=CLASSES["H100"], **options)
    before = dataclasses.replace(before, left_in_registers=0)
    now = tuning.choose(kernel, None, gpu=CLASSES["B200"], **options)
    room = {"gpu": CLASSES["B200"], "dropout": dropout}
    assert not tuning.fits(kernel, before, (head, head), itemsize, **room)
    assert tuning.fits(kernel, now, (head, head), itemsize, **room)
    assert asked > (512 if asked < 1024 else 227 * KIB)


@pytest.mark.parametrize("regime", ["plain", "dropout", "decode", "float32"])
def test_the_tuner_measures_nothing_that_does_not_fit(monkeypatch, regime):
    gpu, size = CLASSES["B200"], _itemsize(regime)
    monkeypatch.setattr(device, "gpu", lambda: gpu)
    room = {"gpu": gpu, "dropout": regime == "dropout"}
    for head in (64, 128, 256):
        for kernel in tune_triton.kernels(regime, head):
            found = tune_triton.candidates(kernel, head, regime)
            assert found
            for blocks in found:
                assert tuning.fits(kernel, blocks, (head, head), size, **room)


def test_no_blocks_that_do_not_fit():
    options = {"rows": (8192, 8192), "heads": (128, 128), "itemsize": 2}
    small = dataclasses.replace(CLASSES["A10"], shared_memory=4 * KIB)
    with pytest.raises(ValueError, match=r"no blocks of dq for .* fit 4 KiB"):
        tuning.choose("dq", None, gpu=small, **options)


# (name, compute capability times ten, family, multiprocessors if the name tells)
NAMES = [
    ("NVIDIA A100-SXM4-80GB", 80, "sm_80", 108),
    ("NVIDIA A100 80GB PCIe", 80, "sm_80", 108),
    ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 80, "sm_80", None),
    ("NVIDIA A30", 80, "sm_80", 56),
    ("NVIDIA A10", 86, "sm_86", 72),
    ("NVIDIA A10G", 86, "sm_86", 80),
    ("NVIDIA A40-48Q", 86, "sm_86", 84),
    ("NVIDIA RTX A6000", 86, "sm_86", 84),
    ("NVIDIA RTX A4000", 86, "sm_86", None),
    ("NVIDIA GeForce RTX 3060", 86, "sm_86", None),
    ("NVIDIA GeForce RTX 3090", 86, "sm_86", 82),
    ("Orin (nvgpu)", 87, "sm_80", None),
    ("NVIDIA L4", 89, "sm_86", 58),
    ("NVIDIA L40S", 89, "sm_86", 142),
    ("NVIDIA GeForce RTX 4090", 89, "sm_86", 128),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 89, "sm_86", None),
    ("NVIDIA RTX 6000 Ada Generation", 89, "sm_86", 142),
    ("NVIDIA RTX 5000 Ada Generation", 89, "sm_86", None),
    ("NVIDIA H100 80GB HBM3", 90, "sm_90", 132),
    ("NVIDIA H100 PCIe", 90, "sm_90", 114),
    ("NVIDIA H20", 90, "sm_90", 78),
    ("NVIDIA H200", 90, "sm_90", 132),
    ("NVIDIA GH200 480GB", 90, "sm_90", 132),
    ("NVIDIA B200", 100, "sm_100", 148),
    ("NVIDIA GB200", 100, "sm_100", None),
    ("NVIDIA B300 SXM6 AC", 103, "sm_100", 148),
    ("NVIDIA GB300", 103, "sm_100", None),
    ("NVIDIA Thor", 110, "sm_100", 20),
    ("NVIDIA GeForce RTX 5090", 120, "sm_86", 170),
    ("NVIDIA GeForce RTX 5070 Ti", 120, "sm_86", None),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, "sm_86", 188),
    ("NVIDIA GB10", 121, "sm_86", 48),
    ("Tesla T4", 75, "sm_86", 40),
    ("Quadro RTX 5000", 75, "sm_86", None),
    ("Tesla V100-SXM2-16GB", 70, "sm_86", 80),
    ("NVIDIA Unheard Of", 86, "sm_86", None),
]
# In KiB, and in columns.
MEMORY = {"sm_80": (163, 0), "sm_86": (99, 0), "sm_90": (227, 0), "sm_100": (227, 512)}


@pytest.mark.parametrize(("name", "capability", "family", "count"), NAMES)
def test_gpus_by_name(name, capability, family, count):
    gpu = Gpu.named(name)
    assert (gpu.capability, gpu.family.name) == (capability, family)
    assert gpu.core_count == count
    assert gpu.multiprocessors == (count or gpu.family.multiprocessors)
    kib, columns = MEMORY[family]
    kib = {75: 64, 110: 99}.get(capability, kib)
    assert (gpu.shared_memory, gpu.tensor_memory) == (kib * KIB, columns)
    assert gpu.is_known == ("Unheard" not in name)
    assert ("assumed" in gpu.words) == (count is None)


def test_a_gpu_that_says_how_many_multiprocessors_it_has(monkeypatch):
    gpu = jax.sharding.AbstractDevice("NVIDIA H100 PCIe", 60, "cuda")
    monkeypatch.setattr(device, "abstract_device", lambda: gpu)
    assert device.multiprocessors() == device.gpu().core_count == 60


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_an_unknown_name_is_one_of_the_smallest_gpus_and_said(implementation):
    """Never Hopper's kernels: what fits 99 KiB and multiplies by mma.sync fits all."""
    x = jax.ShapeDtypeStruct((2, 2048, 8, 128), jnp.bfloat16)
    call = functools.partial(attention, implementation=implementation)
    words = r"does not know the GPU 'NVIDIA Unheard Of'.*triton_sm_86\.json"
    with pytest.warns(UserWarning, match=words):
        text = lower_for_gpu(call, x, x, x, device="NVIDIA Unheard Of")
    assert text == lower_for_gpu(call, x, x, x, device="NVIDIA RTX A4000")
    assert "__gpu$xla.gpu.triton" in text


def _gradients(q, k, v, config=None, **options):
    call = functools.partial(
        attention, implementation="triton", config=config, is_causal=True, **options
    )
    return jax.vjp(call, q, k, v)[1](q)


@pytest.mark.parametrize("gpu", ["B200", "H200", "A10"])
@pytest.mark.parametrize("dropout", [False, True])
def test_a_call_takes_its_gpus_blocks(monkeypatch, gpu, dropout):
    found, choose = [], tuning.choose

    def spy(kernel, config, **options):
        found.append((kernel, options["gpu"].kind, options["dropout"]))
        return choose(kernel, config, **options)

    monkeypatch.setattr(tuning, "choose", spy)
    x = jax.ShapeDtypeStruct((2, 256, 2, 128), jnp.bfloat16)
    more = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)} if dropout else {}
    call = functools.partial(_gradients, **more)
    lower_for_gpu(call, x, x, x, device=f"NVIDIA {gpu}")
    kernels = ("forward", "dq", "dkv")
    assert set(found) == {(x, f"NVIDIA {gpu}", dropout) for x in kernels}


def test_the_callers_blocks_that_cannot_fit():
    """Said before anything is compiled, with what they need and what there is."""
    large = Config(dq=Blocks(128, 128, 8, 4))
    x = jax.ShapeDtypeStruct((2, 256, 2, 128), jnp.bfloat16)
    call = functools.partial(_gradients, config=large)
    words = r"Config\.dq needs at least 192 KiB of shared memory and this GPU has 99"
    with pytest.raises(ValueError, match=words):
        lower_for_gpu(call, x, x, x, device="NVIDIA L4")
    assert "flash2_dq" in lower_for_gpu(call, x, x, x, device="NVIDIA H200")
    small = functools.partial(_gradients, config=Config(dq=Blocks(64, 64, 4, 2)))
    assert "flash2_dq" in lower_for_gpu(small, x, x, x, device="NVIDIA L4")


@deep
def test_interpreted_kernels_need_no_memory_of_a_gpu(monkeypatch):
    """What no GPU of so little memory could run: float32 at head size 512."""
    small = dataclasses.replace(CLASSES["A10"], shared_memory=48 * KIB)
    monkeypatch.setattr(device, "gpu", lambda: small)
    x = jax.random.normal(jax.random.key(0), (1, 16, 1, 512))

    def gradients(x, **options):
        call = functools.partial(attention, precision="highest", **options)
        return jax.vjp(call, x, x, x)[1](x)

    found = gradients(x, config=Config(interpret=True), implementation="triton")
    for a, b in zip(found, gradients(x, implementation="reference"), strict=True):
        assert jnp.max(jnp.abs(a - b)) < 1e-3
