"""Probabilities in eight bits (float8_e4m3fn), as the left operand of a product.

Two things differ from 16 bits. A product gives a thread the columns 2t, 2t + 1, 8 + 2t
and 9 + 2t of every 16, and wants 4t to 4t + 3 of its left operand. Nothing is
exchanged for that: the sum over keys has any order, so values lie in memory with keys
0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15 of every 16 in this order (`fp8.values`).

And ptxas puts all products in sequence (C7513) where the next operand is made while a
product reads the last one. So it is made in two steps: `rounded` or `by_bits` give the
bytes of each two columns in a word, and `joined` puts two words together once the
product has been waited for.

`by_bits` makes 2**x without an exponential and without a conversion. The bits of a
float are an exponent and a mantissa: read as an integer, those of e4m3 are 8 * (x + 7)
where x is whole, and linear in between, where 2**x lies up to 6 % below them. That is
one addition, a clamp and a rounding to an integer (Schraudolph, "A Fast, Compact
Approximation of the Exponential Function", 1999, in fewer bits). It starts lower by the
mean surplus of that line, `_SURPLUS`, so that sums of many are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic_gpu import support

DTYPE = jnp.float8_e4m3fn
# The largest byte is that of 448, and whole numbers x lie 8 bytes apart from -7 on.
_LARGEST, _STEP = 126, 8
# The mean of (1 + f) / 2**f for f from 0 to 1.
_SURPLUS = 0.5 / math.log(2.0) ** 2
# 2**x has byte 0 from x = -LOW on.
LOW = 7.0 - math.log2(_SURPLUS)

_PRODUCT, _LEFT, _SCALAR = (
    plgpu.Layout.WGMMA,
    plgpu.Layout.WGMMA_8BIT,
    plgpu.Layout.WG_SPLAT,
)


def rounded(p: jax.Array) -> jax.Array:
    """Float32 probabilities [rows, keys], rounded: words for `joined`."""
    pair = "cvt.rn.satfinite.e4m3x2.f32 {}, {}, {}; "
    text = (
        "{ .reg .b16 l, h; "
        + pair.format("l", "$3", "$2")
        + pair.format("h", "$5", "$4")
        + "cvt.u32.u16 $0, l; cvt.u32.u16 $1, h; }"
    )
    return _in_words(p.shape, text)(p)


def by_bits(x: jax.Array, unit: jax.Array, shift: jax.Array) -> jax.Array:
    """2 ** (x * unit + shift), at most 448 and 0 below 2**-7: words for `joined`.

    Args:
      x: float32 [rows, keys]. That of -inf is 0.
      unit: a scalar.
      shift: in the shape of x.
    """
    # A fused multiply-add with 2**23 leaves the nearest integer in the lowest bits.
    whole, last = _bits(float(_LARGEST)), _bits(2.0**23)
    lines = [
        f"fma.rn.sat.f32 z{i}, ${2 + i}, $6, $7; fma.rn.f32 z{i}, z{i}, {whole}, "
        f"{last}; mov.b32 b{i}, z{i};"
        for i in range(4)
    ]
    text = (
        "{ .reg .f32 z<4>; .reg .b32 b<4>; "
        + " ".join(lines)
        + " prmt.b32 $0, b0, b1, 0x0040; prmt.b32 $1, b2, b3, 0x0040; }"
    )
    part = _STEP / _LARGEST
    return _in_words(x.shape, text, with_line=True)(
        x, unit * part, (shift + LOW) * part
    )


def joined(words: jax.Array) -> jax.Array:
    """The left operand [rows, keys] of words [rows, keys / 2]."""
    rows, columns = words.shape
    shape = rows, 2 * columns
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(DTYPE), layout=_LEFT)

    @support.inline_mgpu(arg_types=(_PRODUCT,), return_type=result)
    def join(_, words):
        def four(index):
            pair = words.registers[index]
            both = [vector.extract(pair, [], [i]) for i in (0, 1)]
            found = _asm("prmt.b32 $0, $1, $2, 0x5410;", 1, both)
            return utils.bitcast(found, ir.VectorType.get((4,), _kind()))

        return _array(shape, _LEFT, None, four)

    return join(words)


def _kind() -> ir.Type:
    return ir.Float8E4M3FNType.get()


def _bits(x: float) -> str:
    """A number of float32 as PTX has it."""
    return f"0f{np.float32(x).view(np.uint32):08X}"


def _in_words(
    shape: tuple[int, ...], text: str, *, with_line: bool = False
) -> Callable[..., jax.Array]:
    """A function that makes words of two bytes from each four results of a thread.

    Args:
      shape: of the results.
      text: PTX. Its results are $0 and $1, its operands $2 to $5.
      with_line: whether $6 and $7 are the scalar and the number of a row that the
        function takes, too.
    """
    rows, columns = shape
    result = plgpu.ShapeDtypeStruct(
        (rows, columns // 2), jnp.dtype(jnp.uint32), layout=_PRODUCT
    )
    types = (_PRODUCT, _SCALAR, _PRODUCT) if with_line else (_PRODUCT,)

    @support.inline_mgpu(arg_types=types, return_type=result)
    def make(_, x, *line):
        def two(index):
            row, column, *rest = index
            pairs = [x.registers[(row, 2 * column + i, *rest)] for i in (0, 1)]
            operands = [vector.extract(p, [], [i]) for p in pairs for i in (0, 1)]
            if line:
                unit, shift = line
                own = shift.registers[(row, 2 * column, *rest)]
                operands += [unit.registers[()], vector.extract(own, [], [0])]
            return _asm(text, 2, operands)

        return _array((rows, columns), _LEFT, False, two, of_words=True)

    return make


def _array(
    shape, layout, is_signed, register: Callable, *, of_words: bool = False
) -> mgpu.FragmentedArray:
    """An array of registers by their places in a left operand of this shape."""
    places = layout.to_mgpu().registers_shape(shape)
    registers = np.empty(places, dtype=object)
    for index in np.ndindex(places):
        registers[index] = register(index)
    kept = _PRODUCT if of_words else layout
    return mgpu.FragmentedArray(
        _registers=registers, _layout=kept.to_mgpu(), _is_signed=is_signed
    )


def _asm(text: str, words: int, operands: Sequence[Any]) -> ir.Value:
    """A word that PTX makes, or a vector of two."""
    i32 = ir.IntegerType.get_signless(32)
    kinds = ["f" if isinstance(x.type, ir.F32Type) else "r" for x in operands]
    constraints = ",".join(["=r"] * words + kinds)
    if words == 1:
        return llvm.inline_asm(i32, list(operands), text, constraints)
    both = llvm.StructType.get_literal([i32] * words)
    found = llvm.inline_asm(both, list(operands), text, constraints)
    one = ir.VectorType.get((1,), i32)
    parts = [utils.bitcast(llvm.extractvalue(i32, found, [i]), one) for i in (0, 1)]
    return utils.vector_concat(parts)


def cleared(sums: jax.Array, after: jax.Array) -> jax.Array:
    """Sums of a product, float32, with 0 in the last eight columns.

    ptxas puts all products of a loop in sequence (C7511) if it can read the old number
    of a column after the new one is written. So the zeros are made of what was read.

    Args:
      sums: [rows, columns].
      after: [rows, 8], finite, of the columns' old numbers.
    """
    result = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=_PRODUCT)

    @support.inline_mgpu(arg_types=(_PRODUCT, _PRODUCT), return_type=result)
    def clear(_, sums, after):
        registers = sums.registers.copy()
        zero = utils.c(0.0, ir.F32Type.get())
        zero = vector.broadcast(ir.VectorType.get((2,), zero.type), zero)
        for index in np.ndindex(after.registers.shape):
            own = (index[0], registers.shape[1] - 1, *index[2:])
            registers[own] = arith.mulf(after.registers[index], zero)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=_PRODUCT.to_mgpu(), _is_signed=None
        )

    return clear(sums, after)
