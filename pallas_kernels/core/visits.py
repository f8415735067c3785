"""Which blocks of queries each block of keys visits, where arrays say so, and in turn.

For kernels whose programs own blocks of keys and add to the blocks of queries that they
visit: a program waits until those before it have added to the same one, so that sums
have one order. Of windows and lengths the number of these follows from where a block
lies (`AttentionSpec.key_blocks_met`). Of data it is counted here, from the very ranges
that programs then visit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core.axes import Named, batch_axes
from pallas_kernels.core.ranges import Range
from pallas_kernels.core.spec import AttentionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """The visits of the programs of all blocks of keys `j`, the same for all heads.

    Attributes:
      blocks: the `Range` of blocks of queries that each visits, int32 [.., j] with the
        batch axes of what decides it.
      before: int32 [.., j, i], how many programs before that of block j visit block i
        of queries; meant for those that j visits.
    """

    blocks: Range
    before: Any

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        size: Mapping[str, int],
        rows: Mapping[str, int],
        *,
        last_first: bool,
    ) -> Visits:
        """Of a call.

        Args:
          spec: of `Named` arrays, without a table.
          size, rows: all of `t` and `s`, and those of a block.
          last_first: whether the program of the last block of keys is the first.
        """
        sizes = rows["t"], rows["s"], size["t"], size["s"]
        tabled = spec.with_table("t", *sizes, over=("n",))
        axes = (*_batch(spec), "j")
        loaded = jax.tree.map(lambda x: x.to(axes), tabled.for_ranges())
        queries, keys = (-(-size[a] // rows[a]) for a in ("t", "s"))
        start = jnp.arange(keys, dtype=jnp.int32) * rows["s"]
        end = jnp.minimum(start + rows["s"], size["s"])
        found = loaded.q_blocks(start, end, size["t"], rows["t"])
        # All of them for each block of keys, though nothing may depend on it.
        found = Range(*jnp.broadcast_arrays(*found, start)[:-1])
        lo, hi = (x[..., None] for x in (found.need_lo, found.need_hi))
        i = jnp.arange(queries, dtype=jnp.int32)
        visited = ((lo <= i) & (i < hi)).astype(jnp.int32)
        so_far = lax.cumsum(visited, axis=visited.ndim - 2, reverse=last_first)
        blocks = Range(*(Named(x, axes) for x in found))
        return cls(blocks, Named(so_far - visited, (*axes, "i")))


def size_of_counts(
    spec: AttentionSpec, size: Mapping[str, int], rows: Mapping[str, int]
) -> int:
    """Bytes of `Visits.before`; to make them takes a few times as much for a while.

    Args:
      spec: of `Named`.
      size: of every axis.
      rows: as for `Visits.of`.
    """
    blocks = (-(-size[a] // rows[a]) for a in ("t", "s"))
    return 4 * math.prod(blocks) * math.prod(size[a] for a in _batch(spec))


def _batch(spec: AttentionSpec) -> tuple[str, ...]:
    """Of what decides which blocks meet."""
    parts = spec.masks, spec.offset, spec.query_rows, spec.key_rows
    return batch_axes(jax.tree.leaves(parts))
