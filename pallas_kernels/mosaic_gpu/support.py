"""What differs between JAX versions, and the GPU's own instructions."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.core import pointwise
from pallas_kernels.core.arithmetic import Arithmetic

WARPGROUP = 128  # threads
COLUMNS = 8  # of results of products, of which a thread has two in each row
# Of a block of 128 rows in tensor memory (not in JAX 0.10).
ROW_OF_A_THREAD: Any = getattr(plgpu.Layout, "TCGEN05_TMEM_NATIVE", None)
_GLOBAL, _SHARED = 1, 3  # address spaces
_LOADS_BY_INDEX = jax.__version_info__ < (0, 11)
# Whether tiles that are one swizzled part wide can be copied from arrays of any width.
COPIES_ANY_WIDTH = jax.__version_info__ >= (0, 11)

# A tile in shared memory as TMA writes it and wgmma reads it: bytes of a row of a
# swizzled part, and so the multiple that rows are padded to.
_SWIZZLES = (128, 64, 32)


# Of functions of pairs: what kernels make of them (`Call.lacking`).
_LACKING = (
    "acos acosh asin asinh atan atan2 atanh cbrt ceil clz cosh digamma erf erf_inv "
    "erfc expm1 floor is_finite lgamma log1p nextafter population_count pow round sinh "
    "tan"
)
OPERATIONS = pointwise.OPERATIONS - {*_LACKING.split(), pointwise.FLOAT_REMAINDERS}
OPERATIONS |= {pointwise.TABLES}


# Why a backend declines a call.
QUANTISED_KEYS = "its kernels read no quantised keys or values beside wider queries"


@contextlib.contextmanager
def lowering_context():
    """In which kernels are traced and lowered: indices have 32 bits."""
    with jax.enable_x64(False):
        yield


def compiler_params() -> plgpu.CompilerParams:
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        approx_math=True,
        unsafe_no_auto_barriers=True,  # kernels place their own
        reduction_scratch_bytes=0,  # those of rows need no shared memory
    )


@overload
def inline_mgpu(
    arg_types: Sequence[Any] = (), return_type: None = None
) -> Callable[[Callable], Callable[..., None]]: ...
@overload
def inline_mgpu(
    arg_types: Sequence[Any] = (), *, return_type: plgpu.ShapeDtypeStruct
) -> Callable[[Callable], Callable[..., jax.Array]]: ...
def inline_mgpu(arg_types=(), return_type=None) -> Callable[[Callable], Callable]:
    """`plgpu.inline_mgpu`, with the types of what it gives."""
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def swizzle(row: int, itemsize: int) -> int:
    """Bytes of the widest swizzle whose multiple a row of so many elements is."""
    return next(n for n in _SWIZZLES if row * itemsize % n == 0)


def is_one_part(columns: int, itemsize: int, row: int | None = None) -> bool:
    """Whether a row of a tile is one swizzled part, so that rows follow each other.

    Args:
      columns: of the tile.
      row: as for `tile`.
    """
    return swizzle(row or columns, itemsize) == columns * itemsize


def tile(
    shape: tuple[int, ...],
    dtype,
    row: int | None = None,
    array: tuple[int, int] = (0, 0),
) -> pl.MemoryRef | plgpu.RefUnion:
    """A tile (or several) in shared memory, for TMA and wgmma.

    Products read it in parts of 8 rows, and so copies want arrays of whole parts. But
    where a row is one part (`is_one_part`), the bytes are also those of single rows:
    then arrays may end anywhere, and copies see the tile in that way
    (`shared_memory.Tile.copied`).

    Args:
      row: elements that swizzled parts divide; None for those of a row of the tile.
      array: rows and columns of what it is copied from or to.
    """
    itemsize = jnp.dtype(dtype).itemsize
    width = swizzle(row or shape[-1], itemsize)
    # JAX's two classes do not define all methods of the Protocol that they implement.
    swizzled = plgpu.SwizzleTransform(width)  # pyright: ignore[reportAbstractUsage]

    def in_parts_of(rows: int) -> pl.MemoryRef:
        part = rows, width // itemsize
        tiling = plgpu.TilingTransform(part)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzled))

    rows, columns = array
    if not is_one_part(shape[-1], itemsize, row):
        return in_parts_of(8)
    if columns % shape[-1] and COPIES_ANY_WIDTH:
        single_rows = plgpu.SMEM(shape, dtype, transforms=(swizzled,))
        return in_one_place(in_parts_of(8), single_rows)
    return in_one_place(in_parts_of(8), in_parts_of(1)) if rows % 8 else in_parts_of(8)


def in_one_place(*forms: pl.MemoryRef) -> plgpu.RefUnion:
    """Shared memory that has two forms, at different times, or both."""
    return plgpu.RefUnion(*forms)


def transposed(ref):
    """A tile in shared memory as a product reads its transpose."""
    return plgpu.transpose_ref(ref, (1, 0)) if _LOADS_BY_INDEX else ref.T


def load_vector(ref, axis: int, *, shared: bool = False):
    """A vector, dealt to threads as the rows (`axis` 0) or columns of products are.

    Args:
      shared: whether it lies in shared memory, not in global.
    """
    index = ((),) if _LOADS_BY_INDEX else ()
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    return plgpu.load(ref, *index, layout=layout, optimized=shared)


def load_tile(ref):
    """A tile in shared memory, dealt to threads as results of products are."""
    index = ((),) if _LOADS_BY_INDEX else ()
    return plgpu.load(ref, *index, layout=plgpu.Layout.WGMMA)


def _along(x: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """Operands must have equal shapes."""
    return lax.broadcast_in_dim(x, shape, (len(shape) + axis,))


def _numbers(start, axis: int, shape: tuple[int, int], *, layout) -> jax.Array:
    """Of one axis first: of both, the compiler keeps one for each pair in registers."""
    return _along(start + numbers_along(axis, shape[axis], layout), axis - 2, shape)


def numbers_along(axis: int, size: int, of_block=plgpu.Layout.WGMMA) -> jax.Array:
    """int32 from 0 on, dealt to threads as the rows or columns of a block are.

    Args:
      of_block: the layout of the block.
    """
    layout = of_block.reduce(1 - axis)
    rows = (size,)

    # `lax.iota` says no layout, and the search for one may take a minute.
    @inline_mgpu(
        return_type=plgpu.ShapeDtypeStruct(rows, jnp.dtype(jnp.int32), layout=layout)
    )
    def iota(_):
        i32 = ir.IntegerType.get_signless(32)
        return mgpu.FragmentedArray.broadcasted_iota(
            i32, rows, 0, layout.to_mgpu(), is_signed=True
        )

    return iota()


def slices(x: Any) -> Iterator[Any]:
    """Of a result of products [rows, columns], those of `COLUMNS` columns each."""
    for first in range(0, x.shape[-1], COLUMNS):
        yield x[:, first : first + COLUMNS]


def sums_of_rows(x: jax.Array, so_far: jax.Array | None = None) -> jax.Array:
    """Sums of rows in parts, [rows, COLUMNS], of what a thread has of each.

    Threads that share a row need not meet, as they do for `jnp.sum` of all columns.
    One operation, as Pallas would infer layouts for each slice (benchmarks/lab/147).

    Args:
      x: a result of products, [rows, columns].
      so_far: parts to which its own are added.
    """
    given = (x,) if so_far is None else (x, so_far)
    layout = plgpu.Layout.WGMMA
    parts = plgpu.ShapeDtypeStruct((x.shape[0], COLUMNS), x.dtype, layout=layout)

    @inline_mgpu(arg_types=(layout,) * len(given), return_type=parts)
    def add(_, x, *so_far):
        return functools.reduce(operator.add, (*so_far, *slices(x)))

    return add(*given)


def minus_infinity() -> jax.Array:
    """-inf, as a scalar whose value the compiler does not know."""

    @inline_mgpu(
        return_type=plgpu.ShapeDtypeStruct(
            (), jnp.dtype(jnp.float32), layout=plgpu.Layout.WG_SPLAT
        )
    )
    def move(_):
        text = "mov.f32 $0, 0fFF800000;"
        moved = llvm.inline_asm(ir.F32Type.get(), [], text, "=f")
        return mgpu.FragmentedArray(
            _registers=np.array(moved, dtype=object),
            _layout=mgpu.WGSplatFragLayout(()),
            _is_signed=None,
        )

    return move()


def arithmetic(layout) -> Arithmetic:
    """That of blocks with this layout."""
    numbers = functools.partial(_numbers, layout=layout)
    # Mosaic GPU lacks `lax.stop_gradient`, and its kernels are not differentiated.
    return Arithmetic(along=_along, numbers=numbers, constant=lambda x: x)


ARITHMETIC = arithmetic(plgpu.Layout.WGMMA)


def opaque(number: jax.Array) -> jax.Array:
    """The same scalar, hidden from the optimiser, even if it is static."""
    splat = plgpu.Layout.WG_SPLAT
    result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=splat)

    @inline_mgpu(arg_types=(splat,), return_type=result)
    def move(_, number):
        i32, text = ir.IntegerType.get_signless(32), "mov.u32 $0, $1;"
        numbers = [number.registers[()]]
        moved = llvm.inline_asm(i32, numbers, text, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray(
            _registers=np.array(moved, dtype=object),
            _layout=number.layout,
            _is_signed=True,
        )

    return move(number)


def keep_in_loop(index, i):
    """`index`, which the compiler takes to change with a loop's variable i below 2^30.

    So it computes addresses inside the loop. Else it holds those of all parts of a tile
    in registers, of which there are none to spare.
    """
    return index + lax.shift_right_logical(i, jnp.int32(30))


def named_barrier(instruction: str, number, warpgroups: int) -> None:
    """PTX `bar.sync` or `bar.arrive` of one of a block's 16 barriers.

    Number 0 is the block's own, and the next ones are its warpgroups'.

    Args:
      number: a scalar.
      warpgroups: how many sync or arrive.
    """

    @inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def issue(_, number):
        text = f"bar.{instruction} $0, {warpgroups * WARPGROUP};"
        nothing = ir.Type.parse("!llvm.void")
        numbers = [number.registers[()]]
        llvm.inline_asm(nothing, numbers, text, "r", has_side_effects=True)

    issue(number)


def finish_loads() -> None:
    """Waits for this thread's loads from shared memory, before TMA writes there.

    To arrive at a barrier is not enough: loads that were issued before may wait while
    products read shared memory (benchmarks/lab/085-loads-that-came-late.md).
    """

    @inline_mgpu()
    def issue(_):
        nothing = ir.Type.parse("!llvm.void")
        text = "fence.proxy.async.shared::cta;"
        llvm.inline_asm(nothing, [], text, "", has_side_effects=True)

    issue()


def fetch_add(counter, into) -> None:
    """Adds 1 to a counter in global memory, and writes its old value to shared memory.

    So each caller gets a number of its own, which all threads of its warpgroup may read
    after this.

    Args:
      counter, into: int32 numbers.
    """

    @inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def issue(_, counter, into):
        text = (
            "{ .reg .pred p; .reg .b32 n, w; mov.u32 w, %tid.x; "
            f"rem.u32 n, w, {WARPGROUP}; div.u32 w, w, {WARPGROUP}; "
            "add.u32 w, w, 1; setp.eq.u32 p, n, 0; "
            "@p atom.global.add.u32 n, [$0], 1; @p st.shared.u32 [$1], n; "
            f"bar.sync w, {WARPGROUP}; }}"  # the barrier of the warpgroup itself
        )
        nothing = ir.Type.parse("!llvm.void")
        places = [pointer(counter), pointer(into, _SHARED)]
        llvm.inline_asm(nothing, places, text, "l,r", has_side_effects=True)

    issue(counter, into)


def warp_uniform(number: jax.Array) -> jax.Array:
    """A number that is equal in all threads, so that the compiler sees that it is.

    Where threads of a warp may take branches apart, the compiler puts products in
    sequence (ptxas C7520).
    """
    splat = plgpu.Layout.WG_SPLAT
    result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=splat)

    @inline_mgpu(arg_types=(splat,), return_type=result)
    def shuffle(_, number):
        text = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
        i32, numbers = ir.IntegerType.get_signless(32), [number.registers[()]]
        found = llvm.inline_asm(i32, numbers, text, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return shuffle(number)


def pointer(ref: ir.Value, space: int = _GLOBAL) -> ir.Value:
    """To the first element of a Ref in an address space."""
    kind = llvm.PointerType.get(space)
    return llvm.addrspacecast(kind, utils.memref_ptr(ref))


def warpgroup_any(me, flags: jax.Array, of_block=plgpu.Layout.WGMMA) -> jax.Array:
    """In how many threads of this warpgroup a row's flag is set: 0 if in none.

    `jnp.max` would not do: it goes through shared memory that all warpgroups have in
    common, so that one may read what another one wrote. The shuffle makes the number
    `warp_uniform`.

    Args:
      me: the number of this warpgroup.
      flags: int32 of its rows, 0 or 1.
      of_block: the layout of a block of these rows.
    """
    splat = plgpu.Layout.WG_SPLAT

    @inline_mgpu(
        arg_types=(splat, of_block.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=splat),
    )
    def count(_, barrier, flags):
        kind = ir.IntegerType.get_signless(32)
        own = functools.reduce(arith.ori, map(_element, flags.registers.flat))
        text = (
            "{ .reg .pred p; .reg .b32 n; setp.ne.s32 p, $2, 0; "
            f"bar.red.popc.u32 n, $1, {WARPGROUP}, p; "
            "shfl.sync.idx.b32 $0, n, 0, 31, -1; }"
        )
        numbers = [barrier.registers[()], own]
        found = llvm.inline_asm(kind, numbers, text, "=r,r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return count(jnp.int32(1) + me, flags)  # the barrier of the warpgroup itself


def _element(register: ir.Value) -> ir.Value:
    """Of a vector of one."""
    return vector.extract(register, [], [0])
