"""From named axes to Mosaic GPU programs: where rows lie in an array, and the launch.

Operands stay in global memory. Tiles of rows and head elements come by TMA
(`View.at`), scalars, vectors and blocks of pairs by ordinary loads (`View.load`).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, division, layout
from pallas_kernels.core.axes import Named
from pallas_kernels.layout import Rows
from pallas_kernels.mosaic_gpu import gather, measured, pairwise, support
from pallas_kernels.mosaic_gpu.tile_scheduler import heads_per_wave

_HEADS = ("h", "d")
_BROADCAST = "1"  # the name in a `View` of an axis of size 1 that has none
# What TMA copies to and from tiles comes in multiples of these: rows, where a tile is
# read in parts of so many (`support.tile`), and head elements. Where it is read in
# single rows, these are of any number, and their elements fill 16 bytes.
_ROWS, _ELEMENTS = 8, 16
_FEWEST_BYTES = 16


@dataclasses.dataclass(frozen=True)
class View(layout.View):
    """A Ref in global memory.

    Attributes:
      block: the sizes of blocks of `t` and `s`, by which vectors become blocks; and of
        tiles of heads that are wider than the array.
      nothing: a traced 0. A static part of an array may not go beyond it.
      boolean: whether its numbers, or the bits of its words of pairs, say yes or no.
    """

    block: Mapping[str, int] = dataclasses.field(default_factory=dict)
    nothing: Any = 0
    boolean: bool = False

    def at(self, where: Mapping[str, Any]):
        """The part at `where`, as TMA copies it: rows, and all of their head elements.

        What lies beyond the end of an axis is read as 0 and not written.
        """
        return self.ref.at[tuple(self._place(name, where) for name in self.axes)]

    def _place(self, name: str, where: Mapping[str, Any]):
        if name == _BROADCAST:
            return 0
        if name in _HEADS:
            if name not in self.block:
                return slice(None)
            return pl.ds(self.nothing * self.block[name], self.block[name])
        at = where[name]
        return pl.ds(at.start, at.size) if isinstance(at, Rows) else at

    def read(self, index: tuple, mask: jax.Array | None, other: Any) -> jax.Array:
        raise NotImplementedError("tiles come by TMA")

    def write(self, index: tuple, value: jax.Array, mask: jax.Array | None) -> None:
        raise NotImplementedError("tiles go by TMA")

    def load(
        self, order: tuple[str, ...], where: Mapping[str, Any], padding: float = 0
    ):
        """A scalar, or a vector of rows or an array of pairs as a block `order`."""
        del padding
        kept = [name for name in self.axes if isinstance(where[name], Rows)]
        if not kept:
            number = self.ref[tuple(where[name] for name in self.axes)]
            if not self.boolean:
                return number
            return jnp.full([self.block[a] for a in order], number) != 0
        if len(kept) == 2:
            shape = self.block[order[0]], self.block[order[1]]
            return self._load_pairs(order, where, shape)
        (name,) = kept
        axis = order.index(name)
        shape = tuple(where[a].size if a == name else self.block[a] for a in order)
        vector = support.load_vector(self.at(where), axis)
        numbers = support.ARITHMETIC.along(vector, axis - len(order), shape)
        return numbers != 0 if self.boolean else numbers

    def fetch(self, order: tuple[str, str], where: Mapping[str, Any]) -> jax.Array:
        """A block of pairs as it lies in memory, from which `fetched` makes it.

        Of a transposed block of two bytes a pair, or of a mask's words.
        """
        assert order == ("s", "t"), f"{order=}"
        shape = self.block[order[0]], self.block[order[1]]
        if self.boolean:
            return self._load_pairs(order, where, shape)
        return pairwise.fetch(self.at(where), shape)

    def fetched(self, words: jax.Array) -> jax.Array:
        return words if self.boolean else pairwise.turned(words, self.dtype)

    def gather(self, index: tuple) -> jax.Array:
        """Of an array of booleans, whether they are True."""
        found = gather.read(self.ref, index, self.block)
        return found != 0 if self.boolean else found

    def level(self, index: tuple) -> tuple[jax.Array, jax.Array]:
        is_level, number = gather.level(self.ref, index, self.block)
        return is_level, number != 0 if self.boolean else number

    def _load_pairs(self, order, where, shape: tuple[int, int]) -> jax.Array:
        transposed = order == ("s", "t")
        if not self.boolean:
            return pairwise.load(self.at(where), shape, transposed=transposed)
        name, bits = order[1], pairwise.BITS
        start = lax.div(where[name].start, jnp.int32(bits))
        words = self.at({**where, name: Rows(start, shape[1] // bits)})
        return pairwise.load_words(words, shape, transposed=transposed)


@dataclasses.dataclass(frozen=True)
class Filled(Named):
    """An operand, and what lies beyond its end in the last blocks; else that is 0."""

    fill: float = 0.0


class Prepared(Named):
    """An operand that lies in memory as its kernel reads it, padded if it must be."""


class TileGrid(layout.Layout):
    """A flat grid of tiles: a block of `t` or `s` of one head and batch entry each.

    Parts of a tile (`division`) lie side by side, each a tile of its own.

    Args:
      by_block: whether the tiles of the same block of several heads lie side by side,
        those of the next block after them. Then come the next heads: of blocks of
        queries from the other end, as neighbours then take about equally long.
      blocks_alike: of keys, how many in succession meet the same queries; None for all.
    """

    def __init__(
        self,
        operands,
        *,
        by_block: bool = False,
        blocks_alike: int | None = None,
        **arguments,
    ):
        self.waves = measured.here().numbers.waves
        super().__init__(operands, **arguments)
        self.tile: Any = None
        self.together = self._heads_together(blocks_alike) if by_block else 1

    def in_order(self, names: list[str], operands) -> list[str]:
        """Those first that arrays of pairs lack: they are read from memory once.

        A bias of 16 heads and 4096 x 4096 pairs has 537 MB, and came again for each
        batch entry.
        """
        arrays = [x for x in operands if {"t", "s"} <= set(x.axes)]
        axes = [zip(x.axes, x.shape, strict=True) for x in arrays]
        of_pairs = {name for pairs in axes for name, size in pairs if size > 1}
        heads = {"n", "k"} if "n" in of_pairs else set()
        return sorted(names, key=lambda name: name in of_pairs | heads)

    def _heads_together(self, blocks_alike: int | None) -> int:
        ((own, blocks),) = self.num_blocks.items()
        blocks = min(blocks, blocks_alike or blocks)
        heads, programs = math.prod(self._heads.values()), device.multiprocessors()
        numbers, h, d = measured.here().numbers, self.size["h"], self.size["d"]
        if own == "t":
            cached = numbers.cached_key_bytes // (2 * self.size["s"] * (h + d))
            return heads_per_wave(heads, blocks, programs, max(cached, 1) * self.group)
        if own == "s":
            # A program waits for the one of the block before. Where few of a head run
            # at the same time, they begin one after the other, as they should.
            read = self.group * self.size["t"] * (6 * h + 2 * d)
            blocks *= math.prod(self.parts.values())
            programs = int(numbers.in_turn * programs)  # that wait
        else:  # diagonals: programs come by all rows of what they loop over
            read = 2 * (self.size["t"] + self.size["s"]) * self.elements * (h + d)
        most = numbers.cached_query_bytes // read
        return heads_per_wave(heads, blocks, programs, most)

    @property
    def tiles(self) -> int:
        """How many there are: a program has one, unless `call` is told."""
        return math.prod(self.grid)

    @property
    def in_turn(self) -> int:
        """How many programs that own keys of the same head run at the same time."""
        others = self.together * math.prod(self.parts.values())
        return max(1, min(self.num_blocks["s"], device.multiprocessors() // others))

    @property
    def _heads(self) -> dict[str, int]:
        """The axes of heads and batch entries."""
        others = (*self.num_blocks, *self.parts)
        pairs = zip(self.names, self.grid, strict=True)
        return {name: size for name, size in pairs if name not in others}

    def at_tile(self, number) -> TileGrid:
        """This layout in a program that has come to tile `number`."""
        there = copy.copy(self)
        there.tile = number
        return there

    def program_ids(self) -> dict[str, jax.Array]:
        rest = lax.axis_index("program") if self.tile is None else self.tile
        ids = {}
        for name, size in self.parts.items():
            rest, ids[name] = _divmod(rest, size)
        rest, head = _divmod(rest, self.together)
        for name, size in self.num_blocks.items():
            rest, ids[name] = _divmod(rest, size)
        if self.together > 1 and "t" in self.num_blocks:
            last = math.prod(self._heads.values()) // self.together - 1
            back = self.num_blocks["t"] - 1 - 2 * ids["t"]
            ids["t"] += ((last - rest) & 1) * back
        if self.together > 1:
            rest = rest * self.together + head
        for name, size in self._heads.items():
            rest, ids[name] = _divmod(rest, size)
        if "n" in ids:
            ids["k"], _ = _divmod(ids["n"], self.group)
        return ids


def _divmod(number, by: int):
    if by == 1:
        return number, jnp.int32(0)
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def is_boolean(x: Named) -> bool:
    return x.dtype == jnp.bool_


def _as_loaded(x: Named, block: Mapping[str, int], whole_blocks: bool = False) -> Named:
    """An operand as kernels take it: as `_as_copied`."""
    if isinstance(x, Prepared):
        return x
    fill = x.fill if isinstance(x, Filled) else 0
    x = x.squeezed()
    # Beyond the array, too, queries have keys: none has to be computed again.
    if isinstance(x, pairwise.Packed):
        columns = block[x.columns] // pairwise.BITS
        return _as_copied(x.words, {**block, x.columns: columns}, pairwise.FULL)
    if is_boolean(x):
        return _as_copied(Named(x.value.astype(jnp.int32), x.axes), block, fill=1)
    if x.dtype.itemsize == 1 and not {*_HEADS} & {*x.axes}:  # no instruction converts
        x = Named(x.value.astype(jnp.bfloat16), x.axes)
    return _as_copied(x, block, fill, whole_blocks)


def _as_copied(
    x: Named, block: Mapping[str, int], fill: Any = 0, whole_blocks: bool = False
) -> Named:
    """An array or shape struct as kernels take it: a copy, if it is not so already.

    TMA wants head elements last, and axes in multiples of its tiles. Vectors are loaded
    and stored in whole blocks, as are blocks of pairs, whose keys must be last.

    Args:
      x: the operand or the result.
      block: sizes of the blocks of `t` and `s`, and of tiles of heads.
      fill: what lies beyond the array.
      whole_blocks: whether head elements, too, are copied or stored in whole blocks.
    """
    heads = tuple(name for name in x.axes if name in _HEADS)
    by_tma = heads and not whole_blocks
    multiple = _multiples(x, heads[0], block) if by_tma else block
    last = heads or (("t", "s") if {"t", "s"} <= set(x.axes) else ())
    axes = (*(name for name in x.axes if name not in last), *last)
    sizes = dict(zip(x.axes, x.shape, strict=True))
    more = [_padded(sizes[a], multiple.get(a or "", 1)) - sizes[a] for a in axes]
    if isinstance(x.value, jax.ShapeDtypeStruct):
        shape = [sizes[a] + n for a, n in zip(axes, more, strict=True)]
        return Named(jax.ShapeDtypeStruct(shape, x.dtype), axes)
    x = x if axes == x.axes else x.ordered(axes)
    if not any(more):
        return x
    pad = [(0, n) for n in more]
    return Named(jnp.pad(x.value, pad, constant_values=fill), axes)


def _multiples(x: Named, head: str, tiles: Mapping[str, int]) -> dict[str, int]:
    """Of the sizes of axes of an array with head elements, as TMA copies it.

    Args:
      tiles: their widths, of heads, among others.
    """
    width = {name: tiles[name] for name in _HEADS}
    itemsize = x.dtype.itemsize
    if itemsize == 2 and _in_single_rows(width):
        return {head: _FEWEST_BYTES // itemsize}
    elements = head_elements(dict(zip(x.axes, x.shape, strict=True))[head])
    # Beside a tile wider than 128 no other one is read in single rows.
    widths = [width[head], *(n for n in width.values() if n > 128)]
    parts = (support.is_one_part(n, itemsize, elements) for n in widths)
    rows = 1 if all(parts) else _ROWS
    return {"t": rows, "s": rows, head: _ELEMENTS}


def _in_single_rows(width: Mapping[str, int]) -> bool:
    """Whether all tiles of heads are, whatever the arrays."""
    parts = (support.is_one_part(n, 2) for n in width.values())
    return support.COPIES_ANY_WIDTH and all(parts)


def copies_operands(size: Mapping[str, int]) -> bool:
    """Whether arrays with head elements must be padded for TMA, and results cut."""
    width, heads = forward_tiles(size), (size["h"], size["d"])
    if _in_single_rows(width):
        return any(x % (_FEWEST_BYTES // 2) for x in heads)
    anywhere = all(support.is_one_part(n, 2) for n in width.values())
    odd_rows = not anywhere and any(size[name] % _ROWS for name in "ts")
    return odd_rows or any(x % _ELEMENTS for x in heads)


def forward_tiles(size: Mapping[str, int]) -> dict[str, int]:
    """Widths of the tiles of heads in the forward kernel, of keys and of values."""
    power = {name: max(16, 1 << (size[name] - 1).bit_length()) for name in _HEADS}
    if _in_single_rows(power):
        return power
    return {name: head_elements(size[name]) for name in _HEADS}


def head_elements(size: int) -> int:
    """Of an array, for a head size, where tiles are not read in single rows."""
    return _padded(size, _ELEMENTS)


def of_tiles(
    size: Mapping[str, int], width: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """How tiles of heads of two bytes are read.

    Args:
      size: of axes.
      width: of these tiles.

    Returns:
      The elements that swizzled parts divide (those of arrays, or of tiles that are
      read in single rows), and the widths of tiles that are wider than their arrays.
    """
    padded = {name: head_elements(size[name]) for name in _HEADS}
    if _in_single_rows(width):
        return dict(width), {x: n for x, n in width.items() if size[x] < n}
    return padded, {x: width[x] for x, n in padded.items() if n < width[x]}


def call(
    kernel: Callable,
    grid: TileGrid,
    inputs,
    outputs: tuple[Named, ...],
    *,
    block: Mapping[str, int],
    scratch,
    warpgroups: int,
    name: str,
    tiles: Mapping[str, int],
    programs: int | None = None,
    whole_blocks: bool = False,
) -> tuple[Named, ...]:
    """Runs `kernel(inputs, outputs, scratch)`, trees of `View` and Refs, over the grid.

    Args:
      inputs: a tree of `Named` arrays.
      outputs: shape structs.
      block: of every `View`.
      scratch: a tree of shared memory and barriers (`shared_memory`). The kernel gets
        the same tree of Refs.
      warpgroups: of a program.
      name: of the kernel in profiles.
      tiles: widths of those of heads.
      programs: how many; None for one for each tile of the grid.
      whole_blocks: whether arrays with head elements must have whole blocks of rows,
        as where threads copy or store these without TMA, which knows where arrays end.
    """
    leaves, tree = jax.tree.flatten(inputs)
    boolean = [is_boolean(x) for x in (*leaves, *outputs)]
    sizes = {**grid.rows, **tiles}
    operands = [_as_loaded(x, sizes, whole_blocks) for x in leaves]
    results = [_as_copied(x, sizes, whole_blocks=whole_blocks) for x in outputs]
    shared, shared_tree = jax.tree.flatten(
        scratch, is_leaf=lambda x: isinstance(x, plgpu.Barrier)
    )

    def body(*refs):
        axes = [tuple(a or _BROADCAST for a in x.axes) for x in (*operands, *results)]
        nothing = lax.shift_right_logical(lax.axis_index("program"), jnp.int32(31))
        arrays = zip(refs, axes, boolean, strict=False)
        views = [View(ref, a, block, nothing, b) for ref, a, b in arrays]
        forms = zip(shared, refs[len(axes) :], strict=True)
        own = shared_tree.unflatten(
            tuple(ref) if isinstance(x, plgpu.RefUnion) else ref for x, ref in forms
        )
        kernel(tree.unflatten(views[: len(operands)]), views[len(operands) :], own)

    body.__name__ = body.__qualname__ = name
    found = plgpu.kernel(
        body,
        out_type=[division.varying_like(x.value, operands[0].value) for x in results],
        scratch_types=shared,
        grid=(programs or grid.tiles,),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=support.compiler_params(),
    )(*(x.value for x in operands))
    named = (Named(x, y.axes) for x, y in zip(found, results, strict=True))
    pairs = zip(named, outputs, strict=True)
    return tuple(Named(_as_wanted(x, y), y.axes) for x, y in pairs)


def _as_wanted(x: Named, output: Named) -> jax.Array:
    """A result without its padding, and with its axes in order."""
    size = dict(zip(output.axes, output.shape, strict=True))
    part = tuple(slice(size[name]) for name in x.axes)
    value = x.value if x.shape == tuple(size[a] for a in x.axes) else x.value[part]
    return value if x.axes == output.axes else Named(value, x.axes).to(output.axes)
