"""Packed documents: ids of query and key rows."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks.arrays import ArrayMask
from pallas_kernels.core.masks.base import mask_dataclass
from pallas_kernels.core.masks.relation import Relation, Tiling, blocked, reduced
from pallas_kernels.core.masks.traits import ALL, Traits
from pallas_kernels.core.positions import Positions


@mask_dataclass(data=("query", "key_value"), meta=("are_shared",))
class SegmentIds(ArrayMask):
    """Keeps pairs of equal ids: int32, query [.., T] and key_value [.., S], any order.

    Blocks are compared by the smallest and largest id in each: sorted ids skip every
    block without a common segment, unsorted ones only where the intervals are disjoint.
    `are_shared` says that both are the same array.
    """

    query: Any
    key_value: Any
    are_shared: bool = False
    # Those of a `mask_mod` that compares ids, too.
    arguments: ClassVar = {
        "query": "query_segment_ids (or what mask_mod captures)",
        "key_value": "key_value_segment_ids (or what mask_mod captures)",
    }

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            ALL,
            cost_is_monotone=False,
            is_sparse=True,  # documents are mostly short beside a row of them
            keeps_own_key=self.are_shared,
            keeps_first_key=False,
        )

    def attended_keys(self, positions: Positions, kv_size: int) -> None:
        del positions, kv_size  # documents without queries are not looked for

    def keep(self, q, kv, q_pos, kv_pos):
        del q, kv, q_pos, kv_pos
        return self.query == self.key_value

    def block_relation(self, tiling: Tiling) -> Relation:
        blocks = tiling.blocks
        q, kv = (blocked(x.squeezed(), blocks) for x in (self.query, self.key_value))
        axes = [a for a in (*q.axes, *kv.axes) if a not in ("i", "j", "t", "s")]
        axes = (*dict.fromkeys(axes), "i", "j")
        q_min, q_max, kv_min, kv_max = (
            reduced(x, function, ("t", "s")).to(axes)
            for x in (q, kv)
            for function in (jnp.min, jnp.max)
        )
        some = (q_min <= kv_max) & (kv_min <= q_max)
        every = (q_min == q_max) & (kv_min == kv_max) & (q_min == kv_min)
        return Relation(Named(some, axes), Named(every, axes))
