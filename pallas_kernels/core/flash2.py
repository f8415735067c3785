"""The recurrences of FlashAttention-2, on blocks: this is all of its mathematics.

Forward (Dao 2023, section 3.1.1, algorithm 1). Queries are cut in blocks of rows; for
each, keys and values are visited block by block, and three values per row carry on:

    m    running maximum of the scores
    l    running sum of exp(score - m)
    acc  running sum of exp(score - m) * value, *unscaled*: it is divided by l once, at
         the end, not at every step (fewer non-matmul FLOPs: the paper's first tweak)

Only the log-sum-exp `lse = m + log(l)` is kept for the backward pass (its second).

Backward (section 3.1.2, algorithm 2). With p = exp(s - lse) recomputed,

    dv = p^T do,   dp = do v^T,   ds = p * (dp - delta),   dq = ds k,   dk = ds^T q

where delta = rowsum(do * o) - dlse; dlse is the cotangent of lse, zero when only the
output is used. Dropout multiplies p where it meets v, and dp, by 0 or a constant.

Inside, exponents are of base 2: exp(s) = exp2(log2(e) * s), one multiplication that
folds into the scale. A block of scores arrives as `(x, unit)`, score = unit * x with a
positive constant unit (`core.score`). Everything here works on blocks in either
orientation: [queries, keys], or [keys, queries] with row statistics laid out to match.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core.arithmetic import PLAIN, Arithmetic

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


class State(NamedTuple):
    """What a block of query rows carries along the keys (m in units of log2).

    Without m (None), exp(score) is itself summed: for scores too small to overflow.
    """

    m: jax.Array | None  # [rows]
    l: jax.Array  # [rows]
    acc: jax.Array  # [rows, value head size]


def init(
    rows: int, head_size: int, dtype=jnp.float32, *, bounded: bool = False
) -> State:
    """The state before any key has been seen; `bounded` scores need no maximum."""
    m = None if bounded else jnp.full((rows,), -jnp.inf, dtype)
    return State(m, jnp.zeros((rows,), dtype), jnp.zeros((rows, head_size), dtype))


def step(
    state: State,
    x: jax.Array,
    unit: float,
    product: Callable,
    arithmetic: Arithmetic = PLAIN,
) -> State:
    """Takes in one block of keys and values.

    Args:
      state: what the rows carry so far.
      x: [rows, keys] scores / unit; -inf where masked.
      unit: positive constant.
      product: the matrix product `p -> p @ v` with this block's values.
      arithmetic: the backend's.
    """
    scale, exp2 = unit * LOG2_E, arithmetic.exp2
    if state.m is None:
        p = exp2(x, scale, 0.0)
        return State(None, state.l + jnp.sum(p, axis=1), state.acc + product(p))
    m = jnp.maximum(state.m, jnp.max(x, axis=1) * scale)
    # A row that has kept nothing yet has m = -inf, and -inf - -inf would be NaN.
    shift = jnp.where(m == -jnp.inf, 0.0, m)
    alpha = exp2(state.m, 1.0, shift)
    p = exp2(x, scale, shift[:, None])
    l = state.l * alpha + jnp.sum(p, axis=1)
    acc = state.acc * alpha[:, None] + product(p)
    return State(m, l, acc)


def finish(state: State, sink=None) -> tuple[jax.Array, jax.Array]:
    """Output [rows, value head size] and log-sum-exp [rows] (natural logarithm).

    A row that kept nothing has output 0 and log-sum-exp -inf.

    Args:
      state: after the last block.
      sink: a logit that joins every row's softmax, without a value; or None.
    """
    m, l, acc = state
    m = jnp.zeros_like(l) if m is None else m
    empty = l == 0.0
    if sink is not None:
        sink = sink.astype(m.dtype) * LOG2_E
        joint = jnp.maximum(m, sink)
        shift = jnp.where(empty, 0.0, joint)
        alpha = jnp.exp2(m - shift)
        l = jnp.where(empty, 0.0, l * alpha + jnp.exp2(sink - shift))
        m, acc = jnp.where(empty, m, joint), acc * alpha[:, None]
    o = acc / jnp.where(empty, 1.0, l)[:, None]
    return o, m * LN_2 + jnp.log(l)


def delta(o: jax.Array, lse: jax.Array, do: jax.Array, dlse: jax.Array) -> jax.Array:
    """rowsum(o * do) - dlse over the last axis, in the dtype of lse.

    0 where a row kept nothing: its lse of -inf is a constant, whatever its cotangent.
    """
    rowsum = jnp.sum(o.astype(lse.dtype) * do.astype(lse.dtype), axis=-1)
    return jnp.where(lse == -jnp.inf, 0.0, rowsum - dlse)


def sink_gradient(sink: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """What each row adds to the gradient of its sink (arrays that broadcast).

    The sink is one more score, whose value is 0: dp is 0 there.
    """
    p = jnp.exp(sink.astype(lse.dtype) - jnp.where(lse == -jnp.inf, jnp.inf, lse))
    return -p * delta


def lse_log2(lse: jax.Array) -> jax.Array:
    """The log-sum-exp in units of log2, finite where a row kept nothing.

    There every x is -inf, so that any finite value gives p = 0.
    """
    return jnp.maximum(lse * LOG2_E, jnp.finfo(lse.dtype).min)


def probabilities(
    x: jax.Array, unit: float, lse_log2: jax.Array, arithmetic: Arithmetic = PLAIN
) -> jax.Array:
    """The softmax of a block, from the saved log-sum-exp (broadcast against x)."""
    return arithmetic.exp2(x, unit * LOG2_E, lse_log2)


def score_gradient(p: jax.Array, dp: jax.Array, delta: jax.Array) -> jax.Array:
    """ds from p, dp = do v^T and delta (broadcast against p)."""
    return p * (dp - delta)


def dot(a: jax.Array, b: jax.Array, contract: str, precision=None) -> jax.Array:
    """A block's matrix product with float32 (or wider) accumulation.

    Args:
      a, b: two matrices.
      contract: "nn" for a @ b, "nt" for a @ b^T, "tn" for a^T @ b.
      precision: of the product where inputs are float32.
    """
    dims = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}[contract]
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(
        a,
        b,
        (((dims[0],), (dims[1],)), ((), ())),
        precision=precision,
        preferred_element_type=dtype,
    )
