"""The walk of a consumer of `backward` that keeps step with the others.

All meet in each work tile, when dz of it is there, and make dq of it. Where scores are
pipelined, the product of the next queries and keys runs beside dq.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import support
from pallas_kernels.mosaic_gpu.hopper.backward_tile import (
    Consumer,
    WorkTile,
    beside_dp,
    issue_dp,
    issue_dv,
    wait_for_next,
)
from pallas_kernels.mosaic_gpu.hopper.gradients import F32


def walk(consumer: Consumer, dk_acc, dv_acc) -> tuple[jax.Array, jax.Array]:
    """dk and dv of its keys, over the spec's units.

    These are `AttentionSpec.gradient_unit` and `dropout_scale`.
    """
    count = consumer.program.tiles.count
    first, end = jnp.int32(0), support.opaque(count)

    @pl.when(count > 0)
    def _():
        pipelined = consumer.plan.pipelines_scores
        qk = _scores(consumer, first) if pipelined else first
        visit = functools.partial(_visit, consumer, dk_acc, dv_acc)
        lax.fori_loop(first, end, visit, (qk, consumer.prefetch(first)))

    return dk_acc[...], dv_acc[...]


def _scores(consumer: Consumer, number) -> jax.Array:
    """The product of keys and queries of a work tile, once its queries are there."""

    def product(qk_acc):
        _, k, _ = consumer.keys_and_values(number)
        consumer.issue_scores(qk_acc, number, k)
        return plgpu.wgmma_accumulator_load(qk_acc, wait_n=0)

    consumer.program.query_pipeline.wait(number)
    return pl.run_scoped(product, consumer.plan.accumulator)


def _visit(consumer: Consumer, dk_acc, dv_acc, number, state):
    """Adds a work tile to dk and dv, makes dq of it, and the scores of the next.

    Args:
      number: of the work tile.
      state: the product of its keys and queries, where scores are pipelined (else a
        number in its place), and what was prefetched of its pairs.

    Returns:
      The same of the next work tile.
    """
    qk, prefetched = state
    program, plan = consumer.program, consumer.plan
    pipelined = plan.pipelines_scores
    qk = qk if pipelined else _scores(consumer, number)
    tile = WorkTile.of(consumer, number, prefetched)
    pairs = _pairs_overlapped if pipelined else _pairs_in_sequence
    pairs = functools.partial(pairs, consumer, tile, qk, dv_acc)
    p, dz = pl.run_scoped(pairs, plan.accumulator)
    if not pipelined:  # all have read the last dz
        plan.sync_consumers()
    tile.dz[consumer.rows] = dz.astype(plan.dtype)
    if p is not None:
        issue_dv(consumer, dv_acc, tile, p)
    prefetched = consumer.prefetch(tile.next)
    plgpu.commit_smem()
    plgpu.wgmma(dk_acc, tile.dz.at[consumer.rows], tile.q)
    plan.sync_consumers()  # dz of all keys is there
    if pipelined and not plan.overlaps_exponents:
        wait_for_next(consumer, tile)
    consumer.wait_for_room(number)
    plgpu.wgmma_wait(0)
    program.do_pipeline.release(number)
    dq_acc = plgpu.WGMMAAccumulatorRef(plan.dq_part.shape, F32)
    qk_acc = [plan.accumulator] * pipelined
    qk = pl.run_scoped(functools.partial(_make_dq, consumer, tile), dq_acc, *qk_acc)
    return qk, prefetched


def _pairs_overlapped(consumer: Consumer, tile: WorkTile, qk, dv_acc, dp_acc):
    """p and dz of a work tile. The product for dp runs beside the exponents."""
    del dv_acc
    consumer.program.do_pipeline.wait(tile.number)
    issue_dp(tile, dp_acc)
    return beside_dp(consumer, tile, _recompute(consumer, tile, qk), dp_acc)


def _recompute(consumer: Consumer, tile: WorkTile, qk: jax.Array):
    program = consumer.program
    return program.recompute(tile.spec, tile.where, tile.masked, tile.number, qk)


def _pairs_in_sequence(consumer: Consumer, tile: WorkTile, qk, dv_acc, dp_acc):
    """dz of a work tile, in fewer registers: of a rounded p, whose product runs.

    Returns:
      None in place of p, and dz.
    """
    program = consumer.program
    again = _recompute(consumer, tile, qk)
    again = again._replace(p=again.p.astype(program.plan.dtype).astype(F32))
    p = again.dropped.astype(program.plan.dtype)
    program.do_pipeline.wait(tile.number)
    issue_dv(consumer, dv_acc, tile, p)
    issue_dp(tile, dp_acc)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
    delta = program.delta(again.pairs, tile.number)
    return None, again.dz(dp, delta)


def _make_dq(consumer: Consumer, tile: WorkTile, dq_acc, *qk_acc):
    """This consumer's part of dq goes to shared memory, from where a warp adds it.

    Meanwhile the product of the next queries and keys runs.

    Args:
      qk_acc: for that product, where scores are pipelined.

    Returns:
      That product, or a number in its place.
    """
    program = consumer.program
    part = program.plan.dq_part
    dz, k = part.operands(program.warpgroup, tile.dz, tile.k_block)
    plgpu.wgmma(dq_acc, support.transposed(dz), k)
    for accumulator in qk_acc:
        consumer.issue_scores(accumulator, tile.next, tile.k)
    dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=len(qk_acc))
    pl.when(tile.has_next)(lambda: program.query_pipeline.release(tile.number))
    consumer.hand_over(tile.number, dq)
    loaded = [plgpu.wgmma_accumulator_load(x, wait_n=0) for x in qk_acc]
    return loaded[0] if loaded else tile.number
