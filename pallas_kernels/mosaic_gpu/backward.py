"""The backward kernel for Hopper: one pass of five products (Dao 2023, algorithm 2).

Grid: (key blocks, key/value heads, batch axes). A program owns a block
of keys and loops over the query heads of its group and the blocks of queries that meet
its keys. Its warpgroups compute 64 keys each, transposed, [keys, queries]: dk and dv
are summed in their registers. p goes to its product from registers, dz from shared
memory, of which all warpgroups together make dq of the block. The products of the next
queries and keys run while dq goes to shared memory. One more warpgroup has a warp that
loads, by TMA, and one that adds dq to global memory, by TMA too, in float32.

The additions to a block of dq have one order, that of the programs whose keys meet it,
so that the same inputs give the same bits: from the last key block or from the first
(`_last_first`). A semaphore of the block counts them, and the first one stores. A
program waits only for programs of lower indices, which a GPU starts before it.

Shared memory: k, v [block_kv, ...]; num_stages times q, do [block_q, ...], their
log-sum-exps and delta, and dz [block_kv, block_q]; dq [block_q, H] in float32. Heads
are as wide as `tuning.head_tile`: beyond an array 0 is read, and nothing is written.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import division, program
from pallas_kernels.core.axes import Named
from pallas_kernels.core.ranges import Range, maximum, minimum
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import memory, support, tuning
from pallas_kernels.mosaic_gpu.ring import Ring
from pallas_kernels.mosaic_gpu.tuning import ROWS

_F32 = jnp.float32
# Blocks of dq on their way to global memory.
_DQ_TILES = 2
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
    layout = divided([q, k, v, *jax.tree.leaves(spec), *saved, *outputs], launch)
    of_q, *of_kv = outputs
    results = of_q, *(division.partial(x, layout.parts) for x in of_kv)
    width = tuning.head_tile(layout.size)
    elements = {x: memory.head_elements(layout.size[x]) for x in "hd"}
    wider = {x: width for x, n in elements.items() if n < width}
    rows, keys = blocks.block_q, blocks.block_kv
    computing = keys // ROWS
    parts = _parts_of_dq(rows, width, computing)
    together = computing + 2  # a named barrier

    def kernel(inputs, outputs, refs):
        q, k, v, spec, (lse_log2, delta, do) = inputs
        dq, dk, dv = outputs
        me = lax.axis_index("warpgroup")
        ring = Ring(refs, blocks.num_stages)
        spec, where = program.key_program(spec, layout)
        tiles = _Tiles.of(spec, where, layout)
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
                slot = lax.rem(tile, jnp.int32(_DQ_TILES))
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
            block_sum = plgpu.ACC((ROWS, rows), _F32)

            def tiles_of_keys(tile):
                # Their index is 0. If the compiler knew, it would hold addresses in
                # registers, of which there are none to spare.
                zero = lax.shift_right_logical(tile, jnp.int32(30))
                k_block = refs["k"].at[zero]
                return k_block, k_block.at[mine], refs["v"].at[zero, mine]

            def vector(name, tile):
                return support.load_vector(ring.tile(name, tile), 1, shared=True)

            def multiply(qk_sum, tile, k_own):
                plgpu.wgmma(qk_sum, k_own, support.transposed(ring.tile("q", tile)))

            def visit(dk_sum, dv_sum, tile, qk):
                """Takes the products of keys and queries of a tile, makes the next."""
                k_block, k_own, v_own = tiles_of_keys(tile)
                there, masked = tiles.at(tile), tiles.masked(tile)
                head_spec, _, _ = program.query_head(spec, where, layout, there["n"])
                here = {**there, "s": own["s"]}
                pairs = program.pairs(head_spec, here, ("s", "t"), masked, launch)
                q_tile, do_tile = ring.tile("q", tile), ring.tile("do", tile)
                dz_tile = refs["dz"].at[ring.slot(tile)]
                slot = lax.rem(tile, jnp.int32(_DQ_TILES))

                def of_pairs(dp_sum):
                    ring.wait("do", tile)
                    plgpu.wgmma(dp_sum, v_own, support.transposed(do_tile))
                    lse = pairs.along(vector("lse", tile), "t")
                    again = pairs.recompute(pairs.scores_of(qk, q.dtype), lse)
                    dropped = again.dropped
                    change = pairs.along(vector("delta", tile), "t")
                    dp = plgpu.wgmma_accumulator_load(dp_sum, wait_n=0)
                    return dropped, again.dz(dp, change)

                p, dz = pl.run_scoped(of_pairs, block_sum)
                dz_tile[mine] = dz.astype(q.dtype)
                plgpu.wgmma(dv_sum, p.astype(do.dtype), do_tile)
                plgpu.commit_smem()
                plgpu.wgmma(dk_sum, dz_tile.at[mine], q_tile)
                support.named_barrier("sync", jnp.int32(together), computing)
                more = tile + 1 < tiles.count
                after = minimum(tile + 1, tiles.count - 1)

                @pl.when(more)
                def _():
                    ring.wait("q", after)

                @pl.when(tile >= _DQ_TILES)
                def _():
                    plgpu.barrier_wait(refs["dq read"].at[slot])

                plgpu.wgmma_wait(0)
                ring.release("do", tile)

                def of_queries(dq_sum, qk_sum):
                    left, right = parts(me, dz_tile, k_block)
                    plgpu.wgmma(dq_sum, support.transposed(left), right)
                    multiply(qk_sum, after, k_own)
                    part = plgpu.wgmma_accumulator_load(dq_sum, wait_n=1)
                    pl.when(more)(lambda: ring.release("q", tile))
                    parts.of_sum(me, refs["dq"].at[slot])[...] = part
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(refs["dq here"].at[slot])
                    return plgpu.wgmma_accumulator_load(qk_sum, wait_n=0)

                dq_sum = plgpu.ACC(parts.shape, _F32)
                return pl.run_scoped(of_queries, dq_sum, block_sum)

            def walk(dk_sum, dv_sum):
                first, count = jnp.int32(0), support.unknown(tiles.count)

                def start(qk_sum):
                    multiply(qk_sum, first, tiles_of_keys(first)[1])
                    return plgpu.wgmma_accumulator_load(qk_sum, wait_n=0)

                @pl.when(tiles.count > 0)
                def _():
                    ring.wait("q", first)
                    qk = pl.run_scoped(start, block_sum)
                    step = functools.partial(visit, dk_sum, dv_sum)
                    lax.fori_loop(first, count, step, qk)

                return dk_sum[...], dv_sum[...]

            plgpu.barrier_wait(refs["own here"])
            sums = plgpu.ACC((ROWS, width), _F32)
            dk_block, dv_block = pl.run_scoped(walk, sums, sums)
            # All have read the keys.
            support.named_barrier("sync", jnp.int32(together), computing)
            k_own, v_own = refs["k"].at[0, mine], refs["v"].at[0, mine]
            if layout.parts:  # in float32: where dq was on its way
                k_own = v_own = refs["dq"].at[me, pl.ds(0, ROWS)]

                @pl.when(tiles.count > me)
                def _():
                    plgpu.barrier_wait(refs["dq read"].at[me])

            k_own[...] = (dk_block * spec.gradient_unit).astype(dk.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_own, dk.at(own))
            if layout.parts:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            v_own[...] = (dv_block * spec.dropout_scale).astype(dv.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(v_own, dv.at(own))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    found = memory.call(
        kernel,
        layout,
        (q, k, v, spec, saved),
        results,
        block={"t": rows, "s": ROWS, **wider},
        scratch=_shared(blocks, width, elements, q.dtype),
        warpgroups=computing + 1,
        name="flash2_backward",
    )
    dq, *dkv = found
    return dq.value, *division.summed(dkv, of_kv)


def divided(operands: Sequence[Named], launch: Launch) -> memory.Layout:
    """The kernel's layout: the parts of its work, and the order of its programs.

    Under a causal mask the programs of the last keys are the shortest, and each begins
    where the others are not: no program waits at its start. Those of several query
    heads are so long that the longest should start first, which costs less than what
    they leave idle at the end (NVIDIA H200, 2026-11-24:
    benchmarks/lab/067-mosaic-gpu-backward.md).
    """
    layout = memory.Layout.of("dkv", operands, launch)
    layout.last_first = layout.elements == layout.parts.get("y", 1)
    return layout


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The blocks of queries that a program visits, of each query head of its group.

    Attributes:
      spec, where: of the program.
      layout: of the kernel.
      needed: the blocks: those that meet its keys, exactly, as the programs that come
        after this one count on it; or its part of them.
    """

    spec: AttentionSpec
    where: program.Where
    layout: memory.Layout
    needed: Range

    @classmethod
    def of(cls, spec, where, layout: memory.Layout) -> _Tiles:
        keys, size, start = layout.rows["s"], layout.size, where["s"].start
        end = minimum(start + keys, size["s"])
        first, last = spec.query_blocks_met(start, end, size["t"], layout.rows["t"])
        full = spec.q_blocks(start, end, size["t"], layout.rows["t"])
        full_lo = minimum(maximum(full.full_lo, first), last)
        full_hi = maximum(minimum(full.full_hi, last), full_lo)
        blocks = layout.own_blocks(where, Range(first, full_lo, full_hi, last))
        return cls(spec, where, layout, blocks)

    @property
    def _heads(self) -> tuple[Any, Any]:
        """The first of the query heads that a program visits, and how many they are."""
        group = self.where["k"] * self.layout.group if "k" in self.where else 0
        first, end = self.layout.own_elements(self.where)
        return group + first, jnp.int32(end - first)

    @property
    def count(self):
        return jnp.int32(self.needed.count) * self._heads[1]

    def _head(self, tile):
        """The query head of a tile: they take turns."""
        first, heads = self._heads
        return first + lax.rem(tile, heads)

    def _block(self, tile) -> tuple[Any, Any]:
        """Whether pairs of a tile may be masked, and its block of queries."""
        i = lax.div(tile, self._heads[1])
        back = jnp.int32(self.needed.count) - 1 - i
        return self.needed.at(i if self.layout.last_first else back)

    def at(self, tile) -> program.Where:
        rows = self.layout.rows["t"]
        here = Rows(self._block(tile)[1] * rows, rows)
        return {**self.where, "n": self._head(tile), "t": here}

    def masked(self, tile):
        """A traced boolean, or False if no pair of any tile is masked."""
        edges = self.needed.edges
        return False if isinstance(edges, int) and edges == 0 else self._block(tile)[0]

    def before(self, tile):
        """How many programs add to the dq of a tile before this one."""
        keys, size, rows = self.layout.rows["s"], self.layout.size, self.at(tile)["t"]
        end = minimum(rows.start + rows.size, size["t"])
        met = self.spec.key_blocks_met(rows.start, end, size["s"], keys)
        own = lax.div(self.where["s"].start, jnp.int32(keys))
        return met[1] - 1 - own if self.layout.last_first else own - met[0]

    @property
    def _axes(self) -> list[tuple[str, int]]:
        """Of the blocks of dq, but that of the blocks."""
        names = [x for x in (*self.layout.names, "n") if x not in ("s", "k")]
        return [(x, self.layout.size[x]) for x in names if x in self.layout.size]

    @property
    def _blocks_of_rows(self) -> int:
        return -(-self.layout.size["t"] // self.layout.rows["t"])

    @property
    def all_sums(self) -> int:
        """How many blocks dq has."""
        return self._blocks_of_rows * math.prod(size for _, size in self._axes)

    def number(self, tile):
        """Of the block of dq of a tile."""
        here, number = self.at(tile), jnp.int32(0)
        for name, size in self._axes:
            number = number * size + here[name]
        return number * self._blocks_of_rows + self._block(tile)[1]


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


def _shared(blocks, width: int, elements: Mapping[str, int], dtype) -> dict[str, Any]:
    """Tiles and barriers of a program, by name.

    Args:
      width: of tiles of heads.
      elements: of heads `h` and `d`.
    """
    computing, stages = blocks.block_kv // ROWS, blocks.num_stages
    rows, keys = blocks.block_q, blocks.block_kv

    def of_heads(name, count, size):
        return support.tile((count, size, width), dtype, elements[name])

    both = math.gcd(*elements.values())  # parts of dk and dv pass through it, too
    vector = plgpu.SMEM((stages, rows), _F32)
    of_q = {"q": of_heads("h", stages, rows), "lse": vector}
    of_do = {"do": of_heads("d", stages, rows), "delta": vector}
    return {
        "k": of_heads("h", 1, keys),
        "v": of_heads("d", 1, keys),
        # Both operands of a product have one swizzle.
        "dz": support.tile((stages, keys, rows), dtype, elements["h"]),
        "dq": support.tile((_DQ_TILES, rows, width), _F32, both),
        "own here": plgpu.Barrier(num_barriers=(), num_arrivals=2),
        "dq here": plgpu.Barrier(num_barriers=_DQ_TILES, num_arrivals=computing),
        "dq read": plgpu.Barrier(num_barriers=_DQ_TILES, num_arrivals=1),
        **Ring.shared(of_q, stages, readers=computing),
        **Ring.shared(of_do, stages, readers=computing),
    }
