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
    """Blocks, how many of their queries count, their first positions; the tokens."""
    ragged = Ragged.of(x.shape[0], cu, group)
    blocks, found = ragged.queries(x), ragged.of_blocks({"lengths": lengths})
    back = ragged.tokens(blocks, -1.0)
    return blocks, found["query_seq_lengths"], found["offset"], back


@pytest.mark.parametrize("group", [1, 16])
def test_tokens_are_in_blocks_of_their_sequence(group):
    """Each token is once in a block, in its order; there is room for all."""
    rng, made = np.random.default_rng(0), jax.jit(_in_blocks, static_argnums=0)
    x = jnp.arange(1, 41, dtype=jnp.float32)
    for count in (rng.integers(0, 9, 5), [40, 0, 0, 0, 0], [0, 0, 1, 38, 1], [0] * 5):
        cu, count = np.cumsum([0, *count], dtype=np.int32), np.array(count)
        blocks, new, offset, back = map(np.asarray, made(group, cu, x, count + 3))
        numbers = np.concatenate([np.arange(n) for n in count])
        assert new.sum() == cu[-1]
        for block, own, at in zip(blocks, new, offset, strict=True):
            kept = block[:own].astype(int) - 1
            np.testing.assert_array_equal(numbers[kept] + 3, at + np.arange(own))
        np.testing.assert_array_equal(back[: cu[-1]], x[: cu[-1]])
        assert (back[cu[-1] :] == -1).all()
