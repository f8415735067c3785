"""Operands of eight bits: their scales, and how queries, keys and values get them.

A number is q * scale, with q in one byte. A call with such operands has no gradients.
A key's scale multiplies its scores (`Score.key_scale`), a value's its probabilities
(`AttentionSpec.value_scale`). Where queries have eight bits, too, products are made of
eight bits; their scale and that of keys are one number for each batch entry and query
head. Beside wider queries keys and values are converted block by block to their dtype,
and each row may have a scale of its own.

e4m3 rounds by up to 6 %, and a scale that an outlier decides leaves the others few
bits. Three things that a softmax does not see make numbers alike (`quantised`):

    rotation    (q R) . (k R) = q . k for an orthogonal R. A Hadamard matrix spreads an
                outlier over all elements of a head (Ashkboos 2024, QuaRot; Shah 2024,
                FlashAttention-3, section 3.3).
    mean key    s_ij - q_i . mean(k) moves whole rows (Zhang 2024, SageAttention).
    mean value  sum_j p_ij (v_j - mean(v)) + mean(v), as probabilities sum to 1. The
                tensor cores of Hopper also cut small summands of a large sum of
                products of eight bits: a mean in values loses a part of each (lab note
                107).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core import axes as axes_
from pallas_kernels.core import clear, nibbles
from pallas_kernels.core.axes import Heads, Named, sizes
from pallas_kernels.core.spec import AttentionSpec

FP8 = jnp.float8_e4m3fn
# What keys and values may be beside wider queries.
QUANTISED = (jnp.int8, FP8, jnp.float8_e5m2)
# What they may be in pages, by the dtype of these: int4 lies in bytes, two in each.
STORED = {jnp.dtype(x): jnp.dtype(x) for x in QUANTISED}
STORED |= {jnp.dtype(nibbles.BYTES): jnp.dtype(jnp.int4)}


def largest_of(dtype) -> float:
    """The largest number of a dtype of `STORED`."""
    integers = dtype in (jnp.int8, jnp.int4)
    return float((jnp.iinfo if integers else jnp.finfo)(dtype).max)


def narrowed(x: jax.Array, scale: jax.Array, dtype) -> jax.Array:
    """x over its scale, rounded to the dtype; what is too large is its largest.

    int4 comes in pairs (`nibbles.packed`).
    """
    x = x / jnp.where(scale == 0.0, 1.0, scale)
    x = jnp.clip(x, -largest_of(dtype), largest_of(dtype))
    if dtype == jnp.int4:
        return nibbles.packed(jnp.round(x).astype(jnp.int8))
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype)


def rotation(size: int) -> tuple[np.ndarray, float]:
    """A matrix R [size, size] of 0 and +-2**-e, and the factor of (q R) . (k R).

    factor * (q R) . (k R) = q . k. R is block-diagonal, of Hadamard matrices of the
    largest power of two that divides the size, whose rows have signs: those of the
    Rudin-Shapiro sequence, whose Walsh transform is flat, so that elements that are all
    alike are spread like single ones.
    """
    block = size & -size
    numbers = np.arange(block)
    signs = 1 - 2 * (_ones(numbers & (numbers >> 1)) & 1)
    hadamard = 1 - 2 * (_ones(numbers[:, None] & numbers) & 1)
    exponent = (block.bit_length() - 1) // 2
    part = signs[:, None] * hadamard * 2.0**-exponent
    matrix = np.kron(np.eye(size // block), part).astype(np.float32)
    return matrix, 4.0**exponent / block


def _ones(x: np.ndarray) -> np.ndarray:
    """How many bits of each number are set."""
    return np.sum([(x >> i) & 1 for i in range(16)], axis=0)


@dataclasses.dataclass(frozen=True)
class Quantised:
    """Operands in eight bits, and what results lack for it.

    Attributes:
      query, key, value: `Named`.
      spec: with the scales.
      to_lse: what is added to log-sum-exps and to largest scores, `Named`, with axis
        `t`; None for nothing.
      to_output: what is added to the output of rows that have keys, `Named`, with axes
        of key/value heads; or None.
    """

    query: Named
    key: Named
    value: Named
    spec: AttentionSpec
    to_lse: Named | None
    to_output: Named | None


def with_scales(
    spec: AttentionSpec,
    query: Named,
    key: Named,
    value: Named,
    *,
    group: int,
    factor: float = 1.0,
) -> AttentionSpec:
    """A spec with scales, `Named` with axes of batch and heads, some or none.

    Args:
      query, key, value: the scales of the operands, in float32.
      group: query heads of a key/value head.
      factor: of products of queries and keys.
    """
    query = query.split("n", "g", group).renamed("n", "k")
    names = dict.fromkeys(a for x in (query, key) for a in x.axes)
    heads = ("k", "g") if "k" in names else ()
    own = (*(a for a in names if a not in ("k", "g")), *heads)
    product = query.to(own) * key.to(own) * jnp.float32(factor)
    both = Named(product, own)
    if heads:
        product = jnp.broadcast_to(product, (*product.shape[:-1], group))
        both = Named(product, own).joined("k", "g").renamed("k", "n")
    score = dataclasses.replace(spec.score, key_scale=both)
    return dataclasses.replace(spec, score=score, value_scale=value)


def quantised(query: Named, key: Named, value: Named, spec: AttentionSpec) -> Quantised:
    """The operands of a call in eight bits, one scale for a head of a batch entry.

    What no query attends for its key alone (padding, a mask of keys) counts for no
    scale, and becomes 0. Keys that a causal mask or a window drops count.

    Args:
      query, key, value: `Named` arrays of two bytes an element.
      spec: of `Named` arrays.
    """
    query, key, value = (clear.unread(spec, x) for x in (query, key, value))
    matrix, factor = rotation(query.shape[query.axes.index("h")])
    q, k = (_rotated(x, matrix) for x in (query, key))
    is_additive = all(term.traits.is_additive for term in spec.score.terms)
    keys = _Rows.of(spec, k.shape[k.axes.index("s")])
    mean = keys.mean(k) if is_additive and spec.sink is None else None
    of_values = spec.sink is None and spec.dropout is None
    mean_value = keys.mean(value) if of_values else None
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (
        _narrow(q, None, None),
        _narrow(k, mean, keys),
        _narrow(value, mean_value, keys),
    )
    group = Heads.of(sizes([query, key])).group
    scales = q_scale, k_scale, v_scale
    own = with_scales(spec, *scales, group=group, factor=factor)
    to_lse = None if mean is None else _of_mean(q, mean, spec, factor)
    return Quantised(q8, k8, v8, own, to_lse, mean_value)


def _rotated(x: Named, matrix: np.ndarray) -> Named:
    """x R in bfloat16, of sums in float32."""
    last = x.axes.index("h")
    found = axes_.product(x.value, jnp.asarray(matrix, x.dtype), ((last,), (0,)))
    rest = tuple(a for a in x.axes if a != "h")
    return Named(found.astype(jnp.bfloat16), (*rest, "h")).ordered(x.axes)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Which keys count: `kept` is `Named` with axis `s`, None for all."""

    kept: Named | None
    count: int

    @classmethod
    def of(cls, spec: AttentionSpec, count: int) -> _Rows:
        ones = Named(jnp.ones(count, jnp.bool_), ("s",))
        kept = clear.unread(spec, ones)
        return cls(None if kept is ones else kept, count)

    def mean(self, x: Named) -> Named:
        """Of the rows that count, in float32, without axis `s`."""
        own = tuple(a for a in x.axes if a != "s")
        total = Named(x.value.astype(jnp.float32), x.axes).summed(["s"])
        if self.kept is None:
            return Named(total.value / max(self.count, 1), total.axes)
        weights = Named(self.kept.value.astype(jnp.float32), self.kept.axes)
        weight = weights.summed(["s"])
        names = (*(a for a in weight.axes if a not in own), *own)
        value = total.to(names) / jnp.maximum(weight.to(names), 1.0)
        return Named(value, names)

    def only(self, x: jax.Array, axes, other: float) -> jax.Array:
        """x of those rows, `other` elsewhere."""
        return x if self.kept is None else jnp.where(self.kept.to(axes), x, other)


def _narrow(x: Named, mean: Named | None, rows: _Rows | None) -> tuple[Named, Named]:
    """Less its mean, in eight bits; and the scale, with axes of batch and heads.

    The largest size of an element less its mean follows from the extremes of each
    column: with the mean that is one pass over x, and this is the second.
    """
    x = x.squeezed()
    names = (*(a for a in (mean.axes if mean else ()) if a not in x.axes), *x.axes)
    values = x.to(names).astype(jnp.float32)
    row = next(i for i, a in enumerate(names) if a in ("t", "s"))
    head = next(i for i, a in enumerate(names) if a in ("h", "d"))
    lost = (row, head)

    def of_columns(reduce, other: float) -> jax.Array:
        own = values if rows is None else rows.only(values, names, other)
        return reduce(own, axis=row, keepdims=True, initial=other)

    center: Any = 0.0 if mean is None else mean.to(names)
    high = of_columns(jnp.max, -math.inf) - center
    low = of_columns(jnp.min, math.inf) - center
    largest = jnp.max(jnp.maximum(high, -low), axis=lost, keepdims=True, initial=0.0)
    scale = largest / largest_of(FP8)
    found = narrowed(values - center, scale, FP8)
    if rows is not None and rows.kept is not None:
        nothing = jnp.zeros((), FP8)
        found = jnp.where(rows.kept.to(names), found, nothing)
    kept = tuple(a for i, a in enumerate(names) if i not in lost)
    return Named(found, names), Named(jnp.squeeze(scale, lost), kept)


def _of_mean(q: Named, mean: Named, spec: AttentionSpec, factor: float) -> Named:
    """The scores of the mean key, with the axes of rows of queries."""
    size = sizes([q, mean])
    heads = Heads.of(size)
    q, score = heads.split(q).squeezed(), spec.score
    names = (a for x in (q, mean) for a in x.axes if a not in ("h", "t", *heads.names))
    rows = (*dict.fromkeys(names), *heads.names, "t")
    wide = Named(q.value.astype(jnp.float32), q.axes)
    products = axes_.contract(wide, mean, rows, jax.lax.Precision.HIGHEST)
    found = products * jnp.float32(factor * score.scale)
    if score.factor is not None:
        found = found * score.factor.to(rows).astype(jnp.float32)
    return heads.merge(Named(found, rows))
