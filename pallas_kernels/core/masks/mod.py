"""A caller's function that says which pairs are kept (`mask_mod`)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.axes import Named, batch_axes
from pallas_kernels.core.masks.arrays import ArrayMask
from pallas_kernels.core.masks.base import mask_dataclass, named_map
from pallas_kernels.core.masks.relation import Relation, Tiling, blocked, reduced
from pallas_kernels.core.masks.traits import ALL, Traits
from pallas_kernels.core.pointwise import INDICES, Program, intervals
from pallas_kernels.core.pointwise.runs import keeps_runs
from pallas_kernels.core.pointwise.sides import split
from pallas_kernels.core.pointwise.tables import Table
from pallas_kernels.core.positions import AT_THEIR_NUMBERS, Positions
from pallas_kernels.core.ranges import block_ends, divide


@mask_dataclass(data=("arrays", "entry", "head"), meta=("program", "keeps_own_key"))
class MaskMod(ArrayMask):
    """Keeps the pairs for which f(b, h, q, kv) is True.

    Which blocks meet follows from intervals: of positions, and of the elements of
    captured arrays in a block (`pointwise.intervals`).

    Attributes:
      arrays: what the program reads; floats as integers with the same bits, for they
        have no gradients.
      entry, head: the numbers of the batch entry and of the query head; None where they
        are not asked for.
      program, keeps_own_key: static; as of `Traits`.
    """

    arrays: tuple[Any, ...]
    entry: Any
    head: Any
    program: Program
    keeps_own_key: bool
    arguments: ClassVar = {"arrays": "an array that mask_mod captures"}

    @property
    def traits(self) -> Traits:
        is_positional = self.program.asks("q", "kv")
        return dataclasses.replace(
            ALL,
            is_positional=is_positional,
            is_absolute=is_positional,
            cost_is_monotone=False,
            keeps_own_key=self.keeps_own_key,
            keeps_first_key=False,
        )

    @property
    def lists_blocks(self) -> bool:
        names = {"t": "q", "s": "kv"}
        reads = (frozenset(names.get(str(a)) for a in x.axes) for x in self.arrays)
        return not keeps_runs(self.program, tuple(reads))

    @property
    def words(self) -> str:
        kind = "lists of blocks" if self.lists_blocks else "ranges of blocks"
        found = self.program.words(self.arrays)
        return f"mask_mod: {found}; {kind} by intervals"

    @property
    def operations(self) -> frozenset[str]:
        return self.program.operations

    def attended_keys(self, positions: Positions, kv_size: int) -> None:
        del positions, kv_size  # as for masks by positions: callers keep keys finite

    def keep(self, q, kv, q_pos, kv_pos):
        inputs = [self.entry, self.head, q_pos, kv_pos, None]  # masks ask no distance
        (found,) = self.program.on_blocks(inputs, self._values())
        shape = jnp.broadcast_shapes(np.shape(q), np.shape(kv), np.shape(found))
        return jnp.broadcast_to(found, shape)

    def by_sides(self, tiling: Tiling) -> MaskMod:
        others = jax.tree.leaves((self.entry, self.head, tiling.positions))
        axes = batch_axes([x for x in others if isinstance(x, Named)])
        offset, query, key = named_map(lambda x: x.to((*axes, "t")), tiling.positions)
        rows, keys = (jnp.arange(n, dtype=jnp.int32) for n in tiling.sizes)
        rows = divide(rows, tiling.repeat) if tiling.repeat > 1 else rows
        places = ((query.at(rows) + offset, "t"), (key.at(keys), "s"))
        q, kv = (
            Named.broadcast(x, (*axes, name) if x.ndim > 1 else (name,))
            for x, name in places
        )
        own = self.entry, self.head, q, kv
        inputs = {str(name): x for name, x in zip(INDICES, own, strict=True)}
        known = {}
        if tiling.positions == AT_THEIR_NUMBERS:
            counts = tiling.q_size // tiling.repeat, tiling.kv_size
            known = {x: (0, n - 1) for x, n in zip(("q", "kv"), counts, strict=True)}
        program, arrays = split(self.program, self._named_values(), inputs, known)
        return dataclasses.replace(self, arrays=tuple(arrays), program=program)

    def _values(self) -> list:
        """The arrays, with floats in place of their bits."""
        steps = zip(self.arrays, self.program.reads, strict=True)
        return [_of_bits(x, step.dtype) for x, step in steps]

    def _named_values(self) -> list[Named]:
        """The same of fields that are `Named`."""
        steps = zip(self.arrays, self.program.reads, strict=True)
        return [Named(_of_bits(x.value, step.dtype), x.axes) for x, step in steps]

    def block_relation(self, tiling: Tiling) -> Relation:
        values = self._named_values()
        others = jax.tree.leaves((self.entry, self.head, tiling.positions))
        named = [*values, *(x for x in others if isinstance(x, Named))]
        axes = batch_axes(named)
        heads = any("n" in x.axes for x in named)
        axes = (*axes, *(("n",) if heads else ()), "i", "j")
        inputs = [
            *(
                None if x is None else _ends(x.squeezed(), tiling.blocks, axes)
                for x in (self.entry, self.head)
            ),
            *_positions(tiling, axes),
            None,
        ]
        reads = [_ends(x.squeezed(), tiling.blocks, axes) for x in values]
        (found,) = intervals.run(self.program, inputs, reads)
        assert found is not None
        shape = [1] * (len(axes) - 2) + [*tiling.counts]

        def of_blocks(x) -> Named:
            own = jnp.broadcast_shapes(np.shape(x), shape)
            kept = (
                a if n != 1 or a in ("i", "j") else None
                for a, n in zip(axes, own, strict=True)
            )
            return Named(jnp.broadcast_to(x, own), tuple(kept)).squeezed()

        every, some = found
        return Relation(of_blocks(some), of_blocks(every))


def _of_bits(x: Any, dtype: str) -> Any:
    """The floats of an array; a `Table` of a kernel has them already (`by_sides`)."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if isinstance(x, Table) or not is_float or x.dtype == dtype:
        return x
    return jax.lax.bitcast_convert_type(x, dtype)


def _ends(x: Named, blocks: dict[str, int], axes) -> intervals.Interval:
    """The smallest and the largest element of each block."""
    cut = blocked(x, blocks)
    names = tuple(str(a) for a in cut.axes if a not in axes)
    low, high = (reduced(cut, f, names).to(axes) for f in (jnp.min, jnp.max))
    return intervals.of_ends(low, high)


def _positions(tiling: Tiling, axes) -> list[intervals.Interval]:
    """Of the first and the last row of each block of queries, and of keys."""
    offset, query, key = named_map(lambda x: x.to(axes), tiling.positions)

    def ends(block: int, size: int, name: str):
        first, end = block_ends(block, size)
        return [Named(x, (name,)).to(axes) for x in (first, end - 1)]

    rows = ends(tiling.block_q, tiling.q_size, "i")
    keys = ends(tiling.block_kv, tiling.kv_size, "j")
    rows = [divide(x, tiling.repeat) if tiling.repeat > 1 else x for x in rows]
    q_low, q_high = (query.at(x) + offset for x in rows)
    low, high = (key.at(x) for x in keys)
    return [(q_low, q_high), (low, high)]
