"""A pipeline: a ring of stages in shared memory between a producer and consumers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import support
from pallas_kernels.mosaic_gpu.shared_memory import Tile


def _is_tile(x) -> bool:
    return isinstance(x, Tile)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stages that one warp fills by TMA and warpgroups read, all in one order.

    The tiles of use number i are in stage `i % stages`. Those that come together, such
    as queries and their log-sum-exps, share two barriers a stage:

        producer   waits for `empty`, copies all tiles; the copies arrive at `full`
        consumers  wait for `full`, read the tiles; each warpgroup arrives at `empty`

    Attributes:
      tiles: a `Tile` of shape [stages, ...], or several in a tree, such as a named
        tuple, in whose order they are copied.
      full: a barrier for each stage, at which every copy arrives (or `say_full`).
      empty: a barrier for each stage, at which every reader arrives.
      stages: how many there are.
    """

    tiles: Any
    full: Any
    empty: Any
    stages: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def declare(cls, tiles, stages: int, readers: int) -> Pipeline:
        """Shared memory and barriers of tiles that come together.

        Args:
          tiles: a `Tile`, or a tree of them, as declared.
          readers: how many warpgroups read them.
        """
        copies = len(jax.tree.leaves(tiles, is_leaf=_is_tile))
        return cls(
            tiles,
            plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
            plgpu.Barrier(num_barriers=stages, num_arrivals=readers),
            stages,
        )

    def stage(self, i):
        """The stage of use number i."""
        return lax.rem(i, jnp.int32(self.stages))

    def fill(self, i, parts, arrive_at=None) -> None:
        """Copies the tiles of use number i, once its stage has been read.

        Args:
          parts: what is copied from global memory, a tree like `tiles`.
          arrive_at: a barrier at which the copies arrive, if they do not fill the stage
            yet (`say_full`).
        """
        stage = self.stage(i)

        @pl.when(i >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[stage])

        full = self.full.at[stage] if arrive_at is None else arrive_at
        sources = jax.tree.structure(self.tiles, is_leaf=_is_tile).flatten_up_to(parts)
        tiles = jax.tree.leaves(self.tiles, is_leaf=_is_tile)
        for tile, source in zip(tiles, sources, strict=True):
            plgpu.copy_gmem_to_smem(source, tile.copied.at[stage], full)

    def say_full(self, i) -> None:
        """Arrives at `full` in place of the copy of use number i, which did elsewhere.

        For pipelines of one tile.
        """
        plgpu.barrier_arrive(self.full.at[self.stage(i)])

    def wait(self, i) -> None:
        """Waits until the tiles of use number i have come."""
        plgpu.barrier_wait(self.full.at[self.stage(i)])

    def wait_unless_beyond(self, i, last) -> None:
        """Waits for the tiles of use number i, if that is `last` at most.

        ptxas moves nothing across this branch. So what stands before it is computed
        before the next wait for products, and not after it.
        """
        pl.when(i <= last)(functools.partial(self.wait, i))

    def at(self, i):
        """The tiles of use number i: a `Tile`, or the tree of them."""
        stage = self.stage(i)
        return jax.tree.map(lambda x: x.at(stage), self.tiles, is_leaf=_is_tile)

    def release(self, i, *, loaded: bool = False) -> None:
        """This warpgroup has read the tiles of use number i.

        Args:
          loaded: whether it read them into registers, by loads that may be under way.
            They are waited for: the next tiles come as soon as all have arrived.
        """
        if loaded:
            support.finish_loads()
        plgpu.barrier_arrive(self.empty.at[self.stage(i)])
