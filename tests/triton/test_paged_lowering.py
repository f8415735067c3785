"""Kernels that read pages, lowered for GPUs that are described."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import Blocks, Config, paged_attention
from tests.lowering import kernel_modules, lower_for_gpu
from tests.paged import E4M3, E5M2, INT8
from tests.tiers import deeply

GPUS = {
    80: "NVIDIA A100-SXM4-80GB",
    89: "NVIDIA GeForce RTX 4090",
    90: "NVIDIA H100 80GB HBM3",
    100: "NVIDIA B200",
    120: "NVIDIA RTX PRO 6000",
}
KINDS = {"bfloat16": jnp.bfloat16, "int8": INT8, "e4m3": E4M3, "e5m2": E5M2}
KINDS |= {"int4": jnp.uint8}


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def program(gpu: int, kind, page: int, pages: int = 1024, **more):
    """A program of one token for each of 8 sequences.

    Args:
      more: arguments, and `heads` and `keys`: of a sequence, at most.
    """
    (k, h, d), keys = more.pop("heads", (8, 128, 128)), more.pop("keys", 4096)
    halves = 2 if kind == jnp.uint8 else 1
    ints = functools.partial(struct, dtype=jnp.int32)
    data = {
        "query": struct(8, 1, 32, h),
        "key_pages": struct(pages, page, k, h // halves, dtype=kind),
        "page_table": ints(8, keys // page),
        "key_value_seq_lengths": ints(8),
    }
    fixed = {"value_pages": None, "value_head_size": d}
    if h == d:
        data["value_pages"] = struct(pages, page, k, d // halves, dtype=kind)
        fixed = {}
    if kind != jnp.bfloat16:
        scale = struct(pages, page, k, dtype=jnp.float32)
        data |= {"key_scale": scale, "value_scale": scale}

    def call(data):
        return paged_attention(**data, **fixed, **more, implementation="triton")

    return lower_for_gpu(call, data, device=GPUS[gpu])


def lowered(*arguments, **options) -> str:
    """The forward kernel of a `program`."""
    return kernel_modules(program(*arguments, **options))["flash2_forward"]


# Every kind, and the one that a GPU without instructions for it has another kernel for.
FIRST = [*((90, kind) for kind in KINDS), (80, "e4m3")]
OTHERS = [x for x in itertools.product(GPUS, KINDS) if x not in FIRST]


@pytest.mark.parametrize("page", [pytest.param(16, id="rows"), 64])
@pytest.mark.parametrize(("gpu", "kind"), [*FIRST, *deeply(*OTHERS)])
def test_kernels_lower(gpu, kind, page):
    text = lowered(gpu, KINDS[kind], page)
    # For each block of keys one entry of the table is read, or one for each row.
    rows = re.findall(r"tt\.load .* : tensor<64x!tt\.ptr<i32>>", text)
    assert bool(rows) == (page == 16)
    # Elements of one byte come in pairs, of which instructions make elements of two.
    columns = 32 if kind == "int4" else 64
    in_pairs = f"tensor<64x{columns}x!tt.ptr<i16>>" in text
    kind = "int8" if kind == "int4" else kind
    assert in_pairs == (kind in ("int8", "e5m2") or (kind == "e4m3" and gpu > 80))


def test_a_token_is_two_kernels():
    """Nothing is computed of lengths beside these: each kernel takes a microsecond."""
    found = program(90, jnp.bfloat16, 64)
    assert [*kernel_modules(found)] == ["flash2_forward", "flash2_merge"]
    kinds = {line.split("stablehlo.")[1].split()[0] for line in _operations(found)}
    assert kinds <= {"constant", "custom_call", "reshape", "transpose"}, kinds


def _operations(text: str) -> list[str]:
    return [x for x in text.splitlines() if " stablehlo." in x]


def test_look_ups_of_pages_have_stages_of_their_own():
    config = Config(forward=Blocks(16, 64, num_warps=2, num_stages=3))
    text = program(90, jnp.bfloat16, 64, config=config)
    assert re.findall(r"num_stages = (\d+)", text)[0] == "5"


def test_sequences_of_long_tables_are_cut_in_short_parts():
    """Whatever their lengths are, programs of 8,192 keys at most; two of 16,384."""
    assert not parts_of(96, 8192)
    assert parts_of(96, 16384) == 2


def test_a_last_turn_of_few_programs_is_avoided():
    """Of 512 programs an H100 runs 396 at once; all, if they have fewer registers."""
    assert parts_of(64, 4096) == 2
    assert not parts_of(64, 4096, jnp.int8)


def test_small_pages_of_bytes_have_parts_for_bound_registers():
    """Four programs of 128 threads of 128 registers: 512 of them run at once."""
    assert parts_of(16, 32768, jnp.int8) == 6
    assert parts_of(16, 32768, jnp.int8, page=16) == 4


@pytest.mark.parametrize(("keys", "loops"), [(8192, 1), (16384, 3)])
def test_few_blocks_of_keys_have_one_loop(keys, loops):
    """More have one for those without a mask, too, and one that begins again."""
    text = lowered(90, jnp.bfloat16, 64, keys=keys, config=Config(splits=8))
    assert text.count("scf.for") == loops


def parts_of(count: int, keys: int, dtype=jnp.bfloat16, page: int = 64) -> int | None:
    """Of each of so many sequences of 8 key heads, which fill the GPU by themselves."""
    ints = functools.partial(struct, dtype=jnp.int32)
    pools = {
        f"{x}_pages": struct(8, page, 8, 128, dtype=dtype) for x in ("key", "value")
    }
    data = pools | {"query": struct(count, 1, 32, 128)}
    data |= {
        "page_table": ints(count, keys // page),
        "key_value_seq_lengths": ints(count),
    }

    def call(data):
        return paged_attention(**data, implementation="triton")

    text = lower_for_gpu(call, data, device=GPUS[90])
    found = re.findall(rf"tensor<(\d+)x{count}x8x4x128xf32>|$", text)
    return int(found[0]) if found[0] else None


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
    # One loop, of so few blocks; and one load of queries.
    assert loads.count("512") == loads.count("64") == 2
