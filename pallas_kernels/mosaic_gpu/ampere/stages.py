"""Stages of shared memory that warpgroups fill for themselves, and read.

No warpgroup only loads. While all compute with the tiles of one stage, the next ones
are under way: by cp.async on GPUs before Hopper, by TMA on later ones. Both have the
methods of `pipeline.Pipeline`, in this order for use number i:

    wait(i)        the tiles have come, and all have read those of use i - 1
    fill(i + stages - 1, parts)
    at(i)
    release(i)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.barriers import NamedBarrier
from pallas_kernels.mosaic_gpu.pipeline import Pipeline
from pallas_kernels.mosaic_gpu.shared_memory import Tile


def _is_tile(x) -> bool:
    return isinstance(x, Tile)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AsyncCopies:
    """Stages filled by cp.async, which each thread issues and waits for itself.

    Attributes:
      tiles: a tree of `Tile` of shape [stages, ...]. Warpgroups take turns to copy
        them, equally many each.
      stages: how many there are, at least 2.
      barrier: of all warpgroups.
    """

    tiles: Any
    stages: int = dataclasses.field(metadata={"static": True})
    barrier: NamedBarrier = dataclasses.field(metadata={"static": True})

    @property
    def _copies(self) -> int:
        """Of a warpgroup, for each use."""
        return len(jax.tree.leaves(self.tiles, is_leaf=_is_tile)) // self._warpgroups

    @property
    def _warpgroups(self) -> int:
        return self.barrier.warpgroups

    def fill(self, i, parts) -> None:
        """Copies this warpgroup's tiles of use number i, after `wait(i + 1 - stages)`.

        Args:
          parts: what is copied from global memory, a tree like `tiles`.
        """
        stage = lax.rem(i, jnp.int32(self.stages))
        sources = jax.tree.structure(self.tiles, is_leaf=_is_tile).flatten_up_to(parts)
        tiles = jax.tree.leaves(self.tiles, is_leaf=_is_tile)
        for number, (tile, source) in enumerate(zip(tiles, sources, strict=True)):
            mine = lax.axis_index("warpgroup") == number % self._warpgroups

            @pl.when(mine)
            def _(tile=tile, source=source):
                plgpu.copy_gmem_to_smem(
                    source,
                    tile.copied.at[stage],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

    def wait(self, i, count) -> None:
        """Waits until the tiles of use number i of `count` have come.

        And until all warpgroups have read those of the use before it.
        """
        later = self.stages - 2  # uses that may be under way
        if later:
            is_inner = i + later < count
            pl.when(is_inner)(lambda: plgpu.wait_gmem_to_smem(later * self._copies))
            pl.when(~is_inner)(lambda: plgpu.wait_gmem_to_smem(0))
        else:
            plgpu.wait_gmem_to_smem(0)
        self.barrier.sync()

    def at(self, i):
        """The tiles of use number i."""
        stage = lax.rem(i, jnp.int32(self.stages))
        return jax.tree.map(lambda x: x.at(stage), self.tiles, is_leaf=_is_tile)

    def release(self, i) -> None:
        """Nothing: the next `wait` is for all to have read the tiles."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TmaCopies:
    """Stages filled by TMA, which the first warpgroup issues.

    Attributes:
      pipeline: of the stages, which all warpgroups read.
    """

    pipeline: Pipeline

    def fill(self, i, parts) -> None:
        """As of `AsyncCopies`."""
        is_first = lax.axis_index("warpgroup") == 0
        pl.when(is_first)(lambda: self.pipeline.fill(i, parts))

    def wait(self, i, count) -> None:
        """As of `AsyncCopies`, without the others: `fill` waits for these."""
        del count
        self.pipeline.wait(i)

    def at(self, i):
        """As of `AsyncCopies`."""
        return self.pipeline.at(i)

    def release(self, i) -> None:
        """This warpgroup has read the tiles of use number i."""
        self.pipeline.release(i, loaded=True)
