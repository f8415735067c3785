"""Gradients of keys and values for Hopper, by themselves (Dao 2023, algorithm 2).

This kernel is for wide heads (`tuning.separate_dq`), and `dq` then makes the
gradient of queries. Grid: (key blocks, key/value heads, batch axes). A thread block
owns 64 keys and visits work tiles: the query heads of its group, and the blocks of 64
queries that meet its keys.

The producer warpgroup loads queries, by TMA. Each of the two consumer warpgroups has
half of the columns of dk and dv, in registers. They alternate (ping-pong) in making p
and dz of a work tile, transposed, [keys, queries], for both. So one computes
exponents while the other multiplies:

    consumer 0 | p, dz of 0 | dk, dv of 0 | p, dz of 2 | dk, dv of 1 | dk, dv of 2 | ...
    consumer 1 | p, dz of 1 | dk, dv of 0 | dk, dv of 1 | p, dz of 3 | dk, dv of 2 | ...

Shared memory: k, v [64, ...]; num_stages times q, do [64, ...], their log-sum-exps and
delta; for each consumer p and dz [keys, queries]. dk and dv leave in place of k and v.
Where they are parts in float32 (`division`) they leave in place of queries.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import division
from pallas_kernels.core.axes import Named
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, load_tree
from pallas_kernels.mosaic_gpu import memory, support
from pallas_kernels.mosaic_gpu.hopper import gradients
from pallas_kernels.mosaic_gpu.hopper.gradients import (
    F32,
    Inputs,
    KeyProgram,
    Saved,
    declare_stages,
)
from pallas_kernels.mosaic_gpu.plan import by_role, wait_until_stored
from pallas_kernels.mosaic_gpu.shared_memory import Tile

CONSUMERS = 2


def dkv(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named],
    outputs: tuple[Named, Named],
    *,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Gradients of k and v.

    Args:
      q, k, v, spec, saved, launch: as of `backward.backward`.
      outputs: shape structs of dk and dv.
    """
    inputs = Inputs(q, k, v, spec, Saved(*saved))
    layout = memory.TileGrid.of("dkv", inputs.with_outputs(outputs), launch)
    results = [division.partial(x, layout.parts) for x in outputs]
    in_float32 = results[0].dtype != k.dtype
    plan = Plan(launch, layout, CONSUMERS, q.dtype, in_float32)
    found = plan.call(
        by_role(Program.start, gradients.load, _compute),
        inputs.with_visits(layout),
        results,
        refs=Refs.declare(plan),
        name="flash2_dkv",
    )
    return division.summed(found, outputs)


@dataclasses.dataclass(frozen=True)
class Plan(gradients.Plan):
    """The plan of this kernel.

    Attributes:
      in_float32: whether dk and dv are, which are parts then.
    """

    in_float32: bool

    @property
    def pair_block(self) -> dict[str, int]:
        return {"s": self.block_kv, "t": self.block_q}

    @property
    def halves(self) -> dict[str, int]:
        """Columns of dk (`h`) and of dv (`d`) that a consumer makes."""
        return {head: self.width[head] // CONSUMERS for head in "hd"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs:
    """Shared memory of a thread block: the order of the fields is that of addresses.

    Attributes:
      delta: [block_q] in each stage.
      do_or_dv: do, [block_q, Hv] in each stage; if results are in float32, then dv,
        [block_kv, Hv].
      do_full, do_empty: barriers of the stages of do and delta (`pipeline.Pipeline`).
      dz: the gradient of scores of a work tile from each consumer, [block_kv, block_q].
      k: [1, block_kv, H].
      keys_full: the barrier at which k and v arrive.
      lse: [block_q] in each stage.
      p: the probabilities of a work tile from each consumer, [block_kv, block_q].
      pairs_full: a barrier for each of them, at which its consumer arrives.
      pairs_empty: a barrier for each of them, at which both consumers arrive when they
        have read it.
      q_or_dk: q, [block_q, H] in each stage; then dk, likewise.
      q_full, q_empty: barriers of the stages of q and lse.
      v: [1, block_kv, Hv].
    """

    delta: Tile
    do_or_dv: Tile
    do_full: Any
    do_empty: Any
    dz: Tile
    k: Tile
    keys_full: Any
    lse: Tile
    p: Tile
    pairs_full: Any
    pairs_empty: Any
    q_or_dk: Tile
    q_full: Any
    q_empty: Any
    v: Tile

    @classmethod
    def declare(cls, plan: Plan) -> Refs:
        rows, keys, stages = plan.block_q, plan.block_kv, plan.stages
        part = {x: math.gcd(plan.swizzled[x], plan.halves[x]) for x in "hd"}

        def rows_of(head: str, *shape: int, dtype=None) -> Tile:
            return plan.head_tile(head, *shape, dtype=dtype, swizzled=part[head])

        def queries(head: str) -> Tile:
            found = rows_of(head, stages, rows)
            if not plan.in_float32:
                return found
            result = rows_of(head, keys, dtype=F32)
            return Tile(support.in_one_place(found.forms, result.forms))

        def pairs(head: str) -> Tile:  # both operands of a product have one swizzle
            return Tile(support.tile((CONSUMERS, keys, rows), plan.dtype, part[head]))

        q, do = queries("h"), queries("d")
        barriers = functools.partial(plgpu.Barrier, num_barriers=CONSUMERS)
        return cls(
            **declare_stages(plan, q, do),
            do_or_dv=do,
            dz=pairs("h"),
            k=rows_of("h", 1, keys),
            p=pairs("d"),
            pairs_full=barriers(num_arrivals=1),
            pairs_empty=barriers(num_arrivals=CONSUMERS),
            q_or_dk=q,
            v=rows_of("d", 1, keys),
        )

    @property
    def q(self) -> Tile:
        return Tile(self.q_or_dk.ref)

    @property
    def do(self) -> Tile:
        return Tile(self.do_or_dv.ref)

    @property
    def dk(self):
        """Where dk leaves from: the place of q if it is in float32, else that of k."""
        return _result(self.q_or_dk, self.k)

    @property
    def dv(self):
        return _result(self.do_or_dv, self.v)


def _result(stages: Tile, operand: Tile):
    """The second form of stages that have two, else the tile of an operand."""
    has_two = isinstance(stages.forms, tuple)
    return stages.forms[1] if has_two else operand.ref.at[0]


class Program(KeyProgram):
    """A thread block, in which both consumers own all of its keys."""

    plan: Plan
    refs: Refs


@dataclasses.dataclass(frozen=True)
class Consumer(gradients.Consumer):
    """A consumer warpgroup.

    Attributes:
      spec: with what varies along its keys loaded.
      count: how many work tiles there are.
      columns: its own, of dk (`h`) and of dv (`d`).
    """

    program: Program
    spec: AttentionSpec
    count: Any
    columns: dict[str, Any]

    @classmethod
    def start(cls, program: Program) -> Consumer:
        spec = load_tree(program.spec, ("s", "t"), program.block)
        count, halves = support.opaque(program.tiles.count), program.plan.halves
        columns = {x: pl.ds(program.warpgroup * n, n) for x, n in halves.items()}
        return cls(program, spec, count, columns)


def _compute(program: Program) -> None:
    """The role of a consumer: it makes its columns of dk and dv."""
    consumer, plan = Consumer.start(program), program.plan
    plgpu.barrier_wait(program.refs.keys_full)
    accumulators = (
        plgpu.WGMMAAccumulatorRef((plan.block_kv, n), F32) for n in plan.halves.values()
    )
    dk, dv = pl.run_scoped(functools.partial(_walk, consumer), *accumulators)
    plan.sync_consumers()  # both have read keys and values
    _store(consumer, dk, dv)


def _walk(consumer: Consumer, dk_acc, dv_acc) -> tuple[jax.Array, jax.Array]:
    """This consumer's columns of dk and dv, over the spec's units.

    These are `AttentionSpec.gradient_unit` and `dropout_scale`.
    """
    first = consumer.program.warpgroup
    pl.when(first < consumer.count)(lambda: _make_pairs(consumer, first))

    @pl.loop(0, consumer.count)
    def _(tile):
        _visit(consumer, dk_acc, dv_acc, support.opaque(tile))

    return dk_acc[...], dv_acc[...]


def _visit(consumer: Consumer, dk_acc, dv_acc, tile) -> None:
    """Adds a work tile to this consumer's columns of dk and dv.

    The consumer that made its pairs then makes those of the next work tile but one.
    """
    program, refs = consumer.program, consumer.refs
    queries, outputs = program.query_pipeline, program.do_pipeline
    slot = _maker(tile)

    @pl.when(slot != program.warpgroup)
    def _():
        queries.wait(tile)
        outputs.wait(tile)

    plgpu.barrier_wait(refs.pairs_full.at[slot])
    do_own = outputs.at(tile).do.ref.at[:, consumer.columns["d"]]
    q_own = queries.at(tile).q.ref.at[:, consumer.columns["h"]]
    plgpu.wgmma(dv_acc, refs.p.ref.at[slot], do_own)
    plgpu.wgmma(dk_acc, refs.dz.ref.at[slot], q_own)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(refs.pairs_empty.at[slot])
    queries.release(tile)
    outputs.release(tile)
    coming = tile + CONSUMERS

    @pl.when((slot == program.warpgroup) & (coming < consumer.count))
    def _():
        _make_pairs(consumer, coming)


def _maker(tile):
    """Which consumer makes p and dz of a work tile, and so in which slot they are."""
    return lax.rem(tile, jnp.int32(CONSUMERS))


def _make_pairs(consumer: Consumer, tile) -> None:
    """Puts p and dz of a work tile where both consumers read them."""
    program, refs = consumer.program, consumer.refs
    slot, place = _maker(tile), program.tiles.place(tile)
    there, masked = program.tiles.at(place), program.tiles.masked(place)
    block = program.block
    spec = load_tree(consumer.spec, ("s", "t"), {**block, "n": there["n"]})
    where = {**there, "s": block["s"]}
    products = functools.partial(_pairs, program, spec, where, masked, tile, slot)
    p, dz = pl.run_scoped(products, *[program.plan.accumulator] * 2)
    refs.p.ref.at[slot][...] = p
    refs.dz.ref.at[slot][...] = dz
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.pairs_full.at[slot])


def _pairs(program: Program, spec, where, masked, tile, slot, qk_acc, dp_acc):
    """p and dz of a work tile, from the products k q^T and v do^T.

    Args:
      spec, where: of its pairs.
      masked: whether some of these may be masked.
      slot: where p and dz will be put.
    """
    refs, queries, outputs = program.refs, program.query_pipeline, program.do_pipeline
    q, do = queries.at(tile).q.ref, outputs.at(tile).do.ref
    queries.wait(tile)
    plgpu.wgmma(qk_acc, _in_loop(refs.k, tile), support.transposed(q))
    outputs.wait(tile)
    plgpu.wgmma(dp_acc, _in_loop(refs.v, tile), support.transposed(do))
    qk = plgpu.wgmma_accumulator_load(qk_acc, wait_n=1)
    again = program.recompute(spec, where, masked, tile, qk)
    p = again.dropped

    # The compiler moves nothing across this branch, so that exponents are computed
    # while the product for dp runs.
    @pl.when(tile >= CONSUMERS)
    def _():
        plgpu.barrier_wait(refs.pairs_empty.at[slot])

    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
    delta = program.delta(again.pairs, tile)
    dtype = program.plan.dtype
    return p.astype(dtype), again.dz(dp, delta).astype(dtype)


def _in_loop(tiles: Tile, i):
    """The one tile that there is, addressed anew in every step i of a loop."""
    return tiles.ref.at[support.keep_in_loop(0, i)]


def _store(consumer: Consumer, dk: jax.Array, dv: jax.Array) -> None:
    """dk and dv of the block of keys go to global memory.

    Args:
      dk, dv: what `_walk` gave.
    """
    program, refs = consumer.program, consumer.refs
    (dk_out, dv_out), columns = program.outputs, consumer.columns
    dk, dv = dk * program.spec.gradient_unit, dv * program.spec.dropout_scale
    refs.dk.at[:, columns["h"]][...] = dk.astype(dk_out.dtype)
    refs.dv.at[:, columns["d"]][...] = dv.astype(dv_out.dtype)
    plgpu.commit_smem()
    program.plan.sync_consumers()

    @pl.when(program.warpgroup == 0)
    def _():
        plgpu.copy_smem_to_gmem(refs.dk, dk_out.at(program.block))
        plgpu.copy_smem_to_gmem(refs.dv, dv_out.at(program.block))
        wait_until_stored()
