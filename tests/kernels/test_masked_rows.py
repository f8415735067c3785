"""Rows that attend to nothing: what lies there touches nothing, in either direction."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import attention
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import DenseMask, Lengths, SegmentIds, Window
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from tests import tolerances
from tests.cases import (
    BACKENDS,
    INTERPRETED,
    ON_GPU,
    SMALL_BLOCKS,
    Case,
)
from tests.kernels.runners import RUNNERS, WITH_GRADIENTS, Runner
from tests.kernels.test_attention import check_same_bits
from tests.lowering import lower_for_gpu
from tests.tiers import deep, deeply
from tests.tolerances import cotangents_for

CASE = Case("masked_rows", batch=(2,), t=40, s=48, n=4, k=2)


def _row_mask(case: Case) -> dict:
    """Every seventh query and a whole block have no key."""
    rows = np.arange(case.t)
    return {"mask": ((rows % 7 != 3) & (rows // 16 != 1))[:, None]}


def _pair_mask(case: Case) -> dict:
    pairs = np.random.default_rng(0).random((case.t, case.s)) < 0.8
    return {"mask": pairs & _row_mask(case)["mask"]}


def _bias(case: Case, dtype=np.float32) -> dict:
    bias = np.where(_pair_mask(case)["mask"], 0.5, -np.inf)
    return {"bias": jnp.asarray(np.tile(bias, (case.n, 1, 1)), dtype)}


def _segments(case: Case) -> dict:
    q, kv = (np.arange(n) // 9 for n in (case.t, case.s))
    q = np.where(q % 2, q, -q - 1)  # every other document has no keys
    ids = [np.tile(np.int32(x), (*case.batch, 1)) for x in (q, kv)]
    return {"query_segment_ids": ids[0], "key_value_segment_ids": ids[1]}


def _padded_segments(case: Case) -> dict:
    """The keys of the last documents are padding."""
    ids = np.tile(np.int32(np.arange(case.t) // 9), (*case.batch, 1))
    keys = np.tile(np.int32(np.arange(case.s) // 9), (*case.batch, 1))
    lengths = {"key_value_seq_lengths": np.int32([20, 9])}
    return {"query_segment_ids": ids, "key_value_segment_ids": keys, **lengths}


# Each way in which rows come to be without keys.
WAYS = {
    "mask_rows": _row_mask,
    "mask_pairs": _pair_mask,
    "bias": _bias,
    "bias_half": functools.partial(_bias, dtype=jnp.bfloat16),
    "bias_soft_cap": lambda case: {**_bias(case), "logits_soft_cap": 3.0},
    "segments": _segments,
    "padded_segments": _padded_segments,
    "offset": lambda case: {"is_causal": True, "query_offset": np.int32([-9, -21])},
    "far": lambda case: {
        "local_window_size": (5, 3),
        "query_offset": np.int32(case.s - case.t // 2),
    },
    "no_keys": lambda case: {"key_value_seq_lengths": np.int32([0, 33])},
    "no_keys_causal": lambda case: {
        "is_causal": True,
        "key_value_seq_lengths": np.int32([33, 0]),
    },
    "padded_window": lambda case: {
        "local_window_size": (4, 2),
        "key_value_seq_lengths": np.int32([11, 30]),
    },
    "query_lengths": lambda case: {"query_seq_lengths": np.int32([21, 0])},
    "dropout_alibi_sinks": lambda case: {
        **_pair_mask(case),
        "dropout_rate": 0.3,
        "dropout_rng": jax.random.key(0),
        "alibi_slopes": np.float32([0.1, 0.2, 0.3, 0.4]),
        "sinks": np.zeros(4, np.float32),
    },
}
FIRST = ("mask_pairs", "bias_soft_cap", "segments", "offset", "no_keys")
KERNELS_FIRST = ("no_keys",)
BY_THREADS = ("mask_pairs", "bias_half", "offset", "no_keys")


def check(way, runner: Runner, poison=np.nan):
    """NaN in queries and cotangents of rows without keys changes no bit of a result."""
    case, dtype = runner.shaped(CASE), runner.dtypes[0]
    arguments, evaluate = WAYS[way](case), runner.evaluate
    arrays, _ = case.inputs(dtype)
    cotangents = cotangents_for(case, dtype)
    clean = evaluate(arrays, cotangents, arguments)
    empty = clean["lse"] == -np.inf
    assert empty.any() and not empty.all() and "query" in clean

    def poisoned(x):
        rows = empty.reshape(*empty.shape, *[1] * (x.ndim - empty.ndim))
        return jnp.where(rows, poison, x)

    q, *others = arrays
    dirty = evaluate(
        (poisoned(q), *others), tuple(map(poisoned, cotangents)), arguments
    )
    check_same_bits(clean, dirty)
    assert not np.any(clean["out"][empty]) and not np.any(clean["query"][empty])


def _ways():
    """In the first tier each backend has some, or one (`Runner.one_of_each`)."""
    for way in WAYS:
        for name, runner in WITH_GRADIENTS.items():
            if runner.by_threads and way not in BY_THREADS:
                continue
            first = KERNELS_FIRST if runner.one_of_each else FIRST
            deep_too = runner.by_threads or way not in first
            yield runner.param(way, id=f"{way}-{name}", deep_too=deep_too)


@pytest.mark.parametrize(("way", "runner"), list(_ways()), indirect=["runner"])
def test_nothing_comes_through(way, runner):
    check(way, runner)


@pytest.mark.parametrize(
    "runner",
    [
        runner.param(id=name, deep_too=runner.one_of_each and not ON_GPU)
        for name, runner in WITH_GRADIENTS.items()
        if not runner.by_threads
    ],
    indirect=True,
)
def test_keys_before_a_start_do_not_come_through(runner):
    """NaN in them and in their values changes no bit of a result."""
    case, dtype = runner.shaped(CASE), runner.dtypes[0]
    starts = np.int32([case.s // 2 - 3, case.s])
    arguments = {"is_causal": True, "key_value_seq_starts": starts}
    (q, *keys), _ = case.inputs(dtype)
    before = (np.arange(case.s) < starts[:, None])[..., None, None]
    dirty = (jnp.where(before, jnp.nan, x) for x in keys)
    cotangents = cotangents_for(case, dtype)
    clean = runner.evaluate((q, *keys), cotangents, arguments)
    check_same_bits(clean, runner.evaluate((q, *dirty), cotangents, arguments))
    assert np.all(clean["lse"][1] == -np.inf)


@deep
def test_entries_without_keys_visit_no_block():
    """Not where blocks of queries are larger than those of keys, either."""
    blocks = dataclasses.replace(SMALL_BLOCKS, block_q=32)
    config = dataclasses.replace(INTERPRETED, dkv=blocks)
    options = {"implementation": "triton", "config": config}
    check("no_keys_causal", Runner(options, shaped=lambda case: case))


@pytest.mark.parametrize("poison", [np.inf, -np.inf])
def test_infinities_do_not_come_through(poison):
    check("bias", RUNNERS["xla"], poison)


@pytest.mark.parametrize(
    ("way", "backend"),
    [
        *(("bias", "xla"), ("bias", "triton")),
        *deeply(("mask_pairs", "xla"), ("segments", "triton"), ("no_keys", "triton")),
    ],
)
def test_tangents_are_zero(way, backend):
    """In forward mode, and on top of a gradient, where tangents are plain JAX."""
    arguments = WAYS[way](CASE) | BACKENDS[backend]
    (q, k, v), _ = CASE.inputs("float32")

    def out(q, k, v):
        return attention(q, k, v, **arguments)

    def gradients(q, k, v):
        o, pull = jax.vjp(out, q, k, v)
        return pull(jnp.where(o == 0, jnp.nan, o))

    empty = np.all(np.asarray(out(q, k, v)) == 0, axis=(-2, -1), keepdims=True)
    dirty = jnp.where(empty, jnp.nan, q)
    for function in (out, gradients) if backend == "xla" else (out,):
        tangents = (jnp.ones_like(q), k, v)
        expected = jax.jvp(function, (jnp.where(empty, 0, q), k, v), tangents)
        found = jax.jvp(function, (dirty, k, v), tangents)
        for a, b in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
            np.testing.assert_array_equal(a, b)
            assert np.all(np.isfinite(a))


LENGTHS = Named(np.int32([9, 30]), ("b0",))
OFFSET = Named(np.int32(3), ())
_IDS = (Named(np.zeros((2, 40), np.int32), ("b0", a)) for a in "ts")
SEGMENTS = SegmentIds(*_IDS)
KNOWN = {
    "plain": ((), {}, 40, True),
    "causal": ((Window(None, 0),), {}, 50, True),
    "causal, fewer keys": ((Window(None, 0),), {}, 20, True),
    "window": ((Window(5, 0),), {}, 40, True),
    "window, fewer keys": ((Window(5, 0),), {}, 20, False),
    "offset": ((Window(None, 0),), {"offset": OFFSET}, 40, False),
    "queries' lengths": ((Lengths(LENGTHS, None),), {}, 40, True),
    "keys' lengths": ((Lengths(None, LENGTHS),), {}, 40, False),
    "one document's ids": (
        (dataclasses.replace(SEGMENTS, are_shared=True), Window(None, 0)),
        {},
        40,
        True,
    ),
    "documents' ids": ((SEGMENTS,), {}, 40, False),
    "mask": ((DenseMask(Named(np.ones((40, 1), bool), ("t", None))),), {}, 40, False),
}


@pytest.mark.parametrize("name", KNOWN)
def test_which_calls_may_have_such_rows(name):
    """Others are spared the copies."""
    masks, more, keys, known = KNOWN[name]
    spec = AttentionSpec(Score(1.0), masks, **more).with_known_rows(40, keys)
    assert spec.rows_have_keys == known


def test_packed_documents_are_not_copied():
    """Nor are those of padded or causal calls, before kernels."""
    x = jnp.ones((2, 512, 2, 64), jnp.bfloat16)
    ids = jnp.zeros((2, 512), jnp.int32)
    ways = {
        "documents": ({"query_segment_ids": ids}, False),
        "lengths": ({"key_value_seq_lengths": jnp.int32([512, 9])}, False),
        "offset": ({"query_offset": jnp.int32(3)}, True),
    }
    for name, (arguments, copies) in ways.items():

        def gradients(x, arguments=arguments):
            call = functools.partial(attention, is_causal=True, **arguments)
            out, pull = jax.vjp(lambda x: call(x, x, x, implementation="triton"), x)
            return pull(out)

        lines = lower_for_gpu(gradients, x).splitlines()
        selects = [line for line in lines if "stablehlo.select" in line]
        assert any("2x512x2x64xbf16" in line for line in selects) == copies, name


LOW = ("-inf", "-1e9", "-1e10", "lowest")


def _low_biases():
    """Kernels, interpreted, take what xla does: they are given one of each dtype."""
    for number, lowest in enumerate(LOW):
        for dtype in ("float32", "float16", "bfloat16"):
            for backend in (*BACKENDS, "reference"):
                is_other = backend not in ("xla", "reference")
                if is_other and number != ("float16", "bfloat16", "float32").index(
                    dtype
                ):
                    continue
                first = backend == "xla" and dtype == "float32"
                marks = [] if first else deep
                yield pytest.param(backend, lowest, dtype, marks=marks)


@pytest.mark.parametrize(("backend", "lowest", "dtype"), list(_low_biases()))
def test_low_biases_mask_under_a_soft_cap(backend, lowest, dtype):
    """As a mask does, where the capped score would be -c."""
    options = BACKENDS.get(backend, {"implementation": "reference"})
    kind = jnp.finfo(dtype)
    lowest = float(kind.min) if lowest == "lowest" else float(lowest)
    mask = _pair_mask(CASE)["mask"]
    (q, k, v), _ = CASE.inputs("float32")
    bias = jnp.asarray(np.where(mask, np.float32(0), np.float32(lowest))).astype(dtype)
    options = {"logits_soft_cap": 2.0, **options}
    cotangents = cotangents_for(CASE, "float32")
    found = tolerances.evaluate((q, k, v), cotangents, {"bias": bias, **options})
    expected = tolerances.evaluate((q, k, v), cotangents, {"mask": mask, **options})
    assert not np.any(found.pop("bias")[..., ~mask])
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, 0, 2e-2 if ON_GPU else 1e-5)


def test_honest_biases_stay_under_a_soft_cap():
    """One of -1e6 is the score -c, as the formula says."""
    (q, k, v), _ = CASE.inputs("float32")
    bias = jnp.zeros((CASE.t, CASE.s)).at[:, :40].set(-1e6)
    out, lse = attention(q, k, v, bias, logits_soft_cap=1.0, return_residual=True)
    rest = attention(q, k[:, 40:], v[:, 40:], logits_soft_cap=1.0, return_residual=True)
    np.testing.assert_allclose(
        np.exp(lse), np.exp(rest[1]) + 40 * np.exp(-1.0), rtol=1e-5
    )
    assert out.shape == q.shape
