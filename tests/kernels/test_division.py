"""Divided work: heads of a group as rows, parts of loops and of ranges."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_flash2 import Config, attention, explain
from pallas_kernels import device, division
from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Named
from pallas_kernels.core.ranges import Range
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.triton import support
from pallas_kernels.triton.merge import merged
from tests import tolerances
from tests.cases import FEATURES, FUNCTIONS, INTERPRETED, ON_GPU, PAIRWISE, Case
from tests.tiers import compiled, deep, deeply

# On the CPU in small interpreted blocks.
CONFIG = Config() if ON_GPU else INTERPRETED
TIMES = 20 if ON_GPU else 1  # as many keys


def _check(case, dtype, splits, record_property):
    dtype = jnp.dtype(dtype)
    arrays, arguments = case.inputs(dtype)
    arguments["return_max_logit"] = True  # that of the parts together
    cotangents = tolerances.cotangents_for(case, dtype)
    exact = tolerances.exact(arrays, cotangents, arguments)
    plain = tolerances.plain(arrays, cotangents, arguments)
    config = dataclasses.replace(CONFIG, splits=splits)
    options = {**arguments, "implementation": "triton", "config": config}
    actual = tolerances.evaluate(arrays, cotangents, options)
    found = tolerances.check(actual, exact, plain, tolerances.unit_roundoff(dtype))
    record_property("share of the allowed error", float(max(found.values())))


def _with(*names):
    def arguments(rng, case):
        made = {}
        for name in names:
            made |= (FEATURES | FUNCTIONS)[name].typical(rng, case)
        return made

    return arguments


# Every feature meets packed heads, with one query and with several.
TOGETHER = [
    ("causal", "lengths", "offset", "sinks", "alibi"),
    ("window", "offset", "soft_cap", "bias", "lengths"),
    ("mask", "segments", "sinks", "alibi"),
    ("score_mod", "mask_mod", "causal", "offset"),
]
PACKED = [*((name,) for name in FEATURES), *TOGETHER]


@pytest.mark.parametrize("splits", [3, *compiled(None, 1)])
@pytest.mark.parametrize(
    "names",
    PACKED if ON_GPU else [TOGETHER[0], *deeply(*((x,) for x in TOGETHER[1:]))],
    ids="_".join,
)
def test_few_queries(names, splits, record_property):
    place = PACKED.index(names)
    t, dtype = (1, 5)[place % 2], ("float32", "bfloat16")[place // 2 % 2]
    sizes = {"t": t, "s": 70 * TIMES, "n": 6, "k": 2, "d": 24}
    _check(Case("few", _with(*names), **sizes), dtype, splits, record_property)


@deep
@pytest.mark.parametrize("splits", [2, *compiled(3, 5)])
@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (("causal", "sinks"), {"n": 1, "k": 1, "t": 33}),
        (("bias", "lengths"), {"n": 2, "k": 2, "batch": (5,)}),
        (("causal",), {"n": 6, "k": 1}),
        (("window", "segments"), {"n": 4, "k": 2}),
        (("dropout", "soft_cap", "alibi"), {"n": 4, "k": 1}),
        (("mask", "offset"), {"n": 3, "k": 1, "t": 21}),
    ],
    ids=lambda x: "_".join(x) if isinstance(x, tuple) else "",
)
def test_forced_parts(names, sizes, splits, record_property):
    sizes = {"s": 80 * TIMES, "t": 80 * TIMES, **sizes}
    _check(Case("parts", _with(*names), **sizes), "float32", splits, record_property)


@deep
@pytest.mark.parametrize("splits", [3, *compiled(1, 2)])
@pytest.mark.parametrize(
    "case", PAIRWISE if ON_GPU else PAIRWISE[-1:], ids=lambda case: case.name
)
def test_covering_cases_in_forced_parts(case, splits, record_property):
    """In the chosen division they are among the cases of `test_attention`.

    Interpreted, one of them: random search divides its problems, too.
    """
    case = case.full() if ON_GPU else case
    _check(case, "float32", splits, record_property)


@pytest.mark.parametrize("splits", [2, *compiled(None, 4)])
@deep
@pytest.mark.parametrize(("t", "names"), [(1, ["bias"]), (80, ["causal", "bias"])])
def test_same_bits(t, names, splits):
    case = Case("bits", _with(*names), t=t, s=80 * TIMES, n=6, k=1)
    arrays, arguments = case.inputs(jnp.float32)
    config = dataclasses.replace(CONFIG, splits=splits)
    options = {**arguments, "implementation": "triton", "config": config}
    cotangents = tolerances.cotangents_for(case, jnp.float32)
    first = tolerances.evaluate(arrays, cotangents, options)
    for _ in range(100 if ON_GPU else 1):
        again = tolerances.evaluate(arrays, cotangents, options)
        jax.tree.map(np.testing.assert_array_equal, first, again)


@deep
def test_a_rows_bits_do_not_depend_on_its_batch():
    """With division and blocks fixed; else they may follow the number of programs."""
    case = Case("batch", batch=(7,), t=1, s=64 * TIMES, n=4, k=2)
    arrays, _ = case.inputs(jnp.float32)
    config = dataclasses.replace(INTERPRETED, splits=3, interpret=not ON_GPU)

    def run(*arrays):
        return attention(*arrays, implementation="triton", config=config)

    together = run(*arrays)
    for i in range(7):
        alone = run(*(x[i : i + 1] for x in arrays))
        np.testing.assert_array_equal(together[i : i + 1], alone)


@pytest.mark.parametrize(
    ("parts", "has_sink"), [(130, True), *deeply((3, False), (3, True), (130, False))]
)
def test_many_parts_are_merged(parts, has_sink):
    """As `flash2.merge` does it at once; the kernel takes up to 64 parts in a turn."""
    rng = np.random.default_rng(parts)
    o = rng.standard_normal((parts, 2, 5, 24)).astype(np.float32)
    lse = 9 * rng.standard_normal((parts, 2, 5)).astype(np.float32)
    lse[parts // 2 :, 0, 1] = lse[:, 1, 3] = -np.inf  # a row lacks parts, another all
    o[lse == -np.inf] = np.nan
    sink = np.float32([0.5, 7.0]) if has_sink else None
    structs = [
        Named(jax.ShapeDtypeStruct(x.shape[1:], dtype), ("n", "t", "d")[: x.ndim - 1])
        for x, dtype in ((o, jnp.bfloat16), (lse, jnp.float32))
    ]
    with support.lowering_context():
        found = merged(
            Named(jnp.asarray(o), ("z", "n", "t", "d")),
            Named(jnp.asarray(lse), ("z", "n", "t")),
            None if sink is None else Named(jnp.asarray(sink), ("n",)),
            (structs[0], structs[1]),
            interpret=not ON_GPU,
        )
    joint = None if sink is None else sink[:, None]
    expected = flash2.merge(jnp.asarray(o), jnp.asarray(lse), joint)
    assert [x.dtype for x in found] == [jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(found[0], expected[0], atol=2**-7)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(1, 9),
)
def test_parts_of_a_range_are_the_range(a, b, c, d, count):
    whole = Range(*sorted((a, b, c, d)))
    seen: list[tuple[int, bool]] = []
    for index in range(count):
        part = whole.part(index, count)
        assert part.need_lo <= part.full_lo <= part.full_hi <= part.need_hi
        full = range(part.full_lo, part.full_hi)
        seen += [(i, i in full) for i in range(part.need_lo, part.need_hi)]
        assert abs(part.count - whole.count / count) < 1
    full = range(whole.full_lo, whole.full_hi)
    assert seen == [(i, i in full) for i in range(whole.need_lo, whole.need_hi)]


@pytest.mark.parametrize(
    ("programs", "elements", "blocks", "few", "expected"),
    [
        (2048, 8, 64, 0, {}),  # enough programs
        (128, 8, 128, 0, {"y": 8}),  # few key heads
        (128, 32, 32, 0, {"y": 16}),
        (512, 16, 1, 0, {}),  # a bias with enough tiles
        (4, 4096, 1, 0, {"y": 512}),  # and with few
        (128, 71, 32, 0, {"y": 9}),  # which no number divides
        (128, 1, 512, 2, {"z": 2}),  # decoding
        (128, 1, 512, 3, {"z": 3}),  # more programs of each multiprocessor
        (8, 1, 64, 2, {"z": 32}),  # as many as there are blocks for
        (8, 1, 3, 2, {}),
        (32, 1, 800, 0, {"z": 4}),  # few heads and few queries
    ],
)
def test_the_choice_follows_from_counts(
    monkeypatch, programs, elements, blocks, few, expected
):
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    found = division.parts(programs, elements, blocks, few_rows=few, splits=None)
    assert found == expected


@given(
    *(st.integers(1, 10**n) for n in (5, 4, 4)),
    st.integers(0, 3),
    st.none() | st.integers(1, 128),
)
def test_parts_are_bounded(programs, elements, blocks, few, longest):
    options = {"few_rows": few, "splits": None, "longest": longest}
    found = division.parts(programs, elements, blocks, **options)
    assert found.get("y", 1) <= elements and found.get("z", 1) <= blocks
    count = found.get("y", 1) * found.get("z", 1)
    assert not found or programs * count <= 16 * device.multiprocessors()


def test_parts_of_a_long_table_are_short(monkeypatch):
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)

    def parts(programs, **options):
        options |= {"few_rows": 2, "splits": None, "longest": 128}
        return division.parts(programs, 1, 512, **options)

    assert parts(512) == {"z": 4}
    # Four would leave 116 of 512 programs to a second turn of 396.
    assert parts(128) == {"z": 6}
    assert parts(128, at_once=4) == {"z": 4}
    assert parts(1056) == {"z": 2}  # as many as there is room for
    assert parts(4096) == {}


def test_few_programs_are_not_left_for_a_last_turn(monkeypatch):
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)

    def parts(programs, blocks=64, **options):
        options = {"few_rows": 2, "splits": None, "even_turns": True, **options}
        return division.parts(programs, 1, blocks, **options)

    assert parts(384) == parts(396) == {}  # one turn of 396
    assert parts(512) == {"z": 2}  # two and a half turns, not one and a third
    assert parts(420) == {"z": 3}
    assert parts(700) == parts(792) == {}
    assert parts(512, blocks=7) == {}  # too few blocks for two parts
    assert parts(512, even_turns=False) == {}
    assert parts(4096) == {}


def test_packed_rows_unpack():
    q = np.arange(2 * 3 * 6 * 4).reshape(2, 3, 6, 4)
    named = Named(jnp.asarray(q), ("b0", "t", "n", "h"))
    keys = Named(jnp.zeros((2, 9, 2, 4)), ("b0", "s", "k", "h"))
    spec = AttentionSpec(Score(1.0))
    packing = division.Packing.of(named, keys, spec)
    packed = packing.array(named)
    assert packed.axes == packing.struct(named).axes == ("b0", "n", "t", "h")
    for b, t, n in itertools.product(range(2), range(3), range(6)):
        row = packed.value[b, n // 3, t * 3 + n % 3]
        np.testing.assert_array_equal(row, q[b, t, n])
    np.testing.assert_array_equal(packing.unpacked(packed, named.axes), q)


def test_parts_are_float32():
    """Whatever the result is."""
    output = Named(jax.ShapeDtypeStruct((2, 8), jnp.bfloat16), ("t", "d"))
    assert division.partial(output, {}) is output
    part = division.partial(output, {"y": 3, "z": 5})
    assert (part.shape, part.dtype, part.axes[:2]) == (
        (3, 5, 2, 8),
        jnp.float32,
        ("y", "z"),
    )


def test_splits_that_do_not_fit():
    x = jnp.zeros((1, 40, 1, 8))
    with pytest.raises(ValueError, match=r"splits=4\) does not fit 40 keys.* 1 to 3"):
        attention(x, x, x, config=Config(splits=4))
    with pytest.raises(ValueError, match="splits must be at least 1, got 0"):
        Config(splits=0)
    with pytest.raises(TypeError, match=r"splits must be an int or None, got 2\.0"):
        Config(splits=2.0)


def _explained(t, s, n, k, **more):
    q, kv = (jax.ShapeDtypeStruct((1, *x, 64), jnp.float32) for x in ((t, n), (s, k)))
    config = dataclasses.replace(INTERPRETED, **more.pop("config", {}))
    return explain(q, kv, kv, implementation="triton", config=config, **more)


def test_explain_names_the_division():
    text = _explained(1, 4096, 8, 2, config={"splits": 4})
    assert (
        "        forward: 4 heads of a group as rows\n        forward: keys in 4 parts"
        in text
    )
    assert "    dkv: heads of a group in 4 parts" in text
    text = _explained(64, 64, 8, 1)
    assert "    dkv: heads of a group in 8 parts" in text
    text = _explained(64, 64, 2, 2, config={"splits": 1})
    assert "parts" not in text
    q = jax.ShapeDtypeStruct((9, 16, 1, 8), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 1, 16, 16), jnp.float32)
    text = explain(q, q, q, bias, implementation="triton", config=INTERPRETED)
    assert "    dbias: heads and batch entries in 9 parts" in text
