"""The backward kernel for Hopper: one pass of five products (Dao 2023, algorithm 2).

Grid: (key blocks, key/value heads, batch axes). A program owns a block
of keys and loops over the query heads of its group and the blocks of queries that meet
its keys. Its warpgroups compute 64 keys each, transposed, [keys, queries]: dk and dv
are summed in their registers. p goes to its product from registers, dz from shared
memory, of which all warpgroups together make dq of the block. The products of the next
queries and keys run while dq goes to shared memory. One more warpgroup has a warp that
loads, by TMA, and one that adds dq to global memory, by TMA too, in float32. Of heads
above 128 there is no room for that, and p is rounded before dz is made of it.

The additions to a block of dq have one order, that of the key blocks which meet it, so
that the same inputs give the same bits. A semaphore of the block counts them, and the
first one stores. A program waits only for programs of lower indices, which a GPU starts
before it.

Shared memory: k, v [block_kv, ...]; num_stages times q, do [block_q, ...], their
log-sum-exps and delta, and dz [block_kv, block_q]; twice dq [block_q, H] in float32.
Of heads above 128 there is one tile of dz and one of dq. Heads are as wide as
`tuning.head_tiles`: beyond an array 0 is read, and nothing is written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import division, program
from pallas_kernels.core.axes import Named
from pallas_kernels.core.ranges import minimum
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.core.visits import visited_rows
from pallas_kernels.layout import Launch, Rows, load_tree
from pallas_kernels.mosaic_gpu import memory, support, tuning
from pallas_kernels.mosaic_gpu.ring import Ring
from pallas_kernels.mosaic_gpu.tiles import Tiles, visits_of
from pallas_kernels.mosaic_gpu.tuning import ROWS

_F32 = jnp.float32
# Blocks of dq on their way to global memory, by `tuning.computes_ahead`.
_DQ_TILES = {True: 2, False: 1}
# Registers of a thread that loads and adds, and of one that computes.
_REGISTERS = 24, 240


def backward(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named],
    outputs: tuple[Named, Named, Named],
    *,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Gradients of q, over `AttentionSpec.gradient_unit`, and of k and v.

    Blocks of dq that no keys meet are not written; where there are more keys than
    these (`AttentionSpec.is_part`) they are 0.

    Args:
      q, k, v, spec, launch: as in the forward; 0 lies beyond the spec's lengths.
      saved: lse_log2 and delta (axis `t` among others), and do (`t d`).
      outputs: shape structs of dq, in float32, dk and dv.
    """
    blocks = launch.blocks
    operands = [q, k, v, *jax.tree.leaves(spec), *saved, *outputs]
    layout = memory.Layout.of("dkv", operands, launch, by_block=True)
    of_q, *of_kv = outputs
    results = of_q, *(division.partial(x, layout.parts) for x in of_kv)
    width = tuning.head_tiles(layout.size)
    elements = {x: memory.head_elements(layout.size[x]) for x in "hd"}
    wider = {x: width[x] for x, n in elements.items() if n < width[x]}
    rows, keys = blocks.block_q, blocks.block_kv
    computing = keys // ROWS
    parts = _parts_of_dq(rows, width["h"], computing)
    ahead = tuning.computes_ahead(width)
    dq_tiles = _DQ_TILES[ahead]
    together = computing + 2  # a named barrier
    visits = visits_of(spec, layout)

    def kernel(inputs, outputs, refs):
        q, k, v, spec, (lse_log2, delta, do), visits = inputs
        dq, dk, dv = outputs
        me = lax.axis_index("warpgroup")
        ring = Ring(refs, blocks.num_stages)
        spec, where = program.key_program(program.with_end(spec, layout), layout)
        tiles = Tiles.of(spec, where, layout, visits)
        counts = pl.get_global(plgpu.SemaphoreType.REGULAR((tiles.all_sums,)))
        start = where["s"].start

        def load():
            own = {**where, "s": Rows(start, keys)}
            plgpu.copy_gmem_to_smem(k.at(own), refs["k"].at[0], refs["own here"])
            plgpu.copy_gmem_to_smem(v.at(own), refs["v"].at[0], refs["own here"])

            @pl.loop(0, tiles.count)
            def _(tile):
                here = tiles.at(tile)
                ring.fill(tile, q=q.at(here), lse=lse_log2.at(here))
                ring.fill(tile, do=do.at(here), delta=delta.at(here))

        def add():
            @pl.loop(0, tiles.count)
            def _(tile):
                here, before = tiles.at(tile), tiles.before(tile)
                slot = lax.rem(tile, jnp.int32(dq_tiles))
                source, seen = refs["dq"].at[slot], counts.at[tiles.number(tile)]
                plgpu.barrier_wait(refs["dq here"].at[slot])
                plgpu.semaphore_wait(seen, before, decrement=False, memory_scope="gpu")

                @pl.when(before == 0)
                def _():
                    plgpu.copy_smem_to_gmem(source, dq.at(here))

                @pl.when(before > 0)
                def _():
                    plgpu.copy_smem_to_gmem(source, dq.at(here), reduction_op="add")

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(refs["dq read"].at[slot])
                plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(seen, 1, memory_scope="gpu")

        @pl.when(me == computing)
        def move():
            plgpu.set_max_registers(_REGISTERS[0], action="decrease")

            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(load)
                pl.when(warp == 1)(add)

        @pl.when(me < computing)
        def compute():
            plgpu.set_max_registers(_REGISTERS[1], action="increase")
            mine = pl.ds(me * ROWS, ROWS)
            own = {**where, "s": Rows(start + me * ROWS, ROWS)}
            own_spec = load_tree(spec, ("s", "t"), own)
            block_sum = plgpu.ACC((ROWS, rows), _F32)

            def tiles_of_keys(tile):
                # Their index is 0. If the compiler knew, it would hold addresses in
                # registers, of which there are none to spare.
                zero = lax.shift_right_logical(tile, jnp.int32(30))
                k_block = refs["k"].at[zero]
                return k_block, k_block.at[mine], refs["v"].at[zero, mine]

            def vector(name, tile):
                return support.load_vector(ring.tile(name, tile), 1, shared=True)

            def dq_slot(tile):
                return lax.rem(tile + dq_tiles, jnp.int32(dq_tiles))

            def all_computing():
                support.named_barrier("sync", jnp.int32(together), computing)

            def multiply(qk_sum, tile, k_own):
                plgpu.wgmma(qk_sum, k_own, support.transposed(ring.tile("q", tile)))

            def first_products(tile):
                def issue(qk_sum):
                    multiply(qk_sum, tile, tiles_of_keys(tile)[1])
                    return plgpu.wgmma_accumulator_load(qk_sum, wait_n=0)

                ring.wait("q", tile)
                return pl.run_scoped(issue, block_sum)

            def pairs_of(tile, qk):
                """Of a tile, what makes p of its scores, and its change of rows."""
                there, masked = tiles.at(tile), tiles.masked(tile)
                head_spec, _, _ = program.query_head(own_spec, own, layout, there["n"])
                here = {**there, "s": own["s"]}
                pairs = program.pairs(head_spec, here, ("s", "t"), masked, launch)
                lse = pairs.along(vector("lse", tile), "t")
                return pairs, pairs.recompute(pairs.scores_of(qk, q.dtype), lse)

            def change(pairs, tile):
                return pairs.along(vector("delta", tile), "t")

            def issue_dp(dp_sum, tile):
                v_own, do_tile = tiles_of_keys(tile)[2], ring.tile("do", tile)
                plgpu.wgmma(dp_sum, v_own, support.transposed(do_tile))

            def issue_dv(dv_sum, p, tile):
                plgpu.wgmma(dv_sum, p.astype(do.dtype), ring.tile("do", tile))

            def issue_dk(dk_sum, dz_tile, tile):
                plgpu.wgmma(dk_sum, dz_tile.at[mine], ring.tile("q", tile))

            def issue_dq(dq_sum, dz_tile, tile):
                left, right = parts(me, dz_tile, tiles_of_keys(tile)[0])
                plgpu.wgmma(dq_sum, support.transposed(left), right)

            def wait_for_dq(tile):
                """Until the place of its dq is free."""

                @pl.when(tile >= dq_tiles)
                def _():
                    plgpu.barrier_wait(refs["dq read"].at[dq_slot(tile)])

            def hand_over(part, tile):
                slot = dq_slot(tile)
                parts.of_sum(me, refs["dq"].at[slot])[...] = part
                plgpu.commit_smem()
                pl.when(tile >= 0)(
                    lambda: plgpu.barrier_arrive(refs["dq here"].at[slot])
                )

            def visit(dk_sum, dv_sum, tile, nothing):
                """All products of a tile, in fewer registers."""
                qk = first_products(tile)

                def of_pairs(dp_sum):
                    """dz, of a rounded p, whose product runs."""
                    pairs, again = pairs_of(tile, qk)
                    again = again._replace(p=again.p.astype(q.dtype).astype(_F32))
                    p = again.dropped.astype(do.dtype)
                    ring.wait("do", tile)
                    issue_dv(dv_sum, p, tile)
                    issue_dp(dp_sum, tile)
                    dp = plgpu.wgmma_accumulator_load(dp_sum, wait_n=0)
                    return again.dz(dp, change(pairs, tile))

                dz = pl.run_scoped(of_pairs, block_sum)
                all_computing()  # they have read the last one
                dz_tile = refs["dz"].at[0]
                dz_tile[mine] = dz.astype(q.dtype)
                plgpu.commit_smem()
                issue_dk(dk_sum, dz_tile, tile)
                all_computing()
                wait_for_dq(tile)
                plgpu.wgmma_wait(0)
                ring.release("do", tile)

                def of_queries(dq_sum):
                    issue_dq(dq_sum, dz_tile, tile)
                    part = plgpu.wgmma_accumulator_load(dq_sum, wait_n=0)
                    more = tile + 1 < tiles.count
                    pl.when(more)(lambda: ring.release("q", tile))
                    hand_over(part, tile)

                pl.run_scoped(of_queries, plgpu.ACC(parts.shape, _F32))
                return nothing

            def visit_ahead(dk_sum, dv_sum, tile, qk):
                """dk and dv of a tile, dq of the one before, scores of the next."""
                before = tile - 1
                after = minimum(tile + 1, tiles.count - 1)
                more = tile + 1 < tiles.count

                def of_pairs(dp_sum):
                    """p, and dz. The product for dp runs beside the exponents."""
                    ring.wait("do", tile)
                    issue_dp(dp_sum, tile)
                    pairs, again = pairs_of(tile, qk)
                    dropped, rows = again.dropped, change(pairs, tile)
                    dp = plgpu.wgmma_accumulator_load(dp_sum, wait_n=0)
                    return dropped, again.dz(dp, rows)

                p, dz = pl.run_scoped(of_pairs, block_sum)
                slot, dz_tile = ring.slot(tile), refs["dz"].at[ring.slot(tile)]

                @pl.when(tile >= blocks.num_stages)
                def _():  # dz of the tile that was there
                    plgpu.barrier_wait(refs["dz read"].at[slot])

                dz_tile[mine] = dz.astype(q.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(refs["dz here"].at[slot])

                def products(dq_sum, qk_sum):
                    issue_dv(dv_sum, p, tile)
                    issue_dk(dk_sum, dz_tile, tile)
                    there = ring.slot(before + blocks.num_stages)
                    last_dz = refs["dz"].at[there]

                    @pl.when(tile > 0)
                    def _():
                        plgpu.barrier_wait(refs["dz here"].at[there])

                    pl.when(more)(lambda: ring.wait("q", after))
                    wait_for_dq(before)
                    issue_dq(dq_sum, last_dz, tile)
                    multiply(qk_sum, after, tiles_of_keys(tile)[1])
                    part = plgpu.wgmma_accumulator_load(dq_sum, wait_n=1)
                    ring.release("do", tile)
                    pl.when(more)(lambda: ring.release("q", tile))

                    @pl.when(tile > 0)
                    def _():
                        plgpu.barrier_arrive(refs["dz read"].at[there])

                    hand_over(part, before)
                    return plgpu.wgmma_accumulator_load(qk_sum, wait_n=0)

                dq_sum = plgpu.ACC(parts.shape, _F32)
                return pl.run_scoped(products, dq_sum, block_sum)

            def last_dq(tile):
                slot = ring.slot(tile)
                plgpu.barrier_wait(refs["dz here"].at[slot])
                wait_for_dq(tile)

                def of_queries(dq_sum):
                    issue_dq(dq_sum, refs["dz"].at[slot], tile)
                    part = plgpu.wgmma_accumulator_load(dq_sum, wait_n=0)
                    hand_over(part, tile)

                pl.run_scoped(of_queries, plgpu.ACC(parts.shape, _F32))

            def walk(dk_sum, dv_sum):
                first, count = jnp.int32(0), support.unknown(tiles.count)

                @pl.when(tiles.count > 0)
                def _():
                    each = visit_ahead if ahead else visit
                    qk = first_products(first) if ahead else first
                    step = functools.partial(each, dk_sum, dv_sum)
                    lax.fori_loop(first, count, step, qk)
                    if ahead:
                        last_dq(tiles.count - 1)

                return dk_sum[...], dv_sum[...]

            plgpu.barrier_wait(refs["own here"])
            sums = (plgpu.ACC((ROWS, width[x]), _F32) for x in "hd")
            dk_block, dv_block = pl.run_scoped(walk, *sums)
            all_computing()  # they have read the keys
            k_own, v_own = refs["k"].at[0, mine], refs["v"].at[0, mine]
            wide = dk.dtype != k.dtype
            if wide:  # in float32: where dq was on its way
                k_own = v_own = refs["dq"].at[me, pl.ds(0, ROWS)]

                @pl.when(tiles.count > me)
                def _():
                    plgpu.barrier_wait(refs["dq read"].at[me])

            k_own[...] = (dk_block * spec.gradient_unit).astype(dk.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_own, dk.at(own))
            if wide:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            v_own[...] = (dv_block * spec.dropout_scale).astype(dv.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(v_own, dv.at(own))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    found = memory.call(
        kernel,
        layout,
        (q, k, v, spec, saved, visits),
        results,
        block={"t": rows, "s": ROWS, **wider},
        columns="t",
        scratch=_shared(blocks, width, elements, ahead, q.dtype),
        warpgroups=computing + 1,
        name="flash2_backward",
    )
    dq, *dkv = found
    if spec.is_part:
        dq = _without_unwritten(
            dq, visited_rows(spec, layout.size, layout.rows, visits)
        )
    return dq.value, *division.summed(dkv, of_kv)


def _without_unwritten(dq: Named, written: Named) -> Named:
    axes = tuple(None if a == "h" else a for a in dq.axes)
    return Named(jnp.where(written.to(axes), dq.value, 0.0), dq.axes)


class _ByColumns:
    """Each warpgroup makes all rows of some columns of dq."""

    def __init__(self, rows: int, h: int, computing: int):
        self.shape = rows, h // computing

    def _own(self, me):
        return pl.ds(me * self.shape[1], self.shape[1])

    def __call__(self, me, dz, k):
        return dz, k.at[:, self._own(me)]

    def of_sum(self, me, dq):
        return dq.at[:, self._own(me)]


class _ByRows:
    """Each warpgroup makes all columns of 64 rows of dq."""

    def __init__(self, h: int):
        self.shape = ROWS, h

    def __call__(self, me, dz, k):
        return dz.at[:, pl.ds(me * ROWS, ROWS)], k

    def of_sum(self, me, dq):
        return dq.at[pl.ds(me * ROWS, ROWS)]


def _parts_of_dq(rows: int, h: int, computing: int) -> _ByRows | _ByColumns:
    if rows == ROWS * computing:
        return _ByRows(h)
    return _ByColumns(rows, h, computing)


def _shared(
    blocks, width: Mapping[str, int], elements: Mapping[str, int], ahead: bool, dtype
) -> dict[str, Any]:
    """Tiles and barriers of a program, by name.

    Args:
      width: of tiles of heads `h` and `d`.
      elements: of these heads.
      ahead: whether the products of the next queries are made early.
    """
    computing, stages = blocks.block_kv // ROWS, blocks.num_stages
    rows, keys = blocks.block_q, blocks.block_kv
    columns = dict(elements)
    if not ahead:  # a warpgroup makes some columns of dq
        columns["h"] = math.gcd(elements["h"], width["h"] // computing)

    def of_heads(name, count, size):
        return support.tile((count, size, width[name]), dtype, columns[name])

    both = math.gcd(*columns.values())  # parts of dk and dv pass through it, too
    vector = plgpu.SMEM((stages, rows), _F32)
    of_q = {"q": of_heads("h", stages, rows), "lse": vector}
    of_do = {"do": of_heads("d", stages, rows), "delta": vector}
    dq_tiles = _DQ_TILES[ahead]
    return {
        "k": of_heads("h", 1, keys),
        "v": of_heads("d", 1, keys),
        # Both operands of a product have one swizzle.
        "dz": support.tile((stages if ahead else 1, keys, rows), dtype, columns["h"]),
        "dq": support.tile((dq_tiles, rows, width["h"]), _F32, both),
        "dz here": plgpu.Barrier(num_barriers=stages, num_arrivals=computing),
        "dz read": plgpu.Barrier(num_barriers=stages, num_arrivals=computing),
        "own here": plgpu.Barrier(num_barriers=(), num_arrivals=2),
        "dq here": plgpu.Barrier(num_barriers=dq_tiles, num_arrivals=computing),
        "dq read": plgpu.Barrier(num_barriers=dq_tiles, num_arrivals=1),
        **Ring.shared(of_q, stages, readers=computing),
        **Ring.shared(of_do, stages, readers=computing),
    }
