"""The oracle of the error rule against the documentation's words and against slopes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracle, tolerances
from tests.cases import CASES, by_name
from tests.tiers import deeply
from tests.tolerances import cotangents_for


def _naive(q, k, v, arguments):
    """Softmax attention written out once more, one row at a time."""
    *batch, t, n, _ = q.shape
    s, heads = k.shape[-3:-1]
    scale = float(arguments.get("scale", q.shape[-1] ** -0.5))
    cap, score_mod, row = arguments.get("logits_soft_cap"), None, np.zeros(s)
    if "score_mod" in arguments:
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), arguments["score_mod"])
        score_mod = jax.jit(lambda *x: wide(*x))  # one program for all rows
    bias = np.broadcast_to(arguments.get("bias", 0.0), (*batch, n, t, s))
    slopes = np.broadcast_to(arguments.get("alibi_slopes", 0.0), (*batch, n))
    sinks = np.broadcast_to(np.float64(arguments.get("sinks", -np.inf)), n)
    offset = np.broadcast_to(arguments.get("query_offset", 0), batch)
    keep = _dense_mask((*batch, n, t, s), arguments)
    out, lse = np.zeros((*batch, t, n, v.shape[-1])), np.full((*batch, t, n), -np.inf)
    for at in np.ndindex(*batch, t, n):
        *b, i, head = at
        kept = np.flatnonzero(keep[(*b, head, i)])
        if kept.size:
            keys, values = (x[(*b, kept, head // (n // heads))] for x in (k, v))
            scores = scale * (keys @ q[at]) + bias[(*b, head, i, kept)]
            scores -= slopes[(*b, head)] * np.abs(i + offset[tuple(b)] - kept)
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            if score_mod is not None:
                row[kept] = scores
                entry = np.ravel_multi_index(b, batch) if b else 0
                place = entry, head, int(i + offset[tuple(b)]), np.arange(s)
                scores = np.asarray(score_mod(row, *place))[kept]
            weights = np.exp(scores)
            total = weights.sum() + np.exp(sinks[head])
            out[at], lse[at] = weights @ values / total, np.log(total)
    return out, lse


def _dense_mask(shape, arguments):
    """The mask of a call, from the words of its documentation, pair by pair."""
    keep = np.ones(shape, bool)
    offset = np.broadcast_to(arguments.get("query_offset", 0), shape[:-3])
    window = arguments.get("local_window_size")
    left, right = window if isinstance(window, tuple) else (window, window)
    right = 0 if arguments.get("is_causal") else right
    for at in np.ndindex(*keep.shape):
        *b, _, i, j = at
        b = tuple(b)
        p = i + int(offset[b])
        keep[at] &= left is None or j >= p - left
        keep[at] &= right is None or j <= p + right
        for name, row in (("query", i), ("key_value", j)):
            lengths = arguments.get(f"{name}_seq_lengths")
            keep[at] &= lengths is None or bool(row < lengths[b])
        keep[at] &= bool(j >= arguments.get("key_value_seq_starts", {b: 0})[b])
        if "query_segment_ids" in arguments:
            ids = (arguments[f"{x}_segment_ids"] for x in ("query", "key_value"))
            q_ids, kv_ids = ids
            keep[at] &= bool(q_ids[(*b, i)] == kv_ids[(*b, j)])
    if "mask_mod" in arguments:
        numbers = np.arange(offset.size).reshape(offset.shape)
        b, p = numbers[..., None, None, None], offset[..., None, None, None]
        _, h, i, j = np.ogrid[:1, : shape[-3], : shape[-2], : shape[-1]]
        # Of the functions of cases q is only an index, which is clamped.
        q = np.clip(i[0] + p, 0, shape[-2] - 1)
        keep &= np.asarray(arguments["mask_mod"](b, h[0], q, j[0]))
    if "mask" in arguments:
        keep &= np.broadcast_to(arguments["mask"], keep.shape)
    if "bias" in arguments:
        bias = np.asarray(arguments["bias"], np.float64)
        capped = arguments.get("logits_soft_cap") is not None
        keep &= bias > (-(2.0**24) if capped else -np.inf)
    return keep


# Of which the first three, which are pairwise, have every feature and function.
WORDED = [c for c in CASES if c.h <= 40 and not c.has("dropout_rate")]


@pytest.mark.parametrize(
    "case", [*WORDED[:3], *deeply(*WORDED[3:])], ids=lambda case: case.name
)
def test_oracle_against_words(case):
    """The oracle itself, against the documentation followed pair by pair."""
    arrays, arguments = case.inputs(jnp.float32)
    wide = [np.asarray(x, np.float64) for x in arrays]
    cotangents = cotangents_for(case, jnp.float32)
    found, _ = oracle.attention(wide, cotangents, arguments)
    with jax.enable_x64(True):  # for functions of pairs, which JAX computes here
        expected = _naive(*wide, arguments)
    np.testing.assert_allclose(found["out"], expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found["lse"], expected[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["everything_learnt", "scale_data", "pairwise_4"])
def test_oracle_gradients_are_slopes(name):
    """Along a random direction, against differences of its outputs."""
    case = dataclasses.replace(by_name(name), batch=(2,), t=20, s=24)
    arrays, arguments = case.inputs(jnp.float32)
    inputs = dict(zip(("query", "key", "value"), arrays, strict=True))
    learnt = (*oracle.OPERANDS, "score_mod")
    inputs |= {n: x for n, x in arguments.items() if n in learnt}
    inputs = jax.tree.map(lambda x: np.asarray(x, np.float64), inputs)
    cotangents = [np.asarray(x, np.float64) for x in cotangents_for(case, "float32")]
    rng = np.random.default_rng(2)
    along = jax.tree.map(lambda x: rng.standard_normal(x.shape), inputs)

    def results(step):
        moved = jax.tree.map(lambda x, d: np.asarray(x + step * d), inputs, along)
        arrays = [moved.pop(n) for n in ("query", "key", "value")]
        return oracle.attention(arrays, cotangents, {**arguments, **moved})[0]

    def loss(step):
        found = results(step)
        lse = np.where(np.isfinite(found["lse"]), found["lse"], 0.0)
        return np.sum(found["out"] * cotangents[0]) + np.sum(lse * cotangents[1])

    found = results(0.0)
    directions = tolerances.of_arrays(along)
    slope = sum(np.sum(found[name] * x) for name, x in directions.items())
    difference = (loss(1e-5) - loss(-1e-5)) / 2e-5
    np.testing.assert_allclose(slope, difference, rtol=1e-7)
