"""Dropout's bits: a known cipher, the same for every block, random to the eye."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, attention
from pallas_kernels.core import dropout as dropout_lib
from pallas_kernels.core.arithmetic import Arithmetic, wide_product
from pallas_kernels.core.dropout import Dropout
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.positions import Numbering
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from tests.cases import BACKENDS, ON_GPU
from tests.tiers import MAINLY_XLA, deeply

HALF = Dropout.threshold_of(0.5)


ALL = {"t": Numbering(), "s": Numbering()}


def kept(seed, t, s, *, start=(0, 0), order=("t", "s"), threshold=HALF, numberings=ALL):
    seed = tuple(map(jnp.uint32, seed))
    size = int(t), int(s)
    return np.asarray(_kept(seed, start, numberings, size, order, threshold))


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _kept(seed, start, numberings, size, order, threshold):
    dropout = Dropout(seed, threshold)
    rows = dict(zip("ts", zip(start, size, strict=True), strict=True))
    bits = dropout.bits(rows, numberings, order, Arithmetic())
    return bits < np.uint32(dropout.limit)


def test_wide_product():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2**32, (2, 100), np.uint64)
    high, low = wide_product(jnp.uint32(a), jnp.uint32(b))
    np.testing.assert_array_equal(np.uint64(high), (a * b) >> np.uint64(32))
    np.testing.assert_array_equal(np.uint64(low), (a * b) & np.uint64(2**32 - 1))


# From the known answers of Random123 (Salmon et al. 2011) for philox2x32, 7 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), 0, (0x257A3673, 0xCD26BE2A)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
    ],
)
def test_cipher_known_answers(counter, key, words):
    x0, x1 = (jnp.full((1, 1), x, jnp.uint32) for x in counter)
    got = dropout_lib.cipher(x0, x1, jnp.uint32(key), wide_product)
    assert tuple(int(x[0, 0]) for x in got) == words


@pytest.mark.parametrize("stripe", [96, *deeply(None, 32)])
def test_blocks_and_orientation_do_not_matter(stripe):
    """For rows that are the second of three devices', too."""
    t_all, s_all = (96, 192)
    numbering = Numbering()
    if stripe is not None:
        numbering = Numbering(jnp.int32(stripe), stripe, parts=3)
    t_rows, s_rows = (numbering.at(np.arange(n)) for n in (t_all, s_all))
    whole = kept((1, 2), t_rows[-1] // 32 * 32 + 32, s_rows[-1] // 32 * 32 + 32)
    whole = whole[np.ix_(t_rows, s_rows)]
    numberings = dict.fromkeys("ts", numbering)
    for t, s in ((16, 192), (96, 16), (32, 32), (48, 48), (96, 96)):
        for i, j in itertools.product(range(0, t_all, t), range(0, s_all, s)):
            expected = whole[i : i + t, j : j + s]
            where = {"start": (i, j), "numberings": numberings}
            block = kept((1, 2), t, s, **where)
            np.testing.assert_array_equal(block, expected)
            block = kept((1, 2), t, s, order=("s", "t"), **where)
            np.testing.assert_array_equal(block, expected.T)


def by_place(pairs):
    """[calls of the cipher, the eight pairs of each]."""
    t, s = pairs.shape
    pairs = pairs.reshape(t // 16, 2, 8, s // 32, 4, 8)
    return pairs.transpose(0, 2, 3, 5, 1, 4).reshape(-1, 8)


# In the last, ties alone are kept, and half of them.
@pytest.mark.parametrize("order", [("t", "s"), ("s", "t")])
def test_queries_of_a_device_begin_at_any_sixteenth_row(order):
    whole = kept((1, 2), 96, 64, order=order)
    numberings = {**ALL, "t": Numbering(jnp.int32(48))}
    part = kept((1, 2), 48, 64, order=order, numberings=numberings)
    np.testing.assert_array_equal(
        part, whole[48:] if order[0] == "t" else whole[:, 48:]
    )


@pytest.mark.parametrize("rate", [0.0001, 0.1, 0.5, 0.9, 1 - 2**-9])
def test_share_of_kept_pairs(rate):
    """Over all pairs, every row and column, and every place in a cipher's call."""
    size = 1024
    dropout = Dropout((jnp.uint32(3), jnp.uint32(4)), Dropout.threshold_of(rate))
    p = 1 / dropout.scale
    assert abs(p - (1 - rate)) <= 2.0**-17
    pairs = kept((3, 4), size, size, threshold=dropout.threshold)
    deviation = np.sqrt(p * (1 - p))
    assert abs(pairs.mean() - p) < 5 * deviation / size
    assert np.abs(by_place(pairs).mean(0) - p).max() < 5 * deviation * 8**0.5 / size
    for axis in (0, 1):
        lines = pairs.mean(axis) - p
        assert np.abs(lines).max() < 6 * deviation / np.sqrt(size) + 6 / size
        # The variance of the means of independent lines is that of independent pairs.
        variance = lines.var() * size / deviation**2
        assert abs(variance - 1) < 6 * np.sqrt(2 / size) * (1 + (1 - p) / (p * size))


@pytest.mark.parametrize("threshold", [HALF, 230 * 257, *deeply(HALF + 128)])
def test_correlation_in_a_call(threshold):
    """None of multiples of 1/256; else at most 1/256, for pairs that share a byte."""
    places = by_place(kept((7, 8), 4096, 4096, threshold=threshold))
    found = np.corrcoef(places, rowvar=False)[np.triu_indices(8, 1)]
    noise = 5 / np.sqrt(len(places))
    assert np.abs(found).max() < noise + (threshold % 256 > 0) / 256
    assert (found.max() > noise / 2) == (threshold % 256 > 0)


def test_pairs_are_uncorrelated():
    """With the neighbours in a cipher's block, and far away; between seeds."""
    size = 1024
    signs = kept((5, 6), size, size) * 2.0 - 1.0
    limit = 5 / size
    for di, dj in itertools.product((0, 1, 2, 4, 8, 16, 24, 64, 512), repeat=2):
        if (di, dj) != (0, 0):
            assert abs(np.mean(signs * np.roll(signs, (di, dj), (0, 1)))) < limit
    assert abs(np.mean(signs * signs.T)) < 2 * limit
    # Three and four pairs together, as of a linear generator, are no better known.
    around = [np.roll(signs, shift, (0, 1)) for shift in ((0, 8), (8, 0), (8, 8))]
    assert abs(np.mean(signs * around[0] * around[1])) < limit
    assert abs(np.mean(signs * around[0] * around[1] * around[2])) < 2 * limit
    for seed in ((5, 7), (6, 6), (6, 5), (4, 6), (0, 0)):
        assert abs(np.mean(signs * (kept(seed, size, size) * 2.0 - 1.0))) < limit


def masks(options, *, batch=(2,), n=2, t=40, s=48, **arguments):
    """Which probabilities a call kept: with zero scores and an identity for values."""
    q = np.zeros((*batch, t, n, 16), np.float32)
    k = np.zeros((*batch, s, 1, 16), np.float32)
    v = np.broadcast_to(np.eye(s, dtype=np.float32)[:, None], (*batch, s, 1, s))
    out = attention(q, k, v, dropout_rate=0.5, **arguments, **options)
    out = np.asarray(out) * s / 2
    np.testing.assert_allclose(out, np.round(out), atol=1e-2)
    return np.round(out).astype(bool).swapaxes(-2, -3)  # [*B, N, T, S]


def test_mask_is_the_same_in_every_backend_and_block_size():
    rng = jax.random.key(1)
    reference = masks({"implementation": "reference"}, dropout_rng=rng)
    assert 0.4 < reference.mean() < 0.6
    options = list(BACKENDS.values())
    for q, kv in ((32, 16), (16, 64), (64, 32)) if ON_GPU else ((32, 64),):
        config = Config(Blocks(q, kv, 4, 1), interpret=not ON_GPU)
        options.append({"implementation": "triton", "config": config})
    for option in options:
        np.testing.assert_array_equal(masks(option, dropout_rng=rng), reference)
    # Heads and batch entries have masks of their own, unless they share one.
    flat = reference.reshape(-1, *reference.shape[-2:])
    for a, b in itertools.combinations(flat, 2):
        assert 0.4 < np.mean(a == b) < 0.6
    shared = masks(options[0], dropout_rng=rng, broadcast_dropout=True)
    assert np.all(shared == shared[0, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys(backend):
    """Raw and typed keys are the same key; another key drops other pairs."""
    options = BACKENDS[backend]
    raw = masks(options, dropout_rng=jax.random.PRNGKey(7))
    typed = masks(options, dropout_rng=jax.random.key(7))
    other = masks(options, dropout_rng=jax.random.key(8))
    np.testing.assert_array_equal(raw, typed)
    assert 0.4 < np.mean(raw == other) < 0.6


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_vmap_with_shared_and_with_mapped_keys(backend):
    keys = jax.random.split(jax.random.key(2), 2)

    def call(x, rng):
        options = {"dropout_rate": 0.5, "dropout_rng": rng, **BACKENDS[backend]}
        return attention(x, x, x, **options)

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 20, 2, 16)), jnp.float32)
    shared = jax.vmap(call, (0, None))(x, keys[0])
    mapped = jax.vmap(call)(x, keys)
    for i in range(2):
        np.testing.assert_allclose(
            shared[i], call(x[i], keys[0]), atol=2e-2 * ON_GPU + 1e-6
        )
        np.testing.assert_allclose(
            mapped[i], call(x[i], keys[i]), atol=2e-2 * ON_GPU + 1e-6
        )


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_mean_over_keys_is_attention_without(backend):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((20, 1, 16)), jnp.float32)

    @jax.jit
    @jax.vmap
    def call(key):
        options = {"dropout_rate": 0.2, "dropout_rng": key, **BACKENDS[backend]}
        return attention(x, x, x, **options)

    count = 2000 if backend == "xla" or ON_GPU else 200
    mean = np.mean(call(jax.random.split(jax.random.key(0), count)), axis=0)
    without = attention(x, x, x, **BACKENDS[backend])
    # A dropped probability changes the output by up to |v| / sqrt(S).
    assert np.abs(mean - without).max() < 5 * 0.5 * np.abs(x).max() / np.sqrt(count)


def test_a_backend_makes_the_bits_its_own_way():
    """In whole groups of rows, of which the block's are taken."""
    asked = []

    def bits(dropout, rows, *more):
        asked.append(rows)
        return dropout.bits(rows, *more)

    dropout = Dropout((jnp.uint32(1), jnp.uint32(2)), Dropout.threshold_of(0.5))
    spec = AttentionSpec(Score(1.0), dropout=dropout)
    rows, p = {"t": (16, 20), "s": (0, 24)}, jnp.ones((20, 24))
    own = Pairs(spec, rows, arithmetic=Arithmetic(bits=bits))
    found = (jax.jit(pairs.drop)(p) for pairs in (own, Pairs(spec, rows)))
    np.testing.assert_array_equal(*found)
    assert asked == [{"t": (16, 32), "s": (0, 32)}]


def test_signs_stand_for_what_is_dropped():
    """For backends that have no registers for bits: the same gradients."""
    rng = np.random.default_rng(0)
    qk, dp = (jnp.float32(rng.standard_normal((48, 32))) for _ in range(2))
    lse, delta = (jnp.float32(rng.standard_normal((48, 1))) for _ in range(2))
    dropout = Dropout((jnp.uint32(1), jnp.uint32(2)), Dropout.threshold_of(0.3))
    spec = AttentionSpec(Score(0.5), dropout=dropout)
    found = []
    for by_sign in (False, True):
        arithmetic = Arithmetic(drops_by_sign=by_sign)
        rows = {"t": (16, 48), "s": (0, 32)}
        pairs = Pairs(spec, rows, arithmetic=arithmetic)

        def run(qk, dp, lse, delta, pairs=pairs):
            again = pairs.recompute(pairs.scores_of(qk, jnp.float32), lse)
            return again.dropped, again.dz(dp, delta)

        # On a GPU, XLA may round otherwise in another program.
        run = run if ON_GPU else jax.jit(run)
        found.append(run(qk, dp, lse, delta))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.any(found[0][0] == 0.0)


KEYS = {
    "threefry": lambda seed: jax.random.key(seed, impl="threefry2x32"),
    "rbg": lambda seed: jax.random.key(seed, impl="rbg"),
    "unsafe_rbg": lambda seed: jax.random.key(seed, impl="unsafe_rbg"),
    "raw": jax.random.PRNGKey,
}


def one_head(rng):
    x = jnp.float32(np.random.default_rng(0).standard_normal((20, 16)))
    return attention(x, x, x, dropout_rate=0.5, dropout_rng=rng, implementation="xla")


@pytest.mark.parametrize(
    ("kind", "broadcast"),
    [
        *(("threefry", False), ("raw", True), ("rbg", False)),
        *deeply(("threefry", True), ("raw", False), ("rbg", True)),
        *deeply(("unsafe_rbg", False), ("unsafe_rbg", True)),
    ],
)
def test_keys_of_every_kind_drop_the_same_under_vmap(kind, broadcast):
    """As a loop over them, and where each is mapped beside heads of its own."""
    keys = jnp.stack([KEYS[kind](seed) for seed in range(3)])

    def call(rng):
        return masks(
            {"implementation": "reference"},
            dropout_rng=rng,
            broadcast_dropout=broadcast,
        )

    @jax.jit
    @jax.vmap
    def mapped(rng):
        x = jnp.zeros((2, 40, 2, 16))
        v = jnp.broadcast_to(jnp.eye(48)[:, None, :], (2, 48, 2, 48))
        k, options = jnp.zeros((2, 48, 2, 16)), {"implementation": "reference"}
        options |= {"dropout_rate": 0.5, "broadcast_dropout": broadcast}
        return attention(x, k, v, dropout_rng=rng, **options) > 0

    looped = np.stack([call(keys[i]) for i in range(3)])
    np.testing.assert_array_equal(mapped(keys).swapaxes(-2, -3), looped)
    assert 0.4 < np.mean(looped[0] == looped[1]) < 0.6


@pytest.mark.parametrize("kind", ["threefry", "raw", *deeply("rbg", "unsafe_rbg")])
def test_settings_of_jax_drop_nothing_else(kind):
    """Neither how threefry counts, nor x64, nor jit; and entries added, none."""
    rng = KEYS[kind](3)
    expected = one_head(rng)
    for partitionable in (False, True):
        with jax.threefry_partitionable(partitionable):
            np.testing.assert_array_equal(one_head(rng), expected)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(one_head(rng), expected)
    atol = 1e-2 if ON_GPU else 1e-5  # one program of XLA's, and one for each product
    np.testing.assert_allclose(jax.jit(one_head)(rng), expected, atol=atol)
    option = {"implementation": "reference"}
    few, many = (
        masks(option, batch=batch, n=n, dropout_rng=rng)
        for batch, n in (((2,), 2), ((3,), 5))
    )
    np.testing.assert_array_equal(many[:2, :2], few)


def test_raw_keys_are_keys():
    typed = one_head(jax.random.key(7, impl="threefry2x32"))
    raw = np.asarray(jax.random.key_data(jax.random.key(7, impl="threefry2x32")))
    np.testing.assert_array_equal(one_head(jnp.asarray(raw)), typed)
    np.testing.assert_array_equal(one_head(raw), typed)


@pytest.mark.parametrize("count", [2, 4, *deeply(1, 3)])
def test_seeds_are_of_every_word_and_number(count):
    """All seeds of a call differ, and of many keys; each bit given turns half."""
    rng = np.random.default_rng(0)
    words = jnp.uint32(rng.integers(0, 2**32, count))
    of_call = np.stack(dropout_lib.seeds(words, (40, 25), (100,)), -1)
    assert of_call.shape == (40, 25, 100, 2)
    flat = of_call.reshape(-1, 2)
    assert len(np.unique(flat, axis=0)) == len(flat) == 100_000
    assert abs(np.unpackbits(flat.view(np.uint8)).mean() - 0.5) < 5e-4
    one = jax.jit(jax.vmap(lambda w: jnp.stack(dropout_lib.seeds(w))))
    # Keys of consecutive seeds, and any others.
    keys = np.zeros((2000, count), np.uint32)
    keys[:, -1] = np.arange(2000)
    assert len(np.unique(one(keys), axis=0)) == 2000
    keys = rng.integers(0, 2**32, (2000, count), np.uint64).astype(np.uint32)
    seeds = np.asarray(one(keys))
    for word, bit in itertools.product(range(count), (0, 1, 9, 16, 30, 31)):
        others = keys.copy()
        others[:, word] ^= np.uint32(1 << bit)
        turned = np.unpackbits((one(others) ^ seeds).view(np.uint8), axis=1)
        assert np.abs(turned.reshape(2000, -1).mean(0) - 0.5).max() < 6 / 2 / 2000**0.5


def test_a_key_used_twice_is_said():
    """Where JAX looks for that."""
    with jax.debug_key_reuse(True):
        rng = jax.random.key(0)
        one_head(rng)
        with pytest.raises(jax.errors.KeyReuseError):
            one_head(rng)
