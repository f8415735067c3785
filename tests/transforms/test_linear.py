"""Transposes by value, in which attention is linear, and Taylor coefficients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet
from jax.scipy.sparse import linalg

from jax_flash2 import attention
from tests.cases import BACKENDS, ON_GPU
from tests.lowering import lower_for_gpu
from tests.tiers import MAINLY_XLA, deep, deeply

T, S = 6, 9


def _normal(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


Q, K, V = _normal(2, T, 4, 8), _normal(2, S, 2, 8, seed=1), _normal(2, S, 2, 5, seed=2)
COTANGENT = _normal(2, T, 4, 5, seed=3)
FEATURES = {
    "plain": {},
    "features": {
        "is_causal": True,
        "query_offset": 3,
        "bias": _normal(1, 4, T, S),
        "sinks": _normal(4),
        "logits_soft_cap": 2.0,
        "key_value_seq_lengths": jnp.int32([9, 0]),
    },
    "dropout": {"dropout_rate": 0.3, "dropout_rng": jax.random.key(0)},
}


def _of_value(backend, q=Q, **options):
    return functools.partial(attention, q, K, **options, **BACKENDS[backend])


def _assert_close(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        atol = (3e-2 if ON_GPU else 1e-5) * np.max(np.abs(b), initial=1)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def _transposed(f, value=V):
    """A function of the output's cotangent."""
    return lambda cotangent: jax.linear_transpose(f, value)(cotangent)[0]


@pytest.mark.parametrize(
    ("backend", "features"),
    [
        pytest.param(
            name, x, marks=[] if (name, x) == ("xla", "features") else pytest.mark.deep
        )
        for name in BACKENDS
        for x in FEATURES
    ],
)
def test_transpose_by_value_is_the_gradient_of_value(backend, features):
    f = _of_value(backend, **FEATURES[features])
    expected = jax.jit(lambda v, x: jax.vjp(f, v)[1](x)[0])(V, COTANGENT)
    found = jax.jit(lambda x: _transposed(jax.jit(f))(x))(COTANGENT)
    _assert_close(found, expected)


@pytest.mark.parametrize("backend", deeply(*BACKENDS))
def test_transpose_of_what_surrounds_a_call(backend):
    f = _of_value(backend)
    expected = jax.vjp(f, V)[1](COTANGENT)[0]
    # Where JAX stages the call, it transposes the call itself.
    _assert_close(_transposed(jax.checkpoint(f))(COTANGENT), expected)
    twice, cotangents = jnp.stack([V, 2 * V]), jnp.stack([COTANGENT, -COTANGENT])
    found = _transposed(jax.vmap(f), twice)(cotangents)
    _assert_close(found, jnp.stack([expected, -expected]))
    _assert_close(jax.vmap(_transposed(f))(cotangents), found)
    # A value that all share gets the sum.
    queries = jnp.stack([Q, -Q])
    shared = jax.vmap(lambda q, v: _of_value(backend, q)(v), (0, None))
    found = _transposed(lambda v: shared(queries, v))(cotangents)
    _assert_close(found, jax.vjp(lambda v: shared(queries, v), V)[1](cotangents)[0])


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_transpose_of_a_transpose_is_the_call(backend):
    f = _of_value(backend)
    found = jax.jit(_transposed(_transposed(f), COTANGENT))(V)
    _assert_close(found, jax.jit(f)(V))


@pytest.mark.parametrize("backend", deeply(*BACKENDS))
def test_derivatives_of_a_transpose(backend):
    """By the query: forward and reverse mode."""

    def of_query(q, backend):
        f = functools.partial(_of_value, q=q, **FEATURES["features"])
        return _transposed(f(backend))(COTANGENT)

    def both(f):
        out, pull = jax.vjp(f, Q)
        return jax.jvp(f, (Q,), (jnp.sin(Q),))[1], pull(jnp.cos(out))

    found = jax.jit(lambda: both(functools.partial(of_query, backend=backend)))()

    def plain(q):
        options = {**FEATURES["features"], "implementation": "reference"}
        return jax.vjp(lambda v: attention(q, K, v, **options), V)[1](COTANGENT)[0]

    _assert_close(found, jax.jit(lambda: both(plain))())


def test_the_log_sum_exp_is_known_before_value_is():
    """A function of value may use all results."""

    def f(value, implementation):
        options = {"return_residual": True, "return_max_logit": True}
        options["implementation"] = implementation
        out, lse, largest = attention(Q, K, value, **options)
        return out * (lse * largest)[..., None]

    found, expected = (
        jax.jit(_transposed(functools.partial(f, implementation=name)))(COTANGENT)
        for name in ("xla", "reference")
    )
    _assert_close(found, expected)


def test_transpose_by_other_arguments_is_an_error():
    with pytest.raises(NotImplementedError, match="linear in value alone"):
        jax.linear_transpose(lambda k: attention(Q, k, k), K)(Q)
    with pytest.raises(NotImplementedError, match="linear in value alone"):
        jax.linear_transpose(lambda q: attention(q, K, V), Q)(COTANGENT)


@pytest.mark.parametrize("solve", deeply(linalg.bicgstab, linalg.gmres))
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_through_solvers(backend, solve):
    x = _normal(1, 5, 1, 4)

    def loss(q, b, f):
        found = solve(lambda v: v + 0.1 * f(q, q, v), b, tol=1e-6)[0]
        return jnp.sum(jnp.sin(found))

    call = functools.partial(attention, **BACKENDS[backend])
    reference = functools.partial(attention, implementation="reference")
    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, f=f), (0, 1)))(x, 2 * x)
        for f in (call, reference)
    )
    _assert_close(found, expected)


def test_a_transpose_runs_the_backward_kernels():
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)

    def transposed(q, k, v, cotangent):
        f = functools.partial(attention, q, k, implementation="triton")
        return _transposed(f, v)(cotangent)

    text = lower_for_gpu(transposed, x, x, x, x)
    assert text.count("__gpu$xla.gpu.triton") == 3  # the log-sum-exp, dq, dkv
    assert "stablehlo.while" not in text


def _softmax_attention(q, k, v):
    """Plain operations, for whose Taylor coefficients JAX has rules."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    weights = jnp.exp(scores) * np.tri(q.shape[1], k.shape[1])
    weights = weights / jnp.sum(weights, -1, keepdims=True)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


@pytest.mark.parametrize(
    ("backend", "order"),
    [("xla", 2), *(pytest.param(x, 3, marks=deep) for x in BACKENDS)],
)
def test_jet(backend, order):
    operands = [_normal(1, 5, 2, 4, seed=i) for i in range(3)]
    series = [[jnp.sin((i + 2) * x) for i in range(order)] for x in operands]
    call = functools.partial(attention, is_causal=True, **BACKENDS[backend])
    found, expected = (
        jax.jit(functools.partial(jet.jet, f))(operands, series)
        for f in (call, _softmax_attention)
    )
    _assert_close(found, expected)


@deep
def test_jet_of_a_call_with_integers_and_three_results():
    """Segment ids and random words have no tangents."""
    q, k, v = (_normal(1, 5, 2, 4, seed=i) for i in range(3))

    def f(q):
        options = {"dropout_rate": 0.2, "dropout_rng": jax.random.key(0)}
        options |= {"return_residual": True, "return_max_logit": True}
        ids = jnp.int32([[0, 0, 1, 1, 1]])
        return attention(q, k, v, query_segment_ids=ids, **options)

    def along(t):
        return f(q + t * k + t**2 / 2 * v)

    def derivative(f):
        return lambda t: jax.jvp(f, (t,), (1.0,))[1]

    _, series = jax.jit(lambda: jet.jet(f, (q,), ([k, v],)))()
    first = derivative(along)
    second = derivative(first)
    expected = jax.jit(lambda: (first(0.0), second(0.0)))()
    _assert_close(series, list(zip(*expected, strict=True)))
