"""The backward kernels (Dao 2023, algorithm 2), split by what a program owns.

`dkv`: one program per block of key rows, grid (key blocks, key/value heads, batch
axes). It holds k and v, loops over the query heads of its group and over the blocks of
queries that look at its keys, and sums dk and dv in registers. Scores are computed
transposed, [keys, queries], so that p^T and ds^T are the left operands of their
products, which may come from registers. Where two sums do not fit the registers (large
heads), it runs once for each: five products instead of four.
Shared memory: k, v [block_kv, ...], if not kept in registers, and num_stages times q,
do [block_q, ...].

`dq`: one program per block of query rows, the forward's loop with dq as its sum.
Shared memory: q, do [block_q, ...], if not kept in registers, and num_stages times k,
v [block_kv, ...].

`dbias`: one program per tile of a bias's gradient, summed over whatever the bias was
broadcast over; XLA drops it from a program that does not use that gradient.
`ddistance`: the same for what is read at the distance of query and key; one program
per diagonal of tiles, whose sum is one tile.

Where programs would be too few, several share the work of one (`division`): its heads,
batch entries or blocks. Their sums are float32 and are added outside, in one order.

Two kernels instead of one with atomic additions to dq: seven products instead of five,
but the sums have one order, so that the same inputs give the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import division, program
from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Named, sizes, summed_to, whole_axis
from pallas_kernels.core.pointwise import tables
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.triton import memory
from pallas_kernels.triton.memory import Launch


def dkv(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named],
    outputs: dict[str, Named],
    *,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Gradients of key and value, or one of them.

    Args:
      q, k, v, spec, launch: as in the forward.
      saved: lse_log2 and delta (axis `t` among others), as `dq` gives them, and do
        (`t d`).
      outputs: shape structs by name, "dk" and "dv" or one of them.
    """
    operands = [q, k, v, *jax.tree.leaves(spec), *saved, *outputs.values()]
    layout = memory.BlockGrid.of("dkv", operands, launch)

    kernel = functools.partial(_dkv_kernel, launch, layout, tuple(outputs))
    name = "flash2_dkv" if len(outputs) == 2 else f"flash2_{next(iter(outputs))}"
    results = tuple(outputs.values())
    inputs = q, k, v, spec, saved
    found = memory.call(kernel, layout, inputs, results, name=name, launch=launch)
    return division.summed(found, results)


def _dkv_kernel(launch: Launch, layout, names, q, k, v, spec, saved, views):
    """One program of `dkv`, for the gradients of these names."""
    lse_log2, delta, do = saved
    spec, where = program.key_program(spec, layout)
    tiles = [k.load(("s", "h"), where)]
    if "dk" in names:
        tiles.append(v.load(("s", "d"), where))
    k_block, *v_block = launch.left(*tiles)

    def head(g, sums):
        head_spec, head_where, q_blocks = program.query_head(spec, where, layout, g)

        def visit(masked, i, sums):
            sums = dict(sums)
            here = program.visit_at(head_spec, head_where, layout, "t", i, masked)
            pairs = program.pairs(head_spec, here, ("s", "t"), masked, launch)
            q_block = q.load(("t", "h"), here)
            scores = pairs.scores(q_block, k_block)
            lse_block = lse_log2.load(("s", "t"), here, padding=flash2.PADDING_LSE)
            again = pairs.recompute(scores, lse_block)
            do_block = do.load(("t", "d"), here)
            # Before the product for dv, so that it runs beside the exponents.
            dp = pairs.product(do_block, *v_block) if "dk" in sums else None
            if "dv" in sums:
                dropped = again.dropped.astype(do.dtype)
                more = flash2.times(dropped, do_block, launch.precision)
                sums["dv"] = flash2.added(sums["dv"], more)
            if dp is not None:
                delta_block = delta.load(("s", "t"), here)
                dz = again.dz(dp, delta_block).astype(q.dtype)
                more = flash2.times(dz, q_block, launch.precision)
                sums["dk"] = flash2.added(sums["dk"], more)
            return sums

        return q_blocks.fold(visit, sums)

    rows = [launch.blocks.block_kv]
    sums = {
        name: flash2.zeros(rows, layout.pieces[axis], jnp.float32)
        for name, axis in (("dk", "h"), ("dv", "d"))
        if name in names
    }
    sums = _over(layout, where, head, sums)
    where["s"] = layout.rows_at("s", where["s"].start)
    unit = {"dk": spec.gradient_unit, "dv": spec.dropout_scale}
    for name, view in zip(names, views, strict=True):
        view.store(flash2.scaled(sums[name], unit[name]), where)


def _over(layout: memory.BlockGrid, where: program.Where, body: Callable, state):
    """Runs `state = body(element, state)` over the program's heads or batch entries."""
    if layout.elements == 1:
        return body(np.int32(0), state)
    return lax.fori_loop(*layout.own_elements(where), body, state)


def dq(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named, Named],
    outputs: tuple[Named, Named, Named],
    *,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Gradient of query, and what the other kernels need of each row.

    Args:
      q, k, v, spec, launch: as in the forward.
      saved: o and do (axes `t d` among others), lse and dlse (`t`): (o, lse, do, dlse).
      outputs: shape structs of dq, delta and lse_log2 (as lse).
    """
    operands = [q, k, v, *jax.tree.leaves(spec), *saved, *outputs]
    layout = memory.BlockGrid.of("dq", operands, launch)

    def kernel(q, k, v, spec, saved, outputs):
        o, lse, do, dlse = saved
        spec, where, kv_blocks = program.query_program(spec, layout)
        q_block = q.load(("t", "h"), where)
        do_block = do.load(("t", "d"), where)
        lse_block = lse.load(("t",), where)
        delta = flash2.delta(
            o.load(("t", "d"), where), lse_block, do_block, dlse.load(("t",), where)
        )
        lse_log2 = flash2.lse_log2(lse_block)
        q_block, do_block = launch.left(q_block, do_block)

        def visit(masked, j, dq):
            here = program.visit_at(spec, where, layout, "s", j, masked)
            pairs = program.pairs(spec, here, ("t", "s"), masked, launch)
            k_block = k.load(("s", "h"), here)
            v_block = v.load(("s", "d"), here)
            scores = pairs.scores(q_block, k_block)
            again = pairs.recompute(scores, pairs.along(lse_log2, "t"))
            dp = pairs.product(do_block, v_block)
            dz = again.dz(dp, pairs.along(delta, "t"))
            more = flash2.times(dz.astype(k.dtype), k_block, launch.precision)
            return flash2.added(dq, more)

        rows = [launch.blocks.block_q]
        dq = flash2.zeros(rows, layout.pieces["h"], jnp.float32)
        dq = flash2.scaled(kv_blocks.fold(visit, dq), spec.gradient_unit)
        where["t"] = layout.rows_at("t", where["t"].start)
        for view, value in zip(outputs, (dq, delta, lse_log2), strict=True):
            view.store(value, where)

    found = memory.call(
        kernel,
        layout,
        (q, k, v, spec, saved),
        outputs,
        name="flash2_dq",
        launch=launch,
        alike=(1, 2),
    )
    return division.summed(found, outputs)


def ddistance(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named],
    outputs: tuple[Named],
    *,
    field: str,
    summed: tuple[str, ...],
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Sums along the diagonals of each diagonal of tiles (`passes.backward`).

    One program per diagonal of tiles, which have as many queries as keys. It sums the
    tiles, and XLA along the diagonals of that.

    Args:
      q, k, v, spec, saved, field, summed, launch: as for `dbias`.
      outputs: the axes of batch and heads of the result, which also has those of the
        diagonals, and of a tile's queries and keys.
    """
    (lead,), block = outputs, launch.blocks.block_q
    count = program.number_of_diagonals(sizes([q, k]), block)
    tile = whole_axis(block)
    struct = jax.ShapeDtypeStruct((*lead.shape, count, block, block), jnp.float32)
    output = Named(struct, (*lead.axes, "e", tile, tile))
    operands = [q, k, v, *jax.tree.leaves(spec), *saved, output]
    launch = dataclasses.replace(launch, splits=1)
    layout = memory.BlockGrid.of("dbias", operands, launch, own=("e",), looped=summed)

    kernel = functools.partial(_ddistance_kernel, launch, layout, field)
    inputs, name = (q, k, v, spec, saved), "flash2_ddistance"
    found = memory.call(kernel, layout, inputs, (output,), name=name, launch=launch)
    (tiles,) = division.summed(found, (output,))
    sums = tables.diagonals(tiles)
    return (jnp.pad(sums, [*[(0, 0)] * (sums.ndim - 1), (0, 1)]),)


def _ddistance_kernel(launch: Launch, layout, field, q, k, v, spec, saved, outputs):
    """One program of `ddistance`."""
    spec, where, result, (first, end, after) = program.diagonal_program(spec, layout)
    arrays, own = (q, k, v, saved), ("t", "s")
    add = functools.partial(_add_element, launch, layout, own, field, arrays, spec)

    def add_tile(j, total):
        tile = {**where, "i": j + after, "j": j}
        return _over(layout, where, functools.partial(add, tile), total)

    total = jnp.zeros([layout.rows[a] for a in own], jnp.float32)
    total = lax.fori_loop(first, end, add_tile, total) * spec.dropout_scale
    outputs[0].store(total, result)


def dbias(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named],
    outputs: tuple[Named],
    *,
    field: str,
    summed: tuple[str, ...],
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Gradient of an operand of the score (bias, ALiBi's slopes, factor).

    One program per tile of the result, or per block of it where it lacks queries or
    keys; the batch entries and heads in `summed` are summed in its registers.

    Args:
      q, k, v, spec, launch: as in the forward.
      saved: as for `dkv`.
      outputs: the result: the operand's axes, or all of batch and heads and its rows.
      field: name of the operand among the fields of the score.
      summed: axes of batch and heads that the result lacks.
    """
    own = tuple(name for name in ("t", "s") if name in outputs[0].axes)
    operands = [q, k, v, *jax.tree.leaves(spec), *saved, *outputs]
    layout = memory.BlockGrid.of("dbias", operands, launch, own=own, looped=summed)

    kernel = functools.partial(_dbias_kernel, launch, layout, own, field)
    inputs, name = (q, k, v, spec, saved), f"flash2_d{field}"
    found = memory.call(kernel, layout, inputs, outputs, name=name, launch=launch)
    return division.summed(found, outputs)


def _dbias_kernel(
    launch: Launch, layout, own, field: str, q, k, v, spec, saved, outputs
):
    """One program of `dbias`, for an operand with these rows."""
    spec, where, result = program.tile_program(spec, layout)
    arrays = q, k, v, saved
    add = functools.partial(_add_element, launch, layout, own, field, arrays, spec)
    total = jnp.zeros([layout.rows[a] for a in own], jnp.float32)
    total = _over(layout, where, functools.partial(add, where), total)
    outputs[0].store(total * spec.dropout_scale, result)


def _add_element(launch: Launch, layout, own, field, arrays, spec, where, index, total):
    """Adds a head or batch entry of what is at `where` to its sum."""
    q, k, v, (lse_log2, delta, do) = arrays
    spec, here, name, visited = program.element(spec, where, layout, index)

    def visit(masked, block, total):
        at = program.visit_at(spec, here, layout, name, block, masked)
        pairs = program.pairs(spec, at, ("t", "s"), masked, launch)
        lse_block = lse_log2.load(("t", "s"), at, padding=flash2.PADDING_LSE)
        qk = pairs.product(q.load(("t", "h"), at), k.load(("s", "h"), at))
        again = pairs.recompute(pairs.scores_of(qk, q.dtype), lse_block)
        dp = pairs.product(do.load(("t", "d"), at), v.load(("s", "d"), at))
        pulled = again.pull(dp, delta.load(("t", "s"), at))
        more = Named(pulled.operand(field, qk), ("t", "s"))
        return total + summed_to(more, own)

    return visited.fold(visit, total)
