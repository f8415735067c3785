"""The gradient of what scores read at the distance of query and key, for Hopper.

As `dbias`, but a thread block owns a diagonal of tiles and loops over these, too: all
of its sums lie on the same distances. At the end a consumer warpgroup sums its 64 rows
along diagonals, 64 columns at a time, by way of shared memory: there a thread owns a
diagonal.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.core.axes import Named, sizes
from pallas_kernels.core.pointwise.tables import Taken
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Elements, Launch, Rows
from pallas_kernels.mosaic_gpu import memory, pairwise, support
from pallas_kernels.mosaic_gpu.hopper.dbias import (
    Plan,
    Program,
    Refs,
    Step,
    compute,
    load,
)
from pallas_kernels.mosaic_gpu.hopper.gradients import F32, Inputs, Saved
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.plan import by_role
from pallas_kernels.program import Where, diagonal_program, number_of_diagonals


def ddistance(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named],
    lead: Named,
    *,
    summed: tuple[str, ...],
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Sums along the diagonals of each diagonal of tiles (`passes.backward`).

    Args:
      q, k, v, spec, saved, summed, launch: as for `dbias.dbias`, with as many queries
        as keys in a block.
      lead: the axes of batch and heads of the result.
    """
    inputs, block = Inputs(q, k, v, spec, Saved(*saved)), launch.blocks.block_q
    count, parts = number_of_diagonals(sizes([q, k]), block), block // ROWS
    shape = (*lead.shape, count, parts**2, 2 * ROWS)
    output = Named(jax.ShapeDtypeStruct(shape, F32), (*lead.axes, "e", "w", "s"))
    diagonals = Named(jax.ShapeDtypeStruct(shape[:-2], F32), (*lead.axes, "e"))
    operands = inputs.with_outputs([diagonals])
    whole = dataclasses.replace(launch, splits=1)
    # Beside those of other heads: the longest diagonal of the last head would begin
    # among the last ones, and end long after the others.
    options: dict[str, Any] = {"own": ("e",), "looped": summed, "by_block": True}
    layout = memory.TileGrid.of("dbias", operands, whole, **options)
    plan = Plan(launch, layout, parts, q.dtype, None, has_sums=True)
    (found,) = plan.call(
        by_role(DiagonalProgram.of, load, compute),
        inputs,
        [output],
        refs=Refs.declare(plan),
        name="flash2_ddistance",
    )
    return (_joined(found.value, parts),)


def _joined(x: jax.Array, parts: int) -> jax.Array:
    """The sums of tiles, [.., 2 b], from those of their parts of 64 x 64, [.., n, 128].

    Args:
      parts: how many of 64 rows a tile has.
    """
    size = 2 * ROWS * parts

    def placed(row: int, column: int) -> jax.Array:
        start = ROWS * (parts - 1 + row - column)
        pad = [(0, 0)] * (x.ndim - 2) + [(start, size - start - 2 * ROWS)]
        return jnp.pad(x[..., row * parts + column, :], pad)

    return sum(
        (placed(i, j) for i in range(parts) for j in range(parts)),
        start=jnp.zeros((*x.shape[:-2], size), x.dtype),
    )


@dataclasses.dataclass(frozen=True)
class DiagonalProgram(Program):
    """A thread block that owns a diagonal of tiles.

    Attributes:
      block: the first of its blocks of keys.
      after: how many blocks of queries stand before the one that meets block 0 of keys.
    """

    block: Any
    after: Any

    @classmethod
    def of(cls, plan: Plan, inputs: Inputs, outputs, refs: Refs) -> DiagonalProgram:
        warpgroup = lax.axis_index("warpgroup")
        spec, where, _, blocks = diagonal_program(inputs.spec, plan.layout)
        block, end, after = blocks
        count = (end - block) * plan.layout.elements
        own = jnp.int32(0), count, block, after
        return cls(plan, inputs, outputs, refs, warpgroup, spec, where, *own)

    def step(self, index) -> Step:
        layout = self.plan.layout
        elements = jnp.int32(layout.elements)
        j = self.block + lax.div(index, elements)
        i = j + self.after
        start = {"t": i * layout.rows["t"], "s": j * layout.rows["s"]}
        return Step({**self.where, "i": i, "j": j}, start, lax.rem(index, elements))

    def with_spec(self, loop: Callable, spec: AttentionSpec):
        """A loop of its own for a diagonal on which each table has one number.

        All steps read a table at the same distances. Those beyond some number often
        share a place: what lies there is loaded once, and no step loads of the table.
        """
        _, here, _, start = self.element(spec, self.first)
        where, differ = {**here, **self.rows_of(start)}, []
        pairs = self.plan.pairs(spec, where, False)

        def with_one(table, found):
            if not (isinstance(table, Elements) and isinstance(found, Taken)):
                return table
            block, dtype = found.block, found.block.dtype
            if not jnp.issubdtype(dtype, jnp.floating):
                return table
            least, most = (f(block.astype(F32), axis=1) for f in (jnp.min, jnp.max))
            differ.append((least != most).astype(jnp.int32))  # as NaN does
            return Taken(pairs.along(least, "t").astype(dtype))

        score = jax.tree.map(with_one, spec.score, pairs.spec.score)
        of_one = dataclasses.replace(spec, score=score)
        count = support.warpgroup_any(self.warpgroup, functools.reduce(jnp.add, differ))
        return lax.cond(count == 0, lambda: loop(of_one), lambda: loop(spec))

    def result(self) -> Where:
        parts = self.plan.block_kv // ROWS
        own = Rows(self.warpgroup * parts, parts)
        return {**self.where, "w": own, "s": Rows(0, 2 * ROWS)}

    def store(self, output, total: jax.Array, visited) -> None:
        scratch = self.refs.sums.at[self.warpgroup, :, pl.ds(0, ROWS)]
        parts = range(self.plan.block_kv // ROWS)

        @pl.when(visited)
        def _():
            for part in parts:
                pairwise.store(scratch, total, first=part * ROWS)
                plgpu.commit_smem()  # also waits for the warpgroup's other threads
                store_sums(output, scratch, part)
                plgpu.commit_smem()

        @pl.when(jnp.logical_not(visited))
        def _():
            for part in parts:
                store_zeros(output, part)


def store_zeros(ref, row: int) -> None:
    """Writes what `store_sums` writes of a tile of zeros."""

    @support.inline_mgpu(arg_types=(plgpu.RefType(),))
    def write(_, ref):
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(utils.thread_idx(), utils.c(support.WARPGROUP, i32))
        index, f32 = ir.IndexType.get(), ir.F32Type.get()
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        memref.store(zero, ref, (utils.c(row, index), arith.index_cast(index, lane)))

    write(ref)


def store_sums(ref, tile, row: int) -> None:
    """Writes the sums along the diagonals of a tile, that of its last column first.

    A thread sums a diagonal, row by row.

    Args:
      ref: [rows, 2 b] in global memory. Element b - 1 + i - j of a row gets what lies
        i - j below the main diagonal, the last one 0.
      tile: [b, b] in shared memory, 2 b being the threads of a warpgroup.
      row: the one that is written.
    """
    size = tile.shape[0]
    assert 2 * size == support.WARPGROUP

    @support.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def write(_, ref, tile):
        index, f32 = ir.IndexType.get(), ir.F32Type.get()
        i32 = ir.IntegerType.get_signless(32)
        # A thread reads a place of the tile in each row, whether its diagonal meets it.
        lane = arith.remui(utils.thread_idx(), utils.c(2 * size, i32))
        zero = total = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        for i in range(size):
            column = arith.subi(utils.c(i + size - 1, i32), lane)
            meets = arith.cmpi(arith.CmpIPredicate.ult, column, utils.c(size, i32))
            near = arith.andi(column, utils.c(size - 1, i32))
            place = utils.c(i, index), arith.index_cast(index, near)
            found = memref.load(tile, place)
            total = arith.addf(total, arith.select(meets, found, zero))
        place = utils.c(row, index), arith.index_cast(index, lane)
        memref.store(total, ref, place)

    write(ref, tile)
