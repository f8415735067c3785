"""The tangent of attention, on blocks: how its results move as its operands do.

With p = exp(s - lse) recomputed, as in the backward pass, and ds the tangent of the
scores, which terms of the score make of that of the products (`Score.push`),

    d(q k^T) = dq k^T + q dk^T
    mu = rowsum(p * ds)                           the tangent of lse
    do = (p * ds) v + p dv - mu o

Dropout multiplies p where it meets v and dv by 0 or a constant. A sink is one more
score, whose value is 0. o and lse are those of the forward pass: nothing is scaled
again along the keys, and only two values per row carry on, mu and the two products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.core import flash2
from pallas_kernels.core.arithmetic import PLAIN, Arithmetic
from pallas_kernels.core.flash2 import Block
from pallas_kernels.core.pairs import Recomputed
from pallas_kernels.core.spec import AttentionSpec


class Sums(NamedTuple):
    """What a block of query rows carries along the keys."""

    mu: jax.Array  # [rows], sum of p * ds
    acc: Block  # [rows, value head size], sum of the products, without dropout's scale


def init(
    spec: AttentionSpec,
    lse: jax.Array,
    tangents: Mapping[str, jax.Array],
    head_size: tuple[int, ...],
    *,
    is_first,
) -> Sums:
    """The sums before any key.

    Args:
      spec: with its fields loaded.
      lse: log-sum-exp [rows]; -inf where a row kept nothing, or is padding.
      tangents: of the operands that the score has for all pairs of a row, by name.
      head_size: of the values, in pieces.
      is_first: whether these are the first of the parts of the keys; a sink is in one.
    """
    mu = jnp.zeros_like(lse)
    if "sink" in tangents:
        along = -tangents["sink"].astype(lse.dtype)
        of_sink = flash2.sink_gradient(spec.sink, lse, along)
        mu = jnp.where(is_first, of_sink, mu)
    return Sums(mu, flash2.zeros(lse.shape, head_size, lse.dtype))


def step(
    sums: Sums,
    again: Recomputed,
    weighted: jax.Array,
    v: Block,
    dv: Block | None = None,
) -> Sums:
    """Takes in one block of keys and values.

    Args:
      sums: so far.
      again: the block's probabilities.
      weighted: p * ds of the block (`Recomputed.push`).
      v: values.
      dv: their tangents; None for zeros.
    """
    pairs = again.pairs
    dtype = jax.tree.leaves(v)[0].dtype
    left = pairs.drop(weighted).astype(dtype)
    acc = flash2.added(sums.acc, flash2.times(left, v, pairs.precision))
    if dv is not None:
        left = again.dropped.astype(dtype)
        acc = flash2.added(acc, flash2.times(left, dv, pairs.precision))
    return Sums(sums.mu + jnp.sum(weighted, axis=-1), acc)


def finish(
    sums: Sums,
    spec: AttentionSpec,
    o: Block,
    lse: jax.Array,
    arithmetic: Arithmetic = PLAIN,
) -> tuple[Block, jax.Array]:
    """The tangents of output and log-sum-exp, linear in the sums.

    0 where a row kept nothing, whatever its query or their tangents hold.
    """
    empty = lse == -jnp.inf
    mu = jnp.where(empty, 0.0, sums.mu)

    def of_piece(acc, o):
        found = acc * spec.dropout_scale
        found -= arithmetic.along(mu, -2, acc.shape) * o.astype(acc.dtype)
        return jnp.where(arithmetic.along(empty, -2, acc.shape), 0.0, found)

    return jax.tree.map(of_piece, sums.acc, o), mu
