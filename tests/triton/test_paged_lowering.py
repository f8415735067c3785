"""Kernels that read pages, lowered for GPUs that are described."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import paged_attention
from tests.lowering import kernel_modules, lower_for_gpu
from tests.paged import E4M3, E5M2, INT8
from tests.tiers import deep

GPUS = {
    80: "NVIDIA A100-SXM4-80GB",
    90: "NVIDIA H100 80GB HBM3",
    100: "NVIDIA B200",
    120: "NVIDIA RTX PRO 6000",
}
KINDS = {"bfloat16": jnp.bfloat16, "int8": INT8, "e4m3": E4M3, "e5m2": E5M2}


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def lowered(gpu: int, kind, page: int, pages: int = 1024, heads=(8, 128, 128)):
    """The forward kernel of one token for each of 8 sequences of 4,096 keys at most."""
    k, h, d = heads
    ints = functools.partial(struct, dtype=jnp.int32)
    data = {
        "query": struct(8, 1, 32, h),
        "key_pages": struct(pages, page, k, h, dtype=kind),
        "page_table": ints(8, 4096 // page),
        "key_value_seq_lengths": ints(8),
    }
    fixed = {"value_pages": None, "value_head_size": d}
    if h == d:
        data["value_pages"] = struct(pages, page, k, d, dtype=kind)
        fixed = {}
    if kind != jnp.bfloat16:
        scale = struct(pages, page, k, dtype=jnp.float32)
        data |= {"key_scale": scale, "value_scale": scale}

    def call(data):
        return paged_attention(**data, **fixed, implementation="triton")

    return kernel_modules(lower_for_gpu(call, data, device=GPUS[gpu]))["flash2_forward"]


@pytest.mark.parametrize("page", [pytest.param(16, id="rows"), 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "gpu", [80, 90, pytest.param(100, marks=deep), pytest.param(120, marks=deep)]
)
def test_kernels_lower(gpu, kind, page):
    text = lowered(gpu, KINDS[kind], page)
    # For each block of keys one entry of the table is read, or one for each row.
    rows = re.findall(r"tt\.load .* : tensor<64x!tt\.ptr<i32>>", text)
    assert bool(rows) == (page == 16)


def test_pools_are_addressed_in_64_bits():
    """One of 2^33 elements; each row of small pages has a start of its own."""
    for page in (16, 64):
        text = lowered(90, jnp.bfloat16, page, pages=2**23 // page)
        places = re.findall(r"tt\.load %\w+.* : tensor<64x128x!tt\.ptr<bf16>>", text)
        assert places
        assert ("tensor<64xi64>" in text) == (page == 16)


def test_latent_values_are_read_once():
    """The loads of a block of keys serve values, too: 512 elements of 576."""
    text = lowered(90, jnp.bfloat16, 64, heads=(1, 576, 512))
    loads = re.findall(r"tt\.load .* : tensor<\d+x(\d+)x!tt\.ptr<bf16>>", text)
    assert (
        loads.count("512") - 1 == loads.count("64") - 1 == 3
    )  # loops; one for queries
