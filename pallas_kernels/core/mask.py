"""Mask atoms: which (query, key) pairs are kept, and which blocks that implies.

An atom answers two questions, and a mask is the AND of its atoms. What else a caller
must know of it, it says itself (`Traits`).

- `keep(q, kv, q_pos, kv_pos)` is pointwise: row numbers `q` and `kv` that broadcast
  against each other (and where they stand, `core.positions`) give a boolean array. The
  same line serves a dense mask (q [T, 1], kv [1, S]), a block of it, and a transposed
  block.
- Block ranges. For the rows [q_lo, q_hi) of a query block, `kv_range` gives
  `need_lo <= full_lo <= full_hi <= need_hi`: outside `need` no pair is kept, inside
  `full` every pair is. `q_range` is its twin for a block of keys. An atom whose answer
  depends on data (`SegmentIds`, `DenseMask`) gives `block_relation` instead: two small
  arrays [query blocks, key blocks] that say "some pair may be kept" and "all are".

Loops evaluate `keep` only on the two sides of `full`:

    need_lo      full_lo                 full_hi     need_hi
       |  masked    |   no mask evaluated   |  masked   |

Fields hold scalars, blocks or whole arrays (`spec.AttentionSpec`), for the same code.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core.axes import Named
from pallas_kernels.core.positions import Numbering, Positions
from pallas_kernels.core.ranges import Range, everything, maximum, minimum


def _when(condition, rows: Range) -> Range:
    """`rows` with nothing full where `condition` does not hold.

    Arithmetic instead of `where`: scalar selects of constants do not lower in Pallas.
    """
    if isinstance(condition, bool):
        return rows if condition else rows._replace(full_hi=rows.full_lo)
    on = condition.astype(jnp.int32)
    full_hi = rows.full_lo + on * (rows.full_hi - rows.full_lo)
    return rows._replace(full_hi=full_hi)


@typing.dataclass_transform(frozen_default=True)
def _dataclass(data: tuple[str, ...] = (), meta: tuple[str, ...] = ()):
    """A frozen dataclass that is a pytree of its `data` fields."""

    def register(cls: type) -> type:
        cls = dataclasses.dataclass(frozen=True)(cls)
        return jax.tree_util.register_dataclass(cls, list(data), list(meta))

    return register


class Traits:
    """What a call must know of an atom beside its pairs and ranges.

    Attributes:
      positional: whether it asks where rows stand (`q_pos`, `kv_pos`).
      later_rows_see_more: whether later query rows look at more keys, so that they
        should start first.
      is_sparse: whether most queries look at few of the keys, as far as one can know
        without data.
      keeps_own_key: whether it is known that each query looks at the key of its own
        number, where queries and keys have the same positions.
      keeps_first_key: whether it is known that each query looks at the first key, or
        that none looks at any, where queries stand at or after it. Padding of queries
        does not count.
    """

    positional = False
    later_rows_see_more = False
    is_sparse = False
    keeps_own_key = False
    keeps_first_key = False

    def of_rows(self, positions: Positions, size: Mapping[str, int]) -> Any:
        """For a part of the rows: the same, where they bring their own operands.

        Args:
          positions: of those rows; `Named`.
          size: how many of `t` and `s` there are.
        """
        del positions, size
        return self


@_dataclass(meta=("left", "right"))
class Window(Traits):
    """Keeps keys from `left` positions before the query to `right` after it, inclusive.

    `None` is unbounded on that side; `Window(None, 0)` is causal. Window(1, 0):

        1 . . .
        1 1 . .
        . 1 1 .
        . . 1 1
    """

    left: int | None
    right: int | None
    positional = True
    keeps_own_key = True

    @property
    def later_rows_see_more(self) -> bool:
        return self.right is not None

    @property
    def keeps_first_key(self) -> bool:
        return self.left is None

    def keep(self, q, kv, q_pos, kv_pos):
        del q, kv
        kept = None
        if self.left is not None:
            kept = kv_pos >= q_pos - self.left
        if self.right is not None:
            below = kv_pos <= q_pos + self.right
            kept = below if kept is None else kept & below
        return kept

    def kv_range(self, q_lo, q_hi, positions: Positions, size: int) -> Range:
        offset, query, key = positions
        ends = query.at(q_lo) + offset, query.at(q_hi - 1) + offset
        return self._range(ends, key, self.left, self.right, size)

    def q_range(self, kv_lo, kv_hi, positions: Positions, size: int) -> Range:
        offset, query, key = positions
        ends = key.at(kv_lo) - offset, key.at(kv_hi - 1) - offset
        return self._range(ends, query, self.right, self.left, size)

    @staticmethod
    def _range(ends, along: Numbering, before, after, size: int) -> Range:
        """Rows that are `before` to `after` numbers from a block with these ends."""
        need_lo, full_lo, full_hi, need_hi = everything(0, size)
        first, last = ends
        if before is not None:
            need_lo, full_lo = (along.before(x - before) for x in (first, last))
        if after is not None:
            full_hi, need_hi = (along.before(x + after + 1) for x in (first, last))
        return Range(need_lo, full_lo, full_hi, need_hi)


@_dataclass(data=("query", "key_value"))
class Lengths(Traits):
    """Keeps pairs whose query row < `query` and key row < `key_value` (None: all).

    Both are int32 scalars (one for each batch entry) in [0, size].
    """

    query: Any = None
    key_value: Any = None
    keeps_first_key = True

    @property
    def keeps_own_key(self) -> bool:
        return self.key_value is None

    def keep(self, q, kv, q_pos, kv_pos):
        del q_pos, kv_pos
        kept = None
        if self.key_value is not None:
            kept = kv < self.key_value
        if self.query is not None:
            below = q < self.query
            kept = below if kept is None else kept & below
        return kept

    def kv_range(self, q_lo, q_hi, positions: Positions, size: int) -> Range:
        del positions
        return self._range(self.key_value, self.query, q_lo, q_hi, size)

    def q_range(self, kv_lo, kv_hi, positions: Positions, size: int) -> Range:
        del positions
        return self._range(self.query, self.key_value, kv_lo, kv_hi, size)

    def of_rows(self, positions: Positions, size: Mapping[str, int]) -> Lengths:
        """Of all rows as of a part: how many of it come before (`Named` fields)."""

        def own(length: Named | None, rows: Numbering, size: int):
            if length is None or rows.first is None:
                return length
            axes = tuple(dict.fromkeys((*length.axes, *rows.first.axes)))
            rows = dataclasses.replace(rows, first=rows.first.to(axes))
            return Named(jnp.clip(rows.before(length.to(axes)), 0, size), axes)

        return Lengths(
            own(self.query, positions.query, size["t"]),
            own(self.key_value, positions.key, size["s"]),
        )

    @staticmethod
    def _range(along, across, lo, hi, size: int) -> Range:
        """Range along one axis of the block [lo, hi) of the other."""
        end = size if along is None else along
        if across is None:
            return everything(0, end)
        full = _when(hi <= across, everything(0, end))
        # A block that starts beyond the length needs nothing.
        need_hi = minimum(full.need_hi, minimum(maximum(across - lo, 0), 1) * size)
        return full & everything(0, need_hi)._replace(full_hi=size)


class Relation(NamedTuple):
    """For each pair of blocks: may some pair be kept, are all pairs kept.

    `Named` boolean arrays whose last axes are `i` (query blocks) and `j` (key blocks).
    """

    some: Named
    all: Named

    def over(self, names: tuple[str, ...]) -> Relation:
        """Of the pairs of all elements of these axes together."""
        some = _reduced(self.some, jnp.any, names)
        return Relation(some, _reduced(self.all, jnp.all, names))


def _blocked(x: Named, row_axes: dict[str, int], fill=None) -> Named:
    """Splits each row axis in (blocks, block), padding the last block.

    Args:
      row_axes: block size of each row axis: `t` becomes (`i`, `t`), `s` (`j`, `s`).
      fill: padding value; None repeats the last row.
    """
    for name, block in row_axes.items():
        if name not in x.axes:
            continue
        axis = x.axes.index(name)
        pad = [(0, 0)] * len(x.axes)
        pad[axis] = (0, -x.shape[axis] % block)
        mode = {"mode": "edge"} if fill is None else {"constant_values": fill}
        x = Named(jnp.pad(x.value, pad, **mode), x.axes)
        x = x.renamed(name, "i" if name == "t" else "j")
        x = x.split("i" if name == "t" else "j", name, block)
    return x


def _reduced(x: Named, function, names: tuple[str, ...]) -> Named:
    """One axis after the other, the inner first: XLA is slower with two at once, and
    would make two reductions one.
    """
    names = tuple(name for name in x.axes if name in names)
    for i, name in enumerate(reversed(names)):
        value = lax.optimization_barrier(x.value) if i else x.value
        value = function(value, axis=x.axes.index(name))
        x = Named(value, tuple(a for a in x.axes if a != name))
    return x


@_dataclass(data=("query", "key_value"), meta=("keeps_own_key",))
class SegmentIds(Traits):
    """Keeps pairs of equal ids: int32, query [.., T] and key_value [.., S], any order.

    Blocks are compared by the smallest and largest id in each: sorted ids skip every
    block without a common segment, unsorted ones only where the intervals are disjoint.
    `keeps_own_key` says that both are the same array.
    """

    query: Any
    key_value: Any
    keeps_own_key: bool = False
    is_sparse = True  # packed documents are mostly short beside a row of them

    def keep(self, q, kv, q_pos, kv_pos):
        del q, kv, q_pos, kv_pos
        return self.query == self.key_value

    def block_relation(self, block_q: int, block_kv: int) -> Relation:
        blocks = {"t": block_q, "s": block_kv}
        q, kv = (_blocked(x.squeezed(), blocks) for x in (self.query, self.key_value))
        axes = [a for a in (*q.axes, *kv.axes) if a not in ("i", "j", "t", "s")]
        axes = (*dict.fromkeys(axes), "i", "j")
        q_min, q_max, kv_min, kv_max = (
            _reduced(x, function, ("t", "s")).to(axes)
            for x in (q, kv)
            for function in (jnp.min, jnp.max)
        )
        some = (q_min <= kv_max) & (kv_min <= q_max)
        every = (q_min == q_max) & (kv_min == kv_max) & (q_min == kv_min)
        return Relation(Named(some, axes), Named(every, axes))


@_dataclass(data=("mask",))
class DenseMask(Traits):
    """Keeps the pairs where a boolean array of any broadcast shape is True."""

    mask: Any

    def keep(self, q, kv, q_pos, kv_pos):
        del q, kv, q_pos, kv_pos
        return self.mask

    def kept_keys(self) -> Named:
        """Which keys some query and head keep; the others must meet no product."""
        return _reduced(self.mask.squeezed(), jnp.any, ("n", "t"))

    def block_relation(self, block_q: int, block_kv: int) -> Relation:
        blocks = {"t": block_q, "s": block_kv}
        mask = self.mask.squeezed()
        axes = tuple(a for a in mask.axes if a not in ("t", "s"))
        some, every = (
            _reduced(_blocked(mask, blocks, fill), function, ("t", "s"))
            for fill, function in ((False, jnp.any), (True, jnp.all))
        )
        axes = (*axes, "i", "j")
        return Relation(Named(some.to(axes), axes), Named(every.to(axes), axes))


Atom = Window | Lengths | SegmentIds | DenseMask
DataDependent = SegmentIds | DenseMask


def block_table(relations: list[Relation], looped: str, size: int) -> Range:
    """The AND of relations as ranges of blocks of queries or of keys.

    Args:
      relations: at least one.
      looped: the rows that are looped over, `t` or `s`; the table has an entry for each
        block of the others.
      size: number of their blocks.

    Returns:
      A `Range` of `Named` int32 arrays with the batch axes of the relations and the
      other block axis. `need` is the hull of the blocks with something to do, `full`
      the first run of blocks in which every pair is kept.
    """
    names = (a for r in relations for a in r.some.axes if a not in ("i", "j"))
    batch = tuple(dict.fromkeys(names))
    other, visited = ("j", "i") if looped == "t" else ("i", "j")
    axes = (*batch, other, visited)
    some = functools.reduce(operator.and_, (r.some.to(axes) for r in relations))
    every = functools.reduce(operator.and_, (r.all.to(axes) for r in relations))
    shape = (*some.shape[:-1], size)
    some, every = jnp.broadcast_to(some, shape), jnp.broadcast_to(every, shape)
    index = jnp.arange(size, dtype=jnp.int32)
    need_lo = jnp.min(jnp.where(some, index, size), axis=-1)
    need_hi = jnp.max(jnp.where(some, index + 1, 0), axis=-1)
    full_lo = jnp.min(jnp.where(every, index, size), axis=-1)
    # Where the first run ends: no bound waits for another, so that one kernel has all.
    before = jnp.pad(every[..., :-1], [(0, 0)] * (every.ndim - 1) + [(1, 0)])
    full_hi = jnp.min(jnp.where(before & ~every, index, size), axis=-1)
    table = Range(need_lo, full_lo, full_hi, need_hi) & everything(0, size)
    # An axis of size 1 is one that every relation broadcasts over.
    kept = (*batch, None if shape[-2] == 1 else other)
    return Range(*(Named(x, kept) for x in table))
