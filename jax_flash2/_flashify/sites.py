"""From what was found to a `Form`: what one call of `attention` takes, and gives."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_flash2._flashify.axes import Axes, Cuts, axes_of, seen_through
from jax_flash2._flashify.conditions import AtLeastZero
from jax_flash2._flashify.digits import Digit, Layout, size_of
from jax_flash2._flashify.facts import (
    Added,
    Cap,
    Fact,
    Lost,
    Mask,
    Operand,
    Scale,
    Step,
)
from jax_flash2._flashify.graph import Node, Value
from jax_flash2._flashify.masks import Masks, read_masks
from jax_flash2._flashify.match import Found
from pallas_kernels.core.promotion import at_least_float32, own_rules

_MOST_HEAD_SIZE = 512
_FLOATS = [*map(jnp.dtype, ("bfloat16", "float16", "float32", "float64"))]


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """What one call of `attention` is, whatever its arrays are.

    Values in it stand for arrays: those of the site where it was found.

    Attributes:
      aval: the type of the result, and `layout` its axes.
      query, key, value: arrays before heads are repeated and 16-bit numbers become
        float32.
      scale, cap: of the scores; then biases are added.
      dtype: in which attention computes.
      precision: of its products.
      bytes_saved: of scores and probabilities, which are written no longer.
    """

    aval: Any
    layout: Layout
    axes: Axes
    query: Operand
    key: Operand
    value: Operand
    scale: float
    cap: float | None
    biases: tuple[Added, ...]
    masks: Masks
    dtype: Any
    precision: Any
    bytes_saved: int

    @functools.cached_property
    def arrays(self) -> tuple[Value, ...]:
        """Its values, in an order of their own."""
        found = [self.query, self.key, self.value]
        found += [x.operand for x in self.biases]
        found += self.masks.operands()
        return tuple(dict.fromkeys(x.value for x in found))

    @functools.cached_property
    def identity(self) -> Any:
        """The same for forms that differ in their values alone."""
        return _numbered(self, {x: i for i, x in enumerate(self.arrays)})


def _numbered(x: Any, numbers: Mapping[Value, int]) -> Any:
    """A record with numbers instead of values."""
    if isinstance(x, Value):
        return numbers[x]
    if isinstance(x, tuple) and not isinstance(x, Digit):
        return tuple(_numbered(y, numbers) for y in x)
    if dataclasses.is_dataclass(x):
        names = (y.name for y in dataclasses.fields(x))
        return type(x), *(_numbered(getattr(x, y), numbers) for y in names)
    return x


class Site(NamedTuple):
    """Attention in a program: a form, and the arrays for its values.

    Attributes:
      root: the node whose result it is.
      product: of queries and keys.
      arrays: of the program, for `form.arrays`.
    """

    root: Node
    product: Node
    form: Form
    arrays: tuple[Value, ...]


def form_of(found: Found, narrowed: Any) -> Form:
    """The call that a found root is.

    Args:
      narrowed: the 16-bit type that all users convert the result to, or None.

    Raises:
      Lost: if there is no such call.
    """
    fact, product = found.fact, found.fact.product
    side = _side_of_keys(fact)
    operands = [seen_through(product.operand(x)) for x in (1 - side, side)]
    operands.append(seen_through(found.values))
    scale, cap, terms = _terms(fact)
    biases = [Added(seen_through(x.operand, widened=False), x.factor) for x in terms]
    layouts = [x.layout for x in (*operands, *(x.operand for x in biases))]
    masks = [x for x in fact.steps if isinstance(x, Mask)]
    layouts += [
        found.layout,
        tuple((x,) for x in fact.keys),
        *(x.layout for x in masks),
    ]
    cuts = Cuts(layouts)
    own = [cuts.operand(x) for x in operands]
    keys = cuts.dim(sorted(fact.keys, key=lambda x: (x.axis, -x.stride)))
    of_queries = {*product.free_axes(1 - side)}
    rows_axis = _axis_of_positions(masks, {x.axis for x in keys}, of_queries)
    axes = axes_of(product, 1 - side, own, keys, rows_axis, cuts)
    if max(map(size_of, (axes.depth, axes.width))) > _MOST_HEAD_SIZE:
        raise Lost(f"heads wider than {_MOST_HEAD_SIZE}, which no kernel takes")
    read = read_masks(fact, axes, cuts, (size_of(axes.rows), size_of(axes.keys)))
    if read.empty == "mean of scores" and cap is not None:
        raise Lost("an added mask after a soft cap, and rows that may have no keys")
    added = tuple(Added(cuts.operand(x.operand), x.factor) for x in biases)
    query, key, value = own
    written = product.node.aval, found.weights.aval
    return Form(
        found.root.aval,
        tuple(map(cuts.dim, found.layout)),
        axes,
        query,
        key,
        value,
        scale,
        cap,
        (*added, *read.biases),
        read,
        _dtype(found, own, narrowed),
        _precision(found),
        sum(x.size * x.dtype.itemsize for x in written),
    )


def _side_of_keys(fact: Fact) -> int:
    """Which operand of the product has the keys, all of it that the other has not."""
    axes = {x.axis for x in fact.keys}
    shape = fact.product.node.shape
    for side in (0, 1):
        own = {i for i in fact.product.free_axes(side) if shape[i] > 1}
        if axes <= own:
            if size_of(fact.keys) != math.prod(shape[i] for i in axes):
                raise Lost("a softmax over part of an axis")
            if axes != own:
                raise Lost("keys that no softmax is over")
            return side
    raise Lost("a softmax over something else than keys")


def _terms(fact: Fact) -> tuple[float, float | None, list[Added]]:
    """Scale, soft cap and biases of the steps, in the order of `attention`."""
    steps = [x for x in fact.steps if not isinstance(x, Mask)]
    caps = [i for i, x in enumerate(steps) if isinstance(x, Cap)]
    if caps:
        before, after = steps[: caps[0]], steps[caps[0] + 1 :]
        if any(isinstance(x, Added) for x in after):
            raise Lost("a bias after a soft cap")
        cap = _factor_of(after)
        if not cap > 0:
            raise Lost("a soft cap that is not positive")
        return _factor_of(before) * cap, cap, []
    biases = [
        Added(x.operand, x.factor * _factor_of(steps[i:]))
        for i, x in enumerate(steps)
        if isinstance(x, Added)
    ]
    return _factor_of(steps), None, biases


def _factor_of(steps: Sequence[Step]) -> float:
    return math.prod(x.factor for x in steps if isinstance(x, Scale))


def _axis_of_positions(
    masks: list[Mask], keys: set[int], queries: set[int]
) -> int | None:
    """The axis of queries whose positions a mask compares with those of keys.

    Other positions may be lengths: of two batch entries any are numbers in steps.
    """
    for mask in masks:
        for test in mask.condition.tests:
            if not isinstance(test, AtLeastZero):
                continue
            dims = [mask.layout[i] for i, _ in test.position.factors]
            axes = [{x.axis for x in dim} for dim in dims]
            others = [x for x in axes if not x & keys]
            if len(axes) == 2 and len(others) == 1 and len(others[0]) == 1:
                (axis,) = others[0]
                if axis in queries:
                    return axis
    return None


def _dtype(found: Found, operands: list[Operand], narrowed: Any) -> Any:
    """In which attention computes: no narrower than what the program computes in.

    Products of 16-bit numbers are exact in float32, so that what was converted before
    a product need not have been. Probabilities are rounded to this type.
    """
    own = {_wide(x.value.aval.dtype) for x in operands}
    weights = found.weights.aval.dtype
    if len(own) == 1:
        (one,) = own
        if one in (weights, narrowed) and one in _FLOATS:
            return one
    with own_rules():
        wide = jnp.result_type(weights, *own)
    wide = at_least_float32(wide) if len(own) > 1 else wide
    if wide not in _FLOATS:
        raise Lost(f"attention of {wide.name}")
    return wide


def _wide(dtype: Any) -> Any:
    """float32 instead of a type of 8 bits."""
    return dtype if dtype.itemsize > 1 else jnp.dtype(jnp.float32)


def _precision(found: Found) -> Any:
    """That of both products, if it is one; else the more exact one."""
    asked = []
    for node in (found.fact.product.node, found.product):
        x = node.params.get("precision")
        asked += list(x) if isinstance(x, tuple) else [x]
    asked = [x for x in asked if x is not None]
    plain = [x for x in asked if isinstance(x, lax.Precision)]
    if len(plain) < len(asked):
        return next(x for x in asked if not isinstance(x, lax.Precision))
    return max(plain, key=lambda x: x.value, default=None)
