"""Which blocks of queries each block of keys visits, where arrays say so, and in turn.

For kernels whose programs own blocks of keys and add to the blocks of queries that they
visit: a program waits until those before it have added to the same one, so that sums
have one order. Where a block lies may tell how many these are
(`AttentionSpec.meets_exactly`). Else they are counted here, from the very ranges that
programs then visit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core import known
from pallas_kernels.core.axes import Named, batch_axes, whole_axis
from pallas_kernels.core.block_tables import are_static
from pallas_kernels.core.lists import BlockList, number_of, sorted_by_kind
from pallas_kernels.core.masks import Tiling
from pallas_kernels.core.ranges import Range, block_ends, divide, maximum, minimum
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec

# Times the mean of those that are visited, above which a block of keys has many visits.
# Of a causal mask of as many keys as queries none has more than two. Timed in
# benchmarks/lab/138-fewer-passes-before-lists.md.
MANY_VISITS = 3


class Sharing(NamedTuple):
    """Blocks of keys that have several programs each, since they have many visits.

    Attributes:
      blocks: how many there may be for a head and batch entry.
      parts: programs of each.
    """

    blocks: int
    parts: int

    @property
    def more(self) -> int:
        """Programs beside one for each block."""
        return self.blocks * (self.parts - 1)


class Share(NamedTuple):
    """What a program has of its block of keys.

    Attributes:
      block: number among those that are shared, if it is.
      part: which part of the visits it has.
      parts: how many there are: 1 of a block that is not shared.
      is_used: whether it has any.
    """

    block: Any
    part: Any
    parts: Any
    is_used: Any


# Of so many parts the first one has no visit.
_NO_VISITS = 2**20
# Kinds of blocks of keys, in the order in which programs take them.
_FEW, _MANY, _SHORT = range(3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """The visits of the programs of all blocks of keys `j`, the same for all heads.

    Attributes:
      blocks: the `Range` of blocks of queries that each visits, int32 [.., j] with the
        batch axes of what decides it; or a `BlockList`.
      before: int32 [.., j, i], how many programs before that of block j visit block i
        of queries; meant for those that j visits. Beside a `BlockList` it counts the
        blocks of that, flat along one whole axis.
      order: int32 [.., own blocks] of a `BlockList`, along one whole axis: the numbers
        (`number_of`) of its blocks of keys in the order in which programs take them;
        else None.
      few, many: int32 [..], how many of a kernel's blocks have few visits, and how many
        have many and come after those; None where none is shared.
      sharing: how blocks may be shared, or None (static). The programs that there are
        more, and that no block needs, come last and are not used.
    """

    blocks: Range | BlockList
    before: Any
    order: Any = None
    few: Any = None
    many: Any = None
    sharing: Sharing | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        size: Mapping[str, int],
        rows: Mapping[str, int],
        sharing: Sharing | None = None,
    ) -> Visits:
        """Of a call.

        Args:
          spec: of `Named` arrays, without a table.
          size, rows: all of `t` and `s`, and those of a block.
          sharing: whether blocks of a list may have several programs.
        """
        sizes = rows["t"], rows["s"], size["t"], size["s"]
        found = None
        if are_static(spec.masks, Tiling(*sizes, spec.positions)):
            numbers = spec.query_rows, spec.key_rows
            found = _known(spec.masks, *numbers, sizes, sharing)
        return cls._made(spec, size, rows, sharing) if found is None else found

    @classmethod
    def _made(cls, spec, size, rows, sharing) -> Visits:
        sizes = rows["t"], rows["s"], size["t"], size["s"]
        tabled = spec.with_table("t", *sizes, over=("n",), in_order=True)
        if isinstance(tabled.table, BlockList):
            return cls._of_list(tabled.table, size["s"], rows["s"], sharing)
        axes = (*_batch(spec), "j")
        loaded = jax.tree.map(lambda x: x.to(axes), tabled.for_ranges())
        queries = -(-size["t"] // rows["t"])
        start, end = block_ends(rows["s"], size["s"])
        found = loaded.q_blocks(start, end, size["t"], rows["t"])
        # All of them for each element and block of keys, whatever they depend on.
        shape = (*(size[a] for a in _batch(spec)), *start.shape)
        found = Range(*(jnp.broadcast_to(x, shape) for x in found))
        visited = _in(found, queries).astype(jnp.int32)
        so_far = lax.cumsum(visited, axis=visited.ndim - 2)
        blocks = Range(*(Named(x, axes) for x in found))
        before = Named(so_far - visited, (*axes, "i"))
        return cls(blocks, before, sharing=sharing)

    @classmethod
    def _of_list(
        cls, listed: BlockList, keys: int, rows: int, sharing: Sharing | None
    ) -> Visits:
        """Of a list.

        Args:
          keys: how many there are.
          rows: of a kernel's block of keys.
          sharing: as of `of`.
        """
        codes = listed.codes()
        met, lead = (codes.value > 0).astype(jnp.int32), codes.axes[:-2]
        kind = _kinds(listed.count.value, last_is_short=keys % listed.own != 0)
        count = kind.shape[-1]
        order = sorted_by_kind(kind, jnp.arange(count, dtype=jnp.int32))
        order = Named(order, (*lead, whole_axis(count)))
        # Beside a block count those of its kind before it, and all of kinds before.
        kinds = jnp.arange(2, dtype=jnp.int32).reshape(2, *(1 for _ in kind.shape))
        own = jnp.where((kind == kinds)[..., None], met, 0)
        so_far = lax.cumsum(own, axis=own.ndim - 2)
        few, many = so_far - own
        is_few = (kind == _FEW)[..., None]
        before = jnp.where(is_few, few, so_far[_FEW, ..., -1:, :] + many)
        before = Named(before.reshape(listed.code.shape), listed.code.axes)
        if sharing is None:
            return cls(listed, before, order)
        few, many = (
            jnp.sum(kind == x, axis=-1, dtype=jnp.int32) * (listed.own // rows)
            for x in (_FEW, _MANY)
        )
        few, many = Named(few, lead), Named(many, lead)
        return cls(listed, before, order, few, many, sharing)

    def own_block(self, number, rows: int, keys: int):
        """The block of keys that a program owns.

        Args:
          number: of the program among those of its heads and batch entries.
          rows: of a block of keys.
          keys: how many there are.
        """
        if self.sharing is not None:
            number = minimum(self._place(number)[0], -(-keys // rows) - 1)
        if self.order is None:
            return number
        assert isinstance(self.blocks, BlockList)
        parts = self.blocks.own // rows
        entry = divide(number, parts)
        block = number_of(self.order.number(entry))
        return block * parts + (number - entry * parts)

    def share(self, number, rows: int, keys: int) -> Share:
        """What a program has of it.

        Args:
          number, rows, keys: as for `own_block`.
        """
        assert self.sharing is not None
        place, block, part, is_shared = self._place(number)
        # Arithmetic, as scalar selects do not lower in every kernel.
        is_used = maximum(minimum(-(-keys // rows) - place, 1), 0)
        parts = _NO_VISITS + is_used * (1 - _NO_VISITS)
        parts = parts + is_shared * (self.sharing.parts - 1)
        return Share(block, part, parts, is_used > 0)

    def _place(self, number) -> tuple[Any, Any, Any, Any]:
        """Where a program's block of keys comes in their order, and its part of it.

        Returns:
          The place, the number among shared blocks, the part, and 1 if it is shared.
        """
        if self.few is None or self.sharing is None:
            return number, 0, 0, 0
        parts, after = self.sharing.parts, number - self.few
        end = minimum(self.many, self.sharing.blocks) * parts
        within = maximum(minimum(after, end), 0)
        block = divide(within, parts)
        is_shared = maximum(minimum(after + 1, 1), 0)
        is_shared = is_shared * maximum(minimum(end - after, 1), 0)
        place = minimum(number, self.few) + block + maximum(after - end, 0)
        return place, block, within - block * parts, is_shared

    def before_at(self, where: Mapping[str, Any], block, rows: Mapping[str, int]):
        """How many programs come before the one at `where` at a block of queries.

        In a program, with what it needs loaded.

        Args:
          block: of queries.
          rows: of a block of `t` and `s`.
        """
        listed = self.blocks
        if not isinstance(listed, BlockList):
            return self.before.load((), {**where, "i": block})
        start = where["s"].start
        own = divide(start, listed.own)
        other = divide(block, listed.visited // rows["t"])
        before = self.before.number(own * listed.others + other)
        # Those of one block of the list all visit what it visits.
        within = divide(start - own * listed.own, rows["s"])
        return before * (listed.own // rows["s"]) + within

    def met(self, size: Mapping[str, int], rows: Mapping[str, int]) -> Named:
        """By how many blocks of keys each query row's block is: int32 [.., t].

        Args:
          size, rows: as for `of`.
        """
        block = rows["t"]
        if isinstance(self.blocks, BlockList):
            block, met = self.blocks.visited, self._met_in_list(size["s"], rows["s"])
        else:
            met = self._met
        value = jnp.repeat(met.value, block, axis=-1)[..., : size["t"]]
        return Named.broadcast(value, (*met.axes[:-1], "t"))

    def _met_in_list(self, keys: int, block: int) -> Named:
        """By how many of the kernel's blocks of keys each block of the list is."""
        listed = self.blocks
        assert isinstance(listed, BlockList)
        code = listed.codes()
        parts, all_parts = listed.own // block, -(-keys // block)
        number = jnp.arange(code.shape[-2], dtype=jnp.int32) * parts
        count = jnp.minimum(all_parts - number, parts)[:, None]
        met = jnp.sum(jnp.where(code.value > 0, count, 0), axis=-2, dtype=jnp.int32)
        return Named(met, (*code.axes[:-2], "i"))

    @property
    def _met(self) -> Named:
        """By how many blocks of keys each block of queries is: int32 [.., i]."""
        assert isinstance(self.blocks, Range)
        *batch, _, _ = self.before.axes
        found = Range(*(x.value for x in self.blocks))
        met = _in(found, self.before.shape[-1]).astype(jnp.int32)
        return Named(jnp.sum(met, axis=-2, dtype=jnp.int32), (*batch, "i"))


@functools.lru_cache(maxsize=32)
def _known(masks, query_rows, key_rows, sizes, sharing) -> Visits | None:
    """Of masks without arrays (`block_tables`)."""
    numbers = {"query_rows": query_rows, "key_rows": key_rows}
    spec = AttentionSpec(Score(1.0), masks, **numbers)
    rows, size = ({"t": sizes[i], "s": sizes[i + 1]} for i in (0, 2))
    with contextlib.suppress(known.Unknown):
        return known.evaluated(lambda: Visits._made(spec, size, rows, sharing))


def many_known(
    spec: AttentionSpec, size: Mapping[str, int], rows: Mapping[str, int]
) -> int | None:
    """How many blocks of keys have many visits, where that is known; else None.

    Args:
      spec, size, rows: as for `Visits.of`, of a spec that lists blocks.
    """
    sizes = rows["t"], rows["s"], size["t"], size["s"]
    if not are_static(spec.masks, Tiling(*sizes, spec.positions)):
        return None
    many = Visits.of(spec, size, rows, Sharing(1, 2)).many
    if many is None:  # there is no list
        return 0
    return int(np.max(many.value)) if isinstance(many.value, np.ndarray) else None


def _kinds(visits: jax.Array, *, last_is_short: bool) -> jax.Array:
    """Which of three kinds each block of keys is: programs take them in this order.

    Keys that nearly all queries attend to (global tokens among windows) take a program
    far longer than others take, which must not wait for it in turn.

    Args:
      visits: int32 [.., blocks], how many blocks of queries each visits.
      last_is_short: whether the last block has fewer rows, and stays where it is.
    """
    count = visits.shape[-1]
    visited = jnp.sum(visits > 0, axis=-1, keepdims=True, dtype=jnp.int32)
    has_many = visited * visits > MANY_VISITS * jnp.sum(visits, -1, keepdims=True)
    kind = jnp.where(has_many, _MANY, _FEW)
    if last_is_short:
        kind = jnp.where(jnp.arange(count) == count - 1, _SHORT, kind)
    return kind.astype(jnp.int32)


def _in(blocks: Range, count: int) -> jax.Array:
    """Which of so many blocks are in each range: booleans [.., blocks]."""
    lo, hi = (x[..., None] for x in (blocks.need_lo, blocks.need_hi))
    i = jnp.arange(count, dtype=jnp.int32)
    return (lo <= i) & (i < hi)


def blocks_of_keys_met(
    spec: AttentionSpec,
    size: Mapping[str, int],
    rows: Mapping[str, int],
    visits: Visits | None,
) -> Named:
    """How many blocks of keys the block of each query row meets: int32 [.., t].

    Args:
      spec, size, rows: as for `Visits.of`.
      visits: where arrays decide it.
    """
    if visits is not None:
        return visits.met(size, rows)
    block, queries = rows["t"], size["t"]
    axes = (*_batch(spec), "i")
    loaded = jax.tree.map(lambda x: x.to(axes), spec.for_ranges())
    start, end = block_ends(block, queries)
    first, last = loaded.key_blocks_met(start, end, size["s"], rows["s"])
    count = jnp.where(start < loaded.q_limit(queries), last - first, 0)
    met = Named(count, axes[-count.ndim :])
    value = jnp.repeat(met.value, block, axis=-1)[..., :queries]
    return Named.broadcast(value, (*met.axes[:-1], "t"))


def size_of_counts(
    spec: AttentionSpec, size: Mapping[str, int], rows: Mapping[str, int]
) -> int:
    """Bytes of `Visits.before`; to make them takes a few times as much for a while.

    Args:
      spec: of `Named`.
      size: of every axis.
      rows: as for `Visits.of`.
    """
    blocks = (-(-size[a] // rows[a]) for a in ("t", "s"))
    return 4 * math.prod(blocks) * math.prod(size[a] for a in _batch(spec))


def _batch(spec: AttentionSpec) -> tuple[str, ...]:
    """Of what decides which blocks meet."""
    parts = spec.masks, spec.offset, spec.query_rows, spec.key_rows
    return batch_axes(jax.tree.leaves(parts))
