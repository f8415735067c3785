"""The forward kernel in eight bits: interpreted, declined, lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, _api, _fp8, _operation, _vjp, attention, explain
from jax_flash2._operation import Problem
from pallas_kernels.core.axes import Named
from pallas_kernels.mosaic_gpu import hopper, support
from pallas_kernels.mosaic_gpu.hopper import fp8
from tests import mosaic_interpreter, ptxas
from tests.api.test_fp8 import KERNELS, draw, error
from tests.cases import ON_GPU
from tests.lowering import lower_for_gpu, on_gpu
from tests.tiers import deep, deeply

CANNOT = ON_GPU or not mosaic_interpreter.IS_SUPPORTED


def results(call) -> list[np.ndarray]:
    """What the kernel makes of a call in eight bits."""
    structs = _operation.forward_outputs(Problem.of(call, ""), call.operands)
    plan = hopper.plan(call, "forward")
    leaves, tree = jax.tree.flatten(call)

    @jax.jit
    def run(values):
        pairs = zip(values, leaves, strict=True)
        own = tree.unflatten([Named(value, x.axes) for value, x in pairs])
        with support.lowering_context():
            return hopper.forward(plan, own, structs)

    return [np.asarray(x, np.float64) for x in run([x.value for x in leaves])]


# Head size, the factor of queries, arguments. By a factor of 8 some rows leave the
# range of a fixed maximum.
CASES = {
    "causal_and_sharp": (64, 8.0, {"is_causal": True}),
    "plain_and_sharp": (128, 8.0, {}),
    "plain": (64, 1.0, {}),
    "no_sums": (256, 8.0, {"is_causal": True}),
    "lengths": (128, 1.0, {}),
    "window": (64, 1.0, {"is_causal": True, "local_window_size": (70, 0)}),
    "segments": (256, 1.0, {}),
    "one_large_score": (128, 1.0, {}),
    "one_stage": (64, 8.0, {"config": Config(forward=Blocks(64, 128, 4, 1))}),
}


@pytest.mark.parametrize("name", ["causal_and_sharp", *deeply(*[*CASES][1:])])
@pytest.mark.skipif(CANNOT, reason="a GPU runs them, or JAX has no interpreter")
def test_interpreted(name, monkeypatch):
    """Against plain JAX on the same operands; all passes, and values of NaN."""
    mosaic_interpreter.install(monkeypatch, races=name == "lengths")
    h, factor, arguments = CASES[name]
    t, s = {"plain": (70, 512), "one_large_score": (70, 1152)}.get(name, (330, 300))
    if name == "lengths":
        arguments = {
            "query_seq_lengths": jnp.int32([200]),
            "key_value_seq_lengths": jnp.int32([170]),
        }
    if name == "segments":
        rng = np.random.default_rng(3)
        ids = [jnp.sort(jnp.int32(rng.integers(0, 3, (1, n)))) for n in (t, s)]
        arguments = {"query_segment_ids": ids[0], "key_value_segment_ids": ids[1]}
    q, k, v = draw(0, 1, t, 2, h), draw(1, 1, s, 1, h), draw(2, 1, s, 1, h)
    if name == "lengths":
        k, v = (x.at[:, 170:].set(jnp.nan) for x in (k, v))
    if name == "one_large_score":
        # 10 more than others: these are 7 % of a sum, and below the range of bytes
        # beside a fixed base that the first block decides.
        signs = jnp.sign(draw(3, h))
        q, k = q + 2 * signs, k.at[:, 3].set(5 * signs * h**-0.5)
    call = _api.given(q * factor, k, v, precision="fp8", **arguments).checked()
    call = _fp8.in_eight_bits(call)
    out, lse = results(call)
    exact, of_rows = (np.asarray(x, np.float64) for x in _vjp.run(call, "reference"))
    assert error(out, exact) < KERNELS
    finite = np.isfinite(of_rows)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    np.testing.assert_allclose(lse[finite], of_rows[finite], atol=0.02)
    assert name != "lengths" or not mosaic_interpreter.found_races()


def test_order_of_keys():
    """Places 4 t + 2 a + e of each 16 have keys 8 a + 2 t + e; then ones and zeros."""
    v = draw(0, 1, 300, 2, 64).astype(jnp.float8_e4m3fn)
    found = fp8.values(Named(v, ("b0", "s", "k", "d")))
    assert found.axes == ("b0", "k", "d", "s")
    x = np.asarray(found.value, np.float32)
    order = [8 * a + 2 * t + e for t in range(4) for a in (0, 1) for e in (0, 1)]
    wanted = np.zeros((1, 2, 64, 384), np.float32)
    wanted[..., :300] = np.asarray(v, np.float32).transpose(0, 2, 3, 1)
    wanted = wanted.reshape(*wanted.shape[:3], -1, 16)[..., order]
    np.testing.assert_array_equal(x[:, :, :64], wanted.reshape(1, 2, 64, 384))
    assert (x[:, :, 64] == 1).all() and not x[:, :, 65:].any()


SHAPE = jax.ShapeDtypeStruct((1, 2048, 16, 128), jnp.bfloat16)
DECLINED = {
    "soft cap": ({"logits_soft_cap": 5.0}, "lacks terms of the score"),
    "sinks": ({"sinks": np.zeros(16, np.float32)}, "lacks sinks"),
    "max": ({"return_max_logit": True}, "lacks largest scores"),
    "mask": ({"mask": np.ones((2048, 2048), bool)}, "lacks masks of pairs"),
    "head size": (
        {"query": jax.ShapeDtypeStruct((1, 2048, 16, 96), jnp.bfloat16)},
        "head sizes 96 and 128 are not both one of 64, 128, 256",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined(name):
    """By name, and "xla" serves the call."""
    changes, text = DECLINED[name]
    arguments = {"query": SHAPE, "key": SHAPE, "value": SHAPE, **changes}
    if name == "head size":
        arguments["key"] = changes["query"]
    with on_gpu():
        said = explain(**arguments, precision="fp8")
    assert said.startswith("implementation: xla")
    assert f"mosaic_gpu: its FP8 kernel {text}" in said or f"mosaic_gpu: {text}" in said
    assert "triton: dtype float8_e4m3fn" in said


def test_the_kernel_is_chosen():
    """Of both kinds of operands; what it makes has no gradient pass."""
    with on_gpu():
        said = explain(SHAPE, SHAPE, SHAPE, precision="fp8", is_causal=True)
    assert said.startswith("implementation: mosaic_gpu")
    assert "forward: mosaic_gpu" in said and "backward" not in said
    call = functools.partial(attention, precision="fp8", is_causal=True)
    text = lower_for_gpu(call, SHAPE, SHAPE, SHAPE)
    assert text.count("@mosaic_gpu") == 1


@deep
def test_variants_for_ptxas():
    variant = ptxas.eight_bits()["fp8, head size 64, causal"]
    (module,) = variant.modules
    assert len(module) > 10_000
