"""A ring of tiles in shared memory, which one warp fills while others compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import support


@dataclasses.dataclass(frozen=True)
class Ring:
    """Tiles by name, that one warp fills and warpgroups read, in one order.

    Tiles that come together share the barriers "... here" and "... read" of the first.

    Attributes:
      refs: the tiles and the barriers.
      stages: how many tiles of each there are.
    """

    refs: Mapping[str, Any]
    stages: int

    @staticmethod
    def shared(tiles: Mapping[str, Any], stages: int, readers: int) -> dict[str, Any]:
        """Shared memory and barriers of tiles that come together.

        Args:
          tiles: by name (`support.by_name`), [stages, ...].
          readers: warpgroups that read them.
        """
        name, *_ = next(iter(tiles)).split(" or ")
        return {
            **tiles,
            f"{name} here": plgpu.Barrier(num_barriers=stages, num_arrivals=len(tiles)),
            f"{name} read": plgpu.Barrier(num_barriers=stages, num_arrivals=readers),
        }

    def slot(self, i):
        return lax.rem(i, jnp.int32(self.stages))

    def fill(self, i, **parts) -> None:
        """Loads tiles number i, as soon as those before them in their place were read.

        Args:
          parts: of global memory, by name of the tile.
        """
        name, slot = next(iter(parts)), self.slot(i)

        @pl.when(i >= self.stages)
        def _():
            plgpu.barrier_wait(self.refs[f"{name} read"].at[slot])

        here = self.refs[f"{name} here"].at[slot]
        for tile, part in parts.items():
            into = support.copied(self.refs, tile).at[slot]
            plgpu.copy_gmem_to_smem(part, into, here)

    def wait(self, name: str, i) -> None:
        """Until tile number i is here."""
        plgpu.barrier_wait(self.refs[f"{name} here"].at[self.slot(i)])

    def tile(self, name: str, i):
        return self.refs[name].at[self.slot(i)]

    def release(self, name: str, i, *, loaded: bool = False) -> None:
        """This warpgroup has read tile number i.

        Args:
          loaded: to registers, by loads that may still be under way. They are waited
            for: the next tile comes as soon as all warpgroups have arrived.
        """
        if loaded:
            support.finish_loads()
        plgpu.barrier_arrive(self.refs[f"{name} read"].at[self.slot(i)])
