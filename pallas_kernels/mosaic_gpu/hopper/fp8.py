"""The forward pass in eight bits: what its kernel is given."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Call
from pallas_kernels.core import clear
from pallas_kernels.core.axes import Axes, Named
from pallas_kernels.core.scores import Score
from pallas_kernels.mosaic_gpu import memory, support
from pallas_kernels.mosaic_gpu.hopper.fp8_bytes import DTYPE
from pallas_kernels.mosaic_gpu.hopper.fp8_forward import forward as kernel
from pallas_kernels.mosaic_gpu.hopper.fp8_plan import with_sums
from pallas_kernels.mosaic_gpu.hopper.fp8_program import Scales, unit_of
from pallas_kernels.mosaic_gpu.plan import PassPlan

# TMA copies rows of values in parts of so many bytes.
_KEYS = 128


def forward(plan: PassPlan, call: Call, outputs):
    """Output and log-sum-exp (`backend.Backend`)."""
    spec, size = call.spec, call.size
    blocks = plan.launch.blocks
    value = clear.unread(spec, call.value)
    own = dataclasses.replace(spec, score=Score(1.0), value_scale=None)
    own = own.with_table("s", blocks.block_q, blocks.block_kv, size["t"], size["s"])
    given = call.query, call.key, call.value
    return kernel(
        call.query,
        call.key,
        values(value),
        own,
        _scales(call),
        outputs,
        launch=plan.launch,
        given=given,
    )


def values(v: Named) -> memory.Prepared:
    """Values as the kernel reads them: [.., Hv, keys], each 16 keys in another order.

    Zeros fill the last `_KEYS` keys. With `with_sums`, a row of ones and seven of zeros
    follow the Hv rows.
    """
    v = v.squeezed()
    axes: Axes = (*(a for a in v.axes if a not in ("d", "s")), "d", "s")
    bits = jax.lax.bitcast_convert_type
    # XLA transposes fast where it does nothing else in that pass.
    x = jax.lax.optimization_barrier(Named(bits(v.value, jnp.uint8), v.axes).to(axes))
    *lead, rows, keys = x.shape
    more = [(0, 0)] * (x.ndim - 1) + [(0, -keys % _KEYS)]
    x = jnp.pad(x, more) if keys % _KEYS else x
    # Keys 2 t and 2 t + 1 are one number of two bytes. The first four of eight and the
    # last four then take turns (`fp8_bytes`).
    x = bits(x.reshape(*lead, rows, -1, 2), jnp.uint16)
    pairs = x.shape
    x = jnp.swapaxes(x.reshape(*lead, rows, -1, 2, 4), -2, -1).reshape(pairs)
    if with_sums(rows):
        one = bits(jnp.ones(2, DTYPE), jnp.uint16)
        first = jnp.arange(support.COLUMNS)[:, None] == 0
        ones = jnp.where(first, one, jnp.uint16(0))
        shape = *lead, support.COLUMNS, pairs[-1]
        x = jnp.concatenate([x, jnp.broadcast_to(ones, shape)], axis=-2)
    x = bits(x, DTYPE).reshape(*x.shape[:-1], -1)
    return memory.Prepared(x, axes)


def _scales(call: Call) -> Scales:
    """The unit of scores and the scale of values."""
    score = call.spec.score
    parts = [x.squeezed() for x in (score.key_scale, score.factor) if x is not None]
    axes = tuple(dict.fromkeys(a for x in parts for a in x.axes))
    unit = jnp.float32(unit_of(score.scale))
    for x in parts:
        unit = unit * x.to(axes).astype(jnp.float32)
    scale = call.spec.value_scale.squeezed()
    value = scale.value.astype(jnp.float32)
    return Scales(Named(unit, axes), Named(value, scale.axes))
