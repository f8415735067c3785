"""Blocks of which all pairs read one number, in the forward for Hopper (`gather`)."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import _api
from pallas_kernels.core.pointwise import binding
from pallas_kernels.core.positions import Numbering
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.mosaic_gpu.hopper import tuning
from tests import mosaic_interpreter, tolerances
from tests.cases import ON_GPU, Case, by_name
from tests.functions import Relative
from tests.kernels.test_mods import ARRAYS, SCORES
from tests.lowering import on_gpu
from tests.mosaic import MOSAIC, on_hopper, with_heads, with_numbers
from tests.tiers import deeply

BF16 = "bfloat16"
CAUSAL, FULL = {"is_causal": True}, {}


def _case(rows: int, head: int, heads: int = 2) -> Case:
    case = dataclasses.replace(by_name("plain"), t=rows, s=rows, n=heads, k=1)
    return with_heads(case, head)


def _table(case: Case, far: int, ends: float = 1.0, dtype=jnp.float32) -> Relative:
    """Of random numbers, and times `ends` beyond `far`."""
    rng = np.random.default_rng(far)
    table = rng.standard_normal((case.n, 2 * far + 3))
    table[:, [0, -1]] = ends * (1 + np.abs(table[:, [0, -1]]))
    return Relative(jnp.asarray(table, dtype))


@pytest.mark.skipif(
    ON_GPU or not mosaic_interpreter.IS_SUPPORTED, reason="there is no interpreter"
)
@pytest.mark.parametrize(
    ("head", "ends", "arguments"),
    [
        (64, 3.0, FULL),
        *deeply((64, -3.0, CAUSAL), (128, 3.0, CAUSAL), (128, -math.inf, FULL)),
    ],
)
def test_the_forward_interpreted(head, ends, arguments, monkeypatch):
    mosaic_interpreter.install(monkeypatch)
    with_numbers(monkeypatch, many_level_keys=0)
    case = _case(330, head)
    arrays, _ = case.inputs(BF16)
    own = {**arguments, "score_mod": _table(case, 20, ends)}
    cotangents = tolerances.cotangents_for(case, BF16)
    found = mosaic_interpreter.evaluate(arrays, cotangents, own)
    exact = tolerances.exact(arrays, cotangents, own)
    for name in ("out", "lse"):
        error = np.abs(np.asarray(found[name], float) - exact[name])
        assert np.max(error) < 0.01 * np.max(np.abs(exact[name])), name


@on_hopper
@pytest.mark.parametrize(("head", "many"), [(64, 0), (64, 2048), (128, 0)])
@pytest.mark.parametrize("arguments", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("rows", "far", "ends", "dtype"),
    [
        (1000, 30, 2.0, jnp.float32),
        (1000, 130, -2.0, jnp.bfloat16),
        (700, 700, 1.0, jnp.float32),  # no block is level
        (700, 100, -math.inf, jnp.float32),
        (1000, 100, 300.0, jnp.float32),  # far beyond the maximum of the first block
    ],
)
def test_by_the_error_rule(head, many, arguments, rows, far, ends, dtype, monkeypatch):
    with_numbers(monkeypatch, many_level_keys=many)
    # Of other heads, or JAX would take the program that it has.
    case = _case(rows, head, heads=4 if many else 2)
    arrays, _ = case.inputs(BF16)
    cotangents = tolerances.cotangents_for(case, BF16)
    own = {**arguments, "score_mod": _table(case, far, ends, dtype)}
    exact = tolerances.exact(arrays, cotangents, own)
    plain = tolerances.plain(arrays, cotangents, own)
    actual = tolerances.evaluate(arrays, cotangents, {**own, **MOSAIC})
    tolerances.check(actual, exact, plain, tolerances.unit_roundoff(BF16))


def _score(name: str):
    make, captured = SCORES[name]
    call = _api.given(*ARRAYS, score_mod=make(*captured))
    return call.checked().spec.score


@pytest.mark.parametrize(
    ("name", "may_be_level", "maximum_may_grow"),
    [
        ("table", True, False),
        ("soft_cap", False, False),
        ("of_keys", False, False),
        ("of_rows", False, False),
        ("swin", False, False),
        ("distance", False, True),
        ("masking", False, True),
    ],
)
def test_what_is_known_of_a_function(name, may_be_level, maximum_may_grow, monkeypatch):
    """Positions that are numbers in a score, as in ALiBi, may make it grow."""
    monkeypatch.setattr(binding, "FEW_PAIRS", 0)  # swin's places are computed
    score = _score(name)
    (term,) = score.terms
    assert score.may_be_level is may_be_level
    assert term.traits.maximum_may_grow is maximum_may_grow


@pytest.mark.parametrize(
    ("head", "keys", "rows", "finds_level"),
    [
        (64, 2047, 128, False),
        (64, 2048, 192, True),
        (128, 100, 128, True),
        (160, 4096, 128, False),
        (256, 4096, 128, False),
    ],
)
def test_blocks_are_chosen(head, keys, rows, finds_level):
    """A table takes three warpgroups where its blocks may be level."""
    spec, other = (AttentionSpec(_score(name)) for name in ("table", "of_pairs"))
    width, rows_apart = {"h": head, "d": head}, Numbering(stripe=64, parts=2)
    striped = dataclasses.replace(spec, query_rows=rows_apart, key_rows=rows_apart)
    with on_gpu():
        blocks = tuning.choose((head, head), keys, spec)
    assert blocks.block_q == rows
    assert tuning.finds_level(width, spec, blocks) is finds_level
    for others in (other, striped):
        assert not tuning.finds_level(width, others, blocks)


def test_other_arithmetic_is_not_level():
    """What is added must be all, and of the distance alone."""
    make, (table,) = SCORES["table"]
    keys, (keys_captured,) = SCORES["of_keys"]
    with_table, with_keys = make(table), keys(keys_captured)

    def both(s, *at):
        return with_table(with_keys(s, *at), *at)

    def times(s, *at):
        return with_table(2 * s, *at)

    def beside(s, b, h, q, kv):
        return s + (table[h, jnp.clip(q - kv, 0, 5)] + keys_captured[b, kv])

    for function in (both, times, beside):
        score = _api.given(*ARRAYS, score_mod=function).checked().spec.score
        assert not score.may_be_level
    assert _score("table").may_be_level
