"""The axes of a call of `attention`, as digits of a product's axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax.numpy as jnp

from jax_flash2._flashify.digits import (
    Digit,
    Dim,
    Layout,
    refined,
    reshaped,
)
from jax_flash2._flashify.facts import DEPTH, VALUE, Lost, Operand, Product
from jax_flash2._flashify.graph import COPIES, Node


@dataclasses.dataclass(frozen=True)
class Axes:
    """The digits that each axis of a call is made of.

    query is [*batch, rows, heads and group, depth], key [*batch, keys, heads, depth],
    value [*batch, keys, heads, width].
    """

    batch: tuple[Digit, ...]
    rows: Dim
    keys: Dim
    heads: Dim
    group: Dim
    depth: Dim
    width: Dim

    @property
    def of_batch(self) -> list[Dim]:
        return [(x,) for x in self.batch]

    @property
    def pairs(self) -> list[Dim]:
        """[*batch, query heads, rows, keys], the axes of a bias and a mask."""
        return [*self.of_batch, self.heads + self.group, self.rows, self.keys]


class Cuts:
    """Cuts digits so that those of all operands are the same or apart."""

    def __init__(self, operands: Iterable[Layout]):
        # Where digits begin and end, by their axes.
        self._places: dict[int, set[int]] = {}
        for x in {x for layout in operands for dim in layout for x in dim}:
            ends = x.stride, x.stride * x.size
            self._places.setdefault(x.axis, set()).update(ends)

    def dim(self, dim: Iterable[Digit]) -> Dim:
        found = refined(dim, self._places)
        if found is None:
            raise Lost("axes are divided in ways that do not fit together")
        return found

    def operand(self, operand: Operand) -> Operand:
        return Operand(operand.value, tuple(map(self.dim, operand.layout)))


def seen_through(operand: Operand, *, widened: bool = True) -> Operand:
    """An operand before it was repeated, and before its 16-bit numbers were float32.

    Args:
      widened: whether to look for such numbers.
    """
    value, layout = operand.value, operand.layout
    found = Operand(value, layout)
    while True:
        value = value.origin
        node = value.node
        step = None if node is None else _before(node, layout, widened)
        if step is None:
            return found
        value, layout, is_smaller = step
        if is_smaller:
            found = Operand(value, layout)


_SEEN_THROUGH = {
    *("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "tile"),
    *(*COPIES, "convert_element_type"),
}


def is_seen_through(node: Node) -> bool:
    """Whether `seen_through` may look at what is before a node."""
    return node.name in _SEEN_THROUGH


def _before(node: Node, layout: Layout, widened: bool) -> tuple | None:
    """(operand of a node, its layout, whether it is smaller), if it can be told."""
    if not is_seen_through(node):
        return None
    value, params = node.inputs[0], node.params
    old, new = value.shape, node.shape
    if node.name == "transpose":
        places = params["permutation"]
        return value, tuple(layout[places.index(i)] for i in range(len(old))), False
    if node.name in ("reshape", "squeeze", "expand_dims"):
        found = reshaped(layout, old)
        return None if found is None else (value, found, False)
    if node.name == "broadcast_in_dim":
        places = params["broadcast_dimensions"]
        pairs = zip(places, old, strict=True)
        found = tuple(layout[to] if size == new[to] else () for to, size in pairs)
        return value, found, value.aval.size < node.aval.size
    if node.name == "tile":
        return _before_tile(value, layout, params["reps"])
    if node.name != "convert_element_type":
        return value, layout, False
    is_wider = value.aval.dtype.itemsize < node.aval.dtype.itemsize
    if widened and is_wider and jnp.issubdtype(value.aval.dtype, jnp.floating):
        return value, layout, True
    return None


def _before_tile(value, layout: Layout, reps) -> tuple | None:
    found = []
    for dim, size, count in zip(layout, value.shape, reps, strict=True):
        parts = reshaped((dim,), (count, size))
        if parts is None:
            return None
        found.append(parts[1])
    return value, tuple(found), True


def axes_of(
    product: Product,
    side: int,
    operands: list[Operand],
    keys: Dim,
    rows_axis: int | None,
    cuts: Cuts,
) -> Axes:
    """Which digits are batch, rows and heads.

    Args:
      side: of queries in the product.
      operands: query, key, value.
      keys: the digits of keys.
      rows_axis: the axis of rows, where a mask says it; else the longest is.
    """
    query, key, value = ([*x.digits()] for x in operands)
    shape = product.node.shape
    own = [i for i in product.free_axes(side) if shape[i] > 1]
    several_keys = len({x.axis for x in keys}) > 1
    if rows_axis is not None:
        rows_of = [rows_axis]
    elif several_keys:
        rows_of = own
    else:
        rows_of = sorted(own, key=lambda i: -shape[i])[:1]
    of_keys = {x for x in (*key, *value) if x.axis < DEPTH} - {*keys}
    if any(x.axis in rows_of for x in of_keys):
        raise Lost("keys or values differ from query to query")
    every = [x for i, size in enumerate(shape) if size > 1 for x in _cut(cuts, i, size)]
    rows = tuple(x for x in every if x.axis in rows_of)
    shared = [x for x in every if x in of_keys]
    group = tuple(x for x in every if x not in (*rows, *keys, *shared))
    heads = tuple(x for x in shared[-1:])
    depth = tuple(x for x in query if DEPTH <= x.axis < VALUE)
    if sorted(depth) != sorted(x for x in key if DEPTH <= x.axis < VALUE):
        raise Lost("queries and keys are constant along what is contracted")
    width = tuple(x for x in value if x.axis >= VALUE)
    return Axes(tuple(shared[:-1]), rows, keys, heads, group, depth, width)


def _cut(cuts: Cuts, axis: int, size: int) -> Dim:
    return cuts.dim((Digit(axis, 1, size),))
