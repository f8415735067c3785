"""Attention in eight bits: scales, what is made of 16 bits, errors, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_flash2 import attention, explain, quantize_kv
from pallas_kernels.core import quantise
from pallas_kernels.core.axes import Named
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from tests import oracle
from tests.cases import ON_GPU
from tests.tiers import deeply

E4M3 = jnp.float8_e4m3fn
SCALES = ("query_scale", "key_scale", "value_scale")
# Of the output, root mean square. Kernels also have probabilities in eight bits.
KERNELS = 0.05
IN_BFLOAT16 = 0.01
BACKENDS = {"xla": IN_BFLOAT16, "reference": IN_BFLOAT16}
BACKENDS |= {"mosaic_gpu": KERNELS} if ON_GPU else {}
T, S, N, K, H = 40, 70, 4, 2, 64


def draw(seed: int, *shape: int, mean=0.0, outliers: bool = False) -> jax.Array:
    """Normal numbers, drawn in float32: in bfloat16 there are 128 different ones."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) + mean
    if outliers:
        x += 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.002)
    return jnp.asarray(x, jnp.bfloat16)


def operands(t: int = T, s: int = S, **of_all) -> list[jax.Array]:
    shapes = (2, t, N, H), (2, s, K, H), (2, s, K, H)
    return [draw(seed, *shape, **of_all) for seed, shape in enumerate(shapes)]


def error(found, exact) -> float:
    found, exact = (np.asarray(x, np.float64) for x in (found, exact))
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def exact_results(arrays, arguments) -> oracle.Results:
    q, _, v = arrays
    rows = q.shape[:-1]
    cotangents = np.zeros((*rows, v.shape[-1])), np.zeros(rows)
    return oracle.attention(arrays, cotangents, arguments)[0]


def lengths() -> dict:
    return {"key_value_seq_lengths": np.int32([S, 30])}


ARGUMENTS = {
    "plain": dict,
    "causal": lambda: {"is_causal": True, "query_offset": 5},
    "window": lambda: {"is_causal": True, "local_window_size": (10, 0)},
    "lengths": lengths,
    "soft_cap_and_sinks": lambda: {
        "logits_soft_cap": 2.0,
        "sinks": np.float32([0.0, 1.0, 2.0, 3.0]),
    },
}


@pytest.mark.parametrize(
    "name", [*(x for x in ARGUMENTS if x != "causal"), *deeply("causal")]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_operands_of_eight_bits(backend, name):
    """Against float64 of the numbers that they stand for."""
    if backend == "mosaic_gpu" and name == "soft_cap_and_sinks":
        pytest.skip("its kernel has neither")
    arguments, narrow, scales, wide = ARGUMENTS[name](), [], {}, []
    quantize = jax.jit(quantize_kv, static_argnums=(1, 2))
    for x, scale in zip(operands(), SCALES, strict=True):
        q, found = quantize(x, E4M3, (1, 3))
        narrow.append(q)
        scales[scale] = found[:, 0]
        wide.append(np.asarray(q, np.float64) * np.asarray(found)[..., None])
    call = functools.partial(attention, implementation=backend, return_residual=True)
    out, lse = call(*narrow, **scales, **arguments)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    exact = exact_results(wide, arguments)
    assert error(out, exact["out"]) < BACKENDS[backend]
    np.testing.assert_allclose(lse, exact["lse"], atol=0.03 if ON_GPU else 1e-4)


def test_scales_of_any_shape():
    """A number, one for each head, or for each batch entry and head."""
    q, k, v = (x.astype(E4M3) for x in operands())
    call = functools.partial(attention, implementation="xla")
    of_heads = np.float32([1.0, 2.0])
    found = [
        call(q, k, v, query_scale=0.5, key_scale=key, value_scale=value)
        for key, value in (
            (of_heads, 3.0),
            (np.stack([of_heads] * 2), np.full(K, 3.0, np.float32)),
        )
    ]
    np.testing.assert_array_equal(*found)
    head = q[0, :, 2], k[0, :, 1], v[0, :, 1]
    one = call(*head, query_scale=0.5, key_scale=jnp.float32(2.0), value_scale=3)
    assert error(one, found[0][0, :, 2]) < IN_BFLOAT16


@pytest.mark.parametrize("size", [1, 6, 64, 96, 128])
def test_rotations_are_exact(size):
    matrix, factor = quantise.rotation(size)
    matrix = matrix.astype(np.float64)
    np.testing.assert_array_equal(factor * matrix @ matrix.T, np.eye(size))
    spread = np.abs(np.ones(size) @ matrix)  # elements that are alike, too
    assert spread.max() <= 2 * np.sqrt(1 / factor)


def test_what_a_softmax_does_not_see(monkeypatch):
    """Without rounding, scores and values are what they were."""
    monkeypatch.setattr(quantise, "narrowed", lambda x, scale, dtype: x / scale)
    arrays = operands(mean=3.0)

    @jax.jit
    def run(*arrays):
        axes = ("b0", "t", "n", "h"), ("b0", "s", "k", "h"), ("b0", "s", "k", "d")
        named = map(Named, arrays, axes)
        found = quantise.quantised(*named, AttentionSpec(Score(0.25)))
        assert found.to_lse is not None and found.to_output is not None
        unit = found.spec.score.key_scale.to(("b0", "n")).reshape(2, K, -1, 1, 1)
        added = found.to_lse.to(("b0", "n", "t")).reshape(2, K, -1, T, 1)
        of_values = found.value, found.spec.value_scale, found.to_output
        value, scale, mean = (x.to(("b0", "s", "k", "d")) for x in of_values)
        narrow = found.query.value, found.key.value, found.value.value
        return narrow, unit, added, value * scale + mean

    (q, k, v), unit, added, values = run(*arrays)
    exact = products(*arrays[:2]) * 0.25
    assert error(products(q, k) * 0.25 * unit + added, exact) < 0.01
    assert error(values, arrays[2]) < 1e-5
    spread = np.float32(v)
    assert abs(spread.mean() / spread.std()) < 1e-3


def products(q, k) -> np.ndarray:
    q, k = (np.asarray(x, np.float32) for x in (q, k))
    return np.einsum("btkgh,bskh->bkgts", q.reshape(2, T, K, -1, H), k)


@pytest.mark.parametrize("name", ["outliers", "channels", "padded", *deeply("normal")])
@pytest.mark.parametrize("backend", [x for x in BACKENDS if x != "reference"])
def test_errors_of_quantising(backend, name):
    """What the docstring states, of normal numbers and of outliers."""
    q, k, v = operands(t=64, s=300, outliers=name == "outliers")
    arguments: dict = {}
    if name == "channels":
        k = k + 12 * jnp.sign(draw(5, H)) * (jnp.arange(H) < 4)
        v = v + 2
    wide = q, k, v
    if name == "padded":  # what is beyond a length counts for no scale and no mean
        arguments = {"key_value_seq_lengths": np.int32([300, 90])}
        beyond = np.arange(300) >= arguments["key_value_seq_lengths"][:, None]
        k, v = (jnp.where(beyond[..., None, None], jnp.nan, x) for x in (k + 3, v))
        wide = q, wide[1] + 3, wide[2]
    call = functools.partial(attention, implementation=backend, return_residual=True)
    # The kernel does not give the largest scores.
    has_largest = backend != "mosaic_gpu"
    out, lse, *largest = functools.partial(call, precision="fp8", **arguments)(
        q, k, v, return_max_logit=has_largest
    )
    exact = exact_results(wide, {**arguments, "return_max_logit": True})
    assert out.dtype == q.dtype
    assert error(out, exact["out"]) < 0.065
    np.testing.assert_allclose(lse, exact["lse"], atol=0.15, rtol=0.05)
    assert len(largest) == has_largest
    assert all(error(x, exact["max_logit"]) < 0.02 for x in largest)


def test_float16_stays_float16():
    q, k, v = (x.astype(jnp.float16) for x in operands())
    found = attention(q, k, v, precision="fp8", implementation="xla")
    assert found.dtype == jnp.float16
    assert error(found, attention(q, k, v, implementation="xla")) < 0.065


@pytest.mark.parametrize("argument", ["query", "key", "value", "bias"])
def test_derivatives_are_refused(argument):
    q, k, v = operands()
    arguments = {"query": q, "key": k, "value": v}
    options: dict = {"precision": "fp8"}
    if argument == "bias":  # of which a GPU's kernel has none, as the caller is warned
        arguments["bias"], options["implementation"] = jnp.zeros((T, S)), "xla"

    def loss(x):
        x = {**arguments, argument: x}
        return jnp.sum(attention(**x, **options).astype(jnp.float32))

    for derive in (jax.grad(loss), lambda x: jax.jvp(loss, (x,), (x,))):
        with pytest.raises(TypeError, match=r"8 bits .* no derivatives: call jax"):
            derive(arguments[argument])
    stopped = jax.jit(jax.grad(lambda x: loss(jax.lax.stop_gradient(x))))
    assert not np.any(stopped(arguments[argument]))


def of_equal_heads():
    q, k, v = operands(s=T)
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    return functools.partial(attention, precision="fp8", is_causal=True), (q, k, v)


def test_maps():
    """`vmap` over heads in the middle."""
    call, arrays = of_equal_heads()
    heads = jax.vmap(call, in_axes=1, out_axes=1)
    found, expected = (jax.jit(f)(*arrays) for f in (jax.vmap(heads), call))
    assert error(found, expected) < 0.01


@pytest.mark.skipif(jax.device_count() < 4, reason="fewer than 4 devices")
def test_meshes():
    """`jit` of arrays that are divided over devices, and `shard_map`."""
    call, (q, k, v) = of_equal_heads()
    plain = call(q, k, v)
    mesh = jax.make_mesh((2, 2), ("b", "n"), devices=jax.devices()[:4])
    placed = NamedSharding(mesh, PartitionSpec("b", None, "n"))
    inside = [jax.device_put(x, placed) for x in (q, k, v)]
    assert error(jax.jit(call)(*inside), plain) < 0.01
    spec = placed.spec
    each = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    assert error(jax.jit(each)(*inside), plain) < 0.01


@pytest.mark.parametrize("shape", [(2, 6, 0, H), (0, 6, N, H), (2, 0, N, H)])
def test_no_queries(shape):
    x = jnp.ones(shape, jnp.bfloat16)
    out, lse = attention(x, x, x, precision="fp8", return_residual=True)
    assert (out.shape, out.dtype, lse.shape) == (shape, x.dtype, shape[:3])
    assert "forward: xla" in explain(x, x, x, precision="fp8", implementation="xla")


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_shard_map_with_its_default_checks():
    """Rows of queries are divided, keys are not. Each part has a scale of its own."""
    q, k, v = operands(s=T)
    call = functools.partial(attention, precision="fp8")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("b",), auto, devices=jax.devices()[:2])
    rows, whole = PartitionSpec(None, "b"), PartitionSpec()
    specs = rows, whole, whole
    split = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=rows)
    parts = [call(x, k, v) for x in jnp.split(q, 2, axis=1)]
    assert error(jax.jit(split)(q, k, v), jnp.concatenate(parts, 1)) < 0.01


Q, KV = jnp.zeros((2, 6, N, H), E4M3), jnp.zeros((2, 5, K, H), E4M3)
GOOD = {"query": Q, "key": KV, "value": KV, **dict.fromkeys(SCALES, 1.0)}
TWO = {x: GOOD[x].astype(jnp.bfloat16) for x in ("query", "key", "value")}
TWO |= dict.fromkeys(SCALES)
BYTES = KV.astype(jnp.int8)
WRONG = {
    "no_scale": ({"key_scale": None}, TypeError, "key_scale must be given .* None"),
    "shape": (
        {"value_scale": jnp.ones(N)},
        ValueError,
        r"value_scale .* \(\), \(2,\), \(2, 2\), got shape \(4,\)",
    ),
    "kind": ({"query_scale": jnp.ones(N, int)}, TypeError, "query_scale .* int32"),
    "mixed": ({"key": TWO["key"]}, TypeError, "query float8_e4m3fn and key bfloat16"),
    "other_kinds": (
        {"key": KV.astype(jnp.int8)},
        TypeError,
        "same dtype, got query float8_e4m3fn and key int8",
    ),
    "precision": ({"precision": "highest"}, ValueError, "None or 'fp8' .* 'highest'"),
    "scale_of_16_bits": (
        {**TWO, "key_scale": 1.0},
        ValueError,
        "key_scale must be None for a key in bfloat16",
    ),
    "float32": (
        {**{n: jnp.float32(x) for n, x in TWO.items() if x is not None}}
        | {"precision": "fp8", **dict.fromkeys(SCALES)},
        TypeError,
        "precision='fp8' takes bfloat16 or float16 .* float32: cast",
    ),
    # Quantised keys and values beside a query that is not.
    "int8_query": (
        {**TWO, "query": Q.astype(jnp.int8)},
        TypeError,
        r"query .* float8_e4m3fn \(with scales\), got int8",
    ),
    "key_without_scale": (
        {**TWO, "key": KV},
        TypeError,
        "key_scale must be given for a key in float8_e4m3fn, got None.* 1.0",
    ),
    "scale_of_floats": (
        {**TWO, "key": BYTES, "key_scale": 1.0, "value_scale": 1.0},
        ValueError,
        "value_scale must be None for a value in bfloat16",
    ),
    "scale_of_rows": (
        {**TWO, "key": BYTES, "key_scale": jnp.ones((2, 4))},
        ValueError,
        r"key_scale .* \(2, 2\), \(2, 5, 1\), \(2, 5, 2\), got shape \(2, 4\)",
    ),
    "quantised_and_fp8": (
        {**TWO, "value": BYTES, "value_scale": 1.0, "precision": "fp8"},
        TypeError,
        r"precision='fp8' .* got a quantised value \(int8\): leave precision out",
    ),
    "e5m2": ({"query": Q.astype(jnp.float8_e5m2)}, TypeError, "query .* float8_e5m2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    changes, kind, text = WRONG[name]
    for call in (attention, explain):
        with pytest.raises(kind, match=text):
            call(**{**GOOD, **changes})
