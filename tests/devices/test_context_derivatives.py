"""Divided rows in forward mode, and differentiated twice, against one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Context, attention
from tests.divided import Divided
from tests.tiers import deep, deeply

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="fewer than 4 devices")

TWO = Divided(Context("x", 16, "ring"), (2,))
RING = Divided(Context("x", 16, "ring"), (4,))
MORE = Divided(Context("x", 16, "ring"), (8,))  # a loop, where four have none
GATHER, HEADS = (
    dataclasses.replace(RING, context=Context("x", 16, method))
    for method in ("gather", "heads")
)
HALO = dataclasses.replace(RING, context=Context("x", None, "halo"))
SINKS = np.array([0.3, -0.5, 0.0, 1.0])


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def operands(rows: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    found = (rng.standard_normal((1, rows, 4, 8)) for _ in range(3))
    return (*found, SINKS + seed)


def results(call):
    """(query, key, value, sinks) -> output and log-sum-exp."""

    def run(q, k, v, sinks):
        options = {"is_causal": True, "local_window_size": (40, None)}
        options |= {"return_residual": True, "implementation": "xla"}
        return call(q, k, v, sinks=sinks, **options)

    return run


def gradients(f):
    def loss(*x):
        out, lse = f(*x)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    return jax.grad(loss, (0, 1, 2, 3))


def jvp(f, points, along):
    return jax.jvp(f, points, along)


def jvp_of_one(f, points, along):
    """Along key alone: nothing else moves."""
    q, k, *others = points
    return jax.jvp(lambda k: f(q, k, *others), (k,), along[1:2])


def linearized(f, points, along):
    return jax.linearize(f, *points)[1](*along)


def vmap_of_jvp(f, points, along):
    """Of tangents alone, twice; of keys and tangents."""
    q, k, *others = points
    twice = jax.tree.map(lambda x: jnp.stack([x, 3 * x]), along)
    four = jax.tree.map(lambda x: jnp.stack([x, -x], 1), twice)
    of_tangents = jax.vmap(jax.vmap(lambda *t: jax.jvp(f, points, t)[1]), 1)
    of_keys = jax.vmap(lambda k, t: jax.jvp(f, (q, k, *others), t), (1, 0))
    return of_tangents(*four), of_keys(jnp.stack([k, -k], 1), twice)


def jvp_of_grad(f, points, along):
    return jax.jvp(gradients(f), points, along)


def jvp_of_grad_of_checkpoint(f, points, along):
    return jax.jvp(gradients(jax.checkpoint(f)), points, along)


def vjp_of_jvp(f, points, along):
    """By the tangents too."""
    found, pull = jax.vjp(lambda *x: jax.jvp(f, *x)[1], points, along)
    return pull(jax.tree.map(jnp.sin, found))


def vjp_of_grad(f, points, along):
    return jax.vjp(gradients(f), *points)[1](along)


def vmap_of_vjp_of_grad(f, points, along):
    pull = jax.vjp(gradients(f), *points)[1]
    return jax.vmap(pull)(jax.tree.map(lambda x: jnp.stack([x, 3 * x]), along))


def jvp_of_jvp(f, points, along):
    return jax.jvp(lambda *x: jvp(f, x, along)[1], points, along)


EVERY = (
    *(jvp, jvp_of_one, linearized, vmap_of_jvp, jvp_of_jvp, jvp_of_grad),
    *(jvp_of_grad_of_checkpoint, vjp_of_jvp, vjp_of_grad, vmap_of_vjp_of_grad),
)


@pytest.mark.parametrize(
    ("transformation", "call"),
    [
        *((x, TWO) for x in (jvp_of_one, jvp_of_grad)),
        *deeply(*((x, TWO) for x in (vmap_of_jvp, vjp_of_jvp))),
        *deeply(*((x, RING) for x in EVERY)),
        *deeply(*((x, MORE) for x in (jvp, jvp_of_grad, vjp_of_jvp, vjp_of_grad))),
        *deeply(
            *((x, y) for x in (jvp, jvp_of_grad, vjp_of_jvp) for y in (GATHER, HEADS))
        ),
        *deeply(*((x, HALO) for x in (jvp, vjp_of_grad))),
    ],
)
def test_derivatives(transformation, call):
    """In float64, those of one device."""
    if call.parts > jax.device_count():
        pytest.skip(f"{call.parts} devices")
    rows = 16 * call.parts
    points, along = operands(rows), operands(rows, seed=1)
    found, expected = (
        jax.jit(lambda *x, f=f: transformation(results(f), *x))(points, along)
        for f in (call, attention)
    )
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-11)


@deep
def test_names_in_place_of_devices():
    """`jax.vmap` with the axis's name, as on one GPU."""
    mapped = dataclasses.replace(RING, mapped=True)
    test_derivatives(jvp_of_grad, mapped)
    test_derivatives(vmap_of_jvp, mapped)
