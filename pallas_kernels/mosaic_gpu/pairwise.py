"""Operands with an element for each pair of query and key rows: a bias, masks.

They lie in global memory, and threads load what belongs to their own pairs of a block,
straight into the places of results of products: of a bias two neighbours at once, or
one of a transposed block, of a mask a word for 32 pairs of a row of the block. XLA
makes these words before the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.core.axes import Named
from pallas_kernels.mosaic_gpu import support

WORD = 32  # pairs
_WIDEST = 4  # words of a load
_GLOBAL = 1  # the address space
_LAYOUT = plgpu.Layout.WGMMA


def in_words(x: Named, name: str) -> Named:
    """A mask with a bit for each element along axis `name`, a multiple of 32."""
    axis = x.axes.index(name)
    shape = (*x.shape[:axis], x.shape[axis] // WORD, WORD, *x.shape[axis + 1 :])
    places = jnp.arange(WORD, dtype=jnp.uint32).reshape(
        WORD, *[1] * (x.value.ndim - 1 - axis)
    )
    bits = x.value.reshape(shape).astype(jnp.uint32) << places
    return Named(jnp.sum(bits, axis + 1, dtype=jnp.uint32), x.axes)


def load(ref, shape: tuple[int, int], *, transposed: bool) -> jax.Array:
    """A block of pairs.

    Args:
      ref: what it is loaded from: [queries, keys] in global memory, whose keys follow
        one another.
      shape: of the block.
      transposed: whether it is [keys, queries].
    """

    def of_place(pointer, row, column, strides, kind):
        rows, columns = reversed(strides) if transposed else strides
        first = _sum(_product(row, rows), _product(column, columns))
        here = utils.getelementptr(pointer, [first], kind)
        pair = ir.VectorType.get((2,), kind)

        def register(i, j):
            places = [8 * i * rows + (8 * j + e) * columns for e in (0, 1)]
            at = [utils.getelementptr(here, [_i32(n)], kind) for n in places]
            if not transposed:
                return llvm.load(pair, at[0])
            return vector.from_elements(pair, [llvm.load(kind, x) for x in at])

        return register

    return _loaded(ref, shape, ref.dtype, of_place)


def load_words(ref, shape: tuple[int, int], *, transposed: bool) -> jax.Array:
    """A block of a mask, from words of the rows of the block.

    Args:
      ref: [rows, words], or [words, rows] where the block is transposed.
    """
    count = shape[1] // WORD
    width = 1 if transposed else math.gcd(count, _WIDEST)
    kind = ir.IntegerType.get_signless

    def of_place(pointer, row, column, strides, word):
        rows, words = reversed(strides) if transposed else strides
        here = utils.getelementptr(pointer, [_product(row, rows)], word)
        several = ir.VectorType.get((width,), word)

        def row_of_words(i):
            found = []
            for k in range(0, count, width):
                place = _i32(8 * i * rows + k * words)
                loaded = llvm.load(several, utils.getelementptr(here, [place], word))
                found += [vector.extract(loaded, [], [n]) for n in range(width)]
            return [arith.shrui(x, column) for x in found]

        of_rows = [row_of_words(i) for i in range(2)]
        pair = ir.VectorType.get((2,), kind(1))

        def register(i, j):
            own = of_rows[i][8 * j // WORD]
            found = [_bit(own, (8 * j + e) % WORD) for e in (0, 1)]
            return vector.from_elements(pair, found)

        return register

    return _loaded(ref, shape, jnp.bool_, of_place)


def _loaded(ref, shape, dtype, of_place: Callable) -> jax.Array:
    """A block whose registers a function makes.

    Args:
      of_place: `of_place(pointer, row, column, strides, kind)`, of the first element of
        the ref, the thread's first row and column, and the ref's strides and elements'
        type, gives `register(i, j)`: that of row `row + 8 * i` and of the columns
        `column + 8 * j` and the next.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _LAYOUT.reduce(1), _LAYOUT.reduce(0)),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=_LAYOUT),
    )
    def make(_, ref, rows, columns):
        kind = ir.MemRefType(ref.type)
        strides, _ = kind.get_strides_and_offset()
        row, column = (
            vector.extract(x.registers.flat[0], [], [0]) for x in (rows, columns)
        )
        space = llvm.PointerType.get(_GLOBAL)
        pointer = llvm.addrspacecast(space, utils.memref_ptr(ref))
        register = of_place(pointer, row, column, strides, kind.element_type)
        layout = _LAYOUT.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        for n in range(registers.size):
            registers.flat[n] = register(n % 2, n // 2)
        signed = False if dtype == jnp.bool_ else None
        return mgpu.FragmentedArray(
            _registers=registers, _layout=layout, _is_signed=signed
        )

    return make(ref, *(support.numbers_along(axis, shape[axis]) for axis in (0, 1)))


def _bit(word: ir.Value, place: int) -> ir.Value:
    """In one instruction; the compiler would shift the bit to the end before."""
    text = f"{{.reg .b32 x; and.b32 x, $1, {1 << place:#x}; setp.ne.u32 $0, x, 0;}}"
    return llvm.inline_asm(ir.IntegerType.get_signless(1), [word], text, "=b,r")


def _i32(number: int) -> ir.Value:
    kind = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.IntegerAttr.get(kind, number))


def _product(a: ir.Value, b: int) -> ir.Value:
    return arith.muli(a, _i32(b))


def _sum(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.addi(a, b)
