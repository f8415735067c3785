"""What a consumer warpgroup of `backward` does: the five products of each work tile.

Products run asynchronously. `wgmma` issues one, and `wgmma_accumulator_load` waits for
it. All blocks of pairs are transposed, [keys, queries].
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.ranges import minimum
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.core.visits import Share
from pallas_kernels.layout import Rows, load_tree
from pallas_kernels.mosaic_gpu import clear_keys, pairwise, prefetch, support
from pallas_kernels.mosaic_gpu.hopper import gradients
from pallas_kernels.mosaic_gpu.hopper.backward_plan import PART, Program
from pallas_kernels.mosaic_gpu.hopper.gradients import F32
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.plan import wait_until_stored
from pallas_kernels.mosaic_gpu.shared_memory import Tile
from pallas_kernels.mosaic_gpu.tiles import Place
from pallas_kernels.program import Where


@dataclasses.dataclass(frozen=True)
class Consumer(gradients.Consumer):
    """A consumer warpgroup, which owns 64 of the thread block's keys.

    Attributes:
      rows: its keys, in tiles of the thread block.
      where: the place of its keys.
      spec: with what varies along its keys loaded.
    """

    program: Program
    rows: Any
    where: Where
    spec: AttentionSpec

    @classmethod
    def start(cls, program: Program) -> Consumer:
        me = program.warpgroup
        rows = pl.ds(me * ROWS, ROWS)
        where = {**program.where, "s": Rows(program.where["s"].start + me * ROWS, ROWS)}
        return cls(program, rows, where, load_tree(program.spec, ("s", "t"), where))

    def keys_and_values(self, number) -> tuple[Any, Any, Any]:
        """All keys of the thread block, its own keys and its own values.

        They are addressed anew for every work tile `number`.
        """
        first, refs = support.keep_in_loop(0, number), self.refs
        k_block = refs.k.ref.at[first]
        return k_block, k_block.at[self.rows], refs.v.ref.at[first, self.rows]

    def issue_scores(self, qk_acc, number, k) -> None:
        """Issues the product of its keys and the queries of a work tile."""
        q = self.program.query_pipeline.at(number).q.ref
        plgpu.wgmma(qk_acc, k, support.transposed(q))

    def pairs_at(self, place: Place) -> Where:
        """Where the pairs of a work tile and of its keys lie."""
        return {**self.program.tiles.at(place), "s": self.where["s"]}

    def prefetch(self, number) -> Ahead:
        """Reads what it needs of a work tile from global memory."""
        tiles = self.program.tiles
        place, words = tiles.place(number), []
        if self.plan.pipelines_scores and prefetch.is_fetched(self.spec):
            words = prefetch.fetch(self.spec, ("s", "t"), self.pairs_at(place))
        return Ahead(place if tiles.reads_places else None, words)

    def wait_for_room(self, number) -> None:
        """Until its part of dq of a work tile may be written."""
        barrier = self.program.dq_barrier(number, self.program.warpgroup)

        @pl.when(number >= self.plan.dq_stages)
        def _():
            plgpu.barrier_wait(self.refs.dq_empty.at[barrier])

    def hand_over(self, number, dq: jax.Array) -> None:
        """Its part of dq goes to shared memory, from where a warp adds it."""
        program, me = self.program, self.program.warpgroup
        block = self.refs.dq.ref.at[program.dq_stage(number)]
        self.plan.dq_part.of(me, block)[...] = dq
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs.dq_full.at[program.dq_barrier(number, me)])


class Ahead(NamedTuple):
    """What a consumer reads of a work tile while it computes the one before.

    Attributes:
      place: of the tile, or None where that is only computed.
      words: what each of its pairs has (`prefetch.fetch`).
    """

    place: Place | None
    words: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class WorkTile:
    """A block of queries of one query head, and what a consumer makes of it.

    Attributes:
      number: among the work tiles of the thread block.
      k_block: all keys of the thread block.
      k, v: the consumer's own keys and values.
      q, do: of the queries.
      dz: for all consumers' parts of dz.
      spec, where: of its pairs.
      masked: whether some of these may be masked.
      has_next: whether a work tile comes after it.
      next: the number of that, or of this one if none comes.
    """

    number: Any
    k_block: Any
    k: Any
    v: Any
    q: Any
    do: Any
    dz: Any
    spec: AttentionSpec
    where: Where
    masked: Any
    has_next: Any
    next: Any

    @classmethod
    def of(cls, consumer: Consumer, number, ahead: Ahead) -> WorkTile:
        program, tiles = consumer.program, consumer.program.tiles
        k_block, k, v = consumer.keys_and_values(number)
        place = ahead.place or tiles.place(number)
        where, masked = consumer.pairs_at(place), tiles.masked(place)
        of_head = {**consumer.where, "n": where["n"]}
        spec = load_tree(consumer.spec, ("s", "t"), of_head)
        return cls(
            number=number,
            k_block=k_block,
            k=k,
            v=v,
            q=program.query_pipeline.at(number).q.ref,
            do=program.do_pipeline.at(number).do.ref,
            dz=program.dz(number),
            spec=prefetch.with_fetched(spec, ahead.words) if ahead.words else spec,
            where=where,
            masked=masked,
            has_next=number + 1 < tiles.count,
            next=minimum(number + 1, tiles.count - 1),
        )


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
    dk, dv = pl.run_scoped(functools.partial(_walk, consumer), *accumulators)
    plan.sync_consumers()  # all have read the keys
    share = program.tiles.share
    if share is None:
        _store(consumer, dk, dv)
        return
    is_last = share.part + 1 == share.parts
    pl.when(share.is_used & ~is_last)(lambda: _store_part(consumer, share, dk, dv))

    @pl.when(is_last)
    def _():
        together = functools.partial(_with_parts, consumer, share)
        sums = lax.cond(share.part > 0, together, lambda *x: x, dk, dv)
        _store(consumer, *sums)


def _walk(consumer: Consumer, dk_acc, dv_acc) -> tuple[jax.Array, jax.Array]:
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
        number in its place), and what was read of it.

    Returns:
      The same of the next work tile.
    """
    qk, ahead = state
    program, plan = consumer.program, consumer.plan
    pipelined = plan.pipelines_scores
    qk = qk if pipelined else _scores(consumer, number)
    tile = WorkTile.of(consumer, number, ahead)
    pairs = _pairs_overlapped if pipelined else _pairs_in_sequence
    pairs = functools.partial(pairs, consumer, tile, qk, dv_acc)
    p, dz = pl.run_scoped(pairs, plan.accumulator)
    if not pipelined:  # all have read the last dz
        plan.sync_consumers()
    tile.dz[consumer.rows] = dz.astype(plan.dtype)
    if p is not None:
        _issue_dv(consumer, dv_acc, tile, p)
    ahead = consumer.prefetch(tile.next)
    plgpu.commit_smem()
    plgpu.wgmma(dk_acc, tile.dz.at[consumer.rows], tile.q)
    plan.sync_consumers()  # dz of all keys is there
    if pipelined and not plan.overlaps_exponents:
        _wait_for_next(consumer, tile)
    consumer.wait_for_room(number)
    plgpu.wgmma_wait(0)
    program.do_pipeline.release(number)
    dq_acc = plgpu.WGMMAAccumulatorRef(plan.dq_part.shape, F32)
    qk_acc = [plan.accumulator] * pipelined
    qk = pl.run_scoped(functools.partial(_make_dq, consumer, tile), dq_acc, *qk_acc)
    return qk, ahead


def _wait_for_next(consumer: Consumer, tile: WorkTile) -> None:
    """Until the queries of the next work tile are there."""
    pipeline = consumer.program.query_pipeline
    pl.when(tile.has_next)(lambda: pipeline.wait(tile.next))


def _issue_dv(consumer: Consumer, dv_acc, tile: WorkTile, p: jax.Array) -> None:
    plgpu.wgmma(dv_acc, p.astype(consumer.plan.dtype), tile.do)


def _recompute(consumer: Consumer, tile: WorkTile, qk: jax.Array):
    program = consumer.program
    return program.recompute(tile.spec, tile.where, tile.masked, tile.number, qk)


def _pairs_overlapped(consumer: Consumer, tile: WorkTile, qk, dv_acc, dp_acc):
    """p and dz of a work tile. The product for dp runs beside the exponents."""
    del dv_acc
    program = consumer.program
    program.do_pipeline.wait(tile.number)
    plgpu.wgmma(dp_acc, tile.v, support.transposed(tile.do))
    again = _recompute(consumer, tile, qk)
    p = again.dropped
    delta = program.delta(again.pairs, tile.number)
    if program.plan.overlaps_exponents:
        # The compiler moves nothing across this branch: exponents are computed while
        # the product runs, and not after it.
        _wait_for_next(consumer, tile)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
    return p, again.dz(dp, delta)


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
    _issue_dv(consumer, dv_acc, tile, p)
    plgpu.wgmma(dp_acc, tile.v, support.transposed(tile.do))
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


def _store_part(consumer: Consumer, share: Share, dk: jax.Array, dv: jax.Array) -> None:
    """Sums of a part of a shared block go to global memory, for the last part."""
    for sums, view in zip((dk, dv), consumer.program.outputs[3:], strict=True):
        pairwise.store(view.at(_of_part(consumer, share, share.part)), sums)
    plgpu.commit_smem()  # all threads have stored
    semaphore = consumer.program.shared.at[consumer.program.tiles.shared_number]
    plgpu.semaphore_signal(semaphore, 1, memory_scope="gpu")


def _with_parts(consumer: Consumer, share: Share, dk: jax.Array, dv: jax.Array):
    """The sums of the last part of a shared block and of all before it, in order."""
    program, (_, parts) = consumer.program, consumer.plan.sharing
    semaphore = program.shared.at[program.tiles.shared_number]
    count = jnp.int32((parts - 1) * consumer.plan.consumers)
    plgpu.semaphore_wait(semaphore, count, decrement=False, memory_scope="gpu")

    def add(part, sums):
        where = _of_part(consumer, share, part)
        views = zip(sums, program.outputs[3:], strict=True)
        return tuple(
            x + pairwise.load(view.at(where), x.shape, transposed=False)
            for x, view in views
        )

    return lax.fori_loop(jnp.int32(0), jnp.int32(parts - 1), add, (dk, dv))


def _of_part(consumer: Consumer, share: Share, part) -> Where:
    """Where the sums of the consumer's keys are, of a part of a shared block."""
    sharing, me = consumer.plan.sharing, consumer.program.warpgroup
    number = share.block * (sharing.parts - 1) + part
    return {**consumer.where, PART: number, "s": Rows(me * ROWS, ROWS)}


def _store(consumer: Consumer, dk: jax.Array, dv: jax.Array) -> None:
    """dk and dv of this consumer's keys go to global memory.

    They leave from where k and v are, or in float32 from where dq was on its way.

    Args:
      dk, dv: what `_walk` gave.
    """
    program, refs, me = consumer.program, consumer.refs, consumer.program.warpgroup
    dk_out, dv_out = program.outputs[1:3]
    in_float32 = consumer.plan.in_float32
    # Its own part of the first stage of dq, or a stage of its own.
    stage, row = (0, me * ROWS) if consumer.plan.dq_parts > 1 else (me, 0)
    if in_float32:

        @pl.when(program.tiles.count > stage)
        def _():
            plgpu.barrier_wait(refs.dq_empty.at[program.dq_barrier(stage, me)])

    def store(operand: Tile, gradient, out):
        part = operand.at((0, consumer.rows))
        if in_float32:
            part = refs.dq.at((stage, pl.ds(row, ROWS)))
        part.ref[...] = gradient.astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(part.copied, out.at(consumer.where))

    store(refs.k, dk * program.spec.gradient_unit, dk_out)
    if in_float32:
        wait_until_stored()
    store(refs.v, dv * program.spec.dropout_scale, dv_out)
    wait_until_stored()
