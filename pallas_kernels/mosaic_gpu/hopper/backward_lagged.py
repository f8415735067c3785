"""The walk of a consumer of `backward` whose dq lags by one work tile.

dq needs dz of all keys. A consumer makes it of the work tile before, whose dz the other
one wrote long ago, so that neither waits for the other. They take turns: one issues
four products that follow each other without a pause, while the other one computes.

    consumer 0 | p1, dz1 | dv1, dk1, dq0, s2 | p2, dz2 | dv2, dk2, dq1, s3 | ... | dq
    consumer 1                     | p1, dz1 | dv1, dk1, dq0, s2 | p2, dz2 | ...

The product for dp runs beside the exponents of p. Where a score is no more than the
product of a query and a key, the sums of products start from -lse and from -delta: what
is left for p and dz is an exponent and a product for each pair.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.ranges import maximum
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


@dataclasses.dataclass(frozen=True)
class Sums:
    """What the products of a consumer are added to, in registers.

    Attributes:
      dk, dv: of its keys, over all work tiles.
      dq: its part of a block of dq.
      dp: of a work tile.
      qk: of the next one.
    """

    dk: Any
    dv: Any
    dq: Any
    dp: Any
    qk: Any


def walk(consumer: Consumer, dk_acc, dv_acc) -> tuple[jax.Array, jax.Array]:
    """dk and dv of its keys, over the spec's units.

    These are `AttentionSpec.gradient_unit` and `dropout_scale`.
    """
    plan = consumer.plan
    of_dq = plgpu.WGMMAAccumulatorRef(plan.dq_part.shape, F32)

    @pl.when(consumer.program.tiles.count > 0)
    def _():
        loop = functools.partial(_loop, consumer, dk_acc, dv_acc)
        pl.run_scoped(loop, of_dq, plan.accumulator, plan.accumulator)

    return dk_acc[...], dv_acc[...]


def _loop(consumer: Consumer, *sums) -> None:
    program, sums = consumer.program, Sums(*sums)
    count, first = program.tiles.count, jnp.int32(0)
    program.query_pipeline.wait(first)
    _start_scores(consumer, sums, first)
    consumer.issue_scores(sums.qk, first, consumer.keys_and_values(first)[1])
    qk = plgpu.wgmma_accumulator_load(sums.qk, wait_n=0)
    consumer.plan.ping_pong.start(program.warpgroup)
    visit = functools.partial(_visit, consumer, sums)
    state = qk, consumer.prefetch(first)
    lax.fori_loop(first, support.opaque(count), visit, state)
    last = count - 1
    sums.dq[...] = jnp.zeros(sums.dq.shape, F32)
    pl.when(last > 0)(lambda: _wait_for_dz(consumer, last))
    consumer.wait_for_room(last)
    _issue_dq(consumer, sums, last, consumer.keys_and_values(last)[0])
    consumer.hand_over(last, plgpu.wgmma_accumulator_load(sums.dq, wait_n=0))


def _visit(consumer: Consumer, sums: Sums, number, state):
    """Adds a work tile to dk and dv, and makes dq of the one before.

    Args:
      number: of the work tile.
      state: the product of its keys and queries, and what was prefetched of its pairs.

    Returns:
      The same of the next work tile.
    """
    qk, prefetched = state
    program, plan, me = consumer.program, consumer.plan, consumer.program.warpgroup
    tile = WorkTile.of(consumer, number, prefetched)
    # Masks first: beside dp there are no registers for what they are made of.
    pairs = plan.pairs(tile.spec, tile.where, tile.masked)
    scores = pairs.scores_of(qk, plan.dtype)
    program.do_pipeline.wait(number)
    _start_dp(consumer, sums, number)
    issue_dp(tile, sums.dp)
    again = pairs.recompute(scores, program.lse(pairs, number))
    p, dz = beside_dp(consumer, tile, again, sums.dp)
    if not plan.overlaps_exponents:
        wait_for_next(consumer, tile)
    _put_dz(consumer, tile, dz)
    _start_scores(consumer, sums, tile.next)
    sums.dq[...] = jnp.zeros(sums.dq.shape, F32)
    # The first tile has none before it. Its own dq is made, to no purpose: products in
    # a branch would be put in sequence.
    before = maximum(number - 1, 0)
    pl.when(number != 1)(lambda: _wait_for_dz(consumer, before))
    consumer.wait_for_room(before)
    plan.ping_pong.wait(me)
    issue_dv(consumer, sums.dv, tile, p)
    plgpu.wgmma(sums.dk, tile.dz.at[consumer.rows], tile.q)
    prefetched = consumer.prefetch(tile.next)
    _issue_dq(consumer, sums, before, tile.k_block)
    consumer.issue_scores(sums.qk, tile.next, tile.k)
    plan.ping_pong.pass_on(me)
    dq = plgpu.wgmma_accumulator_load(sums.dq, wait_n=1)
    program.do_pipeline.release(number)
    pl.when(tile.has_next)(lambda: program.query_pipeline.release(number))

    @pl.when(number > 0)
    def _():
        plgpu.barrier_arrive(program.refs.dz_empty.at[program.dz_stage(before)])
        consumer.hand_over(before, dq)

    return plgpu.wgmma_accumulator_load(sums.qk, wait_n=0), prefetched


def _start_scores(consumer: Consumer, sums: Sums, number) -> None:
    """From where the products of the queries of a work tile and of keys are summed."""
    lse = consumer.program.query_pipeline.at(number).lse.ref
    sums.qk[...] = _start(consumer, lse)


def _start_dp(consumer: Consumer, sums: Sums, number) -> None:
    """From where the products of values and the gradients of outputs are summed."""
    delta = consumer.program.do_pipeline.at(number).delta.ref
    sums.dp[...] = _start(consumer, delta)


def _start(consumer: Consumer, saved) -> jax.Array:
    if not consumer.plan.starts_from_saved:
        return consumer.plan.zeros
    vector = support.load_vector(saved, 1, shared=True)
    shape = tuple(consumer.plan.pair_block.values())
    return consumer.plan.arithmetic.along(vector, -1, shape)


def _put_dz(consumer: Consumer, tile: WorkTile, dz: jax.Array) -> None:
    """dz of a work tile goes to shared memory, for both consumers' dq."""
    program, refs = consumer.program, consumer.refs
    stage = program.dz_stage(tile.number)

    @pl.when(tile.number >= consumer.plan.dz_stages)
    def _():
        plgpu.barrier_wait(refs.dz_empty.at[stage])

    tile.dz[consumer.rows] = dz.astype(consumer.plan.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.dz_full.at[stage])


def _wait_for_dz(consumer: Consumer, number) -> None:
    """Until dz of all keys is there."""
    stage = consumer.program.dz_stage(number)
    plgpu.barrier_wait(consumer.refs.dz_full.at[stage])


def _issue_dq(consumer: Consumer, sums: Sums, number, k_block) -> None:
    """Issues the product for its part of dq of a work tile."""
    program, part = consumer.program, consumer.plan.dq_part
    dz, k = part.operands(program.warpgroup, program.dz(number), k_block)
    plgpu.wgmma(sums.dq, support.transposed(dz), k)
