"""Puts the parts of an output together: one program for each few rows.

The parts are float32 and of few rows, so this is a matter of launches and of waiting
for memory: XLA makes four kernels of the same formula, one after the other.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import layout
from pallas_kernels.configs import Blocks
from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Named
from pallas_kernels.layout import Rows
from pallas_kernels.tables import padded
from pallas_kernels.triton import support
from pallas_kernels.triton.memory import View

# Parts that a program takes in at once; if there are more, then in turns.
_PARTS = 64
# Elements of its tile, about: with four warps, 64 registers of a thread.
_ELEMENTS = 64 * 128
_MOST_ROWS = 16


def merged(
    o: Named,
    lse: Named,
    sink: Named | None,
    outputs: tuple[Named, Named],
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of whole rows (`flash2.merge`).

    Args:
      o, lse: float32, of parts of the keys (axis `z` among others).
      sink: one that no part took in.
      outputs: shape structs of the results.
      interpret: as for the kernel that made the parts.
    """
    # In the kernel all rows are one axis, `t`, and parts are `s`, as if they were keys.
    of_rows = tuple(a for a in o.axes if a not in ("z", "d"))
    size = dict(zip(o.axes, o.shape, strict=True))
    parts, d, shape = size["z"], size["d"], tuple(size[a] for a in of_rows)
    count = math.prod(shape)
    inputs = [
        o.to(("z", *of_rows, "d")).reshape(parts, count, d),
        lse.to(("z", *of_rows)).reshape(parts, count),
    ]
    axes = [("s", "t", "d"), ("s", "t")]
    if sink is not None:
        joint = jnp.broadcast_to(sink.to(of_rows), shape)
        inputs, axes = [*inputs, joint.reshape(count)], [*axes, ("t",)]
    most = min(_PARTS, _ELEMENTS // padded(d))
    together = min(1 << (parts - 1).bit_length(), most)
    rows = min(_MOST_ROWS, _ELEMENTS // (together * padded(d)))
    axes = [*axes, ("t", "d"), ("t",)]
    results = [
        jax.ShapeDtypeStruct((count, d)[:n], x.dtype)
        for n, x in zip((2, 1), outputs, strict=True)
    ]
    # Programs see whole arrays, up to the end of their last tiles.
    turns, programs = -(-parts // together), -(-count // rows)
    seen = {"s": turns * together, "t": programs * rows, "d": padded(d)}
    specs = [
        pl.BlockSpec([seen[a] for a in own], functools.partial(_whole, len(own)))
        for own in axes
    ]

    def body(*refs):
        pairs = zip(refs, axes, strict=True)
        *given, of_o, of_lse = (View(*pair, interpret) for pair in pairs)
        where = {
            "t": Rows(pl.program_id(0) * rows, rows, count),
            "d": Rows.whole(d),
        }

        def take(i, state):
            here = {**where, "s": Rows(i * together, together, parts)}
            logs = given[1].load(("s", "t"), here, padding=-math.inf)
            found = (
                flash2.merge(x, logs) for x in given[0].load(("s", "t", "d"), here)
            )
            tiles, logs = zip(*found, strict=True)
            return merge(zip(state[0], tiles, strict=True), (state[1], logs[0]))

        def merge(tiles, logs, sink=None):
            found = [flash2.merge(x, logs, sink) for x in tiles]
            return tuple(x for x, _ in found), found[0][1]

        nothing = (
            tuple(jnp.zeros((rows, x.size), jnp.float32) for x in where["d"]),
            jnp.full((rows,), -jnp.inf, jnp.float32),
        )
        tiles, log = lax.fori_loop(jnp.int32(0), jnp.int32(turns), take, nothing)
        if sink is not None:
            joint = given[2].load(("t",), where).astype(jnp.float32)
            tiles, log = merge(((x,) for x in tiles), (log,), joint)
        of_o.store(tiles, where)
        of_lse.store(log, where)

    body.__name__ = body.__qualname__ = "flash2_merge"
    found = support.pallas_call(
        body,
        grid=(programs,),
        in_specs=specs[:-2],
        out_specs=specs[-2:],
        out_shape=[layout.varying_like(x, inputs[0]) for x in results],
        blocks=Blocks(16, 16, num_warps=4, num_stages=1),
        interpret=interpret,
        name="flash2_merge",
    )(*inputs)
    results = zip(found, ((*of_rows, "d"), of_rows), outputs, strict=True)
    whole_o, whole_lse = (
        Named(x.reshape([*shape, *x.shape[1:]]), own).to(out.axes)
        for x, own, out in results
    )
    return whole_o, whole_lse


def _whole(axes: int, _) -> tuple[int, ...]:
    """Of an array that every program sees, the only block."""
    return (0,) * axes
