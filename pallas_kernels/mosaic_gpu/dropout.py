"""Dropout's bits as the results of products are dealt to threads.

A thread has rows r and r + 8 of sixteen, and two neighbours of each eight columns. So
it has all pairs that share a call of the cipher (`core.dropout`), or half of them where
rows are keys or keys no multiple of 32, and makes bits for its own pairs alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.core import dropout as core
from pallas_kernels.core.arithmetic import Arithmetic
from pallas_kernels.core.positions import Numbering
from pallas_kernels.mosaic_gpu import support

_ROWS = 64  # of a warpgroup's products


def bits(
    dropout: core.Dropout,
    rows: Mapping[str, tuple[Any, int]],
    numberings: Mapping[str, Numbering],
    order: tuple[str, str],
    arithmetic: Arithmetic,
) -> jax.Array:
    """`Dropout.bits` of a block of 64 rows."""
    del arithmetic
    shape = tuple(rows[name][1] for name in order)
    assert shape[0] == _ROWS, f"{shape=}"
    layout, splat = plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT
    count = core.rows_of_calls(rows, order)

    def numbers(axis: int) -> list[jax.Array]:
        name = order[axis]
        start, size = rows[name]
        group = groups_of_rows(support.numbers_along(axis, size), count[name])
        group = core.first_group(start, count[name]) + group
        return core.numbers_of_calls(name, group, numberings[name], count[name])

    own = [numbers(axis) for axis in range(2)]
    types = ([layout.reduce(1 - axis)] * len(x) for axis, x in enumerate(own))

    @support.inline_mgpu(
        arg_types=(*types, splat, splat),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.uint32), layout=layout),
    )
    def make(_, of_rows, of_columns, key, tweak):
        row = _elements(of_rows, 0, 0)
        columns = [
            [_elements(of_columns, i, neighbour) for neighbour in range(2)]
            for i in range(shape[1] // 8)
        ]
        seed = _Word(key.registers.item()), _Word(tweak.registers.item())
        found = of_thread(row, columns, count, *seed, order, _wide_product, _turned)
        kind = ir.VectorType.get((2,), ir.IntegerType.get_signless(32))
        to = layout.to_mgpu()
        registers = np.empty(to.registers_shape(shape), dtype=object)
        for i, pair in enumerate(found):
            values = [x.value for x in pair]
            registers.flat[i] = vector.from_elements(kind, values)
        return mgpu.FragmentedArray(_registers=registers, _layout=to, _is_signed=False)

    key, tweak = (x.astype(jnp.uint32) for x in dropout.seed)
    return make(*own, key, tweak)


def _elements(arrays, register: int, place: int) -> list[_Word]:
    """The same element of the thread's, of each of these arrays."""
    registers = (x.registers.flat[register] for x in arrays)
    return [_Word(vector.extract(x, [], [place])) for x in registers]


def groups_of_rows(number: jax.Array, count: int) -> jax.Array:
    """The groups (`core.numbers_of_calls`) that rows of a block belong to."""
    bits = jnp.full_like(number, (8 * count).bit_length() - 1)
    return lax.shift_right_logical(number, bits) * 8 + (number & 7)


def of_thread(
    row: Sequence[Any],
    columns: Sequence[Sequence[Sequence[Any]]],
    count: Mapping[str, int],
    key,
    tweak,
    order: tuple[str, str],
    wide_product: Callable,
    turned: Callable,
) -> list[tuple[Any, ...]]:
    """The bits of a thread's pairs, in the order of its registers.

    Args:
      row: numbers (`core.numbers_of_calls`) of its rows, r and, the same, r + 8.
      columns: of its columns, two neighbours in a list: c, c + 8, c + 16 and so on.
      count: of `core.rows_of_calls`.
      key, tweak: the seed.
      order: of the block.
      wide_product, turned: of such numbers, as in `core`.

    Returns:
      Of each two neighbours: those of rows r and r + 8, then the next columns'.
    """
    found = []
    for neighbours in columns[:: count[order[1]]]:
        calls = []
        for column in neighbours:
            numbers = (row, column) if order[0] == "t" else (column, row)
            (t,), (s, *turns) = numbers
            words = core.cipher(s, t ^ tweak, key, wide_product)
            bits = [core.bits_of_keys(word, turns, turned) for word in words]
            calls.append(bits if order[0] == "s" else zip(*bits, strict=True))
        # Of each call: of each of its columns, of rows r and r + 8.
        for column in zip(*calls, strict=True):
            found += zip(*column, strict=True)
    return found


@dataclasses.dataclass(frozen=True)
class _Word:
    """A uint32 in a register."""

    value: ir.Value

    def _with(self, operation: Callable, other) -> _Word:
        return _Word(operation(self.value, _operand(other)))

    def __xor__(self, other) -> _Word:
        return self._with(arith.xori, other)

    def __add__(self, other) -> _Word:
        return self._with(arith.addi, other)

    def __lshift__(self, other) -> _Word:
        return self._with(arith.shli, other)


def _operand(x: _Word | np.uint32) -> ir.Value:
    if isinstance(x, _Word):
        return x.value
    kind = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.IntegerAttr.get(kind, int(x)))


def _wide_product(a: _Word, b: np.uint32) -> tuple[_Word, _Word]:
    """In one instruction; the compiler would go on in words of 64 bits."""
    kind = ir.IntegerType.get_signless(32)
    text = "{.reg .b64 w; mul.wide.u32 w, $2, $3; mov.b64 {$1, $0}, w;}"
    both = llvm.StructType.get_literal([kind, kind])
    numbers = [a.value, _operand(b)]
    found = llvm.inline_asm(both, numbers, text, "=r,=r,r,n")
    high, low = (llvm.extractvalue(kind, found, [i]) for i in range(2))
    return _Word(high), _Word(low)


def _turned(word: _Word, by: _Word | int) -> _Word:
    """In one instruction, whatever number of bits."""
    bits = _operand(by if isinstance(by, _Word) else np.uint32(by))
    text = "shf.l.wrap.b32 $0, $1, $1, $2;"
    kind = ir.IntegerType.get_signless(32)
    return _Word(llvm.inline_asm(kind, [word.value, bits], text, "=r,r,r"))


def where_below(x: jax.Array, bits: jax.Array, limit: int) -> jax.Array:
    """In two instructions; the compiler would choose after rounding to two bytes."""
    layout = plgpu.Layout.WGMMA

    @support.inline_mgpu(
        arg_types=(layout, layout),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
    )
    def choose(_, x, bits):
        text = (
            f"{{.reg .pred p; setp.lt.u32 p, $2, {limit}; "
            "selp.f32 $0, $1, 0f00000000, p;}"
        )
        registers = np.empty_like(x.registers)
        pairs = zip(x.registers.flat, bits.registers.flat, strict=True)
        for i, pair in enumerate(pairs):
            values = [
                llvm.inline_asm(
                    ir.F32Type.get(),
                    [vector.extract(of, [], [place]) for of in pair],
                    text,
                    "=f,f,r",
                )
                for place in range(2)
            ]
            registers.flat[i] = vector.from_elements(pair[0].type, values)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=x.layout, _is_signed=None
        )

    return choose(x, bits)
