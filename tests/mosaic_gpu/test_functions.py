"""Functions of pairs by the kernels for Hopper: interpreted, and on such a GPU."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, _api, attention, make_block_mask
from pallas_kernels.core import visits
from pallas_kernels.core.pointwise import binding
from tests import mosaic_interpreter, tolerances
from tests.cases import ON_GPU, by_name
from tests.kernels.test_mods import SCORES, TABLE, K, N, bucket
from tests.lowering import lower_for_gpu
from tests.mosaic import MOSAIC, assert_same_bits, on_hopper, with_heads
from tests.tiers import deep, deeply


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


def global_keys(b, h, q, kv):
    """A window both ways, and two blocks of keys that all queries attend to."""
    near = (q - kv < 60) & (kv - q < 60)
    return near | (kv < 100) | ((kv >= 1030) & (kv < 1100))


def _of_global_keys(rows: int, block: int | None) -> dict:
    if block is None:
        return {"mask_mod": global_keys}
    sizes = None, None, rows, rows
    return {"block_mask": make_block_mask(global_keys, *sizes, block_size=block)}


@on_hopper
@pytest.mark.parametrize(
    ("head", "rows", "block"),
    [
        *itertools.product((64, 128, 256), (1500,), (None, 128, 256)),
        *((64, 8200, None), (128, 8200, 128)),
    ],
)
def test_programs_that_share_keys(head, rows, block, monkeypatch):
    """Both passes on a GPU by the error rule; three or eight programs for a block."""
    if rows == 1500:
        monkeypatch.setattr(visits, "MANY_VISITS", 2)
        visits._known.cache_clear()
    heads = {"n": 4, "k": 2} if rows == 1500 else {"n": 1, "k": 1, "batch": (1,)}
    case = dataclasses.replace(by_name("plain"), t=rows, s=rows, **heads)
    case = with_heads(case, head)
    arrays, _ = case.inputs("bfloat16")
    cotangents = tolerances.cotangents_for(case, "bfloat16")
    place = np.arange(case.t)
    mask = {"mask": global_keys(0, 0, place[:, None], place)}
    exact = tolerances.exact(arrays, cotangents, mask)
    plain = tolerances.plain(arrays, cotangents, mask)
    call = functools.partial(attention, **_of_global_keys(case.t, block), **MOSAIC)
    actual = tolerances.evaluate(arrays, cotangents, {}, call)
    tolerances.check(actual, exact, plain, tolerances.unit_roundoff("bfloat16"))


@on_hopper
@pytest.mark.parametrize("head", [64, 128])
def test_bits_of_programs_that_share_keys(head):
    """Whichever ends first: the last part of a block adds those before it in order."""
    shape = 2, 4096, 16, head
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]

    @jax.jit
    def run(q, k, v, do):
        call = functools.partial(attention, mask_mod=global_keys, **MOSAIC)
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(do)

    assert_same_bits(run, arrays, times=100)


def _relative_bucket(distance, half=16, most=128):
    """T5's: one for each of the near distances, then logarithmic, both ways."""
    near, size = half // 2, abs(distance)
    scale = (half - near) / np.log(most / near)
    far = jnp.log(jnp.maximum(size, 1) / near) * scale
    far = jnp.minimum(near + far.astype(jnp.int32), half - 1)
    return jnp.where(distance < 0, half, 0) + jnp.where(size < near, size, far)


def _with_a_table(q, k, v, table, do):
    """The output and all gradients: the table is [N, 32]."""

    def call(q, k, v, table):
        return attention(
            *(q, k, v),
            score_mod=lambda s, b, h, q, kv: s + table[h, _relative_bucket(q - kv)],
            **MOSAIC,
        )

    out, pull = jax.vjp(call, q, k, v, table)
    return out, *pull(do)


@deep
@on_hopper
@pytest.mark.parametrize("head", [64, 128])
def test_bits_of_the_gradient_of_a_table(head):
    """Its sums of all pairs are added in one order."""
    shape = 2, 4096, 16, head
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, do = (jax.random.normal(x, shape, jnp.bfloat16) for x in keys[:4])
    table = jax.random.normal(keys[4], (16, 32))
    assert_same_bits(jax.jit(_with_a_table), (q, k, v, table, do), times=100)


def test_the_gradient_of_a_table_lowers():
    """By the kernels, without a scatter, which would add in any order."""
    x = jax.ShapeDtypeStruct((2, 4096, 16, 64), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    text = lower_for_gpu(_with_a_table, x, x, x, table, x)
    assert "mosaic_gpu_v2" in text
    assert "stablehlo.scatter" not in text
