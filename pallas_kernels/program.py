"""What the programs of every kernel do alike: their rows, their range, their mask.

A program first loads what does not change along its loop, then folds a step over the
blocks that its range names (`core.ranges.Range.fold`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core.axes import whole_axis
from pallas_kernels.core.lists import Visited
from pallas_kernels.core.pages import Pages
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.positions import AT_THEIR_NUMBERS
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.core.visits import Visits
from pallas_kernels.layout import Launch, Layout, Rows, Scattered, load_tree

Where = dict[str, Any]


def query_program(
    spec: AttentionSpec, layout: Layout
) -> tuple[AttentionSpec, Where, Visited]:
    """The start of a program that owns a block of query rows.

    Returns:
      The spec with everything loaded that does not vary along the keys, where the
      program's block lies, and the range of key blocks that it needs.
    """
    spec, where, start = query_start(spec, layout)
    spec, where = query_rows(spec, where, layout, start)
    if spec.pages is not None:
        end, size = _end(layout, "t", start), layout.size["s"]
        where["needed"] = spec.keys_needed(start, end, size)
    return spec, where, key_blocks(spec, where, layout, start)


def query_start(
    spec: AttentionSpec, layout: Layout
) -> tuple[AttentionSpec, Where, Any]:
    """The spec with its scalars loaded, where the program is, and its first row."""
    ids = layout.program_ids()
    i = ids.pop("t")
    if spec.traits.cost_grows:  # they start first
        i = layout.num_blocks["t"] - 1 - i
    where: Where = {"i": i, **ids}
    spec = load_tree(with_end(spec, layout), ("t", "s"), where)
    return spec, where, i * layout.rows["t"]


def query_rows(
    spec: AttentionSpec, where: Where, layout: Layout, start, size: int | None = None
) -> tuple[AttentionSpec, Where]:
    """The spec with what varies along the rows from `start` loaded, and where they lie.

    Args:
      size: how many of the rows of a program; None for all.
    """
    rows = layout.rows_at("t", start, spec.q_limit(layout.size["t"]))
    rows = rows if size is None else dataclasses.replace(rows, size=size)
    where = {**where, "t": rows, **_heads(layout)}
    return load_tree(spec, ("t", "s"), where), where


def key_blocks(spec: AttentionSpec, where: Where, layout: Layout, start) -> Visited:
    """The range of key blocks that a program needs for its rows from `start`."""
    end = _end(layout, "t", start)
    blocks = spec.kv_blocks(start, end, layout.size["s"], layout.rows["s"])
    return layout.own_blocks(where, blocks)


def key_program(
    spec: AttentionSpec, layout: Layout, visits: Visits | None = None
) -> tuple[AttentionSpec, Where]:
    """The start of a program that owns a block of key rows: as `query_program`.

    Args:
      visits: what says which block that is, where it is not the one of its number.
    """
    ids = layout.program_ids()
    j = ids.pop("s")
    if visits is not None:
        j = load_tree(visits, (), ids).own_block(j, layout.rows["s"], layout.size["s"])
    where: Where = {"j": j, **ids}
    spec = load_tree(spec, ("s", "t"), where)
    where["s"] = _keys_at(spec, where, layout, j * layout.rows["s"])
    return spec, where | _heads(layout)


def query_head(
    spec: AttentionSpec, where: Where, layout: Layout, g
) -> tuple[AttentionSpec, Where, Visited]:
    """For query head g of the group: the spec, and the range of query blocks needed."""
    where = {**where, "n": g}
    spec = load_tree(spec, ("s", "t"), where)
    start = where["s"].start
    end = _end(layout, "s", start)
    q_blocks = spec.q_blocks(start, end, layout.size["t"], layout.rows["t"])
    return spec, where, layout.own_blocks(where, q_blocks)


def tile_program(
    spec: AttentionSpec, layout: Layout
) -> tuple[AttentionSpec, Where, Where]:
    """The start of a program that owns a tile of pairs, or a block of rows or keys.

    Returns:
      The spec, where the program is (`element` says where its rows lie), and where its
      results go.
    """
    own = tuple(layout.num_blocks)
    names = {"t": "i", "s": "j"}
    ids = layout.program_ids()
    where: Where = {names.get(a, a): number for a, number in ids.items()}
    result: Where = {
        a: layout.rows_at(a, where[names[a]] * layout.rows[a]) for a in own
    }
    spec = with_end(spec, layout) if "t" in own else spec
    return load_tree(spec, ("t", "s"), where), where | _heads(layout), result


def number_of_diagonals(size: Mapping[str, int], block: int) -> int:
    """Of square tiles of so many queries and keys, in a call of this size."""
    return sum(-(-size[a] // block) for a in ("t", "s")) - 1


def diagonal_program(
    spec: AttentionSpec, layout: Layout
) -> tuple[AttentionSpec, Where, Where, tuple[Any, Any, Any]]:
    """The start of a program that owns a diagonal of tiles, as `tile_program`.

    Returns:
      Also the first and the end of its blocks of keys (none where it is known that no
      query reaches a key), and how many blocks of queries stand before the one that
      meets block 0 of the keys.
    """
    ids = layout.program_ids()
    where: Where = {**ids, **_heads(layout)}
    queries, keys = (-(-layout.size[a] // layout.rows[a]) for a in ("t", "s"))
    after = ids["e"] - (keys - 1)
    first, end = jnp.maximum(-after, 0), jnp.minimum(queries - after, keys)
    block = layout.rows["t"]
    for is_far in out_of_reach(spec, after, block):
        end = jnp.where(is_far, first, end)
    spec = load_tree(with_end(spec, layout), ("t", "s"), where)
    result = {"e": ids["e"], whole_axis(block): Rows(0, block)}
    return spec, where, result, (first, end, after)


def out_of_reach(spec: AttentionSpec, after, block: int) -> Iterator[jax.Array]:
    """Whether no query of a diagonal of tiles reaches a key, as far as is known here.

    Args:
      after: as of `diagonal_program`.
      block: how many queries and keys a tile has.
    """
    if spec.positions != AT_THEIR_NUMBERS:
        return
    for tiles, reach in zip((after, -after), spec.traits.reach, strict=True):
        if reach is not None:
            yield (tiles - 1) * block + 1 > reach  # the least distance on that side


def element(
    spec: AttentionSpec, where: Where, layout: Layout, index
) -> tuple[AttentionSpec, Where, str, Visited]:
    """Number `index` of the looped heads and batch entries of a `tile_program`.

    Returns:
      The spec, where the rows of the tile lie, the axis that is left to visit (that of
      keys for a whole tile) and the range of its blocks.
    """
    where = dict(where)
    for name, size in reversed(layout.looped.items()):
        where[name] = lax.rem(index, jnp.int32(size))
        index = lax.div(index, jnp.int32(size))
    if "n" in layout.looped:
        where["k"] = lax.div(where["n"], jnp.int32(layout.group))
    spec = load_tree(spec, ("t", "s"), where)
    if "i" in where:
        start = where["i"] * layout.rows["t"]
        where["t"] = layout.rows_at("t", start, spec.q_limit(layout.size["t"]))
        spec = load_tree(spec, ("t", "s"), where) if "j" not in where else spec
        end = _end(layout, "t", start)
        blocks = spec.kv_blocks(start, end, layout.size["s"], layout.rows["s"])
        if "j" in where:
            blocks = blocks.only(where["j"])
        return spec, where, "s", layout.own_blocks(where, blocks)
    start = where["j"] * layout.rows["s"]
    where["s"] = _keys_at(spec, where, layout, start)
    spec = load_tree(spec, ("t", "s"), where)
    end = _end(layout, "s", start)
    blocks = spec.q_blocks(start, end, layout.size["t"], layout.rows["t"])
    return spec, where, "t", layout.own_blocks(where, blocks)


def visit_at(
    spec: AttentionSpec, where: Where, layout: Layout, name: str, block, masked: bool
) -> Where:
    """Where block number `block` of axis `name` lies.

    Only a masked block may hold padding or keys that no query keeps; they are loaded as
    zero, so that whatever lies there (NaN, inf) meets no product.
    """
    size = layout.size[name]
    start = block * layout.rows[name]
    if not masked:
        rows = Rows(start, layout.rows[name])
    elif name == "s":
        rows = _keys_at(spec, where, layout, start)
    else:
        rows = layout.rows_at(name, start, spec.q_limit(size))
    found = {**where, name: rows}
    if name == "s" and spec.pages is not None:
        found |= in_pages(spec.pages, rows)
    return found


def in_pages(pages: Pages, rows: Rows) -> dict[str, Any]:
    """Where a block of rows lies in a pool: its page, and its rows of that.

    If it lies in several pages, those are arrays, with a number for each row.

    Args:
      pages: of a `View`.
      rows: of the axis `s`; those that do not exist may be said to be in any page.
    """
    table, (*_, places) = pages.table, pages.table.ref.shape
    fixed = {"u0": np.int32(0), "u1": np.int32(1)}
    if pages.size % rows.size == 0:
        place, first = pages.place(rows.start, places)
        limit = None if rows.limit is None else rows.limit - (rows.start - first)
        page = pages.page(table.load((), {"c": place}))
        return {**fixed, "p": page, "r": Rows(first, rows.size, limit, rows.kept)}
    place, row = pages.place(rows.numbers, places)
    entries = Scattered(rows.start, rows.size, numbers_of=place)
    page = pages.page(table.load(("c",), {"c": entries}))
    found = Scattered(rows.start, rows.size, rows.limit, rows.kept, numbers_of=row)
    return {**fixed, "p": page, "r": found}


def _keys_at(spec: AttentionSpec, where: Where, layout: Layout, start) -> Rows:
    """The block of keys that starts at `start`, with which of them some query keeps."""
    rows = layout.rows_at("s", start, spec.kv_limit(layout.size["s"]))
    if "needed" in where:  # other rows may be in pages of other sequences, or in none
        first, *_, end = where["needed"]
        rows = Rows(start, rows.size, end)
        kept = None if isinstance(first, int) else rows.numbers >= first
        return dataclasses.replace(rows, kept=kept)
    if spec.keys is None:
        return rows
    return dataclasses.replace(rows, kept=spec.keys.load(("s",), {**where, "s": rows}))


def pairs(
    spec: AttentionSpec,
    where: Where,
    order: tuple[str, str],
    masked: Any,
    launch: Launch,
    *,
    tables: bool = True,
) -> Pairs:
    """The block of pairs at `where`, with the fields that it needs loaded.

    Args:
      tables: whether what is read at distances is among these.
    """
    if masked is False:
        spec = spec.only_positions()
    spec = load_tree(dataclasses.replace(spec, keys=None), order, where)
    rows = {name: (where[name].start, where[name].size) for name in order}
    options = launch.precision, launch.arithmetic
    found = Pairs(spec.of_block(rows), rows, order, masked, *options)
    return found.with_tables() if tables else found


def with_end(spec: AttentionSpec, layout: Layout) -> AttentionSpec:
    """Masks the keys beyond the array where the last block overhangs it.

    A program that owns keys needs no such mask, if it makes their gradients only: those
    of such rows are not stored.
    """
    size = layout.size["s"]
    return spec.with_end(size) if size % layout.rows["s"] else spec


def _heads(layout: Layout) -> Where:
    return {name: layout.head(name) for name in ("h", "d")}


def _end(layout: Layout, name: str, start):
    size, block = layout.size[name], layout.rows[name]
    return start + block if size % block == 0 else jnp.minimum(start + block, size)
