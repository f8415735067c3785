"""Operands with an element for each pair of query and key rows: a bias, masks, tables.

They lie in global memory, and threads load what belongs to their own pairs of a block,
straight into the places of results of products: of a bias two neighbours at once, or
one of a transposed block, of a mask 16 bits at once, for those of its pairs that lie in
64 columns of a row of the block. XLA puts these bits together before the kernel.
Tables are read by `gather`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import DenseMask, Relation, Tiling
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.mosaic_gpu import support

# A row of a result of products is dealt to four threads, two neighbours each in turn.
# So of 64 columns a thread has 16, whose bits of a mask are one word.
WORDS, COLUMNS = 4, 64
_EIGHTS, NEIGHBOURS = 8, 2
BITS = _EIGHTS * NEIGHBOURS
FULL = 0xFFFF  # a word whose pairs are all kept
LAYOUT = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class Packed(Named):
    """A mask of pairs, as which it counts, whose value has a bit for each.

    Attributes:
      value: uint16. Along axis `columns` word 4 * i + n has bit 2 * j + e for element
        64 * i + 8 * j + 2 * n + e, which is 0 beyond the last.
      columns: `t` or `s`.
      size: elements along it.
    """

    columns: str
    size: int

    @classmethod
    def of(cls, x: Named, columns: str) -> Packed:
        """Of a boolean array without broadcast axes."""
        axis = x.axes.index(columns)
        before, (size, *after) = x.shape[:axis], x.shape[axis:]
        pad = [(0, 0)] * len(x.axes)
        pad[axis] = (0, -size % COLUMNS)
        bits = jnp.pad(x.value, pad)
        bits = bits.reshape(*before, -1, _EIGHTS, WORDS, NEIGHBOURS, *after)
        summed = axis + 1, axis + 3
        bits = bits.astype(jnp.uint16) << _places(bits.ndim, summed)
        words = jnp.sum(bits, summed, dtype=jnp.uint16)
        return cls(words.reshape(*before, -1, *after), x.axes, columns, size)

    @property
    def words(self) -> Named:
        return Named(self.value, self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = zip(self.axes, self.value.shape, strict=True)
        return tuple(self.size if a == self.columns else n for a, n in shape)

    @property
    def dtype(self):
        return jnp.dtype(jnp.bool_)

    def squeezed(self) -> Packed:
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMask(DenseMask):
    """A mask that is `Packed`. What is asked of it is found from its words.

    They are an eighth of its bytes, and it may be asked three times for each kernel.
    """

    def attended_keys(self, positions, kv_size: int) -> Named:
        words = self.mask.words
        if self.mask.columns == "t":
            return DenseMask(words).attended_keys(positions, kv_size)
        lost = tuple(i for i, name in enumerate(words.axes) if name in ("n", "t"))
        names = tuple(a for a in words.axes if a not in ("n", "t"))
        axes = (*(a for a in names if a != "s"), "s")
        any_of = lax.reduce(words.value, np.uint16(0), lax.bitwise_or, lost)
        any_of = Named(any_of, names).to(axes)
        bits = any_of.reshape(*any_of.shape[:-1], -1, 1, WORDS, 1)
        bits = bits >> _places(bits.ndim, (bits.ndim - 3, bits.ndim - 1)) & 1
        kept = bits.reshape(*any_of.shape[:-1], -1)[..., : self.mask.size] == 1
        return Named(kept, axes)

    def block_relation(self, tiling: Tiling) -> Relation:
        name = "block_q" if self.mask.columns == "t" else "block_kv"
        rows = getattr(tiling, name) // BITS
        tiling = dataclasses.replace(tiling, **{name: rows})
        words = self.mask.words
        full = Named(words.value == FULL, words.axes)
        some = DenseMask(words).block_relation(tiling).some
        return Relation(some, DenseMask(full).block_relation(tiling).all)


def has_other_arrays(spec: AttentionSpec) -> bool:
    """Whether arrays of pairs are neither a mask alone nor operands with gradients.

    Kernels load words of bits, and floats.
    """

    def of_pairs(tree) -> int:
        return sum({"t", "s"} <= set(x.axes) for x in jax.tree.leaves(tree))

    # What has a mask of pairs as a part of it is not in its place.
    place = DenseMask(Named(np.bool_(True), ()))
    masks = (atom.without_lists() for atom in spec.masks)
    others = [atom for atom in masks if atom.with_pairs(lambda _: place) is not place]
    floats = len(spec.score.pair_operands)
    return of_pairs(others) > 0 or of_pairs(spec.score.terms) > floats


def in_words(spec: AttentionSpec, columns: str) -> AttentionSpec:
    """The spec with its masks of pairs in words, for a kernel (fields hold `Named`).

    Args:
      columns: rows of `t` or `s` that are the columns of the kernel's blocks.
    """

    def packed(mask: Named) -> PackedMask:
        return PackedMask(Packed.of(mask, columns))

    masks = tuple(atom.with_pairs(packed) for atom in spec.masks)
    return dataclasses.replace(spec, masks=masks)


def _places(ndim: int, axes: tuple[int, int]) -> jax.Array:
    """Bits of a word, along two of so many axes: of eight columns, two neighbours."""
    places = jnp.arange(BITS, dtype=jnp.uint16).reshape(_EIGHTS, NEIGHBOURS)
    return jnp.expand_dims(places, [i for i in range(ndim) if i not in axes])


def load(ref, shape: tuple[int, int], *, transposed: bool) -> jax.Array:
    """A block of pairs.

    Args:
      ref: what it is loaded from: [queries, keys] in global memory, whose keys follow
        one another.
      shape: of the block.
      transposed: whether it is [keys, queries].
    """
    if transposed and ref.dtype.itemsize == 2:
        return turned(fetch(ref, shape), ref.dtype)

    def of_place(pointer, row, column, strides, kind):
        rows, columns = reversed(strides) if transposed else strides
        first = sum_of(_product(row, rows), _product(column, columns))
        here = utils.getelementptr(pointer, [first], kind)
        pair = ir.VectorType.get((2,), kind)

        def register(i, j):
            places = [8 * i * rows + (8 * j + e) * columns for e in (0, 1)]
            at = [utils.getelementptr(here, [i32(n)], kind) for n in places]
            if not transposed:
                return llvm.load(pair, at[0])
            return vector.from_elements(pair, [llvm.load(kind, x) for x in at])

        return register

    return loaded(ref, shape, ref.dtype, of_place)


def fetch(ref, shape: tuple[int, int]) -> jax.Array:
    """Numbers of two bytes of a transposed block, as they lie in memory, for `turned`.

    Of each eight keys and eight queries a thread gets two keys of one query, which
    follow one another, in one word (uint32): half of the registers of the block.

    Args:
      ref, shape: as for `load`.
    """

    def of_place(pointer, row, column, strides, kind):
        queries, keys = strides
        within = arith.andi(row, i32(_EIGHTS - 1))  # 8 rows: here they are queries
        key = sum_of(arith.subi(row, within), column)
        first = sum_of(_product(within, queries), _product(key, keys))
        here = utils.getelementptr(pointer, [first], kind)
        word = ir.IntegerType.get_signless(32)
        both = ir.VectorType.get((2,), word)

        def register(i, j):
            places = [8 * i * keys + 8 * (2 * j + e) * queries for e in (0, 1)]
            at = [utils.getelementptr(here, [i32(n)], kind) for n in places]
            return vector.from_elements(both, [llvm.load(word, x) for x in at])

        return register

    return loaded(ref, (shape[0], shape[1] // 2), jnp.uint32, of_place)


def turned(words: jax.Array, dtype) -> jax.Array:
    """The transposed block of numbers that were fetched (`fetch`)."""
    keys, half = words.shape

    @support.inline_mgpu(
        arg_types=(LAYOUT,),
        return_type=plgpu.ShapeDtypeStruct((keys, 2 * half), dtype, layout=LAYOUT),
    )
    def turn(_, words):
        kind = ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
        shape = words.layout.registers_shape((keys, 2 * half))
        registers = np.empty(shape, dtype=object)
        word = ir.IntegerType.get_signless(32)
        text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
        for n in range(registers.size):
            i, j = n % 2, n // 2
            own = vector.extract(words.registers.flat[j // 2 * 2 + i], [], [j % 2])
            found = llvm.inline_asm(word, [own], text, "=r,r", has_side_effects=True)
            registers.flat[n] = llvm.bitcast(kind, found)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=words.layout, _is_signed=None
        )

    return turn(words)


def load_words(ref, shape: tuple[int, int], *, transposed: bool) -> jax.Array:
    """A block of a mask: for each pair, the word (uint32) with its bit, for `masked`.

    Args:
      ref: [rows, words], or [words, rows] where the block is transposed.
    """

    def of_place(pointer, row, column, strides, word):
        rows, words = reversed(strides) if transposed else strides
        own = _product(arith.shrui(column, i32(1)), words)
        here = utils.getelementptr(pointer, [sum_of(_product(row, rows), own)], word)

        def load_word(i, n):
            place = i32(8 * i * rows + n * WORDS * words)
            loaded = llvm.load(word, utils.getelementptr(here, [place], word))
            return arith.extui(ir.IntegerType.get_signless(32), loaded)

        of_rows = [
            [load_word(i, n) for n in range(shape[1] // COLUMNS)] for i in range(2)
        ]
        pair = ir.VectorType.get((NEIGHBOURS,), ir.IntegerType.get_signless(32))

        def register(i, j):
            return vector.from_elements(pair, [of_rows[i][j // _EIGHTS]] * NEIGHBOURS)

        return register

    return loaded(ref, shape, jnp.uint32, of_place)


def store(ref, x: jax.Array, *, first: int = 0) -> None:
    """Writes columns of a block [queries, keys], two neighbours at once.

    Args:
      ref: as many columns, in global memory or as rows in shared memory.
      first: which columns.
    """
    columns = slice(first, first + ref.shape[-1])

    @support.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def write(_, ref, x):
        x[:, columns].store_untiled(ref, optimized=False)

    write(ref, x)


def masked(x: jax.Array, kept: jax.Array) -> jax.Array:
    """`Arithmetic.masked`, with words of `load_words`, too.

    The compiler tests seven bits of a word in one instruction where the choices come
    one after the other. With a constant -inf it would multiply by the scale before the
    choice. Then the scale and the difference are no longer one instruction.
    """
    if kept.dtype == jnp.bool_:
        return jnp.where(kept, x, jnp.broadcast_to(support.minus_infinity(), x.shape))

    @support.inline_mgpu(
        arg_types=(LAYOUT, LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LAYOUT),
    )
    def choose(_, x, words):
        registers = np.empty_like(x.registers)
        count = registers.size
        for n in (*range(0, count, 2), *range(1, count, 2)):  # a row, then the other
            both = x.registers.flat[n], words.registers.flat[n]
            first = n // 2 % _EIGHTS * NEIGHBOURS
            found = []
            for e in range(NEIGHBOURS):
                one, word = (vector.extract(of, [], [e]) for of in both)
                found.append(_where_bit(one, word, first + e))
            registers.flat[n] = vector.from_elements(both[0].type, found)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=x.layout, _is_signed=None
        )

    return choose(x, kept)


def loaded(ref, shape, dtype, of_place: Callable) -> jax.Array:
    """A block whose registers a function makes.

    Args:
      of_place: `of_place(pointer, row, column, strides, kind)`, of the first element of
        the ref, the thread's first row and column, and the ref's strides and elements'
        type, gives `register(i, j)`: that of row `row + 8 * i` and of the columns
        `column + 8 * j` and the next.
    """

    @support.inline_mgpu(
        arg_types=(plgpu.RefType(), LAYOUT.reduce(1), LAYOUT.reduce(0)),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=LAYOUT),
    )
    def make(_, ref, rows, columns):
        kind = ir.MemRefType(ref.type)
        strides, _ = kind.get_strides_and_offset()
        row, column = (
            vector.extract(x.registers.flat[0], [], [0]) for x in (rows, columns)
        )
        pointer = support.pointer(ref)
        register = of_place(pointer, row, column, strides, kind.element_type)
        layout = LAYOUT.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        for n in range(registers.size):
            registers.flat[n] = register(n % 2, n // 2)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=layout, _is_signed=is_signed(dtype)
        )

    return make(ref, *(support.numbers_along(axis, shape[axis]) for axis in (0, 1)))


def is_signed(dtype) -> bool | None:
    if not jnp.issubdtype(dtype, jnp.integer):
        return None
    return bool(jnp.issubdtype(dtype, jnp.signedinteger))


def _where_bit(x: ir.Value, word: ir.Value, place: int) -> ir.Value:
    """x where a word has a bit, else -inf."""
    text = (
        f"{{.reg .b32 y; .reg .pred p; and.b32 y, $2, {1 << place:#x}; "
        "setp.ne.u32 p, y, 0; selp.f32 $0, $1, 0fFF800000, p;}"
    )
    return llvm.inline_asm(ir.F32Type.get(), [x, word], text, "=f,f,r")


def i32(number: int) -> ir.Value:
    kind = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.IntegerAttr.get(kind, number))


def _product(a: ir.Value, b: int) -> ir.Value:
    return arith.muli(a, i32(b))


def sum_of(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.addi(a, b)
