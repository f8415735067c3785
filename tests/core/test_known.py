"""What depends on no data: by NumPy while a call is traced, and the same as by XLA."""

import functools
import itertools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_flash2 import _api
from pallas_kernels.core import block_tables, known
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import Tiling
from pallas_kernels.core.visits import Sharing, Visits, many_known
from tests.core.programs import at_once
from tests.core.test_pointwise import boolean
from tests.tiers import deeply

T, S = 500, 520
SIZE, ROWS = {"t": T, "s": S}, {"t": 32, "s": 64}
MASKS = {
    "window": lambda b, h, q, kv: (q >= kv) & ((q - kv < 50) | (kv < 9)),
    "dilated": lambda b, h, q, kv: (q // 32 - kv // 32) % 3 == 0,
    "prefix": lambda b, h, q, kv: (q >= kv) | (kv < 130),
    "image": lambda b, h, q, kv: (
        (abs(q // 16 - kv // 16) <= 3) & (abs(q % 16 - kv % 16) <= 3)
    ),
}
NUMBERS = np.int32([-(2**31), -70, -33, -2, -1, 0, 1, 5, 31, 32, 33, 2**31 - 1])
FLOATS = np.float32([-np.inf, -2.5, -1.0, -0.0, 0.5, 3.0, 7.25, np.inf])


def spec_of(mask_mod, **more):
    q, kv = (jnp.zeros((1, n, 2, 16), jnp.bfloat16) for n in (T, S))
    return _api.given(q, kv, kv, mask_mod=mask_mod, **more).checked().spec


def assert_equal(found, expected):
    leaves, tree = jax.tree.flatten(found)
    others, other = jax.tree.flatten(expected)
    assert tree == other and len(leaves) > 0
    for x, y in zip(leaves, others, strict=True):
        assert isinstance(x.value, np.ndarray) and not isinstance(y.value, np.ndarray)
        assert x.axes == y.axes and x.dtype == y.dtype
        np.testing.assert_array_equal(x.value, y.value)


def pairs(f):
    """Of all pairs of numbers, by an operation of JAX's."""
    return lambda: f(*jnp.meshgrid(NUMBERS, NUMBERS))


OPERATIONS = {
    **{
        name: pairs(getattr(lax, name))
        for name in (
            *("add", "sub", "mul", "max", "min", "eq", "ne", "lt", "le", "gt", "ge"),
            *("bitwise_and", "bitwise_or", "bitwise_xor", "shift_left"),
            *("shift_right_arithmetic", "shift_right_logical"),
        )
    },
    "div": lambda: lax.div(*jnp.meshgrid(NUMBERS[1:], np.int32([-7, -1, 0, 1, 2, 64]))),
    "rem": lambda: lax.rem(*jnp.meshgrid(NUMBERS, np.int32([-7, -3, 0, 1, 2, 64]))),
    "float_rem": lambda: lax.rem(*jnp.meshgrid(FLOATS[1:-1], np.float32([-3, 0.75]))),
    "float_div": lambda: lax.div(*jnp.meshgrid(FLOATS[1:-1], np.float32([-3, 7]))),
    "not": lambda: jnp.stack([~(jnp.asarray(NUMBERS) > 2), jnp.asarray(NUMBERS) < 4]),
    "invert": lambda: ~jnp.asarray(NUMBERS),
    "abs_neg_sign": lambda: jnp.stack(
        [f(NUMBERS) for f in (jnp.abs, lax.neg, lax.sign)]
    ),
    "floor_ceil": lambda: jnp.stack([jnp.floor(FLOATS), jnp.ceil(FLOATS)]),
    "convert": lambda: jnp.asarray(NUMBERS).astype(jnp.float32),
    "truncate": lambda: jnp.asarray(FLOATS[1:-1]).astype(jnp.int32),
    "clamp": lambda: lax.clamp(np.int32(-5), NUMBERS, np.int32(9))[None],
    "where": pairs(lambda x, y: jnp.where(x > y, x, -y)),
    "choose": lambda: lax.select_n(NUMBERS % 3, NUMBERS, 2 * NUMBERS, -NUMBERS)[None],
    "floor_divide": lambda: jnp.asarray(NUMBERS)[:, None] // np.int32([16, 3]),
    "sort": lambda: jnp.sort(jnp.asarray([NUMBERS, -NUMBERS]), axis=1),
    "sort_rows": lambda: lax.sort(jnp.asarray([NUMBERS, -NUMBERS]), dimension=0),
    "cumsum": lambda: lax.cumsum(jnp.asarray([NUMBERS[1:-1]] * 3), axis=0),
    "sums": pairs(lambda x, y: jnp.sum(x > y, axis=0, dtype=jnp.int32)[None]),
    "ends": pairs(lambda x, y: jnp.stack([jnp.min(x - y, 0), jnp.max(x - y, 0)])),
    "logical": pairs(lambda x, y: jnp.stack([jnp.any(x > y, 0), jnp.all(x > y, 0)])),
    "slices": lambda: jnp.arange(24).reshape(4, 6)[1:3, ::2],
    "pad": lambda: jnp.pad(jnp.asarray(NUMBERS), (2, 3), constant_values=7)[None],
    "edge": lambda: jnp.pad(jnp.asarray([NUMBERS]), ((0, 2), (0, 1)), mode="edge"),
    "turned": lambda: jnp.expand_dims(jnp.arange(6).reshape(2, 3).T, 1).squeeze(1),
    "taken_apart": lambda: jnp.stack([*jnp.arange(6).reshape(3, 2)][::-1]),
    "iota": lambda: lax.broadcasted_iota(jnp.int32, (3, 4), 1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        expected = OPERATIONS[name]()
    axes = tuple("xyz"[: expected.ndim])
    found = known.evaluated(lambda: Named(OPERATIONS[name](), axes))
    assert_equal(found, Named(expected, axes))


def test_operations_without_a_rule():
    make = lambda: Named(jnp.linalg.qr(jnp.eye(3))[0], ("x", "y"))  # noqa: E731
    with pytest.raises(known.Unknown):
        known.evaluated(make)


def test_what_no_result_needs_is_not_computed():
    """Else it would take a rule, time and memory."""

    def make():
        jnp.linalg.qr(jnp.eye(3))
        return Named(jnp.arange(3) + 1, ("x",))

    np.testing.assert_array_equal(known.evaluated(make).value, [1, 2, 3])


def test_results_are_let_go(monkeypatch):
    """What was read for the last time is not kept, and there is an end to all."""

    def make():
        x = jnp.arange(1 << 18, dtype=jnp.int32)
        for _ in range(64):
            x = x * 3 + 1
        return Named(x, ("x",))

    tracemalloc.start()
    known.evaluated(make)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20  # of 64 MB
    monkeypatch.setattr(known, "_MOST_ELEMENTS", 100 << 18)
    with pytest.raises(known.Unknown, match="many elements"):
        known.evaluated(make)


@pytest.mark.parametrize("value", [1e-42, -1e-42])
def test_denormal_numbers(value):
    """XLA takes them for zeros on CPUs."""
    make = lambda: Named(jnp.maximum(jnp.zeros(3), np.float32(value)), ("x",))  # noqa: E731
    with pytest.raises(known.Unknown, match="denormal"):
        known.evaluated(make)


def test_masks_of_functions_without_a_rule():
    """What keys decide is read by kernels; here intervals say that nothing is known."""
    near = lambda q, kv: (abs(q - kv) < 20) | (kv < 20)  # noqa: E731
    mask = lambda b, h, q, kv: near(q, kv) & (jnp.sqrt(kv * 1.0) < 999.0)  # noqa: E731
    assert many_known(spec_of(mask), SIZE, {"t": 16, "s": 16}) == 2


def both(monkeypatch, make):
    """While a call is traced, and by a program."""
    found = make()
    with monkeypatch.context() as patch:
        patch.setattr(block_tables, "_MOST_KNOWN", 0)
        return found, at_once(make)


@pytest.mark.parametrize("mask", ["window", "prefix", *deeply("dilated", "image")])
def test_tables_and_visits(mask, monkeypatch):
    spec = spec_of(MASKS[mask])

    def table(looped, in_order):
        return spec.with_table(looped, 32, 64, T, S, in_order=in_order).table

    for looped, in_order in itertools.product("ts", (False, True)):
        make = functools.partial(table, looped, in_order)
        assert_equal(*both(monkeypatch, make))
    for sharing in (None, Sharing(2, 3)):
        make = functools.partial(Visits.of, spec, SIZE, ROWS, sharing)
        assert_equal(*both(monkeypatch, make))


@pytest.mark.parametrize("seeds", [3, *deeply(60)])
def test_functions_at_random(seeds, monkeypatch):
    for seed in range(seeds):
        spec = spec_of(boolean(np.random.default_rng(seed), 2))
        is_static = block_tables.are_static(spec.masks, Tiling(32, 64, T, S))
        if is_static and not all(atom.has_ranges for atom in spec.masks):
            make = functools.partial(Visits.of, spec, SIZE, ROWS)
            assert_equal(*both(monkeypatch, make))


def _is_known(**more) -> bool:
    spec = spec_of(MASKS["window"], **more)
    block_tables._known.cache_clear()
    found = spec.with_table("s", 32, 64, T, S).table
    return all(isinstance(x.value, np.ndarray) for x in jax.tree.leaves(found))


@pytest.mark.skipif(jax.device_count() < 4, reason="fewer than 4 devices")
def test_wherever_a_call_is_traced():
    """In `jit`, mapped, in `shard_map`, on explicit and on automatic meshes."""
    seen = []

    def call(x):
        seen.append(_is_known())
        return x

    x = jnp.zeros((8, 2))
    jax.jit(jax.vmap(call))(x)
    jax.grad(lambda x: call(x).sum())(x)
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            jax.jit(call)(x)
            rows = PartitionSpec("a")
            here = jax.device_put(x, NamedSharding(mesh, rows))
            jax.jit(jax.shard_map(call, in_specs=rows, out_specs=rows))(here)
    with jax.enable_x64(True), jax.transfer_guard("disallow"):
        jax.jit(lambda x: call(x))(x)
    assert seen == [True] * len(seen) and len(seen) >= 6


def test_what_is_not_known(monkeypatch):
    """Masks of data, offsets of data, and what would be too large for constants."""
    width = jnp.int32(50)
    of_data = lambda b, h, q, kv: (q - kv < width) | (kv < 9)  # noqa: E731
    assert many_known(spec_of(of_data), SIZE, ROWS) is None
    seen = []
    see = lambda **more: seen.append(_is_known(**more))  # noqa: E731
    jax.eval_shape(lambda: see(query_offset=jnp.int32(4)))
    monkeypatch.setattr(block_tables, "_MOST_KNOWN", 16 * 9 - 1)
    jax.eval_shape(lambda: see())
    monkeypatch.setattr(block_tables, "_MOST_KNOWN", 16 * 9)
    jax.eval_shape(lambda: see())
    assert seen == [False, False, True]


def test_blocks_with_many_visits():
    """None is shared in vain, where masks alone say which have many."""
    rows = {"t": 16, "s": 16}
    mask = lambda b, h, q, kv: (abs(q - kv) < 20) | (kv < 20)  # noqa: E731
    assert many_known(spec_of(mask), SIZE, rows) == 2
    assert many_known(spec_of(MASKS["dilated"]), SIZE, rows) == 0
    assert many_known(spec_of(MASKS["prefix"]), SIZE, rows) == 0
    # A block of global keys beside windows of a quarter: three times the mean.
    quarter = lambda b, h, q, kv: (q >= kv) & ((q - kv < 128) | (kv < 16))  # noqa: E731
    size, rows = {"t": 512, "s": 512}, {"t": 32, "s": 32}
    assert many_known(spec_of(quarter), size, rows) == 1
    # Keys that no query visits do not count.
    first = lambda b, h, q, kv: (q >= kv) & (kv < 150) & (kv // 32 != 2)  # noqa: E731
    assert many_known(spec_of(first), size, rows) == 0
