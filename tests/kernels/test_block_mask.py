"""Lists of blocks in calls: every backend, blocks of any size, transforms, devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, Context, attention, explain, make_block_mask
from tests import mosaic_interpreter, tolerances
from tests.cases import ON_GPU, by_name
from tests.divided import Divided
from tests.kernels.test_mods import ARRAYS, COTANGENT, B, N, S, T, array, dense
from tests.lowering import lower_for_gpu, on_gpu
from tests.mosaic import with_heads
from tests.tiers import deeply

SMALL, TALL = Blocks(16, 16, 4, 1), Blocks(32, 16, 4, 1)
BACKENDS = {
    "xla": {"implementation": "xla", "config": Config(SMALL, SMALL)},
    "triton": {
        "implementation": "triton",
        "config": Config(TALL, SMALL, dq=SMALL, dbias=SMALL, interpret=not ON_GPU),
    },
}
# Documents in any order.
IDS = jnp.asarray(np.repeat(np.random.default_rng(1).permutation(9), 5), jnp.int32)
MASKS = {
    "window": lambda b, h, q, kv: (q >= kv) & ((q - kv < 9) | (kv < 3)),
    "dilated": lambda b, h, q, kv: (q // 16 - kv // 16) % 2 == 0,
    "documents": lambda b, h, q, kv: IDS[q] == IDS[kv],
    "heads": lambda b, h, q, kv: ((q // 16 - kv // 16) % (h + 1) == 0) & (kv != 7 * b),
    "nothing": lambda b, h, q, kv: (q // 16) % 2 == 2,
}


def results(call, bias, arrays=ARRAYS):
    """The output, and the gradients of query, key, value and bias."""
    out, pull = jax.vjp(call, *arrays, bias)
    return out, *pull(COTANGENT.astype(out.dtype))


def by_matrices(mask_mod, bias):
    def call(q, k, v, bias):
        add = lambda s, b, h, q, kv: s + bias[h, q, kv]  # noqa: E731
        return dense(q, k, v, add, mask_mod)

    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in (*ARRAYS, bias)]
        found = results(call, wide[3], wide[:3])
        return jax.tree.map(np.asarray, found)


def check(found, expected, tolerance=2e-5):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


# Blocks of lists: as the kernels' are, larger ones, and some that they do not divide.
@pytest.mark.parametrize("block", [16, 32, *deeply(48, 64)])
@pytest.mark.parametrize("mask", ["heads", *deeply(*MASKS)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lists_that_are_given(mask, block, backend):
    block_mask = make_block_mask(MASKS[mask], B, N, T, S, block_size=block)
    bias = array(N, T, S)
    call = functools.partial(attention, block_mask=block_mask, **BACKENDS[backend])
    check(results(call, bias), by_matrices(MASKS[mask], bias))


@pytest.mark.parametrize("mask", ["window", *deeply(*MASKS)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lists_that_a_call_makes(mask, backend):
    bias = array(N, T, S)
    call = functools.partial(attention, mask_mod=MASKS[mask], **BACKENDS[backend])
    check(results(call, bias), by_matrices(MASKS[mask], bias))


@pytest.mark.skipif(not mosaic_interpreter.IS_SUPPORTED, reason="JAX 0.12")
@pytest.mark.parametrize("mask", ["dilated", *deeply(*MASKS)])
@pytest.mark.parametrize("block", [128, *deeply(None)])
def test_mosaic_gpu_kernels(mask, block, any_size, monkeypatch):
    """Both passes, beside the loops; block None makes lists in the call."""
    mosaic_interpreter.install(monkeypatch)
    case = dataclasses.replace(by_name("plain"), t=300, s=300, n=2, k=1)
    case = with_heads(case, 64)
    arrays, arguments = case.inputs(jnp.bfloat16)
    mask_mod = {
        "window": lambda b, h, q, kv: (q >= kv) & ((q - kv < 40) | (kv < 3)),
        "dilated": lambda b, h, q, kv: (q // 128 - kv // 128) % 2 == 0,
        "documents": lambda b, h, q, kv: IDS[q // 10] == IDS[kv // 10],
        "heads": lambda b, h, q, kv: (q // 128 - kv // 128) % (h + 2) == 0,
        "nothing": lambda b, h, q, kv: (q // 16) % 2 == 2,
    }[mask]
    arguments["mask_mod"] = mask_mod
    if block is not None:
        del arguments["mask_mod"]
        sizes = case.n if mask == "heads" else None, case.t, case.s
        block_mask = make_block_mask(mask_mod, None, *sizes, block_size=block)
        arguments["block_mask"] = block_mask
    do, dlse = tolerances.cotangents_for(case, jnp.bfloat16)
    found = mosaic_interpreter.evaluate(arrays, (do, dlse), arguments)

    def loops(q, k, v):
        more = {"implementation": "xla", "return_residual": True}
        return attention(q, k, v, **arguments, **more)

    (out, _), pull = jax.vjp(loops, *arrays)
    expected = dict(zip(("out", "query", "key", "value"), (out, *pull((do, dlse)))))
    assert {*expected} <= {*found}
    for name, x in expected.items():
        x = np.asarray(x, float)
        error = np.max(np.abs(found[name].reshape(x.shape) - x))
        assert error <= 0.02 * np.max(np.abs(x)), name
