"""`jax_flash2.nn`: jax.nn's attention, called as there and by those who call it."""

import functools
import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_flash2 import nn
from tests.cases import ON_GPU
from tests.tiers import deeply

OWN = jax.nn.dot_product_attention
ATOL = 2e-2 if ON_GPU else 2e-5


@pytest.fixture(autouse=True)
def _left_as_found():
    yield
    assert jax.nn.dot_product_attention is OWN


def arrays(q=(2, 12, 4, 16), k=(2, 12, 4, 16), dtype=np.float32):
    rng = np.random.default_rng(0)
    made = (rng.standard_normal(shape) for shape in (q, k, k))
    return [jnp.asarray(x, dtype) for x in made]


def random(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


TRIL = np.tril(np.ones((12, 12), bool))
CALLS = {
    "plain": {},
    "bias": {"bias": random(2, 4, 12, 12)},
    "bias of 2 axes": {"bias": random(12, 12)},
    "bias of heads": {"bias": random(4, 12, 12)},
    "bias of keys": {"bias": random(12)},
    "bias of integers": {"bias": np.arange(144).reshape(12, 12) % 5},
    "bias of bools": {"bias": TRIL},
    "bias of float64": {"bias": random(12, 12).astype(np.float64)},
    "mask": {"mask": TRIL[None, None]},
    "mask of 2 axes": {"mask": TRIL},
    "mask of heads": {"mask": np.stack([TRIL] * 4)},
    "scale": {"scale": 0.3},
    "scale of NumPy": {"scale": np.float32(0.3)},
    "scale that is an array": {"scale": jnp.float32(0.3)},
    "causal": {"is_causal": True},
    "causal as a number": {"is_causal": 1},
    "window": {"local_window_size": (3, 2)},
    "window as a number": {"local_window_size": 2},
    "causal window": {"local_window_size": (3, 2), "is_causal": True},
    "xla": {"implementation": "xla"},
    "lengths": {"key_value_seq_lengths": np.int32([5, 12])},
    "query lengths": {
        "query_seq_lengths": jnp.int32([5, 12]),
        "key_value_seq_lengths": np.int32([7, 9]),
    },
    "a bias and more": {
        "bias": random(2, 1, 12, 12),
        "mask": TRIL,
        "key_value_seq_lengths": np.int32([5, 12]),
        "scale": 0.2,
    },
}


# Others have more than these have.
PLAINER = (
    *("plain", "bias", "bias of heads", "mask", "mask of 2 axes"),
    *("scale", "causal", "window", "lengths"),
)


@pytest.mark.parametrize(
    "name", [*(x for x in CALLS if x not in PLAINER), *deeply(*PLAINER)]
)
def test_results_are_those_of_jax(name):
    x, more = arrays(), CALLS[name]
    found = nn.dot_product_attention(*x, **more)
    expected = jax.jit(lambda x: OWN(*x, **more))(x)
    np.testing.assert_allclose(found, expected, atol=ATOL)


SHAPES = {
    "one entry": ((12, 4, 16), (10, 2, 16)),
    "one row": ((4, 16), (4, 16)),
    "heads alone of queries": ((1, 12, 4, 16), (10, 2, 16)),
    "groups": ((2, 12, 4, 16), (2, 10, 2, 16)),
    "one key head": ((2, 12, 4, 16), (2, 10, 1, 16)),
}


@pytest.mark.parametrize("dtype", ["float32", *deeply("bfloat16", "float16")])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_dtypes_are_those_of_jax(name, dtype):
    x = arrays(*SHAPES[name], dtype)
    more = {"return_residual": True, "is_causal": True}
    found = jax.tree.leaves(nn.dot_product_attention(*x, **more))
    own = functools.partial(OWN, **more)
    # In float16 `jit` of it fails on CPUs (JAX 0.12.0).
    own = own if dtype == "float16" else jax.jit(own)
    expected = jax.tree.leaves(own(*x))
    atol = ATOL if dtype == "float32" else 2e-2
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, False)
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=atol)


def test_gradients_are_those_of_jax():
    """The residual has none there."""
    more = {"bias": jnp.asarray(random(12, 12)), "scale": jnp.float32(0.3)}

    def gradients(function):
        def loss(x, more):
            out, lse = function(*x, **more, is_causal=True, return_residual=True)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

        return jax.jit(jax.grad(loss, (0, 1)))(arrays(), more)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=10 * ATOL),
        *map(gradients, (nn.dot_product_attention, OWN)),
    )


def test_lists_are_arrays_here():
    x = arrays((1, 2, 1, 4), (1, 3, 1, 4))
    lists = [a.tolist() for a in x]
    found = nn.dot_product_attention(*lists, key_value_seq_lengths=[2])
    expected = OWN(*x, key_value_seq_lengths=jnp.int32([2]))
    np.testing.assert_allclose(found, expected, atol=ATOL)


def test_rows_without_keys():
    """0 and -inf, as the docstring says; the mean of the values in jax.nn."""
    x, mask = arrays(), TRIL & (np.arange(12) > 2)[:, None]
    out, lse = nn.dot_product_attention(*x, mask=mask, return_residual=True)
    assert not np.any(out[:, :3])
    assert np.all(lse[:, :3] == -np.inf)
    np.testing.assert_allclose(out[:, 3:], OWN(*x, mask=mask)[:, 3:], atol=ATOL)


def test_signature_is_that_of_jax():
    ours, theirs = map(inspect.signature, (nn.dot_product_attention, OWN))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"implementation": "triton"}, ValueError, "None, 'xla' or 'cudnn'.*'triton'"),
        ({"bias": np.zeros((1,) * 5)}, ValueError, "bias must have at most 4 axes"),
        ({"mask": np.ones((12, 12))}, TypeError, "mask must have dtype bool"),
        ({"key": np.zeros((2, 12, 3, 16))}, ValueError, "key and value must have"),
    ],
)
def test_wrong_calls(more, error, words):
    given = dict(zip(("query", "key", "value"), arrays(), strict=True))
    with pytest.raises(error, match=words):
        nn.dot_product_attention(**given | more)


def is_ours(function, *args) -> bool:
    return "flash2_forward" in str(jax.make_jaxpr(function)(*args))


def test_flax_reaches_it_as_it_is():
    """Its default attention, with and without masks, gradients and a cache."""
    x, seen = jnp.asarray(random(2, 12, 32)), []

    def layer(**more):
        sizes = {"num_heads": 4, "in_features": 32, **more}
        return nnx.MultiHeadAttention(**sizes, rngs=nnx.Rngs(0))

    def run(x):
        plain, decoder = layer(decode=False), layer(decode=True)

        def loss(x):
            return jnp.sum(jnp.sin(plain(x, is_causal=True)))

        decoder.init_cache(x.shape)
        found = [plain(x), plain(x, mask=jnp.asarray(TRIL[None, None]))]
        found += [plain(x, is_causal=True), jax.grad(loss)(x)]
        found += [decoder(x[:, i : i + 1]) for i in range(2)]
        seen.append(is_ours(loss, x))
        return found

    expected = jax.jit(lambda x: run(x))(x)
    with nn.installed():
        found = jax.jit(lambda x: run(x))(x)
    assert seen == [False, True]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=10 * ATOL)


def test_contexts_nest_and_end_in_any_order():
    first, second = nn.installed(), nn.installed()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert jax.nn.dot_product_attention is nn.dot_product_attention
    second.__exit__(None, None, None)
    assert jax.nn.dot_product_attention is OWN
    with pytest.raises(KeyError), nn.installed():
        raise KeyError
    with pytest.raises(RuntimeError, match="not installed"):
        nn.uninstall()


def test_threads():
    """However many come and go, jax.nn has its own again."""
    barrier, wrong = threading.Barrier(8), []

    def work():
        barrier.wait()
        for _ in range(50):
            with nn.installed():
                if jax.nn.dot_product_attention is not nn.dot_product_attention:
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_others_put_there_stays():
    """And is said: neither `install` nor `uninstall` undoes it."""

    def other(*args, **more):
        return OWN(*args, **more)

    nn.install()
    try:
        jax.nn.dot_product_attention = other
        with pytest.raises(RuntimeError, match=r"replaced by something else.*other"):
            nn.install()
        with pytest.raises(RuntimeError, match="stays as it is"):
            nn.uninstall()
        assert jax.nn.dot_product_attention is other
        with nn.installed():
            assert jax.nn.dot_product_attention is nn.dot_product_attention
        assert jax.nn.dot_product_attention is other
    finally:
        jax.nn.dot_product_attention = OWN
