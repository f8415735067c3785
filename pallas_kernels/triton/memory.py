"""From named axes to Triton programs: BlockSpecs, and loads and stores of blocks.

An operand's BlockSpec follows from the names of its axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels import division, layout
from pallas_kernels.configs import Blocks
from pallas_kernels.core import nibbles
from pallas_kernels.core.axes import Named, first_of, in_pairs, is_whole
from pallas_kernels.core.flash2 import Block
from pallas_kernels.core.pointwise.tables import Distances
from pallas_kernels.layout import Rows
from pallas_kernels.tables import padded
from pallas_kernels.triton import addresses, support
from pallas_kernels.triton.packed import Packed
from pallas_kernels.triton.registers import with_registers

# Pallas computes places in an array as int32 (JAX 0.10.2 to 0.12.0.1): of scalars, and
# of blocks too where `addresses` must leave them to it.
MOST_ELEMENTS = 2**31


def too_large(elements: int) -> str:
    return (
        f"an array has {elements} elements, and the kernels can address 2**31; split "
        "the batch, for example with jax.lax.map"
    )


class Launch(layout.Launch):
    """How a Triton kernel is run."""

    def left(self, *tiles: Block) -> tuple[Block, ...]:
        """Tiles that are left operands, the last ones kept in registers (`Blocks`)."""
        kept = 0 if self.interpret else self.blocks.left_in_registers
        first = max(0, len(tiles) - kept)
        return (*tiles[:first], *jax.tree.map(support.in_registers, tiles[first:]))


@dataclasses.dataclass(frozen=True)
class View(layout.View):
    """A Ref in a Triton kernel."""

    interpret: bool  # of `Launch`
    is_packed: bool = False  # two elements of the last axis at a time

    def load(self, order, where, padding: float = 0) -> Any:
        """As of a layout's view; a `Packed` tile of a head axis in turns."""
        pieces = where[self.axes[-1]] if self.axes else None
        wide = self.dtype.itemsize > 1
        if wide or not isinstance(pieces, tuple) or pieces[0].step == 1:
            return super().load(order, where, padding)
        if self.interpret or addresses.pallas is None:
            if self.dtype != nibbles.BYTES:
                return super().load(order, where, padding)
            return tuple(self._halves(order, where, padding, x) for x in pieces)
        packed = dataclasses.replace(self, is_packed=True)
        half = {**where, self.axes[-1]: Rows(0, pieces[0].size)}
        return Packed(packed.load(order, half, padding), self.dtype)

    def _halves(self, order, where, padding: float, piece: Rows) -> jax.Array:
        """A piece of a head axis, of bytes with two elements each."""
        first, place = divmod(piece.start, 2)
        own = Rows(first, piece.size, step=piece.step // 2)
        found = super().load(order, {**where, self.axes[-1]: own}, padding)
        return nibbles.half(found, place)

    def read(self, index: tuple, mask: jax.Array | None, other: Any) -> jax.Array:
        at = _slices(index)
        options = {"interpret": self.interpret, "packed": self.is_packed}
        return addresses.load(self.ref, at, mask, other, **options)

    def gather(self, index: tuple) -> jax.Array:
        places = (x.numbers() if isinstance(x, Distances) else x for x in index)
        return addresses.gather(self.ref, tuple(places), interpret=self.interpret)

    def write(self, index: tuple, value: jax.Array, mask: jax.Array | None) -> None:
        at = _slices(index)
        addresses.store(self.ref, at, value, mask, interpret=self.interpret)


def _slices(index: tuple) -> tuple:
    def place(x):
        if not isinstance(x, Rows):
            return x
        return pl.ds(x.start, x.size, x.step) if x.places is None else x.places

    return tuple(map(place, index))


def _first(ids: Mapping[str, Any]):
    """The place in an axis that programs do not divide."""
    del ids
    return 0


def _program(name: str, group: int = 1) -> Callable[[Mapping[str, Any]], Any]:
    """The place given by grid axis `name`; `group` programs share one."""
    return lambda ids: ids[name] // group if group > 1 else ids[name]


class BlockGrid(layout.Layout):
    """The grid of a kernel, and where each operand's block lies in it.

    `packed` has the head axes that are loaded in turns, and in how many
    (`packed.turns`).
    """

    def __init__(
        self,
        operands,
        *,
        blocks: Blocks,
        packed: Mapping[str, int] | None = None,
        **arguments,
    ):
        self._packed = packed or {}
        super().__init__(operands, blocks=blocks, **arguments)
        self._max_registers = blocks.max_registers

    def head(self, name: str) -> tuple[Rows, ...]:
        if name in self._packed:
            return Rows.in_turns(self.size[name], self._packed[name])
        return super().head(name)

    def program_ids(self) -> dict[str, jax.Array]:
        own = *self.num_blocks, *self.parts
        ids = {name: pl.program_id(axis) for axis, name in enumerate(own)}
        first = next(iter(ids))
        return ids | {first: with_registers(ids[first], self._max_registers)}

    def block_spec(self, operand: Named) -> tuple[pl.BlockSpec, tuple[str, ...]]:
        """The BlockSpec of an operand and the names of the axes that stay in it."""
        shape: list[int | None] = []
        kept: list[str] = []
        places: list[Callable] = []
        whole = ("t", "s", "i", "j", "e", *self.looped, *["k"] * ("n" in self.looped))
        for name, size in zip(operand.axes, operand.shape, strict=True):
            block, place = None, _first
            name, _ = first_of(name) or (in_pairs(name) or name, size)
            if name in whole or is_whole(name):
                block = size
            elif name in ("h", "d"):
                block = padded(size)
            elif name == "n" and self.heads == "k":
                block = self.group if self.group > 1 else None
                place = _program("k")
            elif name == "k" and self.heads == "n":
                place = _program("n", self.group)
            elif name is not None:
                place = _program(name)
            shape.append(block)
            places.append(place)
            if block is not None:
                kept.append(str(name))

        def index_map(*ids):
            named = dict(zip(self.names, ids, strict=True))
            return tuple(place(named) for place in places)

        return pl.BlockSpec(tuple(shape), index_map), tuple(kept)


def call(
    kernel: Callable,
    grid: BlockGrid,
    inputs,
    outputs,
    *,
    name: str,
    launch: Launch,
    alike: tuple[int, ...] = (),
) -> tuple[Named, ...]:
    """Runs `kernel(*inputs, outputs)`, with trees of `View`, over the grid.

    Args:
      kernel: reads and writes its views; returns nothing.
      grid: the grid.
      inputs: a tuple of trees of `Named` arrays.
      outputs: tuple of `Named` shape structs.
      name: of the kernel in profiles and dumps.
      launch: warps, stages, interpreter.
      alike: numbers of the outputs of which every part is the whole.

    Returns:
      The outputs, or the parts of each (`division.partial`).

    Raises:
      ValueError: if an array is too large, as `jax.vmap` may make it.
    """
    operands, tree = jax.tree.flatten(inputs)
    outputs = [
        x if i in alike else division.partial(x, grid.parts)
        for i, x in enumerate(outputs)
    ]
    placed = (x for x in (*operands, *outputs) if not addresses.is_pool(x))
    elements = max(math.prod(x.shape) for x in placed)
    if elements > MOST_ELEMENTS:
        raise ValueError(f"implementation='triton': {too_large(elements)}")
    specs, kept = zip(*map(grid.block_spec, (*operands, *outputs)), strict=True)

    def body(*refs):
        views = [
            View(*named, launch.interpret) for named in zip(refs, kept, strict=True)
        ]
        kernel(*tree.unflatten(views[: len(operands)]), tuple(views[len(operands) :]))

    body.__name__ = body.__qualname__ = name
    results = support.pallas_call(
        body,
        grid=grid.grid,
        in_specs=list(specs[: len(operands)]),
        out_specs=list(specs[len(operands) :]),
        out_shape=[division.varying_like(x.value, operands[0].value) for x in outputs],
        blocks=launch.blocks,
        interpret=launch.interpret,
        name=name,
    )(*(operand.value for operand in operands))
    return tuple(Named(x, y.axes) for x, y in zip(results, outputs, strict=True))
