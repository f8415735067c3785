"""The tiles that a program of the backward kernel goes through, and whose turn it is.

Nothing here is an instruction of a GPU: tests go through all programs on a CPU.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import program
from pallas_kernels.core.lists import BlockList, Visited
from pallas_kernels.core.ranges import Range, maximum, minimum
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.core.visits import Visits
from pallas_kernels.layout import Rows, load_tree
from pallas_kernels.mosaic_gpu import memory


def visits_of(spec: AttentionSpec, layout: memory.TileGrid) -> Visits | None:
    """Of the programs, where arrays decide them (`Named` fields)."""
    if spec.meets_exactly:
        return None
    return Visits.of(spec, layout.size, layout.rows)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The blocks of queries that a program visits, of each query head of its group.

    Attributes:
      spec, where: of the program.
      layout: of the kernel.
      needed: the blocks: those that meet its keys, exactly, as the programs that come
        after this one count on it; or its part of them.
      visits: where arrays decide them, with what this program needs loaded; else None.
    """

    spec: AttentionSpec
    where: program.Where
    layout: memory.TileGrid
    needed: Visited
    visits: Visits | None

    @classmethod
    def of(cls, spec, where, layout: memory.TileGrid, visits: Visits | None) -> Tiles:
        if visits is None:
            found = cls._met(spec, where["s"].start, layout)
        else:
            loaded: Visits = load_tree(visits, (), where)
            visits, found = loaded, loaded.blocks
            if isinstance(found, BlockList):
                found = found.walk(where["s"].start, layout.rows["t"])
        if layout.size["s"] % layout.rows["s"]:
            # Of rows beyond the array p may be infinite, and dq would be NaN.
            end = where["s"].start + layout.rows["s"]
            found = found.all_edges(jnp.asarray(end > layout.size["s"], jnp.int32))
        return cls(spec, where, layout, layout.own_blocks(where, found), visits)

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
    def _heads(self) -> tuple[Any, Any]:
        """The first of the query heads that a program visits, and how many they are."""
        group = self.where["k"] * self.layout.group if "k" in self.where else 0
        first, end = self.layout.own_elements(self.where)
        return group + first, jnp.int32(end - first)

    @property
    def count(self):
        return jnp.int32(self.needed.count) * self._heads[1]

    def _place(self, tile) -> tuple[Any, Any]:
        """Of a tile, the numbers of its query head and of its block of queries.

        Heads take turns. But with a window each program has blocks of its own, and
        comes to one some time after the program before it. Then heads follow one
        another: else so many blocks of all heads pass in that time that the cache
        does not hold them.
        """
        heads, blocks = self._heads[1], jnp.int32(self.needed.count)
        if self.spec.traits.is_windowed:
            return lax.div(tile, blocks), lax.rem(tile, blocks)
        return lax.rem(tile, heads), lax.div(tile, heads)

    def _block(self, tile) -> tuple[Any, Any]:
        """Whether pairs of a tile may be masked, and its block of queries.

        These come from the last on. Each program then comes to a block some tiles
        after the program before it, as blocks of keys come from the first on: none
        waits for another's end.
        """
        back = jnp.int32(self.needed.count) - 1 - self._place(tile)[1]
        return self.needed.in_order(back)

    def at(self, tile) -> program.Where:
        rows = self.layout.rows["t"]
        here = Rows(self._block(tile)[1] * rows, rows)
        head = self._heads[0] + self._place(tile)[0]
        return {**self.where, "n": head, "t": here}

    def masked(self, tile):
        """A traced boolean, or False if no pair of any tile is masked."""
        edges = self.needed.edges
        return False if isinstance(edges, int) and edges == 0 else self._block(tile)[0]

    def before(self, tile):
        """How many programs add to the dq of a tile before this one."""
        if self.visits is not None:
            block = self._block(tile)[1]
            return self.visits.before_at(self.where, block, self.layout.rows)
        keys, size, rows = self.layout.rows["s"], self.layout.size, self.at(tile)["t"]
        end = minimum(rows.start + rows.size, size["t"])
        met = self.spec.key_blocks_met(rows.start, end, size["s"], keys)
        return lax.div(self.where["s"].start, jnp.int32(keys)) - met[0]

    def turn(self, tile, sums: int) -> tuple[Any, Any]:
        """To which of so many sums a tile is added, and how many others before it."""
        before, every = self.before(tile), jnp.int32(sums)
        return lax.rem(before, every), lax.div(before, every)

    @property
    def _axes(self) -> list[tuple[str, int]]:
        """Of the blocks of dq, but that of the blocks."""
        names = [x for x in (*self.layout.names, "n") if x not in ("s", "k")]
        return [(x, self.layout.size[x]) for x in names if x in self.layout.size]

    @property
    def _blocks_of_rows(self) -> int:
        return -(-self.layout.size["t"] // self.layout.rows["t"])

    @property
    def all_sums(self) -> int:
        """How many blocks dq has."""
        return self._blocks_of_rows * math.prod(size for _, size in self._axes)

    def number(self, tile):
        """Of the block of dq of a tile."""
        here, number = self.at(tile), jnp.int32(0)
        for name, size in self._axes:
            number = number * size + here[name]
        return number * self._blocks_of_rows + self._block(tile)[1]
