"""Estimates of shared memory, beside what compilers took of the same kernels."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import attention
from pallas_kernels.configs import Blocks
from pallas_kernels.triton import estimates, tuning
from tests.lowering import lower_for_gpu
from tests.triton.test_gpu_classes import CLASSES

COMPILED = json.loads(Path(__file__).with_name("compiled.json").read_text())
ROUNDED = 0.06  # KiB: many numbers there have one digit behind the point


@pytest.mark.parametrize("products", ["mma.sync", "tcgen05", "wgmma"])
def test_estimates_are_near_what_compilers_took(products):
    """Never below it, and at most 1.3 times it."""
    wrong = []
    for row in COMPILED[products]:
        kernel, (*blocks, left), head, itemsize, pairs, bits, took, *looped = _full(row)
        blocks = Blocks(*blocks, left_in_registers=left)
        heads = (head, head) if isinstance(head, int) else tuple(head)
        more = {"products": products, "has_bits": bool(bits)}
        more["looped"] = "t" if looped else "s"
        sizes = kernel, blocks, heads, itemsize, pairs
        estimate = estimates.shared_memory(*sizes, **more) / 1024
        if not took - ROUNDED <= estimate <= 1.3 * took + ROUNDED:
            wrong.append(f"{row}: {estimate:.2f} KiB")
    assert not wrong, "\n".join(wrong)


def _full(row):
    """With the fifth number of blocks, what is left in registers."""
    kernel, blocks, *others = row
    return kernel, [*blocks, 0][:5], *others


@pytest.mark.parametrize("products", ["mma.sync", "tcgen05", "wgmma"])
def test_gradients_of_operands_are_among_them_in_several_stages(products):
    rows = [x for x in COMPILED[products] if x[0] == "dbias" and x[1][3] > 1]
    assert len([x for x in rows if x[-1] == "t"]) > 20
    assert len([x for x in rows if x[-1] != "t"]) > 100


def test_programs_of_distances_have_square_tiles():
    need = functools.partial(estimates.shared_memory, "dbias", heads=(64, 64))
    need = functools.partial(need, itemsize=2)
    square = need(Blocks(64, 64, 4, 2))
    for blocks in (Blocks(64, 128, 4, 2), Blocks(128, 64, 4, 2)):
        assert need(blocks, looped="e") == square < need(blocks)


def test_kernels_say_what_they_loop_over(monkeypatch):
    """Of queries for what keys alone have, of keys for rows and tiles, of diagonals."""
    seen, choose = [], tuning.choose

    def spy(kernel, config, **options):
        if kernel == "dbias":
            seen.append(options["looped"])
        return choose(kernel, config, **options)

    monkeypatch.setattr(tuning, "choose", spy)
    x, table = (jax.ShapeDtypeStruct(n, jnp.float32) for n in ((2, 64, 2, 64), (2, 8)))

    def of_bias(bias, x):
        return attention(x, x, x, bias=bias, implementation="triton")

    def of_table(table, x):
        def added(s, b, h, q, kv):
            return s + table[h, jnp.clip(abs(q - kv), 0, 7)]

        return attention(x, x, x, score_mod=added, implementation="triton")

    def gradient(call, operand, x):
        return jax.vjp(functools.partial(call, x=x), operand)[1](x)

    for call, shape, looped in (
        (of_bias, (2, 1, 1, 64), "t"),
        (of_bias, (2, 1, 64, 1), "s"),
        (of_bias, (1, 2, 64, 64), "s"),
        (of_table, table.shape, "e"),
    ):
        seen.clear()
        operand = jax.ShapeDtypeStruct(shape, jnp.float32)
        lower_for_gpu(functools.partial(gradient, call), operand, x)
        assert seen == [looped]


# Blocks that fit by their estimate, and that have not been timed on Hopper: kernel,
# head size, bytes of an element and of each pair, those, and what is chosen.
UNTIMED = [
    ("dkv", 64, 4, 4, (64, 128, 8, 3), (64, 128, 8, 2)),
    ("dkv", 128, 4, 5, (32, 128, 8, 2), (32, 64, 4, 2)),
    ("dq", 512, 5.5, 0, (16, 16, 8, 2), (16, 16, 8, 1)),
    ("dbias", 256, 4, 4, (64, 64, 4, 1), (32, 32, 4, 1)),
    ("tangent", 128, 4, 0, (128, 32, 8, 2), (64, 32, 8, 2)),
    ("tangent", 512, 4, 0, (16, 16, 8, 2), (16, 16, 8, 1)),
]


@pytest.mark.parametrize(
    ("kernel", "head", "itemsize", "pairs", "fitting", "chosen"), UNTIMED
)
def test_what_was_not_timed_on_hopper_is_not_chosen(
    kernel, head, itemsize, pairs, fitting, chosen
):
    sizes, gpu = ((head, head), itemsize), CLASSES["H100"]
    assert tuning.fits(kernel, Blocks(*fitting), *sizes, pairs, gpu=gpu)
    options = {"rows": (8192, 8192), "heads": sizes[0], "itemsize": itemsize}
    found = tuning.choose(kernel, None, gpu=gpu, pair_bytes=pairs, **options)
    assert found == Blocks(*chosen)


def test_float32_without_tensor_cores_where_pieces_do_not_fit():
    """Of head size 512 "highest" has no room on 99 KiB, and has on an A100's 163."""
    x = jax.ShapeDtypeStruct((1, 96, 2, 512), jnp.float32)

    def gradients(x, **options):
        call = functools.partial(attention, implementation="triton", **options)
        return jax.vjp(call, x, x, x)[1](x)

    exact = functools.partial(gradients, precision="highest")
    words = (
        "head size 512 in float32 needs 128 KiB of shared memory and this GPU has 99"
    )
    with pytest.raises(ValueError, match=words):
        lower_for_gpu(exact, x, device="NVIDIA L4")
    assert "flash2_dk" in lower_for_gpu(gradients, x, device="NVIDIA L4")
    assert "flash2_dk" in lower_for_gpu(exact, x, device="NVIDIA A100")
