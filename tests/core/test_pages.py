"""Where rows lie in pages: any entry is a page that exists, any row in the table."""

import jax.numpy as jnp
import numpy as np

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


def test_tokens_are_in_blocks_of_their_sequence():
    """Random sequences: each token is once in a block, in its order; there is room."""
    rng = np.random.default_rng(3)
    for group in (1, 16, 70):
        count = rng.integers(0, 9, 5)
        cu, padding = np.cumsum([0, *count]), int(rng.integers(0, 4))
        tokens = int(cu[-1]) + padding
        ragged = Ragged.of(tokens, jnp.asarray(cu, jnp.int32), group)
        x = jnp.arange(1, tokens + 1, dtype=jnp.float32)
        blocks = ragged.queries(x)
        given = {"lengths": jnp.asarray(count + 3, jnp.int32)}
        found = ragged.of_blocks(given)
        new, offset = found["query_seq_lengths"], found["offset"]
        numbers = np.concatenate([np.arange(n) for n in [*count, 0]])
        rows = np.arange(ragged.block)
        assert int(new.sum()) == cu[-1]
        for block, own, at in zip(blocks, new, offset, strict=True):
            kept = np.asarray(block)[rows < own].astype(int) - 1
            np.testing.assert_array_equal(numbers[kept] + 3, at + np.arange(own))
        back = np.asarray(ragged.tokens(blocks, -1.0))
        np.testing.assert_array_equal(back[: cu[-1]], x[: cu[-1]])
        assert (back[cu[-1] :] == -1).all()
