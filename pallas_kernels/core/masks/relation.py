"""Which blocks of queries and of keys meet, where arrays decide it."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.core.axes import Named
from pallas_kernels.core.positions import AT_THEIR_NUMBERS, Positions
from pallas_kernels.core.ranges import Range, everything


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How rows are cut in blocks, for `Atom.block_relation`.

    Attributes:
      block_q, block_kv: rows of a block.
      q_size, kv_size: all rows.
      positions: where they stand; `Named`.
      repeat: how many query rows stand at one position (`AttentionSpec.repeat`).
    """

    block_q: int
    block_kv: int
    q_size: int
    kv_size: int
    positions: Positions = AT_THEIR_NUMBERS
    repeat: int = 1

    @property
    def counts(self) -> tuple[int, int]:
        """How many blocks of queries and of keys there are."""
        return -(-self.q_size // self.block_q), -(-self.kv_size // self.block_kv)

    @property
    def sizes(self) -> tuple[int, int]:
        """All rows of queries and of keys."""
        return self.q_size, self.kv_size

    @property
    def blocks(self) -> dict[str, int]:
        return {"t": self.block_q, "s": self.block_kv}


class Relation(NamedTuple):
    """For each pair of blocks: may some pair be kept, are all pairs kept.

    `Named` boolean arrays whose last axes are `i` (query blocks) and `j` (key blocks).
    """

    some: Named
    all: Named

    def code(self, tiling: Tiling) -> Named:
        """int32 [.., i, j]: 0 where no pair is kept, 1 where some may be, 2 of all."""
        names = (a for x in self for a in x.axes if a not in ("i", "j"))
        axes = (*dict.fromkeys(names), "i", "j")
        some, every = (x.to(axes) for x in self)
        value = some.astype(jnp.int32) * (1 + every)
        shape = jnp.broadcast_shapes(value.shape, tiling.counts)
        return Named(jnp.broadcast_to(value, shape), axes)

    def over(self, names: tuple[str, ...]) -> Relation:
        """Of the pairs of all elements of these axes together."""
        some = reduced(self.some, jnp.any, names)
        return Relation(some, reduced(self.all, jnp.all, names))

    def __and__(self, other: Relation) -> Relation:
        """Of pairs that both keep."""
        return Relation(
            *(_joined(operator.and_, x, y) for x, y in zip(self, other, strict=True))
        )

    def __or__(self, other: Relation) -> Relation:
        """Of pairs that either keeps."""
        return Relation(
            *(_joined(operator.or_, x, y) for x, y in zip(self, other, strict=True))
        )


def _joined(operation, x: Named, y: Named) -> Named:
    axes = [a for z in (x, y) for a in z.axes if a not in ("i", "j")]
    axes = (*dict.fromkeys(axes), "i", "j")
    return Named.broadcast(operation(x.to(axes), y.to(axes)), axes)


def blocked(x: Named, row_axes: dict[str, int], fill=None) -> Named:
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


def reduced(x: Named, function, names: tuple[str, ...]) -> Named:
    """One axis after the other, the inner first: XLA is slower with two at once, and
    would make two reductions one.
    """
    names = tuple(name for name in x.axes if name in names)
    for i, name in enumerate(reversed(names)):
        value = lax.optimization_barrier(x.value) if i else x.value
        value = function(value, axis=x.axes.index(name))
        x = Named(value, tuple(a for a in x.axes if a != name))
    return x


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
