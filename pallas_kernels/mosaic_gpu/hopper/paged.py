"""Keys in pages, for many queries: copied into rows first.

These kernels copy tiles of rows that lie side by side. A prompt reads each key for
thousands of rows of queries, beside which a copy of its keys is little: 3 % of the time
of 8,192 queries of four heads each (benchmarks/lab/128). Pages of elements of one byte
are for the Triton kernels, which widen them in registers.
"""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.backend import Call
from pallas_kernels.core import gather
from pallas_kernels.core.axes import Named
from pallas_kernels.mosaic_gpu import measured


def slower(call: Call) -> str | None:
    """Why the next backend, which reads pages where they are, is faster, or None.

    A copy has as many rows as a table has room for, and takes memory for them.
    """
    numbers, size = measured.here().numbers, call.size
    rows = size["t"] * call.group
    if rows < numbers.fewest_rows_beside_pages:
        return (
            f"keys in pages are copied into rows first, and {rows} query rows are few"
        )
    if size["s"] > numbers.most_room_of_pages * size["t"]:
        return (
            "keys in pages are copied into rows first: a table has room for "
            f"{size['s']} of them, beside {size['t']} queries"
        )
    return None


def in_order(call: Call) -> Call:
    """The same call of rows in order; rows that no query looks at are 0.

    Args:
      call: of `Named` arrays, with pages.
    """
    operands = call.key, call.value
    spec, (key, value) = gather.whole(call.spec, operands, call.size, call.dtype)
    return dataclasses.replace(call, key=key, value=value, spec=spec)


def structs_in_order(call: Call) -> Call:
    """`in_order`, of shape structs."""
    leaves, tree = jax.tree.flatten(call)
    made: list[Call] = []

    def run(*arrays):
        named = (Named(x, own.axes) for x, own in zip(arrays, leaves, strict=True))
        made.append(in_order(tree.unflatten(named)))
        return [x.value for x in made[-1].operands]

    structs = jax.eval_shape(run, *(x.value for x in leaves))
    own, tree = jax.tree.flatten(made[-1])
    pairs = zip(structs, own, strict=True)
    return tree.unflatten([Named(x, named.axes) for x, named in pairs])
