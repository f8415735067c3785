"""The largest score of each row (`return_max_logit`) where other tests do not ask.

They do in rows whose later scores are far from the first ones (`test_accumulate`), in
parts of keys (`test_division`), on several devices, and under transformations.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import attention
from tests.cases import BACKENDS, by_name
from tests.kernels.runners import ALIKE, RUNNERS, WITH_GRADIENTS
from tests.tiers import deeply

# Of several blocks of keys in each kernel: most of the largest scores are in those that
# have no running maximum.
LONG = dataclasses.replace(by_name("plain"), batch=(1,), t=70, s=400, n=2, k=1)
_KERNELS = [name for name in WITH_GRADIENTS if name.startswith("mosaic_gpu")]


def _params():
    for name in (*ALIKE, *_KERNELS):
        yield RUNNERS[name].param(LONG, id=f"long-{name}", deep_too=name in ALIKE)
    for name, case in (
        ("proof", by_name("everything")),
        *((x, by_name("mask_full")) for x in _KERNELS),
    ):
        yield RUNNERS[name].param(case, id=f"{case.name}-{name}", deep_too=True)


@pytest.mark.parametrize(("case", "runner"), list(_params()), indirect=["runner"])
def test_error_rule(case, runner, record_property):
    case = case if case is LONG else runner.shaped(case)
    more = {"return_max_logit": True}
    runner.check(case, runner.dtypes[0], record_property, **more)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("residual", [True, *deeply(False)])
def test_it_has_no_derivative(backend, residual):
    """Backward and forward: zeros, and the other results keep theirs."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((1, 20, 1, 16)), "float32")] * 3
    call = functools.partial(
        attention,
        is_causal=True,
        return_residual=residual,
        return_max_logit=True,
        **BACKENDS[backend],
    )

    def total(*arrays):
        return jnp.sum(call(*arrays)[-1])

    def with_others(weight, *arrays):
        out, *_, largest = call(*arrays)
        return jnp.sum(jnp.cos(out)) + weight * jnp.sum(largest)

    for x in jax.jit(jax.grad(total, (0, 1, 2)))(*arrays):
        np.testing.assert_array_equal(x, jnp.zeros_like(x))
    run = jax.jit(jax.grad(with_others, (1, 2, 3)))
    for x, y in zip(run(0.0, *arrays), run(3.0, *arrays), strict=True):
        np.testing.assert_array_equal(x, y)
        assert jnp.any(x != 0)
    found, tangents = jax.jit(lambda *x: jax.jvp(call, x, x))(*arrays)
    assert jnp.all(tangents[-1] == 0) and jnp.all(found[-1] != 0)
    assert jnp.any(tangents[0] != 0)
