"""The backward kernel for Hopper: one pass of five products (Dao 2023, algorithm 2).

Grid: (key blocks from the last on, key/value heads, batch axes). A program owns a block
of keys and loops over the query heads of its group and the blocks of queries that meet
its keys. Its warpgroups compute 64 keys each, transposed, [keys, queries]: dk and dv
are summed in their registers, and p and dz go to these products from registers. dz also
goes to shared memory, from which all warpgroups together make dq of the block. One more
warpgroup has a warp that loads, by TMA, and one that adds dq to global memory, by TMA
too, in float32.

The additions to a block of dq have one order, from the last key block that meets it to
the first, so that the same inputs give the same bits. A semaphore of the block counts
them. A program waits only for programs of lower indices, which started before it: it
cannot be stopped by what else runs on the GPU. The first of them stores.

Shared memory: k, v [block_kv, ...]; num_stages times q, do [block_q, ...], their
log-sum-exps and delta, and dz [block_kv, block_q]; dq [block_q, H] in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import program
from pallas_kernels.core.axes import Named
from pallas_kernels.core.ranges import Range, maximum, minimum
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import memory, support
from pallas_kernels.mosaic_gpu.ring import Ring
from pallas_kernels.mosaic_gpu.tuning import ROWS

_F32 = jnp.float32
import os

X = os.environ.get("X", "")
DQ_TILES = 1 if "one" in X else 2
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

    Blocks of dq that no keys meet are not written.

    Args:
      q, k, v, spec, launch: as in the forward; 0 lies beyond the spec's lengths.
      saved: lse_log2 and delta (axis `t` among others), and do (`t d`).
      outputs: shape structs of dq, in float32, dk and dv.
    """
    blocks = launch.blocks
    operands = [q, k, v, *jax.tree.leaves(spec), *saved, *outputs]
    layout = memory.Layout.of(
        "dkv", operands, launch, last_first="first" not in X, blocks_last="heads" in X
    )
    size, group = layout.size, layout.group
    h, d = (memory.head_elements(size[name]) for name in ("h", "d"))
    rows, keys = blocks.block_q, blocks.block_kv
    computing = keys // ROWS
    parts = _parts_of_dq(rows, h, computing)
    entries = [x for x in layout.names if x not in ("s", "k")]
    dq_blocks = -(-size["t"] // rows)
    semaphores = dq_blocks * size.get("n", 1)
    for name in entries:
        semaphores *= size[name]
    together = computing + 2  # a named barrier

    def kernel(inputs, outputs, refs):
        q, k, v, spec, (lse_log2, delta, do) = inputs
        dq, dk, dv = outputs
        me = lax.axis_index("warpgroup")
        ring = Ring(refs, blocks.num_stages)
        counts = pl.get_global(plgpu.SemaphoreType.REGULAR((semaphores,)))
        spec, where = program.key_program(spec, layout)
        start = where["s"].start
        first_head = where["k"] * group if "k" in where else jnp.int32(0)
        needed = _met(spec, where, layout, first_head)
        count = jnp.int32(needed.count)
        any_edge = not (isinstance(needed.edges, int) and needed.edges == 0)

        def at(g, i):
            """Where block i of the queries of head g of the group lies."""
            block = needed.at(i)[1]
            here = {"n": first_head + g, "t": Rows(block * rows, rows)}
            return block, {**where, **here}

        def place(tile):
            """Head of the group and number of the block of a tile."""
            if group == 1:
                return 0, tile
            return lax.div(tile, count), lax.rem(tile, count)

        def load():
            own = {**where, "s": Rows(start, keys)}
            plgpu.copy_gmem_to_smem(k.at(own), refs["k"], refs["own here"])
            plgpu.copy_gmem_to_smem(v.at(own), refs["v"], refs["own here"])

            @pl.loop(0, group * count)
            def _(tile):
                _, here = at(*place(tile))
                ring.fill(tile, q=q.at(here), lse=lse_log2.at(here))
                ring.fill(tile, do=do.at(here), delta=delta.at(here))

        def add():
            entry = jnp.int32(0)
            for name in entries:
                entry = entry * size[name] + where[name]

            def counter(tile):
                """Where block and head of a tile lie, the block, and its semaphore."""
                g, i = place(tile)
                block, here = at(g, i)
                head = entry * size.get("n", 1) + first_head + g
                return here, block, counts.at[head * dq_blocks + block]

            def added(tile):
                """Tells that a tile's sums are in global memory."""
                plgpu.wait_smem_to_gmem(0)
                if "free" not in X:
                    plgpu.semaphore_signal(counter(tile)[2], 1, memory_scope="gpu")

            @pl.loop(0, group * count)
            def _(tile):
                here, block, seen = counter(tile)
                end = minimum(block * rows + rows, size["t"])
                _, last = spec.key_blocks_met(block * rows, end, size["s"], keys)
                before = last - 1 - lax.div(start, jnp.int32(keys))
                slot = lax.rem(tile, jnp.int32(DQ_TILES))
                source = refs["dq"].at[slot]
                plgpu.barrier_wait(refs["dq here"].at[slot])
                if "lag" in X:
                    pl.when(tile > 0)(lambda: added(tile - 1))
                if "free" not in X:
                    plgpu.semaphore_wait(
                        seen, before, decrement=False, memory_scope="gpu"
                    )

                @pl.when(before == 0)
                def _():
                    plgpu.copy_smem_to_gmem(source, dq.at(here))

                @pl.when(before > 0)
                def _():
                    plgpu.copy_smem_to_gmem(source, dq.at(here), reduction_op="add")

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(refs["dq read"].at[slot])
                if "lag" not in X:
                    added(tile)

            if "lag" in X:
                pl.when(count > 0)(lambda: added(group * count - 1))

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
            k_own, v_own = refs["k"].at[mine], refs["v"].at[mine]
            plgpu.barrier_wait(refs["own here"])

            def visit(dk_sum, dv_sum, head_spec, head_where, masked, tile, block):
                here = {**head_where, **own, "t": Rows(block * rows, rows)}
                pairs = program.pairs(head_spec, here, ("s", "t"), masked, launch)
                dz_tile = refs["dz"].at[ring.slot(tile)]

                def vector(name):
                    x = support.load_vector(ring.tile(name, tile), 1, shared=True)
                    return pairs.along(x, "t")

                def of_pairs(qk_sum, dp_sum):
                    ring.wait("q", tile)
                    plgpu.wgmma(qk_sum, k_own, support.transposed(ring.tile("q", tile)))
                    ring.wait("do", tile)
                    plgpu.wgmma(
                        dp_sum, v_own, support.transposed(ring.tile("do", tile))
                    )
                    lse = vector("lse")
                    qk = plgpu.wgmma_accumulator_load(qk_sum, wait_n=1)
                    again = pairs.recompute(pairs.scores_of(qk, q.dtype), lse)
                    dropped, change = again.dropped, vector("delta")
                    dp = plgpu.wgmma_accumulator_load(dp_sum, wait_n=0)
                    return dropped, again.dz(dp, change)

                block_sum = plgpu.ACC((ROWS, rows), _F32)
                p, dz = pl.run_scoped(of_pairs, block_sum, block_sum)
                dz = dz.astype(q.dtype)
                dz_tile[mine] = dz
                plgpu.wgmma(dv_sum, p.astype(do.dtype), ring.tile("do", tile))
                plgpu.commit_smem()
                support.named_barrier("sync", jnp.int32(together), computing)

                def of_queries(dq_sum):
                    left, right = parts(me, dz_tile, refs["k"])
                    plgpu.wgmma(dq_sum, support.transposed(left), right)
                    plgpu.wgmma(dk_sum, dz, ring.tile("q", tile))
                    return plgpu.wgmma_accumulator_load(dq_sum, wait_n=1)

                part = pl.run_scoped(of_queries, plgpu.ACC(parts.shape, _F32))
                ring.release("do", tile)

                slot = lax.rem(tile, jnp.int32(DQ_TILES))

                @pl.when(tile >= DQ_TILES)
                def _():
                    plgpu.barrier_wait(refs["dq read"].at[slot])

                parts.of_sum(me, refs["dq"].at[slot])[...] = part
                plgpu.commit_smem()
                plgpu.barrier_arrive(refs["dq here"].at[slot])
                plgpu.wgmma_wait(0)
                ring.release("q", tile)

            def walk(dk_sum, dv_sum):
                @pl.loop(0, group)
                def _(g):
                    head_spec, head_where, _ = program.query_head(
                        spec, where, layout, first_head + g
                    )
                    sums = dk_sum, dv_sum, head_spec, head_where

                    @pl.loop(0, count)
                    def _(i):
                        masked, block = needed.at(i)
                        visit(
                            *sums, masked if any_edge else False, g * count + i, block
                        )

                return dk_sum[...], dv_sum[...]

            sums = [plgpu.ACC((ROWS, columns), _F32) for columns in (h, d)]
            dk_block, dv_block = pl.run_scoped(walk, *sums)
            # All have read the keys.
            support.named_barrier("sync", jnp.int32(together), computing)
            k_own[...] = (dk_block * spec.gradient_unit).astype(dk.dtype)
            v_own[...] = (dv_block * spec.dropout_scale).astype(dv.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_own, dk.at(own))
            plgpu.copy_smem_to_gmem(v_own, dv.at(own))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return memory.call(
        kernel,
        layout,
        (q, k, v, spec, saved),
        outputs,
        block={"t": rows, "s": ROWS},
        scratch=_shared(blocks, h, d, q.dtype),
        warpgroups=computing + 1,
        name="flash2_backward",
    )


def _met(spec, where, layout: memory.Layout, head) -> Range:
    """The range of query blocks that meet a program's keys.

    Exactly those: programs that come after this one count on it.
    """
    keys, size = layout.rows["s"], layout.size
    start = where["s"].start
    end = minimum(start + keys, size["s"])
    first, last = spec.query_blocks_met(start, end, size["t"], layout.rows["t"])
    _, _, full = program.query_head(spec, where, layout, head)
    full_lo = minimum(maximum(full.full_lo, first), last)
    full_hi = maximum(minimum(full.full_hi, last), full_lo)
    return Range(first, full_lo, full_hi, last)


class _Columns:
    """Each warpgroup makes all rows of some columns of dq."""

    def __init__(self, rows: int, h: int, computing: int):
        self.shape = rows, h // computing

    def _own(self, me):
        return pl.ds(me * self.shape[1], self.shape[1])

    def __call__(self, me, dz, k):
        return dz, k.at[:, self._own(me)]

    def of_sum(self, me, dq):
        return dq.at[:, self._own(me)]


class _Rows:
    """Each warpgroup makes all columns of 64 rows of dq."""

    def __init__(self, h: int):
        self.shape = ROWS, h

    def __call__(self, me, dz, k):
        return dz.at[:, pl.ds(me * ROWS, ROWS)], k

    def of_sum(self, me, dq):
        return dq.at[pl.ds(me * ROWS, ROWS)]


def _parts_of_dq(rows: int, h: int, computing: int) -> _Rows | _Columns:
    if rows == ROWS * computing:
        return _Rows(h)
    return _Columns(rows, h, computing)


def _shared(blocks, h: int, d: int, dtype) -> dict[str, Any]:
    """Tiles and barriers of a program, by name."""
    computing, stages = blocks.block_kv // ROWS, blocks.num_stages
    rows, keys = blocks.block_q, blocks.block_kv
    vector = plgpu.SMEM((stages, rows), _F32)
    of_q = {"q": support.tile((stages, rows, h), dtype), "lse": vector}
    of_do = {"do": support.tile((stages, rows, d), dtype), "delta": vector}
    return {
        "k": support.tile((keys, h), dtype),
        "v": support.tile((keys, d), dtype),
        "dz": support.tile((stages, keys, rows), dtype),
        "dq": support.tile((DQ_TILES, rows, h), _F32),
        "own here": plgpu.Barrier(num_barriers=(), num_arrivals=2),
        "dq here": plgpu.Barrier(num_barriers=DQ_TILES, num_arrivals=computing),
        "dq read": plgpu.Barrier(num_barriers=DQ_TILES, num_arrivals=1),
        **Ring.shared(of_q, stages, readers=computing),
        **Ring.shared(of_do, stages, readers=computing),
    }
