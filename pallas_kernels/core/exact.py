"""Which blocks of pairs masks keep, exactly: by intervals, then pair by pair.

What arrays decide is known of a block by its smallest and largest elements alone
(`masks.relation`): of ids in any order that says little. Blocks that it leaves open are
evaluated here, some at a time, so that no array has an element for each pair.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core.axes import Named, batch_axes, is_whole, sizes
from pallas_kernels.core.masks.relation import Relation, Tiling, blocked
from pallas_kernels.core.spec import AttentionSpec


def relation(spec: AttentionSpec, tiling: Tiling, pairs: int) -> Relation:
    """For each pair of blocks: is some pair kept, are all.

    Args:
      spec: of masks and an offset, `Named`, with all rows.
      tiling: of the same rows.
      pairs: how many are evaluated at a time.
    """
    code = spec.relation(tiling).code(tiling)
    # Intervals may not depend on all that the masks depend on.
    leaves = jax.tree.leaves(spec)
    heads = ("n",) if any("n" in x.axes for x in leaves) else ()
    axes = (*batch_axes(leaves), *heads, "i", "j")
    size_of = sizes([code, *leaves])
    shape = tuple(size_of[a] for a in axes)
    codes = jnp.broadcast_to(code.to(axes), shape).reshape(-1)
    is_open = codes == 1
    size = codes.size
    at_once = max(1, min(size, pairs // (tiling.block_q * tiling.block_kv)))
    # The open ones first, as numbers in `codes`.
    numbers = jnp.arange(size, dtype=jnp.int32)
    order = lax.sort(jnp.where(is_open, numbers, numbers + size), is_stable=False)
    order = jnp.pad(lax.rem(order, jnp.int32(size)), (0, at_once))
    count = jnp.sum(is_open, dtype=jnp.int32)
    fields = jax.tree.map(lambda x: blocked(x.squeezed(), tiling.blocks), spec)

    def some_of(start, found):
        chosen = lax.dynamic_slice_in_dim(order, start, at_once)
        place = dict(zip(axes, jnp.unravel_index(chosen, shape), strict=True))
        return lax.dynamic_update_slice_in_dim(
            found, _codes(spec, fields, tiling, place), start, 0
        )

    def body(carry):
        start, found = carry
        return start + at_once, some_of(start, found)

    found = jnp.zeros(size + at_once, jnp.int32)
    _, found = lax.while_loop(lambda x: x[0] < count, body, (jnp.int32(0), found))
    rank = lax.cumsum(is_open.astype(jnp.int32)) - 1
    codes = jnp.where(is_open, found[jnp.maximum(rank, 0)], codes).reshape(shape)
    return Relation(Named(codes > 0, axes), Named(codes == 2, axes))


def _codes(spec, fields, tiling: Tiling, place: Mapping[str, jax.Array]) -> jax.Array:
    """Of the blocks at these places, 0, 1 or 2 (`Relation.code`)."""
    rows = _rows(place["i"], tiling.block_q)[:, :, None]
    keys = _rows(place["j"], tiling.block_kv)[:, None, :]
    loaded = jax.tree.map(lambda x: _block(x, place), fields)
    (kept,) = loaded.keep(rows, keys)
    kept &= (rows < tiling.q_size) & (keys < tiling.kv_size)
    count = jnp.sum(kept, axis=(1, 2), dtype=jnp.int32)
    # Of the last blocks, as many as there are.
    of_q, of_kv = (
        jnp.minimum(block, size - place[name] * block)
        for name, block, size in (
            ("i", tiling.block_q, tiling.q_size),
            ("j", tiling.block_kv, tiling.kv_size),
        )
    )
    return (count > 0).astype(jnp.int32) + (count == of_q * of_kv)


def _rows(block: jax.Array, rows: int) -> jax.Array:
    return block[:, None] * rows + np.arange(rows, dtype=np.int32)


def _block(x: Named, place: Mapping[str, jax.Array]) -> jax.Array:
    """The blocks of a field at these places: [blocks, rows or 1, keys or 1, ..]."""
    chosen = [a for a in x.axes if a in place]
    whole = tuple(a for a in x.axes if is_whole(a))
    x = x.ordered((*chosen, *(a for a in ("t", "s") if a in x.axes), *whole))
    value = x.value[tuple(place[str(a)] for a in chosen)] if chosen else x.value[None]
    return Named(value, ("", *x.axes[len(chosen) :])).to(("", "t", "s", *whole))
