"""What the programs of all three kernels do alike: their rows, their range, their mask.

A program first loads what does not change along its loop, then folds a step over the
blocks that its range names (`core.mask.Range.fold`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.core.mask import Range
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.triton.memory import Layout, Rows, load_tree

Where = dict[str, Any]


def query_program(
    spec: AttentionSpec, layout: Layout
) -> tuple[AttentionSpec, Where, Range]:
    """The start of a program that owns a block of query rows.

    Returns:
      The spec with everything loaded that does not vary along the keys, where the
      program's block lies, and the range of key blocks that it needs.
    """
    block = layout.rows["t"]
    i = pl.program_id(0)
    if any(getattr(atom, "right", None) is not None for atom in spec.masks):
        # Under a causal mask the last rows have the most keys: they start first.
        i = layout.num_blocks - 1 - i
    where: Where = {"i": i}
    spec = load_tree(_with_end(spec, layout), ("t", "s"), where)
    start = i * block
    where["t"] = layout.rows_at("t", start, spec.q_limit(layout.size["t"]))
    where |= _heads(layout)
    spec = load_tree(spec, ("t", "s"), where)
    end = _end(layout, "t", start)
    kv_blocks = spec.kv_blocks(start, end, layout.size["s"], layout.rows["s"])
    return spec, where, kv_blocks


def key_program(spec: AttentionSpec, layout: Layout) -> tuple[AttentionSpec, Where]:
    """The start of a program that owns a block of key rows: as `query_program`."""
    j = pl.program_id(0)
    where: Where = {"j": j}
    spec = load_tree(spec, ("s", "t"), where)
    start = j * layout.rows["s"]
    where["s"] = layout.rows_at("s", start, spec.kv_limit(layout.size["s"]))
    return spec, where | _heads(layout)


def query_head(
    spec: AttentionSpec, where: Where, layout: Layout, g
) -> tuple[AttentionSpec, Where, Range]:
    """For query head g of the group: the spec, and the range of query blocks needed."""
    where = {**where, "n": g}
    spec = load_tree(spec, ("s", "t"), where)
    start = where["s"].start
    end = _end(layout, "s", start)
    q_blocks = spec.q_blocks(start, end, layout.size["t"], layout.rows["t"])
    return spec, where, q_blocks


def visit_at(
    spec: AttentionSpec, where: Where, layout: Layout, masked: bool, name: str, block
) -> Where:
    """Where block number `block` of axis `name` lies.

    Only a masked block may hold padding; it is loaded as zero, so that whatever lies
    there (NaN, inf) meets no product.
    """
    size = layout.size[name]
    start = block * layout.rows[name]
    if not masked:
        return {**where, name: Rows(start, layout.rows[name])}
    limit = spec.kv_limit(size) if name == "s" else spec.q_limit(size)
    return {**where, name: layout.rows_at(name, start, limit)}


def scores(
    spec: AttentionSpec,
    qk: jax.Array,
    masked: bool,
    where: Mapping[str, Any],
    order: tuple[str, str],
) -> tuple[jax.Array, float]:
    """Scores `(x, unit)` of a block of products with axes `order`; -inf if masked."""
    x, unit = spec.score.apply(qk)
    if not masked:
        return x, unit
    spec = load_tree(spec, order, where)
    q, kv = (
        jnp.expand_dims(where[name].numbers, 1 - order.index(name))
        for name in ("t", "s")
    )
    keep = spec.keep(q, kv)
    return (x if keep is None else jnp.where(keep, x, -jnp.inf)), unit


def _with_end(spec: AttentionSpec, layout: Layout) -> AttentionSpec:
    """Masks the keys beyond the array where the last block overhangs it.

    A program that owns keys needs no such mask: the gradients of those rows are not
    stored.
    """
    size = layout.size["s"]
    return spec.with_end(size) if size % layout.rows["s"] else spec


def _heads(layout: Layout) -> Where:
    return {name: Rows.whole(layout.size[name]) for name in ("h", "d")}


def _end(layout: Layout, name: str, start):
    size, block = layout.size[name], layout.rows[name]
    return start + block if size % block == 0 else jnp.minimum(start + block, size)
