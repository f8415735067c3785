"""The backward kernel for Hopper: one pass of five products (Dao 2023, algorithm 2).

Grid: (key blocks, key/value heads, batch axes). A program owns a block
of keys and loops over the query heads of its group and the blocks of queries that meet
its keys. Its warpgroups compute 64 keys each, transposed, [keys, queries]: dk and dv
are summed in their registers. p goes to its product from registers, dz from shared
memory, of which all warpgroups together make dq of the block. The products of the next
queries and keys run while dq goes to shared memory. One more warpgroup has a warp that
loads, by TMA, and one or two that add dq to global memory, by TMA too, in float32.
Of heads above 128 there is no room for that, and p is rounded before dz is made of it.

The additions to a block of dq have one order, that of the key blocks which meet it, so
that the same inputs give the same bits. A semaphore of the block counts them, and the
first one stores. A program waits only for programs of lower indices, which a GPU starts
before it. Where much of the time would pass before all have had their first turn, dq is
the sum of a few sums, and every other program, or every fourth, adds to the same one.

Shared memory: k, v [block_kv, ...]; num_stages times q, do [block_q, ...], their
log-sum-exps and delta, and dz [block_kv, block_q]; twice dq [block_q, H] in float32.
Of heads above 128 there is one tile of dz and one of dq. Heads are as wide as
`tuning.head_tiles`: beyond an array 0 is read, and nothing is written.
"""

from __future__ import annotations

import dataclasses
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
from pallas_kernels.core.visits import blocks_of_keys_met
from pallas_kernels.layout import Launch, Rows, load_tree
from pallas_kernels.mosaic_gpu import clear_keys, memory, prefetch, support, tuning
from pallas_kernels.mosaic_gpu.ring import Ring
from pallas_kernels.mosaic_gpu.tiles import Tiles, visits_of
from pallas_kernels.mosaic_gpu.tuning import ROWS

_F32 = jnp.float32
_SUM = "w"  # the axis of the sums that dq is the sum of
# Blocks of dq on their way to global memory, by `tuning.computes_ahead`.
_DQ_TILES = {True: 2, False: 1}


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

    Blocks of dq that no keys meet may not be written; where there are more keys than
    these (`AttentionSpec.is_part`) they are 0.

    Args:
      q, k, v, spec, launch: as in the forward; queries and do are 0 beyond the spec's
        lengths.
      saved: lse_log2 and delta (axis `t` among others), and do (`t d`).
      outputs: shape structs of dq, in float32, dk and dv.
    """
    blocks = launch.blocks
    operands = [q, k, v, *jax.tree.leaves(spec), *saved, *outputs]
    alike = tuning.blocks_alike(spec)
    layout = memory.Layout.of(
        "dkv", operands, launch, by_block=True, blocks_alike=alike
    )
    of_q, *of_kv = outputs
    sums = tuning.sums_of_dq(spec, layout)
    of_sums = division.partial(of_q, {_SUM: sums} if sums > 1 else {})
    results = of_sums, *(division.partial(x, layout.parts) for x in of_kv)
    width = tuning.head_tiles(layout.size)
    elements, wider = memory.of_tiles(layout.size, width)
    rows, keys = blocks.block_q, blocks.block_kv
    computing = keys // ROWS
    parts = _parts_of_dq(rows, width["h"], computing)
    ahead = tuning.computes_ahead(width)
    waits_early = tuning.waits_early(width, spec)
    dq_tiles, adding = _DQ_TILES[ahead], tuning.warps_that_add(width)
    together = computing + 2  # a named barrier
    visits, drops_keys = visits_of(spec, layout), spec.drops_keys

    def kernel(inputs, outputs, refs):
        q, k, v, spec, (lse_log2, delta, do), visits = inputs
        dq, dk, dv = outputs
        me = lax.axis_index("warpgroup")
        ring = Ring(refs, blocks.num_stages)
        kept_keys, spec = spec.keys, dataclasses.replace(spec, keys=None)
        spec, where = program.key_program(program.with_end(spec, layout), layout)
        tiles = Tiles.of(spec, where, layout, visits)
        every = plgpu.SemaphoreType.REGULAR((tiles.all_sums * sums,))
        counts = pl.get_global(every)
        start = where["s"].start

        def load():
            own = {**where, "s": Rows(start, keys)}
            for name, x in (("k", k), ("v", v)):
                tile = support.copied(refs, name).at[0]
                plgpu.copy_gmem_to_smem(x.at(own), tile, refs["own here"])

            @pl.loop(0, tiles.count)
            def _(tile):
                here = tiles.at(tile)
                ring.fill(tile, q=q.at(here), lse=lse_log2.at(here))
                ring.fill(tile, do=do.at(here), delta=delta.at(here))

        def add(first: int):
            """dq of every tile, or of every other one where two warps add."""

            @pl.loop(first, tiles.count, step=adding)
            def _(tile):
                own, before = tiles.turn(tile, sums)
                here, number = tiles.at(tile), tiles.number(tile) * sums + own
                here |= {_SUM: own}
                slot = lax.rem(tile, jnp.int32(dq_tiles))
                source, seen = refs["dq"].at[slot], counts.at[number]
                plgpu.semaphore_wait(seen, before, decrement=False, memory_scope="gpu")
                plgpu.barrier_wait(refs["dq here"].at[slot])

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
            plgpu.set_max_registers(tuning.REGISTERS[computing][0], action="decrease")

            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(load)
                for n in range(adding):
                    pl.when(warp == 1 + n)(functools.partial(add, n))

        @pl.when(me < computing)
        def compute():
            plgpu.set_max_registers(tuning.REGISTERS[computing][1], action="increase")
            mine = pl.ds(me * ROWS, ROWS)
            own_keys = {"s": Rows(start + me * ROWS, ROWS)}
            own = {**where, **own_keys}
            own_spec = load_tree(spec, ("s", "t"), own)
            block_sum = plgpu.ACC((ROWS, rows), _F32)

            def tiles_of_keys(tile):
                at = support.keep_in_loop(0, tile)
                k_block = refs["k"].at[at]
                return k_block, k_block.at[mine], refs["v"].at[at, mine]

            def vector(name, tile):
                return support.load_vector(ring.tile(name, tile), 1, shared=True)

            def multiply(qk_sum, tile, k_own):
                plgpu.wgmma(qk_sum, k_own, support.transposed(ring.tile("q", tile)))

            def first_products(tile):
                def issue(qk_sum):
                    multiply(qk_sum, tile, tiles_of_keys(tile)[1])
                    return plgpu.wgmma_accumulator_load(qk_sum, wait_n=0)

                ring.wait("q", tile)
                return pl.run_scoped(issue, block_sum)

            def fetch(tile):
                """What each pair of a tile has in global memory, where registers do."""
                if not ahead:
                    return []
                return prefetch.fetch(
                    own_spec, ("s", "t"), {**tiles.at(tile), **own_keys}
                )

            def visit(dk_sum, dv_sum, tile, state):
                """Takes the products of keys and queries of a tile, makes the next."""
                qk, words = state
                qk = qk if ahead else first_products(tile)
                k_block, k_own, v_own = tiles_of_keys(tile)
                there, masked = tiles.at(tile), tiles.masked(tile)
                head_spec, _, _ = program.query_head(own_spec, own, layout, there["n"])
                head_spec = (
                    prefetch.with_fetched(head_spec, words) if words else head_spec
                )
                here = {**there, **own_keys}
                q_tile, do_tile = ring.tile("q", tile), ring.tile("do", tile)
                dz_tile = refs["dz"].at[ring.slot(tile) if ahead else 0]
                slot = lax.rem(tile, jnp.int32(dq_tiles))
                more = tile + 1 < tiles.count
                after = minimum(tile + 1, tiles.count - 1)

                def next_queries():
                    pl.when(more)(lambda: ring.wait("q", after))

                def recomputed():
                    pairs = program.pairs(head_spec, here, ("s", "t"), masked, launch)
                    lse = pairs.along(vector("lse", tile), "t")
                    return pairs, pairs.recompute(pairs.scores_of(qk, q.dtype), lse)

                def issue_dp(dp_sum):
                    plgpu.wgmma(dp_sum, v_own, support.transposed(do_tile))

                def issue_dv(p):
                    plgpu.wgmma(dv_sum, p.astype(do.dtype), do_tile)

                def at_once(dp_sum):
                    """p, and dz. The product for dp runs beside the exponents."""
                    ring.wait("do", tile)
                    issue_dp(dp_sum)
                    pairs, again = recomputed()
                    p = again.dropped
                    change = pairs.along(vector("delta", tile), "t")
                    if waits_early:
                        # The compiler moves nothing across this branch: exponents are
                        # made while the product runs, and not after it.
                        next_queries()
                    dp = plgpu.wgmma_accumulator_load(dp_sum, wait_n=0)
                    return p, again.dz(dp, change)

                def one_by_one(dp_sum):
                    """dz, in fewer registers: of a rounded p, whose product runs."""
                    pairs, again = recomputed()
                    again = again._replace(p=again.p.astype(q.dtype).astype(_F32))
                    p = again.dropped.astype(do.dtype)
                    ring.wait("do", tile)
                    issue_dv(p)
                    issue_dp(dp_sum)
                    dp = plgpu.wgmma_accumulator_load(dp_sum, wait_n=0)
                    change = pairs.along(vector("delta", tile), "t")
                    return None, again.dz(dp, change)

                of_pairs = at_once if ahead else one_by_one
                p, dz = pl.run_scoped(of_pairs, block_sum)
                if not ahead:  # all have read the last one
                    support.named_barrier("sync", jnp.int32(together), computing)
                dz_tile[mine] = dz.astype(q.dtype)
                if p is not None:
                    issue_dv(p)
                words = fetch(after)
                plgpu.commit_smem()
                plgpu.wgmma(dk_sum, dz_tile.at[mine], q_tile)
                support.named_barrier("sync", jnp.int32(together), computing)
                if ahead and not waits_early:
                    next_queries()

                @pl.when(tile >= dq_tiles)
                def _():
                    plgpu.barrier_wait(refs["dq read"].at[slot])

                plgpu.wgmma_wait(0)
                ring.release("do", tile)

                def of_queries(dq_sum, *qk_sum):
                    left, right = parts(me, dz_tile, k_block)
                    plgpu.wgmma(dq_sum, support.transposed(left), right)
                    for x in qk_sum:
                        multiply(x, after, k_own)
                    part = plgpu.wgmma_accumulator_load(dq_sum, wait_n=len(qk_sum))
                    pl.when(more)(lambda: ring.release("q", tile))
                    parts.of_sum(me, refs["dq"].at[slot])[...] = part
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(refs["dq here"].at[slot])
                    loaded = [plgpu.wgmma_accumulator_load(x, wait_n=0) for x in qk_sum]
                    return loaded[0] if loaded else tile

                dq_sum = plgpu.ACC(parts.shape, _F32)
                qk = pl.run_scoped(of_queries, dq_sum, *[block_sum] * ahead)
                return qk, words

            def walk(dk_sum, dv_sum):
                first, count = jnp.int32(0), support.opaque(tiles.count)

                @pl.when(tiles.count > 0)
                def _():
                    qk = first_products(first) if ahead else first
                    step = functools.partial(visit, dk_sum, dv_sum)
                    lax.fori_loop(first, count, step, (qk, fetch(first)))

                return dk_sum[...], dv_sum[...]

            plgpu.barrier_wait(refs["own here"])
            if drops_keys:
                looked_at = clear_keys.attended_keys(
                    spec, kept_keys, own, layout.size["s"]
                )
                for name in ("k", "v"):
                    clear_keys.clear(refs[name].at[0, mine], looked_at)
            sums = (plgpu.ACC((ROWS, width[x]), _F32) for x in "hd")
            dk_block, dv_block = pl.run_scoped(walk, *sums)
            # All have read the keys.
            support.named_barrier("sync", jnp.int32(together), computing)
            wide = dk.dtype != k.dtype
            if wide:  # in float32: they leave from where dq was on its way

                @pl.when(tiles.count > me)
                def _():
                    plgpu.barrier_wait(refs["dq read"].at[me])

            def store(name, gradient, result):
                tile, place = (
                    ("dq", (me, pl.ds(0, ROWS))) if wide else (name, (0, mine))
                )
                refs[tile].at[place][...] = gradient.astype(result.dtype)
                plgpu.commit_smem()
                out = support.copied(refs, tile).at[place]
                plgpu.copy_smem_to_gmem(out, result.at(own))

            store("k", dk_block * spec.gradient_unit, dk)
            if wide:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            store("v", dv_block * spec.dropout_scale, dv)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    found = memory.call(
        kernel,
        layout,
        (q, k, v, spec, saved, visits),
        results,
        block={"t": rows, "s": ROWS, **wider},
        tiles=width,
        scratch=_shared(blocks, layout.size, width, elements, ahead, q.dtype),
        warpgroups=computing + 1,
        name="flash2_backward",
    )
    dq, *dkv = found
    if spec.is_part or sums > 1:
        met = blocks_of_keys_met(spec, layout.size, layout.rows, visits)
        dq = _of_written(dq, met).summed([_SUM])
    return dq.to(of_q.axes), *division.summed(dkv, of_kv)


def _of_written(dq: Named, met: Named) -> Named:
    """dq or its sums, with 0 where nothing was added.

    Args:
      met: int32, by how many blocks of keys each row is.
    """
    axes = tuple(None if a == "h" else a for a in dq.axes)
    number = jnp.int32(0)
    if _SUM in dq.axes:
        number = lax.broadcasted_iota(jnp.int32, dq.shape, dq.axes.index(_SUM))
    return Named(jnp.where(met.to(axes) > number, dq.value, 0.0), dq.axes)


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
    blocks,
    size: Mapping[str, int],
    width: Mapping[str, int],
    elements: Mapping[str, int],
    ahead: bool,
    dtype,
) -> dict[str, Any]:
    """Tiles and barriers of a program, by name.

    Args:
      size: of all axes.
      width: of tiles of heads `h` and `d`.
      elements: of these heads.
      ahead: whether the products of the next queries are made early.
    """
    computing, stages = blocks.block_kv // ROWS, blocks.num_stages
    rows, keys = blocks.block_q, blocks.block_kv
    columns = dict(elements)
    if not ahead:  # a warpgroup makes some columns of dq
        columns["h"] = math.gcd(elements["h"], width["h"] // computing)

    def of_heads(name, count, own, along):
        shape = count, own, width[name]
        return support.tile(shape, dtype, columns[name], (size[along], size[name]))

    # In float32: parts of dk and dv pass through it, too.
    both = math.gcd(columns["h"], *(memory.head_elements(size[x]) for x in "hd"))
    vector = plgpu.SMEM((stages, rows), _F32)
    of_q = {"q": of_heads("h", stages, rows, "t"), "lse": vector}
    of_do = {"do": of_heads("d", stages, rows, "t"), "delta": vector}
    dq_tiles = _DQ_TILES[ahead]
    return {
        "k": of_heads("h", 1, keys, "s"),
        "v": of_heads("d", 1, keys, "s"),
        # Both operands of a product have one swizzle.
        "dz": support.tile((stages if ahead else 1, keys, rows), dtype, columns["h"]),
        "dq": support.tile((dq_tiles, rows, width["h"]), _F32, both),
        "own here": plgpu.Barrier(num_barriers=(), num_arrivals=2),
        "dq here": plgpu.Barrier(num_barriers=dq_tiles, num_arrivals=computing),
        "dq read": plgpu.Barrier(num_barriers=dq_tiles, num_arrivals=1),
        **Ring.shared(of_q, stages, readers=computing),
        **Ring.shared(of_do, stages, readers=computing),
    }
