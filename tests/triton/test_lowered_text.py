"""What kernels are lowered to, which only a GPU runs: instructions and addresses.

Asserted of the text of Triton's modules, made for an NVIDIA GPU on any machine.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, attention
from pallas_kernels.configs import KERNELS
from tests.lowering import kernel_modules, lower_for_gpu
from tests.triton.triton_text import Program

B, N, H = 2, 3, 16


def config(splits: int = 1, **more) -> Config:
    blocks = Blocks(16, 16, 4, 1, **more)
    return Config(**dict.fromkeys(KERNELS, blocks), splits=splits)


def lowered(dtype, *, t=40, heads=N, kv_heads=N, bias=None, **arguments):
    """The modules of a forward and a backward pass by name, and their grids."""
    x, kv = (jax.ShapeDtypeStruct((B, t, n, H), dtype) for n in (heads, kv_heads))
    more = () if bias is None else (jax.ShapeDtypeStruct((N, t, t), bias),)
    arguments = {"config": config(), **arguments}

    def run(q, k, v, *bias):
        call = functools.partial(attention, implementation="triton", **arguments)
        out, vjp = jax.vjp(call, q, k, v, *bias)
        return out, vjp(out)

    text = lower_for_gpu(run, x, kv, kv, *more)
    modules = kernel_modules(text)
    grids = re.findall(r"grid_x = (\d+) .*?grid_y = (\d+) .*?grid_z = (\d+)", text)
    grids = [tuple(map(int, grid)) for grid in grids]
    return modules, dict(zip(modules, grids, strict=True))


EXP2 = (
    "{{.reg .f32 e; neg.f32 e, $2; fma.rn.ftz.f32 e, $1, 0f{}, e; "
    "ex2.approx.ftz.f32 $0, e;}}"
)
SCALED = ("3F800000", "3EB8AA3B", "3FB8AA3B")  # 1, log2(e) / 4, log2(e)
FFF = "=f,f,f"
# (assembly, constraints, elements at once) for each way to call a kernel.
PLAIN = {(EXP2.format(SCALED[0]), FFF, 1), (EXP2.format(SCALED[1]), FFF, 1)}
ONE = ("mov.b32 $0, 1;", "=r,r", 1)
BITS = ("mul.hi.u32 $0, $1, $2;", "=r,r,r", 1)
KEPT = (
    "{.reg .pred p; setp.lt.u32 p, $2, 3221225472; selp.f32 $0, $1, 0f00000000, p;}",
    "=f,f,r",
    1,
)
BIASED = {(EXP2.format(SCALED[0]), FFF, 1), (EXP2.format(SCALED[2]), FFF, 1)}
INSTRUCTIONS = {
    "plain": (jnp.float32, {}, {ONE, *PLAIN}),
    "bias": (jnp.float32, {"bias": jnp.float32}, {ONE, *BIASED}),
    "dropout": (
        jnp.bfloat16,
        {"dropout_rate": 0.25, "dropout_rng": jax.random.key(0)},
        {ONE, *PLAIN, BITS, KEPT},
    ),
    "soft cap": (
        jnp.bfloat16,
        {"logits_soft_cap": 1.0},
        {ONE, *BIASED, ("tanh.approx.f32 $0, $1;", "=f,f", 1)},
    ),
    "soft cap of float32": (jnp.float32, {"logits_soft_cap": 1.0}, {ONE, *BIASED}),
    "held": (
        jnp.bfloat16,
        {"config": config(left_in_registers=1)},
        {ONE, *PLAIN, ("", "=r,0,f,f", 2)},
    ),
    "held float32": (
        jnp.float32,
        {"config": config(left_in_registers=1)},
        {ONE, *PLAIN, ("", "=f,0,f", 1)},
    ),
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_assembly(name):
    """All of the GPU's own instructions, letter by letter."""
    dtype, arguments, expected = INSTRUCTIONS[name]
    modules, _ = lowered(dtype, **arguments)
    found = re.findall(
        r'inline_asm "(.*?)" {constraints = "(.*?)", packed_element = (\d)',
        "\n".join(modules.values()),
    )
    assert {(words, at, int(pack)) for words, at, pack in found} == expected


def _programs(module: str, grid):
    for ids in itertools.product(*map(range, grid)):
        yield ids, Program(module, ids)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("t", [40, 48])
def test_addresses_of_the_forward(t, causal):
    """Each program has the queries, outputs and sums of its block, batch and head.

    Under a causal mask the blocks come in reverse order.
    """
    modules, grids = lowered(jnp.bfloat16, t=t, is_causal=causal)
    module, grid = modules["flash2_forward"], grids["flash2_forward"]
    assert grid == (3, N, B)
    rows_first = np.arange(B * t * N * H).reshape(B, t, N, H)
    rows_last = np.arange(B * N * t).reshape(B, N, t)
    for (i, n, b), program in _programs(module, grid):
        i = 2 - i if causal else i
        rows = slice(16 * i, min(16 * (i + 1), t))
        queries, sums = rows_first[b, rows, n], rows_last[b, n, rows]
        ((argument, loaded),) = program.touched("load")
        assert argument == 0
        np.testing.assert_array_equal(loaded.ravel(), queries.ravel())
        (out, stored), (lse, stored_sums) = program.touched("store")
        assert (out, lse) == (3, 4)
        np.testing.assert_array_equal(stored.ravel(), queries.ravel())
        np.testing.assert_array_equal(stored_sums.ravel(), sums.ravel())


@pytest.mark.parametrize("t", [40, 48])
def test_addresses_of_grouped_keys(t):
    """A program of keys has those of its key/value head."""
    modules, grids = lowered(jnp.float32, t=t, heads=6, kv_heads=2)
    module, grid = modules["flash2_dkv"], grids["flash2_dkv"]
    assert grid == (3, 2, B)
    elements = np.arange(B * t * 2 * H).reshape(B, t, 2, H)
    for (j, k, b), program in _programs(module, grid):
        expected = elements[b, 16 * j : 16 * (j + 1), k].ravel()
        touched = (*program.touched("load"), *program.touched("store"))
        assert len(touched) == 4
        for _, found in touched:
            np.testing.assert_array_equal(found.ravel(), expected)


@pytest.mark.parametrize(("t", "splits"), [(40, 1), (48, 1), (40, 2)])
def test_every_result_is_written_once(t, splits):
    """So is every part of one, but for the rows' values that `dq` gives the others."""
    options = {"is_causal": True, "config": config(splits)}
    modules, grids = lowered(jnp.bfloat16, t=t, bias=jnp.float32, **options)
    modules = {n: x for n, x in modules.items() if splits == 1 or n != "flash2_dq"}
    for name, module in modules.items():
        written: dict[int, list[np.ndarray]] = {}
        for _, program in _programs(module, grids[name]):
            for argument, elements in program.touched("store"):
                written.setdefault(argument, []).append(elements.ravel())
        times = 1 if name == "flash2_merge" else splits
        for argument, parts in written.items():
            found = np.sort(np.concatenate(parts))
            sizes = {times * n for n in (B * t * N * H, B * t * N, N * t * t)}
            assert found.size in sizes, (name, argument)
            np.testing.assert_array_equal(found, np.arange(found.size))


def test_padding_is_loaded_as_a_number():
    """Never as whatever lies there: what has a mask has something in its place."""
    modules, _ = lowered(jnp.bfloat16, bias=jnp.float32, is_causal=True)
    for name, module in modules.items():
        loads = re.findall(r"tt\.load ([^:{]*)", module)
        operands = {len(x.split(",")) for x in loads}
        assert operands == {1, 3}, name
