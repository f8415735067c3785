"""What a caller changes while tracing reaches no result, and no later call."""

import contextlib
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_flash2 import attention, flax_attention
from tests.cases import BACKENDS
from tests.tiers import MAINLY_XLA, deeply

ALL = {**BACKENDS, "reference": {"implementation": "reference"}}
Q, K, V = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4), np.float32)
BIAS = np.random.default_rng(1).standard_normal((1, 2, 8, 8), np.float32)


def run(backend, gradients=True):
    """Output and gradients."""
    call = functools.partial(attention, is_causal=True, **ALL[backend])
    if not gradients:
        return (np.asarray(call(Q, K, V, BIAS)),)
    out, vjp = jax.vjp(call, *map(jnp.asarray, (Q, K, V, BIAS)))
    return jax.tree.map(np.asarray, (out, *vjp(out)))


# Functions that tools replace, as they quantise a model: each by its name, and by its
# code, so that all its other names are replaced too.
FUNCTIONS = {
    "lax.dot_general": (lax, "dot_general"),
    "lax.dot": (lax, "dot"),
    "lax.batch_matmul": (lax, "batch_matmul"),
    "lax.conv_general_dilated": (lax, "conv_general_dilated"),
    "lax.ragged_dot": (lax, "ragged_dot"),
    "numpy.dot": (jnp, "dot"),
    "numpy.matmul": (jnp, "matmul"),
    "numpy.einsum": (jnp, "einsum"),
    "numpy.tensordot": (jnp, "tensordot"),
    "nn.dot_product_attention": (jax.nn, "dot_product_attention"),
}
_original = {}


def _rounded(name, *args, **kwargs):
    """The function itself, of operands that are rounded as int8 would."""
    args = (jnp.round(x * 4) / 4 if hasattr(x, "shape") else x for x in args)
    return _original[name](*args, **kwargs)


@contextlib.contextmanager
def replaced():
    """All of them, by their names."""
    _original.update({x: getattr(*FUNCTIONS[x]) for x in FUNCTIONS})
    for name, (place, attribute) in FUNCTIONS.items():
        setattr(place, attribute, functools.partial(_rounded, name))
    try:
        yield
    finally:
        for name, (place, attribute) in FUNCTIONS.items():
            setattr(place, attribute, _original[name])


@contextlib.contextmanager
def recoded():
    """`lax.dot_general` with other code: whoever holds the function calls that."""
    function = lax.dot_general
    code, defaults = function.__code__, function.__defaults__
    copy = types.FunctionType(code, function.__globals__, argdefs=defaults)
    copy.__kwdefaults__ = function.__kwdefaults__
    _original["code"] = copy

    def replacement(*args, **kwargs):
        from tests.transforms import test_interception

        return test_interception._rounded("code", *args, **kwargs)

    function.__code__ = replacement.__code__
    try:
        yield
    finally:
        function.__code__ = code


@contextlib.contextmanager
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@contextlib.contextmanager
def watched():
    with jax.debug_nans(True), jax.debug_infs(True), jax.log_compiles(False):
        yield


PATCHES = {"names": replaced, "code of lax.dot_general": recoded}
SETTINGS = {
    "strict": strict,
    "watched": watched,
    "precision": lambda: jax.default_matmul_precision("bfloat16"),
    "leaks": jax.check_tracer_leaks,
    "x64": lambda: jax.enable_x64(True),
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "compile-time evaluation": jax.ensure_compile_time_eval,
    "no jit": jax.disable_jit,
}
# In which XLA compiles other programs, which round elsewhere; and products of a GPU
# are what a precision says.
OTHER_PROGRAMS = ("x64", "no jit", "precision")


@functools.cache
def clean(backend, gradients):
    jax.clear_caches()
    return run(backend, gradients)


def assert_equal(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


def check(context, backend, gradients, *, tolerance=0.0):
    """In a context and outside of it, in both orders, results are the clean ones."""
    expected = clean(backend, gradients)
    for order in ((True, False), (False, True)):
        jax.clear_caches()
        for inside in order:
            with context() if inside else contextlib.nullcontext():
                found = run(backend, gradients)
            if not inside:
                assert_equal(found, expected)
            for a, e in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, e, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", MAINLY_XLA)
@pytest.mark.parametrize("name", PATCHES)
def test_patches_reach_no_product(backend, name):
    """Neither while they are there, nor by a program that is kept."""
    check(PATCHES[name], backend, gradients=backend == "xla")


@pytest.mark.parametrize("name", PATCHES)
def test_patches_reach_no_product_of_the_reference(name):
    """Its derivatives are JAX's, which calls what is patched."""
    check(PATCHES[name], "reference", gradients=False)


@pytest.mark.parametrize(
    "name", [*(x for x in SETTINGS if x != "no jit"), *deeply("no jit")]
)
def test_settings_stay_where_they_are(name):
    tolerance = 2e-2 if name in OTHER_PROGRAMS else 0.0
    check(SETTINGS[name], "xla", gradients=False, tolerance=tolerance)


def test_the_patches_change_the_callers_products():
    """Else the test above would show nothing."""
    x, y = jax.random.normal(jax.random.key(0), (2, 8, 8))
    numbers = (((1,), (0,)), ((), ()))
    exact = lax.dot_general(x, y, numbers)
    for context in PATCHES.values():
        with context():
            rounded = lax.dot_general(x, y, numbers)
        assert np.max(np.abs(rounded - exact)) > 1e-2
    np.testing.assert_array_equal(lax.dot_general(x, y, numbers), exact)


@pytest.mark.parametrize("inside_first", [True, False])
def test_a_default_precision_is_that_of_its_calls(inside_first):
    """Of those that are lowered in its context, and of no others of the same shapes."""
    x = jax.ShapeDtypeStruct(Q.shape, jnp.float32)

    def lowered():
        def call(x):
            return attention(x, x, x, implementation="xla")

        return jax.jit(jax.grad(lambda x: jnp.sum(call(x) ** 2))).lower(x).as_text()

    def products(text):
        return [y for y in text.splitlines() if "stablehlo.dot_general" in y]

    jax.clear_caches()
    for inside in (inside_first, not inside_first):
        scope = jax.default_matmul_precision("highest" if inside else "default")
        with scope:
            found = products(lowered())
        assert found
        assert all(("HIGHEST" in y) == inside for y in found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_qwix_quantises_the_layers_and_not_attention():
    """A float model is what it was before and after, and attention's own products."""
    qwix = pytest.importorskip("qwix")
    nnx = pytest.importorskip("flax.nnx")
    seen = []

    def spy(query, key, value, **options):
        out = flax_attention(query, key, value, **options)
        seen.append((query, key, value, out))
        return out

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.MultiHeadAttention(
                4, 32, decode=False, rngs=rngs, attention_fn=spy
            )

        def __call__(self, x):
            return self.layer(x)

    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    model = Block(nnx.Rngs(0))
    jax.clear_caches()
    before = model(x)
    jax.clear_caches()
    rule = qwix.QtRule(weight_qtype="int8", act_qtype="int8")
    quantised = qwix.quantize_model(model, qwix.QtProvider([rule]), x)
    seen.clear()
    assert np.max(np.abs(quantised(x) - before)) > 1e-4
    (query, key, value, out), *_ = seen
    np.testing.assert_array_equal(model(x), before)
    np.testing.assert_array_equal(flax_attention(query, key, value), out)
