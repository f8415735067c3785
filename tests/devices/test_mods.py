"""`score_mod` and `mask_mod` on several devices: gradients of what they capture, too.

Rows are divided in `tests/kernels/test_mods.py`, lists of blocks in `test_block_mask`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash2 import attention
from tests.cases import BACKENDS
from tests.tiers import deeply

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="4 devices")

B, T, N, K = 2, 24, 4, 2
RNG = np.random.default_rng(0)
WHOLE, ENTRIES, HEADS, ROWS = P(), P("data"), P("model"), P("data", None, "model")
# What has gradients: how it is divided, and its shape.
FLOATS = {
    "query": (ROWS, (B, T, N, 16)),
    "key": (ROWS, (B, T, K, 16)),
    "value": (ROWS, (B, T, K, 16)),
    "gain": (HEADS, (N,)),
    "table": (HEADS, (N, 8)),
    "keys": (ENTRIES, (B, T - 3)),  # what lies beyond is the last of them
    "shared": (WHOLE, (9,)),
}
OPERANDS = [np.float32(RNG.standard_normal(shape)) for _, shape in FLOATS.values()]
OPERANDS += [RNG.random((B, T)) < 0.8, 9 + 2 * np.arange(N, dtype=np.int32)]
OPERANDS += [RNG.integers(0, 6, (B, T), dtype=np.int32)]
DIVIDED = [spec for spec, _ in FLOATS.values()] + [ENTRIES, HEADS, ENTRIES]


def _call(backend, *operands):
    query, key, value, gain, table, keys, shared, *others = operands
    kept, width, times, *offset = others

    def score_mod(s, b, h, q, kv):
        near = jnp.clip(times[b, q] - times[b, kv], -4, 4) + 4
        far = jnp.clip(abs(q - kv) // 2, 0, 7)
        return s * gain[h] + table[h, far] + keys[b, kv] + shared[near]

    return attention(
        *(query, key, value),
        score_mod=score_mod,
        mask_mod=lambda b, h, q, kv: kept[b, kv] & (q - kv < width[h]),
        query_offset=offset[0] if offset else 0,
        precision="highest",
        **BACKENDS[backend],
    )


def _with_gradients(call, *operands):
    """The output, and the gradients of all floats."""
    floats, others = operands[: len(FLOATS)], operands[len(FLOATS) :]
    out, pull = jax.vjp(lambda *floats: call(*floats, *others), *floats)
    return out, *pull(jnp.cos(out))


def _check(found, backend, operands=OPERANDS):
    run = functools.partial(_with_gradients, functools.partial(_call, backend))
    for x, y in zip(found, jax.jit(run)(*operands), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def _mesh(kind):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("captured", ["divided", *deeply("whole", "offset")])
@pytest.mark.parametrize("backend", ["xla", *deeply("triton")])
def test_meshes(kind, captured, backend):
    """Captured arrays are divided as the call, or whole; an offset for each entry."""
    if kind == "Explicit" and captured != "whole" and jax.__version_info__ < (0, 12):
        pytest.skip("JAX takes no element of a divided array")
    mesh, specs, arrays = _mesh(AxisType[kind]), DIVIDED, OPERANDS
    if captured == "whole":
        specs = [*DIVIDED[:3], *[WHOLE] * 7]
    if captured == "offset":
        specs, arrays = [*DIVIDED, ENTRIES], [*OPERANDS, np.int32([5, 2])]
    with jax.set_mesh(mesh):
        operands = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arrays, specs, strict=True)
        ]
        call = functools.partial(_call, backend)
        found = jax.jit(functools.partial(_with_gradients, call))(*operands)
    if kind == "Explicit":  # results are divided as what they belong to
        for x, y in zip(found, [operands[0], *operands[: len(FLOATS)]], strict=True):
            assert jax.typeof(x).sharding == jax.typeof(y).sharding
    _check(found, backend, arrays)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_numbers_in_place_of_indices(kind):
    """Along an axis that is divided."""
    if kind == "Explicit" and jax.__version_info__ < (0, 12):
        pytest.skip("JAX takes no element of a divided array")

    def run(q, table):
        def score_mod(s, b, h, q, kv):
            return s * (table[3, 1] + table[1, h]) + table[0, jnp.clip(q - kv, 0, 7)]

        call = functools.partial(attention, score_mod=score_mod, implementation="xla")
        return jnp.sum(call(q, q, q) ** 2)

    q, table = OPERANDS[0], OPERANDS[4]
    mesh = _mesh(AxisType[kind])
    with jax.set_mesh(mesh):
        divided = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in ((q, ROWS), (table, HEADS))
        ]
        found = jax.jit(jax.grad(run, (0, 1)))(*divided)
    for x, y in zip(found, jax.jit(jax.grad(run, (0, 1)))(q, table), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6 * np.max(np.abs(y)))


@pytest.mark.parametrize("gradients", ["inside", *deeply("outside", "unchecked")])
@pytest.mark.parametrize("backend", ["xla", *deeply("triton")])
def test_shard_map(backend, gradients):
    """Inside, h and b count what a device has; what is whole gets one sum of all."""
    divide = functools.partial(
        jax.shard_map,
        mesh=_mesh(AxisType.Auto),
        in_specs=tuple(DIVIDED),
        check_vma=gradients != "unchecked",
    )
    run, call = _with_gradients, functools.partial(_call, backend)
    if gradients == "inside":
        specs = ROWS, *DIVIDED[: len(FLOATS)]
        run = divide(functools.partial(run, call), out_specs=specs)
    else:
        run = functools.partial(run, divide(call, out_specs=ROWS))
    _check(jax.jit(run)(*OPERANDS), backend)
