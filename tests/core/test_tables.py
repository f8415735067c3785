"""Arrays read at computed places: derivatives, sums along diagonals and by place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.core.axes import Named
from pallas_kernels.core.pointwise import tables

B, N, T, S = 2, 2, 24, 30
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("size", [9, 700])
def test_derivatives_of_reads(size):
    """Of small and of large tables: as of a gather."""
    table = jnp.asarray(RNG.standard_normal((N, 1, size)), jnp.float32)
    places = jnp.asarray(RNG.integers(0, size, (1, T)), jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def results(read):
        function = lambda x: jnp.sin(read(x, places)) * jnp.arange(T)  # noqa: E731
        out, pull = jax.vjp(function, table)
        return pull(out)[0], jax.jvp(function, (table,), (table,))[1]

    for a, b in zip(results(tables.read), results(tables.take), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_a_number_is_in_the_sum_of_its_place_alone():
    """Whatever it is, also where a sum is made in parts; others are rounded as ever."""
    count, size = 2 * 16384 + 5, 9
    x = np.float32(RNG.standard_normal((N, count)))
    places = np.sort(RNG.integers(-1, size - 1, (1, count)).astype(np.int32))
    x[0, 0], x[0, -1], x[1, -9] = np.inf, -np.inf, np.nan  # the first is in no sum
    expected = np.zeros((N, size))
    at = np.arange(N)[:, None], np.broadcast_to(places, x.shape)
    np.add.at(expected, at, np.where(places < 0, 0, np.float64(x)))
    found = jax.jit(tables.summed_by_comparison, static_argnums=2)(x, places, size)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3)
    assert np.isfinite(found).sum() == N * size - 2


@pytest.mark.parametrize(("t", "s", "b"), [(24, 30, 8), (9, 4, 4)])
def test_sums_along_diagonals(t, s, b):
    """Of a matrix, and of tiles summed along their own."""
    x = np.float32(RNG.standard_normal((N, t, s)))
    expected = np.zeros((N, t + s + 5))
    at = np.subtract.outer(np.arange(t), np.arange(s)) + s + 1
    np.add.at(expected, (np.arange(N)[:, None, None], at), x)

    @jax.jit
    def of_distances(x):
        named = Named(x, ("n", "t", "s"))
        return tables.of_distances(named, s + 1, ("n", f"x{t + s + 5}"))

    found = of_distances(x)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    whole = np.pad(x, [(0, 0), (0, -t % b), (0, -s % b)])
    rows, keys = whole.shape[1] // b, whole.shape[2] // b
    tiles = np.zeros((N, rows + keys - 1, b, b), np.float32)
    for i, j in np.ndindex(rows, keys):
        own = whole[:, i * b : (i + 1) * b, j * b : (j + 1) * b]
        tiles[:, i - j + keys - 1] += own
    start = s + 1 - (keys * b - 1)

    @jax.jit
    def of_tiles(tiles):
        sums = jnp.pad(tables.diagonals(tiles), [(0, 0), (0, 0), (0, 1)])
        return tables.of_tiles(sums, start, t + s + 5)

    found = of_tiles(tiles)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_sums_of_a_table():
    """In one order, and of places that depend on some of the axes."""
    numbers = np.float32(RNG.standard_normal((B, N, T, S)))
    places = RNG.integers(-2, 9, (N, T, S)).astype(np.int32)
    places[places == 3] = 4  # one that no pair reads
    expected = np.zeros((N, 7))
    heads = np.broadcast_to(np.arange(N)[:, None, None], places.shape)
    np.add.at(expected, (heads, np.clip(places, 0, 6)), numbers.sum(0))

    @functools.partial(jax.jit, static_argnums=2)
    def gradient(x, at, axes):
        own = Named(x, ("b0", "n", "t", "s")), Named(at, ("n", "t", "s"))
        return tables.gradient(*own, axes)

    found = gradient(numbers, places, ("n", "x7"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    found = gradient(numbers, places, ("x7",))
    np.testing.assert_allclose(found, expected.sum(0), rtol=1e-4, atol=1e-4)
