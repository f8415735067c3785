"""Named operands inside a kernel, and how programs divide a call among them.

The grid is the union of the axes that are not looped over inside a kernel. Inside it an
operand is a `View`, a Ref whose remaining axes have names: a kernel asks for the axes
that it wants and the rows of each, and a `View` that lacks an axis answers with
something that broadcasts. How an element is addressed is a backend's (`View.read`,
`View.write`, `Layout.program_ids`).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import division
from pallas_kernels.configs import PART, Blocks
from pallas_kernels.core.arithmetic import Arithmetic
from pallas_kernels.core.axes import batch_axes, group_of, is_numbered, sizes
from pallas_kernels.core.lists import Visited
from pallas_kernels.core.pointwise.tables import Distances, Table
from pallas_kernels.core.ranges import Range, divide, everything
from pallas_kernels.tables import FEW_ROWS, pieces


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is run.

    Attributes:
      blocks: block sizes, warps and stages.
      precision: of float32 products.
      arithmetic: the backend's instructions, or JAX's own.
      interpret: run in Pallas's interpreter.
      splits: of the caller's `Config`.
      invariant: likewise, of the forward kernel.
      deterministic: likewise, of the backward kernels.
    """

    blocks: Blocks
    precision: Any
    arithmetic: Arithmetic
    interpret: bool
    splits: int | None = None
    invariant: bool = False
    deterministic: bool = True


@dataclasses.dataclass(frozen=True)
class Rows:
    """A block of an axis: `size` elements from `start`, every `step`th.

    None from `limit` on exist, and none of which `kept` is False, if it is given.
    """

    start: Any
    size: int
    limit: Any = None
    kept: Any = None
    step: int = 1

    @property
    def numbers(self) -> jax.Array:
        numbers = jax.lax.iota(jnp.int32, self.size)
        return self.start + (numbers if self.step == 1 else numbers * self.step)

    @property
    def exists(self) -> jax.Array | None:
        """Which elements do, or None for all."""
        if self.limit is None:
            return self.kept
        below = self.numbers < self.limit
        return below if self.kept is None else below & self.kept

    @property
    def places(self) -> jax.Array | None:
        """The number of each element, if they do not lie side by side; or None."""
        return None

    @classmethod
    def whole(cls, size: int) -> tuple[Rows, ...]:
        """A whole (head) axis in its pieces, the last one padded."""
        cut, found, start = pieces(size), [], 0
        for piece in cut:
            limit = None if start + piece <= size else size
            found.append(cls(start, piece, limit))
            start += piece
        return tuple(found)

    @classmethod
    def in_turns(cls, size: int, pieces: int) -> tuple[Rows, ...]:
        """A whole axis in pieces, of which each has every `pieces`th element."""
        return tuple(cls(i, size // pieces, step=pieces) for i in range(pieces))


@dataclasses.dataclass(frozen=True)
class Scattered(Rows):
    """Rows of which each lies elsewhere: at `numbers_of` of the axis, if it exists."""

    numbers_of: Any = None

    @property
    def places(self) -> jax.Array:
        return self.numbers_of


@dataclasses.dataclass(frozen=True)
class View(abc.ABC):
    """A Ref in a kernel and the names of its axes."""

    ref: Any
    axes: tuple[str, ...]

    @property
    def dtype(self):
        return self.ref.dtype

    @abc.abstractmethod
    def read(self, index: tuple, mask: jax.Array | None, other: Any) -> jax.Array:
        """The block at `index`.

        Args:
          index: for each axis of the Ref a number or `Rows`, one `Rows` at least. An
            array of numbers, beside `Scattered` rows, has one for each of these.
          mask: which elements exist, in the shape of the block; None for all.
          other: what the others are read as.
        """

    @abc.abstractmethod
    def write(self, index: tuple, value: jax.Array, mask: jax.Array | None) -> None:
        """Writes a block where `mask` is set; the arguments are those of `read`."""

    def gather(self, index: tuple) -> jax.Array:
        """Elements for the pairs of a block.

        Args:
          index: for each axis of the Ref a number; for one of them int32 numbers in the
            shape of the block, or `Distances`. They exist.
        """
        raise NotImplementedError(f"{type(self).__name__} holds no tables")

    def level(self, index: tuple) -> tuple[jax.Array, jax.Array]:
        """As `Table.level`; the index is that of `gather`, with `Distances`."""
        raise NotImplementedError(f"{type(self).__name__} does not compare elements")

    def _pieces(self, where: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Where each piece of an axis in pieces lies, or None without any."""
        for name in self.axes:
            if isinstance(where[name], tuple):
                return [{**where, name: rows} for rows in where[name]]
        return None

    def _index(self, where: Mapping[str, Any]):
        """Index of the Ref, the axes of the result, and the mask of what exists."""
        index = tuple(where[name] for name in self.axes)
        kept = [name for name in self.axes if isinstance(where[name], Rows)]
        mask = None
        for name in kept:
            exists = where[name].exists
            if exists is not None:
                others = [i for i, other in enumerate(kept) if other != name]
                exists = jnp.expand_dims(exists, others)
                mask = exists if mask is None else mask & exists
        if mask is not None:
            mask = jnp.broadcast_to(mask, [where[name].size for name in kept])
        return index, kept, mask

    def load(
        self, order: tuple[str, ...], where: Mapping[str, Any], padding: float = 0
    ) -> Any:
        """The block at `where` with axes `order`, of size 1 where there is none.

        Args:
          order: names of the axes of the result.
          where: for each axis of the view, `Rows` or a scalar index, or for one of them
            a tuple of `Rows`: its pieces are a tuple then.
          padding: what elements beyond a limit are loaded as, whatever lies there.
        """
        places = self._pieces(where)
        if places is not None:
            return tuple(self.load(order, place, padding) for place in places)
        if "r" in self.axes:
            order = tuple("r" if name == "s" else name for name in order)
        index, kept, mask = self._index(where)
        if any(name not in order for name in kept):
            raise ValueError(f"{self.axes=} do not fit {order=}")
        if not kept:
            return self.ref[index]
        other = None
        if mask is not None:
            other = bool(padding) if self.dtype == jnp.bool_ else padding
        x = self.read(index, mask, other)
        wanted = [name for name in order if name in kept]
        x = x if wanted == kept else jnp.transpose(x, [kept.index(a) for a in wanted])
        missing = [i for i, name in enumerate(order) if name not in kept]
        return jnp.expand_dims(x, missing) if missing else x

    def store(self, value, where: Mapping[str, Any]) -> None:
        """Writes a block, cast to the dtype of the Ref, up to the limits of `where`."""
        places = self._pieces(where)
        if places is not None:
            for piece, place in zip(value, places, strict=True):
                self.store(piece, place)
            return
        index, _, mask = self._index(where)
        self.write(index, value.astype(self.dtype), mask)


@dataclasses.dataclass(frozen=True)
class Elements(Table):
    """A view at its place along all axes but a `whole_axis`, to read elements of."""

    view: View
    where: Mapping[str, Any]

    def _index(self, index) -> tuple:
        return tuple(index if is_numbered(a) else self.where[a] for a in self.view.axes)

    def number(self, index) -> jax.Array:
        """The element at a number that the program computed, a scalar."""
        return self.view.ref[self._index(index)]

    def at(self, places: jax.Array | Distances) -> jax.Array:
        return self.view.gather(self._index(places))

    def level(self, places: Distances) -> tuple[jax.Array, jax.Array]:
        return self.view.level(self._index(places))


def load_tree(tree, order: tuple[str, ...], where: Mapping[str, Any]):
    """Loads every `View` of a tree whose axes `where` covers; leaves the others.

    One with a `whole_axis` becomes `Elements`.
    """

    def load(leaf):
        if not isinstance(leaf, View):
            return leaf
        own = [name for name in leaf.axes if not is_numbered(name)]
        if not all(name in where for name in own):
            return leaf
        if len(own) < len(leaf.axes):
            return Elements(leaf, {name: where[name] for name in own})
        return leaf.load(order, where)

    return jax.tree.map(load, tree)


_REGISTERS = 65536  # of a multiprocessor

# The axis whose blocks a kernel's programs own, and the head axis of its grid; those of
# "dbias" own what its result has.
_OWN = {
    "forward": (("t",), "n"),
    "dq": (("t",), "n"),
    "tangent": (("t",), "n"),
    "dkv": (("s",), "k"),
    "dk": (("s",), "k"),
    "dv": (("s",), "k"),
}


class Layout(abc.ABC):
    """How the programs of a kernel divide a call: their grid, and who has what.

    Each compiler has its own (`triton.memory.BlockGrid`, `mosaic_gpu.memory.TileGrid`).

    Args:
      operands: every operand, `Named`.
      parallel: the axes that programs divide among them: `t`, `s` or both.
      heads: the head axis of the grid: `n`, or `k` for a kernel that loops over the
        query heads of a group.
      blocks: block sizes.
      looped: axes of heads (`n`) and batch that a program loops over.
      splits: into how many parts a program's work is divided (`division`), or None.
      invariant: whether parts of the keys lie at fixed places (`configs.PART`).
    """

    waves: int | None = None  # as for `division.parts`

    def __init__(
        self,
        operands,
        parallel: tuple[str, ...],
        heads: str,
        blocks: Blocks,
        looped: tuple[str, ...] = (),
        splits: int | None = None,
        invariant: bool = False,
    ):
        size = sizes(operands)
        self.size = size
        self.rows = {"t": blocks.block_q, "s": blocks.block_kv}
        # Blocks of keys of a part at a fixed place, and how many of these there are.
        self.part = PART // blocks.block_kv if invariant else None
        self.part_count = -(-size.get("s", 0) // PART)
        own = {a: self.head(a) for a in ("h", "d") if a in size}
        self.pieces = {a: tuple(x.size for x in rows) for a, rows in own.items()}
        self.group = group_of(size)
        self.num_blocks = {a: -(-size[a] // self.rows.get(a, 1)) for a in parallel}
        # Programs run in the order of the grid, first axis fastest: those that share
        # keys and values (blocks of one head, heads of one group) run together.
        names = [heads] if heads in size else []
        names += reversed(batch_axes(operands))
        names = [name for name in names if name not in looped]
        names = self.in_order(names, operands)
        self.heads = heads
        self.looped = {name: size[name] for name in looped}
        kinds = {x.dtype.itemsize for x in operands if "p" in x.axes}
        few_rows = self._programs_of_few_rows(is_byte=1 in kinds)
        # How many programs run at once was seen of these.
        timed = bool(few_rows) and 1 not in kinds and size["h"] == size["d"] == 128
        others = [size[name] for name in names]
        options = {"few_rows": few_rows, "even_turns": timed, "splits": splits}
        if blocks.max_registers is not None:
            threads = 32 * blocks.num_warps
            options["at_once"] = _REGISTERS // (threads * blocks.max_registers)
        self.parts = self._divided(others, **options)
        self.visits_few = bool(few_rows) and self._visits_few("c" in size, 1 in kinds)
        self.names = (*parallel, *self.parts, *names)
        counts = *self.num_blocks.values(), *self.parts.values()
        self.grid = (*counts, *(size[name] for name in names))

    @classmethod
    def of(
        cls,
        kernel: str,
        operands,
        launch: Launch,
        *,
        own: tuple[str, ...] = (),
        looped: tuple[str, ...] = (),
        **more: Any,
    ) -> Self:
        """The layout of a kernel (`configs.KERNELS`, or "tangent").

        Args:
          own, looped: of "dbias".
          more: of a backend's own layout.
        """
        parallel, heads = _OWN.get(kernel, (own, "n"))
        options = {"blocks": launch.blocks, "splits": launch.splits, **more}
        options["invariant"] = launch.invariant
        return cls(operands, parallel=parallel, heads=heads, looped=looped, **options)

    def head(self, name: str) -> tuple[Rows, ...]:
        """The pieces of a whole head axis, `h` or `d`."""
        return Rows.whole(self.size[name])

    def in_order(self, names: list[str], operands) -> list[str]:
        """Axes of heads and batch, the one whose programs run side by side first."""
        del operands
        return names

    def _programs_of_few_rows(self, *, is_byte: bool) -> int:
        """How many a multiprocessor is to have if a block has all rows, and few; or 0.

        Args:
          is_byte: whether keys or values have one byte.
        """
        has_few = self.size["t"] <= self.rows["t"] <= FEW_ROWS
        if self._visited != ("s",) or not has_few:
            return 0
        return division.number("byte_programs" if is_byte else "few_programs")

    def _visits_few(self, in_pages: bool, is_byte: bool) -> bool:
        """Whether a program of few rows has few blocks of keys, for one loop over them.

        A second loop, for blocks that need no mask, waits for memory again first.
        """
        name = "byte" if is_byte else "paged" if in_pages else "dense"
        blocks = -(-self.size["s"] // self.rows["s"])
        most = division.number(f"{name}_loop_blocks")
        return blocks <= most * self.parts.get("z", 1)

    def _divided(
        self, others: list[int], few_rows: int, **options: Any
    ) -> dict[str, int]:
        """The sizes of the axes of parts (`division.parts`)."""
        visited = [-(-self.size[a] // self.rows[a]) for a in self._visited]
        longest = None
        if few_rows and "c" in self.size:
            longest = max(1, division.number("longest_part") // self.rows["s"])
        programs = math.prod(self.num_blocks.values()) * math.prod(others)
        found = division.parts(
            programs,
            self.elements,
            math.prod(visited),
            few_rows=few_rows,
            waves=self.waves,
            longest=longest,
            **options,
        )
        if self.part is None:
            return found
        return division.fixed_parts(found, programs, self.part_count)

    @property
    def _visited(self) -> tuple[str, ...]:
        return tuple(a for a in ("t", "s") if a not in self.num_blocks)

    @property
    def elements(self) -> int:
        """Heads, or heads and batch entries, that a program loops over."""
        return self.group if self.heads == "k" else math.prod(self.looped.values())

    def own_elements(self, where: Mapping[str, Any]) -> tuple[Any, Any]:
        """The first of the elements that the program at `where` visits, their end."""
        if "y" not in self.parts:
            return np.int32(0), np.int32(self.elements)
        index, count = where["y"], self.parts["y"]
        first, end = (divide(self.elements * i, count) for i in (index, index + 1))
        return first, end

    def own_blocks(self, where: Mapping[str, Any], blocks: Visited) -> Visited:
        """Those of a range that the program at `where` visits."""
        if "z" not in self.parts:
            return blocks
        if self.part is None:
            return blocks.part(where["z"], self.parts["z"])
        assert isinstance(blocks, Range), "an invariant call has no lists of blocks"
        first = where["z"] * self.part
        return blocks & everything(first, first + self.part)

    @abc.abstractmethod
    def program_ids(self) -> dict[str, jax.Array]:
        """The number of this program's block of `t`, `s` or both, and of its parts."""

    def rows_at(self, name: str, start, limit=None) -> Rows:
        """The block of `t` or `s` that starts at `start`.

        Args:
          limit: rows from it on are padding; None for the end of the axis.
        """
        size, block = self.size[name], self.rows[name]
        limit = size if limit is None else limit
        exact = isinstance(limit, int) and limit == size and size % block == 0
        return Rows(start, block, None if exact else limit)
