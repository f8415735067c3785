"""Masks together with lists of the blocks that they keep, made beforehand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core.axes import Named
from pallas_kernels.core.lists import BlockList
from pallas_kernels.core.masks.arrays import ArrayMask
from pallas_kernels.core.masks.base import (
    Atom,
    Limits,
    Traits,
    mask_dataclass,
    named_map,
)
from pallas_kernels.core.masks.relation import Relation, Tiling
from pallas_kernels.core.positions import ALL_ROWS, Numbering, Positions


@mask_dataclass(data=("mask", "keys", "queries"))
class Listed(ArrayMask):
    """What a mask keeps, and which blocks that is, of all rows of all devices.

    Attributes:
      mask: an atom.
      keys, queries: the `BlockList`s of blocks of queries, which visit blocks of keys,
        and of blocks of keys, which visit blocks of queries.
    """

    mask: Atom
    keys: BlockList
    queries: BlockList

    lists_blocks = True

    @classmethod
    def of(cls, mask: Atom, relation: Relation, tiling: Tiling) -> Listed:
        """Makes the lists, from what the mask says of all pairs of these blocks."""
        code = relation.code(tiling)
        turned = code.ordered((*code.axes[:-2], "j", "i"))
        q, kv = tiling.block_q, tiling.block_kv
        keys = BlockList.of(code, own=q, visited=kv, size=tiling.kv_size)
        queries = BlockList.of(turned, own=kv, visited=q, size=tiling.q_size)
        return cls(mask, keys, queries)

    @property
    def size(self) -> dict[str, int]:
        """How many rows the lists are of."""
        return {"t": self.queries.size, "s": self.keys.size}

    @property
    def traits(self) -> Traits:
        # Blocks are those of rows with these numbers.
        return dataclasses.replace(
            self.mask.traits,
            is_positional=True,
            is_absolute=True,
            cost_is_monotone=False,
        )

    @property
    def limits(self) -> Limits:
        return self.mask.limits

    @property
    def operations(self) -> frozenset[str]:
        return self.mask.operations

    @property
    def words(self) -> str:
        q, kv = self.keys.own, self.keys.visited
        return f"block_mask: lists of blocks of {q} queries and {kv} keys"

    def keep(self, q, kv, q_pos, kv_pos):
        return self.mask.keep(q, kv, q_pos, kv_pos)

    def mean_keys(self, kv_size: int) -> float:
        return self.mask.mean_keys(kv_size)

    def attended_keys(self, positions: Positions, kv_size: int) -> Named | None:
        return self.mask.attended_keys(positions, kv_size)

    def with_pairs(self, convert: Callable[[Named], Atom]) -> Atom:
        return dataclasses.replace(self, mask=self.mask.with_pairs(convert))

    def without_lists(self) -> Atom:
        return self.mask

    def of_rows(self, positions: Positions, size: Mapping[str, int]) -> Atom:
        return dataclasses.replace(self, mask=self.mask.of_rows(positions, size))

    def block_list(self, looped: str, tiling: Tiling) -> BlockList | None:
        rows = {"t": tiling.q_size, "s": tiling.kv_size}
        has_all = tiling.positions[1:] == (ALL_ROWS, ALL_ROWS) and rows == self.size
        blocks = tiling.block_q, tiling.block_kv
        found = self.keys if looped == "s" else self.queries
        fits = found.fits(*(blocks if looped == "s" else blocks[::-1]))
        return found if has_all and fits and tiling.repeat == 1 else None

    def block_relation(self, tiling: Tiling) -> Relation:
        """Of blocks of any rows, from those of the lists that each of them meets."""
        code = self.keys.codes().squeezed()
        count = code.shape[-2:]
        _, query, key = tiling.positions
        own = _met(query, self.keys.own, tiling.q_size, tiling.block_q, tiling.repeat)
        other = _met(key, self.keys.visited, tiling.kv_size, tiling.block_kv)
        numbers = [
            Named(jnp.clip(x.value, 0, n - 1), x.axes)
            for x, n in zip((own, other), count, strict=True)
        ]
        lead = tuple(dict.fromkeys(a for x in (code, *numbers) for a in x.axes[:-2]))
        own, other = (
            x.to((*lead, *order))
            for x, order in zip(
                numbers,
                (("i", None, "m", None), (None, "i", None, "m")),
                strict=True,
            )
        )
        # One flat read of [.., i, j, places of queries, places of keys].
        place = own * count[1] + other
        flat = code.to((*lead, *code.axes[-2:]))
        flat = flat.reshape(*flat.shape[:-2], -1)
        shape = jnp.broadcast_shapes(flat.shape[:-1], place.shape[:-4])
        flat = jnp.broadcast_to(flat, (*shape, flat.shape[-1]))
        place = jnp.broadcast_to(place, (*shape, *place.shape[-4:]))
        met = jnp.take_along_axis(flat, place.reshape(*shape, -1), axis=-1)
        met = met.reshape(place.shape)
        axes = (*lead, "i", "j")
        # Heads of a group as rows (`division.Packing`): of all of them alike.
        rows = [place.ndim - 4 - len(lead) + i for i, a in enumerate(lead) if a == "t"]
        over = (*rows, -2, -1)
        some, every = jnp.max(met, over) > 0, jnp.min(met, over) == 2
        axes = tuple(a for a in axes if a != "t")
        return Relation(*(Named(x, axes) for x in (some, every)))


def _met(
    numbering: Numbering, listed: int, size: int, block: int, repeat: int = 1
) -> Named:
    """Which blocks of a list the rows of each block are in: int32 [.., i, m].

    Rows of a block stand in runs. What is asked for is where some of them are, so few
    apart that none of the list's blocks lies between two.
    """
    step = math.gcd(listed, block)
    if numbering.stripe is not None:
        step = math.gcd(step, numbering.stripe)
    places = [*range(0, block, 1 if repeat > 1 else step)]
    if numbering.first is not None and numbering.stripe is None:
        places.append(block - 1)  # a run may begin anywhere
    start = np.arange(-(-size // block), dtype=np.int32) * np.int32(block)
    rows = np.minimum(start[:, None] + np.array(places, np.int32), size - 1) // repeat
    axes = () if numbering.first is None else numbering.first.squeezed().axes
    loaded: Any = named_map(lambda x: x.to((*axes, "i", "m")), numbering)
    numbers = loaded.at(jnp.asarray(rows))
    numbers = lax.div(numbers, jnp.int32(listed))
    return Named(numbers, (*axes, "i", "m"))
