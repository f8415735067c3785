"""A caller's rules of promotion, in what is traced before a call is lowered.

What is lowered is in `test_programs.test_settings_that_watch_tracing`.
"""

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import (
    append_to_pages,
    attention,
    make_block_mask,
    merge,
    page_slots,
    paged_attention,
)


def _of_any_pair(x):
    def half(score, b, h, q, kv):
        return score * 0.5

    return attention(x, x, x, score_mod=half, return_residual=True)


def _in_blocks(x):
    def some(b, h, q, kv):
        return (q * 7 + kv) % 5 < 2

    return attention(x, x, x, block_mask=make_block_mask(some, None, None, 20, 20))


def _in_pages(x):
    pages, scale = jnp.zeros((4, 8, 1, 16), jnp.int8), jnp.ones((4, 8, 1), x.dtype)
    table = jnp.array([[3, 1, 0], [2, 2, 2]])
    slots = page_slots(table, jnp.array([[0], [9]]), 8)
    pools = append_to_pages(
        *(pages, pages, x[:, :1, :1], x[:, :1, :1], slots),
        key_scale=scale,
        value_scale=scale,
    )
    names = ("key_pages", "value_pages", "key_scale", "value_scale")
    lengths = {"key_value_seq_lengths": jnp.array([1, 10])}
    given = dict(zip(names, pools, strict=True), page_table=table, **lengths)
    return paged_attention(x[:, :1], **given), paged_attention(
        x[0, :3], **given, cu_query_lengths=jnp.array([0, 1, 3])
    )


PROGRAMS = {
    "reference": lambda x: attention(x, x, x, implementation="reference"),
    "score_mod": _of_any_pair,
    "block_mask": _in_blocks,
    "merge": lambda x: merge(*[attention(x, x, x, return_residual=True)] * 2),
    "pages": _in_pages,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_rules_of_promotion(name):
    """They are for the user's code in what is traced before `attention` lowers, too."""
    x = jax.ShapeDtypeStruct((2, 20, 4, 16), jnp.bfloat16)
    traced = [PROGRAMS[name]]
    if name != "pages":
        traced.append(jax.grad(lambda x: _total(PROGRAMS[name](x))))
    expected = [jax.eval_shape(function, x) for function in traced]
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert [jax.eval_shape(function, x) for function in traced] == expected


def _total(found):
    return sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(found))
