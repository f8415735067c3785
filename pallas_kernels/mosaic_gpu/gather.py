"""Elements of arrays in global memory that pairs read at computed places (`Table`).

An array of distances has one element for each diagonal of a block. Where rows are far
apart these are often equal, as T5's and other tables are: such a block is level, and
one number stands for all of its pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.core.pointwise.tables import Distances
from pallas_kernels.mosaic_gpu import support
from pallas_kernels.mosaic_gpu.pairwise import (
    LAYOUT,
    NEIGHBOURS,
    i32,
    is_signed,
    loaded,
    sum_of,
)


def read(ref, index: tuple, block: Mapping[str, int]) -> jax.Array:
    """What the pairs of a block read.

    Args:
      index: as of `layout.View.gather`.
      block: the sizes of blocks of `t` and `s`.
    """
    axis, places = _places(index)
    if not isinstance(places, Distances):
        return elements(_part(ref, index, axis, slice(None)), places)
    if places.first is None:
        return elements(_part(ref, index, axis, slice(None)), places.numbers())
    own = _part(ref, index, axis, _of_diagonals(places, block))
    shape = block[places.order[0]], block[places.order[1]]
    return diagonals(own, shape, transposed=places.order == ("s", "t"))


def level(ref, index: tuple, block: Mapping[str, int]) -> tuple[jax.Array, jax.Array]:
    """Whether all pairs of a block read equal elements, and one of these.

    Args:
      ref, index, block: as of `read`; the index has `Distances` with a first one.
    """
    axis, places = _places(index)
    own = _of_diagonals(places, block)
    first = ref[(*index[:axis], own.start, *index[axis + 1 :])]
    return are_equal(_part(ref, index, axis, own)) != 0, first


def _places(index: tuple) -> tuple[int, Any]:
    """The axis of an index that is not a number, and what is there."""
    return next(
        (i, x) for i, x in enumerate(index) if isinstance(x, Distances) or np.ndim(x)
    )


def _part(ref, index: tuple, axis: int, own):
    return ref.at[(*index[:axis], own, *index[axis + 1 :])]


def _of_diagonals(places: Distances, block: Mapping[str, int]):
    """The elements that a block reads, that of its first query and last key first."""
    start = places.first - (block["s"] - 1)
    return pl.ds(start, sum(block[name] for name in places.order) - 1)


def elements(ref, places: jax.Array) -> jax.Array:
    """Elements of a vector in global memory at int32 places, for a block of pairs."""

    @support.inline_mgpu(
        arg_types=(plgpu.RefType(), LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(places.shape, ref.dtype, layout=LAYOUT),
    )
    def make(_, ref, places):
        kind, pointer = ir.MemRefType(ref.type).element_type, support.pointer(ref)
        pair = ir.VectorType.get((NEIGHBOURS,), kind)

        def element(register: ir.Value, e: int) -> ir.Value:
            place = vector.extract(register, [], [e])
            return llvm.load(kind, utils.getelementptr(pointer, [place], kind))

        registers = np.empty_like(places.registers)
        for n, register in enumerate(places.registers.flat):
            found = [element(register, e) for e in range(NEIGHBOURS)]
            registers.flat[n] = vector.from_elements(pair, found)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=places.layout, _is_signed=is_signed(dtype)
        )

    dtype = ref.dtype
    return make(ref, places)


def diagonals(ref, shape: tuple[int, int], *, transposed: bool) -> jax.Array:
    """A block with one element for each of its diagonals.

    Of the elements of a thread every second lies on a diagonal that it has met: 8 rows
    and 8 columns further.

    Args:
      ref: the elements in global memory, that of the first query and the last key
        first.
      shape: of the block.
      transposed: whether it is [keys, queries].
    """
    last = shape[0 if transposed else 1] - 1

    def of_place(pointer, row, column, strides, kind):
        del strides
        distance = arith.subi(column, row) if transposed else arith.subi(row, column)
        here = utils.getelementptr(pointer, [sum_of(distance, i32(last))], kind)
        pair = ir.VectorType.get((NEIGHBOURS,), kind)

        @functools.cache
        def of_diagonal(n: int) -> ir.Value:
            places = diagonals_of_thread(n, transposed=transposed)
            at = [utils.getelementptr(here, [i32(x)], kind) for x in places]
            return vector.from_elements(pair, [llvm.load(kind, x) for x in at])

        return lambda i, j: of_diagonal(i - j)

    return loaded(ref, shape, ref.dtype, of_place)


def diagonals_of_thread(n: int, *, transposed: bool) -> list[int]:
    """How far from the diagonal of a thread's first element two neighbours lie.

    Args:
      n: how many times 8 rows, less 8 columns, they are away from it.
    """
    places = [8 * n - e for e in range(NEIGHBOURS)]
    return [-x for x in places] if transposed else places


def are_equal(ref) -> jax.Array:
    """Whether all numbers of a vector in global memory have the same bits: 1 or 0.

    Each warp compares all of them, so that none waits for another. The shuffle at the
    end is that of `support.warp_uniform`.
    """
    (count,), splat = ref.shape, plgpu.Layout.WG_SPLAT
    lanes, width = utils.WARP_SIZE, 8 * jnp.dtype(ref.dtype).itemsize
    assert count >= lanes, f"{count=}"

    @support.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=splat),
    )
    def compare(_, ref):
        kind, pointer = ir.MemRefType(ref.type).element_type, support.pointer(ref)
        wide, narrow = (ir.IntegerType.get_signless(n) for n in (32, width))
        lane = arith.remui(utils.thread_idx(), i32(lanes))

        def bits(first: int) -> ir.Value:
            place = [sum_of(lane, i32(first))]
            found = llvm.load(narrow, utils.getelementptr(pointer, place, kind))
            return found if narrow == wide else arith.extui(wide, found)

        # The last lanes of 32 numbers that are not all there compare others again.
        own, *others = (bits(min(n, count - lanes)) for n in range(0, count, lanes))
        different = (arith.xori(own, x) for x in others)
        different = functools.reduce(arith.ori, different, i32(0))
        text = (
            "{ .reg .pred p; .reg .b32 n; shfl.sync.idx.b32 n, $1, 0, 31, -1; "
            "xor.b32 n, n, $1; or.b32 n, n, $2; setp.eq.u32 p, n, 0; "
            "vote.sync.all.pred p, p, -1; selp.b32 n, 1, 0, p; "
            "shfl.sync.idx.b32 $0, n, 0, 31, -1; }"
        )
        words = [own, different]
        found = llvm.inline_asm(wide, words, text, "=r,r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return compare(ref)
