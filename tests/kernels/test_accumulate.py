"""Rows whose later scores are far from those of their first blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, attention
from pallas_kernels.core import flash2
from tests.cases import BACKENDS, ON_GPU, Case
from tests.kernels.runners import DTYPES
from tests.kernels.test_attention import check_error_rule
from tests.tiers import MAINLY_XLA, deep, deeply

# What is added to the scores of each quarter of the keys. The first is visited first.
LEVELS = {
    "equal": (0, 0, 0, 0),
    "falling": (0, -90, -60, -30),
    "beyond_float16": (0, 20, 0, 0),
    "rising": (0, 3, 6, 9),
    "far_above": (0, 0, 40, 0),
    "beyond_the_limit": (0, 0, 80, 0),
    "beyond_float32": (0, 0, 0, 300),
    "far_below": (-300, -300, -300, -300),
    "masked_by_1e4": (-1e4, -1e4, -1e4, -1e4),
    "nothing_first": (-np.inf, 0, 1, 2),
    "nothing_first_and_far_below": (-np.inf, -300, -301, -302),
    "nothing_first_and_far_above": (-np.inf, 300, 301, 302),
    "masked_by_numbers_first": (-1e10, 0, 0, 0),
    "masked_by_numbers_last": (0, 0, 0, -1e10),
    "masked_by_numbers": (float(np.finfo(np.float32).min) / 4, -1e9, 0, -1e10),
}


class _Levels(Case):
    """Keys in whole blocks, so that a block that is full must be visited first."""

    def full(self):
        return dataclasses.replace(self, t=200, s=512)


def _case(name: str, **more) -> Case:
    def arguments(rng, case):
        bias = np.repeat(np.float32(LEVELS[name]), case.s // 4)
        return {"bias": jnp.asarray(bias[None, None, None]), **more}

    return _Levels(name, arguments, t=24, s=64)


def _problems():
    """Every level in every dtype where kernels are compiled; elsewhere in one.

    Those in bfloat16 are deep there: `test_large_values` has it.
    """
    for i, name in enumerate(LEVELS):
        for dtype in DTYPES if ON_GPU else [DTYPES[i % 3]]:
            is_deep = dtype == "bfloat16" and not ON_GPU
            yield pytest.param(name, dtype, marks=[deep] if is_deep else [])


@pytest.mark.parametrize(("name", "dtype"), list(_problems()))
def test_levels(name, dtype, record_property):
    more = {"return_max_logit": dtype == "float32"}
    check_error_rule(_case(name), dtype, BACKENDS, record_property, **more)


@deep
@pytest.mark.parametrize(
    "more",
    [
        {"local_window_size": (20, 5), "query_offset": 20},
        {"logits_soft_cap": 400.0, "sinks": np.float32([1.0, 250.0])},
        {"is_causal": True, "query_offset": 40},
        {"dropout_rate": 0.3, "dropout_rng": jax.random.PRNGKey(0)},
    ],
    ids=["window", "cap_and_sinks", "causal", "dropout"],
)
@pytest.mark.parametrize("name", ["beyond_float32", "nothing_first_and_far_above"])
def test_levels_with_others(name, more, record_property):
    check_error_rule(_case(name, **more), "bfloat16", BACKENDS, record_property)


def _attend(name: str, dtype=jnp.bfloat16):
    case = _case(name).full() if ON_GPU else _case(name)
    (q, k, v), arguments = case.inputs(dtype)
    return np.asarray(attention(q, k, v, **arguments, **BACKENDS["triton"]), np.float32)


@deep
def test_the_rows_are_begun_again(monkeypatch):
    """The cases above are right because of that, and of nothing else."""
    monkeypatch.setattr(flash2, "in_range", lambda state, dtype: state.m == state.m)
    jax.clear_caches()
    assert np.isfinite(_attend("rising")).all()
    assert not np.isfinite(_attend("beyond_float32")).all()
    monkeypatch.undo()
    jax.clear_caches()
    assert np.isfinite(_attend("beyond_float32")).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_range_is_of_the_products(dtype):
    sums = jnp.asarray([0.0, 0.4, 1.0, 2.0**14, 2.0**17, 2.0**99, 2.0**101, jnp.nan])
    state = flash2.State(jnp.zeros(8), sums[:, None], sums[:, None])
    most = {jnp.float16: 2.0**15, jnp.bfloat16: 2.0**100, jnp.float32: 2.0**18}[dtype]
    expected = [0.5 <= x <= most for x in sums.tolist()]
    assert flash2.in_range(state, dtype).tolist() == expected
    m = jnp.asarray([-jnp.inf, -1e5, -1e4, 0.0, 1e4, 1e5])
    state = flash2.State(m, jnp.ones((6, 1)), jnp.ones((6, 1)))
    near = [dtype != jnp.float16, False, True, True, True, False]
    assert flash2.in_range(state, dtype).tolist() == near


def test_a_sink_far_from_the_scores():
    """Beyond them it takes nearly all of the softmax, below them nothing."""
    m = jnp.asarray([0.0, 0.0, -3000.0])
    state = flash2.State(m, jnp.ones((3, 1)), jnp.ones((3, 2)))
    for sink, out, lse in (
        (1000.0, [0, 0, 0], [1000, 1000, 1000]),
        (-1000.0, [1, 1, 0], [0, 0, -1000]),
    ):
        found, sums = flash2.finish(state, jnp.float32(sink))
        np.testing.assert_allclose(found, np.float32([out, out]).T, atol=1e-6)
        np.testing.assert_allclose(sums, np.float32(lse), rtol=1e-6)


def test_a_log_sum_exp_that_holds_no_sum():
    """So large that the sum's logarithm is rounded away: p is 0, not any number."""
    lse = jnp.asarray([-jnp.inf, -3e10, -2e7, -1e6, 0.0, 1e6, 2e7])
    log2 = np.float32([1, 1, 1, -1e6, 0, 1e6, 1]) * np.float32(np.log2(np.e))
    log2[[0, 1, 2, 6]] = np.inf
    np.testing.assert_allclose(flash2.lse_log2(lse), log2, rtol=1e-6)


@pytest.mark.parametrize("backend", [*MAINLY_XLA, *deeply("reference")])
@pytest.mark.parametrize("level", [-1e9, -3e10, float(np.finfo(np.float32).min)])
def test_a_row_masked_by_numbers(backend, level):
    """Its output is a mean of values; it leaves other rows' gradients alone."""
    case = _case("equal").full() if ON_GPU else _case("equal")
    (q, k, v), _ = case.inputs(jnp.bfloat16)
    bias = np.zeros((1, 1, case.t, case.s), np.float32)
    bias[:, :, 3] = level

    def call(q, k, v):
        options = BACKENDS.get(backend, {"implementation": "reference"})
        return attention(q, k, v, bias=jnp.asarray(bias), **options)

    out, vjp = jax.vjp(call, q, k, v)
    do = jnp.ones_like(out).at[:, 3].set(0.0)
    assert np.isfinite(np.float32(out)).all()
    assert np.abs(np.float32(out[:, 3])).max() <= np.abs(np.float32(v)).max()
    others = jax.vjp(lambda q, k, v: call(q, k, v)[:, 4:], q, k, v)[1]
    wanted = jax.vjp(lambda q, k, v: call(q, k, v)[:, :3], q, k, v)[1]
    parts = [others(do[:, 4:]), wanted(do[:, :3])]
    for found, *rest in zip(vjp(do), *parts, strict=True):
        expected = sum(np.float32(x) for x in rest)
        np.testing.assert_allclose(np.float32(found), expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("beyond_float16", "bfloat16"),
        ("far_above", "bfloat16"),
        ("rising", "float32"),
    ],
)
def test_large_values(name, dtype, backend):
    """Their sums leave the range beside p of up to 2**29, 2**58 and 2**13."""
    case = _case(name).full() if ON_GPU else _case(name)
    (q, k, v), arguments = case.inputs(dtype)
    options = {**arguments, **BACKENDS[backend], "precision": "highest"}
    huge = (v.astype(jnp.float32) * 2.0**118).astype(dtype)
    plain, found = (
        np.asarray(attention(q, k, x, **options), np.float64) for x in (v, huge)
    )
    near = 2.0 * float(jnp.finfo(dtype).eps if dtype == "bfloat16" else 2.0**-10)
    np.testing.assert_allclose(found / 2.0**118, plain, rtol=0, atol=near)


def test_whole_rows_masked_by_numbers():
    """Where one block has all keys, gradients are right however large the numbers."""
    x = jax.random.normal(jax.random.key(0), (1, 20, 1, 8))
    for level in (0.0, -1e6, -1e9):
        bias = jnp.full((1, 1, 1, 20), level)

        def call(v, bias=bias):
            return jnp.sum(attention(x, x, v, bias, implementation="xla"))

        # Each row's probabilities sum to one.
        rtol = 1e-2 if ON_GPU else 1e-4  # TF32
        np.testing.assert_allclose(jnp.sum(jax.grad(call)(x)), 160, rtol=rtol)


@pytest.mark.parametrize("is_causal", [False, True])
def test_alibi_on_both_sides_has_running_maxima(is_causal, monkeypatch):
    """Its best keys lie amid others: with the first ones' maximum it began again."""
    taken = []

    def accumulate(*arguments):
        taken.append(arguments)
        return plain(*arguments)

    plain = flash2.accumulate
    monkeypatch.setattr(flash2, "accumulate", accumulate)
    x = jnp.zeros((1, 328, 2, 16))
    slopes = jnp.asarray([0.5, 2.0])
    blocks = Blocks(64, 64, 4, 2)
    jax.jit(
        lambda x: attention(
            *(x, x, x),
            is_causal=is_causal,
            alibi_slopes=slopes,
            implementation="triton",
            config=Config(forward=blocks, interpret=True),
        )
    ).lower(x)
    assert bool(taken) == is_causal


@pytest.mark.parametrize("above", [0.0, 20.0, 60.0])
def test_a_sink_far_above_the_first_scores(above):
    """Sums are up to 2**100 then (`in_range`), and m 160 powers of two below it."""
    m, total = jnp.float32([-90.0]), 3.0 * 2.0**90
    state = flash2.State(m, jnp.float32([total]), jnp.float32([[2.0 * total]]))
    lse = float(m[0]) * flash2.LN_2 + np.log(total)
    o, joint = flash2.finish(state, jnp.float32([lse + above]))
    share = 1.0 / (1.0 + np.exp(above))
    np.testing.assert_allclose(o, [[2.0 * share]], rtol=1e-4)
    np.testing.assert_allclose(joint, [lse + np.log1p(np.exp(above))], rtol=1e-4)
