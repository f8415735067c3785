"""Keys in pages, on every backend that reads them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import merge, paged_attention, quantize_kv
from pallas_kernels import device
from pallas_kernels.core import nibbles
from pallas_kernels.triton import packed, support
from tests.cases import ON_GPU
from tests.paged import E4M3, E5M2, INT4, INT8, PROBLEMS, by_name, only
from tests.tiers import deep, deeply

# Interpreted kernels take seconds each: these have every path between them.
FIRST = {
    "triton": ("small_pages_window", "ragged_int8", "latent", "int4_parts"),
    "xla": tuple(problem.name for problem in PROBLEMS),
    "reference": ("int8_parts_starts",),
}


def _runs():
    for problem in PROBLEMS:
        for backend, names in FIRST.items():
            first = problem.name in names or (ON_GPU and backend == "triton")
            if backend == "triton" and problem.name == "int4_small_heads":
                continue  # its pieces of heads are too small
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


WINDOW = {"local_window_size": (20, 0)}
BEYOND = [("xla", 1, {}), ("xla", 3, WINDOW), ("triton", 3, WINDOW)]
OTHERS = itertools.product(("xla", "reference", "triton"), (1, 3), ({}, WINDOW))


@pytest.mark.parametrize(
    ("backend", "queries", "options"),
    [*BEYOND, *deeply(*(x for x in OTHERS if x not in BEYOND))],
    ids=str,
)
def test_lengths_beyond_the_rows_that_there_are(backend, queries, options):
    """They count as none, or as all: the same bits."""
    rng = np.random.default_rng(0)
    k, v = jnp.asarray(rng.standard_normal((2, 6, 16, 2, 16)), jnp.float32)
    q = jnp.asarray(rng.standard_normal((6, queries, 4, 16)), jnp.float32)
    table = jnp.asarray(rng.integers(0, 6, (6, 4)), jnp.int32)
    given = jnp.array([-(2**31), -5, 0, 40, 65, 2**31 - 1], jnp.int32)
    options = options | only(backend) | {"return_residual": True}
    found = paged_attention(q, k, v, table, given, **options)
    wanted = paged_attention(q, k, v, table, given.clip(0, 64), **options)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert jnp.all(found[0][:3] == 0) and jnp.all(found[1][:3] == -jnp.inf)
    assert jnp.all(jnp.isfinite(found[1][3:]))


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_instructions_take_every_code_apart(kind, dtype):
    """Two columns of a register of int8, or four of int4, as a GPU would."""
    bits, dtype = 8 if kind == "int8" else 4, jnp.dtype(dtype)
    columns = 16 // bits
    rng, codes = np.random.default_rng(0), np.arange(2**bits)
    codes = np.stack([rng.permutation(codes) for _ in range(2 * columns)], -1)
    register = sum(
        codes[:, i].astype(np.uint64) << bits * i for i in range(2 * columns)
    )
    for i, text in enumerate(packed._assembly(kind, dtype)):
        words = _executed(text, register.astype(np.uint32))
        found = words[:, None].view(np.uint16).view(dtype).astype(np.int32)
        expected = codes[:, [i, columns + i]]
        expected = np.where(expected < 2 ** (bits - 1), expected, expected - 2**bits)
        np.testing.assert_array_equal(found, expected)


def _executed(text: str, x: np.ndarray) -> np.ndarray:
    """What a few instructions of PTX, on words of 32 bits, make of `$1`."""
    values = {"$1": x}
    made = {
        "lop3.b32": _by_table,
        "shr.u32": lambda a, b: a >> b,
        "mov.b32": lambda a: a,
        "sub.f16x2": lambda a, b: _halves(lambda a, b: a - b, jnp.float16, a, b),
        "fma.rn.bf16x2": lambda a, b, c: _halves(
            lambda a, b, c: a * b + c, jnp.bfloat16, a, b, c
        ),
    }
    for line in text.strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name and not name.startswith(".reg"):
            target, *given = (word.strip() for word in rest.split(","))
            numbers = (
                values[y] if y in values else np.full_like(x, int(y, 0)) for y in given
            )
            values[target] = made[name](*numbers)
    return values["$0"]


def _by_table(a: np.ndarray, b, c, table) -> np.ndarray:
    """Bit by bit, the bit of `table` whose number has the bits of a, b and c."""
    found = np.zeros_like(a)
    for i in range(32):
        bits = [(x >> np.uint32(i)) & 1 for x in (a, b, c)]
        number = bits[0] * 4 + bits[1] * 2 + bits[2]
        found |= ((table >> number) & 1) << np.uint32(i)
    return found


def _halves(function, dtype, *words: np.ndarray) -> np.ndarray:
    """A function of numbers of two bytes, of which each word has two; one rounding."""
    parts = (y[:, None].view(np.uint16).view(jnp.dtype(dtype)) for y in words)
    found = function(*(y.astype(np.float32) for y in parts)).astype(dtype)
    return found.view(np.uint32)[:, 0]


def test_heads_of_four_bits_that_kernels_lack():
    problem = by_name("int4_small_heads")
    with pytest.raises(ValueError, match="size 6 of int4 is no power of two from 64"):
        paged_attention(**problem.made().arguments, **only("triton"))


def test_pairs_of_four_bits_are_those_of_jax():
    """The bits of an array of int4; each code is the number that it stands for."""
    codes = jnp.tile(jnp.arange(-8, 8), 2).reshape(2, 16)[:, ::-1]
    pairs = codes.astype(jnp.int4).reshape(2, 8, 2)
    bytes_ = jax.lax.bitcast_convert_type(pairs, jnp.uint8)
    np.testing.assert_array_equal(nibbles.packed(codes), bytes_)
    np.testing.assert_array_equal(nibbles.elements(bytes_), codes)
    bytes_, scale = quantize_kv(jnp.array([[7.0, -6.6, 0.6, 0.4]]), INT4)
    assert nibbles.elements(bytes_).tolist() == [[7, -7, 1, 0]] and scale == 1.0


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
