"""Functions that read tables at computed places, arrays of few bits, and booleans."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import Context, attention
from pallas_kernels.core.pointwise import binding
from tests.divided import Divided
from tests.kernels.test_mods import (
    ARRAYS,
    BACKENDS,
    KEYS,
    PAIRS,
    ROWS,
    SCORES,
    N,
    check,
    dense,
    exact,
    results,
)
from tests.lowering import lower_for_gpu
from tests.tiers import deep, deeply


@pytest.mark.parametrize("backend", ["triton", *deeply("blocks", "reference")])
def test_tables_at_places_of_pairs(backend, monkeypatch):
    """Kernels read them where there are too many pairs to find all beforehand."""
    monkeypatch.setattr(binding, "FEW_PAIRS", 0)
    make, captured = SCORES["swin"]
    options = {**BACKENDS[backend], "precision": "highest"}
    call = functools.partial(attention, **options)
    run = functools.partial(results, call, make, None)
    check(jax.jit(run)(ARRAYS, captured), exact(make, None, captured))


@pytest.mark.parametrize("score", ["table", "swin"])
def test_gradients_of_tables_have_one_order(score):
    """No scatter, which on a GPU adds as it goes."""
    make, captured = SCORES[score]
    run = jax.jit(functools.partial(results, attention, make, None))
    assert "scatter" not in run.lower(ARRAYS, captured).as_text()


@pytest.mark.parametrize(
    "context", [Context("x", None, "ring"), *deeply(Context("x", 8))]
)
def test_gradients_where_rows_are_on_several_devices(context):
    """A ring of rows that follow one another; halos, of which each has several."""
    q, k, v = (x[:, :32] for x in ARRAYS)
    make, (table,) = SCORES["table"]

    def gradients(call, table):
        def loss(q, table):
            out = call(
                *(q, k, v),
                score_mod=make(table),
                is_causal=True,
                local_window_size=(7, 0),
                implementation="xla",
                precision="highest",
            )
            return jax.numpy.sum(out**2)

        return jax.jit(jax.grad(loss, (0, 1)))(q, table)

    found, expected = (
        gradients(call, table) for call in (Divided(context, (2,)), attention)
    )
    check(found, expected, 1e-5)


def test_an_index_beyond_a_table_is_clamped():
    """So is that of its gradient; a negative one counts from the end, as in JAX."""

    def make(table):
        return lambda s, b, h, q, kv: s + table[h, q - kv + 3] * table[0, 2 * kv - q]

    captured = SCORES["table"][1]
    call = functools.partial(attention, precision="highest")
    run = functools.partial(results, call, make, None)
    check(jax.jit(run)(ARRAYS, captured), exact(make, None, captured), 1e-5)


@deep
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_an_index_may_have_few_bits(dtype):
    """The table has more elements than they can number."""
    table, places = PAIRS.reshape(-1), jnp.arange(45, dtype=dtype)
    mods = {"score_mod": lambda s, b, h, q, kv: s + table[places[kv] + places[q]]}
    options = {**BACKENDS["blocks"], "precision": "highest"}
    check([attention(*ARRAYS, **mods, **options)], [dense(*ARRAYS, **mods)], 1e-5)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", *deeply("bfloat16", "float16", "float8_e5m2")]
)
def test_masks_may_compare_floats_of_few_bits(dtype):
    """As they are, or as float32."""
    keys, rows = KEYS.astype(dtype), ROWS.astype(dtype)
    mods = {
        "mask_mod": lambda b, h, q, kv: (
            (keys[b, kv].astype(jnp.float32) < 0.1) | (rows[h, q] < rows[0, kv])
        )
    }
    options = {**BACKENDS["blocks"], "precision": "highest"}
    check([attention(*ARRAYS, **mods, **options)], [dense(*ARRAYS, **mods)], 1e-5)


@pytest.mark.parametrize("backend", ["triton", *deeply("blocks", "reference")])
def test_masks_may_read_tables_of_floats(backend):
    """Until kernels read them they have the bits, of which there is no gradient."""
    table = PAIRS.reshape(-1)[:200].astype(jnp.float16)
    mods = {"mask_mod": lambda b, h, q, kv: (table[q * kv % 200] < 0.3) | (q == kv)}
    options = {**BACKENDS[backend], "precision": "highest"}
    check([attention(*ARRAYS, **mods, **options)], [dense(*ARRAYS, **mods)], 1e-5)


@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_booleans_lower(backend):
    """Of pairs, rows and heads; Mosaic GPU cannot lower all that JAX has for them."""
    x = jax.ShapeDtypeStruct((1, 256, N, 64), jnp.bfloat16)

    def score_mod(s, b, h, q, kv):
        is_odd = ((q ^ kv) & 3).astype(bool)
        kept = jnp.minimum(~is_odd, h.astype(bool)) | ~(KEYS[0, kv] > ROWS[h, q])
        return jnp.where(kept, s, 0.5 * s)

    def mask_mod(b, h, q, kv):
        return ~jnp.maximum((q ^ kv) % 5 < 2, (KEYS[0, kv] * (q % 2)).astype(bool))

    call = functools.partial(attention, implementation=backend, mask_mod=mask_mod)
    assert "custom_call" in lower_for_gpu(
        lambda x: call(x, x, x, score_mod=score_mod), x
    )
