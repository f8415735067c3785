"""The tangent kernel for Hopper: in JAX's interpreter, and lowered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, _api, _backends, _operation, attention, explain
from jax_flash2._operation import Problem
from pallas_kernels.core.axes import Named, batch_axes
from pallas_kernels.mosaic_gpu import support
from tests import mosaic_interpreter, ptxas, tolerances
from tests.cases import ON_GPU, Case, by_name
from tests.kernels import test_tangents
from tests.lowering import lower_for_gpu, on_gpu, string_attributes
from tests.mosaic import on_hopper, with_heads
from tests.tiers import deep, deeply

NAME = "mosaic_gpu"
TWO = {"config": Config(dq=Blocks(128, 64, 8, 2))}  # stages, which come round again
Q = jax.ShapeDtypeStruct((2, 8192, 16, 64), jnp.bfloat16)
K = jax.ShapeDtypeStruct((2, 8192, 4, 64), jnp.bfloat16)

interpreted = pytest.mark.skipif(
    ON_GPU or not mosaic_interpreter.IS_SUPPORTED,
    reason="a GPU runs the kernels, or JAX cannot interpret them",
)


def pushed(operands, tangents, arguments) -> dict[str, np.ndarray]:
    """As of `test_tangents`, by this kernel; tangents may be absent."""
    backend = _backends.module(NAME)
    call = _api.given(**operands, **arguments, implementation=NAME).checked()
    problem = Problem.of(call, NAME, is_named=True)
    plan = backend.plan(call, "tangent")
    own = {name: x for name, x in arguments.items() if name != "config"}
    kept = attention(
        **operands, **own, implementation="reference", return_residual=True
    )

    @jax.jit
    def run(arrays, tangents, kept):
        with support.lowering_context():
            call = problem.named(arrays)
            rows = (*batch_axes(call.operands), "t", "n")
            structs = _operation.forward_outputs(problem, call.operands)
            axes = (*rows, "d"), rows
            o, lse = (
                Named(Named(x, own).to(struct.axes), struct.axes)
                for x, own, struct in zip(kept, axes, structs, strict=True)
            )
            primals = call.differentiable
            along = {n: Named(x, primals[n].axes) for n, x in tangents.items()}
            found = backend.tangent(plan, call, (o, lse), along, structs)
            named = (Named(x, s.axes) for x, s in zip(found, structs, strict=True))
            return [x.to(a) for x, a in zip(named, axes, strict=True)]

    found = run(tuple(x.value for x in call.operands), tangents, kept)
    found, names = (kept[1], *found), ("lse", "tangent", "lse tangent")
    return {n: np.asarray(x, np.float64) for n, x in zip(names, found, strict=True)}


def sized(name: str, head: int, **more) -> Case:
    sizes = {"t": 150, "s": 280, **more}
    return with_heads(dataclasses.replace(by_name(name), **sizes), head)


ONE = {"batch": (1,), "n": 1, "k": 1}
PROBLEMS = [
    pytest.param(sized("causal", 64, t=280, **ONE), "bfloat16", TWO, id="two_stages"),
    pytest.param(
        sized("lengths", 64, t=90, **ONE), "bfloat16", TWO, marks=deep, id="lengths"
    ),
    pytest.param(sized("window_offset", 64), "float16", {}, marks=deep, id="window"),
    pytest.param(
        sized("segments_causal_gqa", 64), "bfloat16", {}, marks=deep, id="segments"
    ),
    pytest.param(sized("lengths", 128), "bfloat16", {}, marks=deep, id="wide"),
    pytest.param(
        sized("window_empty_rows", 64), "bfloat16", {}, marks=deep, id="empty_rows"
    ),
]


@interpreted
@pytest.mark.parametrize(("case", "dtype", "more"), PROBLEMS)
def test_error_rule(case, dtype, more, monkeypatch, record_property):
    """Where stages come round again, every access is ordered, too."""
    mosaic_interpreter.install(monkeypatch, races=more is TWO)
    operands, tangents, arguments = test_tangents._inputs(case, jnp.dtype(dtype))
    actual = pushed(operands, tangents, arguments | more)
    plain = test_tangents._pushed(
        operands, tangents, arguments, implementation="reference"
    )
    with jax.enable_x64(True):
        exact = test_tangents._exact(operands, tangents, arguments)
    unit = tolerances.unit_roundoff(dtype)
    found = tolerances.check(actual, exact, plain, unit)
    assert more is not TWO or not mosaic_interpreter.found_races()
    record_property("share of the allowed error", float(max(found.values())))


@on_hopper
@pytest.mark.parametrize(("case", "dtype", "more"), PROBLEMS)
def test_error_rule_compiled(case, dtype, more, record_property):
    more = {"implementation": NAME, **more}
    test_tangents.check(case, dtype, record_property, **more)


@deep
@interpreted
@pytest.mark.parametrize("absent", ["query", "key", "value"])
def test_tangents_of_zeros_are_left_out(absent, monkeypatch):
    mosaic_interpreter.install(monkeypatch)
    case = sized("causal", 64, **ONE)
    operands, tangents, arguments = test_tangents._inputs(case, jnp.dtype("bfloat16"))
    tangents[absent] = jnp.zeros_like(tangents[absent])
    with_zeros = pushed(operands, tangents, arguments | TWO)
    del tangents[absent]
    for name, x in pushed(operands, tangents, arguments | TWO).items():
        np.testing.assert_array_equal(x, with_zeros[name], err_msg=name)


@deep
@interpreted
def test_padding_never_comes_through(monkeypatch):
    """NaN beyond lengths changes no bit, and barriers order all accesses to memory."""
    mosaic_interpreter.install(monkeypatch, races=True)
    case = sized("causal", 64, batch=(2,))
    operands, tangents, arguments = test_tangents._inputs(case, jnp.dtype("bfloat16"))
    lengths = {"query": np.int32([70, 150]), "key": np.int32([280, 90])}
    arguments |= {"query_seq_lengths": lengths["query"], **TWO}
    arguments["key_value_seq_lengths"] = lengths["value"] = lengths["key"]

    def poisoned(arrays):
        rows = {n: np.arange(x.shape[1]) >= lengths[n][:, None] for n, x in arrays}
        return {n: jnp.where(rows[n][..., None, None], jnp.nan, x) for n, x in arrays}

    clean = pushed(operands, tangents, arguments)
    dirty = map(poisoned, (operands.items(), tangents.items()))
    for name, x in pushed(*dirty, arguments).items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)
    assert np.isfinite(clean["tangent"]).all()
    assert not mosaic_interpreter.found_races()


@pytest.mark.parametrize("head", [64, *deeply(128)])
def test_rows_of_any_number_lower(head):
    """TMA copies tiles of 8 rows from arrays that have whole ones alone."""
    shapes = (1, 151, 2, head), *[(1, 283, 1, head)] * 2
    arrays = tuple(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes)
    call = functools.partial(attention, is_causal=True, implementation=NAME)
    text = lower_for_gpu(functools.partial(jax.jvp, call), arrays, arrays)
    assert b"flash2_tangent" in string_attributes(text, "module")[1]


def explained(q=Q, k=K, **arguments) -> list[str]:
    with on_gpu("NVIDIA H100 80GB HBM3"):
        return explain(q, k, k, implementation=NAME, **arguments).splitlines()


def test_who_makes_which_pass():
    lines = explained(is_causal=True)
    for name in ("forward", "backward", "tangent"):
        assert f"    {name}: {NAME}" in lines


def _of(h: int, rows: int = 8192) -> dict:
    q, k = (jax.ShapeDtypeStruct((2, rows, x.shape[2], h), x.dtype) for x in (Q, K))
    return {"q": q, "k": k}


DECLINED = {
    "heads": (_of(80), "for tangents head sizes (80, 80) are not 64 both, or 128"),
    "dropout": (
        {"dropout_rate": 0.1, "dropout_rng": jax.random.PRNGKey(0)},
        "its kernel for tangents has no dropout",
    ),
    "lists": (
        {**_of(64, rows=300), "mask_mod": lambda b, h, q, kv: (q == kv) | (kv < 3)},
        "its kernel for tangents walks no lists of blocks",
    ),
    "sinks": (
        {"sinks": jnp.zeros(16)},
        "its kernel for tangents changes no scores, and no sum of a row",
    ),
    "mask": (
        {"mask": jax.ShapeDtypeStruct((8192, 8192), jnp.bool_)},
        "its kernel for tangents reads no array with an element for each pair",
    ),
    "rows": (
        {"config": Config(dq=Blocks(64, 64, 4, 2))},
        "Config.dq: block_q=64 is not 128 or 192, as for tangents",
    ),
    "stages": (
        {"config": Config(dq=Blocks(128, 64, 8, 1))},
        "Config.dq: num_stages=1 is less than 2",
    ),
    "memory": (
        {**_of(128), "config": Config(dq=Blocks(128, 64, 8, 3))},
        "needs 258 KiB of shared memory and this GPU has 227",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined_by_a_reason(name):
    arguments, reason = DECLINED[name]
    (line,) = (x for x in explained(**arguments) if x.startswith("    tangent: "))
    assert f"(not {NAME}: " in line and reason in line


@deep
def test_jvp_runs_it():
    modules = ptxas.tangents()["tangent, head size 64, causal"].modules
    assert [b"flash2_tangent" in x for x in modules] == [False, True]
