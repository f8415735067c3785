"""Blocks of the Mosaic GPU kernels of the backward pass: `Config`, and the table."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, attention, explain
from pallas_kernels import tables
from pallas_kernels.mosaic_gpu import measured, shared_memory
from pallas_kernels.mosaic_gpu.hopper import forward_plan, gradient_blocks
from tests import mosaic_interpreter
from tests.cases import ON_GPU, by_name
from tests.lowering import lower_for_gpu, on_gpu, string_attributes
from tests.mosaic import MOSAIC, check, on_hopper, with_heads
from tests.mosaic_gpu.test_memory import asked as shared_memory_asked
from tests.tiers import deep, deeply

H100 = tables.DEFAULT_GPUS["mosaic_gpu"]
PATHS = sorted(tables.TUNING.glob("mosaic_gpu_*.json"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_table_is_whole_and_its_blocks_fit(path):
    found = json.loads(path.read_text())
    assert tables.table_path("mosaic_gpu", found["gpu"]) == path
    entries = [x for heads in found["crossovers"].values() for x in heads.values()]
    assert all(x["measured"] for x in (*entries, *found["numbers"].values()))
    table = measured.of_gpu(found["gpu"])
    assert set(table.crossovers) == set(measured.CONDITIONS)
    assert set(table.blocks) == set(measured.REGIMES) <= set(found["blocks_measured"])
    for condition in measured.CONDITIONS:
        for head in (8, 32, 64, 80, 128, 192, 256):
            point = table.crossover(condition, head)
            assert point.forward >= 0 and point.backward >= 0
    for kernel, heads in table.blocks.items():
        for head, regimes in heads.items():
            assert set(regimes) == set(measured.REGIMES[kernel])
            for blocks in regimes.values():
                assert unfit(kernel, blocks, head) is None, (kernel, head)


def unfit(kernel: str, blocks: Blocks, head: int, value: int | None = None):
    value = value or (128 if (kernel, head) == ("backward", 256) else head)
    head = 192 if (kernel, head) == ("backward", 256) else head
    with on_gpu(H100):
        if kernel == "forward":
            return forward_plan.unfit(blocks, (head, head), jnp.bfloat16)
        size = {"t": 1024, "s": 1024, "h": head, "d": value}
        pair_values = jnp.bfloat16 if kernel == "dbias" else None
        return gradient_blocks.unfit(kernel, blocks, size, pair_values=pair_values)


def test_every_hopper_gpu_has_a_table():
    known = measured.of_gpu(H100)
    assert known.gpu == H100
    for gpu in ("NVIDIA H200", "NVIDIA GH200 480GB", None):
        assert measured.of_gpu(gpu) == known
    assert math.isinf(known.crossover("documents", 32).forward)


def explained(shape, head, config, value=None, **arguments) -> str:
    """`explain` on an H100, of a call whose forward the Mosaic GPU backend makes."""
    found = []
    q = jax.ShapeDtypeStruct((*shape, head), jnp.bfloat16)
    v = jax.ShapeDtypeStruct((*shape, value or head), jnp.bfloat16)
    with on_gpu(H100):
        found.append(explain(q, q, v, config=config, **arguments))
    return found[0]


FITS = {
    "backward": [
        (64, 64, Blocks(64, 64, 4, 3)),
        (64, 64, Blocks(128, 64, 4, 2)),
        (128, 128, Blocks(64, 64, 4, 2)),
        (160, 160, Blocks(128, 64, 4, 1)),
        (192, 128, Blocks(64, 128, 8, 1)),
    ],
    "dkv": [(200, 144, Blocks(64, 64, 8, 3))],
    "dq": [(256, 256, Blocks(64, 64, 4, 4)), (208, 208, Blocks(64, 128, 4, 2))],
    "dbias": [(64, 64, Blocks(192, 64, 12, 3)), (128, 128, Blocks(64, 128, 4, 2))],
}
FITS = [(kernel, *found) for kernel, entries in FITS.items() for found in entries]


def _name(value) -> str | None:
    if isinstance(value, Blocks):
        numbers = value.block_q, value.block_kv, value.num_stages
        return "_".join(map(str, numbers))
    return None


# One of all kernels; the others are deep.
FIRST = list({x[0]: x for x in FITS}.values())[:1]
OTHERS = deeply(*(x for x in FITS if x not in FIRST))


@pytest.mark.parametrize(
    ("kernel", "head", "value", "blocks"), [*FIRST, *OTHERS], ids=_name
)
def test_the_callers_blocks_lower(kernel, head, value, blocks):
    """Not as others do: the kernels run with them."""
    q = jax.ShapeDtypeStruct((2, 1024, 16, head), jnp.bfloat16)
    v = jax.ShapeDtypeStruct((2, 1024, 16, value), jnp.bfloat16)
    bias = [jax.ShapeDtypeStruct((16, 1024, 1024), jnp.bfloat16)]
    arrays = [q, q, v, *(bias if kernel == "dbias" else [])]

    def loss(*arrays, **options):
        return attention(*arrays, **options).astype(jnp.float32).sum()

    def lowered(config) -> str:
        options = {"config": config, **MOSAIC}
        gradient = jax.grad(functools.partial(loss, **options), range(len(arrays)))
        return lower_for_gpu(gradient, *arrays, device=H100)

    text = lowered(Config(**{gradient_blocks.FIELDS[kernel]: blocks}))
    assert "triton" not in text
    assert text != lowered(None)
    modules = string_attributes(text, "module")
    size = {"t": 1024, "s": 1024, "h": head, "d": value}
    pair_values = jnp.bfloat16 if kernel == "dbias" else None
    declared = gradient_blocks.declared(kernel, blocks, size, pair_values=pair_values)
    need = shared_memory.num_bytes(declared)
    assert need in map(shared_memory_asked, modules)


UNFIT = {
    "rows": ("backward", 64, Blocks(32, 64, 4, 2), "block_q=32 is not 64 or 128"),
    "keys": ("backward", 64, Blocks(64, 32, 2, 2), "block_kv=32 is not 64 or 128"),
    "one": ("dkv", 256, Blocks(64, 128, 8, 2), "block_kv=128 is not 64"),
    "three": ("dbias", 64, Blocks(256, 64, 16, 2), "is not 64, 128 or 192"),
    "warps": ("backward", 64, Blocks(128, 128, 4, 2), "num_warps=4 is not 8"),
    "warps_dkv": ("dkv", 256, Blocks(64, 64, 4, 2), "num_warps=4 is not 8"),
    "stages": ("dq", 256, Blocks(64, 64, 4, 1), "num_stages=1 is less than 2"),
    "columns": ("backward", 64, Blocks(64, 128, 8, 2), "half of block_kv=128"),
    "memory": ("backward", 128, Blocks(128, 128, 8, 2), "387 KiB of shared memory"),
    "registers": ("dq", 256, Blocks(64, 64, 4, 2, 128), "is for the Triton kernels"),
    "left": (
        "backward",
        64,
        Blocks(64, 64, 4, 2, None, 1),
        "left_in_registers is for the Triton kernels",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_blocks_that_the_kernels_cannot_have_go_to_triton(name):
    kernel, head, blocks, words = UNFIT[name]
    assert words in (unfit(kernel, blocks, head) or "")
    field = gradient_blocks.FIELDS[kernel]
    bias = jax.ShapeDtypeStruct((16, 4096, 4096), jnp.bfloat16)
    arguments = {"bias": bias} if kernel == "dbias" else {}
    text = explained((2, 4096, 16), head, Config(**{field: blocks}), **arguments)
    assert text.startswith("implementation: mosaic_gpu")
    of_pass = "gradients of" if kernel == "dbias" else "backward"
    (line,) = (x for x in text.splitlines() if x.strip().startswith(of_pass))
    assert f"triton (not mosaic_gpu: Config.{field}: " in line and words in line


@pytest.mark.parametrize("field", ["dk", "dv", "dq"])
def test_blocks_of_kernels_that_are_not_used_go_to_triton(field):
    """Where one kernel makes all gradients, or those of key and value."""
    blocks = Blocks(64, 64, 4, 2)
    text = explained((2, 2048, 16), 128, Config(**{field: blocks}))
    assert f"Config.{field} is for a kernel of its own" in text
    wide = explained((2, 2048, 16), 256, Config(**{field: blocks}))
    assert ("backward: mosaic_gpu" in wide) == (field == "dq")


def test_the_callers_blocks_are_not_slower_ones():
    """As of the forward: a caller that sets blocks gets the kernel that has them."""
    few = explained((8, 448, 16), 64, None)
    assert "backward: triton (not mosaic_gpu: about" in few
    more = explained((8, 448, 16), 64, Config(dkv=Blocks(64, 64, 4, 2)))
    assert "backward: mosaic_gpu" in more
    lengths = {"key_value_seq_lengths": np.full(64, 150, np.int32)}
    wide = explained((64, 160, 8), 256, None, **lengths)
    assert "backward: triton (not mosaic_gpu: about" in wide
    more = explained((64, 160, 8), 256, Config(dq=Blocks(64, 64, 4, 2)), **lengths)
    assert "backward: mosaic_gpu" in more


interpreted = pytest.mark.skipif(
    ON_GPU or not mosaic_interpreter.IS_SUPPORTED, reason="no interpreter for them"
)
OTHERS = {
    "one_warpgroup": ("segments_causal_gqa", 64, {"dkv": Blocks(64, 64, 4, 3)}),
    "columns": ("causal", 64, {"dkv": Blocks(128, 64, 4, 2)}),
    "one_stage": ("causal", 160, {"dkv": Blocks(64, 64, 4, 1)}),
    "one_stage_of_two": ("segments_causal_gqa", 160, {"dkv": Blocks(64, 128, 8, 1)}),
    "one_stage_in_columns": ("causal", 160, {"dkv": Blocks(128, 64, 4, 1)}),
    "three_stages": ("causal", 208, {"dq": Blocks(128, 64, 8, 3)}),
    "dq_alone": ("causal", 208, {"dq": Blocks(64, 128, 4, 2)}),
    "bias_rows": ("bias_half", 128, {"dbias": Blocks(64, 128, 4, 3)}),
    "bias": ("bias_half", 64, {"dbias": Blocks(192, 64, 12, 3)}),
}


@interpreted
@pytest.mark.parametrize("name", deeply(*OTHERS))
def test_error_rule_with_the_callers_blocks(
    name, monkeypatch, any_size, record_property
):
    from tests.mosaic_gpu.test_interpreted import check as check_interpreted

    case, head, fields = OTHERS[name]
    mosaic_interpreter.install(monkeypatch)
    case = dataclasses.replace(by_name(case), t=200, s=230)
    found = check_interpreted(
        with_heads(case, head), record_property, config=Config(**fields)
    )
    assert ("bias" if "dbias" in fields else "query") in found


@deep
@on_hopper
@pytest.mark.parametrize("name", OTHERS)
def test_error_rule_on_hopper_with_the_callers_blocks(name, any_size, record_property):
    case, head, fields = OTHERS[name]
    case = with_heads(by_name(case), head).full()
    check(case, "bfloat16", record_property, config=Config(**fields))
