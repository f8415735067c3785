"""Clears keys that no query attends: padding, and those a mask drops for all queries.

Such rows meet products, whose results count for nothing. But 0 times NaN is NaN, so the
rows become zeros in shared memory. To copy all keys and values before the kernel takes
longer; that is done where dq has a kernel of its own, and for the gradient of a bias.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.mosaic_gpu import memory, support


def attended_keys(
    spec: AttentionSpec, keys: memory.View | None, where: dict[str, Any], size: int
) -> jax.Array:
    """Which keys of a block some query may attend, [rows].

    Args:
      spec: with its lengths loaded.
      keys: which ones a mask keeps for some query (`AttentionSpec.keys`).
      where: the block lies.
      size: how many keys there are.
    """
    rows = where["s"]
    numbers = rows.start + support.numbers_along(0, rows.size)
    below = numbers < spec.kv_limit(size)
    return below if keys is None else below & keys.load(("s",), where)


def clear(tile, kept: jax.Array) -> None:
    """Writes zeros to rows of a tile in shared memory, before a product reads them.

    One warpgroup does it. Others must wait for it before their products.

    Args:
      kept: [rows], which ones stay as they are.
    """
    x = support.load_tile(tile)
    kept = support.ARITHMETIC.along(kept, -2, x.shape)
    tile[...] = jnp.where(kept, x, jnp.zeros_like(x))
    plgpu.commit_smem()
