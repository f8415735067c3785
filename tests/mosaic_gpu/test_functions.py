"""Functions of pairs by the kernels for Hopper, on a CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, _api, attention
from pallas_kernels.core.pointwise import binding
from tests import mosaic_interpreter, tolerances
from tests.cases import ON_GPU, by_name
from tests.kernels.test_mods import SCORES, TABLE, K, N, bucket
from tests.mosaic import with_heads
from tests.tiers import deeply


def _of_buckets(gradient: np.ndarray, arrays, arguments) -> np.ndarray:
    """The gradient of TABLE from that of the array of all distances."""
    score = _api.given(*arrays, **arguments).checked().spec.score
    distances = np.arange(gradient.shape[-1]) - score.zero("score_mod 0")
    buckets = np.eye(TABLE.shape[1])[np.asarray(bucket(distances))]
    return gradient @ buckets


@pytest.mark.skipif(
    ON_GPU or not mosaic_interpreter.IS_SUPPORTED, reason="there is no interpreter"
)
@pytest.mark.parametrize(
    ("score", "named"),
    deeply(
        *((x, "plain") for x in ("masking", "of_keys", "of_pairs", "soft_cap", "swin")),
        *((("table", x)) for x in ("plain", "lengths_causal")),
    ),
)
def test_both_passes(score, named, any_size, monkeypatch):
    """Beside the loops."""
    mosaic_interpreter.install(monkeypatch)
    monkeypatch.setattr(binding, "FEW_PAIRS", 0)
    case = with_heads(dataclasses.replace(by_name(named), n=N, k=K), 64)
    if score == "table":  # of several tiles on a diagonal
        case = dataclasses.replace(case, t=140, s=150)
    arrays, arguments = case.inputs(jnp.bfloat16)
    make, captured = SCORES[score]
    do, dlse = tolerances.cotangents_for(case, jnp.bfloat16)
    own = {**arguments, "score_mod": make(*captured)}
    if score == "table":
        rows = 64 if named == "plain" else 128  # in one part, or in four
        blocks = Blocks(rows, rows, num_warps=rows // 16, num_stages=2)
        own["config"] = Config(dbias=blocks)
    found = mosaic_interpreter.evaluate(arrays, (do, dlse), own)

    def loops(q, k, v, *captured):
        more = {"implementation": "xla", "return_residual": True}
        own = {**arguments, "score_mod": make(*captured)}
        return attention(q, k, v, **own, **more)

    (out, _), pull = jax.vjp(loops, *arrays, *captured)
    names = "out", "query", "key", "value", "score_mod 0"
    results = dict(zip(names, (out, *pull((do, dlse))), strict=False))
    assert {"out", "query", "key", "value"} <= {*found}
    assert score != "table" or "score_mod 0" in found
    for name in {*found} & {*results}:
        expected = np.asarray(results[name], float)
        if score == "of_pairs" and name == "score_mod 0":  # the rows of this call
            expected = expected[: case.t, : case.s]
        if score == "table" and name == "score_mod 0":
            found[name] = _of_buckets(found[name], arrays, own)
        actual = found[name].reshape(expected.shape)
        assert np.max(np.abs(actual - expected)) < 0.02 * np.max(np.abs(expected)), name
