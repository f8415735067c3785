"""Arrays whose types say how they are divided: jit, gradients and vmap keep that."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash2 import attention, explain
from tests.cases import BACKENDS, ON_GPU
from tests.tiers import MAINLY_XLA, deep, deeply

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="one device")

SHAPE = (4, 2) if jax.device_count() >= 8 else (2, min(jax.device_count() // 2, 2))

ATOL = 2e-2 if ON_GPU else 1e-5  # TF32
COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def _mesh():
    """Its axes are explicit, as those of `jax.make_mesh` are by default in new JAX."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    return jax.make_mesh(SHAPE, ("data", "model"), axis_types=kinds)


def _with_gradients(call):
    """(operands) -> output and gradients."""

    def run(*operands):
        out, vjp = jax.vjp(call, *operands)
        return out, *vjp(jnp.cos(out))

    return run


def _operands(*batch, kv_heads=2):
    rng = np.random.default_rng(0)
    shapes = [(*batch, 40, n, 16) for n in (4, kv_heads, kv_heads)]
    return [np.float32(rng.standard_normal(s)) for s in shapes]


def _check(call, operands, specs, *, communicates=False, is_set=True):
    """Same results with the types of the operands, and nothing is communicated."""
    run = jax.jit(_with_gradients(call))
    expected = run(*operands)
    mesh = _mesh()
    split = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]
    with jax.set_mesh(mesh if is_set else None):
        compiled = run.lower(*split).compile()
        actual = compiled(*split)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=ATOL)
    wanted = [split[0], *split]
    for a, x in zip(actual, wanted, strict=True):
        assert jax.typeof(a).sharding == jax.typeof(x).sharding
    found = re.findall(rf"({COLLECTIVES})(?:-start)?\(", compiled.as_text())
    assert bool(found) == communicates, found
    return compiled


ROWS = {
    "rows": [P(None, "data")] * 3,
    "batch and rows": [P("data", "model")] * 3,
    "rows and heads": [P(None, "data", "model")] * 3,
    "rows over both": [P(None, ("data", "model"))] * 3,
}


@pytest.mark.parametrize(
    "name", ["rows", "rows and heads", "rows over both", *deeply("batch and rows")]
)
@pytest.mark.parametrize("kind", ["bias", *deeply("causal", "window")])
def test_divided_rows(name, kind):
    """Each device has a run of them (`jax_flash2.Context`)."""
    specs = ROWS[name]
    heads = 2 if "model" in specs[0] else 1
    bias = np.random.default_rng(1).standard_normal((4, 40, 40))
    options = {
        "causal": {
            "is_causal": True,
            "key_value_seq_lengths": np.int32([33, 9, 40, 7]),
        },
        "bias": {"bias": np.float32(bias)},
        "window": {"is_causal": True, "local_window_size": (7, 0)},
    }
    call = functools.partial(attention, implementation="xla", **options[kind])
    operands = _operands(4, kv_heads=2 * heads)
    of_rows = specs[0][1]
    _check(call, operands, specs, communicates=of_rows != "model" or SHAPE[1] > 1)


def test_rows_divided_by_different_axes():
    mesh = _mesh()
    q, k, v = _operands(4)
    with jax.set_mesh(mesh):
        q = jax.device_put(q, NamedSharding(mesh, P(None, "data")))
        for spec in (P(), P(None, "model")):
            k, v = (jax.device_put(x, NamedSharding(mesh, spec)) for x in (k, v))
            with pytest.raises(ValueError, match="shard the rows of all three alike"):
                jax.jit(attention)(q, k, v)


def test_explain_says_how_rows_are_divided():
    mesh = _mesh()
    x = jax.ShapeDtypeStruct(
        (1, 2048 * SHAPE[0], 4, 16),
        jnp.float32,
        sharding=NamedSharding(mesh, P(None, "data")),
    )
    with jax.set_mesh(mesh):
        first, second, *_ = explain(x, x, x, is_causal=True).splitlines()
    assert first.startswith("context: ring")
    assert "rows in one run" in first
    assert "stripes would balance it" in second


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_a_mesh_that_is_not_set(backend):
    call = functools.partial(attention, is_causal=True, **BACKENDS[backend])
    specs = [P("data", None, "model")] * 3
    _check(call, _operands(4), specs, is_set=False)


@deep
def test_scan_on_a_mesh_that_is_not_set():
    def layers(q, k, v):
        def step(x, _):
            return x + attention(x, k, v, implementation="xla"), None

        return jax.lax.scan(step, q, None, length=2)[0]

    _check(layers, _operands(4), [P("data")] * 3, is_set=False)


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_vmap_over_a_divided_axis(backend):
    """With a second axis, that of heads, divided too."""
    call = functools.partial(attention, is_causal=True, **BACKENDS[backend])
    specs = [P("data", None, None, "model")] * 3
    _check(jax.vmap(call), _operands(4, 2), specs)


@pytest.mark.parametrize("is_set", [True, False])
def test_vmap_over_two_divided_axes(is_set):
    call = functools.partial(attention, is_causal=True, implementation="xla")
    specs = [P("data", "model")] * 3
    _check(jax.vmap(jax.vmap(call)), _operands(4, 2, 3), specs, is_set=is_set)


def test_vmap_with_shared_keys():
    """Their gradient is a sum over devices."""
    call = jax.vmap(functools.partial(attention, implementation="xla"), (0, None, None))
    q, k, v = _operands(4, 2)
    specs = [P("data"), P(), P()]
    _check(call, (q, k[0], v[0]), specs, communicates=True)


def test_whole_keys_beside_divided_query_heads():
    """Devices that share a key/value head sum its gradient; a bias stays whole."""
    q, k, v = _operands(2)
    bias = np.zeros((1, 4, 40, 40), np.float32)

    def call(q, k, v, bias):
        return attention(q, k, v, bias, implementation="xla")

    specs = [P(None, None, "data"), P(), P(), P()]
    _check(call, (q, k, v, bias), specs, communicates=True)


def test_a_device_does_its_share_of_the_work():
    """Of a vmap over 8 devices, an eighth."""
    mesh = _mesh()
    operands = _operands(8, 2)
    run = jax.jit(jax.vmap(functools.partial(attention, implementation="xla")))
    whole = run.lower(*operands).compile().cost_analysis()
    divided = NamedSharding(mesh, P(("data", "model")))
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, divided) for x in operands]
        share = run.lower(*split).compile().cost_analysis()
    assert share["flops"] == pytest.approx(whole["flops"] / math.prod(SHAPE), rel=0.05)


def test_second_derivatives():
    q, k, v = _operands(4)

    def gradient(q, k, v):
        def loss(q):
            return jnp.sum(jnp.cos(attention(q, k, v, implementation="xla")))

        return jax.grad(loss)(q)

    _check(gradient, (q, k, v), [P("data")] * 3)


def test_a_mesh_axis_divides_one_axis():
    mesh = _mesh()
    q, k, _ = _operands(4, kv_heads=4)
    with jax.set_mesh(mesh):
        q = jax.device_put(q, NamedSharding(mesh, P("data")))
        k = jax.device_put(k, NamedSharding(mesh, P(None, None, "data")))
        with pytest.raises(
            ValueError, match=r"key is sharded by mesh axes.*query.*another"
        ):
            jax.jit(attention)(q, k, k)
