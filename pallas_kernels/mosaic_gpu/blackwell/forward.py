"""The forward kernel by tcgen05 (Dao 2023, algorithm 1), for data-centre Blackwell.

**Not run on a card**: compiled for compute capabilities 10.0 and 10.3, and interpreted
on a CPU (benchmarks/lab/099-mosaic-gpu-off-hopper.md).

A work tile is a block of query rows of one head and batch entry. A thread block goes
through several (`tile_scheduler`). It has two warpgroups that compute, the consumers,
of 128 rows each, and one that only loads, the producer:

    producer     copies k[0] v[0] k[1] v[1] ...  and those of the next work tile
    consumer 0   issues | softmax | issues | softmax | ...            | store
    consumer 1          | issues  | softmax | issues | softmax | ...  | store
    tensor core  products of consumer 0, of consumer 1, of consumer 0, ...

Scores, probabilities and sums of values are in tensor memory. A thread has one row, so
that the maximum and the sum of a row take no exchange between threads. Step i of a
consumer, when the product of its queries and keys i has been made:

    load      the scores, to registers
    issue     scores = q k[i+1]', which the tensor core makes while threads go on
    softmax   the maximum runs (`flash2.update`)
    scale     the sums, when p v[i-1] is in them, if the maximum of a row has grown
    store     the probabilities
    issue     sums += p v[i]

No two products under way use the same tensor memory: the tensor core keeps the order
of products only if they add to the same sums (PTX ISA, pipelined tcgen05 instructions).

Shared memory (`plan.Refs`): q [block_q, H], o [block_q, Hv], and num_stages times
k [block_kv, H] and v [block_kv, Hv]. Tensor memory (`plan.columns`): for each consumer
block_kv columns of scores, half as many of probabilities, and Hv of sums.
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

from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Named
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import by_name, support
from pallas_kernels.mosaic_gpu.blackwell.plan import ROWS, Plan
from pallas_kernels.mosaic_gpu.forward_program import KeyBlocks, TilesProgram, load
from pallas_kernels.mosaic_gpu.plan import by_role, wait_until_stored
from pallas_kernels.mosaic_gpu.shared_memory import Tile
from pallas_kernels.program import Where, query_rows

# Columns of the sums that are scaled at a time: so many registers.
_SCALED = 32


def forward(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    outputs: tuple[Named, Named],
    *,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Output and log-sum-exp.

    Args:
      q, k, v: operands, axes `t h`, `s h`, `s d` among others, those last. No value
        that no query attends is NaN or infinite.
      spec: of `Named` arrays, without axes `t` and `s`.
      outputs: shape structs of o (axes `t d` among others) and lse (`t` last).
      launch: block sizes and the rest.
    """
    plan = Plan.of((q, k, v), spec, outputs, launch)
    found = plan.call(
        by_role(TilesProgram.of, load, compute),
        (q, k, v, spec),
        outputs,
        refs=plan.declare(),
        name="flash2_forward_tcgen05",
    )
    return tuple(x.value for x in found)


# The consumers.


def compute(program: TilesProgram) -> None:
    """A consumer: it computes and stores 128 rows of each work tile."""
    program.passes(functools.partial(attend, program), jnp.int32(0))
    wait_until_stored()


def attend(program: TilesProgram, this: None, slot, first):
    """The attention of this consumer's rows of a work tile.

    Args:
      this: the pass, of which there is but one.
      slot: of the work tile.
      first: how many blocks of keys came before.

    Returns:
      How many have come after it.
    """
    del this
    plan, tile = program.plan, program.work_tile(slot)
    keys = program.key_blocks(tile)
    start = tile.start + program.warpgroup * ROWS
    spec, where = query_rows(tile.spec, tile.where, plan.layout, start, ROWS)
    rows = Consumer(program, keys, spec, where, first)
    rows.fetch_queries()
    rows.issue_scores(first)
    nothing = flash2.init([ROWS], 1)
    edges = first + keys.edges
    last = first + keys.count
    state = nothing.m, nothing.l
    state = lax.fori_loop(first, edges, functools.partial(rows.step, True), state)
    state = lax.fori_loop(edges, last, functools.partial(rows.step, False), state)
    rows.finish_sums(last - 1)
    rows.store(state)
    return last


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A consumer's rows of a work tile.

    Blocks of keys are numbered in the order in which the pipelines bring them, over all
    work tiles.

    Attributes:
      program: the warpgroup's.
      keys: the blocks of keys of the work tile.
      spec: with what these rows have loaded.
      where: head and batch entry, and which rows these are.
      first: number of the tile's first block of keys.
    """

    program: TilesProgram
    keys: KeyBlocks
    spec: AttentionSpec
    where: Where
    first: Any

    def _mine(self, refs):
        return refs.at[self.program.warpgroup]

    @property
    def queries(self) -> Tile:
        return self.program.refs.q.at(self.program.warpgroup)

    @property
    def scores(self):
        return self._mine(self.program.refs.scores)

    @property
    def probabilities(self):
        return self._mine(self.program.refs.probabilities)

    @property
    def sums(self):
        return self._mine(self.program.refs.sums)

    def fetch_queries(self) -> None:
        """Loads the queries, whose place no product reads any more."""
        full = self._mine(self.program.refs.q_full)
        source = self.program.q.at(self.where)
        plgpu.copy_gmem_to_smem(source, self.queries.copied, full)
        plgpu.barrier_wait(full)

    def issue_scores(self, i) -> None:
        """Issues the product of queries and the keys of block i."""
        k = self.program.refs.k
        k.wait(i)
        keys = support.transposed(k.at(i).ref)
        plgpu.tcgen05_mma(self.scores, self.queries.ref, keys, accumulate=False)
        plgpu.tcgen05_commit_arrive(self._mine(self.program.refs.scored))

    def issue_sums(self, i) -> None:
        """Issues the product of probabilities and the values of block i."""
        v = self.program.refs.v
        v.wait(i)
        plgpu.tcgen05_mma(
            self.sums, self.probabilities, v.at(i).ref, accumulate=i > self.first
        )
        plgpu.tcgen05_commit_arrive(self._mine(self.program.refs.summed))

    def finish_sums(self, i) -> None:
        """Waits for the product with values of block i, and releases their stage."""
        plgpu.barrier_wait(self._mine(self.program.refs.summed))
        self.program.refs.v.release(i)

    def step(self, masked: bool, i, state):
        """Takes in block i.

        Args:
          masked: whether pairs of the block may be masked.
          state: maximum and sum of each row.
        """
        refs, plan = self.program.refs, self.program.plan
        m, total = state
        plgpu.barrier_wait(self._mine(refs.scored))
        refs.k.release(i)
        qk = plgpu.async_load_tmem(self.scores, layout=support.ROW_OF_A_THREAD)
        plgpu.wait_load_tmem()
        following = i + 1 < self.first + self.keys.count
        pl.when(following)(lambda: self.issue_scores(i + 1))
        keys = self.keys.at(i - self.first)
        found = plan.pairs(self.spec, {**self.where, "s": keys}, masked)
        scores = by_name.scores_of(found, qk, plan.dtype)
        m, alpha, p = flash2.update(m, scores, plan.arithmetic)
        total = flash2.add_row_sums(total * alpha, p)
        p = p.astype(plan.dtype)

        @pl.when(i > self.first)
        def _():
            self.finish_sums(i - 1)
            self.scale_sums(alpha)

        plgpu.async_store_tmem(self.probabilities, p)
        plgpu.commit_tmem()
        self.issue_sums(i)
        return m, total

    def scale_sums(self, alpha) -> None:
        """Multiplies the sums by alpha, a number of each row, if one is below 1."""
        me, layout = self.program.warpgroup, support.ROW_OF_A_THREAD
        grown = support.warpgroup_any(me, jnp.where(alpha < 1.0, 1, 0), layout)

        @pl.when(grown != 0)
        def _():
            for column in range(0, self.program.plan.width["d"], _SCALED):
                part = self.sums.at[:, pl.ds(column, _SCALED)]
                x = plgpu.async_load_tmem(part, layout=layout)
                plgpu.wait_load_tmem()
                along = self.program.plan.along(alpha, _SCALED)
                plgpu.async_store_tmem(part, x * along)

    def store(self, state) -> None:
        """The epilogue: output and log-sum-exps."""
        program, me = self.program, self.program.warpgroup
        m, total = state
        sums = plgpu.async_load_tmem(self.sums, layout=support.ROW_OF_A_THREAD)
        plgpu.wait_load_tmem()
        state, launch = flash2.State(m, total, sums), program.plan.launch
        output, log = by_name.finish(state, self.spec, launch, program.o.dtype)
        tile, lse = program.refs.o.at(me), program.refs.lse.ref.at[me]
        wait_until_stored()  # of the previous work tile
        plgpu.store(tile.ref, output, optimized=False)
        lse[...] = log
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.copied, program.o.at(self.where))
        plgpu.copy_smem_to_gmem(lse, program.lse.at(self.where))
