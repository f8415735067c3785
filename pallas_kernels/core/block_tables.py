"""Which blocks of keys and of queries meet, where ranges without arrays do not say it.

Of masks without arrays all of it is known while a call is traced. It is computed then,
once for all equal calls, and kernels get constants: nothing runs before them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Sequence

import jax

from pallas_kernels.core import known
from pallas_kernels.core.lists import BlockList
from pallas_kernels.core.masks import Atom, Relation, Tiling
from pallas_kernels.core.masks.relation import block_table
from pallas_kernels.core.ranges import Range

# Bytes of the lists of one kernel, above which calls have ranges in place of lists.
MOST_BYTES = 2**26
# Pairs of blocks of which a program may have constants: 0.5 MB for each of a few.
_MOST_KNOWN = 2**17


def table_of(
    masks: Sequence[Atom],
    looped: str,
    tiling: Tiling,
    over: tuple[str, ...] = (),
    *,
    lists: bool = True,
    in_order: bool = False,
) -> Range | BlockList:
    """What says which blocks each block visits (`AttentionSpec.with_table`).

    Args:
      masks: the atoms of a spec, of which not all have ranges.
    """
    arguments = tuple(masks), looped, tiling, over, lists, in_order
    found = _known(*arguments) if are_static(masks, tiling) else None
    return _made(*arguments) if found is None else found


def relation_of(masks: Sequence[Atom], tiling: Tiling) -> Relation:
    """What all masks say of each pair of blocks (fields hold `Named`)."""
    found = (atom.block_relation(tiling) for atom in masks)
    return functools.reduce(operator.and_, found)


def are_static(masks: Sequence[Atom], tiling: Tiling) -> bool:
    """Whether masks have no arrays and few enough blocks for constants."""
    offset, *numberings = tiling.positions
    is_static = not jax.tree.leaves((masks, numberings)) and isinstance(offset, int)
    return is_static and math.prod(tiling.counts) <= _MOST_KNOWN


@functools.lru_cache(maxsize=32)
def _known(*arguments) -> Range | BlockList | None:
    with contextlib.suppress(known.Unknown):
        return known.evaluated(lambda: _made(*arguments))


def _made(masks, looped, tiling, over, lists, in_order) -> Range | BlockList:
    found = _list_of(masks, looped, tiling, over) if lists else None
    if found is not None:
        return found.read(in_order=in_order)
    others = [atom for atom in masks if not atom.has_ranges]
    relations = [atom.block_relation(tiling).over(over) for atom in others]
    return block_table(relations, looped, tiling.counts["ts".index(looped)])


def _list_of(masks, looped, tiling, over) -> BlockList | None:
    """The list of the blocks that all masks allow, or None where ranges will do."""
    if len(masks) == 1:
        found = masks[0].block_list(looped, tiling)
        if found is not None and not set(over) & set(found.code.axes):
            return found
    if not any(atom.lists_blocks for atom in masks):
        return None
    code = relation_of(masks, tiling).over(over).code(tiling)
    if 4 * math.prod(code.shape) > MOST_BYTES:
        return None
    own, visited, size = tiling.block_q, tiling.block_kv, tiling.kv_size
    if looped == "t":
        code = code.ordered((*code.axes[:-2], "j", "i"))
        own, visited, size = visited, own, tiling.q_size
    return BlockList.of(code, own=own, visited=visited, size=size)
