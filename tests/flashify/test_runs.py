"""`flashify` of programs that repeat a layer: equal runs share a `jit`."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import source_info_util
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash2 import flashify
from tests.tiers import deeply


def arrays(*batch: int, layers: int = 2):
    keys = jax.random.split(jax.random.key(0))
    shapes = (*batch, 6, 8), (layers, 8, 8)
    x, weights = (
        0.5 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)
    )
    return x, tuple(weights)


def layer(x, weights, extra=lambda y: y, scale=1.0, window=6, scope=jax.named_scope):
    """Scopes "attend" and "mix", of which the first has a site."""
    with scope("attend"):
        q = jnp.sin(x @ weights)
        i, j = jnp.arange(6)[:, None], jnp.arange(6)
        s = jnp.where((j <= i) & (i - j < window), q @ x.mT * scale, -1e9)
        out = jax.nn.softmax(s) @ x
    with scope("mix"):
        return x + extra(jnp.cos(out @ weights))


def model(x, weights, of_layer: Callable = lambda i: {}):
    for i, w in enumerate(weights):
        x = layer(x, w, **of_layer(i))
    return x


def without_names(x, weights):
    return model(x, weights, lambda _: {"scope": lambda _: contextlib.nullcontext()})


def in_scopes(x, weights):
    with jax.named_scope("model"):
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer{i}"):
                x = layer(x, w)
    return x


def in_one_scope(x, weights):
    """The first and last layers are no others, whatever is before and behind them."""
    with jax.named_scope("model"):
        return jnp.tanh(without_names(jnp.exp(x), weights))


def names_of_einsum(x, weights):
    """Each product is in a scope of its own, which is inside of no run."""
    for w in weights:
        p = jax.nn.softmax(jnp.einsum("td,sd->ts", x @ w, x))
        x = jnp.einsum("ts,sd->td", p, jnp.sin(x))
    return x


def in_lines(x, weights):
    """The same operations on different lines."""

    def first(y):
        return jnp.sin(y)

    def second(y):
        return jnp.sin(y)

    return model(x, weights, lambda i: {"extra": (first, second)[i]})


def in_names(x, weights):
    """The same operations in scopes that have no site."""

    def of_layer(i):
        return {"extra": jax.named_scope(f"extra{i}")(jnp.sin)}

    return model(x, weights, of_layer)


def in_jit(x, weights):
    own = jax.jit(layer)
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer{i}"):
            x = own(x, w)
    return x


def equations(jaxpr, names: str = "") -> Iterator[tuple[str, Any]]:
    """Name scopes and equations, those inside of `jit` too."""
    for x in jaxpr.eqns:
        own = f"{names}/{x.source_info.name_stack}"
        yield own.strip("/").replace("//", "/"), x
        if x.primitive.name in ("jit", "pjit"):
            yield from equations(x.params["jaxpr"].jaxpr, own)


def shared(function, *args) -> dict[int, int]:
    """How often each `jit` that `flashify` makes is called."""
    found: dict[int, int] = {}
    for _, x in equations(jax.make_jaxpr(flashify(function))(*args).jaxpr):
        if x.params.get("name") == "flashify":
            own = id(x.params["jaxpr"])
            found[own] = found.get(own, 0) + 1
    return found


def check(function, x, weights, gradients: bool = True):
    """Results and gradients are those of the function itself."""

    def both(own):
        def loss(x, weights):
            out = own(x, weights)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, (0, 1), has_aux=True) if gradients else own

    fast = flashify(function, must_find=True)
    found, expected = (jax.jit(both(f))(x, weights) for f in (fast, function))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.parametrize(
    "function, times",
    [
        (without_names, [4]),
        (in_one_scope, [4]),
        (names_of_einsum, [4]),
        (model, [4, 4]),
        (in_scopes, [4, 4]),
        (in_jit, [4, 4]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_equal_layers_share_their_runs(function, times):
    """In one scope, or in none, a run is a layer."""
    x, weights = arrays(layers=4)
    assert sorted(shared(function, x, weights).values()) == times


def test_results_and_gradients():
    check(in_scopes, *arrays())


def test_one_layer_has_no_jit_of_ours():
    assert not shared(layer, arrays()[0], arrays()[1][0])


ONES = jnp.ones((6, 8))
# Layers that differ in one thing by turns: what the odd ones have.
DIFFERENT = {
    "operation": lambda i: {"extra": (jnp.tanh, jnp.exp)[i % 2]},
    "literal": lambda i: {"extra": lambda y: y * (1.0 + i % 2)},
    "sign_of_zero": lambda i: {
        "extra": lambda y: jnp.arctan2((0.0, -0.0)[i], -1.0 - y * y)
    },
    "parameter": lambda i: {"extra": lambda y: y ** (2 + i % 2)},
    "operand": lambda i: {
        "extra": lambda y: jnp.subtract(*(y, jnp.sin(y))[:: 1 - 2 * i])
    },
    "value_of_its_own": lambda i: {"extra": lambda y: jnp.sin(y) * (ONES, y)[i]},
    "scale": lambda i: {"scale": 1.0 + i % 2},
    "window": lambda i: {"window": 1 + i % 2},
}


MORE = "operation", "literal", "scale"


@pytest.mark.parametrize(
    "name", [*(x for x in DIFFERENT if x not in MORE), *deeply(*MORE)]
)
def test_different_layers_do_not(name):
    function = functools.partial(model, of_layer=DIFFERENT[name])
    check(function, *arrays(), gradients=False)


@pytest.mark.parametrize(
    "function", [in_scopes, in_jit, in_lines, in_names], ids=lambda f: f.__name__
)
def test_names_and_lines_stay(function):
    """Each operation keeps its scopes, and the line of the program."""

    def of(own) -> set[tuple[str, str, str]]:
        found = equations(jax.make_jaxpr(own)(*arrays()).jaxpr)
        return {
            (names, x.primitive.name, source_info_util.summarize(x.source_info))
            for names, x in found
            if x.primitive.name in ("sin", "cos")
        }

    assert of(flashify(function)) == of(function)


def test_a_value_of_one_layer_is_used_later():
    def function(x, weights):
        kept = []

        def of_layer(i):
            del i
            return {"extra": lambda y: kept.append(y) or y}

        return model(x, weights, of_layer), kept[0]

    check(function, *arrays(), gradients=False)


def test_side_effects_stay_in_order(capfd):
    def function(x, weights):
        for i, w in enumerate(weights):
            x = layer(x, w)
            jax.debug.print("layer", ordered=True)
            jax.debug.print("{}", i, ordered=True)
        return x

    jax.jit(flashify(function))(*arrays())
    jax.effects_barrier()
    assert capfd.readouterr().out == "layer\n0\nlayer\n1\n"


def test_mutable_arrays_are_made_in_no_jit_of_ours():
    def function(x, weights):
        made = []

        def of_layer(i):
            del i
            return {"extra": lambda y: made.append(jax.new_ref(y)) or y}

        out = model(x, weights, of_layer)
        return out, [x[...] for x in made]

    check(function, *arrays(layers=3), gradients=False)


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_of_transformed_functions(is_checkpoint):
    """Runs of a graph inside, and runs inside of a transform."""
    if is_checkpoint:
        check(jax.checkpoint(model), *arrays())
        return
    fast = jax.vmap(flashify(model), (0, None))
    found, expected = (
        jax.jit(f)(*arrays(2)) for f in (fast, jax.vmap(model, (0, None)))
    )
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize(
    ("is_mapped", "axis_type"),
    [
        *((False, AxisType.Explicit), (True, AxisType.Auto)),
        *deeply((False, AxisType.Auto), (True, AxisType.Explicit)),
    ],
)
def test_meshes(axis_type, is_mapped):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,))
    x, weights = arrays(2)
    x = jax.device_put(x, NamedSharding(mesh, P("x")))
    weights = jax.device_put(weights, NamedSharding(mesh, P()))
    function = model
    if is_mapped:
        specs = P("x"), P()
        function = jax.shard_map(model, mesh=mesh, in_specs=specs, out_specs=P("x"))
    with jax.set_mesh(mesh):
        check(function, x, weights, gradients=axis_type is AxisType.Explicit)
