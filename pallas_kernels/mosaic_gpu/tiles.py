"""The tiles that a program of the backward kernel goes through, and whose turn it is.

Nothing here is an instruction of a GPU: tests go through all programs on a CPU.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import program
from pallas_kernels.core.lists import BlockList, Visited
from pallas_kernels.core.ranges import Range, maximum, minimum
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.core.visits import Share, Sharing, Visits
from pallas_kernels.layout import Rows, load_tree
from pallas_kernels.mosaic_gpu import memory


class KeyGrid(memory.TileGrid):
    """Tiles of blocks of keys, of which some may have several programs each.

    Attributes:
      sharing: how; None where no block is shared, as where work is divided otherwise.
    """

    def __init__(self, operands, *, sharing: Sharing | None = None, **arguments):
        super().__init__(operands, by_block=True, **arguments)
        self.sharing = None if self.parts else sharing
        if self.sharing is not None:
            count = self.num_blocks["s"] + self.sharing.more
            self.num_blocks, self.grid = {"s": count}, (count, *self.grid[1:])


def visits_of(spec: AttentionSpec, layout: memory.TileGrid) -> Visits | None:
    """Of the programs, where arrays decide them (`Named` fields)."""
    if spec.meets_exactly:
        return None
    sharing = layout.sharing if isinstance(layout, KeyGrid) else None
    return Visits.of(spec, layout.size, layout.rows, sharing)


class Place(NamedTuple):
    """What a tile is of.

    Attributes:
      head: number among the query heads that a program visits.
      block: of queries.
      masked: whether pairs may be masked.
    """

    head: Any
    block: Any
    masked: Any


class Turn(NamedTuple):
    """When a tile's part of dq is added.

    Attributes:
      head, block: as of `Place`.
      accumulator: to which sum.
      before: after how many others to that.
    """

    head: Any
    block: Any
    accumulator: Any
    before: Any

    def waits_for(self, *, in_order: bool):
        """How many must be done: all before it, or the first alone, which stores."""
        return self.before if in_order else minimum(self.before, 1)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The blocks of queries that a program visits, of each query head of its group.

    Attributes:
      spec, where: of the program.
      layout: of the kernel.
      needed: the blocks: those that meet its keys, exactly, as the programs that come
        after this one count on it; or its part of them.
      first_head: of the query heads that the program visits.
      heads: how many they are.
      blocks: how many blocks it visits of each.
      visits: where arrays decide them, with what this program needs loaded; else None.
      share: what the program has of its block of keys, where programs share blocks.
    """

    spec: AttentionSpec
    where: program.Where
    layout: memory.TileGrid
    needed: Visited
    first_head: Any
    heads: Any
    blocks: Any
    visits: Visits | None
    share: Share | None = None

    @classmethod
    def of(cls, spec, where, layout: memory.TileGrid, visits: Visits | None) -> Tiles:
        share = None
        if visits is None:
            found = cls._met(spec, where["s"].start, layout)
        else:
            loaded: Visits = load_tree(visits, (), where)
            visits, found = loaded, loaded.blocks
            if isinstance(found, BlockList):
                found = found.walk(where["s"].start, layout.rows["t"])
            if visits.sharing is not None:
                number, keys = layout.program_ids()["s"], layout.size["s"]
                share = visits.share(number, layout.rows["s"], keys)
        if layout.size["s"] % layout.rows["s"]:
            # Of rows beyond the array p may be infinite, and dq would be NaN.
            end = where["s"].start + layout.rows["s"]
            found = found.all_edges(jnp.asarray(end > layout.size["s"], jnp.int32))
        if share is not None:
            found = found.part(share.part, share.parts)
        needed, group = layout.own_blocks(where, found), 0
        if "k" in where:
            group = where["k"] * layout.group
        first, end = layout.own_elements(where)
        own = group + first, jnp.int32(end - first), jnp.int32(needed.count)
        return cls(spec, where, layout, needed, *own, visits, share)

    @staticmethod
    def _met(spec, start, layout: memory.TileGrid) -> Range:
        """Where windows and lengths alone decide."""
        size, rows = layout.size["t"], layout.rows["t"]
        end = minimum(start + layout.rows["s"], layout.size["s"])
        first, last = spec.query_blocks_met(start, end, size, rows)
        full = spec.q_blocks(start, end, size, rows)
        full_lo = minimum(maximum(full.full_lo, first), last)
        full_hi = maximum(minimum(full.full_hi, last), full_lo)
        return Range(first, full_lo, full_hi, last)

    @property
    def count(self):
        return self.blocks * self.heads

    def place(self, tile) -> Place:
        """What a tile is of.

        Heads take turns. But with a window each program has blocks of its own, and
        comes to one some time after the program before it. Then heads follow one
        another: else so many blocks of all heads pass in that time that the cache
        does not hold them.

        Blocks of queries come from the last on. Each program then comes to a block some
        tiles after the program before it, as blocks of keys come from the first on:
        none waits for another's end.
        """
        if self.spec.traits.is_windowed:
            head, number = lax.div(tile, self.blocks), lax.rem(tile, self.blocks)
        else:
            head, number = lax.rem(tile, self.heads), lax.div(tile, self.heads)
        masked, block = self.needed.in_order(self.blocks - 1 - number)
        return Place(head, block, masked)

    @property
    def reads_places(self) -> bool:
        """Whether `place` reads global memory."""
        return not isinstance(self.needed, Range)

    def at(self, place: Place | Turn) -> program.Where:
        """Where a tile's queries lie."""
        rows = self.layout.rows["t"]
        here = Rows(place.block * rows, rows)
        return {**self.where, "n": self.first_head + place.head, "t": here}

    def masked(self, place: Place):
        """A traced boolean, or False if no pair of any tile is masked."""
        edges = self.needed.edges
        return False if isinstance(edges, int) and edges == 0 else place.masked

    def before(self, place: Place):
        """How many programs add to the dq of a tile before this one."""
        if self.visits is not None:
            return self.visits.before_at(self.where, place.block, self.layout.rows)
        size, (rows, keys) = self.layout.size, (self.layout.rows[x] for x in "ts")
        start = place.block * rows
        end = minimum(start + rows, size["t"])
        met = self.spec.key_blocks_met(start, end, size["s"], keys)
        return lax.div(self.where["s"].start, jnp.int32(keys)) - met[0]

    def turn(self, place: Place, sums: int) -> Turn:
        """When a tile is added to one of so many sums."""
        before, every = self.before(place), jnp.int32(sums)
        which, before = lax.rem(before, every), lax.div(before, every)
        return Turn(place.head, place.block, which, before)

    @property
    def _axes(self) -> list[tuple[str, int]]:
        """Of the blocks of dq, but that of the blocks."""
        names = [x for x in (*self.layout.names, "n") if x not in ("s", "k")]
        return [(x, self.layout.size[x]) for x in names if x in self.layout.size]

    @property
    def _blocks_of_rows(self) -> int:
        return -(-self.layout.size["t"] // self.layout.rows["t"])

    @property
    def shared(self) -> int:
        """How many blocks of keys may be shared, of all heads and batch entries."""
        assert self.visits is not None and self.visits.sharing is not None
        own = [x for x in self.layout.names if x != "s"]
        heads = math.prod(self.layout.size[x] for x in own)
        return heads * self.visits.sharing.blocks

    @property
    def shared_number(self):
        """Of the block of keys among those, if it is shared."""
        assert self.visits is not None and self.visits.sharing is not None
        assert self.share is not None
        number = jnp.int32(0)
        for name in (x for x in self.layout.names if x != "s"):
            number = number * self.layout.size[name] + self.where[name]
        return number * self.visits.sharing.blocks + self.share.block

    @property
    def all_sums(self) -> int:
        """How many blocks dq has."""
        return self._blocks_of_rows * math.prod(size for _, size in self._axes)

    def number(self, place: Place | Turn):
        """Of the block of dq of a tile."""
        here, number = self.at(place), jnp.int32(0)
        for name, size in self._axes:
            number = number * size + here[name]
        return number * self._blocks_of_rows + place.block
