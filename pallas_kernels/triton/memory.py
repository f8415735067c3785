"""From named axes to Pallas: grids, BlockSpecs, and blocks loaded from Refs.

The grid is the union of the axes that are not looped over inside a kernel; an operand's
BlockSpec follows from the names of its axes. Inside a kernel an operand is a `View`, a
Ref whose remaining axes have names: a kernel asks for the axes it wants and the rows of
each, and a `View` that lacks an axis answers with something that broadcasts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.configs import Blocks, padded
from pallas_kernels.core.arithmetic import Arithmetic
from pallas_kernels.core.axes import Axes, Named, batch_axes, sizes
from pallas_kernels.triton import addresses, support
from pallas_kernels.triton.registers import with_registers

# Pallas computes places in an array as int32 (JAX 0.10.2 to 0.12.0.1): of scalars, and
# of blocks too where `addresses` must leave them to it.
MOST_ELEMENTS = 2**31


def too_large(elements: int) -> str:
    return (
        f"an array of {elements} elements is beyond the 2**31 that its kernels can "
        "address; split the batch, as with jax.lax.map"
    )


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is run.

    Attributes:
      blocks: block sizes, warps and stages.
      precision: of float32 products.
      arithmetic: the GPU's instructions, or JAX's own.
      interpret: run in Pallas's interpreter.
    """

    blocks: Blocks
    precision: Any
    arithmetic: Arithmetic
    interpret: bool

    def left(self, *tiles: jax.Array) -> tuple[jax.Array, ...]:
        """Tiles that multiply others from the left, the last `held` in registers."""
        first = max(0, len(tiles) - (0 if self.interpret else self.blocks.held))
        return (*tiles[:first], *map(support.in_registers, tiles[first:]))


@dataclasses.dataclass(frozen=True)
class Rows:
    """A block of an axis: `size` elements from `start`; None from `limit` on exist."""

    start: Any
    size: int
    limit: Any = None

    @property
    def numbers(self) -> jax.Array:
        return self.start + jax.lax.iota(jnp.int32, self.size)

    @classmethod
    def whole(cls, size: int) -> Rows:
        """A whole (head) axis, padded to a power of two."""
        full = padded(size)
        return cls(0, full, None if full == size else size)


@dataclasses.dataclass(frozen=True)
class View:
    """A Ref in a kernel and the names of its axes."""

    ref: Any
    axes: tuple[str, ...]
    interpret: bool  # of `Launch`

    @property
    def dtype(self):
        return self.ref.dtype

    def _index(self, where: Mapping[str, Any], order: tuple[str, ...]):
        """Index of the Ref, the axes of the result, and the mask of what exists."""
        index, kept, mask = [], [], None
        for name in self.axes:
            rows = where[name]
            if isinstance(rows, Rows):
                kept.append(name)
                rows = pl.ds(rows.start, rows.size)
            index.append(rows)
        for name in kept:
            rows = where[name]
            if rows.limit is not None:
                exists = rows.numbers < rows.limit
                others = [i for i, other in enumerate(kept) if other != name]
                exists = jnp.expand_dims(exists, others)
                mask = exists if mask is None else mask & exists
        if mask is not None:
            mask = jnp.broadcast_to(mask, [where[name].size for name in kept])
        if any(name not in order for name in kept):
            raise ValueError(f"{self.axes=} do not fit {order=}")
        return tuple(index), kept, mask

    def load(
        self, order: tuple[str, ...], where: Mapping[str, Any], padding: float = 0
    ) -> jax.Array:
        """The block at `where` with axes `order`, of size 1 where there is none.

        Args:
          order: names of the axes of the result.
          where: for each axis of the view, `Rows` or a scalar index.
          padding: what elements beyond a limit are loaded as, whatever lies there.
        """
        index, kept, mask = self._index(where, order)
        if not kept:
            return self.ref[index]
        other = None
        if mask is not None:
            other = bool(padding) if self.dtype == jnp.bool_ else padding
        x = addresses.load(self.ref, index, mask, other, interpret=self.interpret)
        wanted = [name for name in order if name in kept]
        x = x if wanted == kept else jnp.transpose(x, [kept.index(a) for a in wanted])
        missing = [i for i, name in enumerate(order) if name not in kept]
        return jnp.expand_dims(x, missing) if missing else x

    def store(self, value: jax.Array, where: Mapping[str, Any]) -> None:
        """Writes a block, cast to the dtype of the Ref, up to the limits of `where`."""
        order = tuple(name for name in self.axes if isinstance(where[name], Rows))
        index, _, mask = self._index(where, order)
        value = value.astype(self.dtype)
        addresses.store(self.ref, index, value, mask, interpret=self.interpret)


def load_tree(tree, order: tuple[str, ...], where: Mapping[str, Any]):
    """Loads every `View` of a tree whose axes `where` covers; leaves the others."""

    def load(leaf):
        if isinstance(leaf, View) and all(name in where for name in leaf.axes):
            return leaf.load(order, where)
        return leaf

    return jax.tree.map(load, tree)


def _first(ids: Mapping[str, Any]):
    """The place in an axis that programs do not divide."""
    del ids
    return 0


def _program(name: str, group: int = 1) -> Callable[[Mapping[str, Any]], Any]:
    """The place given by grid axis `name`; `group` programs share one."""
    return lambda ids: ids[name] // group if group > 1 else ids[name]


class Layout:
    """The grid of a kernel, and where each operand's block lies in it.

    Args:
      operands: every operand, `Named`.
      parallel: the axes that programs divide among them: `t`, `s` or both.
      heads: the head axis of the grid: `n`, or `k` for a kernel that loops over the
        query heads of a group.
      blocks: block sizes.
      looped: axes of heads (`n`) and batch that a program loops over.
    """

    def __init__(
        self,
        operands,
        parallel: Axes,
        heads: str,
        blocks: Blocks,
        looped: Axes = (),
    ):
        size = sizes(operands)
        self.size = size
        self.rows = {"t": blocks.block_q, "s": blocks.block_kv}
        self.max_registers = blocks.max_registers
        self.group = size.get("n", 1) // size.get("k", size.get("n", 1))
        self.num_blocks = {a: pl.cdiv(size[a], self.rows[a]) for a in parallel}
        # Programs run in the order of the grid, first axis fastest: those that share
        # keys and values (blocks of one head, heads of one group) run together.
        names = [heads] if heads in size else []
        names += reversed(batch_axes(operands))
        names = [name for name in names if name not in looped]
        self.names = (*parallel, *names)
        self.grid = (*self.num_blocks.values(), *(size[name] for name in names))
        self.heads = heads
        self.looped = {name: size[name] for name in looped}

    def program_ids(self) -> dict[str, jax.Array]:
        """The number of this program's block of `t`, `s` or both."""
        ids = {name: pl.program_id(axis) for axis, name in enumerate(self.num_blocks)}
        first = next(iter(ids))
        return ids | {first: with_registers(ids[first], self.max_registers)}

    def rows_at(self, name: str, start, limit=None) -> Rows:
        """The block of `t` or `s` that starts at `start`.

        Args:
          limit: rows from it on are padding; None for the end of the axis.
        """
        size, block = self.size[name], self.rows[name]
        limit = size if limit is None else limit
        exact = isinstance(limit, int) and limit == size and size % block == 0
        return Rows(start, block, None if exact else limit)

    def block_spec(self, operand: Named) -> tuple[pl.BlockSpec, tuple[str, ...]]:
        """The BlockSpec of an operand and the names of the axes that stay in it."""
        shape: list[int | None] = []
        kept: list[str] = []
        places: list[Callable] = []
        whole = ("t", "s", "i", "j", *self.looped, *["k"] * ("n" in self.looped))
        for name, size in zip(operand.axes, operand.shape, strict=True):
            block, place = None, _first
            if name in whole:
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
    layout: Layout,
    inputs,
    outputs,
    *,
    name: str,
    launch: Launch,
):
    """Runs `kernel(inputs, outputs)`, trees of `View`, over the layout's grid.

    Args:
      kernel: reads and writes its views; returns nothing.
      layout: the grid.
      inputs: tree of `Named` arrays.
      outputs: tuple of `Named` shape structs.
      name: of the kernel in profiles and dumps.
      launch: warps, stages, interpreter.

    Returns:
      A tuple of arrays like `outputs`.

    Raises:
      ValueError: if an array is too large, as `jax.vmap` may make it.
    """
    operands, tree = jax.tree.flatten(inputs)
    elements = max(math.prod(x.shape) for x in (*operands, *outputs))
    if elements > MOST_ELEMENTS:
        raise ValueError(f"implementation='triton': {too_large(elements)}")
    specs, kept = zip(*map(layout.block_spec, (*operands, *outputs)), strict=True)

    def body(*refs):
        views = [
            View(*named, launch.interpret) for named in zip(refs, kept, strict=True)
        ]
        kernel(*tree.unflatten(views[: len(operands)]), tuple(views[len(operands) :]))

    body.__name__ = body.__qualname__ = name
    results = support.pallas_call(
        body,
        grid=layout.grid,
        in_specs=list(specs[: len(operands)]),
        out_specs=list(specs[len(operands) :]),
        out_shape=[support.varying_like(x.value, operands[0].value) for x in outputs],
        blocks=launch.blocks,
        interpret=launch.interpret,
        name=name,
    )(*(operand.value for operand in operands))
    return tuple(results)
