"""Lists of blocks in calls: every backend, blocks of any size, transforms, devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash2 import Blocks, Config, Context, attention, explain, make_block_mask
from pallas_kernels.core import visits
from tests import mosaic_interpreter, tolerances
from tests.cases import ON_GPU, by_name
from tests.divided import Divided
from tests.kernels.test_mods import ARRAYS, COTANGENT, B, N, S, T, array, dense
from tests.lowering import lower_for_gpu, on_gpu
from tests.mosaic import with_heads
from tests.tiers import MAINLY_XLA, deep, deeply

SMALL, TALL = Blocks(16, 16, 4, 1), Blocks(32, 16, 4, 1)
BACKENDS = {
    "xla": {
        "implementation": "xla",
        "config": Config(SMALL, SMALL),
        "precision": "highest",
    },
    "triton": {
        "implementation": "triton",
        "precision": "highest",
        "config": Config(TALL, SMALL, dq=SMALL, dbias=SMALL, interpret=not ON_GPU),
    },
}
# Documents in any order.
IDS = jnp.asarray(np.repeat(np.random.default_rng(1).permutation(9), 5), jnp.int32)
MASKS = {
    "window": lambda b, h, q, kv: (q >= kv) & ((q - kv < 9) | (kv < 3)),
    "dilated": lambda b, h, q, kv: (q // 16 - kv // 16) % 2 == 0,
    "documents": lambda b, h, q, kv: IDS[q] == IDS[kv],
    "heads": lambda b, h, q, kv: ((q // 16 - kv // 16) % (h + 1) == 0) & (kv != 7 * b),
    "nothing": lambda b, h, q, kv: (q // 16) % 2 == 2,
}


def results(call, bias, arrays=ARRAYS):
    """The output, and the gradients of query, key, value and bias."""

    @jax.jit
    def run(*arrays):
        out, pull = jax.vjp(call, *arrays)
        return out, *pull(COTANGENT.astype(out.dtype))

    return run(*arrays, bias)


def by_matrices(mask_mod, bias):
    def call(q, k, v, bias):
        add = lambda s, b, h, q, kv: s + bias[h, q, kv]  # noqa: E731
        return dense(q, k, v, add, mask_mod)

    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in (*ARRAYS, bias)]
        found = results(call, wide[3], wide[:3])
        return jax.tree.map(np.asarray, found)


def check(found, expected, tolerance=2e-5):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


# Blocks of lists: as the kernels' are, larger ones, and some that they do not divide.
@pytest.mark.parametrize(
    ("mask", "block"),
    [
        ("heads", 32),
        *deeply(("heads", 48), ("window", 16), ("window", 64)),
        *deeply(("documents", 48), ("nothing", 64)),
    ],
)
@pytest.mark.parametrize("backend", ["triton", *deeply("xla")])
def test_lists_that_are_given(mask, block, backend):
    block_mask = make_block_mask(MASKS[mask], B, N, T, S, block_size=block)
    bias = array(N, T, S)
    call = functools.partial(attention, block_mask=block_mask, **BACKENDS[backend])
    check(results(call, bias), by_matrices(MASKS[mask], bias))


@pytest.mark.parametrize("mask", ["window", *deeply("dilated", "heads", "nothing")])
@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_lists_that_a_call_makes(mask, backend):
    bias = array(N, T, S)
    call = functools.partial(attention, mask_mod=MASKS[mask], **BACKENDS[backend])
    check(results(call, bias), by_matrices(MASKS[mask], bias))


@pytest.mark.skipif(not mosaic_interpreter.IS_SUPPORTED, reason="JAX 0.12")
@pytest.mark.parametrize(
    ("mask", "block"),
    deeply(
        *(("dilated", 128), ("window", None), ("documents", 128), ("heads", None)),
        *(("shared", None), ("shared", 128)),
    ),
)
def test_mosaic_gpu_kernels(mask, block, any_size, monkeypatch):
    """Both passes, beside the loops; block None makes lists in the call."""
    mosaic_interpreter.install(monkeypatch)
    rows = 300
    if mask == "shared":  # two of the blocks of keys, with three programs each
        monkeypatch.setattr(visits, "MANY_VISITS", 1)
        visits._known.cache_clear()
        rows = 1100
    case = dataclasses.replace(by_name("plain"), t=rows, s=rows, n=2, k=1)
    case = with_heads(case, 64)
    arrays, arguments = case.inputs(jnp.bfloat16)
    mask_mod = {
        "window": lambda b, h, q, kv: (q >= kv) & ((q - kv < 40) | (kv < 3)),
        "dilated": lambda b, h, q, kv: (q // 128 - kv // 128) % 2 == 0,
        "documents": lambda b, h, q, kv: IDS[q // 10] == IDS[kv // 10],
        "heads": lambda b, h, q, kv: (q // 128 - kv // 128) % (h + 2) == 0,
        "nothing": lambda b, h, q, kv: (q // 16) % 2 == 2,
        "shared": lambda b, h, q, kv: (q >= kv) & ((q - kv < 40) | (kv < 200)),
    }[mask]
    arguments["mask_mod"] = mask_mod
    if block is not None:
        del arguments["mask_mod"]
        sizes = case.n if mask == "heads" else None, case.t, case.s
        block_mask = make_block_mask(mask_mod, None, *sizes, block_size=block)
        arguments["block_mask"] = block_mask
    do, dlse = tolerances.cotangents_for(case, jnp.bfloat16)
    found = mosaic_interpreter.evaluate(arrays, (do, dlse), arguments)

    def loops(q, k, v):
        more = {"implementation": "xla", "return_residual": True}
        return attention(q, k, v, **arguments, **more)

    (out, _), pull = jax.vjp(loops, *arrays)
    names = "out", "query", "key", "value"
    expected = dict(zip(names, (out, *pull((do, dlse))), strict=True))
    assert {*expected} <= {*found}
    for name, x in expected.items():
        x = np.asarray(x, float)
        error = np.max(np.abs(found[name].reshape(x.shape) - x))
        assert error <= 0.02 * np.max(np.abs(x)), name


VISITED = {
    "strided": (lambda b, h, q, kv: (q >= kv) & ((q - kv) % 64 == 0), 144, 144),
    "both ways": (lambda b, h, q, kv: abs(q - kv) % 64 == 0, 256, 256),
    "strided blocks": (
        lambda b, h, q, kv: (q >= kv) & ((q // 32 - kv // 32) % 4 == 0),
        *(144, 32),
    ),
    "columns": (
        lambda b, h, q, kv: (q >= kv) & ((q - kv < 32) | (kv % 128 >= 112)),
        *(135, 59),
    ),
    "prefix": (lambda b, h, q, kv: (kv < 100) | (q >= kv), 549, 32),
}


@pytest.mark.parametrize("mask", VISITED)
def test_no_block_more_than_has_pairs(mask):
    """Of a mask's text, blocks are seen to be empty, and to be full."""
    mask_mod, visited, masked = VISITED[mask]
    place = np.arange(512)
    kept = np.asarray(mask_mod(0, 0, place[:, None], place))
    count = kept.reshape(32, 16, 32, 16).sum((1, 3))
    assert (np.sum(count > 0), np.sum((count > 0) & (count < 256))) == (visited, masked)
    made = make_block_mask(mask_mod, None, None, 512, 512, block_size=16)
    assert f"({visited} of 1024 blocks of 16 x 16 are visited, {masked} of" in str(made)


@deep
def test_beside_other_masks():
    """The lists of a call are then of what all keep; full blocks are not for one."""
    ids = jnp.asarray(np.arange(B * T).reshape(B, T) // 17, jnp.int32)
    own = {"local_window_size": (30, 3), "query_segment_ids": ids}
    own["key_value_segment_ids"] = jnp.pad(ids, ((0, 0), (0, S - T)), mode="edge")
    block_mask = make_block_mask(MASKS["dilated"], None, None, T, S, block_size=16)
    expected = attention(*ARRAYS, mask_mod=MASKS["dilated"], **own, **WHOLE)
    for options in BACKENDS.values():
        found = attention(*ARRAYS, block_mask=block_mask, **own, **options)
        check([found], [expected])


WHOLE = {"implementation": "reference", "precision": "highest"}


@deep
@pytest.mark.parametrize("backend", BACKENDS)
def test_constants_that_are_no_integers(backend):
    """NaN and infinities, which have no sign, or no largest integer."""
    functions = (
        lambda b, h, q, kv: q * jnp.nan != kv,
        lambda b, h, q, kv: q <= jnp.where(kv > 4, jnp.inf, 1.0),
        lambda b, h, q, kv: (kv // 16 * 1.0 + jnp.inf > q * 1.0) & (kv % 32 < 16),
        lambda b, h, q, kv: jnp.minimum(q * 1.0, -jnp.inf) < kv // 16 % 2,
    )
    for mask_mod in functions:
        expected = attention(*ARRAYS, mask_mod=mask_mod, **WHOLE)
        found = attention(*ARRAYS, mask_mod=mask_mod, **BACKENDS[backend])
        check([found], [expected])


@pytest.mark.parametrize("given", [False, *deeply(True)])
def test_heads_of_a_group_as_rows(given):
    """Few queries: blocks of rows then hold queries of several heads."""
    q, k, v = array(1, 20, 4, 16), array(1, 64, 2, 16), array(1, 64, 2, 16)
    mask_mod = lambda b, h, q, kv: (q // 16 + kv // 16 + h) % 3 == 0  # noqa: E731
    masks = {"mask_mod": mask_mod}
    if given:
        made = make_block_mask(mask_mod, 1, 4, 20, 64, block_size=16)
        masks = {"block_mask": made}
    expected = attention(q, k, v, mask_mod=mask_mod, **WHOLE)
    check([attention(q, k, v, **masks, **BACKENDS["triton"])], [expected])


def test_masks_of_all_kinds():
    """As arguments of the block mask; with an offset, which the call takes from it."""
    rng = np.random.default_rng(2)
    static = {"is_causal": True, "local_window_size": 30}
    data = {
        "mask": jnp.asarray(rng.random((B, 1, T, S)) < 0.6),
        "key_value_seq_lengths": jnp.array([40, 31], jnp.int32),
        "query_offset": jnp.array([3, 11], jnp.int32),
    }
    mask_mod = MASKS["window"]
    make = functools.partial(make_block_mask, mask_mod, B, None, T, S, block_size=16)
    made = jax.jit(lambda data: make(**static, **data))(data)
    expected = attention(*ARRAYS, mask_mod=mask_mod, **static, **data, **WHOLE)
    for options in BACKENDS.values():
        check([attention(*ARRAYS, block_mask=made, **options)], [expected])


def test_maps_and_loops():
    """Under `vmap` of what it is made of; stacked, in a `scan` over layers."""
    ids = jnp.stack([IDS, IDS[::-1]])

    def made(ids):
        return make_block_mask(
            lambda b, h, q, kv: ids[q] == ids[kv], None, None, T, S, block_size=16
        )

    def call(block_mask, x):
        return attention(x, *ARRAYS[1:], block_mask=block_mask, **BACKENDS["xla"])

    masks = jax.vmap(made)(ids)
    mapped = jax.vmap(call, (0, None))(masks, ARRAYS[0])
    _, layers = jax.lax.scan(lambda x, m: (x, call(m, x)), ARRAYS[0], masks)
    expected = [
        attention(*ARRAYS, query_segment_ids=x, key_value_segment_ids=y, **WHOLE)
        for x, y in ((jnp.stack([i[:T]] * B), jnp.stack([i] * B)) for i in ids)
    ]
    check(mapped, expected)
    check(layers, expected)


@pytest.mark.parametrize(
    "method", ["ring", *deeply("gather", "heads", "halo", "gathered stripes")]
)
def test_rows_on_several_devices(method):
    """Each device has its part of the lists, of rows that no block divides, too."""
    if method == "halo" and jax.device_count() < 2:
        pytest.skip("2 devices")  # `vmap` takes no permutation that leaves one out
    arrays = [jnp.tile(x[:1, :32], (1, 1, N // x.shape[2], 1)) for x in ARRAYS]
    ids = IDS[:32]
    block_mask = make_block_mask(
        lambda b, h, q, kv: (ids[q] == ids[kv]) | ((q // 16 - kv // 16) % (h + 1) == 1),
        *(1, N, 32, 32),
        block_size=(16, 48),
        local_window_size=7 if method == "halo" else None,
    )
    expected = jax.jit(functools.partial(attention, block_mask=block_mask, **WHOLE))
    name, stripe = ("gather", 8) if "stripes" in method else (method, None)
    divided = Divided(Context("x", stripe, name), (2,))
    call = jax.jit(functools.partial(divided, block_mask=block_mask, **BACKENDS["xla"]))
    check([call(*arrays)], [expected(*arrays)])


@pytest.mark.parametrize(
    "kind, spec",
    [
        pytest.param(AxisType.Explicit, P(None, "x", "y"), id="rows"),
        pytest.param(AxisType.Explicit, P("x", None, "y"), id="explicit", marks=deep),
        pytest.param(AxisType.Auto, P("x", None, "y"), id="automatic", marks=deep),
    ],
)
def test_meshes(kind, spec):
    """Batch and heads divided, or rows: what has no such axis is on each device."""
    if jax.device_count() < 4:
        pytest.skip("4 devices")
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    q, k, v = (jnp.tile(x[:, :32], (1, 1, N // x.shape[2], 1)) for x in ARRAYS)
    kept = jnp.asarray(np.random.default_rng(3).random((B, 32)) < 0.8)
    mask_mod = lambda b, h, q, kv: (  # noqa: E731
        ((q // 16 - kv // 16) % (h + 1) == 0) & kept[b, kv]
    )
    made = make_block_mask(mask_mod, B, N, 32, 32, block_size=16)
    expected = attention(q, k, v, mask_mod=mask_mod, **WHOLE)
    with jax.set_mesh(mesh):
        arrays = (jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v))
        call = functools.partial(attention, block_mask=made, **BACKENDS["xla"])
        found = jax.jit(call)(*arrays)
    check([np.asarray(found)], [expected])


@deep
def test_lists_are_operands_of_the_kernels():
    """No call makes those that are given, or known while it is traced."""
    x = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16)

    def window_of(width):
        return lambda b, h, q, kv: (q >= kv) & ((q - kv < width) | (kv < 9))

    window, of_data = window_of(99), window_of(jnp.int32(99))

    def sorts(backend, **masks):
        def loss(q):
            out = attention(q, q, q, implementation=backend, **masks)
            return out.astype(jnp.float32).sum()

        return lower_for_gpu(jax.grad(loss), x).count("stablehlo.sort")

    given = make_block_mask(window, None, None, 1024, 1024)
    for backend in ("triton", "mosaic_gpu"):
        assert sorts(backend, block_mask=given) == 0
        assert sorts(backend, mask_mod=window) == 0
        assert sorts(backend, mask_mod=of_data) > 0
    assert sorts("triton", mask_mod=lambda b, h, q, kv: q >= kv) == 0  # ranges do
    with on_gpu():
        text = explain(x, x, x, block_mask=given)
        by_intervals = explain(x, x, x, mask_mod=window)
    counts = "21 of 64 blocks of 128 x 128 are visited, 21 of them with the mask"
    assert f"block_mask: {counts}" in text
    assert f"mask_mod, by intervals: {counts}" in by_intervals


def test_making_takes_little_memory():
    """Of 131,072 rows; no array has an element for each pair."""
    t = 131_072
    ids = jax.ShapeDtypeStruct((t,), jnp.int32)

    def made(ids):
        return make_block_mask(
            lambda b, h, q, kv: (ids[q] == ids[kv]) | (kv < 64), None, None, t, t
        )

    analysis = jax.jit(made).lower(ids).compile().memory_analysis()
    assert analysis.temp_size_in_bytes + analysis.output_size_in_bytes < 64 << 20


WRONG = {
    "blocks": ({"block_size": 100}, ValueError, "block_size must be a multiple of 16"),
    "rows": ({"queries": 0}, ValueError, "queries must be at least 1, got 0"),
    "kind": ({"keys": 4.0}, TypeError, "keys must be an int, got float"),
    "nothing": ({"mask_mod": None}, ValueError, "requires a mask: pass mask_mod"),
    "heads": (
        {"mask_mod": lambda b, h, q, kv: kv <= h},
        ValueError,
        "mask_mod asks for h, and make_block_mask got heads=None",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_of_making(name):
    wrong, error, text = WRONG[name]
    given = {"mask_mod": MASKS["window"], "batch": None, "heads": None}
    with pytest.raises(error, match=text):
        make_block_mask(**{**given, "queries": T, "keys": S, **wrong})


def test_errors_of_calls():
    made = make_block_mask(MASKS["window"], None, None, T, S)
    for given, error, text in (
        ({"block_mask": MASKS["window"]}, TypeError, "must be what .* returns"),
        ({"block_mask": made, "query_offset": 1}, ValueError, "which has its own"),
        (
            {"block_mask": make_block_mask(MASKS["window"], None, None, T, T)},
            ValueError,
            f"made for {T} queries and {T} keys, and the call has {T} and {S}",
        ),
        (
            {"block_mask": make_block_mask(MASKS["heads"], B, N + 1, T, S)},
            ValueError,
            f"made for {N + 1} heads, and query has",
        ),
        (
            {"block_mask": make_block_mask(MASKS["heads"], B + 1, N, T, S)},
            ValueError,
            f"made for {B + 1} batch entries",
        ),
    ):
        with pytest.raises(error, match=text):
            attention(*ARRAYS, **given)


@pytest.mark.parametrize("length", [320, *deeply(576, 1088)])
def test_last_blocks_with_few_rows(length):
    """By default: on Hopper ptxas up to 13.3 had lost some (benchmarks/lab/145)."""
    keys = jax.random.split(jax.random.key(0), 3)
    shape = 1, length, 2, 64
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    prefix = jnp.array([length // 4], jnp.int32)

    def results(arrays, **options):
        def call(*x):
            return attention(*x, mask_mod=mask, **options)

        out, pull = jax.vjp(call, *arrays)
        return out, *pull(out)

    def mask(b, h, q, kv):
        return (kv < prefix[b]) | (q >= kv)

    found = jax.jit(results)(arrays)
    wide = [x.astype(jnp.float32) for x in arrays]
    exact = results(wide, implementation="reference", precision="highest")
    for a, b in zip(found, exact, strict=True):
        assert jnp.max(jnp.abs(a - b)) <= 0.02 * jnp.max(jnp.abs(b))
