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
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Named
from pallas_kernels.core.dropout import Dropout
from pallas_kernels.core.mask import (
    Atom,
    DataDependent,
    DenseMask,
    Lengths,
    Window,
    block_table,
)
from pallas_kernels.core.positions import ALL_ROWS, Numbering, Positions
from pallas_kernels.core.ranges import (
    Range,
    divide,
    everything,
    maximum,
    minimum,
    where,
)
from pallas_kernels.core.score import Score


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
        atoms allow, or the same for key blocks (`with_table`); None without any.
      keys: which keys some query keeps, for kernels (`with_keys`); None for all.
      query_rows, key_rows: the numbers of the rows, where devices have a part of them.
      is_part: whether there are more keys than those at hand. Results are then parts of
        others, in float32 or wider, and the backward gets output and log-sum-exp over
        all keys. Static.
      rows_have_keys: whether it is known without data that each query row within its
        length looks at some key (`with_known_rows`). Static.
    """

    score: Score
    masks: tuple[Atom, ...] = ()
    offset: Any = None
    sink: Any = None
    dropout: Dropout | None = None
    table: Range | None = None
    repeat: int = dataclasses.field(default=1, metadata={"static": True})
    keys: Any = None
    query_rows: Numbering = ALL_ROWS
    key_rows: Numbering = ALL_ROWS
    is_part: bool = dataclasses.field(default=False, metadata={"static": True})
    rows_have_keys: bool = dataclasses.field(default=False, metadata={"static": True})

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
        if self.dropout is None and not self.positional:
            return spec
        if self.dropout is None and query.stripe is key.stripe is None:
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
    def _windows(self) -> tuple[Window, ...]:
        return tuple(atom for atom in self.masks if isinstance(atom, Window))

    @property
    def positional(self) -> bool:
        """Whether anything depends on where rows stand."""
        return self.score.positional or any(atom.positional for atom in self.masks)

    @property
    def later_rows_see_more(self) -> bool:
        """Whether later query rows look at more keys."""
        return any(atom.later_rows_see_more for atom in self.masks)

    @property
    def is_sparse(self) -> bool:
        """Whether most queries look at few of the keys, for all that is known."""
        return any(atom.is_sparse for atom in self.masks)

    @property
    def keeps_past_only(self) -> bool:
        """Whether no query looks at a key that stands after it."""
        return any(w.right is not None and w.right <= 0 for w in self._windows)

    @property
    def peaks_inside(self) -> bool:
        """Whether scores are highest amid the keys: ALiBi on both sides of a query.

        Then those of the first blocks may lie far below those of others.
        """
        return self.score.slopes is not None and not self.keeps_past_only

    @property
    def is_windowed(self) -> bool:
        """Whether queries look at no more than so many of the keys before them."""
        return any(w.left is not None for w in self._windows)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How far before and after itself a query looks; None: at all keys there."""

        def side(widths) -> int | None:
            return min((max(w, 0) for w in widths if w is not None), default=None)

        windows = self._windows
        return side(w.left for w in windows), side(w.right for w in windows)

    @property
    def ends_by_length(self) -> bool:
        """Whether key lengths, beside windows, are all that masks pairs."""
        others = [atom for atom in self.masks if not isinstance(atom, Window)]
        lengths = [
            x for x in others if isinstance(x, Lengths) and x.key_value is not None
        ]
        return bool(others) and len(lengths) == len(others)

    @property
    def has_all_rows(self) -> bool:
        """Whether all rows are here: they have no first number, stripes or offset."""
        rows = self.query_rows, self.key_rows
        begins = all(x.first is None and x.stripe is None for x in rows)
        return begins and self.offset is None

    def mean_keys(self, kv_size: int) -> int:
        """About how many keys a query looks at, as far as is known without data.

        That is with as many queries as keys, from the same position on.
        """

        def side(width: int | None) -> float:
            width = kv_size if width is None else min(width, kv_size)
            return width - width * width / (2 * max(kv_size, 1))

        means = (side(w.left) + side(w.right) for w in self._windows)
        return round(max(0, min(means, default=kv_size)))

    def with_known_rows(self, q_size: int, kv_size: int) -> AttentionSpec:
        """The spec of all rows, which says whether each has a key."""
        own = all(atom.keeps_own_key for atom in self.masks)
        first = all(atom.keeps_first_key for atom in self.masks)
        known = own and (q_size <= kv_size or first)
        known = known and self.offset is None and self.score.bias is None
        return dataclasses.replace(self, rows_have_keys=known)

    def only_positions(self) -> AttentionSpec:
        """For a block of which every pair is kept: without the masks' data."""
        return dataclasses.replace(self, masks=self._windows)

    def query_numbers(self, rows: Any) -> Any:
        """Which rows of the caller these are: themselves, but for `repeat`."""
        return rows if self.repeat == 1 else divide(rows, self.repeat)

    def keep(self, q, kv) -> list[jax.Array]:
        """What says which pairs are kept: those of which all of it says so.

        That is one boolean array, or none where all are; and after it what a backend
        has in place of one (`Arithmetic.masked`).

        Args:
          q, kv: int32 row numbers that broadcast against each other; array fields of
            the spec must hold the matching blocks.
        """
        q = self.query_numbers(q)
        offset, query, key = self.positions
        q_pos, kv_pos = query.at(q) + offset, key.at(kv)
        found = [atom.keep(q, kv, q_pos, kv_pos) for atom in self.masks]
        kept = [x for x in found if x is not None]
        boolean = [x for x in kept if x.dtype == jnp.bool_]
        first = [functools.reduce(operator.and_, boolean)] if boolean else []
        return [*first, *(x for x in kept if x.dtype != jnp.bool_)]

    def kv_limit(self, size: int):
        """Key rows at or beyond this are padding: their values must not be touched."""
        return self._limit("key_value", size)

    def q_limit(self, size: int):
        return self._limit("query", size, self.repeat)

    def _limit(self, side: str, size: int, repeat: int = 1):
        lengths = [getattr(a, side) for a in self.masks if isinstance(a, Lengths)]
        limits = [n if repeat == 1 else n * repeat for n in lengths if n is not None]
        return functools.reduce(minimum, limits, size)

    def with_end(self, kv_size: int) -> AttentionSpec:
        """Also masks key rows beyond the array, for a last block that overhangs it."""
        end = Lengths(key_value=kv_size)
        return dataclasses.replace(self, masks=(*self.masks, end))

    def for_ranges(self) -> AttentionSpec:
        """What block ranges depend on, and nothing else."""
        return AttentionSpec(
            Score(1.0),
            tuple(a for a in self.masks if not isinstance(a, DataDependent)),
            self.offset,
            table=self.table,
            repeat=self.repeat,
            query_rows=self.query_rows,
            key_rows=self.key_rows,
        )

    def kv_blocks(self, q_lo, q_hi, kv_size: int, block_kv: int) -> Range:
        """The range of key blocks that the query rows [q_lo, q_hi) look at."""
        if self.repeat > 1:
            q_lo, q_hi = self.query_numbers(q_lo), self.query_numbers(q_hi - 1) + 1
        return self._blocks("kv_range", q_lo, q_hi, kv_size, block_kv)

    def q_blocks(self, kv_lo, kv_hi, q_size: int, block_q: int) -> Range:
        """The range of query blocks that look at the key rows [kv_lo, kv_hi)."""
        return self._blocks("q_range", kv_lo, kv_hi, q_size, block_q)

    def _blocks(self, method, lo, hi, size: int, block: int) -> Range:
        rows = everything(0, size)
        for atom in self.masks:
            if not isinstance(atom, DataDependent):
                rows = rows & getattr(atom, method)(lo, hi, self.positions, size)
        blocks = rows.blocks(block, size)
        return blocks if self.table is None else blocks & self.table

    def query_blocks_met(self, kv_lo, kv_hi, q_size: int, block_q: int):
        """First and end of the query blocks that the key rows [kv_lo, kv_hi) meet.

        Windows and lengths say so, and exactly: a block of queries meets a block of
        keys if and only if it is met by it, which ranges to visit do not promise. For
        kernels whose programs wait for those that meet the same queries before them.
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
        for atom in self._windows:
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
    ) -> AttentionSpec:
        """Adds the block table of the data-dependent atoms (fields hold `Named`).

        Args:
          looped: the rows that are looped over: of keys (`s`), and the table is for
            `kv_blocks`, or of queries (`t`), and it is for `q_blocks`.
          block_q, block_kv: block sizes.
          q_size, kv_size: rows.
          over: axes whose elements get one table, of what any of them looks at.
        """
        relations = [
            atom.block_relation(block_q, block_kv).over(over)
            for atom in self.masks
            if isinstance(atom, DataDependent)
        ]
        if not relations:
            return self
        blocks = -(-kv_size // block_kv) if looped == "s" else -(-q_size // block_q)
        table = block_table(relations, looped, blocks)
        return dataclasses.replace(self, table=table)

    def kept_keys(self) -> Named | None:
        """Which keys some query keeps, by masks that drop some (`Named` fields)."""
        kept = [a.kept_keys() for a in self.masks if isinstance(a, DenseMask)]
        if not kept:
            return None
        axes = tuple(dict.fromkeys(a for x in kept for a in x.axes))
        return Named(functools.reduce(operator.and_, (x.to(axes) for x in kept)), axes)

    @property
    def is_data_dependent(self) -> bool:
        """Whether arrays say which blocks may be skipped (`with_table`)."""
        return any(isinstance(atom, DataDependent) for atom in self.masks)

    @property
    def rows_are_sorted(self) -> bool:
        """Whether query rows are known to look at equally many keys, or later at more.

        Of all batch entries alike (fields hold `Named`).
        """
        by_data = any(isinstance(atom, DataDependent | Lengths) for atom in self.masks)
        starts = () if self.offset is None else self.offset.squeezed().axes
        known = self.later_rows_see_more or not self._windows
        return known and not by_data and not starts

    @property
    def has_bias_of_pairs(self) -> bool:
        """Whether each pair has a number of its own (fields have names of axes)."""
        bias = self.score.bias
        return bias is not None and {"t", "s"} <= set(bias.axes)

    @property
    def has_mask_of_pairs(self) -> bool:
        """Whether a mask may drop some pairs of every block (`Named` fields)."""
        dense = (atom for atom in self.masks if isinstance(atom, DenseMask))
        return any({"t", "s"} <= set(atom.mask.axes) for atom in dense)

    def drops_pairs(self) -> bool:
        """Whether a mask may drop a key for one query and keep it for another."""
        masks = (a.mask.squeezed() for a in self.masks if isinstance(a, DenseMask))
        return any("t" in mask.axes for mask in masks)

    @property
    def drops_keys(self) -> bool:
        """Whether kernels know of keys that no query looks at (`with_keys`)."""
        lengths = (atom for atom in self.masks if isinstance(atom, Lengths))
        return self.keys is not None or any(x.key_value is not None for x in lengths)

    def with_keys(self) -> AttentionSpec:
        """Adds the keys that some query keeps (fields hold `Named`), for kernels.

        Where all keys are alike, no block of those that are dropped is visited.
        """
        keys = self.kept_keys()
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
