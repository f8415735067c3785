"""Loads and stores of blocks at addresses that the compiler can take apart.

Pallas adds up the place of each element in 32 bits, the block's start with it. Such a
sum might wrap, for all that the compiler knows, so every vector that a thread copies
keeps an index of its own and has it widened to an address in each round of a loop. Here
the start is one 64-bit scalar, and the elements lie at constant distances from it. Rows
that lie in several pages have a 64-bit start each.

Elements of tables are loaded by an instruction that Triton does not know as a load: it
would copy them to shared memory some rounds ahead, which has no room for them.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Primitive
from jaxlib.mlir import ir

from pallas_kernels.core.axes import Named

try:
    from jax._src.pallas.triton import lowering
    from jax._src.state.types import WriteEffect
except ImportError:
    lowering = None

# Private names: without one of them kernels are as right, and less fast.
_NAMES = """
    _add _bcast_to _dtype_to_ir_type _ensure_ir_value _expand_dims _full _ir_cast _load
    _make_range _mul _store pallas_core register_lowering tt_dialect
"""
_has_names = all(hasattr(lowering, name) for name in _NAMES.split())
pallas: Any = lowering if _has_names else None

_load = Primitive("load_block")
_store = Primitive("store_block")
_store.multiple_results = True
_gather = Primitive("gather_elements")


def load(
    ref: Any,
    index: tuple,
    mask: jax.Array | None,
    other: Any,
    *,
    interpret: bool,
    packed: bool = False,
) -> jax.Array:
    """The block of an input at `index`.

    Args:
      ref: a Ref of a kernel, which nothing writes.
      index: for each axis of the Ref a number or a `pl.ds`; or, for an axis of pages
        and that of their rows, int32 arrays alike, with the numbers of every row.
      mask: which elements exist, in the shape of the block; None for all.
      other: what the others are loaded as.
      interpret: whether the kernel runs in Pallas's interpreter.
      packed: whether two elements of one byte, side by side in the last axis, are
        loaded as one int16; the index counts those.
    """
    if not _ours(interpret):
        if mask is not None:  # a number alone does not become one of a byte
            other = jnp.asarray(other, ref.dtype)
        return plgpu.load(ref.at[_spread(index)], mask=mask, other=other)
    starts, sizes = _cut(index)
    masks = [] if mask is None else [mask]
    static = {"sizes": sizes, "steps": _steps(index), "packed": packed}
    return _load.bind(ref, *starts, *masks, other=other, **static)


def store(
    ref: Any, index: tuple, value: jax.Array, mask: jax.Array | None, *, interpret: bool
) -> None:
    """Writes the block of an output at `index`, where `mask` is set."""
    if not _ours(interpret):
        plgpu.store(ref.at[_spread(index)], value, mask=mask)
        return
    starts, sizes = _cut(index)
    masks = [] if mask is None else [mask]
    _store.bind(ref, value, *starts, *masks, sizes=sizes, steps=_steps(index))


def gather(ref: Any, index: tuple, *, interpret: bool) -> jax.Array:
    """The elements of an input at int32 places along one axis.

    Args:
      ref: as of `load`.
      index: for each axis of the Ref a number; for one of them an array of numbers.
    """
    (axis,) = (i for i, place in enumerate(index) if jnp.ndim(place))
    if not _ours(interpret) or ref.dtype.itemsize != 4:
        shape = index[axis].shape
        return plgpu.load(ref.at[tuple(jnp.broadcast_to(x, shape) for x in index)])
    return _gather.bind(ref, *map(jnp.int32, index), axis=axis)


def _ours(interpret: bool) -> bool:
    if pallas is None and not interpret:
        warnings.warn(
            f"jax {jax.__version__} lacks names that addresses of attention kernels "
            "are made with: results are as right, but kernels slower",
            stacklevel=2,
        )
    return pallas is not None and not interpret


def is_pool(x: Named) -> bool:
    """Whether an operand may have more elements than 32 bits count."""
    return pallas is not None and "p" in x.axes


def _is_array(place) -> bool:
    return not isinstance(place, pl.Slice) and jnp.ndim(place) > 0


def _cut(index: tuple) -> tuple[list[jax.Array], tuple[int | None, ...]]:
    """The starts, and the sizes of those axes that the block has.

    Of several arrays the last stands for the axis of their rows.
    """
    arrays = [i for i, place in enumerate(index) if _is_array(place)]
    starts, sizes = [], []
    for i, place in enumerate(index):
        is_slice = isinstance(place, pl.Slice)
        starts.append(jnp.int32(place.start if is_slice else place))
        size = int(place.size) if is_slice else None
        sizes.append(int(place.shape[0]) if arrays and i == arrays[-1] else size)
    return starts, tuple(sizes)


def _steps(index: tuple) -> tuple[int, ...]:
    """How far the elements of each axis lie from each other."""
    return tuple(x.stride if isinstance(x, pl.Slice) else 1 for x in index)


def _spread(index: tuple) -> tuple:
    """For Pallas, which takes no slice beside an array: arrays alone, if any is one.

    So too where a slice has a step.
    """
    arrays = [i for i, place in enumerate(index) if _is_array(place)]
    if not arrays and max(_steps(index), default=1) == 1:
        return index
    axes = [
        i for i, x in enumerate(index) if isinstance(x, pl.Slice) or i in arrays[-1:]
    ]

    def spread(i: int, place):
        if isinstance(place, pl.Slice):
            numbers = jax.lax.iota(jnp.int32, int(place.size)) * place.stride
            numbers = numbers + place.start
        elif i in arrays:
            i, numbers = arrays[-1], place
        else:
            return jnp.full((1,) * len(axes), place, jnp.int32)
        others = [j for j, axis in enumerate(axes) if axis != i]
        return jnp.expand_dims(numbers, others)

    found = [spread(i, place) for i, place in enumerate(index)]
    shape = np.broadcast_shapes(*(x.shape for x in found))
    return tuple(jnp.broadcast_to(x, shape) for x in found)


@_load.def_abstract_eval
def _(ref, *_, sizes, steps, other, packed):
    del steps, other
    shape = tuple(size for size in sizes if size is not None)
    return jax.core.ShapedArray(shape, jnp.int16 if packed else ref.dtype)


@_store.def_effectful_abstract_eval
def _(*_, sizes, steps):
    del sizes, steps
    return [], {WriteEffect(0)}


@_gather.def_abstract_eval
def _(ref, *index, axis):
    return jax.core.ShapedArray(index[axis].shape, ref.dtype)


def _addresses(info, pointer: ir.Value, starts, sizes, steps, pack=1) -> ir.Value:
    """Of the elements of a block.

    Args:
      info: Pallas's, of the operand and of what a program sees of it.
      pointer: to the operand's first element.
      starts: in what the program sees, an iterator over numbers, or vectors of them
        along one axis of the block.
      sizes: in each axis of that; None for an axis that the block lacks.
      steps: in each axis, how far its elements lie from each other.
      pack: elements of the last axis that are one of what the pointer is to.
    """
    *outer, last = info.full_shape_dtype.shape
    whole = *outer, last // pack
    wide = ir.IntegerType.get_signless(64)
    shape = [size for size in sizes if size is not None]
    first, distances, of_rows, row_axis = pallas._full(wide, 0), None, [], 0

    def advanced(start: ir.Value, stride: int) -> ir.Value:
        start = pallas._ir_cast(start, wide, signed=True)
        return pallas._add(first, pallas._mul(start, pallas._full(wide, stride)))

    axis, seen = 0, zip(sizes, steps, strict=True)
    for i, place in enumerate(info.start_indices):
        stride = math.prod(whole[i + 1 :])
        if place is not None:
            place = pallas._ensure_ir_value(place, jax.core.ShapedArray((), np.int32))
            first = advanced(place, stride)
        if isinstance(info.block_shape[i], pallas.pallas_core.Squeezed):
            continue
        start, (size, step) = next(starts), next(seen)
        is_vector = isinstance(start.type, ir.RankedTensorType)
        if is_vector:
            start = pallas._ir_cast(start, wide, signed=True)
            of_rows.append(pallas._mul(start, pallas._full(start.type, stride)))
        else:
            first = advanced(start, stride)
        if size is None:
            continue
        if is_vector:
            row_axis, axis = axis, axis + 1
            continue
        numbers = pallas._make_range(0, size)
        for other in range(len(shape)):
            if other != axis:
                numbers = pallas._expand_dims(numbers, other)
        numbers = pallas._mul(numbers, pallas._full(numbers.type, stride * step))
        numbers = pallas._bcast_to(numbers, shape)
        distances = numbers if distances is None else pallas._add(distances, numbers)
        axis += 1
    begin = pallas._add(pointer, first)
    if of_rows:
        rows = functools.reduce(pallas._add, of_rows)
        column = [n if i == row_axis else 1 for i, n in enumerate(shape)]
        for other in range(len(shape)):
            if other != row_axis:
                rows = pallas._expand_dims(rows, other)
        begin = pallas._add(pallas._bcast_to(begin, column), rows)
    begin = pallas._bcast_to(begin, shape)
    return begin if distances is None else pallas._add(begin, distances)


def _lower_load(
    ctx, pointer: ir.Value, *operands, sizes, steps, other, packed
) -> ir.Value:
    values = map(pallas._ensure_ir_value, operands, ctx.avals_in[1:])
    if packed:
        pair = ir.IntegerType.get_signless(16)
        pair = pallas.tt_dialect.PointerType.get(pair, 1)
        pointer = pallas.tt_dialect.bitcast(pair, pointer)
    places = values, sizes, steps, 1 + packed
    addresses = _addresses(ctx.block_infos[0], pointer, *places)
    mask = next(values, None)
    if mask is None:
        return pallas._load(addresses)
    (result,) = ctx.avals_out
    element = pallas._dtype_to_ir_type(result.dtype)
    padding = pallas._full(ir.RankedTensorType.get(result.shape, element), other)
    return pallas._load(addresses, mask=mask, other=padding)


def _lower_gather(ctx, pointer: ir.Value, *index, axis) -> ir.Value:
    places = list(map(pallas._ensure_ir_value, index, ctx.avals_in[1:]))
    zero = jax.core.ShapedArray((), np.int32)
    starts = [
        x if i != axis else pallas._ensure_ir_value(0, zero)
        for i, x in enumerate(places)
    ]
    info, (result,) = ctx.block_infos[0], ctx.avals_out
    one = [None] * len(starts)
    begin = _addresses(info, pointer, iter(starts), one, [1] * len(starts))
    begin = pallas._bcast_to(begin, result.shape)
    wide = ir.RankedTensorType.get(result.shape, ir.IntegerType.get_signless(64))
    addresses = pallas.tt_dialect.ptr_to_int(wide, pallas._add(begin, places[axis]))
    letter = "f" if jnp.issubdtype(result.dtype, jnp.floating) else "r"
    element = pallas._dtype_to_ir_type(result.dtype)
    return pallas.tt_dialect.elementwise_inline_asm(
        [ir.RankedTensorType.get(result.shape, element)],
        "ld.global.nc.b32 $0, [$1];",
        constraints=f"={letter},l",
        pure=True,
        packed_element=1,
        args=[addresses],
    )


def _lower_store(ctx, pointer: ir.Value, *operands, sizes, steps) -> list:
    values = map(pallas._ensure_ir_value, operands, ctx.avals_in[1:])
    value = next(values)
    addresses = _addresses(ctx.block_infos[0], pointer, values, sizes, steps)
    pallas._store(addresses, value, mask=next(values, None))
    return []


if pallas is not None:
    pallas.register_lowering(_load)(_lower_load)
    pallas.register_lowering(_store)(_lower_store)
    pallas.register_lowering(_gather)(_lower_gather)
