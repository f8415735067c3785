"""Tangents of a call: kernels against the reference in float64, by the error rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, Context, attention, explain
from pallas_kernels.device import Gpu
from pallas_kernels.triton import estimates, tuning
from tests import tolerances
from tests.cases import BACKENDS, CASES, INTERPRETED, ON_GPU, PAIRWISE, by_name
from tests.divided import Divided
from tests.functions import is_data
from tests.kernels.runners import DTYPES
from tests.lowering import kernel_modules, lower_for_gpu, on_gpu
from tests.oracle import OPERANDS
from tests.tiers import deep, deeply

# In the first tier, with every feature; interpreted, each takes seconds.
FIRST = ("pairwise_0",)
SMALL = Blocks(16, 16, 4, 1)
REST = [x for x in CASES if x.h <= 96 and x.name not in FIRST]


def _inputs(case, dtype):
    """Operands and tangents by name, and the other arguments."""
    arrays, arguments = case.inputs(dtype)
    operands = dict(zip(("query", "key", "value"), arrays, strict=True))
    for name in (*OPERANDS, "score_mod"):
        if is_data(arguments.get(name)):
            operands[name] = jax.tree.map(jnp.asarray, arguments.pop(name))
    rng = np.random.default_rng(1)
    tangents = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), operands
    )
    return operands, tangents, arguments


def _pushed(operands, tangents, arguments, call=attention, **options):
    """Output, log-sum-exp and their tangents, as float64 arrays."""

    @jax.jit
    def run(operands, tangents):
        def results(operands):
            return call(**operands, **arguments, **options, return_residual=True)

        return jax.jvp(results, (operands,), (tangents,))

    (_, lse), (do, dlse) = run(operands, tangents)
    named = {"lse": lse, "tangent": do, "lse tangent": dlse}
    return {name: np.asarray(x, np.float64) for name, x in named.items()}


def _exact(operands, tangents, arguments):
    """Those of the reference in float64, with the size of the terms of sums."""
    wide, along = (
        jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        for arrays in (operands, tangents)
    )
    more = {"implementation": "reference", "precision": "highest"}
    found = _pushed(wide, along, arguments, **more)
    # Of values that are the unit vectors the output is the probabilities.
    *batch, s, heads, _ = wide["value"].shape
    units = jnp.broadcast_to(jnp.eye(s)[:, None], (*batch, s, heads, s))

    @jax.jit
    def probabilities(operands):
        return attention(**{**operands, "value": units}, **arguments, **more)

    p, dp = jax.jvp(probabilities, (wide,), (along,))
    p, dp = (np.moveaxis(np.asarray(x), -2, -3) for x in (p, dp))
    mu = np.moveaxis(found["lse tangent"], -1, -2)[..., None]
    group = p.shape[-3] // heads
    v, dv = (
        np.moveaxis(np.asarray(x["value"]).repeat(group, -2), -2, -3)
        for x in (wide, along)
    )
    squares = (dp**2 + (p * mu) ** 2) @ v**2 + p**2 @ dv**2
    weighted = np.where(p > 0, dp + p * mu, 0.0)
    terms = {
        "tangent": np.moveaxis(np.sqrt(squares), -2, -3),
        "lse tangent": np.moveaxis(np.sqrt((weighted**2).sum(-1)), -1, -2),
    }
    return found | {f"{name} terms": x for name, x in terms.items()}


def check(case, dtype, record_property, **options):
    options = {**BACKENDS["triton"], **options}
    operands, tangents, arguments = _inputs(case, jnp.dtype(dtype))
    actual = _pushed(operands, tangents, arguments, **options)
    plain = _pushed(operands, tangents, arguments, implementation="reference")
    with jax.enable_x64(True):
        exact = _exact(operands, tangents, arguments)
    unit = tolerances.unit_roundoff(dtype)
    found = tolerances.check(actual, exact, plain, unit)
    record_property("share of the allowed error", float(max(found.values())))


def _problems():
    for number, case in enumerate([*map(by_name, FIRST), *REST]):
        for dtype in DTYPES if ON_GPU else DTYPES[:1]:
            is_deep = not ON_GPU and number >= len(FIRST)
            shaped = case.full() if ON_GPU else case
            marks = [deep] if is_deep else []
            yield pytest.param(shaped, dtype, id=f"{case.name}-{dtype}", marks=marks)


@pytest.mark.parametrize(("case", "dtype"), list(_problems()))
def test_error_rule(case, dtype, record_property):
    check(case, dtype, record_property)


@pytest.mark.parametrize("dtype", deeply("bfloat16", "float16"))
def test_error_rule_of_two_bytes(dtype, record_property):
    check(PAIRWISE[0], dtype, record_property)


@deep
def test_error_rule_of_a_ring(record_property):
    """The kernel for the keys of each device, and its tangents merged."""
    case = dataclasses.replace(by_name("sinks"), t=192, s=192)
    ring = Divided(Context("x", 32, "ring"), (2,))
    check(case, "float32", record_property, call=ring)


@deep
def test_keys_in_parts(record_property):
    """A sink is in one of them alone."""
    config = None if ON_GPU else INTERPRETED
    config = dataclasses.replace(config or Config(), splits=2)
    case = by_name("sinks")
    check(case.full() if ON_GPU else case, "float32", record_property, config=config)


def test_nothing_of_dropped_keys_comes_through():
    """NaN in a key that a mask of pairs drops for all, and in its tangents."""
    rng = np.random.default_rng(0)
    shapes = [(80, 1, 16), (40, 1, 16), (40, 1, 16)]
    operands, tangents = (
        [jnp.asarray(rng.standard_normal(x), jnp.float32) for x in shapes]
        for _ in range(2)
    )
    mask = (rng.random((80, 40)) < 0.8) & (np.arange(40) != 7)

    @jax.jit
    def run(operands, tangents):
        def call(*operands):
            return attention(*operands, mask=mask, **BACKENDS["triton"])

        return jax.jvp(call, operands, tangents)

    def dirty(q, *of_keys):
        return [q, *(x.at[7].set(jnp.nan) for x in of_keys)]

    found = run(dirty(*operands), dirty(*tangents))
    for a, b in zip(found, run(operands, tangents), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_score_of_minus_infinity_has_no_tangent():
    """Whatever the derivative of a function is there: of log(0) it is infinite."""
    rng = np.random.default_rng(0)
    q, k, v = jnp.asarray(rng.standard_normal((3, 20, 1, 16)), jnp.float32)
    gate = jnp.asarray(np.arange(20) % 3, jnp.float32)

    def pushed(options):
        def call(*operands):
            *operands, gate = operands

            def gated(score, b, h, i, j):
                return score + jnp.log(gate[j])

            return attention(*operands, score_mod=gated, **options)

        tangents = q, k, v, jnp.ones_like(gate)
        return jax.jit(lambda *x: jax.jvp(call, x, tangents)[1])(q, k, v, gate)

    found, expected = map(pushed, (BACKENDS["triton"], BACKENDS["xla"]))
    assert np.isfinite(expected).all()
    atol = 2e-2 if ON_GPU else 1e-5  # TF32
    np.testing.assert_allclose(found, expected, rtol=atol, atol=atol)


def test_a_bias_alone_has_a_tangent():
    """XLA may round scores anew where it asks which of them is the largest."""
    rng = np.random.default_rng(0)
    q, k, v = jnp.asarray(rng.standard_normal((3, 2, 32, 4, 8)), jnp.float32)
    bias, along = jnp.asarray(rng.standard_normal((2, 4, 32, 32)), jnp.float32)

    def pushed(implementation):
        def call(bias):
            options = {"implementation": implementation, "precision": "highest"}
            options |= {"return_residual": True, "config": Config(SMALL)}
            return attention(q, k, v, bias, **options)

        return jax.jvp(call, (bias,), (along,))[1]

    for a, b in zip(pushed("xla"), pushed("reference"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@deep
def test_tables_of_grouped_heads():
    """With few queries heads of a group are rows, but where each has its own table."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((5, 4, 16)), jnp.float32)
    k, v = jnp.asarray(rng.standard_normal((2, 20, 2, 16)), jnp.float32)
    table, along = jnp.asarray(rng.standard_normal((2, 4, 8)), jnp.float32)
    kept = jnp.asarray(np.arange(32).reshape(4, 8) % 3 > 0)

    def pushed(options):
        def call(table):
            return attention(
                *(q, k, v),
                score_mod=lambda s, b, h, i, j: s + table[h, abs(i - j) // 3],
                mask_mod=lambda b, h, i, j: kept[h, (i * j) % 8],
                return_residual=True,
                **options,
            )

        return jax.jit(lambda x: jax.jvp(call, (x,), (along,)))(table)

    found, expected = map(pushed, (BACKENDS["triton"], BACKENDS["xla"]))
    atol = 2e-2 if ON_GPU else 1e-5  # TF32
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=atol, atol=atol)


@pytest.mark.parametrize(
    ("gpu", "itemsize", "expected"),
    [
        ("NVIDIA H200", 2, Blocks(64, 32, 4, 3, None, 2)),
        ("NVIDIA A100-SXM4-80GB", 4, Blocks(16, 16, 8, 2)),
        ("NVIDIA L4", 4, Blocks(16, 16, 8, 2)),
        ("NVIDIA H200", 4, Blocks(64, 32, 8, 2)),
        ("NVIDIA B200", 2, Blocks(64, 32, 4, 3)),
        ("NVIDIA L4", estimates.SPLIT_ITEMSIZE, Blocks(16, 16, 8, 2)),
    ],
)
def test_blocks_follow_from_those_of_dq(gpu, itemsize, expected):
    """Of half the keys, for twice as much is loaded; with two stages at least."""
    sizes = {"rows": (4096, 4096), "heads": (128, 128), "itemsize": itemsize}
    assert tuning.choose("tangent", None, gpu=Gpu.named(gpu), **sizes) == expected


X = jax.ShapeDtypeStruct((4, 2048, 8, 128), jnp.bfloat16)


def _lowered(**options):
    def along(q, k, v):
        def call(*operands):
            return attention(*operands, is_causal=True, **options)

        return jax.jvp(call, (q, k, v), (q, k, v))

    return lower_for_gpu(along, X, X, X)


def test_tangents_are_a_kernel():
    """Beside that of the forward, whichever backend makes it: here one with a cap."""
    text = _lowered(logits_soft_cap=30.0)
    assert text.count("mosaic_gpu_v2") == 1
    assert list(kernel_modules(text)) == ["flash2_tangent"]
    assert "stablehlo.while" not in text


def test_blocks_that_tangents_cannot_have():
    """They are those of dq, and the loops of xla serve where they do not fit."""
    options = {
        "implementation": "triton",
        "config": Config(dq=Blocks(128, 128, 8, 3)),
    }
    text = _lowered(**options)
    assert list(kernel_modules(text)) == ["flash2_forward"]
    assert "stablehlo.while" in text
    with on_gpu():
        lines = explain(X, X, X, **options).splitlines()
    reason = "Config.dq needs at least 256 KiB of shared memory and this GPU has 227"
    assert f"    tangent: xla (not triton: {reason})" in lines


def test_products_of_absent_tangents_are_not_made():
    options = {"implementation": "triton", "config": Config(dq=Blocks(64, 32, 4, 2))}

    def products(*along: int) -> int:
        def tangent(*operands):
            def call(*some):
                given = dict(zip(along, some, strict=True))
                arrays = [given.get(i, x) for i, x in enumerate(operands)]
                return attention(*arrays, **options)

            some = [operands[i] for i in along]
            return jax.jvp(call, some, some)[1]

        modules = kernel_modules(lower_for_gpu(tangent, X, X, X))
        return modules["flash2_tangent"].count("tt.dot ")

    assert [products(*x) for x in ((0, 1, 2), (1, 2), (0, 2), (0,))] == [5, 4, 4, 3]
