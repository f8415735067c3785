"""`flax_attention` in Flax's own attention modules, against Flax's own attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jax_flash2 import attention, flax_attention
from tests.cases import BACKENDS, ON_GPU
from tests.project.test_recipes import sections
from tests.tiers import MAINLY_XLA, deeply

WIDTH, HEADS, T = 32, 4, 20
ATOL = 2e-2 if ON_GPU else 2e-5  # TF32


def x(seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((2, T, WIDTH)), jnp.float32)


def assert_close(a, b):
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=0, atol=ATOL), a, b)


MASKS = {
    "none": None,
    "causal": linen.make_causal_mask(jnp.ones((2, T))),  # float
    "causal_bool": linen.make_causal_mask(jnp.ones((2, T)), dtype=bool),
    "padding": linen.make_attention_mask(
        jnp.ones((2, T)), jnp.arange(T)[None] < jnp.array([[7], [20]])
    ),
}


@pytest.mark.parametrize("backend", MAINLY_XLA)
@pytest.mark.parametrize("mask", ["causal", "padding", *deeply("none", "causal_bool")])
@pytest.mark.parametrize(
    "layer", [linen.MultiHeadAttention, *deeply(linen.MultiHeadDotProductAttention)]
)
def test_linen(layer, mask, backend):
    function = functools.partial(flax_attention, **BACKENDS[backend])
    make = functools.partial(layer, num_heads=HEADS)
    ours, flax = make(attention_fn=function), make()
    parameters = jax.jit(flax.init)(jax.random.key(0), x())
    options = {"mask": MASKS[mask]}

    def loss(parameters, layer):
        out = layer.apply(parameters, x(), **options)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, out), gradient = run(parameters, ours)
    (_, want), expected = run(parameters, flax)
    assert_close(out, want)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected))
    assert_close(*(jax.tree.map(lambda g: g / scale, t) for t in (gradient, expected)))


@pytest.mark.parametrize("backend", MAINLY_XLA)
@pytest.mark.parametrize("causal", [True, *deeply(False)])
def test_nnx(causal, backend):
    function = functools.partial(flax_attention, **BACKENDS[backend])

    def make(**options):
        sizes = {"num_heads": HEADS, "in_features": WIDTH, "decode": False}
        return nnx.MultiHeadAttention(**sizes, **options, rngs=nnx.Rngs(0))

    def loss(layer):
        out = layer(x(), is_causal=causal)
        return jnp.sum(jnp.sin(out)), out

    run = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
    (_, out), gradient = run(make(attention_fn=function))
    (_, want), expected = run(make())
    assert_close(out, want)
    for ours, flax in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        np.testing.assert_allclose(ours, flax, rtol=0, atol=10 * ATOL)


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_decoding_with_a_cache(backend):
    """Token by token through the cache is the causal call on all of them."""
    function = functools.partial(flax_attention, **BACKENDS[backend])
    layer = linen.MultiHeadAttention(HEADS, attention_fn=function)
    decoder = linen.MultiHeadAttention(HEADS, attention_fn=function, decode=True)
    parameters = layer.init(jax.random.key(0), x())
    whole = layer.apply(parameters, x(), mask=MASKS["causal"])
    cache = decoder.init(jax.random.key(0), x())["cache"]
    step = jax.jit(
        lambda cache, token: decoder.apply(
            {**parameters, "cache": cache}, token, mutable=["cache"]
        )
    )
    for i in range(T):
        out, changed = step(cache, x()[:, i : i + 1])
        cache = changed["cache"]
        assert_close(out[:, 0], whole[:, i])


@pytest.mark.parametrize("backend", MAINLY_XLA)
@pytest.mark.parametrize("broadcast", [False, True])
def test_dropout(broadcast, backend):
    """Drops as often as asked, in one way for all heads if broadcast; not if told."""
    q = jnp.zeros((2, T, HEADS, 16))
    v = jnp.broadcast_to(jnp.eye(T)[:, None, :], (2, T, HEADS, T))
    call = functools.partial(
        flax_attention,
        dropout_rng=jax.random.key(1),
        dropout_rate=0.5,
        broadcast_dropout=broadcast,
        **BACKENDS[backend],
    )
    kept = np.asarray(call(q, q, v)) * T / 2
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-2)
    assert 0.4 < kept.mean() < 0.6
    assert np.all(kept == kept[:1, :, :1]) == broadcast
    without = call(q, q, v, deterministic=True)
    np.testing.assert_allclose(without, 1 / T, rtol=1e-3)  # TF32 on a GPU


def test_dtypes_promote_and_bias_may_be_of_integers():
    q = x().reshape(2, T, HEADS, -1)
    half = q.astype(jnp.bfloat16)
    assert flax_attention(half, half, half).dtype == jnp.bfloat16
    assert flax_attention(q, half, half).dtype == jnp.float32
    assert flax_attention(q, q, q, dtype=jnp.float16).dtype == jnp.float16
    bias = jnp.arange(T) // 4
    a = flax_attention(q, q, q, bias)
    assert_close(a, linen.dot_product_attention(q, q, q, bias.astype(jnp.float32)))


def test_sowing_weights_is_refused():
    layer = linen.MultiHeadAttention(HEADS, attention_fn=flax_attention)
    with pytest.raises(ValueError, match=r"module must be None.*sow_weights=True"):
        layer.init_with_output(jax.random.key(0), x(), sow_weights=True)


@pytest.mark.parametrize("name", ["qk_attn_weights", "attn_weights_value"])
def test_einsums_of_the_callers_are_refused(name):
    """Not dropped in silence."""
    einsums = {f"{name}_einsum_cls": lambda: jnp.einsum}
    layer = linen.MultiHeadAttention(HEADS, attention_fn=flax_attention, **einsums)
    with pytest.raises(ValueError, match=rf"{name}_einsum must be None"):
        layer.init_with_output(jax.random.key(0), x())


@pytest.mark.parametrize("dtype", [bool, jnp.float32, jnp.int32])
def test_masks_under_strict_promotion(dtype):
    q = jnp.ones((1, 4, 1, 8))
    mask = jnp.tril(jnp.ones((4, 4), dtype))
    with jax.numpy_dtype_promotion("strict"):
        out = flax_attention(q, q, q, mask=mask)
    np.testing.assert_array_equal(out, q)


PRESET = jax.lax.DotAlgorithmPreset
HIGH, HIGHEST = jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST


@pytest.mark.parametrize(
    ("precision", "taken"),
    [
        ((None, None), None),
        (("default", "highest"), HIGHEST),
        ((HIGH, HIGH), HIGH),
        (PRESET.F32_F32_F32, HIGHEST),
        (PRESET.BF16_BF16_F32_X3, HIGHEST),
        ("TF32_TF32_F32", jax.lax.Precision.DEFAULT),
        ((PRESET.TF32_TF32_F32, "float32"), HIGHEST),
    ],
)
def test_precisions_of_flax(precision, taken):
    """Pairs and presets: at least as exact as asked for."""
    q = jax.ShapeDtypeStruct((1, 4, 1, 8), jnp.float32)
    call = functools.partial(flax_attention, precision=precision)
    text = str(jax.make_jaxpr(call)(q, q, q))
    assert f"Call[(None, {taken!r})]" in text  # its config and its precision


@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_dtype_and_precision_of_layers(module):
    """What a layer is told reaches the attention: its results are Flax's."""

    def run(**options):
        if module == "linen":
            layer = linen.MultiHeadAttention(HEADS, **options)
            return layer.init_with_output(jax.random.key(0), x())[0]
        sizes = {"num_heads": HEADS, "in_features": WIDTH, "decode": False}
        return nnx.MultiHeadAttention(**sizes, **options, rngs=nnx.Rngs(0))(x())

    seen = []

    @functools.wraps(flax_attention)  # linen reads the signature
    def function(*arguments, **options):
        seen.append((arguments[0].dtype, options.get("precision")))
        return flax_attention(*arguments, **options)

    half = {"dtype": jnp.bfloat16}
    assert run(attention_fn=function, **half).dtype == jnp.bfloat16
    np.testing.assert_allclose(
        *(np.float32(x) for x in (run(attention_fn=function, **half), run(**half))),
        rtol=0,
        atol=2e-2,
    )
    exact = {"precision": jax.lax.Precision.HIGHEST}
    # nnx calls jax.nn's attention, which takes no precision.
    with jax.default_matmul_precision("highest"):
        expected = run(**exact)
    np.testing.assert_allclose(
        run(attention_fn=function, **exact), expected, rtol=0, atol=1e-5
    )
    assert (jnp.bfloat16, None) in seen
    assert (jnp.float32, jax.lax.Precision.HIGHEST) in seen


def test_nnx_decoding_with_a_cache():
    sizes = {"num_heads": HEADS, "in_features": WIDTH, "attention_fn": flax_attention}
    layer = nnx.MultiHeadAttention(**sizes, decode=False, rngs=nnx.Rngs(0))
    decoder = nnx.MultiHeadAttention(**sizes, decode=True, rngs=nnx.Rngs(0))
    whole = layer(x(), is_causal=True)
    decoder.init_cache(x().shape)
    for i in range(T):
        assert_close(decoder(x()[:, i : i + 1])[:, 0], whole[:, i])


def test_what_flax_users_pass_by_mistake():
    q = jnp.ones((1, 4, 1, 8))
    options = {"dropout_rate": 0.1, "deterministic": False}
    for rngs in (nnx.Rngs(0), nnx.Rngs(0).dropout):
        with pytest.raises(TypeError, match=r"dropout_rng .*pass rngs\.dropout\(\)"):
            flax_attention(q, q, q, dropout_rng=rngs, **options)
    sizes = {"num_heads": 1, "in_features": 8, "decode": False}
    layer = nnx.MultiHeadAttention(**sizes, attention_fn=attention, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="pass flax_attention as attention_fn"):
        layer(q[..., 0, :])


@functools.cache
def recipe() -> dict:
    """The names that the page's section on Flax defines."""
    names = {"__name__": "recipe"}
    exec(compile(sections()["Flax"], "RECIPES.md, Flax", "exec"), names)
    return names


@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_masks_and_dropout_reach_the_function_of_the_recipe(module):
    """Of linen too, which passes what a signature names, and no more."""
    names = recipe()
    sizes = {"num_heads": HEADS, "dropout_rate": 0.5, "broadcast_dropout": False}
    keys = jax.random.key(1), jax.random.key(2)

    def run(function, mask, rng):
        if module == "linen":
            layer = linen.MultiHeadAttention(**sizes, attention_fn=function)
            options = {"mask": mask, "deterministic": rng is None, "dropout_rng": rng}
            return layer.init_with_output(jax.random.key(0), x(), **options)[0]
        sizes_ = {**sizes, "in_features": WIDTH, "decode": False, "rngs": nnx.Rngs(0)}
        layer = nnx.MultiHeadAttention(**sizes_, attention_fn=function)
        rngs = None if rng is None else nnx.Rngs(dropout=rng)
        return layer(x(), mask=mask, deterministic=rng is None, rngs=rngs)

    causal = MASKS["causal_bool"]
    masked, free = (run(names["rotary"], mask, None) for mask in (causal, None))
    assert_close(masked[:, -1], free[:, -1])
    assert np.abs(masked - free)[:, : T // 2].max() > 100 * ATOL
    a, b, again = (run(names["rotary"], None, rng) for rng in (*keys, keys[0]))
    np.testing.assert_array_equal(a, again)
    assert np.abs(a - b).max() > 0.01 < np.abs(a - free).max()
