"""Gradients of keys and values for Hopper, by themselves (Dao 2023, algorithm 2).

For wide heads (`tuning.makes_dq_apart`); `dq` makes the gradient of queries. Grid: (key
blocks, key/value heads, batch axes). A program owns 64 keys and loops over the query
heads of its group and the blocks of 64 queries that meet its keys. Two warpgroups have
half the columns of dk and dv each, in registers. They take turns at making p and dz of
a block of queries, transposed, [keys, queries], for both: so one makes exponents while
the other multiplies. One more warpgroup loads queries, by TMA.

Shared memory: k, v [64, ...]; num_stages times q, do [64, ...], their log-sum-exps and
delta; for each warpgroup p and dz [keys, queries]. dk and dv leave in place of k and v,
or, where they are parts in float32 (`division`), of queries.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import division, program
from pallas_kernels.core.axes import Named
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows, load_tree
from pallas_kernels.mosaic_gpu import memory, support, tuning
from pallas_kernels.mosaic_gpu.ring import Ring
from pallas_kernels.mosaic_gpu.tiles import Tiles, visits_of

_F32 = jnp.float32
_COMPUTING = 2  # warpgroups
# A named barrier: the first ones are the block's and its warpgroups'.
_TOGETHER = _COMPUTING + 2


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
    blocks = launch.blocks
    operands = [q, k, v, *jax.tree.leaves(spec), *saved, *outputs]
    layout = memory.Layout.of("dkv", operands, launch)
    results = [division.partial(x, layout.parts) for x in outputs]
    wide = results[0].dtype != k.dtype
    rows, keys = blocks.block_q, blocks.block_kv
    width = tuning.head_tiles(layout.size)
    elements, wider = memory.of_tiles(layout.size, width)
    visits = visits_of(spec, layout)

    def kernel(inputs, outputs, refs):
        q, k, v, spec, (lse_log2, delta, do), visits = inputs
        dk, dv = outputs
        me = lax.axis_index("warpgroup")
        ring = Ring(refs, blocks.num_stages)
        spec, where = program.key_program(program.with_end(spec, layout), layout)
        own = {**where, "s": Rows(where["s"].start, keys)}
        tiles = Tiles.of(spec, where, layout, visits)

        @pl.when(me == _COMPUTING)
        def load():
            plgpu.set_max_registers(tuning.REGISTERS[_COMPUTING][0], action="decrease")
            plgpu.copy_gmem_to_smem(k.at(own), refs["k"].at[0], refs["own here"])
            plgpu.copy_gmem_to_smem(v.at(own), refs["v"].at[0], refs["own here"])

            @pl.loop(0, tiles.count)
            def _(tile):
                here = tiles.at(tile)
                ring.fill(tile, q=q.at(here), lse=lse_log2.at(here))
                ring.fill(tile, do=do.at(here), delta=delta.at(here))

        @pl.when(me < _COMPUTING)
        def compute():
            plgpu.set_max_registers(tuning.REGISTERS[_COMPUTING][1], action="increase")
            own_spec = load_tree(spec, ("s", "t"), own)
            count = support.opaque(tiles.count)
            block_sum = plgpu.ACC((keys, rows), _F32)
            columns = {x: pl.ds(me * half, half) for x, half in _halves(width).items()}

            def turn(tile):
                """Which warpgroup makes p and dz of a tile, and where they are put."""
                return lax.rem(tile, jnp.int32(_COMPUTING))

            def keys_at(name, tile):
                return refs[name].at[support.keep_in_loop(0, tile)]

            def vector(name, tile):
                return support.load_vector(ring.tile(name, tile), 1, shared=True)

            def make_pairs(tile):
                """p and dz of a tile, for both warpgroups."""
                slot, there = turn(tile), tiles.at(tile)
                head_spec, _, _ = program.query_head(own_spec, own, layout, there["n"])
                here = {**there, "s": own["s"]}
                q_tile, do_tile = ring.tile("q", tile), ring.tile("do", tile)

                def products(qk_sum, dp_sum):
                    ring.wait("q", tile)
                    plgpu.wgmma(qk_sum, keys_at("k", tile), support.transposed(q_tile))
                    ring.wait("do", tile)
                    plgpu.wgmma(dp_sum, keys_at("v", tile), support.transposed(do_tile))
                    qk = plgpu.wgmma_accumulator_load(qk_sum, wait_n=1)
                    masked = tiles.masked(tile)
                    pairs = program.pairs(head_spec, here, ("s", "t"), masked, launch)
                    lse = pairs.along(vector("lse", tile), "t")
                    again = pairs.recompute(pairs.scores_of(qk, q.dtype), lse)
                    p = again.dropped

                    # The compiler moves nothing across this branch: exponents are made
                    # while the product for dp runs.
                    @pl.when(tile >= _COMPUTING)
                    def _():
                        plgpu.barrier_wait(refs["pairs read"].at[slot])

                    dp = plgpu.wgmma_accumulator_load(dp_sum, wait_n=0)
                    change = pairs.along(vector("delta", tile), "t")
                    return p.astype(do.dtype), again.dz(dp, change).astype(q.dtype)

                p, dz = pl.run_scoped(products, block_sum, block_sum)
                refs["p"].at[slot][...] = p
                refs["dz"].at[slot][...] = dz
                plgpu.commit_smem()
                plgpu.barrier_arrive(refs["pairs here"].at[slot])

            def visit(dk_sum, dv_sum, tile):
                """Own columns of dk and dv of a tile; in turn, pairs of one to come."""
                slot = turn(tile)

                @pl.when(slot != me)
                def _():
                    ring.wait("q", tile)
                    ring.wait("do", tile)

                plgpu.barrier_wait(refs["pairs here"].at[slot])
                do_own = ring.tile("do", tile).at[:, columns["d"]]
                q_own = ring.tile("q", tile).at[:, columns["h"]]
                plgpu.wgmma(dv_sum, refs["p"].at[slot], do_own)
                plgpu.wgmma(dk_sum, refs["dz"].at[slot], q_own)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(refs["pairs read"].at[slot])
                ring.release("q", tile)
                ring.release("do", tile)
                after = tile + _COMPUTING

                @pl.when((slot == me) & (after < count))
                def _():
                    make_pairs(after)

            def walk(dk_sum, dv_sum):
                pl.when(me < count)(lambda: make_pairs(me))

                @pl.loop(0, count)
                def _(tile):
                    visit(dk_sum, dv_sum, support.opaque(tile))

                return dk_sum[...], dv_sum[...]

            plgpu.barrier_wait(refs["own here"])
            sums = (plgpu.ACC((keys, half), _F32) for half in _halves(width).values())
            dk_block, dv_block = pl.run_scoped(walk, *sums)
            # Both have read keys and values.
            support.named_barrier("sync", jnp.int32(_TOGETHER), _COMPUTING)
            dk_block, dv_block = (
                dk_block * spec.gradient_unit,
                dv_block * spec.dropout_scale,
            )
            dk_tile, dv_tile = (
                (refs["dk"], refs["dv"]) if wide else (refs["k"].at[0], refs["v"].at[0])
            )
            dk_tile.at[:, columns["h"]][...] = dk_block.astype(dk.dtype)
            dv_tile.at[:, columns["d"]][...] = dv_block.astype(dv.dtype)
            plgpu.commit_smem()
            support.named_barrier("sync", jnp.int32(_TOGETHER), _COMPUTING)

            @pl.when(me == 0)
            def _():
                plgpu.copy_smem_to_gmem(dk_tile, dk.at(own))
                plgpu.copy_smem_to_gmem(dv_tile, dv.at(own))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    found = memory.call(
        kernel,
        layout,
        (q, k, v, spec, saved, visits),
        results,
        block={"t": rows, "s": keys, **wider},
        tiles=width,
        scratch=_shared(blocks, width, elements, q.dtype, wide),
        warpgroups=_COMPUTING + 1,
        name="flash2_dkv",
    )
    return division.summed(found, outputs)


def _halves(width) -> dict[str, int]:
    """Columns of a warpgroup."""
    return {name: width[name] // _COMPUTING for name in "hd"}


def _shared(blocks, width, elements, dtype, wide: bool) -> dict:
    """Tiles and barriers of a program, by name.

    Args:
      wide: whether dk and dv are float32.
    """
    rows, keys, stages = blocks.block_q, blocks.block_kv, blocks.num_stages

    halves = _halves(width)
    part = {name: math.gcd(elements[name], halves[name]) for name in "hd"}

    def of_heads(name, *shape, dtype=dtype):
        return support.tile((*shape, width[name]), dtype, part[name])

    def of_queries(tile, gradient, head):
        own = of_heads(head, stages, rows)
        if not wide:
            return {tile: own}
        there = of_heads(head, keys, dtype=_F32)
        return {f"{tile} or {gradient}": support.in_one_place(own, there)}

    vector = plgpu.SMEM((stages, rows), _F32)
    of_q = {**of_queries("q", "dk", "h"), "lse": vector}
    of_do = {**of_queries("do", "dv", "d"), "delta": vector}
    barrier = functools.partial(plgpu.Barrier, num_barriers=_COMPUTING)
    return {
        "k": of_heads("h", 1, keys),
        "v": of_heads("d", 1, keys),
        # Both operands of a product have one swizzle.
        "p": support.tile((_COMPUTING, keys, rows), dtype, part["d"]),
        "dz": support.tile((_COMPUTING, keys, rows), dtype, part["h"]),
        "own here": plgpu.Barrier(num_barriers=(), num_arrivals=2),
        "pairs here": barrier(num_arrivals=1),
        "pairs read": barrier(num_arrivals=_COMPUTING),
        **Ring.shared(of_q, stages, readers=_COMPUTING),
        **Ring.shared(of_do, stages, readers=_COMPUTING),
    }
