"""`score_mod` and `mask_mod`: functions of one pair, on every backend."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, Context, attention, explain
from tests import tolerances
from tests.cases import ON_GPU, by_name
from tests.divided import Divided
from tests.lowering import lower_for_gpu, on_gpu
from tests.tiers import deep, deeply

B, T, S, N, K, H = 2, 40, 45, 4, 2, 16
SMALL = Blocks(16, 16, 4, 1)
BACKENDS = {
    "xla": {"implementation": "xla"},
    "blocks": {"implementation": "xla", "config": Config(SMALL, SMALL)},
    "triton": {
        "implementation": "triton",
        "config": Config(SMALL, SMALL, dq=SMALL, dbias=SMALL, interpret=not ON_GPU),
    },
    "reference": {"implementation": "reference"},
}
RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


ARRAYS = array(B, T, N, H), array(B, S, K, H), array(B, S, K, H)
COTANGENT = array(B, T, N, H)
IDS = jnp.asarray(np.cumsum(RNG.random((B, S)) < 0.1, axis=1), jnp.int32)
TIMES = jnp.asarray(np.sort(RNG.integers(0, 30, (B, S)), axis=1), jnp.int32)
KEYS, ROWS, PAIRS, TABLE, GAIN, WINDOW = (
    array(*shape) for shape in ((B, S), (N, T), (T, S), (N, 8), (N,), (165, N))
)
PREFIX = jnp.asarray([13, 30], jnp.int32)
SPANS = jnp.where(jnp.arange(S) % 15 < 9, jnp.arange(S) // 15 + IDS, -1)


def above(places: int) -> jax.Array:
    """[ancestor or itself] of each node of a random tree, whose root is 0."""
    found = np.eye(places, dtype=bool)
    for i in range(1, places):
        found[i] |= found[RNG.integers(max(0, i - 9), i)]
    return jnp.asarray(found)


ABOVE = above(S)


def near(q, kv):
    """The place of two pixels of an image of 6 rows of 8."""
    return (q // 8 - kv // 8 + 5) * 15 + q % 8 - kv % 8 + 7


def bucket(distance):
    return jnp.clip(abs(distance) // 4, 0, 7)


# Functions of captured arrays that give a score_mod; the arrays.
SCORES = {
    "soft_cap": (lambda: lambda s, b, h, q, kv: 5 * jnp.tanh(s / 5), ()),
    "distance": (lambda: lambda s, b, h, q, kv: s - (h + 1) * abs(q - kv) / 9, ()),
    "of_keys": (lambda x: lambda s, b, h, q, kv: s + x[b, kv], (KEYS,)),
    "of_rows": (lambda x: lambda s, b, h, q, kv: s * x[h, q], (ROWS,)),
    "of_pairs": (lambda x: lambda s, b, h, q, kv: s + x[q, kv], (PAIRS,)),
    "scalar": (lambda x: lambda s, b, h, q, kv: jnp.sinh(s * x), (jnp.float32(0.3),)),
    "masking": (
        lambda x: lambda s, b, h, q, kv: jnp.where(q >= kv, s * x[h], -jnp.inf),
        (GAIN,),
    ),
    "table": (lambda x: lambda s, b, h, q, kv: s + x[h, bucket(q - kv)], (TABLE,)),
    "swin": (lambda x: lambda s, b, h, q, kv: s + x[near(q, kv), h], (WINDOW,)),
    "computed": (
        lambda x, y: (
            lambda s, b, h, q, kv: jnp.where(
                kv % 3 == 0, s * x[h], jax.nn.silu(s) + y[h, kv // 2]
            )
        ),
        (GAIN, ROWS),
    ),
}
ROW_READS = ("of_rows", "of_pairs")
MASKS = {
    "none": None,
    "documents": lambda b, h, q, kv: (IDS[b, q] == IDS[b, kv]) & (q >= kv),
    "times": lambda b, h, q, kv: (TIMES[b, q] >= TIMES[b, kv]) & (q - kv < 30),
    "neighbours": lambda b, h, q, kv: (
        (abs(q // 8 - kv // 8) <= 1) & (abs(q % 8 - kv % 8) <= 2)
    ),
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv <= 6) | (kv < 3),
    "of_floats": lambda b, h, q, kv: (PAIRS[q, kv] > -0.5) | (h == 1),
    # A prefix that all see; spans seen both ways, as of images; branches of a tree.
    "prefix": lambda b, h, q, kv: (kv < PREFIX[b]) | (q >= kv),
    "spans": lambda b, h, q, kv: (
        (q >= kv) | ((SPANS[b, q] == SPANS[b, kv]) & (SPANS[b, q] >= 0))
    ),
    "tree": lambda b, h, q, kv: ABOVE[q, kv],
    "strided": lambda b, h, q, kv: (q >= kv) & ((q - kv) % 4 == 0),
    "dilated": lambda b, h, q, kv: (abs(q - kv) <= 12) & (abs(q - kv) % (h + 2) == 0),
}


def dense(q, k, v, score_mod=None, mask_mod=None, offset=0):
    """Attention by whole matrices, in the dtype of its arguments."""
    product = functools.partial(jnp.einsum, precision="highest")
    scores = product("btnh,bsnh->bnts", q, jnp.repeat(k, N // K, 2)) / np.sqrt(H)
    b, h, rows, keys = jnp.indices(scores.shape, dtype=jnp.int32)
    places = b, h, rows + offset, keys
    if score_mod is not None:
        scores = jnp.vectorize(score_mod)(scores, *places)
    if mask_mod is not None:
        kept = jnp.vectorize(mask_mod)(*places)
        scores = jnp.where(kept, scores, -jnp.inf)
    has_keys = jnp.any(scores > -jnp.inf, axis=-1, keepdims=True)
    p = jax.nn.softmax(jnp.where(has_keys, scores, 0.0))
    p = jnp.where(has_keys, p, 0.0)
    return product("bnts,bsnh->btnh", p, jnp.repeat(v, N // K, 2))


def results(call, make, mask, arrays, captured):
    """The output and the gradients of arrays and of what the function captures."""

    def run(q, k, v, *captured):
        score_mod = make(*captured) if make else None
        return call(q, k, v, score_mod=score_mod, mask_mod=mask)

    out, pull = jax.vjp(run, *arrays, *captured)
    return out, *pull(COTANGENT.astype(out.dtype))


def exact(make, mask, captured, offset=0):
    """In float64."""
    with jax.enable_x64(True):
        arrays, captured = jax.tree.map(
            lambda x: x.astype(jnp.float64), (ARRAYS, captured)
        )
        call = functools.partial(dense, offset=offset)
        run = jax.jit(functools.partial(results, call, make, mask))
        return jax.tree.map(np.asarray, run(arrays, captured))


def check(found, expected, bound=3e-6):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert np.max(np.abs(a - b)) <= bound * (np.max(np.abs(b)) + 1e-3)


FEW = [("computed", "times"), ("table", "window"), ("of_rows", "neighbours")]
FIRST = {*zip(("xla", "blocks", "triton"), FEW, strict=True)}
FIRST |= {("blocks", (None, "spans")), ("blocks", (None, "tree"))}
MANY = [
    *((name, "none") for name in SCORES),
    *((None, mask) for mask in MASKS if mask != "none"),
]


def _dense_cases():
    """Each function in loops and in kernels; a few of each in the first tier."""
    for backend, pair in itertools.product(BACKENDS, (*FEW, *MANY)):
        if pair in MANY and backend in ("xla", "reference"):
            continue
        marks = [] if (backend, pair) in FIRST else deep
        yield pytest.param(backend, *pair, marks=marks)


@pytest.mark.parametrize(("backend", "score", "mask"), list(_dense_cases()))
def test_dense_attention(backend, score, mask):
    make, captured = SCORES[score] if score else (None, ())
    options = {**BACKENDS[backend], "precision": "highest"}
    call = functools.partial(attention, **options)
    run = jax.jit(functools.partial(results, call, make, MASKS[mask]))
    check(run(ARRAYS, captured), exact(make, MASKS[mask], captured))


@pytest.mark.parametrize("backend", ["blocks", *deeply("xla", "triton")])
def test_beside_segments(backend):
    """Built-in ids, a score_mod and a mask_mod of one call."""
    make, captured = SCORES["table"]
    own = {"query_segment_ids": IDS[:, :T], "key_value_segment_ids": IDS}
    options = {**BACKENDS[backend], "precision": "highest", **own}
    call, mask = functools.partial(attention, **options), MASKS["window"]
    run = jax.jit(functools.partial(results, call, make, mask))

    def all_masks(b, h, q, kv):
        return (IDS[b, q] == IDS[b, kv]) & mask(b, h, q, kv)

    check(run(ARRAYS, captured), exact(make, all_masks, captured))


@pytest.mark.parametrize(
    ("score", "offset"),
    [("of_rows", 5), *deeply(("of_keys", -7), ("of_pairs", -7), ("table", 5))],
)
def test_positions_begin_at_the_offset(score, offset):
    """What a position indexes is clamped, at both ends."""
    make, captured = SCORES[score]
    mask = MASKS["window"]
    options = {**BACKENDS["blocks"], "precision": "highest", "query_offset": offset}
    run = functools.partial(attention, **options)
    found = jax.jit(functools.partial(results, run, make, mask))(ARRAYS, captured)
    at = np.clip(np.arange(T) + offset, 0, T - 1)

    def shifted(x):
        """The same of the rows that are read, for rows from 0 on."""
        of_rows = {"of_rows": x[:, at], "of_pairs": x[at]} if score in ROW_READS else {}
        mod = make(of_rows.get(score, x))
        start = offset if score in ROW_READS else 0
        return lambda s, b, h, q, kv: mod(s, b, h, q - start, kv)

    check(found, exact(shifted, mask, captured, offset))


def test_indices_that_are_read_beforehand_begin_at_the_offset():
    """Those of a mask, computed without keys."""
    limit = jnp.asarray(RNG.integers(1, S, 40), jnp.int32)
    mask = {"mask_mod": lambda b, h, q, kv: kv < limit[q // 2]}
    options = {**BACKENDS["blocks"], "precision": "highest"}
    found = attention(*ARRAYS, **mask, **options, query_offset=9)
    check([found], [dense(*ARRAYS, **mask, offset=9)], 1e-5)


@deep
def test_an_offset_for_each_entry():
    make, captured = SCORES["table"]
    options = {**BACKENDS["blocks"], "query_offset": jnp.array([3, 11])}
    call = functools.partial(attention, **options, precision="highest")
    found = call(*ARRAYS, score_mod=make(*captured))
    for entry, offset in enumerate([3, 11]):
        (expected, *_) = exact(make, None, captured, offset)
        check([found[entry]], [expected[entry]])


BUILT_IN = {
    "causal": ({"is_causal": True}, {"mask_mod": lambda b, h, q, kv: q >= kv}),
    "window": (
        {"local_window_size": (7, 3)},
        {"mask_mod": lambda b, h, q, kv: (q - kv <= 7) & (kv - q <= 3)},
    ),
    "documents": (
        {"query_segment_ids": IDS[:, :T], "key_value_segment_ids": IDS},
        {"mask_mod": lambda b, h, q, kv: IDS[b, q] == IDS[b, kv]},
    ),
    "soft_cap": (
        {"logits_soft_cap": 5.0},
        {"score_mod": lambda s, b, h, q, kv: 5 * jnp.tanh(s / 5)},
    ),
    "alibi": (
        {"alibi_slopes": GAIN},
        {"score_mod": lambda s, b, h, q, kv: s - GAIN[h] * abs(q - kv)},
    ),
    "bias": (
        {"bias": PAIRS},
        {"score_mod": lambda s, b, h, q, kv: s + PAIRS[q, kv]},
    ),
}


@pytest.mark.parametrize(
    "name", ["documents", "alibi", *deeply("causal", "window", "soft_cap", "bias")]
)
def test_what_is_built_in_is_the_same(name):
    """Beside dropout, lengths and a sink."""
    built_in, as_function = BUILT_IN[name]
    more = {
        **BACKENDS["blocks"],
        "precision": "highest",
        "dropout_rate": 0.3,
        "dropout_rng": jax.random.key(0),
        "key_value_seq_lengths": jnp.array([31, 45]),
        "sinks": GAIN,
    }
    expected, found = (
        attention(*ARRAYS, **more, **options) for options in (built_in, as_function)
    )
    check([found], [expected], 1e-6)


@pytest.mark.parametrize(
    ("backend", "mask"),
    [("xla", "documents"), *deeply(("triton", "documents"), ("xla", "neighbours"))],
)
def test_error_rule_of_masks(backend, mask):
    """In bfloat16, as of the mask of all pairs."""
    case = by_name("plain")
    arrays, arguments = case.inputs(jnp.bfloat16)
    b, h, q, kv = np.indices((*case.batch, case.n, case.t, case.s), dtype=np.int32)
    ids = jnp.arange(case.s, dtype=jnp.int32) ** 2 // 90

    def mask_mod(b, h, q, kv):
        return MASKS[mask](b, h, q, kv) if mask != "documents" else ids[q] == ids[kv]

    kept = np.asarray(jnp.vectorize(mask_mod)(b, h, q, kv))
    cotangents = tolerances.cotangents_for(case, jnp.bfloat16)
    known = arrays, cotangents, {**arguments, "mask": kept}
    found = tolerances.evaluate(
        arrays, cotangents, {**arguments, "mask_mod": mask_mod, **BACKENDS[backend]}
    )
    unit = tolerances.unit_roundoff(jnp.bfloat16)
    tolerances.check(found, tolerances.exact(*known), tolerances.plain(*known), unit)


@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_kernels_lower_or_decline_by_name(backend):
    x = jax.ShapeDtypeStruct((1, 512, N, 128), jnp.bfloat16)
    ids = jnp.zeros((1, 512), jnp.int32)

    def loss(q, gain, table):
        out = attention(
            *(q, q, q),
            score_mod=lambda s, b, h, q, kv: (
                5 * jnp.tanh(s / 5) * gain[h] + table[h, bucket(q - kv)]
            ),
            mask_mod=lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv),
            implementation=backend,
        )
        return out.astype(jnp.float32).sum()

    text = lower_for_gpu(jax.grad(loss, (0, 1, 2)), x, GAIN, TABLE)
    kernels = {"triton": "xla.gpu.triton", "mosaic_gpu": "mosaic_gpu_v2"}
    assert kernels[backend] in text
    with on_gpu():
        make, captured = SCORES["table"]
        table = explain(x, x, x, score_mod=make(*captured))
        long = jax.ShapeDtypeStruct((1, 4096, N, 128), jnp.bfloat16)
        rows = explain(long, long, long, score_mod=make(*captured))
        make, captured = SCORES["swin"]
        pairs = explain(x, x, x, score_mod=make(*captured))
        erf = explain(x, x, x, score_mod=lambda s, *_: jax.scipy.special.erf(s))
    assert not table.startswith("implementation: xla")
    assert "an array of all distances q - kv, made before the kernels, along n" in table
    assert "gradients of score_mod 0: triton" in table
    assert "gradients of score_mod 0: mosaic_gpu" in rows
    assert "a table of 165 along n; its derivative" in pairs
    assert not pairs.startswith("implementation: xla")
    assert "gradients of score_mod 0: xla (not triton: a table is read" in pairs
    assert re.search(rf"{backend}: its kernels lack [a-z0-9 ,]*\berf\b", erf)


def test_equal_functions_share_one_trace():
    """A fresh closure is no new program; another number is one."""

    def program(factor, x):
        def run(q, k, v, x):
            return attention(
                q, k, v, score_mod=lambda s, b, h, q, kv: s * factor + x[h]
            )

        return str(jax.make_jaxpr(run)(*ARRAYS, x))

    one, same = program(2.0, GAIN), program(2.0, GAIN + 1)
    assert one == same
    assert one != program(3.0, GAIN)


def test_maps_and_derivatives():
    """`vmap` of captures alone, forward mode, and reverse over forward."""
    q, k, v = (x[:, :12] for x in ARRAYS)

    def run(q, x):
        return attention(
            *(q, k, v),
            score_mod=lambda s, b, h, q, kv: jnp.sin(s * x[h]) + x[kv % 4],
            mask_mod=lambda b, h, q, kv: q >= kv,
            implementation="xla",
            precision="highest",
        )

    @jax.jit
    def by_matrices(q, x):
        def score_mod(s, b, h, q, kv):
            return jnp.sin(s * x[h]) + x[kv % 4]

        return dense(q, k, v, score_mod, lambda b, h, q, kv: q >= kv)

    many = jnp.stack([GAIN, 2 * GAIN])
    mapped = jax.jit(jax.vmap(run, (None, 0)))(q, many)
    check(mapped, [by_matrices(q, x) for x in many], 1e-5)
    for differentiate in (
        lambda f: jax.jvp(f, (q, GAIN), (q, GAIN))[1],
        lambda f: jax.grad(lambda x: jnp.sum(jnp.cos(f(q, x))))(GAIN),
        lambda f: jax.jvp(
            jax.grad(lambda x: jnp.sum(jnp.cos(f(q, x)))), (GAIN,), (GAIN,)
        )[1],
    ):
        found, expected = (
            jax.jit(functools.partial(differentiate, f)) for f in (run, by_matrices)
        )
        check([found()], [expected()], 2e-5)


@pytest.mark.parametrize("backend", ["blocks", *deeply("reference", "triton")])
def test_nan_outside_of_a_mask_stays_there(backend):
    """Of the function, and of its derivative, beyond the rows, too."""

    def call(x, *, safe):
        def score_mod(s, b, h, q, kv):
            inside = jnp.log(38.0 - q) * jnp.sqrt(43.0 - kv) * x[h]
            return s + (
                jnp.where((q < 38) & (kv < 43), inside, 0.0) if safe else inside
            )

        return attention(
            *ARRAYS,
            score_mod=score_mod,
            mask_mod=lambda b, h, q, kv: (q < 38) & (kv < 43),
            **BACKENDS[backend],
        )

    with jax.debug_nans(False):
        pairs = [
            jax.value_and_grad(lambda x, safe=safe: jnp.sum(call(x, safe=safe) ** 2))(
                GAIN
            )
            for safe in (True, False)
        ]
    check(pairs[1], pairs[0], 2e-5)


@pytest.mark.parametrize("method", ["ring", *deeply("gather", "heads")])
def test_rows_on_several_devices(method):
    """Positions and captured arrays are those of all rows."""
    arrays = [jnp.tile(x[:1, :32], (1, 1, N // x.shape[2], 1)) for x in ARRAYS]
    table = SCORES["table"][0](TABLE)
    options = {
        "score_mod": lambda s, *at: table(s, *at) + KEYS[at[0], at[3]],
        "mask_mod": MASKS["times"],
        "implementation": "xla",
        "precision": "highest",
    }
    found, expected = (
        jax.jit(functools.partial(call, **options))
        for call in (Divided(Context("x", 8, method), (2,)), attention)
    )
    check([found(*arrays)], [expected(*arrays)])
