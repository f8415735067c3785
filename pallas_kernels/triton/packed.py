"""Elements of one byte, loaded two at a time and taken apart in registers.

A product of matrices reads the elements of a tile from shared memory in pairs of rows,
which instructions there are for if an element has two bytes: one byte would be read by
itself. So a tile of one-byte elements is loaded as one of half as many columns of two
bytes each, and a register of it has two columns of two rows:

    byte          0             1             2             3
    (row, column) (s, 2 i)      (s, 2 i + 1)  (s + 1, 2 i)  (s + 1, 2 i + 1)

From it come a tile of the even columns and one of the odd columns, in the dtype of the
products. To the kernel they are two pieces of the head axis (`layout.Layout.head`): the
order of columns matters to no product, if queries and outputs have it, too.

So it is with elements of four bits (`core.nibbles`), of which two bytes have four: four
columns of two rows are in a register, and every fourth column is one piece.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import device
from pallas_kernels.core.nibbles import BYTES

# The table of `lop3` for (x & y) ^ z. Two instructions that have a constant each ptxas
# leaves as two.
_AND_XOR = "0x6A"
# Of a register x with two columns of two rows: the PTX that makes the even column and
# the odd one, two elements of float16 or of bfloat16, or what goes before `_TO_BFLOAT`.
# A number of bfloat16 with the bits 0x4300 + n is 128 + n, one of float16 with those of
# 0x6400 + n is 1024 + n, so that int8 takes one subtraction, which is exact.
_INT8_IN_BFLOAT16 = (
    f"mov.b32 c, 0x43004300; lop3.b32 a, x, 0x007F007F, c, {_AND_XOR}; "
    f"lop3.b32 b, x, 0x00800080, c, {_AND_XOR}; fma.rn.bf16x2 $0, b, m, a;"
)
_INT8_IN_FLOAT16 = (
    f"mov.b32 c, 0x64806480; lop3.b32 a, x, 0x00FF00FF, c, {_AND_XOR}; "
    "sub.f16x2 $0, a, c;"
)
# Numbers of four bits with the sign's bit turned are 8 too large: 136 and 1032 more.
_INT4_IN_BFLOAT16 = (
    f"mov.b32 c, 0x43084308; lop3.b32 a, x, 0x000F000F, c, {_AND_XOR}; "
    "mov.b32 b, 0x3F803F80; mov.b32 m, 0xC308C308; fma.rn.bf16x2 $0, a, b, m;"
)
_INT4_IN_FLOAT16 = (
    f"mov.b32 c, 0x64086408; lop3.b32 a, x, 0x000F000F, c, {_AND_XOR}; "
    "sub.f16x2 $0, a, c;"
)
_SHIFTED = "shr.u32 x, x, 8; "
_BFLOAT16 = (
    "mov.b32 {l, h}, a; cvt.f32.f16 f, l; cvt.f32.f16 g, h; cvt.rn.bf16x2.f32 $0, g, f;"
)
_HALVES = {
    # e5m2 has the upper byte of a float16.
    "float8_e5m2": ("prmt.b32 a, x, 0, 0x2404; ", "and.b32 a, x, 0xFF00FF00; "),
    "float8_e4m3fn": tuple(
        f"prmt.b32 b, x, 0, {bytes_}; mov.b32 {{l, h}}, b; cvt.rn.f16x2.e4m3x2 a, l; "
        for bytes_ in ("0x4420", "0x4431")
    ),
}
_HEAD = (
    "{.reg .b32 x, a, b, c, m; .reg .b16 l, h; .reg .f32 f, g; "
    "mov.b32 x, $1; mov.b32 m, 0xBF80BF80; "  # twice -1
)


def _assembly(kind, dtype) -> tuple[str, ...]:
    kind, dtype = jnp.dtype(kind).name, jnp.dtype(dtype).name
    if kind == "uint8":
        own = _INT4_IN_BFLOAT16 if dtype == "bfloat16" else _INT4_IN_FLOAT16
        bodies = tuple(f"shr.u32 x, x, {4 * i}; {own}" for i in range(4))
    elif kind == "int8":
        even = _INT8_IN_BFLOAT16 if dtype == "bfloat16" else _INT8_IN_FLOAT16
        bodies = even, _SHIFTED + even
    else:
        last = _BFLOAT16 if dtype == "bfloat16" else "mov.b32 $0, a;"
        bodies = tuple(half + last for half in _HALVES[kind])
    return tuple(f"{_HEAD}{body}}}" for body in bodies)


def turns(kind, size: int, dtype) -> int:
    """In how many pieces, of columns in turns, head axes are loaded; 1 for whole ones.

    Args:
      kind: dtype of the array.
      size: of its last axis.
      dtype: of products.
    """
    if kind == BYTES:
        return 4
    if jnp.dtype(kind).itemsize > 1 or jnp.dtype(dtype).itemsize != 2:
        return 1
    if kind == jnp.float8_e4m3fn and device.capability() < 89:
        return 1  # no instruction converts it
    is_packed = size >= 32 and size & (size - 1) == 0
    return 2 if is_packed else 1


def is_served(kind, size: int) -> bool:
    """Whether heads of such a size can be loaded: pieces have 16 columns or more.

    Args:
      kind: dtype of the array.
      size: elements of a head.
    """
    return kind != BYTES or (size >= 64 and size & (size - 1) == 0)


@dataclasses.dataclass(frozen=True)
class Packed:
    """A tile of int16 of one-byte elements, or of four bits, and the array's dtype."""

    pairs: Any
    kind: Any

    def unpacked(self, dtype) -> tuple[jax.Array, ...]:
        """The even columns and the odd ones; or every fourth, from each of four."""
        if jnp.dtype(dtype).itemsize > 2:  # of four bits
            pairs = self.pairs.astype(jnp.int32)
            numbers = (pairs >> 4 * i & 15 for i in range(4))
            return tuple(((x ^ 8) - 8).astype(dtype) for x in numbers)
        found = jax.ShapeDtypeStruct(self.pairs.shape, dtype)
        return tuple(
            plgpu.elementwise_inline_asm(
                assembly,
                args=[self.pairs],
                constraints="=r,r",
                pack=2,
                result_shape_dtypes=[found],
            )[0]
            for assembly in _assembly(self.kind, dtype)
        )
