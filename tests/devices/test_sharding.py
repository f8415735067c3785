"""Attention on several devices: `shard_map`, explicit and automatic shardings."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash2 import attention
from jax_flash2._sharding import Division
from tests.cases import BACKENDS
from tests.tiers import MAINLY_XLA, deep, deeply

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="one device")

T = 40
# Query and key/value heads; among four devices: divided, whole, in part of a group and
# half; one for two, and in part.
GROUPS = [(8, 4), (8, 1), (24, 6), *deeply((8, 2), (12, 3))]


def _mesh(kind: AxisType):
    shape = (2, 4) if jax.device_count() >= 8 else (1, 2)
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind))


def _operands(heads=8, kv_heads=4):
    rng = np.random.default_rng(0)
    shapes = [(2, T, n, 16) for n in (heads, kv_heads, kv_heads)]
    return [np.float32(rng.standard_normal(shape)) for shape in shapes]


def _arguments():
    rng = np.random.default_rng(0)
    return {
        "bias": np.float32(rng.standard_normal((1, 8, T, T))),
        "query_segment_ids": np.arange(2 * T, dtype=np.int32).reshape(2, T) // 16,
        "alibi_slopes": np.float32(rng.random(8)),
        "sinks": np.zeros(8, np.float32),
        "dropout_rate": 0.2,
        "dropout_rng": jax.random.key(1),
    }


def _with_gradients(backend, **arguments):
    """All results, and gradients of query, key and value."""

    def run(q, k, v):
        def call(q, k, v):
            options = {**arguments, **BACKENDS[backend], "is_causal": True}
            more = {"return_residual": True, "return_max_logit": True}
            return attention(q, k, v, **options, **more)

        (out, lse, largest), vjp = jax.vjp(call, q, k, v)
        cotangents = jnp.cos(out), jnp.sin(lse), largest
        return out, lse, largest, *vjp(cotangents)

    return run


def _split(operands, mesh):
    """Batch and heads among devices; key/value heads whole if they do not divide."""
    kv_heads = operands[1].shape[2]
    model = "model" if kv_heads % mesh.shape["model"] == 0 else None
    specs = (P("data", None, "model"), *[P("data", None, model)] * 2)
    return [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]


def _assert_equal(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_shard_map_with_its_default_checks(backend):
    run = _with_gradients(backend)
    spec = P("data", None, "model")
    q, k, v = _operands()
    mesh = _mesh(AxisType.Auto)
    split = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    _assert_equal(jax.jit(split)(q, k, v), jax.jit(run)(q, k, v))


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_shard_map_sums_the_gradient_of_what_is_shared(backend):
    """One key and value for all queries: their gradient is that of every device."""
    q, k, v = _operands(heads=2, kv_heads=2)
    mesh = _mesh(AxisType.Auto)

    def call(q, k, v):
        one = lambda q: attention(q, k, v, is_causal=True, **BACKENDS[backend])  # noqa: E731
        return jax.vmap(one)(q)

    def gradients(function):
        loss = lambda q, k, v: jnp.sum(jnp.cos(function(q, k, v)))  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k[0], v[0])

    specs = (P(("data", "model")), P(), P())
    q = np.concatenate([q, 2 * q, -q, q / 2])
    split = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=specs[0])
    _assert_equal(gradients(split), gradients(call))


@pytest.mark.parametrize("backend", MAINLY_XLA)
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_explicit_shardings_stay_where_they_are(backend, heads, kv_heads):
    run = _with_gradients(backend)
    operands = _operands(heads, kv_heads)
    expected = jax.jit(run)(*operands)
    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        split = _split(operands, mesh)
        actual = jax.jit(run)(*split)
        assert jax.typeof(actual[0]).sharding.spec == P("data", None, "model", None)
        for x in actual[1:3]:
            assert jax.typeof(x).sharding.spec == P("data", None, "model")
    _assert_equal(actual, expected)


def test_explicit_shardings_with_every_feature():
    """Also those that are whole on every device, and dropout's bits."""
    run = _with_gradients("xla", **_arguments())
    operands = _operands()
    expected = jax.jit(run)(*operands)
    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        spec = NamedSharding(mesh, P("data", None, "model"))
        actual = jax.jit(run)(*(jax.device_put(x, spec) for x in operands))
    _assert_equal(actual, expected)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((P(None, "model"), P()), r"query is sharded along its rows .*'model'"),
        ((P(), P(None, None, None, "model")), "key is sharded along its head size"),
        ((P("data"), P("model")), "key is sharded along a batch axis"),
    ],
)
def test_explicit_shardings_that_attention_cannot_keep(specs, message):
    q, k, _ = (np.concatenate([x, x]) for x in _operands())
    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        q, k = (
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip((q, k), specs, strict=True)
        )
        with pytest.raises(ValueError, match=message):
            jax.jit(attention)(q, k, k)


# Arrays that say which rows they have, by the argument that an error names.
OF_ROWS = {
    "bias": lambda x: {"bias": x[:, None]},
    "mask": lambda x: {"mask": x[:, None] > 0},
    "query_segment_ids .or what mask_mod captures.": lambda x: {
        "query_segment_ids": x.astype(jnp.int32)
    },
    "an array that mask_mod captures": lambda x: {
        "mask_mod": lambda b, h, i, j: x[b, i] + x[b, j] > 1
    },
    "an array that score_mod captures": lambda x: {
        "score_mod": lambda s, b, h, i, j: s * x[b, i]
    },
}


@pytest.mark.parametrize("argument", OF_ROWS)
def test_arguments_whose_rows_are_sharded_alone(argument):
    if argument.startswith("an array") and jax.__version_info__ < (0, 12):
        pytest.skip("JAX cannot trace a read at an index of a divided array")
    q, k, v = _operands()
    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(q.shape[:2]), NamedSharding(mesh, P(None, "model")))
        x = x[..., None] if argument in ("bias", "mask") else x
        message = rf"^{argument} is sharded along its rows by mesh axes .'model',"
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, **OF_ROWS[argument](x))


@pytest.mark.skipif(jax.device_count() < 4, reason="heads for four devices")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [
        (8, 2, [[0], [0], [1], [1]]),
        (12, 3, [[0, 0, 0], [0, 1, 1], [1, 1, 2], [2, 2, 2]]),
        (24, 6, [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]),
    ],
)
def test_key_heads_that_a_device_takes(heads, kv_heads, expected):
    """Of whole key/value heads: one for each run of query heads of a common group."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    size = {"n": heads, "k": kv_heads}
    division = Division(mesh.abstract_mesh, {"n": ("model",)}, size)
    each = jax.shard_map(
        division.own_heads, mesh=mesh, in_specs=(), out_specs=P("model")
    )
    assert jax.jit(each)().reshape(4, -1).tolist() == expected


def _collectives(compiled) -> set[str]:
    names = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    return set(re.findall(names + r"(?:-start)?\(", compiled.as_text()))


@pytest.mark.parametrize("backend", MAINLY_XLA)
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_automatic_shardings_stay_where_they_are(backend, heads, kv_heads):
    """Only gradients of what several devices share are communicated."""
    run = _with_gradients(backend)
    operands = _operands(heads, kv_heads)
    split = _split(operands, _mesh(AxisType.Auto))
    forward = jax.jit(lambda *x: attention(*x, **BACKENDS[backend])).lower(*split)
    compiled = jax.jit(run).lower(*split).compile()
    whole = "model" not in split[1].sharding.spec
    assert _collectives(forward.compile()) == set()
    assert _collectives(compiled) == ({"all-reduce"} if whole else set())
    _assert_equal(compiled(*split), jax.jit(run)(*operands))


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_automatic_shardings_with_every_feature(backend):
    """Gradients of what is broadcast over divided axes are sums over devices."""
    mesh = _mesh(AxisType.Auto)
    arguments = _arguments()
    operands = (*_operands(), arguments.pop("bias"), arguments.pop("alibi_slopes"))

    def call(q, k, v, bias, slopes):
        options = {**arguments, **BACKENDS[backend]}
        return attention(q, k, v, bias=bias, alibi_slopes=slopes, **options)

    def run(*operands):
        out, vjp = jax.vjp(call, *operands)
        return out, *vjp(jnp.cos(out))

    specs = (*[P("data", None, "model")] * 3, P(None, "model"), P("model"))
    split = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip(operands, specs, strict=True)
    ]
    compiled = jax.jit(run).lower(*split).compile()
    assert _collectives(compiled) <= {"all-reduce"}
    _assert_equal(compiled(*split), jax.jit(run)(*operands))


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_shard_map_over_some_axes_of_a_mesh(backend):
    """The other axis stays automatic, whatever divides along it."""
    run = _with_gradients(backend)
    mesh = _mesh(AxisType.Auto)
    spec = P("data")
    partly = jax.shard_map(
        run, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"}
    )
    operands = _operands()
    split = _split(operands, mesh)
    _assert_equal(jax.jit(partly)(*split), jax.jit(run)(*operands))


@deep
@pytest.mark.usefixtures("no_cache")
def test_automatic_shardings_along_rows_are_gathered():
    """The call says so, and what to do instead."""
    mesh = _mesh(AxisType.Auto)
    operands = _operands()
    rows = NamedSharding(mesh, P(None, ("data", "model")))
    split = [jax.device_put(x, rows) for x in operands]
    run = _with_gradients("triton")
    with pytest.warns(UserWarning, match=r"each device gathers all of them.*Context"):
        actual = jax.jit(run)(*split)
    _assert_equal(actual, jax.jit(run)(*operands))


@pytest.mark.filterwarnings("ignore:.*the rows of query are divided")
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_automatic_shardings_need_not_be_even(axis):
    """As of what is sliced off rows, a batch or heads that were divided evenly."""
    mesh = _mesh(AxisType.Auto)
    x = np.concatenate([_operands()[0]] * 4)
    spec = P(*[None] * axis, "model")
    split = jax.device_put(x, NamedSharding(mesh, spec))

    @jax.jit
    def run(x):
        x = jax.lax.slice_in_dim(x, 1, None, axis=axis)
        return attention(x, x, x, is_causal=True, implementation="xla")

    np.testing.assert_allclose(run(split), run(x), rtol=1e-5, atol=1e-5)


@deep
def test_one_device_needs_no_partitioner():
    """Where nothing can divide a program, the call does not ask for its devices."""
    code = """
import jax, jax_flash2
x = jax.numpy.ones((1, 20, 2, 16))
print(jax.device_count())
print(jax.make_jaxpr(jax_flash2.attention)(x, x, x))
"""
    texts = {
        count: subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            },
        ).stdout
        for count in (1, 2)
    }
    for count, text in texts.items():
        assert text.startswith(f"{count}\n")
        assert ("custom_partitioning" in text) == (count > 1)
