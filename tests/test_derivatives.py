"""Forward mode and second derivatives of the xla backend, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import attention
from tests.cases import BACKENDS

T = 20


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def _operands(seed=0):
    """query, key, value, bias, sinks."""
    rng = np.random.default_rng(seed)
    shapes = [(2, T, 4, 8), (2, T, 2, 8), (2, T, 2, 8), (1, 4, T, T), (4,)]
    return tuple(jnp.asarray(rng.standard_normal(s)) for s in shapes)


def _results(q, k, v, bias, sinks, *, implementation):
    ids = jnp.asarray(np.arange(2 * T).reshape(2, T) // 9)
    return attention(
        *(q, k, v), is_causal=True, bias=bias, sinks=sinks, logits_soft_cap=3.0,
        query_segment_ids=ids, return_residual=True, implementation=implementation,
    )  # fmt: skip


def _jvp(f, operands, tangents):
    return jax.jvp(f, operands, tangents)


def _jvp_of_jit(f, operands, tangents):
    return jax.jit(functools.partial(jax.jvp, jax.jit(f)))(operands, tangents)


def _linearize(f, operands, tangents):
    out, linear = jax.linearize(f, *operands)
    return out, linear(*tangents)


def _jvp_of_vmap(f, operands, tangents):
    """Of a query and a bias for each element; key and value are shared."""

    def mapped(q, k, v, bias, sinks):
        call = jax.vmap(f, (0, None, None, 1, None), 1)
        return call(jnp.stack([q, 2 * q]), k, v, jnp.stack([bias, -bias], 1), sinks)

    return jax.jvp(mapped, operands, tangents)


def _vmap_of_jvp(f, operands, tangents):
    """Of tangents alone, and of the operands' last alone."""
    twice = [jnp.stack([x, 3 * x]) for x in tangents]
    of_tangents = jax.vmap(lambda *t: jax.jvp(f, operands, t)[1])(*twice)
    *others, sinks = operands
    of_sinks = jax.vmap(lambda s: jax.jvp(f, (*others, s), tangents))(
        jnp.stack([sinks, -sinks])
    )
    return of_tangents, of_sinks


def _jvp_of_jvp(f, operands, tangents):
    return jax.jvp(lambda *x: jax.jvp(f, x, tangents)[1], operands, tangents)


def _jvp_of_grad(f, operands, tangents):
    def loss(*x):
        out, lse = f(*x)
        return jnp.sum(jnp.cos(out)) + jnp.sum(jnp.sin(lse))

    return jax.jvp(jax.grad(loss, (0, 1, 2, 3, 4)), operands, tangents)


@pytest.mark.parametrize(
    "transformation",
    [
        _jvp,
        _jvp_of_jit,
        _linearize,
        _jvp_of_vmap,
        _vmap_of_jvp,
        _jvp_of_jvp,
        _jvp_of_grad,
    ],
)
def test_forward_mode(transformation):
    operands, tangents = _operands(), _operands(1)
    found, expected = (
        transformation(
            functools.partial(_results, implementation=name), operands, tangents
        )
        for name in ("xla", "reference")
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_hessian():
    operands = tuple(x[:, :3] if i < 3 else x for i, x in enumerate(_operands()))
    found, expected = (
        jax.hessian(
            lambda q, name=name: jnp.sum(
                jnp.cos(attention(q, *operands[1:3], implementation=name))
            )
        )(operands[0])
        for name in ("xla", "reference")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_memory_of_forward_mode_is_linear():
    x = jax.ShapeDtypeStruct((1, 2048, 1, 16), jnp.float32)

    def hessian_vector(q, tangent):
        def loss(q):
            return jnp.sum(attention(q, q, q, implementation="xla"))

        return jax.jvp(jax.grad(loss), (q,), (tangent,))

    compiled = jax.jit(hessian_vector).lower(x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2048 * 2048 * 4 / 2


def test_reverse_over_reverse_names_the_way_out():
    q, k, v, *_ = _operands()

    def loss(q, implementation):
        return jnp.sum(jnp.cos(attention(q, k, v, implementation=implementation)))

    def twice(implementation):
        inner = jax.grad(functools.partial(loss, implementation=implementation))
        return jax.grad(lambda q: jnp.sum(jnp.sin(inner(q))))(q)

    with pytest.raises(NotImplementedError, match="implementation='reference'"):
        twice("xla")
    assert np.isfinite(twice("reference")).all()


def test_forward_mode_of_kernels_names_the_way_out():
    q, k, v, *_ = (x.astype(jnp.float32) for x in _operands())
    call = functools.partial(attention, key=k, value=v, **BACKENDS["triton"])
    with pytest.raises(TypeError, match="implementation='xla'"):
        jax.jvp(call, (q,), (q,))
    with pytest.raises(TypeError, match="custom_vjp"):  # JAX's own words
        jax.jvp(jax.jit(call), (q,), (q,))
