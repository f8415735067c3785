"""Programs of functions of one pair: steps, intervals, derivatives."""

import functools
import operator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_flash2 import _api, _mods
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import Tiling, known
from pallas_kernels.core.pointwise import sides, trace
from pallas_kernels.core.pointwise.program import only_live
from tests.tiers import deeply

B, N, T, S = 2, 2, 24, 30
NATURAL = frozenset(("b", "h", "q", "kv"))
RNG = np.random.default_rng(0)
IDS = jnp.asarray(np.sort(RNG.integers(0, 5, (B, S))), jnp.int32)
FLAGS = jnp.asarray(RNG.random(S) < 0.5)
X = jnp.asarray(RNG.standard_normal((N, S)), jnp.float32)
Q, KV = jnp.zeros((B, T, N, 16)), jnp.zeros((B, S, N, 16))


def integer(rng, depth: int):
    """A random function of (b, h, q, kv) that gives an int32."""
    n = int(rng.integers(1, 9))
    if depth == 0 or rng.random() < 0.2:
        leaves = [
            *(lambda b, h, q, kv, i=i: (b, h, q, kv)[i] for i in (1, 2, 3, 2, 3)),
            lambda b, h, q, kv: IDS[b, q],
            lambda b, h, q, kv: IDS[b, kv],
            lambda b, h, q, kv: jnp.int32(3 * n - 8),
        ]
        return leaves[rng.integers(len(leaves))]
    x, y = integer(rng, depth - 1), integer(rng, depth - 1)
    operations = [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * (b % 5),
        lambda a, b: jnp.minimum(a, b),
        lambda a, b: jnp.maximum(a, -b),
        lambda a, b: abs(a - b),
        lambda a, b: a // n,
        lambda a, b: a % n,
        lambda a, b: jnp.where(a > b, a, n),
        lambda a, b: a ^ b,
        lambda a, b: a * 2**29 + b,
    ]
    operation = operations[rng.integers(len(operations))]
    return lambda *at: operation(x(*at), y(*at))


def boolean(rng, depth: int):
    """A random function of (b, h, q, kv) that gives a bool."""
    if depth == 0:
        x, y = integer(rng, 2), integer(rng, 2)
        bound = float(rng.standard_normal())
        leaves = [
            lambda *at: x(*at) <= y(*at),
            lambda *at: x(*at) > y(*at),
            lambda *at: x(*at) == y(*at),
            lambda *at: x(*at) != y(*at),
            lambda b, h, q, kv: FLAGS[kv],
            lambda b, h, q, kv: X[h, kv] * 2.0 + x(b, h, q, kv) >= bound,
            lambda b, h, q, kv: jnp.sqrt(X[h, q]) < bound,
        ]
        return leaves[rng.integers(len(leaves))]
    a, b = boolean(rng, depth - 1), boolean(rng, depth - 1)
    operations = [
        lambda *at: a(*at) & b(*at),
        lambda *at: a(*at) | b(*at),
        lambda *at: ~a(*at),
        lambda *at: jnp.where(a(*at), b(*at), ~b(*at)),
    ]
    return operations[rng.integers(len(operations))]


def kept_and_relation(function, blocks, offset=0):
    """Of all pairs; of pairs of blocks, some and all. No part is a built-in mask.

    What kernels evaluate for a pair is the same.
    """

    @jax.jit
    @mock.patch.object(_mods, "split", lambda program, *_: known.Split((), program))
    def run():
        arguments = _api.given(Q, KV, KV, mask_mod=function, query_offset=offset)
        spec = arguments.checked().spec
        axes = ("b0", "n", "t", "s")
        fields = jax.tree.map(lambda x: x.to(axes), spec)
        rows = np.arange(T)[:, None], np.arange(S)
        tiling = Tiling(*blocks, T, S, spec.positions)
        (kept,) = fields.keep(*rows)
        cut = jax.tree.map(lambda x: x.to(axes), spec.for_pairs(tiling))
        (atom,) = spec.masks
        found = atom.block_relation(tiling)
        return (*cut.keep(*rows), kept, *(x.to(("b0", "n", "i", "j")) for x in found))

    by_sides, kept, *found = run()
    np.testing.assert_array_equal(*np.broadcast_arrays(by_sides, kept))
    shape = (B, N, -(-T // blocks[0]), -(-S // blocks[1]))
    kept = np.broadcast_to(kept, (B, N, T, S))
    if offset >= 0:  # else positions below 0 are clamped where JAX's indices wrap
        b, h, q, kv = np.indices(kept.shape, dtype=np.int32)
        expected = jax.jit(jnp.vectorize(function))(b, h, q + np.int32(offset), kv)
        np.testing.assert_array_equal(kept, expected)
    return kept, *(np.broadcast_to(x, shape) for x in found)


def check_relation(function, blocks, offset=0):
    kept, some, every = kept_and_relation(function, blocks, offset)
    for i, j in np.ndindex(some.shape[2:]):
        rows = slice(i * blocks[0], (i + 1) * blocks[0])
        keys = slice(j * blocks[1], (j + 1) * blocks[1])
        block = kept[:, :, rows, keys]
        assert np.all(some[..., i, j] | ~block.any((2, 3)))
        assert np.all(~every[..., i, j] | block.all((2, 3)))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**31), st.sampled_from([(8, 8), (5, 16)]), st.sampled_from([0, -9])
)
def test_intervals_are_sound(seed, blocks, offset):
    check_relation(boolean(np.random.default_rng(seed), 2), blocks, offset)


@pytest.mark.parametrize("seed", deeply(*range(16)))
def test_intervals_of_more_functions_are_sound(seed):
    rng = np.random.default_rng(seed)
    check_relation(
        boolean(rng, 3), (int(rng.integers(1, 9)), 7), int(rng.integers(-9, 9))
    )


EXACT = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 7) | (kv < 4),
    "documents": lambda b, h, q, kv: (IDS[b, q] == IDS[b, kv]) & (q >= kv),
    "prefix": lambda b, h, q, kv: (kv <= q) | (kv < 9),
    "neighbours": lambda b, h, q, kv: abs(q // 6 - kv // 6) <= 1,
}


@pytest.mark.parametrize("name", EXACT)
def test_intervals_are_exact(name):
    """Of common masks, no block is visited in vain."""
    kept, some, every = kept_and_relation(EXACT[name], (6, 6))
    blocks = kept.reshape(B, N, 4, 6, 5, 6)
    np.testing.assert_array_equal(some, blocks.any((3, 5)))
    if name != "prefix":
        np.testing.assert_array_equal(every, blocks.all((3, 5)))


def test_nan_in_a_captured_array_is_in_its_interval():
    """No comparison with it is True, whatever bounds the other numbers have."""
    odd = X.at[:, ::4].set(jnp.nan)
    check_relation(lambda b, h, q, kv: jnp.clip(odd[h, kv], -1, 1) >= -1, (8, 8))


NEAR = {
    "2-D": lambda b, h, q, kv: (abs(q // 6 - kv // 6) <= 1) & (abs(q % 6 - kv % 6) < 3),
    "3-D": lambda b, h, q, kv: (
        (abs(q // 9 - kv // 9) <= 1)
        & (abs(kv // 3 % 3 - q // 3 % 3) <= 1)
        & (abs(q % 3 - kv % 3) <= 1)
    ),
    "clipped": lambda b, h, q, kv: (
        (abs(jnp.clip(q // 6, 1, 2) - kv // 6) <= 1) & ~(q % 6 > kv % 6 + 1)
    ),
    "equal": lambda b, h, q, kv: (q % 4 == kv % 4) & (q // 8 <= kv // 4) & (kv < 3 + h),
    "beyond": lambda b, h, q, kv: (q // 2 - 20 <= kv % 3) & (kv % 5 < q // 2 - 4),
}


@pytest.mark.parametrize("name", [*(x for x in NEAR if x != "2-D"), *deeply("2-D")])
def test_comparisons_of_two_sides_are_words(name):
    """One addition for a pair, whatever is compared; the functions stay the same."""
    check_relation(NEAR[name], (8, 8))
    program = trace(NEAR[name], None, NATURAL).program
    rows = {x: Named(jnp.arange(n), a) for x, n, a in (("q", T, "t"), ("kv", S, "s"))}
    rows |= {"b": None, "h": Named(jnp.arange(N), ("n",))}
    known = {"q": (0, T - 1), "kv": (0, S - 1)}
    found, arrays = sides.split(program, (), rows, known)
    of_pairs = {step.name for step in found.steps}
    assert len(arrays) == 2
    assert not {"abs", "div", "rem", "sub"} & of_pairs
    assert [step.name for step in found.steps].count("add") <= 2


def test_bounds_too_large_for_words():
    far = 2**30
    check_relation(
        lambda b, h, q, kv: (
            (abs(q // 64 - (kv // 64 + far)) <= far) & (abs(q % 6 - kv % 6) < 3)
        ),
        (8, 8),
    )


def test_heads_that_are_rows_are_of_the_queries():
    """Then a head belongs to no side that has keys."""
    program = trace(lambda b, h, q, kv: kv // 7 % 5 > h % 3, None, NATURAL).program
    rows = {x: Named(jnp.arange(n), a) for x, n, a in (("q", T, "t"), ("kv", S, "s"))}
    rows |= {"b": None, "h": Named(jnp.arange(T) % 4, ("t",))}
    _, arrays = sides.split(program, (), rows, {})
    assert sorted(x.axes for x in arrays) == [("s",), ("t",)]


def real(rng, depth: int):
    """A random function of (score, b, h, q, kv) that gives a float32."""
    if depth == 0:
        leaves = [
            lambda s, b, h, q, kv: s,
            lambda s, b, h, q, kv: X[h, kv],
            lambda s, b, h, q, kv: X[h, (q - kv) % 7],
            lambda s, b, h, q, kv: (q - kv) / 8.0,
        ]
        return leaves[rng.integers(len(leaves))]
    x, y = real(rng, depth - 1), real(rng, depth - 1)
    operations = [
        lambda a, b: a + b,
        lambda a, b: a - 0.5 * b,
        lambda a, b: a * jnp.tanh(b),
        lambda a, b: a / (2.0 + b * b),
        lambda a, b: jnp.sin(a) + jnp.maximum(a, b),
        lambda a, b: jnp.where(a > b, a, jax.nn.silu(b)),
        lambda a, b: jnp.exp(-abs(a)) + jnp.log1p(b * b),
        lambda a, b: jax.nn.relu(a) - jax.scipy.special.erf(b),
    ]
    operation = operations[rng.integers(len(operations))]
    return lambda *at: operation(x(*at), y(*at))


@pytest.mark.parametrize("seed", [*range(2), *deeply(*range(2, 12))])
def test_programs_are_their_functions(seed):
    """Their values, and derivatives by the score and by each read."""
    function = real(np.random.default_rng(seed), 3)
    traced = trace(function, jnp.float32, NATURAL)
    at = jnp.float32(0.7), *(jnp.int32(x) for x in (1, 1, 9, 4))
    read = lambda step, index: traced.captured[step.params[0]][tuple(index)]  # noqa: E731
    bound = lambda step, args: step.bound(*args)  # noqa: E731

    @jax.jit
    def run(*at):
        (found,) = traced.program.run(at, read, bound)
        reads = [
            traced.captured[x.params[0]][_index(traced.program, x, at)]
            for x in traced.program.reads
        ]
        derivative = traced.derivative(jnp.float32)
        by_score, *_ = derivative.run((*at, *reads), read, bound)
        return found, by_score

    found, by_score = run(*at)
    value, slope = jax.jit(jax.value_and_grad(function))(*at)
    np.testing.assert_allclose(found, value, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(by_score, slope, rtol=1e-5, atol=1e-6)


def _index(program, step, at):
    live = only_live(program, step.args)
    return tuple(live.run(at, None, lambda step, args: step.bound(*args)))


def test_logarithms_to_base_two_are_natural_ones():
    """JAX has an operation for them that kernels lack."""
    traced = trace(lambda s, b, h, q, kv: jnp.log2(s), jnp.float32, NATURAL)
    (found,) = traced.program.on_blocks([jnp.float32(8.0), *[None] * 4], ())
    assert "log2" not in traced.program.operations
    assert found == pytest.approx(3.0)


REWRITTEN = {
    "a quotient by a constant": lambda x: 20 * jnp.tanh(x / 16),
    "a logarithm to base two": jnp.log2,
    "a square": jnp.square,
    "a negative power": lambda x: x**-3,
    "a polynomial": jax.scipy.special.erf,
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_jax_differentiates_what_is_rewritten(name):
    """As the reference does: each operation has the parameters that JAX asks for."""
    function = REWRITTEN[name]
    traced = trace(lambda s, b, h, q, kv: function(s), jnp.float32, NATURAL)

    def run(x):
        (found,) = traced.program.on_blocks([x, *[None] * 4], ())
        return found

    second, expected = (jax.jit(jax.grad(jax.grad(f)))(0.7) for f in (run, function))
    np.testing.assert_allclose(second, expected, rtol=1e-5)


EXTREMES = {
    "max(|x|, y)": lambda x, y: jnp.maximum(abs(x), y),
    "max(y, |x|)": lambda x, y: jnp.maximum(3 * y, abs(x)),
    "max(|x|, |y|)": lambda x, y: jnp.maximum(abs(x), abs(y)),
    "min(-|x|, y)": lambda x, y: jnp.minimum(-abs(x), y),
    "min(y, -|x|)": lambda x, y: jnp.minimum(y - 2, -abs(x)),
    "min(|x|, -y)": lambda x, y: jnp.minimum(abs(x), -y),
    "max of max": lambda x, y: jnp.maximum(jnp.maximum(abs(x), y), abs(y - 3)),
}
COMPARED = operator.le, operator.lt, operator.ge, operator.gt, operator.eq


def _pairs_of_integers():
    ends = np.int32([-(2**31), 2**31 - 1, 0, -7])
    numbers = np.indices((23, 21), dtype=np.int32) - 11
    return [jnp.asarray(np.append(x, ends)) for x in numbers]


@pytest.mark.parametrize("name", EXTREMES)
def test_larger_and_smaller_integers(name):
    """Of absolute values by other steps, and in comparisons one for each."""
    function, (x, y) = EXTREMES[name], _pairs_of_integers()

    def ran(function, score=()):
        traced = trace(function, jnp.float32 if score else None, ())
        (found,) = traced.program.on_blocks([*score, None, None, x, y], ())
        return traced.program, found

    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)
    program, found = ran(lambda s, b, h, q, kv: bits(function(q, kv)), (None,))
    np.testing.assert_array_equal(np.asarray(found).view(np.int32), function(x, y))
    made = dict(enumerate(program.steps, len(program.inputs)))
    for step in program.steps:
        inner = [made[a].name for a in step.args if a in made]
        assert step.name != "max" or "abs" not in inner
    for compare in COMPARED:
        for run in (
            lambda a, b, compare=compare: compare(function(a, b), a + 4),
            lambda a, b, compare=compare: compare(b, function(a, b)),
        ):
            _, found = ran(lambda b, h, q, kv, run=run: run(q, kv))
            np.testing.assert_array_equal(found, run(x, y))


@pytest.mark.parametrize("compare", COMPARED)
def test_absolute_values_are_compared_by_sign(compare):
    """By any compiler: XLA would join the comparisons to one that ptxas gets wrong."""
    x, y = _pairs_of_integers()
    functions = (
        lambda b, h, q, kv: compare(abs(q), kv),
        lambda b, h, q, kv: compare(kv, abs(q - kv)),
        lambda b, h, q, kv: compare(abs(q), 3) & compare(abs(kv), abs(q - kv)),
    )
    for function in functions:
        program = trace(function, None, ()).program

        def run(x, y, program=program):
            return program.on_blocks([None, None, x, y], ())

        np.testing.assert_array_equal(*run(x, y), function(None, None, x, y))
        names = {x.primitive.name for x in jax.make_jaxpr(run)(x, y).eqns}
        assert ("abs" in names) == (compare is operator.eq)


def test_comparisons_with_nested_maxima_stay_few():
    def function(b, h, q, kv):
        for i in range(30):
            q = jnp.maximum(q, q ^ i)
        return q <= kv

    program = trace(function, None, ()).program
    assert len(program.steps) < 200
    numbers = jnp.arange(40, dtype=jnp.int32)
    (found,) = program.on_blocks([None, None, numbers, 2 * numbers - 9], ())
    np.testing.assert_array_equal(found, function(None, None, numbers, 2 * numbers - 9))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_booleans_of_numbers(dtype):
    """As JAX has them, by operations that kernels have."""
    numbers = jnp.array([0, 2, -1, 3, -0.0 if dtype == jnp.int32 else jnp.nan], dtype)

    def function(b, h, q, kv):
        is_set, is_far = numbers[kv].astype(bool), kv > q
        return ~jnp.minimum(is_set, jnp.maximum(is_far, ~is_set | (q == 1)))

    traced = trace(function, None, NATURAL)
    assert not {"convert_element_type", "max", "min"} & traced.program.operations

    @jax.jit
    def both(q, kv):
        found = traced.program.run(
            (None, None, q, kv),
            lambda step, index: numbers[tuple(index)],
            lambda step, args: step.bound(*args),
        )
        return *found, function(None, None, q, kv)

    np.testing.assert_array_equal(*both(*np.indices((3, 5), dtype=np.int32)))


def test_equal_functions_are_equal_programs():
    def program(factor, x):
        def function(s, b, h, q, kv):
            return jnp.where(q % 3 == 0, s * factor, jnp.float32(jnp.nan)) + x[h, kv]

        return trace(function, jnp.float32, NATURAL).program

    assert program(2.0, X) == program(2.0, X + 1)
    assert hash(program(2.0, X)) == hash(program(2.0, X + 1))
    assert program(2.0, X) != program(3.0, X)


def test_indices_are_seen_through_jaxs_wrap():
    def function(s, b, h, q, kv):
        return s + X[h, kv] + X[h][kv] + X[:, kv][h] + X.at[h, kv].get(mode="clip")

    traced = trace(function, jnp.float32, NATURAL)
    (read,) = traced.program.reads
    assert [traced.program.inputs[x] for x in read.args] == ["h", "kv"]
