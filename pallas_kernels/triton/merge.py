"""Puts the parts of an output together: one program for each few rows.

The parts are float32 and of few rows, so this is a matter of launches and of waiting
for memory: XLA makes four kernels of the same formula, one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import division
from pallas_kernels.configs import Blocks
from pallas_kernels.core import flash2, parts
from pallas_kernels.core.axes import Named
from pallas_kernels.core.lists import Visited
from pallas_kernels.core.ranges import Range, divide, everything, loop
from pallas_kernels.layout import Layout, Rows
from pallas_kernels.tables import padded
from pallas_kernels.triton import support
from pallas_kernels.triton.memory import View

# Parts that a program takes in at once; if there are more, then in turns.
_PARTS = 64
# Elements of its tile, at most: with four warps, 64 registers of a thread. It has one
# row, or as many as make so many elements: more programs then wait for memory at once
# (benchmarks/lab/127).
_ELEMENTS, _ROWS_ELEMENTS = 64 * 128, 16 * 128
_MOST_ROWS = 16


def merged(
    o: Named,
    lse: Named,
    sink: Named | None,
    outputs: Sequence[Named],
    *,
    in_order: bool = False,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of whole rows (`flash2.merge`).

    Args:
      o, lse: float32, of parts of the keys (axis `z` among others).
      sink: one that no part took in.
      outputs: shape structs of the results.
      in_order: whether parts are taken in one by one, as `of_parts` does: the number of
        parts, of which some may have met no key, then changes no bit.
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
    axes = [*axes, ("t", "d"), ("t",)]
    results = [
        jax.ShapeDtypeStruct((count, d)[:n], x.dtype)
        for n, x in zip((2, 1), outputs, strict=True)
    ]
    tiles = _Tiles(count, parts, d, 1 if in_order else _PARTS)
    specs = [
        pl.BlockSpec([tiles.seen[a] for a in own], functools.partial(_whole, len(own)))
        for own in axes
    ]

    def body(*refs):
        pairs = zip(refs, axes, strict=True)
        _merge(tiles, *(View(*pair, interpret) for pair in pairs))

    body.__name__ = body.__qualname__ = "flash2_merge"
    found = support.pallas_call(
        body,
        grid=(tiles.programs,),
        in_specs=specs[:-2],
        out_specs=specs[-2:],
        out_shape=[division.varying_like(x, inputs[0]) for x in results],
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


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """How the rows and their parts are cut.

    Attributes:
      count: rows.
      parts: of each row.
      d: head size of the values.
      most: parts that a program may take in at once.
    """

    count: int
    parts: int
    d: int
    most: int = _PARTS

    @property
    def together(self) -> int:
        """Parts that a program takes in at once."""
        most = min(self.most, _ELEMENTS // padded(self.d))
        return min(1 << (self.parts - 1).bit_length(), most)

    @property
    def rows(self) -> int:
        """Rows of a program."""
        row = self.together * padded(self.d)
        return min(_MOST_ROWS, max(1, _ROWS_ELEMENTS // row))

    @property
    def turns(self) -> int:
        return -(-self.parts // self.together)

    @property
    def programs(self) -> int:
        return -(-self.count // self.rows)

    @property
    def seen(self) -> dict[str, int]:
        """Sizes of arrays that programs see: whole, up to the end of their tiles."""
        s, t = self.turns * self.together, self.programs * self.rows
        return {"s": s, "t": t, "d": padded(self.d)}


def _merge(tiles: _Tiles, o: View, lse: View, *rest: View) -> None:
    """The kernel's body: the rows of one program."""
    *sink, of_o, of_lse = rest
    start = pl.program_id(0) * tiles.rows
    where = {"t": Rows(start, tiles.rows, tiles.count), "d": Rows.whole(tiles.d)}

    def take(i, state):
        here = {**where, "s": Rows(i * tiles.together, tiles.together, tiles.parts)}
        logs = lse.load(("s", "t"), here, padding=-math.inf)
        found = (flash2.merge(x, logs) for x in o.load(("s", "t", "d"), here))
        pieces, logs = zip(*found, strict=True)
        return parts.merged([state[0], pieces], [state[1], logs[0]])

    nothing = (
        tuple(jnp.zeros((tiles.rows, x.size), jnp.float32) for x in where["d"]),
        jnp.full((tiles.rows,), -jnp.inf, jnp.float32),
    )
    pieces, log = lax.fori_loop(jnp.int32(0), jnp.int32(tiles.turns), take, nothing)
    if sink:
        pieces, log = parts.joined(pieces, log, sink[0].load(("t",), where))
    of_o.store(pieces, where)
    of_lse.store(log, where)


def of_parts(
    blocks: Visited,
    layout: Layout,
    one: jax.Array,
    result: Callable[[Range], list],
    nothing: flash2.State,
) -> list:
    """The results of a program whose keys are in parts at fixed places.

    They are put together from the first part on. If the program has one part alone, as
    each has where `layout.parts` divide them, it is that part's.

    Args:
      blocks: of keys that the program visits.
      layout: with a `part`.
      one: a traced 1, so that no loop is known to have one round.
      result: of the blocks of a part: output, log-sum-exp, and the largest scores if
        the kernel gives them.
      nothing: the state before any key.
    """
    size, count = layout.part, layout.part_count
    assert size is not None and isinstance(blocks, Range)

    def take(number, values):
        here = result(blocks & everything(number * size, (number + 1) * size))
        (o, lse, *largest), (new_o, new_lse, *new) = values, here
        o, lse = parts.merged([o, new_o], [lse, new_lse])
        return [o, lse, *map(jnp.maximum, largest, new)]

    if count == 1 or "z" in layout.parts:
        return result(blocks & everything(0, count * size * one))
    first = divide(blocks.need_lo * one, size)
    end = divide(blocks.need_hi * one + size - 1, size)
    largest = [] if nothing.top is None else [nothing.m]
    return loop(first, end, take, [nothing.acc, nothing.m, *largest])


def _whole(axes: int, _) -> tuple[int, ...]:
    """Of an array that every program sees, the only block."""
    return (0,) * axes
