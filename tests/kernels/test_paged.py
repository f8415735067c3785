"""Keys in pages, on every backend that reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import merge, paged_attention
from pallas_kernels import device
from pallas_kernels.triton import support
from tests.cases import ON_GPU
from tests.paged import E4M3, E5M2, INT8, PROBLEMS, by_name, only
from tests.tiers import deep

# Interpreted kernels take seconds each: these have every path between them.
FIRST = ("small_pages_window", "int8_parts_starts", "ragged_int8", "latent")


def _runs():
    for problem in PROBLEMS:
        for backend in ("triton", "xla", "reference"):
            first = ON_GPU or backend == "xla" or problem.name in FIRST
            first = first and (backend != "reference" or problem.name == FIRST[1])
            marks = [] if first else [deep]
            yield pytest.param(
                problem, backend, id=f"{problem.name}-{backend}", marks=marks
            )


def run(problem, backend, **changed):
    """A problem's output and log-sum-exp, by one compiled program for its shapes."""
    made = problem.made()
    arguments = made.arguments | changed
    data = {n: x for n, x in arguments.items() if isinstance(x, jax.Array | np.ndarray)}
    static = {n: x for n, x in arguments.items() if n not in data}

    @jax.jit
    def call(data):
        options = problem.options(backend)
        return paged_attention(**data, **static, **options, return_residual=True)

    return made, call, data


@pytest.mark.parametrize(("problem", "backend"), [*_runs()])
def test_rows_of_pages_are_keys(problem, backend):
    made, call, data = run(problem, backend)
    made.check(*call(data))


@pytest.mark.parametrize("backend", ["xla", pytest.param("triton", marks=deep)])
def test_bits_do_not_depend_on_where_pages_lie(backend):
    """Nor on entries that are not followed, nor on what lies in other pages."""
    made, call, data = run(by_name("small_pages_window"), backend)
    first = call(data)
    rng = np.random.default_rng(1)
    order = rng.permutation(made.pages)
    place = np.argsort(order)  # of each page now
    table = np.asarray(data["page_table"])
    inside = (table >= 0) & (table < made.pages)
    moved = np.where(inside, place[np.where(inside, table, 0)], 2**31 - 1)
    keys, values = (data[name][order] for name in ("key_pages", "value_pages"))
    pools = {"key_pages": keys, "value_pages": jnp.nan_to_num(values, nan=jnp.inf)}
    second = call({**data, **pools, "page_table": jnp.asarray(moved, jnp.int32)})
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", [INT8, E4M3, E5M2], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("capability", [80, 90])
def test_every_code_of_a_byte_is_the_number_that_it_stands_for(
    kind, capability, monkeypatch
):
    """In kernels; NaN stays NaN where no instruction converts it."""
    monkeypatch.setattr(device, "capability", lambda: capability)
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), kind)
    found = support.arithmetic(jnp.bfloat16, False).widened(codes, jnp.bfloat16)
    exact = np.asarray(codes).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(found, np.float32), exact)


def test_a_shared_prefix_is_merged():
    """Sequences that share pages, as rows of one, and what each has after them."""
    rng = np.random.default_rng(0)
    k, v = jnp.asarray(rng.standard_normal((2, 9, 16, 2, 16)), jnp.float32)
    q = jnp.asarray(rng.standard_normal((3, 1, 4, 16)), jnp.float32)
    prefix, own = jnp.array([5, 2]), jnp.array([[1, 3], [0, 4], [8, 6]])
    lengths = jnp.array([20, 3, 32])
    options = {"implementation": "xla", "return_residual": True}
    one = paged_attention(
        q.swapaxes(0, 1),
        k,
        v,
        prefix[None],
        jnp.array([32]),
        is_causal=False,
        **options,
    )
    one = [x.swapaxes(0, 1) for x in one]
    two = paged_attention(q, k, v, own, lengths, **options)
    table = jnp.concatenate([jnp.tile(prefix, (3, 1)), own], 1)
    whole = paged_attention(q, k, v, table, lengths + 32, **options)
    for found, expected in zip(merge(tuple(one), two), whole, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-2 if ON_GPU else 2e-6)


@deep
def test_scales_of_values_have_room_in_float16():
    """p * scale beside keys whose scores lie far above those of the first block."""
    keys = jnp.zeros((3, 16, 1, 16), jnp.int8).at[0, :2].set(1)
    out = paged_attention(
        jnp.ones((1, 1, 1, 16), jnp.float16),
        keys,
        jnp.ones_like(keys),
        jnp.arange(3)[None],
        jnp.array([48]),
        value_scale=100.0,
        scale=0.5,
        **only("triton"),
    )
    np.testing.assert_allclose(out, 100.0, rtol=2e-3)
