"""The forward kernel: one program per block of query rows (Dao 2023, algorithm 1).

Grid: (query blocks, parts of the keys, query heads, batch axes), with parts only where
programs would be too few (`division`). A program loads its block of queries
once, then loops over the blocks of keys and values that its rows need: first those in
which pairs may be masked, or one, with `flash2.step`, then all the others with
`flash2.accumulate`, a third fewer instructions. If a row was not in its range, the
program begins again with steps alone, and stores that row. With `Config.invariant` it
visits the blocks from first to last, with steps alone, in parts of the keys that begin
at fixed places (`configs.PART`).

Its warps divide the query rows and share the keys and values, so that no partial result
passes between them through shared memory (section 3.3); the layout is Triton's for
chained products.

Shared memory: q [block_q, H], if not kept in registers, and num_stages times k
[block_kv, H], v [block_kv, Hv].
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import program
from pallas_kernels.core import flash2, parts
from pallas_kernels.core.axes import Named, first_of, in_pairs
from pallas_kernels.core.flash2 import Block
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.triton import memory, support
from pallas_kernels.triton.memory import Launch, View
from pallas_kernels.triton.merge import merged, of_parts
from pallas_kernels.triton.packed import turns

# A lane holds two of every eight columns of a product (PTX, wgmma's accumulator).
_PARTS = 8


def forward(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    outputs: tuple[Named, ...],
    *,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Output and log-sum-exp, and the largest scores if they have a struct.

    Args:
      q, k, v: operands, axes `t h`, `s h`, `s d` among others.
      spec: of `Named` arrays, with the tables for these blocks.
      outputs: shape structs of o (axes `t d` among others), lse (`t`), and as lse.
      launch: block sizes and the rest.
    """
    operands = [q, k, v, *jax.tree.leaves(spec), *outputs]
    layout = _layout(operands, launch)
    sink = None
    if layout.parts:  # it joins where parts are put together
        sink, spec = spec.sink, dataclasses.replace(spec, sink=None)
    kernel = functools.partial(
        _program, layout, launch, values_are_keys=_are_first_pieces(v, layout)
    )
    inputs = q, k, v, spec
    found = memory.call(
        kernel, layout, inputs, outputs, name="flash2_forward", launch=launch
    )
    if not layout.parts:
        return tuple(x.value for x in found)
    o, lse, *largest = found
    in_order, interpret = layout.part is not None, launch.interpret
    whole = merged(o, lse, sink, outputs[:2], in_order=in_order, interpret=interpret)
    return *whole, *(jnp.max(x.value, axis=x.axes.index("z")) for x in largest)


def _program(
    layout: memory.BlockGrid,
    launch: Launch,
    q: View,
    k: View,
    v: View,
    spec: AttentionSpec,
    outputs: tuple[View, ...],
    *,
    values_are_keys: bool,
) -> None:
    """The kernel's body: a block of query rows, and the keys that they need."""
    spec, where, kv_blocks = program.query_program(spec, layout)
    (q_block,) = launch.left(q.load(("t", "h"), where))
    whole = spec
    if layout.part is not None:
        spec = dataclasses.replace(spec, sink=None)

    def visit(masked, j, state):
        here = program.visit_at(spec, where, layout, "s", j, masked)
        pairs = program.pairs(spec, here, ("t", "s"), masked, launch)
        k_block = k.load(("s", "h"), here)
        scores = pairs.scores(q_block, k_block)
        if values_are_keys:
            v_block = k_block[: len(here["d"])]
        else:
            v_block = v.load(("s", "d"), here)
        product = functools.partial(_product, pairs, q.dtype, v_block)
        # A block of which pairs may be masked has a maximum taken, too.
        take = flash2.step if masked else flash2.accumulate
        return take(state, scores, product, launch.arithmetic)

    nothing = flash2.init(
        [launch.blocks.block_q],
        layout.pieces["d"],
        _PARTS,
        top_parts=_PARTS if spec.gives_largest else None,
    )
    # Rows beyond a query length are results too: 0 and -inf.
    rows = layout.rows_at("t", where["t"].start)

    def finish(state):
        o, lse = flash2.finish(state, spec.sink, launch.arithmetic)
        o = flash2.scaled(o, spec.dropout_scale) if spec.dropout else o
        return [o, lse, *([state.largest] if spec.gives_largest else [])]

    def store(values, kept=None):
        place = {**where, "t": dataclasses.replace(rows, kept=kept)}
        for view, value in zip(outputs, values, strict=True):
            view.store(value, place)

    def by_steps(blocks):
        return blocks.all_edges().fold_edges(visit, nothing)

    # Triton takes a loop apart that it knows to have one round, and gives each of its
    # copies shared memory.
    one = support.unforeseen_one(rows.start, launch.interpret)
    if layout.part is not None:

        def result(blocks):
            return finish(by_steps(blocks))

        o, lse, *largest = of_parts(kv_blocks, layout, one, result, nothing)
        store([*parts.joined(o, lse, whole.sink), *largest])
        return
    kv_blocks = kv_blocks.with_an_edge(one)
    if layout.visits_few or spec.wants_steps(q.dtype):
        kv_blocks = kv_blocks.all_edges()
    state = kv_blocks.fold_full(visit, kv_blocks.fold_edges(visit, nothing))
    if kv_blocks.any_full is False:
        store(finish(state))
        return
    good = flash2.in_range(state, q.dtype) | (rows.numbers >= layout.size["t"])
    lost = kv_blocks.any_full & (jnp.max(jnp.where(good, 0, 1)) > 0)
    # A row has the bits of its own state, whatever the others of its block are.
    store(finish(state), good | ~lost)
    pl.when(lost)(lambda: store(finish(by_steps(kv_blocks)), ~good))


def _layout(operands: list[Named], launch: Launch) -> memory.BlockGrid:
    """The grid of a call, with the head axes that are loaded in pairs."""
    q, k, v, *_ = operands
    packed: dict[str, int] = {}
    for x in (k, v):
        name = in_pairs(x.axes[-1]) or x.axes[-1]
        if name in ("h", "d"):
            packed[name] = turns(x.dtype, x.shape[-1], q.dtype)
    if any(map(first_of, v.axes)):  # values are pieces of keys
        packed = {}
    packed = {name: count for name, count in packed.items() if count > 1}
    return memory.BlockGrid.of("forward", operands, launch, packed=packed)


def _are_first_pieces(v: Named, layout: memory.BlockGrid) -> bool:
    """Whether values are elements of keys that are loaded as pieces of their own."""
    if not any(map(first_of, v.axes)):
        return False
    own = layout.pieces["d"]
    return layout.size["d"] == sum(own) and layout.pieces["h"][: len(own)] == own


def _product(pairs: Pairs, dtype, v_block: Block, p: jax.Array) -> Block:
    """What a block of probabilities adds to the output."""
    p, v_block = pairs.left(p).astype(dtype), pairs.widened(v_block, dtype)
    return flash2.times(p, v_block, pairs.precision)
