"""Keys and values in pages: which page has which rows of a sequence.

A pool has pages of equal size, and sequences take pages of it as they grow. Keys,
values and their scales are operands with axes `p` (pages) and `r` (rows of a page) in
place of `s`. The page table says which page has rows number c * size to (c + 1) * size
of a sequence; it is part of the spec, since one serves all of them. `s` is then a
number that no array has as an axis: kernels ask `Pages` where a row lies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.core.ranges import divide, minimum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """The page table of a call.

    Attributes:
      table: int32 with axes `c` and those of batch: numbers of pages. Those of pages
        that no needed row lies in may be anything.
      count: pages of the pool (static).
      size: rows of a page (static).
    """

    table: Any
    count: int = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})

    def place(self, row, places: int):
        """Where rows of a sequence are: the place in the table, and the row of a page.

        Args:
          row: numbers, at least 0.
          places: of the table; rows beyond it are said to be in the last.
        """
        place = divide(row, self.size)
        return minimum(place, places - 1), row - place * self.size

    def page(self, entry: jax.Array) -> jax.Array:
        """A page that exists, whatever the entry of the table is."""
        return jnp.minimum(jnp.maximum(entry, 0), self.count - 1)
