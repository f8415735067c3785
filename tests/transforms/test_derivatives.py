"""Forward mode and second derivatives, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import _backends, _vjp, attention
from tests.cases import BACKENDS, ON_GPU
from tests.lowering import lower_for_gpu
from tests.tiers import deep, deeply

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


def _results(q, k, v, bias=None, sinks=None, **options):
    """Some rows have no keys."""
    ids = jnp.asarray(np.arange(2 * T).reshape(2, T) // 9)
    lengths = jnp.asarray([T, 13], jnp.int32)
    return attention(
        *(q, k, v), is_causal=True, bias=bias, sinks=sinks, logits_soft_cap=3.0,
        query_segment_ids=ids, key_value_seq_lengths=lengths, return_residual=True,
        **options,
    )  # fmt: skip


def _jvp_of_jit(f, operands, tangents):
    return jax.jvp(jax.jit(f), operands, tangents)


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


def _gradients(f, count=None):
    """Of a function that is not linear in the output and the log-sum-exp.

    Args:
      count: of how many operands, the first ones; None for all.
    """

    def loss(*x):
        out, lse = f(*x)
        lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return jnp.sum(jnp.cos(out)) + jnp.sum(jnp.sin(lse))

    return lambda *x: jax.grad(loss, tuple(range(count or len(x))))(*x)


def _jvp_of_grad(f, operands, tangents):
    return jax.jvp(_gradients(f), operands, tangents)


def _vjp_of_grad(f, operands, tangents):
    """Reverse over reverse."""
    return jax.vjp(_gradients(f), *operands)[1](tangents)


def _vjp_of_some_of_grad(f, operands, tangents):
    """Of two gradients by two operands: zeros for all others."""
    q, k, v, *others = operands

    def gradients(k, v):
        return _gradients(f)(q, k, v, *others)[:2]

    return jax.jit(lambda *x: jax.vjp(gradients, *x)[1](tangents[:2]))(k, v)


def _vjp_of_grad_by_some(f, operands, tangents):
    """Of gradients by query and key, by all operands: that of the bias comes late."""
    return jax.vjp(_gradients(f, 2), *operands)[1](tangents[:2])


def _jvp_of_grad_by_some(f, operands, tangents):
    return jax.jvp(_gradients(f, 2), operands, tangents)


def _vjp_of_vjp_by_some(f, operands, tangents):
    """By the cotangents too."""
    cotangents = jax.tree.map(jnp.sin, f(*operands))

    def backward(operands, cotangents):
        q, k, *others = operands
        return jax.vjp(lambda *x: f(*x, *others), q, k)[1](cotangents)

    return jax.vjp(backward, operands, cotangents)[1](tangents[:2])


def _vjp_of_vjp(f, operands, tangents):
    """By the cotangents too."""
    cotangents = jax.tree.map(jnp.sin, f(*operands))

    def backward(operands, cotangents):
        return jax.vjp(f, *operands)[1](cotangents)

    return jax.vjp(backward, operands, cotangents)[1](tangents)


def _vjp_of_jvp(f, operands, tangents):
    """Reverse over forward, by the tangents too."""

    def along(operands, tangents):
        return jax.jvp(f, operands, tangents)[1]

    cotangents, pull = jax.vjp(along, operands, tangents)
    return pull(jax.tree.map(jnp.sin, cotangents))


def _jvp_of_vjp_of_grad(f, operands, tangents):
    """A third derivative, by forward mode."""

    def second(*x):
        return jax.vjp(_gradients(f), *x)[1](tangents)[:1]

    return jax.jvp(second, operands, tangents)


def _vjp_of_grad_of_vmap(f, operands, tangents):
    """Of a query and a bias for each element; key, value and sinks are shared."""

    def mapped(q, k, v, bias, sinks):
        call = jax.vmap(f, (0, None, None, 1, None), 1)
        return call(jnp.stack([q, 2 * q]), k, v, jnp.stack([bias, -bias], 1), sinks)

    return _vjp_of_grad(mapped, operands, tangents)


def _vmap_of_vjp_of_grad(f, operands, tangents):
    """Of cotangents alone, and of a query alone."""
    operands, tangents = operands[:3], tangents[:3]
    _, pull = jax.vjp(_gradients(f), *operands)
    twice = tuple(jnp.stack([x, 3 * x]) for x in tangents)
    q, *others = operands
    of_query = jax.vmap(lambda q: _vjp_of_grad(f, (q, *others), tangents))
    return jax.vmap(pull)(twice), of_query(jnp.stack([q, -q]))


def _compiled(transformation, **options):
    f = functools.partial(_results, **options)
    return jax.jit(functools.partial(transformation, f))


@pytest.mark.parametrize(
    "transformation",
    [
        _vmap_of_jvp,
        _vjp_of_grad,
        _vjp_of_grad_by_some,
        _vjp_of_jvp,
        *deeply(
            _jvp_of_grad_by_some,
            _vjp_of_vjp_by_some,
            _jvp_of_jit,
            _linearize,
            _jvp_of_vmap,
            _jvp_of_jvp,
            _jvp_of_grad,
            _vjp_of_some_of_grad,
            _vjp_of_vjp,
            _jvp_of_vjp_of_grad,
            _vjp_of_grad_of_vmap,
            _vmap_of_vjp_of_grad,
        ),
    ],
)
def test_derivatives(transformation):
    operands, tangents = _operands(), _operands(1)
    found, expected = (
        _compiled(transformation, implementation=name)(operands, tangents)
        for name in ("xla", "reference")
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@deep
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


@pytest.mark.parametrize(
    "transformation", deeply(_jvp_of_grad, _vjp_of_grad, _vjp_of_jvp, _jvp_of_jvp)
)
def test_second_derivatives_of_kernels(transformation):
    """Tangents of gradients are those of the xla backend; float32, as kernels are."""
    operands, tangents = (
        tuple(x.astype(jnp.float32) for x in _operands(seed)[:3]) for seed in (0, 1)
    )
    found, expected = (
        _compiled(transformation, **options)(operands, tangents)
        for options in (BACKENDS["triton"], {"implementation": "reference"})
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        atol = (5e-2 if ON_GPU else 2e-5) * jnp.max(jnp.abs(b))  # TF32
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def test_gradients_of_kernels_are_kernels_under_a_second_derivative():
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)

    def twice(q, k, v):
        def loss(q):
            return jnp.sum(jnp.cos(attention(q, k, v, implementation="triton")))

        return jax.grad(lambda q: jnp.sum(jnp.sin(jax.grad(loss)(q))))(q)

    # Forward, dq and dkv of both backward passes, and a tangent of the forward.
    kernels = ["forward", "dq", "dkv", "tangent", "dq", "dkv"]
    found = lower_for_gpu(twice, x, x, x).count("__gpu$xla.gpu.triton")
    assert found == len(kernels)


@pytest.mark.parametrize("second", [*deeply("forward"), "reverse"])
def test_memory_of_second_derivatives_is_linear(second, small_blocks):
    x = jax.ShapeDtypeStruct((1, 2048, 1, 16), jnp.float32)

    def hessian_vector(q, vector):
        def loss(q):
            return jnp.sum(attention(q, q, q, implementation="xla"))

        gradient = jax.grad(loss)
        if second == "forward":
            return jax.jvp(gradient, (q,), (vector,))
        return jax.vjp(gradient, q)[1](vector)

    compiled = jax.jit(hessian_vector).lower(x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2048 * 2048 * 4 / 2


def test_reverse_mode_of_a_second_derivative_names_the_way_out():
    q, k, v, *_ = _operands()

    def loss(q, implementation):
        return jnp.sum(jnp.cos(attention(q, k, v, implementation=implementation)))

    def thrice(implementation):
        f = functools.partial(loss, implementation=implementation)
        for _ in range(2):
            f = functools.partial(lambda f, q: jnp.sum(jnp.sin(jax.grad(f)(q))), f)
        return jax.jit(jax.grad(f))(q)

    with pytest.raises(NotImplementedError, match="implementation='reference'"):
        thrice("xla")
    assert np.isfinite(thrice("reference")).all()


def _assert_close(found, expected):
    """In float32, or in TF32 on a GPU."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        largest = np.max(np.abs(b), initial=1, where=np.isfinite(b))
        atol = (5e-2 if ON_GPU else 2e-5) * largest
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def _jvp_of_checkpoint(f, operands, tangents):
    return jax.jvp(jax.checkpoint(f), operands, tangents)


def _jvp_of_scan(f, operands, tangents):
    """Of layers, each of which attends to the output of the one before."""
    q, *others = operands

    def layers(q, *others):
        return jax.lax.scan(lambda q, _: f(q, *others), q, length=2)

    return jax.jvp(layers, (q, *others), tangents)


def _grad_of_jvp(f, operands, tangents):
    """Of a loss whose target is a tangent, which has no gradient (MeanFlow)."""

    def loss(*x):
        (out, _), (along, _) = jax.jvp(f, x, tangents)
        return jnp.sum((out - jax.lax.stop_gradient(along)) ** 2)

    return jax.value_and_grad(loss, tuple(range(len(operands))))(*operands)


@pytest.mark.parametrize(
    "transformation",
    [
        _jvp_of_vmap,
        *deeply(_vmap_of_jvp, _grad_of_jvp, _jvp_of_jit, _jvp_of_checkpoint),
        *deeply(_jvp_of_scan, _linearize),
    ],
)
def test_forward_mode_of_kernels(transformation):
    operands, tangents = (
        tuple(x.astype(jnp.float32) for x in _operands(seed)) for seed in (0, 1)
    )
    found, expected = (
        _compiled(transformation, **options)(operands, tangents)
        for options in (BACKENDS["triton"], {"implementation": "reference"})
    )
    _assert_close(found, expected)


def test_forward_mode_along_value_is_a_forward_kernel():
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)

    def along(q, k, v):
        def f(value):
            return attention(q, k, value, implementation="triton")

        return jax.jvp(f, (v,), (v,))

    text = lower_for_gpu(along, x, x, x)
    assert text.count("__gpu$xla.gpu.triton") == 2
    assert "stablehlo.while" not in text


def test_gradients_by_some_operands_keep_no_zeros_for_others():
    q, k, v, *_ = _operands()

    def kept(f, *arrays):
        return sum(x.nbytes for x in jax.tree.leaves(jax.vjp(f, *arrays)[1]))

    call = functools.partial(attention, implementation="xla")
    assert kept(lambda q: call(q, k, v), q) <= kept(call, q, k, v)


@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
def test_no_kernel_is_traced_for_gradients_that_nobody_asks_for(backend):
    """A bias that is no parameter takes no longer to lower than its absence."""
    x = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.bfloat16)

    def gradients(count, *x):
        def loss(q, k, v, bias):
            return attention(q, k, v, bias, implementation=backend).sum()

        return jax.grad(loss, tuple(range(count)))(*x)

    found = [
        "flash2_dbias" in lower_for_gpu(functools.partial(gradients, n), x, x, x, bias)
        for n in (3, 4)
    ]
    assert found == [False, True]


@deep
def test_gradients_of_the_custom_vjp_alone(monkeypatch):
    """JAX's own rules for it, and the primitives' around it, run the same kernels."""
    operands = tuple(x.astype(jnp.float32) for x in _operands()[:3])

    def loss(*x):
        out, lse = attention(*x, return_residual=True, **BACKENDS["triton"])
        return jnp.sum(jnp.cos(out)) + jnp.sum(jnp.sin(lse))

    def gradients():
        return jax.jit(jax.grad(lambda *x: loss(*x), (0, 1, 2)))(*operands)

    expected = gradients()
    monkeypatch.setattr(_vjp, "forward", _vjp.flash2)
    _vjp.attend.clear_cache()
    try:
        with _backends.lowering_context("triton"):
            found = gradients()
    finally:
        _vjp.attend.clear_cache()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
