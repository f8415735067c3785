"""Blocks of the kernel of tangents, from those of `dq`, which has the same loop.

Compiled; few were timed (benchmarks/lab/106-tangents-as-a-kernel.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pallas_kernels.configs import Blocks


def of(
    tuned: Sequence[Blocks],
    smaller: Sequence[Blocks],
    *,
    crowded: bool,
    most_rows: int | None = None,
) -> list[Blocks]:
    """From those that should be fastest on; the last needs least.

    For each key twice as much is loaded as in `dq`: half the keys take as much memory.
    With one stage, what is loaded passes through registers, which have no room for it.

    Args:
      tuned, smaller: of `dq`.
      crowded: whether registers have no room for the left tiles of all rows: of half of
        them then.
      most_rows: of queries, if registers hold no more.
    """
    wide = list(map(_with_half_the_keys, tuned))
    narrow = [_halved(blocks, "block_q") for blocks in wide]
    first = narrow if crowded else wide + narrow
    found = [*first, *map(_with_half_the_keys, smaller), smaller[-1]]
    most = most_rows or max(x.block_q for x in found)
    return [dataclasses.replace(x, block_q=min(x.block_q, most)) for x in found]


def _with_half_the_keys(blocks: Blocks) -> Blocks:
    stages = max(2, blocks.num_stages)
    return dataclasses.replace(_halved(blocks, "block_kv"), num_stages=stages)


def _halved(blocks: Blocks, field: str) -> Blocks:
    half = max(16, getattr(blocks, field) // 2)
    return dataclasses.replace(blocks, **{field: half})
