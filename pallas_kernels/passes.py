"""The passes of a backend with kernels: their order, and what each is given.

Of the backward's, `dq` runs first. It also writes delta and the log-sum-exp in units of
log2 for the others, which would otherwise compute them for every block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from pallas_kernels import division
from pallas_kernels.backend import Call
from pallas_kernels.core import clear, flash2
from pallas_kernels.core.axes import (
    Axes,
    Named,
    batch_axes,
    is_numbered,
    operand_sum,
    sizes,
    summed_to,
)
from pallas_kernels.core.pointwise import tables
from pallas_kernels.core.spec import AttentionSpec, sink_gradient
from pallas_kernels.tables import FEW_ROWS


def forward(
    run: Callable, call: Call, outputs: tuple[Named, ...]
) -> tuple[jax.Array, ...]:
    """The results of `backend.Backend.forward`.

    Args:
      run: as for `backward`; "forward" gets what is left of this function's arguments.
    """
    q, k, v = call.query, call.key, call.value
    spec, v = _without_dropped(q, call.spec, v)
    packing = division.Packing.of(q, k, spec)
    if packing is None:
        return run("forward", "s", q, k, v, spec, outputs)
    operands = map(packing.array, (q, k, v))
    structs = tuple(map(packing.struct, outputs))
    found = run("forward", "s", *operands, packing.spec(spec), structs)
    pairs = zip(found, structs, outputs, strict=True)
    return tuple(packing.unpacked(Named(x, s.axes), out.axes) for x, s, out in pairs)


def backward(
    run: Callable,
    call: Call,
    saved: tuple[Named, Named, Named, Named],
    wanted: Mapping[str, Named],
    *,
    dk_and_dv_apart: bool,
) -> dict[str, jax.Array]:
    """Gradients of a call's operands (`backend.Backend.backward`).

    Args:
      run: `run(kernel, looped, q, k, v, spec, saved, outputs, **options)` runs a kernel
        of `configs.KERNELS` whose programs loop over blocks of keys (`looped` "s") or
        of queries ("t"), and returns its results. "dq" gets all of `saved` and writes
        dq, delta and lse_log2; the others get (lse_log2, delta, do). "dbias" also gets
        the name of the score's operand and the axes to sum over, `field` and `summed`.
        So does "ddistance", with blocks of "dbias", for an operand that is read at
        distances; its result also has axes of the diagonals of tiles, and of the sums
        along the diagonals of these tiles (`tables.of_tiles`).
      dk_and_dv_apart: whether one kernel for both would not fit the registers.
    """
    q, sink = call.query, call.spec.sink
    spec = dataclasses.replace(call.spec, sink=None)
    spec, k, v = _without_dropped(q, spec, call.key, call.value)
    o, lse, do, dlse = saved
    q, do = (clear.masked_rows(spec, x, lse) for x in (q, do))
    saved, gradients = (o, lse, do, dlse), {}
    if "query" in wanted:
        rows = _row_struct([q, k, v, *jax.tree.leaves(spec), *saved], lse)
        outputs = wanted["query"], rows, rows
        dq, *of_rows = run("dq", "s", q, k, v, spec, saved, outputs)
        delta, lse_log2 = (Named(x, rows.axes) for x in of_rows)
        gradients["query"] = dq
    else:
        lse_log2 = Named(flash2.lse_log2(lse.value), lse.axes)
        delta = delta_of(o, lse, do, dlse)
    saved_rows = (lse_log2, delta, do)
    if "key" in wanted:
        of_keys = {"dk": wanted["key"], "dv": wanted["value"]}
        kernels = {name: {name: out} for name, out in of_keys.items()}
        if not dk_and_dv_apart:
            kernels = {"dkv": of_keys}
        found = []
        for name, out in kernels.items():
            found += run(name, "t", q, k, v, spec, saved_rows, out)
        gradients["key"], gradients["value"] = found
    for name in spec.score.operands:
        if name in wanted:
            out = wanted[name]
            gradients[name] = score_operand(run, q, k, v, spec, saved_rows, out, name)
    if "sink" in wanted:
        gradients["sink"] = of_sink(sink, lse, delta, wanted["sink"])
    return gradients


def tangent(
    run: Callable,
    call: Call,
    saved: tuple[Named, Named],
    tangents: Mapping[str, Named],
    outputs: tuple[Named, Named],
) -> tuple[jax.Array, ...]:
    """The results of `backend.Backend.tangent`.

    Args:
      run: as for `backward`; "tangent" gets what is left of this function's arguments.
    """
    q, of_keys = call.query, [x for x in ("key", "value") if x in tangents]
    rows = (call.key, call.value, *(tangents[name] for name in of_keys))
    spec, k, v, *along = _without_dropped(q, call.spec, *rows)
    tangents = {**tangents, **dict(zip(of_keys, along, strict=True))}
    return run("tangent", "s", q, k, v, spec, saved, tangents, outputs)


def of_sink(sink: Named, lse: Named, delta: Named, out: Named) -> jax.Array:
    """The gradient `out` of the sinks."""
    gradient = sink_gradient(sink, lse, delta)
    return summed_to(gradient, out.axes).astype(out.dtype)


def delta_of(o: Named, lse: Named, do: Named, dlse: Named) -> Named:
    """`flash2.delta` of whole arrays, for kernels that do not make it themselves."""
    operands = [x.squeezed() for x in (o, lse, do, dlse)]
    batch = dict.fromkeys(a for x in operands for a in x.axes if a not in ("t", "d"))
    rows = (*batch, "t")
    o, lse, do, dlse = operands
    of_o, of_do = (x.to((*rows, "d")) for x in (o, do))
    found = flash2.delta(of_o, lse.to(rows), of_do, dlse.to(rows))
    shared = (n == 1 and a != "t" for a, n in zip(rows, found.shape, strict=True))
    axes = tuple(None if x else a for a, x in zip(rows, shared, strict=True))
    return Named(found, axes).squeezed()


def _without_dropped(q: Named, spec: AttentionSpec, *rows: Named) -> tuple:
    """The spec, and keys or values of which no dropped key reaches a product.

    Kernels can leave such keys out as they load a block, which costs nothing where few
    blocks hold any, or where loads of keys are all they wait for. With a mask of pairs
    every block would wait for it, at half the speed, so that here zeros are written
    first (NVIDIA H200, 2026-11-23: benchmarks/lab/063-masked-keys.md).
    """
    if spec.pages is not None:
        return spec, *rows  # only what is needed is read
    if spec.drops_pairs and sizes([q])["t"] > FEW_ROWS:
        return clear.scale_of_values(spec), *(clear.dropped_keys(spec, x) for x in rows)
    return spec.with_keys(sizes(rows)["s"]), *rows


def _row_struct(operands, lse: Named) -> Named:
    """Like lse, with every batch axis: any of o, do and dlse may be mapped alone."""
    size = sizes(operands)
    axes = (*(a for a in batch_axes(operands) if a not in lse.axes), *lse.axes)
    shape = [size[a] for a in axes if a is not None]
    return Named(jax.ShapeDtypeStruct(shape, lse.dtype), axes)


def axes_of_elements(operands) -> tuple[str, ...]:
    """The axes of batch and heads that a call's operands have."""
    heads = ("n",) if "n" in sizes(operands) else ()
    return (*batch_axes(operands), *heads)


def unmade_table(spec: AttentionSpec) -> str | None:
    """Why kernels do not make the gradient of a table of the score, or None."""
    rows = spec.query_rows, spec.key_rows
    follow = all(x.stripe is None and not _axes(x.first) for x in rows)
    for name, x in spec.score.operands.items():
        if any(map(is_numbered, x.axes)):
            if spec.score.zero(name) is None:
                return "a table is read at places that are no function of q - kv"
            if not follow:
                return "rows of distances do not follow one another"
    return None


def _axes(x: Named | None) -> Axes:
    return () if x is None else x.squeezed().axes


def _of_distances(run, q, k, v, spec, saved, out: Named, field: str) -> jax.Array:
    """The gradient of an array of distances: sums along the diagonals of all pairs.

    A program sums the tiles of a diagonal, and what lies along the diagonals of this
    sum; XLA adds up what two neighbours have of the same distance.
    """
    operands = [q, k, v, *jax.tree.leaves(spec), *saved]
    size, batch = sizes(operands), axes_of_elements(operands)
    lead = tuple(a for a in batch if a in out.axes)
    struct = jax.ShapeDtypeStruct([size[a] for a in lead], jnp.float32)
    summed = tuple(a for a in batch if a not in lead)
    options = {"field": field, "summed": summed}
    result = (Named(struct, lead),)
    (sums,) = run("ddistance", "s", q, k, v, spec, saved, result, **options)
    block = sums.shape[-1] // 2
    _, query, key = spec.positions
    # Of the last key of all blocks beside the first query.
    last = -(-size["s"] // block) * block - 1
    start = spec.score.zero(field) - last
    for rows, sign in ((query, 1), (key, -1)):
        if rows.first is not None:
            start += sign * rows.first.squeezed().value
    (whole,) = (str(a) for a in out.axes if is_numbered(a))
    found = tables.of_tiles(sums, jnp.int32(start), size[whole])
    return Named(found, (*lead, whole)).to(out.axes).astype(out.dtype)


def score_operand(run, q, k, v, spec, saved, out: Named, field: str) -> jax.Array:
    """The gradient `out` of a field of the score."""
    if spec.score.zero(field) is not None:
        return _of_distances(run, q, k, v, spec, saved, out, field)
    operands = [q, k, v, *jax.tree.leaves(spec), *saved]
    size, batch = sizes(operands), axes_of_elements(operands)
    rows, summed = operand_sum(out, batch)
    if len(rows) == 2:
        axes = tuple(a for a in out.axes if a is not None)
    else:
        axes = (*(a for a in batch if a not in summed), *rows)
    dtype = out.dtype if len(rows) == 2 else jnp.float32
    shape = [size[a] for a in axes if a is not None]
    result = Named(jax.ShapeDtypeStruct(shape, dtype), axes)
    looped = "t" if rows == ("s",) else "s"
    options = {"field": field, "summed": summed}
    (total,) = run("dbias", looped, q, k, v, spec, saved, (result,), **options)
    return summed_to(Named(total, axes), out.axes).astype(out.dtype)
