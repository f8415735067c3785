"""GPUs by class: their names, their memory, and blocks that fit it."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import Blocks, Config, attention
from jax_flash2.tune import triton as tune_triton
from pallas_kernels import device, tables
from pallas_kernels.triton import tuning
from tests.lowering import lower_for_gpu
from tests.tiers import deep

KIB = 1 << 10
# (bytes of shared memory, columns of tensor memory, whether left operands are kept)
CLASSES = {
    "99 KiB": (99 * KIB, 0, False),
    "A100": (163 * KIB, 0, False),
    "Hopper": (227 * KIB, 0, True),
    "B200": (227 * KIB, 512, False),
    "Thor, of which little is known": (99 * KIB, 512, False),
}


def _itemsize(regime: str) -> float:
    return {"float32": 4, "float32 highest": tuning.SPLIT_ITEMSIZE}.get(regime, 2)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("regime", tables.REGIMES)
def test_what_is_chosen_fits_every_class(name, regime):
    limit, columns, keeps_left = CLASSES[name]
    size = _itemsize(regime)
    sizes = [(head, head) for head in (16, 64, 80, 96, 128, 160, 192, 256, 320, 512)]
    for head in (*sizes, (192, 128), (64, 256)):
        heads = sum(tables.pieces(head[0])), sum(tables.pieces(head[1]))
        for kernel in tuning.kernels(heads):
            if tuning.smallest(kernel, heads, size, columns) > limit:
                assert (limit, max(head) > 256, size >= 4) == (
                    99 * KIB,
                    True,
                    True,
                ) or (
                    size == tuning.SPLIT_ITEMSIZE  # multiplied as float32 then
                )
                continue
            for pair_bytes, dropout in ((0, 0), (0, 1), (1, 0), (2, 1), (4, 0), (9, 1)):
                blocks = tuning.choose(
                    kernel,
                    None,
                    rows=(8192, 8192),
                    heads=heads,
                    itemsize=size,
                    limit=limit,
                    columns=columns,
                    pair_bytes=pair_bytes,
                    dropout=bool(dropout),
                    regime=regime,
                    gpu="NVIDIA Unheard Of",
                    keeps_left=keeps_left,
                )
                need = tuning.shared_memory(
                    kernel,
                    blocks,
                    heads,
                    size,
                    pair_bytes,
                    tensor_memory=columns > 0,
                    dropout=bool(dropout),
                )
                assert need <= limit, (kernel, head, blocks)
                if columns:
                    need = tuning.tensor_memory(kernel, blocks, heads, size)
                    assert need <= columns, (kernel, head, blocks)


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
    estimate = tuning.shared_memory(
        kernel,
        blocks,
        heads,
        itemsize,
        pairs,
        tensor_memory=True,
        dropout=bool(dropout),
    )
    assert bytes_ <= estimate
    whole = len(tables.pieces(head)) == 1
    if itemsize == 2 and whole and blocks.num_stages > 1 and bytes_:
        assert estimate <= 1.25 * bytes_
    if bytes_:
        least = tuning.least_shared_memory(kernel, blocks, heads, itemsize)
        assert least <= bytes_
    need = tuning.tensor_memory(kernel, blocks, heads, itemsize)
    assert columns <= tables.padded(max(need, 1))


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
    options = {"rows": (8192, 8192), "heads": (head, head), "itemsize": itemsize}
    options |= {"regime": regime, "dropout": regime == "dropout", "limit": 227 * KIB}
    before = tuning.choose(kernel, None, keeps_left=False, **options)
    now = tuning.choose(kernel, None, keeps_left=False, columns=512, **options)
    assert before != now
    fits = functools.partial(
        tuning.fits,
        kernel,
        heads=(head, head),
        itemsize=itemsize,
        limit=227 * KIB,
        columns=512,
        dropout=regime == "dropout",
    )
    assert not fits(before)
    assert fits(now)
    assert asked > (512 if asked < 1024 else 227 * KIB)


def test_a_gpu_with_a_table_has_its_own_blocks(monkeypatch):
    """What replaces the H200's on Blackwell is for want of a table."""
    options = {"rows": (8192, 8192), "heads": (256, 256), "itemsize": 2}
    options |= {"limit": 227 * KIB, "columns": 512, "gpu": "NVIDIA B200"}
    options |= {"keeps_left": False}
    tuned = tables.table("triton", "NVIDIA B200")["forward"]["256"]["plain"]
    blocks = tuning.choose("forward", None, **options)
    assert blocks != Blocks(*tuned[:4])
    monkeypatch.setattr(tables, "is_tuned", lambda backend, gpu: True)
    assert tuning.choose("forward", None, **options) == Blocks(*tuned[:4])


@pytest.mark.parametrize("regime", ["plain", "dropout", "decode", "float32"])
def test_the_tuner_measures_nothing_that_does_not_fit(monkeypatch, regime):
    monkeypatch.setattr(device, "device_kind", lambda: "NVIDIA B200")
    monkeypatch.setattr(device, "_here", lambda: None)
    size = _itemsize(regime)
    room = {"limit": 227 * KIB, "columns": 512, "dropout": regime == "dropout"}
    for head in (64, 128, 256):
        for kernel in tune_triton.kernels(regime, head):
            found = tune_triton.candidates(kernel, head, regime)
            assert found
            for blocks in found:
                assert tuning.fits(kernel, blocks, (head, head), size, **room)


def test_no_blocks_that_do_not_fit():
    options = {"rows": (8192, 8192), "heads": (128, 128), "itemsize": 2}
    with pytest.raises(ValueError, match=r"no blocks of dq for .* fit 4 KiB"):
        tuning.choose("dq", None, limit=4 * KIB, **options)


# (name, compute capability times ten, KiB of shared memory, columns, multiprocessors)
NAMES = [
    ("NVIDIA A100-SXM4-80GB", 80, 163, 0, 108),
    ("NVIDIA A30", 80, 163, 0, 56),
    ("NVIDIA A10", 86, 99, 0, 84),
    ("NVIDIA A10G", 86, 99, 0, 84),
    ("NVIDIA A40-48Q", 86, 99, 0, 84),
    ("NVIDIA RTX A6000", 86, 99, 0, 84),
    ("NVIDIA GeForce RTX 3090", 86, 99, 0, 84),
    ("NVIDIA L4", 89, 99, 0, 142),
    ("NVIDIA L40S", 89, 99, 0, 142),
    ("NVIDIA GeForce RTX 4090", 89, 99, 0, 142),
    ("NVIDIA RTX 6000 Ada Generation", 89, 99, 0, 142),
    ("NVIDIA RTX 5000 Ada Generation", 89, 99, 0, 142),
    ("NVIDIA H100 80GB HBM3", 90, 227, 0, 132),
    ("NVIDIA H200", 90, 227, 0, 132),
    ("NVIDIA GH200 480GB", 90, 227, 0, 132),
    ("NVIDIA B200", 100, 227, 512, 148),
    ("NVIDIA GB200", 100, 227, 512, 148),
    ("NVIDIA B300 SXM6 AC", 103, 227, 512, 148),
    ("NVIDIA GB300", 103, 227, 512, 148),
    ("NVIDIA Thor", 110, 99, 512, 20),
    ("NVIDIA GeForce RTX 5090", 120, 99, 0, 188),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 99, 0, 188),
    ("NVIDIA GB10", 121, 99, 0, 48),
    ("Tesla T4", 75, 64, 0, 72),
    ("Quadro RTX 5000", 75, 64, 0, 72),
    ("Tesla V100-SXM2-16GB", 70, 99, 0, 80),
    ("NVIDIA Unheard Of", 86, 99, 0, 84),
]


@pytest.mark.parametrize(("name", "capability", "kib", "columns", "count"), NAMES)
def test_gpus_by_name(monkeypatch, name, capability, kib, columns, count):
    monkeypatch.setattr(device, "device_kind", lambda: name)
    monkeypatch.setattr(device, "_here", lambda: None)
    assert device.capability() == capability
    assert device.shared_memory_limit() == kib * KIB
    assert device.tensor_memory_columns() == columns
    assert device.multiprocessors() == count


def test_a_gpu_that_says_how_many_multiprocessors_it_has(monkeypatch):
    gpu = jax.sharding.AbstractDevice("NVIDIA H100 PCIe", 114, "cuda")
    monkeypatch.setattr(device, "abstract_device", lambda: gpu)
    assert device.multiprocessors() == 114


def _gradients(q, k, v, config=None, **options):
    call = functools.partial(
        attention, implementation="triton", config=config, is_causal=True, **options
    )
    return jax.vjp(call, q, k, v)[1](q)


@pytest.mark.parametrize(("gpu", "columns"), [("B200", 512), ("H200", 0)])
@pytest.mark.parametrize("dropout", [False, True])
def test_a_call_asks_for_its_gpus_memory(monkeypatch, gpu, columns, dropout):
    found, choose = [], tuning.choose

    def spy(kernel, config, **options):
        found.append((kernel, options["limit"], options["columns"], options["dropout"]))
        return choose(kernel, config, **options)

    monkeypatch.setattr(tuning, "choose", spy)
    x = jax.ShapeDtypeStruct((2, 256, 2, 128), jnp.bfloat16)
    more = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)} if dropout else {}
    call = functools.partial(_gradients, **more)
    lower_for_gpu(call, x, x, x, device=f"NVIDIA {gpu}")
    kernels = ("forward", "dq", "dkv")
    assert set(found) == {(x, 227 * KIB, columns, dropout) for x in kernels}


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
    """What fits no GPU of 99 KiB compiled: float32 at head size 512."""
    monkeypatch.setattr(device, "shared_memory_limit", lambda: 99 * KIB)
    x = jax.random.normal(jax.random.key(0), (1, 16, 1, 512))

    def gradients(x, **options):
        call = functools.partial(attention, **options)
        return jax.vjp(call, x, x, x)[1](x)

    found = gradients(x, config=Config(interpret=True), implementation="triton")
    for a, b in zip(found, gradients(x, implementation="reference"), strict=True):
        assert jnp.max(jnp.abs(a - b)) < 1e-3
