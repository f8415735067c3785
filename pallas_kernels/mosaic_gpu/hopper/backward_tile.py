"""A consumer warpgroup of `backward`, and a work tile as it sees it.

Products run asynchronously. `wgmma` issues one, and `wgmma_accumulator_load` waits for
it. All blocks of pairs are transposed, [keys, queries].
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.pairs import Recomputed
from pallas_kernels.core.ranges import minimum
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Rows, load_tree
from pallas_kernels.mosaic_gpu import prefetch, support
from pallas_kernels.mosaic_gpu.hopper import gradients
from pallas_kernels.mosaic_gpu.hopper.backward_plan import Program
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
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

    def prefetch(self, number) -> list[jax.Array]:
        """What each pair of a work tile has in global memory, where registers do."""
        if not (self.plan.pipelines_scores and prefetch.is_fetched(self.spec)):
            return []
        where = self.pairs_at(self.program.tiles.place(number))
        return prefetch.fetch(self.spec, ("s", "t"), where)

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
    def of(cls, consumer: Consumer, number, prefetched: list[jax.Array]) -> WorkTile:
        program, tiles = consumer.program, consumer.program.tiles
        k_block, k, v = consumer.keys_and_values(number)
        place = tiles.place(number)
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
            spec=prefetch.with_fetched(spec, prefetched) if prefetched else spec,
            where=where,
            masked=masked,
            has_next=number + 1 < tiles.count,
            next=minimum(number + 1, tiles.count - 1),
        )


def wait_for_next(consumer: Consumer, tile: WorkTile) -> None:
    """Until the queries of the next work tile are there."""
    pipeline = consumer.program.query_pipeline
    pl.when(tile.has_next)(lambda: pipeline.wait(tile.next))


def issue_dv(consumer: Consumer, dv_acc, tile: WorkTile, p: jax.Array) -> None:
    """Issues the product of p and the gradients of outputs."""
    plgpu.wgmma(dv_acc, p.astype(consumer.plan.dtype), tile.do)


def issue_dp(tile: WorkTile, dp_acc) -> None:
    """Issues the product of values and the gradients of outputs."""
    plgpu.wgmma(dp_acc, tile.v, support.transposed(tile.do))


def beside_dp(consumer: Consumer, tile: WorkTile, again: Recomputed, dp_acc):
    """p and dz of a work tile, whose exponents are made while its dp is.

    Args:
      again: its probabilities.
      dp_acc: what the product for dp is added to.
    """
    program = consumer.program
    p = again.dropped
    delta = program.delta(again.pairs, tile.number)
    if program.plan.overlaps_exponents:
        # The compiler moves nothing across this branch: exponents are computed while
        # the product runs, and not after it.
        wait_for_next(consumer, tile)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
    return p, again.dz(dp, delta)
