"""AttentionSpec: everything about a call that is not query, key or value.

One frozen tree in three lives: of `Named` arrays where operands are laid out, of
`View`s (named Refs) at the start of a kernel, of loaded blocks in its loop. Backends
walk it leaf by leaf and never name a feature.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Named
from pallas_kernels.core.block_tables import relation_of, table_of
from pallas_kernels.core.dropout import Dropout
from pallas_kernels.core.lists import BlockList, Visited
from pallas_kernels.core.masks import Atom, Lengths, Relation, Tiling, Traits
from pallas_kernels.core.masks.base import joined, without_rows
from pallas_kernels.core.masks.traits import ALL
from pallas_kernels.core.pages import Pages
from pallas_kernels.core.positions import ALL_ROWS, Numbering, Positions
from pallas_kernels.core.ranges import (
    Range,
    divide,
    everything,
    maximum,
    minimum,
    where,
)
from pallas_kernels.core.scores import Score


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Score, mask atoms and positions of an attention call.

    Attributes:
      score: how q.k becomes a score.
      masks: the mask atoms; a pair is kept when all keep it.
      offset: position of query number 0, an int32 scalar, or None for 0; key number 0
        stands at 0.
      sink: a logit for each head that joins the softmax, or None.
      dropout: of the probabilities, or None.
      repeat: how many query rows stand at one position, one after the other: heads of
        a group, as rows (`division.Packing`), of the forward only. Static.
      table: for each query block, the `Range` of key blocks that the data-dependent
        atoms allow, or the same for key blocks; or the `BlockList` of those that all
        atoms together allow (`with_table`); None without such atoms.
      keys: which keys some query keeps, for kernels (`with_keys`); None for all.
      query_rows, key_rows: the numbers of the rows, where devices have a part of them.
      is_part: whether there are more keys than those at hand. Results are then parts of
        others, in float32 or wider, and the backward gets output and log-sum-exp over
        all keys. Static.
      gives_largest: whether the forward also gives the largest score of each row, which
        has no gradient. Static.
      rows_have_keys: whether it is known without data that each query row within its
        length looks at some key (`with_known_rows`). Static.
      value_scale: multiplies each value, where values are quantised, or None.
      pages: where rows of keys and values lie, if these are in pages; or None.
    """

    score: Score
    masks: tuple[Atom, ...] = ()
    offset: Any = None
    sink: Any = None
    dropout: Dropout | None = None
    table: Range | BlockList | None = None
    repeat: int = dataclasses.field(default=1, metadata={"static": True})
    keys: Any = None
    query_rows: Numbering = ALL_ROWS
    key_rows: Numbering = ALL_ROWS
    is_part: bool = dataclasses.field(default=False, metadata={"static": True})
    gives_largest: bool = dataclasses.field(default=False, metadata={"static": True})
    rows_have_keys: bool = dataclasses.field(default=False, metadata={"static": True})
    value_scale: Any = None
    pages: Pages | None = None
    arguments: ClassVar = {"offset": "query_offset", "sink": "sinks"}

    @property
    def positions(self) -> Positions:
        """Where rows stand."""
        offset = 0 if self.offset is None else self.offset
        return Positions(offset, self.query_rows, self.key_rows)

    def of_rows(
        self, query: Numbering, key: Numbering, size: Mapping[str, int]
    ) -> AttentionSpec:
        """For a part of the rows, from that of all (fields hold `Named`).

        Args:
          query, key: the numbers of the rows.
          size: how many of `t` and `s` there are.
        """
        positions = Positions(self.offset, query, key)
        masks = tuple(atom.of_rows(positions, size) for atom in self.masks)
        spec = dataclasses.replace(self, masks=masks)
        if self.dropout is None and not self.is_positional:
            return spec
        absolute = self.score.is_absolute or self.traits.is_absolute
        is_numbered = self.dropout is not None or absolute
        if not is_numbered and query.stripe is key.stripe is None:
            # Only distances count.
            offset = _difference(self.offset, query.first, key.first)
            return dataclasses.replace(spec, offset=offset)
        return dataclasses.replace(spec, query_rows=query, key_rows=key)

    def of_block(self, rows: Mapping[str, tuple[Any, int]]) -> AttentionSpec:
        """For a block of pairs alone (array fields are loaded).

        Args:
          rows: (start, size) of `t` and `s`, each start a multiple of its size.
        """
        query, key = self.query_rows, self.key_rows
        if self.repeat == 1:
            query = query.of_block(*rows["t"])
        return dataclasses.replace(
            self, query_rows=query, key_rows=key.of_block(*rows["s"])
        )

    def odd_stripe(self, *, t: int, s: int) -> int | None:
        """The stripe of `t` or `s` that is no multiple of blocks of so many rows."""
        sides = (self.query_rows, t), (self.key_rows, s)
        odd = (x.stripe for x, block in sides if x.stripe and x.stripe % block)
        return next(odd, None)

    @property
    def gradient_unit(self):
        """Gradient of q.k over what `Recomputed.dz` gives."""
        return self.score.gradient_unit * self.dropout_scale

    @property
    def dropout_scale(self) -> float:
        """What the probabilities that dropout kept are multiplied by."""
        return 1.0 if self.dropout is None else self.dropout.scale

    @property
    def traits(self) -> Traits:
        """What is known of the masks, together, without data."""
        return functools.reduce(operator.and_, (a.traits for a in self.masks), ALL)

    @property
    def is_positional(self) -> bool:
        """Whether anything depends on where rows stand."""
        return self.score.is_positional or self.traits.is_positional

    @property
    def is_causal(self) -> bool:
        """Whether no query attends a key that stands after it."""
        return self.traits.is_causal

    @property
    def operations(self) -> frozenset[str]:
        """What a kernel must have for masks and score (`Term.operations`)."""
        parts = (*self.score.terms, *self.masks)
        return frozenset().union(*(x.operations for x in parts))

    def wants_steps(self, dtype) -> bool:
        """Whether a maximum is taken of each block, with products in this dtype.

        Probabilities above 1 have no room in float16 beside scales of values.
        """
        scaled = self.value_scale is not None and dtype == jnp.float16
        return self.maximum_may_grow or scaled

    @property
    def maximum_may_grow(self) -> bool:
        """Whether scores of a row's first blocks may lie far below those of others."""
        terms = self.score.terms
        return any(x.traits.maximum_may_grow for x in terms) and not self.is_causal

    @property
    def rows_follow(self) -> bool:
        """Whether rows of a block have numbers that follow one another."""
        return self.repeat == 1 and not (self.query_rows.stripe or self.key_rows.stripe)

    @property
    def has_all_rows(self) -> bool:
        """Whether all rows are here: they have no first number, stripes or offset."""
        rows = self.query_rows, self.key_rows
        begins = all(x.first is None and x.stripe is None for x in rows)
        return begins and self.offset is None

    @property
    def cost_is_monotone(self) -> bool:
        """Whether query rows are known to attend equally many keys, or later ones more.

        Of all batch entries alike (fields hold `Named`).
        """
        starts = () if self.offset is None else self.offset.squeezed().axes
        return self.traits.cost_is_monotone and not starts

    def mean_keys(self, kv_size: int) -> int:
        """About how many keys a query attends, as far as is known without data.

        That is with as many queries as keys, from the same position on.
        """
        means = (atom.mean_keys(kv_size) for atom in self.masks)
        return round(max(0, min(means, default=kv_size)))

    def with_known_rows(self, q_size: int, kv_size: int) -> AttentionSpec:
        """The spec of all rows, which says whether each has a key."""
        traits = self.traits
        known = traits.keeps_own_key
        known = known and (q_size <= kv_size or traits.keeps_first_key)
        known = known and self.offset is None and not self.score.may_mask
        return dataclasses.replace(self, rows_have_keys=known)

    def only_positions(self) -> AttentionSpec:
        """For a block of which every pair is kept: without the masks' data."""
        masks = tuple(atom for atom in self.masks if not jax.tree.leaves(atom))
        return dataclasses.replace(self, masks=masks)

    def query_numbers(self, rows: Any) -> Any:
        """Which rows of the caller these are: themselves, but for `repeat`."""
        return rows if self.repeat == 1 else divide(rows, self.repeat)

    def positions_of(self, q, kv) -> tuple[jax.Array, jax.Array]:
        """The positions of the rows with these numbers."""
        offset, query, key = self.positions
        return query.at(self.query_numbers(q)) + offset, key.at(kv)

    def keep(self, q, kv) -> list[jax.Array]:
        """What says which pairs are kept: those of which all of it says so.

        That is one boolean array, or none where all are; and after it what a backend
        has in place of one (`Arithmetic.masked`).

        Args:
          q, kv: int32 row numbers that broadcast against each other; array fields of
            the spec must hold the matching blocks.
        """
        q_pos, kv_pos = self.positions_of(q, kv)
        q = self.query_numbers(q)
        found = [atom.keep(q, kv, q_pos, kv_pos) for atom in self.masks]
        kept = [x for x in found if x is not None]
        boolean = [x for x in kept if x.dtype == jnp.bool_]
        first = [functools.reduce(operator.and_, boolean)] if boolean else []
        return [*first, *(x for x in kept if x.dtype != jnp.bool_)]

    def kv_limit(self, size: int):
        """Key rows at or beyond this are padding: their values must not be touched."""
        return functools.reduce(minimum, self.limits("key"), size)

    def q_limit(self, size: int):
        limits, repeat = self.limits("query"), self.repeat
        limits = limits if repeat == 1 else [n * repeat for n in limits]
        return functools.reduce(minimum, limits, size)

    def limits(self, side: str) -> list:
        """Those of the rows of "query" or "key" (`masks.base.Limits`)."""
        return [n for atom in self.masks for n in getattr(atom.limits, side)]

    def with_end(self, kv_size: int) -> AttentionSpec:
        """Also masks key rows beyond the array, for a last block that overhangs it."""
        end = Lengths(key_value=kv_size)
        return dataclasses.replace(self, masks=(*self.masks, end))

    def for_ranges(self) -> AttentionSpec:
        """What block ranges depend on, and nothing else (fields hold `Named`)."""
        return AttentionSpec(
            Score(1.0),
            tuple(without_rows(atom) for atom in self.masks if atom.has_ranges),
            self.offset,
            table=self.table,
            repeat=self.repeat,
            query_rows=self.query_rows,
            key_rows=self.key_rows,
        )

    def kv_blocks(self, q_lo, q_hi, kv_size: int, block_kv: int) -> Visited:
        """The range of key blocks that the query rows [q_lo, q_hi) look at."""
        if self.repeat > 1 and not isinstance(self.table, BlockList):
            q_lo, q_hi = self.query_numbers(q_lo), self.query_numbers(q_hi - 1) + 1
        return self._blocks("kv_range", q_lo, q_hi, kv_size, block_kv)

    def q_blocks(self, kv_lo, kv_hi, q_size: int, block_q: int) -> Visited:
        """The range of query blocks that look at the key rows [kv_lo, kv_hi)."""
        return self._blocks("q_range", kv_lo, kv_hi, q_size, block_q)

    def keys_needed(self, q_lo, q_hi, kv_size: int) -> Range:
        """The keys that the query rows [q_lo, q_hi) look at, as far as ranges say."""
        if self.repeat > 1:
            q_lo, q_hi = self.query_numbers(q_lo), self.query_numbers(q_hi - 1) + 1
        return self._rows("kv_range", q_lo, q_hi, kv_size)

    def _rows(self, method, lo, hi, size: int) -> Range:
        rows = everything(0, size)
        for atom in self.masks:
            if atom.has_ranges:
                rows = rows & getattr(atom, method)(lo, hi, self.positions, size)
        return rows

    def _blocks(self, method, lo, hi, size: int, block: int) -> Visited:
        if isinstance(self.table, BlockList):
            return self.table.walk(lo, block)
        blocks = self._rows(method, lo, hi, size).blocks(block, size)
        return blocks if self.table is None else blocks & self.table

    @property
    def _without_limits(self) -> list[Atom]:
        """The atoms whose ranges are not those of their limits."""
        return [atom for atom in self.masks if not any(atom.limits)]

    @property
    def meets_exactly(self) -> bool:
        """Whether a block of queries meets a block of keys if and only if it is met.

        Ranges to visit do not promise that, and those of two atoms may meet where no
        pair is kept. Where it does not hold, `core.visits` counts what meets.
        """
        exact = all(atom.ranges_are_exact for atom in self.masks)
        return exact and len(self._without_limits) <= 1

    def query_blocks_met(self, kv_lo, kv_hi, q_size: int, block_q: int):
        """First and end of the query blocks that the key rows [kv_lo, kv_hi) meet.

        For specs of `meets_exactly`, and for kernels whose programs wait for those that
        meet the same queries before them.
        """
        first, end = self._met("q_range", kv_lo, kv_hi, q_size, block_q)
        last = divide(self.q_limit(q_size) + block_q - 1, block_q)
        return first, first + where(
            kv_lo < self.kv_limit(2**30), maximum(minimum(end, last) - first, 0)
        )

    def key_blocks_met(self, q_lo, q_hi, kv_size: int, block_kv: int):
        """First and end of the key blocks that the query rows [q_lo, q_hi) meet.

        Only blocks of queries that begin below their length may be asked for.
        """
        first, end = self._met("kv_range", q_lo, q_hi, kv_size, block_kv)
        last = divide(self.kv_limit(kv_size) + block_kv - 1, block_kv)
        return first, maximum(minimum(end, last), first)

    def _met(self, method, lo, hi, size: int, block: int):
        rows = everything(0, size)
        for atom in self._without_limits:
            rows = rows & getattr(atom, method)(lo, hi, self.positions, size)
        start, end = maximum(rows.need_lo, 0), maximum(minimum(rows.need_hi, size), 0)
        first = divide(start, block)
        blocks = divide(end + block - 1, block) - first
        return first, first + where(start < end, blocks)

    def with_table(
        self,
        looped: str,
        block_q: int,
        block_kv: int,
        q_size: int,
        kv_size: int,
        over: tuple[str, ...] = (),
        lists: bool = True,
        in_order: bool = False,
    ) -> AttentionSpec:
        """Adds the block table of the data-dependent atoms (fields hold `Named`).

        Args:
          looped: the rows that are looped over: of keys (`s`), and the table is for
            `kv_blocks`, or of queries (`t`), and it is for `q_blocks`.
          block_q, block_kv, q_size, kv_size: rows of a block, and all.
          over: axes whose elements get one table, of what any of them looks at.
          lists, in_order: whether it may be a `BlockList`, and as of its `read`.
        """
        if all(atom.has_ranges for atom in self.masks):
            return self
        tiling = Tiling(block_q, block_kv, q_size, kv_size, self.positions, self.repeat)
        options = {"lists": lists, "in_order": in_order}
        found = table_of(self.masks, looped, tiling, over, **options)
        return dataclasses.replace(self.for_pairs(tiling), table=found)

    def relation(self, tiling: Tiling) -> Relation:
        """What all masks say of each pair of blocks (fields hold `Named`)."""
        return relation_of(self.masks, tiling)

    @property
    def lists_blocks(self) -> bool:
        """Whether blocks to skip may lie between those that a query block needs."""
        return any(atom.lists_blocks for atom in self.masks)

    def without_lists(self) -> AttentionSpec:
        """Without the lists of blocks that masks hold: what kernels evaluate."""
        masks = tuple(atom.without_lists() for atom in self.masks)
        return dataclasses.replace(self, masks=masks)

    def for_pairs(self, tiling: Tiling) -> AttentionSpec:
        """What kernels evaluate: for a pair no more than both of its sides decide."""
        masks = tuple(x.without_lists().by_sides(tiling) for x in self.masks)
        return dataclasses.replace(self, masks=masks)

    def attended_keys(self, kv_size: int) -> Named | None:
        """Which keys some query may attend; None for all (`Named` fields).

        The others may hold NaN and meet no product; see `limits` for padding.
        """
        found = (atom.attended_keys(self.positions, kv_size) for atom in self.masks)
        return joined(operator.and_, [x for x in found if x is not None])

    @property
    def has_mask_of_pairs(self) -> bool:
        """Whether a mask may drop some pairs of every block (`Named` fields)."""
        return any({"t", "s"} <= set(x.axes) for x in jax.tree.leaves(self.masks))

    @property
    def drops_pairs(self) -> bool:
        """Whether an array may drop a key for one query and keep it for another."""
        arrays = jax.tree.leaves(self.masks)
        return any("t" in x.axes and x.dtype == jnp.bool_ for x in arrays)

    @property
    def drops_keys(self) -> bool:
        """Whether kernels know of keys that no query attends (`with_keys`)."""
        return self.keys is not None or bool(self.limits("key"))

    def with_keys(self, kv_size: int) -> AttentionSpec:
        """Adds the keys that some query attends (fields hold `Named`), for kernels.

        Where all keys are alike, no block of those that are dropped is visited.
        """
        keys = self.attended_keys(kv_size)
        if keys is None or "s" not in keys.axes:
            return self
        return dataclasses.replace(self, keys=keys)


def _difference(offset: Named | None, query: Named | None, key: Named | None):
    """offset + query - key, where None is 0."""
    parts = [x.squeezed() for x in (offset, query, key) if x is not None]
    if not parts:
        return None
    axes = tuple(dict.fromkeys(a for x in parts for a in x.axes))

    def value(x: Named | None):
        return jnp.int32(0) if x is None else x.to(axes)

    return Named(value(offset) + value(query) - value(key), axes)


def sink_gradient(sink: Named, lse: Named, delta: Named) -> Named:
    """What each row adds to the gradient of its sink (`flash2.sink_gradient`)."""
    operands = [x.squeezed() for x in (sink, lse, delta)]
    axes = tuple(dict.fromkeys(a for x in operands[::-1] for a in x.axes))
    return Named(flash2.sink_gradient(*(x.to(axes) for x in operands)), axes)
