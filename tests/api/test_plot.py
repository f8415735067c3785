"""`plot_mask` draws the pairs and the blocks of a call."""

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

from jax_flash2 import Context, plot_mask

matplotlib.use("Agg")

B, T, S, N = 2, 40, 45, 2
Q, K = (jax.ShapeDtypeStruct((B, n, N, 16), jnp.bfloat16) for n in (T, S))
IDS = jnp.asarray(np.arange(S) // 15, jnp.int32) + jnp.array([[0], [1]])
BIAS = jnp.zeros((N, 1, S)).at[1, :, 20:].set(-jnp.inf)
ROWS, KEYS = np.ogrid[:T, :S]


def codes(*arguments, **options) -> np.ndarray:
    """0: skipped, 1: masked, 2: kept, 3: kept in a block without a mask."""
    ax = plot_mask(*arguments, **options)
    matplotlib.pyplot.close(ax.figure)
    return np.asarray(ax.images[0].get_array())


def test_every_mask_is_drawn():
    """Of one batch entry and one head, beside what else decides about pairs."""
    found = codes(
        *(Q, K, K, BIAS),
        query_seq_lengths=jnp.array([T, 33]),
        mask_mod=lambda b, h, q, kv: (IDS[b, q] == IDS[b, kv]) | (kv < 3 * b),
        score_mod=lambda s, b, h, q, kv: jnp.where(q == 7 * h, -jnp.inf, s),
        dropout_rate=0.5,
        dropout_rng=jax.random.key(0),
        sinks=jnp.zeros(N),
        block=(8, 16),
        entry=1,
        head=1,
    )
    kept = (ROWS // 15 == KEYS // 15) | (KEYS < 3)
    expected = kept & (ROWS < 33) & (ROWS != 7) & (KEYS < 20)
    np.testing.assert_array_equal(found >= 2, expected)


def test_blocks_are_those_of_the_call():
    found = codes(Q, K, K, is_causal=True, local_window_size=(20, 0), block=8)
    of_blocks = found[::8, ::8]
    distance = ROWS[:5] - KEYS[:, :6]
    np.testing.assert_array_equal(of_blocks == 0, (distance < 0) | (distance > 3))
    np.testing.assert_array_equal(of_blocks == 3, distance == 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": Context("x")}, "context must be None"),
        ({"block": 0}, "block must be an int > 0"),
        ({"entry": B}, "entry must be from 0 to 1, got 2"),
        ({"head": -1}, "head must be from 0 to 1, got -1"),
        ({"key": jax.ShapeDtypeStruct((B, 2**21, N, 16), Q.dtype)}, "67108864 pairs"),
    ],
)
def test_wrong_arguments_are_named(options, words):
    key = options.pop("key", K)
    with pytest.raises(ValueError, match=words):
        plot_mask(Q, key, key, **options)


def test_traced_arrays_are_refused():
    def call(lengths):
        plot_mask(Q, K, K, key_value_seq_lengths=lengths)

    with pytest.raises(TypeError, match="key_value_seq_lengths must be an array with"):
        jax.jit(call)(jnp.array([1, 2]))
