"""Every kernel variant lowers for NVIDIA GPUs; no GPU is needed to know."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jax_flash2 import Blocks, Config, attention
from pallas_kernels import configs, device, tables
from pallas_kernels.device import Gpu
from pallas_kernels.triton import addresses, estimates, registers, support, tuning
from tests.cases import CASES, by_name
from tests.lowering import kernel_modules, lower_for_gpu, on_gpu
from tests.tiers import deep, deeply

GPUS = ("NVIDIA H200", "NVIDIA L4")
H200 = Gpu.named("NVIDIA H200")


# Every feature, since each is in four of the seven pairwise cases; and heads of one
# piece, of two, of other values, with kernels for each gradient, and beyond 256.
FIRST = (
    *("pairwise_2", "pairwise_4", "pairwise_5", "pairwise_6"),
    *("head_1_3", "head_72_24", "head_192_128", "head_256", "head_320_512"),
)


def _cases():
    first = [c for c in CASES if c.name in FIRST]
    return [*first, *deeply(*(c for c in CASES if c not in first))]


def forward_and_backward(case, dtype, **options):
    """A function of (query, key, value, cotangents), and its shapes.

    It also gives the gradients of a bias, of slopes and of what a score_mod captures.
    """
    _, arguments = case.inputs(dtype)
    learnt = "bias", "alibi_slopes", "score_mod"
    data = {n: x for n, x in arguments.items() if n in learnt}
    static = {n: x for n, x in arguments.items() if n not in data} | options

    def call(arrays, data):
        more = {"implementation": "triton", "return_residual": True}
        return attention(*arrays, **data, **static, **more)

    def run(q, k, v, cotangents):
        outputs, vjp = jax.vjp(call, (q, k, v), data)
        return outputs, vjp(cotangents)

    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in case.shapes]
    rows = (*case.batch, case.t, case.n)
    cotangents = (
        jax.ShapeDtypeStruct((*rows, case.d), dtype),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    )
    return run, (*shapes, cotangents)


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_every_case_lowers(case):
    index = CASES.index(case)
    dtype = (jnp.bfloat16, jnp.float16, jnp.float32)[index % 3]
    run, shapes = forward_and_backward(case.full(), dtype)
    device = GPUS[index % 2] if max(case.h, case.d) <= 256 else GPUS[0]
    text = lower_for_gpu(run, *shapes, device=device)
    heads = (sum(tables.pieces(case.h)), sum(tables.pieces(case.d)))
    with on_gpu(device):
        kernels = set(tuning.kernels(heads)) - {"dbias"}
    for kernel in kernels:
        assert f"flash2_{kernel}" in text
    # A kernel for each; a score_mod captures two.
    operands = case.has("bias") + case.has("alibi_slopes") + 2 * case.has("score_mod")
    merges = "flash2_merge" in text  # where the keys of so few heads are divided
    assert text.count("__gpu$xla.gpu.triton") == len(kernels) + operands + merges


def _programs(text: str) -> list[int]:
    """How many programs each kernel of a module starts."""
    grids = re.findall(
        r"grid_x = (\d+) : i32, grid_y = (\d+) : i32, grid_z = (\d+)", text
    )
    return [math.prod(map(int, grid)) for grid in grids]


@pytest.mark.parametrize("name", ["segments", "mask_full"])
def test_block_tables_add_no_programs(name):
    case = by_name(name).full()
    blocks = Blocks(64, 64, 4, 2)
    options = {"config": Config(forward=blocks, dkv=blocks, dq=blocks)}
    run, shapes = forward_and_backward(case, jnp.bfloat16, **options)
    without = dataclasses.replace(case, arguments=lambda rng, case: {})
    plain, _ = forward_and_backward(without, jnp.bfloat16, **options)
    programs = _programs(lower_for_gpu(run, *shapes))
    assert len(programs) == 3
    assert programs == _programs(lower_for_gpu(plain, *shapes))


def _products(text: str) -> dict[str, list[str]]:
    """For each kernel of a module the operands of its products, and how they count."""
    pattern = r"tt\.dot [^:]*?(?:inputPrecision = (\w+) )?: tensor<\d+x\d+x(\w+)>"
    return {
        name: [f"{x} {how}" if x == "f32" else x for how, x in re.findall(pattern, t)]
        for name, t in kernel_modules(text).items()
    }


@pytest.mark.parametrize(
    ("dtype", "precision", "operands", "times"),
    [
        (jnp.float32, None, "f32 tf32", 1),
        *deeply(
            (jnp.float32, "default", "f32 tf32", 1),
            (jnp.float32, "high", "f32 tf32", 1),
        ),
        (jnp.float32, "highest", "bf16", 6),  # in three pieces each
        (jnp.bfloat16, "highest", "bf16", 1),
        *deeply((jnp.float16, None, "f16", 1)),
    ],
)
def test_precision_reaches_the_kernel(dtype, precision, operands, times):
    """Every product of every kernel is made as the caller's precision says."""
    every = dict.fromkeys(configs.KERNELS, Blocks(16, 16, 4, 1))
    run, shapes = forward_and_backward(
        *(by_name("dropout_bias"), dtype),
        **{"precision": precision, "config": Config(**every)},
    )
    found = _products(lower_for_gpu(run, *shapes))
    # Loops (with a mask, without; the forward may begin again) times products of each.
    counts = {"forward": 3 * 2, "dq": 2 * 3, "dkv": 2 * 4, "dbias": 2 * 2}
    assert found == {
        f"flash2_{name}": count * times * [operands] for name, count in counts.items()
    }


def test_more_programs_than_a_grid_axis_holds():
    """Batch times heads beyond 65,535, the limit of all grid axes but the first."""
    x = jax.ShapeDtypeStruct((70_000, 16, 1, 16), jnp.bfloat16)
    text = lower_for_gpu(functools.partial(attention, implementation="triton"), x, x, x)
    grid = {axis: int(size) for axis, size in re.findall(r"grid_(.) = (\d+)", text)}
    assert grid["x"] * grid["y"] * grid["z"] == 70_000
    assert max(grid["y"], grid["z"]) <= 65_535


def test_lowers_for_several_described_gpus():
    """Inside `shard_map` no device need be there: each runs the kernels on its part."""
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    kinds = (AxisType.Auto,)
    mesh = AbstractMesh((4,), ("x",), axis_types=kinds, abstract_device=gpu)
    call = functools.partial(attention, implementation="triton", is_causal=True)
    call = jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    x = jax.ShapeDtypeStruct((8, 64, 2, 64), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(call).trace(x, x, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (x for x in text.splitlines() if "__gpu$xla.gpu.triton" in x)
    assert "tensor<2x64x2x64xbf16>" in line.split(" : ")[-1]


def test_a_gpu_with_too_little_shared_memory_says_so(monkeypatch):
    x = jax.ShapeDtypeStruct((1, 64, 1, 512), jnp.float32)
    call = functools.partial(attention, implementation="triton")
    assert "flash2_forward" in lower_for_gpu(call, x, x, x, device="NVIDIA L4")
    small = dataclasses.replace(Gpu.named("NVIDIA L4"), shared_memory=80 << 10)
    monkeypatch.setattr(device, "gpu", lambda: small)
    words = r"head size 512 in float32 needs \d+ KiB .* this GPU has 80"
    call = functools.partial(attention, implementation="triton")  # traced anew
    with pytest.raises(ValueError, match=words):
        lower_for_gpu(call, x, x, x, device="NVIDIA L4")
    half = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    assert "flash2_forward" in lower_for_gpu(call, half, half, half, device="NVIDIA L4")


def test_blocks_are_not_larger_than_the_rows():
    blocks = tuning.choose(
        "forward", None, rows=(5, 33), heads=(64, 64), itemsize=2, gpu=H200
    )
    assert (blocks.block_q, blocks.block_kv) == (16, 64)


def test_the_callers_blocks_are_taken():
    wanted = configs.Blocks(32, 16, num_warps=2, num_stages=1)
    config = configs.Config(dq=wanted)
    options = {"rows": (99, 99), "heads": (64, 64), "itemsize": 2, "gpu": H200}
    assert tuning.choose("dq", config, **options) is wanted
    assert tuning.choose("dkv", config, **options) is not wanted
    both = configs.Config(dkv=wanted, dv=configs.Blocks(16, 16, 4, 1))
    options["heads"] = (256, 256)
    assert tuning.choose("dk", both, **options) is wanted
    assert tuning.choose("dv", both, **options) is both.dv


@pytest.mark.parametrize("most", [None, 128])
def test_a_bound_on_registers_reaches_every_kernel(most):
    blocks = configs.Blocks(64, 64, 4, 2, most)
    config = configs.Config(**dict.fromkeys(configs.KERNELS, blocks))
    case = by_name("bias_shared")
    run, shapes = forward_and_backward(case, jnp.bfloat16, config=config)
    text = lower_for_gpu(run, *shapes)
    kernels = text.count("__gpu$xla.gpu.triton")
    assert text.count("ttg.maxnreg") == (kernels if most else 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *deeply(jnp.float32)])
@pytest.mark.parametrize("count", [*deeply(1), 2])
@pytest.mark.parametrize(
    ("kernel", "head"),
    [("forward", 128), ("dq", 128), ("dkv", 128), ("dk", 256), ("dv", 256)],
)
def test_left_operands_stay_in_registers(monkeypatch, kernel, head, count, dtype):
    """Each once in a kernel, which then takes less shared memory."""
    found, in_registers = [], support.in_registers

    def spy(x):
        found.append(x.shape)
        return in_registers(x)

    monkeypatch.setattr(support, "in_registers", spy)
    blocks = configs.Blocks(64, 64, num_warps=4, num_stages=3)
    kept = dataclasses.replace(blocks, left_in_registers=count)
    x = jax.ShapeDtypeStruct((1, 512, 2, head), dtype)

    def gradients(q, k, v):
        config = configs.Config(
            **dict.fromkeys(configs.KERNELS, blocks) | {kernel: kept}
        )
        call = functools.partial(attention, implementation="triton", config=config)
        return jax.vjp(call, q, k, v)[1](q)

    lower_for_gpu(gradients, x, x, x)
    assert found == min(count, estimates.LEFT[kernel]) * [(64, head)]
    heads = head, head
    need = functools.partial(estimates.shared_memory, kernel, heads=heads, itemsize=2)
    assert need(kept) < need(blocks)


def test_only_gpus_of_capability_9_hold_blocks_of_a_table():
    x = jax.ShapeDtypeStruct((8, 4096, 16, 128), jnp.bfloat16)

    def gradients(q, k, v):
        call = functools.partial(attention, implementation="triton", is_causal=True)
        return jax.vjp(call, q, k, v)[1](q)

    kept = [  # by the constraints of what keeps them there
        "=r,0,f,f" in lower_for_gpu(gradients, x, x, x, device=f"NVIDIA {kind}")
        for kind in ("H200", "H100", "A100", "L4", "B200")
    ]
    assert kept == [True, True, False, False, False]


def test_kernels_lower_without_private_names(monkeypatch):
    config = configs.Config(forward=configs.Blocks(64, 64, 4, 2, 128))
    run, shapes = forward_and_backward(
        by_name("bias_shared"), jnp.bfloat16, config=config
    )
    text = lower_for_gpu(run, *shapes)
    assert text.count("extsi") == text.count("__gpu$xla.gpu.triton")  # of a start
    monkeypatch.setattr(registers, "register_lowering", None)
    monkeypatch.setattr(addresses, "pallas", None)
    jax.clear_caches()
    with pytest.warns(UserWarning, match="slower"):
        text = lower_for_gpu(run, *shapes)
    assert "flash2_forward" in text
    assert "ttg.maxnreg" not in text
    assert "extsi" not in text
    jax.clear_caches()


@deep
def test_a_bound_on_registers_changes_no_bit():
    """Interpreted, where there are none; their number is a tuner's matter on a GPU."""
    x = jax.random.normal(jax.random.key(0), (1, 40, 2, 16))

    def run(**bound):
        blocks = configs.Blocks(16, 16, 4, 1, **bound)
        every = dict.fromkeys(configs.KERNELS, blocks)
        options = {"config": configs.Config(**every, interpret=True)}
        return jax.vjp(functools.partial(attention, **options), x, x, x)

    (plain, plain_vjp), (bounded, bounded_vjp) = run(), run(max_registers=64)
    np.testing.assert_array_equal(plain, bounded)
    for a, b in zip(plain_vjp(plain), bounded_vjp(plain), strict=True):
        np.testing.assert_array_equal(a, b)


def test_static_masks_add_no_operands():
    """Causal and window masks are evaluated in the kernel from its row numbers."""
    case = by_name("window_causal")
    run, shapes = forward_and_backward(case, jnp.bfloat16)
    text = lower_for_gpu(run, *shapes)
    calls = [x for x in text.splitlines() if "__gpu$xla.gpu.triton" in x]
    operands = sorted(x.split("(")[1].split(")")[0].count("%") for x in calls)
    assert operands == [3, 6, 7]  # q k v; + lse delta do; + o lse do dlse
    assert np.all([("i1>" not in x.split(" : ")[-1]) for x in calls])
