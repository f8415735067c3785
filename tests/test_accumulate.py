"""Rows whose later scores are far from those of their first blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import attention
from pallas_kernels.core import flash2
from tests.cases import BACKENDS, ON_GPU, Case
from tests.test_attention import DTYPES, check_error_rule

# What is added to the scores of each quarter of the keys. The last is visited first.
LEVELS = {
    "equal": (0, 0, 0, 0),
    "falling": (-30, -60, -90, 0),
    "beyond_float16": (20, 0, 0, 0),
    "rising": (3, 6, 9, 0),
    "beyond_the_limit": (0, 40, 0, 0),
    "beyond_float32": (0, 0, 300, 0),
    "far_below": (-300, -300, -300, -300),
    "nothing_first": (0, 1, 2, -np.inf),
    "nothing_first_and_far_below": (-300, -301, -302, -np.inf),
    "nothing_first_and_far_above": (300, 301, 302, -np.inf),
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
    """Every level in every dtype where kernels are compiled; elsewhere in one."""
    for i, name in enumerate(LEVELS):
        for dtype in DTYPES if ON_GPU else [DTYPES[i % 3]]:
            yield name, dtype


@pytest.mark.parametrize(("name", "dtype"), list(_problems()))
def test_levels(name, dtype, record_property):
    check_error_rule(_case(name), dtype, BACKENDS, record_property)


@pytest.mark.parametrize(
    "more",
    [
        {"is_causal": True, "query_offset": 40},
        {"local_window_size": (20, 5), "query_offset": 20},
        {"logits_soft_cap": 400.0, "sinks": np.float32([1.0, 250.0])},
        {"dropout_rate": 0.3, "dropout_rng": jax.random.PRNGKey(0)},
    ],
    ids=["causal", "window", "cap_and_sinks", "dropout"],
)
@pytest.mark.parametrize("name", ["beyond_float32", "nothing_first_and_far_above"])
def test_levels_with_others(name, more, record_property):
    check_error_rule(_case(name, **more), "bfloat16", BACKENDS, record_property)


def _attend(name: str, dtype=jnp.bfloat16):
    case = _case(name).full() if ON_GPU else _case(name)
    (q, k, v), arguments = case.inputs(dtype)
    return np.asarray(attention(q, k, v, **arguments, **BACKENDS["triton"]), np.float32)


def test_the_rows_are_begun_again(monkeypatch):
    """The cases above are right because of that, and of nothing else."""
    monkeypatch.setattr(flash2, "in_range", lambda state, dtype: state.l == state.l)
    jax.clear_caches()
    assert np.isfinite(_attend("rising")).all()
    assert not np.isfinite(_attend("beyond_float32")).all()
    monkeypatch.undo()
    jax.clear_caches()
    assert np.isfinite(_attend("beyond_float32")).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_range_is_of_the_products(dtype):
    sums = jnp.asarray([0.0, 0.4, 1.0, 2.0**14, 2.0**17, 2.0**39, 2.0**41, jnp.nan])
    state = flash2.State(sums, sums, sums[:, None])
    most = 2.0**15 if dtype == jnp.float16 else 2.0**40
    expected = [0.5 <= x <= most for x in sums.tolist()]
    assert flash2.in_range(state, dtype).tolist() == expected
