"""Forward mode on Hopper, in every order: who makes the tangents, and their numbers."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import _backends, attention, explain
from jax_flash2._operation import Operation
from tests import mosaic_interpreter
from tests.cases import ON_GPU
from tests.lowering import kernel_modules, lower_for_gpu, on_gpu, string_attributes
from tests.mosaic import on_hopper, with_any_size
from tests.tiers import deep
from tests.transforms import test_derivatives

H100 = "NVIDIA H100 80GB HBM3"


def _jvp(f, operands, tangents):
    return jax.jvp(f, operands, tangents)


def _jacfwd(f, operands, tangents):
    """By a factor of the query, through a `vmap` of tangents."""
    q, *others = operands
    return jax.jacfwd(lambda factor: f(q * factor, *others))(jnp.ones((), q.dtype))


def _vmap_of_jvp(f, operands, tangents):
    """Of tangents alone."""
    twice = (jnp.stack([x, 3 * x]) for x in tangents)
    return jax.vmap(lambda *along: jax.jvp(f, operands, along)[1])(*twice)


def _vmap_of_query(f, operands, tangents):
    q, *others = operands
    run = jax.vmap(lambda q: jax.jvp(f, (q, *others), tangents), in_axes=2)
    return run(jnp.stack([q, 2 * q], axis=2))


def _jvp_of_scan(f, operands, tangents):
    """Of layers, each of which attends to the output of the one before."""
    q, *others = operands

    def layers(q, *others):
        return jax.lax.scan(lambda q, _: f(q, *others), q, length=2)

    return jax.jvp(layers, (q, *others), tangents)


# Which kernels they are, in order; loops of plain JAX are tangents of gradients.
ALONG = ["forward", "tangent"]
TWICE = [*ALONG, "backward"]
ORDERS = {
    _jvp: ALONG,
    _jacfwd: ALONG,
    _vmap_of_jvp: ALONG,
    _vmap_of_query: ALONG,
    _jvp_of_scan: ALONG,
    test_derivatives._jvp_of_jit: ALONG,
    test_derivatives._linearize: ALONG,
    test_derivatives._jvp_of_checkpoint: ALONG,
    test_derivatives._grad_of_jvp: TWICE,
    test_derivatives._jvp_of_grad: TWICE,
    test_derivatives._vjp_of_grad: TWICE,
    test_derivatives._vjp_of_jvp: ["forward", *["tangent"] * 2, *["backward"] * 2],
}


def orders(first, *more) -> list:
    """Parameters: of the first tier alone that one."""
    return [
        pytest.param(x, marks=[] if x is first else [deep], id=x.__name__.strip("_"))
        for x in more or ORDERS
    ]


def made(text: str) -> list[str]:
    """The Mosaic GPU kernels of a program, in order."""
    modules = string_attributes(text, "module")
    names = (re.search(rb"flash2_(forward|backward|tangent)", x) for x in modules)
    return [x[1].decode() for x in names if x]


@pytest.mark.parametrize("transformation", orders(_vmap_of_jvp))
def test_its_kernel_makes_the_tangents(transformation):
    q, k = (jax.ShapeDtypeStruct((1, 2304, n, 64), jnp.bfloat16) for n in (32, 2))
    f = functools.partial(attention, is_causal=True, return_residual=True)
    run = functools.partial(transformation, f)
    text = lower_for_gpu(run, (q, k, k), (q, k, k), device=H100)
    assert made(text) == ORDERS[transformation]
    assert not kernel_modules(text)  # of Triton


def _evaluated(jaxpr, constants, arguments) -> list:
    """What a program gives, with the rules of attention's operations in their place.

    Those rules call back into Python, in order, which an operation of JAX may not.
    """
    names = [*jaxpr.constvars, *jaxpr.invars]
    held = dict(zip(names, [*constants, *arguments], strict=True))
    for line in jaxpr.eqns:
        given = [x.val if hasattr(x, "val") else held[x] for x in line.invars]
        operation = getattr(line.primitive.impl, "__self__", None)
        if isinstance(operation, Operation):
            named = {name: line.params[name] for name in ("problem", "axes")}
            found = operation._implementation(*given, **named)
        elif line.primitive.name in ("jit", "pjit"):
            inner = line.params["jaxpr"]
            found = _evaluated(inner.jaxpr, inner.consts, given)
        elif line.primitive.name in ("checkpoint", "remat", "remat2"):
            found = _evaluated(line.params["jaxpr"], (), given)
        else:
            parameters = line.primitive.get_bind_params(line.params)
            found = line.primitive.bind(*given, **parameters)
            found = found if line.primitive.multiple_results else [found]
        held.update(zip(line.outvars, found, strict=True))
    return [held[x] for x in jaxpr.outvars]


def _arrays(seed: int, rows: int = 140):
    rng = np.random.default_rng(seed)
    shapes = [(1, rows, heads, 64) for heads in (2, 1, 1)]
    return tuple(jnp.asarray(rng.standard_normal(x), jnp.bfloat16) for x in shapes)


def _call(implementation: str):
    return functools.partial(
        attention, is_causal=True, return_residual=True, implementation=implementation
    )


def _assert_close(found, expected):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * np.max(np.abs(b)))


@pytest.mark.skipif(
    ON_GPU or not mosaic_interpreter.IS_SUPPORTED,
    reason="a GPU runs the kernels, or JAX cannot interpret them",
)
@pytest.mark.parametrize(
    "transformation",
    orders(_vmap_of_jvp, *(x for x in ORDERS if x is not _jvp_of_scan)),
)
def test_numbers(transformation, monkeypatch):
    """As if the interpreter were a platform of the backend."""
    arguments = _arrays(0), _arrays(1)
    expected = jax.jit(functools.partial(transformation, _call("reference")))(
        *arguments
    )
    mosaic_interpreter.install(monkeypatch)
    with_any_size(monkeypatch)
    entry = _backends.BACKENDS["mosaic_gpu"]
    here = dataclasses.replace(entry, platform=jax.default_backend())
    monkeypatch.setitem(_backends.BACKENDS, "mosaic_gpu", here)
    run = functools.partial(transformation, _call("mosaic_gpu"))
    program = jax.make_jaxpr(run)(*arguments)
    evaluate = functools.partial(_evaluated, program.jaxpr, program.consts)
    found = jax.jit(evaluate)(jax.tree.leaves(arguments))
    _assert_close(found, jax.tree.leaves(expected))


@on_hopper
@pytest.mark.parametrize("transformation", list(ORDERS))
def test_numbers_compiled(transformation):
    arguments = _arrays(0, 300), _arrays(1, 300)
    found, expected = (
        jax.jit(functools.partial(transformation, _call(name)))(*arguments)
        for name in ("mosaic_gpu", "reference")
    )
    _assert_close(found, expected)


@pytest.mark.parametrize(
    ("rows", "head", "arguments", "name"),
    [
        (448, 64, {}, "triton"),
        (512, 64, {}, "mosaic_gpu"),
        (2304, 64, {"is_causal": True}, "mosaic_gpu"),
        (320, 128, {}, "triton"),
        (352, 128, {}, "mosaic_gpu"),
        (128, 128, {"is_causal": True}, "mosaic_gpu"),
    ],
)
def test_from_how_many_keys_it_is_the_default(rows, head, arguments, name):
    q = jax.ShapeDtypeStruct((8, rows, 2048 // head, head), jnp.bfloat16)
    with on_gpu(H100):
        lines = explain(q, q, q, **arguments).splitlines()
        named = explain(q, q, q, **arguments, implementation="mosaic_gpu").splitlines()
    tangent = next(x.strip() for x in lines if x.startswith("    tangent: "))
    assert tangent.split(" (")[0] == f"tangent: {name}"
    assert ("are few" in tangent) == (name == "triton")
    assert "    tangent: mosaic_gpu" in named
