"""Masks that people know by name, as functions of RECIPES.md, beside literal ones."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.test_pointwise import kept_and_relation

ROWS, COLUMNS = 4, 6  # of an image: 24 queries; 30 keys, of which six are beyond it
SPANS = np.repeat([0, 1, 2, 3, 4], [5, 1, 8, 6, 10])  # runs of one image or text
PARENTS = np.array([0, 0, 0, 1, 1, 2, 5, 5, *range(8, 30)])  # of a tree of eight tokens


def neighbours(size: tuple[int, int]) -> np.ndarray:
    """NATTEN's: the window moves inside at the edges, and has always as many pixels."""
    kept = np.zeros((24, 30), bool)
    shape = ROWS, COLUMNS
    for at in np.ndindex(*shape):
        first = [
            min(max(i - n // 2, 0), most - n)
            for i, n, most in zip(at, size, shape, strict=True)
        ]
        for step in itertools.product(*map(range, size)):
            place = np.add(first, step)
            kept[at[0] * COLUMNS + at[1], place[0] * COLUMNS + place[1]] = True
    return kept


def tree() -> np.ndarray:
    kept = np.eye(24, 30, dtype=bool)
    for i in range(24):
        above = i
        while PARENTS[above] != above:
            above = PARENTS[above]
            kept[i, above] = True
    return kept


def spans() -> np.ndarray:
    kept = np.tril(np.ones((24, 30), bool))
    for span in range(5):
        (own,) = np.nonzero(span == SPANS)
        kept[own[0] : min(own[-1] + 1, 24), own[0] : own[-1] + 1] = True
    return kept


_SPANS = jnp.asarray(SPANS, jnp.int32)
# A bit for each token that is the row's own or above it.
_ABOVE = jnp.asarray((tree()[:8, :8] << np.arange(8)).sum(1), jnp.int32)
_Q = jnp.asarray(np.arange(24) * 3 % 17, jnp.int32)
_KV = jnp.asarray(np.arange(30) * 5 % 23, jnp.int32)
MASKS = {
    "neighbours": (
        lambda b, h, q, kv: (
            (abs(jnp.clip(q // 6, 1, 2) - kv // 6) <= 1)
            & (abs(jnp.clip(q % 6, 2, 3) - kv % 6) <= 2)
        ),
        lambda: neighbours((3, 5)),
    ),
    "tree": (
        lambda b, h, q, kv: jnp.where(q < 8, (_ABOVE[q] >> kv) & 1 == 1, q == kv),
        tree,
    ),
    "spans": (
        lambda b, h, q, kv: (kv <= q) | (_SPANS[q] == _SPANS[kv]),
        spans,
    ),
    "positions": (
        lambda b, h, q, kv: _Q[q] >= _KV[kv],
        lambda: np.asarray(_Q)[:, None] >= np.asarray(_KV),
    ),
    "prefix": (
        lambda b, h, q, kv: (kv <= q) | (kv < 7),
        lambda: np.tril(np.ones((24, 30), bool)) | (np.arange(30) < 7),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_named_mask(name):
    function, literal = MASKS[name]
    kept, some, _ = kept_and_relation(function, (8, 10))
    np.testing.assert_array_equal(kept, np.broadcast_to(literal(), kept.shape))
    blocks = literal().reshape(3, 8, 3, 10).any((1, 3))
    assert np.all(np.broadcast_to(some, (2, 2, 3, 3)) >= blocks)
