"""Attention of quantised operands: those that have eight bits, or get them here.

There are no derivatives.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash2 import _sharding, _vjp
from jax_flash2._operation import Problem, forward_outputs, is_differentiable
from pallas_kernels.backend import Call
from pallas_kernels.core import quantise
from pallas_kernels.core.axes import Axes, Heads, Named
from pallas_kernels.core.promotion import own_rules
from pallas_kernels.core.quantise import Quantised

_NO_GRADIENT = (
    "attention in 8 bits (precision='fp8', or quantised operands) has no derivatives: "
    "call jax_flash2.attention without precision='fp8' and with operands that are not "
    "quantised, or multiplied by their scales, which has; or apply "
    "jax.lax.stop_gradient to the operands"
)


def run(call: Call, implementation: str | None) -> tuple[jax.Array, ...]:
    """What `_vjp.run` gives, of a call in eight bits.

    Args:
      call: with operands of eight bits, or with none: all of these are quantised.
      implementation: as for `attention`.

    Raises:
      TypeError: if JAX asks for a derivative.
      ValueError: if rows are divided over devices.
    """
    division = _sharding.explicit_division(call.operands, call.argument, rows=True)
    if division is not None and "t" in division.along:
        raise ValueError(
            "rows must not be divided over devices with precision='fp8' or quantised "
            f"operands, got query sharded along {division.along['t']}"
        )
    call = _without_derivatives(call)
    if _is_narrow(call):
        return _vjp.run(call, implementation)
    found = quantised(call)
    narrow = in_eight_bits(call, found)
    results = _vjp.run(narrow, implementation)
    structs = forward_outputs(Problem.of(narrow, ""), narrow.operands)
    named = [Named(x, y.axes) for x, y in zip(results, structs, strict=True)]
    return _completed(call, found, *named)


def _is_narrow(call: Call) -> bool:
    """Whether there is nothing to quantise: it has eight bits, or no query."""
    return call.reads_bytes or not call.query.value.size


def in_eight_bits(call: Call, found: Quantised | None = None) -> Call:
    """The call that the kernels get.

    Args:
      call: as of `run`.
      found: its operands in eight bits, if they are at hand.
    """
    if _is_narrow(call):
        return call
    x = quantised(call) if found is None else found
    return Call(x.query, x.key, x.value, x.spec, call.config)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Boxed:
    """A `Named` as a node of a tree of arrays."""

    value: Any
    axes: Axes = dataclasses.field(metadata={"static": True})


def _boxed(tree):
    return jax.tree.map(lambda x: _Boxed(x.value, x.axes), tree)


def _named(tree):
    def is_box(x) -> bool:
        return isinstance(x, _Boxed)

    return jax.tree.map(lambda x: Named(x.value, x.axes), tree, is_leaf=is_box)


def quantised(call: Call) -> Quantised:
    """The operands of a call in eight bits (`core.quantise.quantised`)."""
    parts = _quantise(_boxed((call.query, call.key, call.value, call.spec)))
    return Quantised(*_named(parts))


@jax.jit
def _quantise(parts):
    with own_rules():
        found = quantise.quantised(*_named(parts))
    fields = (getattr(found, x.name) for x in dataclasses.fields(found))
    return _boxed(tuple(fields))


def _completed(call: Call, found: Quantised, o: Named, *of_rows: Named):
    """Results with what the operands in eight bits lack, in the dtype of query.

    Args:
      call: as it was given.
      found: its operands in eight bits.
      o, of_rows: the results of these.
    """
    heads, value = Heads.of(call.size), o.value
    if found.to_output is not None:
        mean = _with_groups(found.to_output, heads, call.size)
        has_keys = of_rows[0].to(o.axes) > -jnp.inf
        wide = value.astype(jnp.float32) + mean.to(o.axes)
        value = jnp.where(has_keys, wide, 0.0)
    rows = [x.value for x in of_rows]
    if found.to_lse is not None:
        rows = [x.value + found.to_lse.to(x.axes) for x in of_rows]
    return value.astype(call.dtype), *rows


def _with_groups(x: Named, heads: Heads, size) -> Named:
    """What key/value heads have one of, for each query head."""
    if not heads.names:
        return x
    own = (*(a for a in x.axes if a not in ("k", "d")), *heads.names, "d")
    shape = [{**size, "g": heads.group}[a] for a in own]
    return heads.merge(Named(jnp.broadcast_to(x.to(own), shape), own))


def _without_derivatives(call: Call) -> Call:
    """The same call, of which JAX can ask no derivative."""
    leaves, tree = jax.tree.flatten(call)
    floats = [i for i, x in enumerate(leaves) if is_differentiable(x)]
    constant = _constant(tuple(leaves[i].value for i in floats))
    for i, value in zip(floats, constant, strict=True):
        leaves[i] = Named(value, leaves[i].axes)
    return tree.unflatten(leaves)


@jax.custom_jvp
def _constant(arrays: tuple) -> tuple:
    return arrays


@_constant.defjvp
def _no_tangents(primals, tangents):
    del primals, tangents
    raise TypeError(_NO_GRADIENT)
