"""The contract of a backend, shown by one that the tests add.

That it computes what the others do is shown with them (`runners`).
"""

import inspect
import re
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import _backends, attention, explain
from jax_flash2._backends import BACKENDS, Entry
from pallas_kernels.backend import Backend, Call, Pass, Plan
from tests import cases
from tests.cases import Case, by_name
from tests.kernels.runners import RUNNERS


@pytest.fixture
def proof(monkeypatch):
    """The one line that registers a backend."""
    monkeypatch.setitem(BACKENDS, "proof", Entry("tests.proof"))
    return {"implementation": "proof"}


def test_a_new_backend_under_vmap(proof):
    (q, k, v), _ = Case("plain", batch=(3,), t=20, s=20).inputs(jnp.float32)

    def gradient(options):
        def loss(*x):
            out = attention(*x, is_causal=True, precision="highest", **options)
            return jnp.sum(out**2)

        return jax.vmap(jax.grad(loss), (0, None, 0))(q, k[0], v)

    expected = gradient({"implementation": "xla"})
    np.testing.assert_allclose(gradient(proof), expected, rtol=1e-4, atol=1e-5)


def test_explain_names_a_new_backend(proof):
    x = jax.ShapeDtypeStruct((2, 20, 2, 16), jnp.float32)
    lines = explain(x, x, x, **proof).splitlines()
    assert lines[0] == "implementation: proof"
    assert "  proof: can serve this call" in lines


def test_a_backend_declines_with_a_reason_and_another_serves(monkeypatch):
    first = {"proof": Entry("tests.proof"), **BACKENDS}
    monkeypatch.setattr(_backends, "BACKENDS", first)
    small, large = (
        jax.ShapeDtypeStruct((1, 20, 2, h), jnp.float32) for h in (256, 264)
    )
    assert explain(small, small, small).startswith("implementation: proof")
    text = explain(large, large, large)
    assert text.startswith(f"implementation: {'triton' if cases.ON_GPU else 'xla'}")
    assert "  proof: head sizes above 256" in text


def test_a_slower_backend_gives_way_to_the_next_alone(monkeypatch):
    """Not to those after it, should the next one not serve the call."""
    x = jax.ShapeDtypeStruct((1, 20, 2, 16), jnp.float32)
    slow = Plan()
    slow.slower = "for a test"
    monkeypatch.setattr("tests.proof.plan", lambda call, pass_: slow)
    proof, xla = Entry("tests.proof"), BACKENDS["xla"]
    never = Entry("tests.proof", platform="none")
    for backends, chosen in (
        ({"proof": proof, "xla": xla}, "xla"),
        ({"proof": proof, "never": never, "xla": xla}, "proof"),
    ):
        monkeypatch.setattr(_backends, "BACKENDS", backends)
        text = explain(x, x, x)
        assert text.startswith(f"implementation: {chosen}\n")
        assert "  proof: can serve this call, slower: for a test" in text


def test_a_backend_is_asked_all_that_is_static(monkeypatch):
    asked = {}

    def plan(call, pass_):
        asked[pass_] = call
        return Plan()

    monkeypatch.setitem(BACKENDS, "proof", Entry("tests.proof"))
    monkeypatch.setattr("tests.proof.plan", plan)
    case = by_name("everything_learnt")
    arrays, arguments = case.inputs(jnp.bfloat16)
    explain(*arrays, **arguments, implementation="proof")
    assert set(asked) == set(get_args(Pass))
    call = asked["forward"]
    assert isinstance(call, Call)
    assert (call.size["t"], call.size["s"]) == (case.t, case.s)
    assert call.head_sizes == (case.h, case.d)
    assert call.group == case.n // case.k
    assert call.dtype == jnp.bfloat16
    assert [*call.differentiable][3:] == ["bias", "slopes", "sink"]
    assert call.spec.dropout is not None
    assert [type(atom).__name__ for atom in call.spec.masks] == ["Window", "SegmentIds"]
    assert not call.is_symbolic and not call.interpret


@pytest.mark.parametrize("name", [*BACKENDS, "proof"])
def test_modules_keep_the_contract(name, proof):
    module = _backends.module(name)
    entry = BACKENDS[name]
    for function in ("plan", "forward", *["backward"] * (not entry.only_by_name)):
        wanted = list(inspect.signature(getattr(Backend, function)).parameters)[1:]
        found = list(inspect.signature(getattr(module, function)).parameters)
        assert len(found) == len(wanted), function
    with _backends.lowering_context(name):
        pass


def test_tests_run_every_backend():
    assert {*cases.BACKENDS, *cases.APART} == set(BACKENDS)
    here = {*BACKENDS} - ({*cases.APART} if cases.ON_GPU else set())
    assert here <= set(RUNNERS)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({}, np.ones((600, 600))),
        ({"is_causal": True}, np.tri(600)),
        ({"local_window_size": (90, 40)}, np.tri(600, k=40) - np.tri(600, k=-91)),
    ],
)
def test_explain_counts_operations_of_products(arguments, kept):
    """Of the pairs that masks keep; in two products, and in five of the gradients."""
    q = jax.ShapeDtypeStruct((2, 600, 4, 8), jnp.float32)
    k = jax.ShapeDtypeStruct((2, 600, 2, 8), jnp.float32)
    v = jax.ShapeDtypeStruct((2, 600, 2, 24), jnp.float32)
    (line,) = (x for x in explain(q, k, v, **arguments).splitlines() if "FLOPs" in x)
    found = [float(x) for x in re.findall(r"\d\S*", line)]
    pairs = 2 * 4 * np.sum(kept)
    expected = 2 * pairs * np.array([8 + 24, 3 * 8 + 2 * 24])
    np.testing.assert_allclose(found, expected, rtol=0.02)
