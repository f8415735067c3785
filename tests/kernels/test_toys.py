"""A new kind of mask, or of score, is one file: what holds for all holds for it.

`toy_mask` and `toy_score` are used by no other code, and the library knows nothing of
them. They must meet what every mask and every term meets: the error rule in each case,
keys that hold NaN, which blocks are visited, which kernels are chosen.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Context, _arguments, attention, explain
from pallas_kernels.configs import Blocks
from pallas_kernels.core.arithmetic import PLAIN
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import DenseMask, SegmentIds, Window
from pallas_kernels.core.scores import Alibi, Bias, Score, Setting, SoftCap
from pallas_kernels.core.scores.base import PairPositions
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from tests import tolerances
from tests.cases import ON_GPU, PAIRWISE, WITH_BLOCKS, Case, by_name
from tests.core import test_counts
from tests.divided import Divided
from tests.kernels.runners import ALIKE, WITH_GRADIENTS, Runner
from tests.kernels.test_attention import check_same_bits
from tests.lowering import on_gpu
from tests.mosaic_gpu import test_visits
from tests.tiers import deep, deeply
from tests.toy_mask import Chunks
from tests.toy_score import Gain, InNumPy

CHUNKS = Chunks(64, 9) if ON_GPU else Chunks(16, 5)


def with_toys(function, masks=(), gain=None):
    """The function, while each spec that calls have gets these masks and this term."""

    def called(*arguments, **keywords):
        def spec(score, atoms, *rest, **more):
            if gain is not None:
                terms = (*score.terms, Gain(Named(gain, ("n",))))
                score = dataclasses.replace(score, terms=terms)
            return AttentionSpec(score, (*atoms, *masks), *rest, **more)

        with mock.patch.object(_arguments, "AttentionSpec", spec):
            return function(*arguments, **keywords)

    return called


def call(*, chunks=(), gain=None, **options):
    """`attention` with toys: their static data and their operand are arguments."""
    return with_toys(attention, chunks, gain)(**options)


def of_oracle(case: Case, arguments: dict, *, mask: bool, score: bool) -> dict:
    """The arguments with which the oracle computes the same."""
    found = dict(arguments)
    if mask:
        dense = CHUNKS.dense(case.t, case.s, arguments.get("query_offset", 0))
        dense = dense[..., None, :, :] if dense.ndim > 2 else dense
        found["mask"] = np.asarray(arguments.get("mask", True)) & dense
    if score:
        found["term"] = InNumPy
    return found


def gains(case: Case) -> dict:
    return {"gain": np.linspace(-0.5, 0.7, case.n, dtype=np.float32)}


def _evaluate(runner: Runner, arrays, cotangents, arguments, chunks=()):
    """`runner.evaluate` with toys."""
    if runner.by_threads:
        arguments = dict(arguments)
        evaluate = with_toys(runner.evaluate, chunks, arguments.pop("gain", None))
        return evaluate(arrays, cotangents, arguments)
    arguments = {**arguments, **({"chunks": chunks} if chunks else {})}
    return runner.evaluate(arrays, cotangents, arguments, call=call)


TOYS = ("mask", "score")


def _problems():
    """One in the first tier, but for kernels that are interpreted by threads."""
    for case in (by_name("causal_offset_batch"), *PAIRWISE[:: 1 if ON_GPU else 6]):
        for name, runner in WITH_GRADIENTS.items():
            if case in PAIRWISE or not runner.by_threads:
                label = f"{case.name}-{name}"
                deep_too = case in PAIRWISE or name in ALIKE
                yield runner.param(case, id=label, deep_too=deep_too)


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize(("case", "runner"), list(_problems()), indirect=["runner"])
def test_error_rule(case, runner, toy):
    case, dtype = runner.shaped(case), jnp.bfloat16
    arrays, arguments = case.inputs(dtype)
    arguments |= gains(case) if toy == "score" else {}
    cotangents = tolerances.cotangents_for(case, dtype)
    chunks = (CHUNKS,) if toy == "mask" else ()
    actual = _evaluate(runner, arrays, cotangents, arguments, chunks)
    expected = of_oracle(case, arguments, mask=toy == "mask", score=toy == "score")
    exact, plain = (
        runner.comparable(of(arrays, cotangents, expected), actual)
        for of in (tolerances.exact, tolerances.plain)
    )
    tolerances.check(actual, exact, plain, tolerances.unit_roundoff(dtype))


@pytest.mark.parametrize(
    "runner",
    [x.param(id=name, deep_too=x.one_of_each) for name, x in WITH_GRADIENTS.items()],
    indirect=True,
)
def test_keys_in_holes_may_hold_nan(runner):
    """What lies in keys that no query attends changes no bit of any result."""
    case = runner.shaped(Case("holes", batch=(1,), t=37, s=43))
    (q, k, v), _ = case.inputs(jnp.bfloat16)
    cotangents = tolerances.cotangents_for(case, jnp.bfloat16)
    clean = _evaluate(runner, (q, k, v), cotangents, {}, (CHUNKS,))
    hole = (np.arange(case.s) % CHUNKS.chunk < CHUNKS.hole)[:, None, None]
    arrays = q, *(jnp.where(hole, jnp.nan, x) for x in (k, v))
    check_same_bits(clean, _evaluate(runner, arrays, cotangents, {}, (CHUNKS,)))


@pytest.mark.parametrize(
    ("looped", "expected"),
    [
        ("s", ". + . .\n. + . .\n. . . +\n. . . +"),
        ("t", "+ + . .\n+ + . .\n. . + +\n. . + +"),
    ],
)
def test_visited_blocks(looped, expected):
    """A block of keys in a hole: no queries visit it, and it visits those around it."""
    found = test_counts.drawn([Chunks(8, 4)], 16, 16, looped)
    assert found == test_counts.drawing(expected)


@pytest.mark.parametrize("offset", [17, *deeply(None, -30)])
@pytest.mark.parametrize("others", [(), (Window(40, 3),)], ids=["alone", "window"])
def test_programs_that_add_to_dq_wait_for_those_before(offset, others):
    """Ranges that are not exact: what meets is counted."""
    offset = None if offset is None else Named(np.int32(offset), ())
    spec = AttentionSpec(Score(1.0), (Chunks(64, 32), *others), offset)
    assert not spec.meets_exactly
    launch = Launch(Blocks(16, 32, 8, 2), None, PLAIN, interpret=False, splits=1)
    test_visits.check_order(({"t": 150, "s": 190, "n": 2, "k": 1}, spec, launch))


def test_kernels_are_chosen_by_its_traits():
    """About 240 keys for a query are few, however many there are."""
    x = jax.ShapeDtypeStruct((1, 8192, 16, 128), jnp.bfloat16)
    with on_gpu():
        many = explain(x, x, x)
        few = with_toys(explain, (Chunks(256, 16),))(x, x, x)
    assert many.startswith("implementation: mosaic_gpu")
    assert few.startswith("implementation: triton")
    assert "about 240 keys for a query are few" in few


@pytest.mark.parametrize("method", ["ring", *deeply("gather", "heads")])
@pytest.mark.parametrize("stripe", [32, *deeply(None)])
def test_rows_on_several_devices(method, stripe):
    """Positions are those among all rows."""
    case = Case("plain", t=128, s=128, batch=(1,), n=4, k=4)
    arrays, _ = case.inputs(jnp.float32)
    chunks = (Chunks(32, 5),)
    found, expected = (
        with_toys(jax.jit(functools.partial(f, implementation="xla")), chunks)(*arrays)
        for f in (Divided(Context("x", stripe, method), (2,)), attention)
    )
    np.testing.assert_allclose(found, expected, atol=2e-6)


@deep
def test_combined_masks():
    """`&` and `|` of atoms with ranges and without, as the masks of their pairs."""
    rng = np.random.default_rng(0)
    ids = Named(np.sort(rng.integers(0, 4, 40)).astype(np.int32), ("t",))
    segments = SegmentIds(ids, ids.renamed("t", "s"))
    causal, dense = Window(None, 0), CHUNKS.dense(40, 40, 0)
    documents = ids.value[:, None] == ids.value
    past = np.tri(40, dtype=bool)
    cases = {
        "ranges, either": (causal | CHUNKS, past | dense),
        "ranges, both": (causal & CHUNKS, past & dense),
        "arrays, either": (causal | segments, past | documents),
        "arrays, both": ((causal & segments) | CHUNKS, (past & documents) | dense),
    }
    arrays, _ = Case("plain").inputs(jnp.float32)
    arguments = dict(zip(("query", "key", "value"), arrays, strict=True))
    for name, (atom, mask) in cases.items():
        expected = attention(**arguments, mask=mask, implementation="xla")
        for backend, options in WITH_BLOCKS.items():
            found = call(**arguments, chunks=(atom,), **options)
            error = np.max(np.abs(found - expected))
            assert error < (1e-2 if ON_GPU else 2e-6), (name, backend)


def test_kernels_decline_what_they_would_misread():
    """Mosaic GPU kernels read a mask of pairs as bits, and not as part of another."""
    x = jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)
    mask = DenseMask(Named(np.tri(4096, dtype=bool), ("t", "s")))
    with on_gpu():
        alone = with_toys(explain, (mask,))(x, x, x)
        combined = with_toys(explain, (mask | Window(64, 0),))(x, x, x)
    assert alone.startswith("implementation: mosaic_gpu")
    assert combined.startswith("implementation: triton")
    assert (
        "mosaic_gpu: an array with an element for each pair is part of a mask"
        in combined
    )


BLOCK = PairPositions(np.arange(6.0)[:, None], np.arange(8.0), is_causal=False)


@pytest.mark.parametrize("count", range(5))
def test_scores_in_any_order(count):
    """Cotangents and tangents of all terms, wherever the one that keeps more stands."""
    rng = np.random.default_rng(count)
    x = rng.standard_normal((6, 8))
    terms = [Bias(x + 0.1), Alibi(np.float64(0.3)), SoftCap(1.5), Gain(np.float64(0.4))]
    score = Score(0.7, tuple(terms[count:] + terms[:count]), np.float64(1.2))
    setting = Setting(BLOCK)
    names = list(score.operands)
    with jax.enable_x64(True):
        operands, tree = jax.tree.flatten(jax.tree.map(jnp.float64, score))
        qk, ds = jnp.asarray(rng.standard_normal((2, 6, 8)))

        def value(qk, *operands):
            return jax.tree.unflatten(tree, operands).apply(qk, setting).value

        _, vjp = jax.vjp(value, qk, *operands)
        dqk, *expected = vjp(ds)
        score = jax.tree.unflatten(tree, operands)
        scores = score.apply(qk, setting)
        pulled = score.pull(ds, scores, setting, False)
        np.testing.assert_allclose(pulled.dz * score.gradient_unit, dqk, rtol=1e-12)
        for name, x in zip(names, expected, strict=True):
            own = pulled.operand(name, qk)
            own = own if name == "bias" else np.sum(own)
            np.testing.assert_allclose(own, x, rtol=1e-12, err_msg=name)
        tangents = [jnp.asarray(rng.standard_normal(x.shape)) for x in operands]
        _, expected = jax.jvp(value, (qk, *operands), (ds, *tangents))
        by_name = dict(zip(names, tangents, strict=True))
        found = score.push(ds, qk, by_name, scores, setting)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
