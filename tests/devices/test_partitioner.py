"""Programs that XLA divides: found again in caches, lowered once, divided by GSPMD."""

import functools
import gc
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash2 import Context, _partitioner, attention
from tests.cases import BACKENDS
from tests.lowering import lower_for_gpu
from tests.settings import configured
from tests.tiers import MAINLY_XLA, deeply

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="one device")

DEVICES = 2 * (jax.device_count() // 2)


BY_HEADS = P("data", None, "model")


def operands(heads=4, kv_heads=2, spec=BY_HEADS):
    """Batch over two devices, heads over the others if there are four."""
    model = 2 if DEVICES >= 4 else 1
    devices = np.array(jax.devices()[: 2 * model]).reshape(2, model)
    kinds = (AxisType.Auto,) * 2
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=kinds)
    rng, sharding = np.random.default_rng(0), NamedSharding(mesh, spec)
    arrays = [
        np.float32(rng.standard_normal((2, 24, n, 8)))
        for n in (heads, kv_heads, kv_heads)
    ]
    return [jax.device_put(x, sharding) for x in arrays]


def with_gradients(**options):
    def run(q, k, v):
        out, vjp = jax.vjp(functools.partial(attention, **options), q, k, v)
        return out, *vjp(jnp.cos(out))

    return run


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def on_one(run, *arrays):
    return jax.jit(run)(*map(np.asarray, arrays))


@pytest.fixture
def cache(tmp_path):
    """A persistent compilation cache; gives the number of its programs."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with configured(settings):
        yield lambda: sum(name.endswith("-cache") for name in os.listdir(tmp_path))


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_a_program_is_found_again(cache, backend):
    """As a new process finds it: nothing in its key is of this one."""
    arrays = operands()
    run = with_gradients(is_causal=True, **BACKENDS[backend])
    counts = []
    for _ in range(2):
        jax.clear_caches()
        found = jax.jit(lambda *x: run(*x))(*arrays)
        counts.append(cache())
    assert counts[0] == counts[1] > 0
    assert_same(found, on_one(run, *arrays))


VARIANTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    "cap": {"logits_soft_cap": 2.0},
    "window": {"local_window_size": (3, 2)},
    "dropout": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
}


@pytest.mark.skipif(DEVICES < 6, reason="needs meshes of several sizes")
def test_programs_of_other_meshes_are_others(cache):
    """In one process: of other sizes, devices and shapes, and none gathers."""
    x = np.ones((6, 8, 6, 8), np.float32)
    call = jax.jit(lambda x: attention(x, x, x, is_causal=True))
    expected = np.asarray(call(x))
    meshes = [(0, (6,)), (0, (2,)), (2, (2,)), (1, (3,)), (0, (2, 3)), (0, (3, 2))]
    for first, shape in meshes:
        devices = np.array(jax.devices()[first : first + math.prod(shape)])
        kinds = (AxisType.Auto,) * len(shape)
        mesh = jax.sharding.Mesh(
            devices.reshape(shape), ("x", "y")[: len(shape)], kinds
        )
        spec = P("x", None, "y") if len(shape) > 1 else P("x")
        divided = jax.device_put(x, NamedSharding(mesh, spec))
        compiled = call.lower(divided).compile()
        np.testing.assert_allclose(compiled(divided), expected, atol=1e-6)
        assert "all-gather" not in compiled.as_text()
    assert cache() > 0


@pytest.mark.parametrize("private", deeply(True, False))
def test_no_program_is_found_for_another(cache, monkeypatch, private):
    """Those that differ in what no operand shows.

    JAX's flag takes its pointers out of keys, after which nothing in them says what
    `custom_partitioning` computes: here something does.
    """
    if not private:
        monkeypatch.setattr(_partitioner, "stock", None)
    arrays = operands(4, 4)
    # Products of TF32 would differ with the size of a part, on a GPU.
    exact = {"implementation": "xla", "precision": "highest"}
    with configured({"jax_remove_custom_partitioning_ptr_from_cache_key": True}):
        for options in VARIANTS.values():
            jax.clear_caches()
            call = functools.partial(attention, **exact, **options)
            found = jax.jit(lambda *x, call=call: call(*x))(*arrays)
            assert_same([found], [on_one(call, *arrays)])


@pytest.mark.usefixtures("no_cache")
def test_equal_layers_are_lowered_once(monkeypatch):
    """Without a cache: what is found there is not lowered."""
    lowered = []
    partition = _partitioner._PARTITION
    monkeypatch.setattr(
        _partitioner, "_PARTITION", lambda *x: lowered.append(x) or partition(*x)
    )

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def loss(q, k, v):
        for _ in range(4):
            q = q + attention(q, k, v, is_causal=True, implementation="xla")
        return jnp.sum(q**2)

    arrays = operands()
    found = loss.lower(*arrays).compile()(*arrays)
    assert len(lowered) == 2  # forward and backward
    assert_same(found, on_one(loss, *arrays))


def test_programs_need_not_be_compiled_in_order(cache):
    """Of equal ones any may be dropped before another is compiled."""
    arrays = operands()

    def lowered():
        jax.clear_caches()
        run = with_gradients(implementation="xla")
        return jax.jit(lambda *x: run(*x)).lower(*arrays)

    first, last, other = lowered(), lowered(), lowered()
    assert first.as_text() == last.as_text()
    del last
    jax.clear_caches()
    gc.collect()
    expected = on_one(with_gradients(implementation="xla"), *arrays)
    for x in (other, first):
        assert_same(x.compile()(*arrays), expected)


def test_compiled_outside_of_x64():
    """What was lowered in float64 is compiled as such, whatever is set by then."""
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) for x in operands()]
        run = with_gradients(is_causal=True, implementation="xla")
        expected = on_one(run, *arrays)
        lowered = jax.jit(run).lower(*arrays)
    compiled = lowered.compile()
    for a, e in zip(compiled(*arrays), expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-12)


@pytest.fixture
def gspmd():
    with configured({"jax_use_shardy_partitioner": False}):
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.mark.parametrize("backend", MAINLY_XLA)
@pytest.mark.parametrize("heads", [(4, 4), *deeply(((4, 1),), ((6, 3),))])
def test_gspmd(gspmd, backend, heads):
    """Divided as the operands are, where Shardy is turned off."""
    by_heads = heads[0] % 2 == heads[1] % 2 == 0
    spec = BY_HEADS if by_heads else P("data")
    arrays = operands(*heads, spec)
    run = with_gradients(is_causal=True, **BACKENDS[backend])
    compiled = jax.jit(run).lower(*arrays).compile()
    text = compiled.as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    assert_same(compiled(*arrays), on_one(run, *arrays))


@pytest.mark.filterwarnings("ignore:.*the rows of query are divided")
@pytest.mark.parametrize(
    "spec",
    [
        P(None, "data"),
        *deeply((P(("data", "model")),), (P(None, None, None, "data"),), (P(),)),
    ],
)
def test_gspmd_where_it_must_gather(gspmd, spec):
    """Rows, head sizes, a batch of two over four devices; and what nothing divides."""
    try:
        arrays = operands(4, 2, spec)
    except ValueError:  # JAX puts nothing where it does not divide
        arrays = operands(4, 2, P())
    run = with_gradients(is_causal=True, implementation="xla")
    assert_same(jax.jit(run)(*arrays), on_one(run, *arrays))


def test_gspmd_under_vmap(gspmd):
    """Also over what the query lacks, so that results have an axis that it has not."""
    q, k, v = operands()
    call = functools.partial(attention, implementation="xla")
    mapped = jax.vmap(call, (None, 0, 0))
    k, v = map(np.asarray, (k, v))
    arrays = q, np.stack([k, 2 * k]), np.stack([v, v])
    assert_same([jax.jit(mapped)(*arrays)], [on_one(mapped, *arrays)])


def test_a_ring_requires_shardy(gspmd):
    """Without it XLA would end the process over a plain ring; other methods work."""
    q, k, v = (jnp.asarray(np.asarray(x)) for x in operands(4, 4))
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    rows = P(None, "rows")

    def sharded(method):
        context = Context("rows", None, method)
        options = {"is_causal": True, "implementation": "xla", "context": context}
        call = functools.partial(attention, **options)
        return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows))

    with pytest.raises(ValueError, match=r"a ring requires .*jax_use_shardy_part"):
        sharded("ring")(q, k, v)
    plain = functools.partial(attention, is_causal=True, implementation="xla")
    expected = jax.jit(plain)(q, k, v)
    for method in ("gather", "heads"):
        assert_same([sharded(method)(q, k, v)], [expected])


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_compile_time_evaluation(backend):
    q, k, v = (jnp.asarray(np.asarray(x)) for x in operands())
    run = with_gradients(is_causal=True, **BACKENDS[backend])
    expected = jax.jit(run)(q, k, v)
    jax.clear_caches()
    with jax.ensure_compile_time_eval():
        assert_same(run(q, k, v), expected)

    @jax.jit
    def constant(x):
        with jax.ensure_compile_time_eval():
            found = run(q, k, v)
            assert not isinstance(found[0], jax.core.Tracer)
        return x + found[0]

    np.testing.assert_allclose(constant(q), q + expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_kernels_are_lowered_under_compile_time_evaluation(backend):
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    with jax.ensure_compile_time_eval():
        text = lower_for_gpu(lambda x: attention(x, x, x, implementation=backend), x)
    assert "flash2_forward" in text
