"""Where rows lie in pages: any entry is a page that exists, any row in the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2._ragged import Ragged
from pallas_kernels.core.pages import Pages


def test_every_entry_is_a_page():
    pages = Pages(None, count=5, size=4)
    entries = jnp.array([-(2**31), -1, 0, 4, 5, 2**31 - 1])
    assert pages.page(entries).tolist() == [0, 0, 0, 4, 4, 4]


def test_places_are_in_the_table():
    place, row = Pages(None, count=5, size=4).place(jnp.arange(14), 3)
    assert place.tolist() == [0] * 4 + [1] * 4 + [2] * 6
    assert row.tolist() == [*range(4)] * 3 + [0, 1]


def _in_blocks(group: int, cu, x, lengths):
    """Of each call: blocks, how many queries count, first positions; the tokens."""
    ragged = Ragged.of(x.shape[0], cu, group, 16)
    calls = []
    for own in ragged.calls:
        found = own.arguments({"lengths": lengths})
        calls.append((own.queries(x), found["query_seq_lengths"], found["offset"]))
    return calls, ragged.tokens([blocks for blocks, *_ in calls], -1.0)


@pytest.mark.parametrize("group", [1, 4, 16])
def test_tokens_are_in_blocks_of_their_sequence(group):
    """Each token is once in a block, in its order; there is room for all."""
    rng, made = np.random.default_rng(0), jax.jit(_in_blocks, static_argnums=0)
    x = jnp.arange(1, 41, dtype=jnp.float32)
    for count in (rng.integers(0, 9, 5), [40, 0, 0, 0, 0], [0, 0, 1, 38, 1], [0] * 5):
        cu, count = np.cumsum([0, *count], dtype=np.int32), np.array(count)
        calls, back = jax.tree.map(np.asarray, made(group, cu, x, count + 3))
        numbers, seen = np.concatenate([np.arange(n) for n in count]), []
        entries = (entry for call in calls for entry in zip(*call, strict=True))
        for block, own, at in entries:
            kept = block[:own].astype(int) - 1
            np.testing.assert_array_equal(numbers[kept] + 3, at + np.arange(own))
            seen += kept.tolist()
        assert sorted(seen) == [*range(cu[-1])]
        np.testing.assert_array_equal(back[: cu[-1]], x[: cu[-1]])
        assert (back[cu[-1] :] == -1).all()


@pytest.mark.parametrize(
    ("tokens", "sequences", "head", "sizes"),
    [
        (64, 64, 128, [(1, 64)]),  # a token each
        (63 + 2048, 64, 128, [(4, 64), (128, 79)]),  # and a chunk of a prompt
        (63 + 2048, 64, 576, [(4, 64), (32, 127)]),
        (1024, 256, 128, [(4, 256), (16, 256), (128, 67)]),
    ],
)
def test_few_queries_and_many_are_in_calls_of_their_own(tokens, sequences, head, sizes):
    """Queries of a block, and blocks; four heads of a group are rows of a block."""
    found = []

    def call(cu):
        calls = Ragged.of(tokens, cu, 4, head).calls
        found.extend((x.size, *x.first.shape) for x in calls)

    jax.eval_shape(call, jax.ShapeDtypeStruct((sequences + 1,), jnp.int32))
    assert found == sizes
