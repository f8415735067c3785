"""What a consumer warpgroup of `backward` does: the five products of each work tile."""

from __future__ import annotations

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import clear_keys
from pallas_kernels.mosaic_gpu.hopper import backward_in_step, backward_lagged
from pallas_kernels.mosaic_gpu.hopper.backward_plan import Program
from pallas_kernels.mosaic_gpu.hopper.backward_tile import Consumer
from pallas_kernels.mosaic_gpu.hopper.gradients import F32
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.plan import wait_until_stored
from pallas_kernels.mosaic_gpu.shared_memory import Tile


def compute(program: Program) -> None:
    """The role of a consumer: dk and dv of its keys, and its parts of dq."""
    plan, refs = program.plan, program.refs
    consumer = Consumer.start(program)
    plgpu.barrier_wait(refs.keys_full)
    if plan.drops_keys:
        size, kept = plan.layout.size["s"], program.inputs.spec.keys
        attended = clear_keys.attended_keys(program.spec, kept, consumer.where, size)
        for operand in (refs.k, refs.v):
            clear_keys.clear(operand.ref.at[0, consumer.rows], attended)
    accumulators = (plgpu.WGMMAAccumulatorRef((ROWS, plan.width[x]), F32) for x in "hd")
    walk = backward_lagged.walk if plan.lags_dq else backward_in_step.walk
    dk, dv = pl.run_scoped(functools.partial(walk, consumer), *accumulators)
    plan.sync_consumers()  # all have read the keys
    _store(consumer, dk, dv)


def _store(consumer: Consumer, dk: jax.Array, dv: jax.Array) -> None:
    """dk and dv of this consumer's keys go to global memory.

    They leave from where k and v are, or in float32 from where dq was on its way.

    Args:
      dk, dv: what `_walk` gave.
    """
    program, refs, me = consumer.program, consumer.refs, consumer.program.warpgroup
    dk_out, dv_out = program.outputs[1:]
    plan, in_float32 = consumer.plan, consumer.plan.in_float32
    # Its own part of the first stage of dq, or a stage of its own.
    stage, first = (0, me * ROWS) if plan.dq_parts > 1 else (me, 0)
    if in_float32:

        @pl.when(program.tiles.count > stage)
        def _():
            plgpu.barrier_wait(refs.dq_empty.at[program.dq_barrier(stage, me)])

    def store(operand: Tile, gradient, out):
        part = operand.at((0, consumer.rows))
        if in_float32:
            part = refs.dq.at((stage, pl.ds(first, ROWS)))
        part.ref[...] = gradient.astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(part.copied, out.at(consumer.where))

    store(refs.k, dk * program.spec.gradient_unit, dk_out)
    if in_float32:
        wait_until_stored()
    store(refs.v, dv * program.spec.dropout_scale, dv_out)
    wait_until_stored()
