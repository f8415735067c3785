"""The recurrences of FlashAttention-2, on blocks: this is all of its mathematics.

Forward (Dao 2023, section 3.1.1, algorithm 1). Queries are cut in blocks of rows; for
each, keys and values are visited block by block, and three values per row carry on:

    m    running maximum of the scores
    l    running sum of exp(score - m)
    acc  running sum of exp(score - m) * value, *unscaled*: it is divided by l once, at
         the end, not at every step (fewer non-matmul FLOPs: the paper's first tweak)

The maximum is there to keep numbers in range, and any m near it does: what the first
blocks of a row found serves for the others, with no maximum and no scaling of acc
(`accumulate`), if the sums show at the end that it was near (`in_range`).

Only the log-sum-exp `lse = m + log(l)` is kept for the backward pass (its second).

Backward (section 3.1.2, algorithm 2). With p = exp(s - lse) recomputed,

    dv = p^T do,   dp = do v^T,   ds = p * (dp - delta),   dq = ds k,   dk = ds^T q

where delta = rowsum(do * o) - dlse; dlse is the cotangent of lse, zero when only the
output is used. Dropout multiplies p where it meets v, and dp, by 0 or a constant.

Inside, exponents are of base 2: exp(s) = exp2(log2(e) * s), one multiplication that
folds into the scale. A block of scores arrives as `Scores` (`core.scores`). Everything
here works on blocks in either orientation: [queries, keys], or [keys, queries] with row
statistics laid out to match. Axes of batch and heads may stand before them. Rows of a
head size that is no power of two may come in pieces, a tuple of blocks (`Block`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core import axes
from pallas_kernels.core.arithmetic import PLAIN, Arithmetic

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
# The log-sum-exp of a row that is padding: its p is 0, whatever its scores.
PADDING_LSE = math.inf

# [rows, head size], or its pieces along the head axis.
Block = jax.Array | tuple[jax.Array, ...]


class Scores(NamedTuple):
    """A block of scores, unit * (x - row): the exponent's shift takes `row` in."""

    x: jax.Array  # [rows, keys], -inf where masked
    unit: float  # positive
    row: jax.Array | None = None  # broadcasts against x, of size 1 along the keys
    kept: tuple = ()  # what terms of the score need for cotangents (`core.scores`)

    @property
    def value(self) -> jax.Array:
        return self.unit * (self.x if self.row is None else self.x - self.row)

    @property
    def settled(self) -> Scores:
        """The same with a unit of 1, without a row."""
        x = self.x if self.row is None else self.x - self.row
        return Scores(x if self.unit == 1.0 else x * self.unit, 1.0)


class State(NamedTuple):
    """What a block of query rows carries along the keys."""

    m: jax.Array  # [rows], in units of log2; -inf where nothing has been kept
    l: jax.Array  # [rows], or [rows, parts]: a row's sum, or parts of it
    acc: Block  # [rows, value head size]
    # [rows, parts], int32: the bits of the largest p that `accumulate` met. From 0 on
    # they are in the order of the numbers. None where nobody asks for `largest`.
    top: jax.Array | None = None

    @property
    def total(self) -> jax.Array:
        """[rows], the whole of l."""
        return self.l if self.l.ndim == self.m.ndim else jnp.sum(self.l, axis=-1)

    @property
    def largest(self) -> jax.Array:
        """[rows], the largest score in natural units; -inf where nothing was kept.

        `step` left it in m. A p that `accumulate` met is that score beyond m.
        """
        m = self.m
        if self.top is not None:
            p = lax.bitcast_convert_type(jnp.max(self.top, axis=-1), jnp.float32)
            m = jnp.maximum(m, finite(m) + jnp.log2(p))
        return m * LN_2


def init(
    rows: Sequence[int],
    head_size: int | tuple[int, ...],
    parts: int | None = None,
    dtype=jnp.float32,
    *,
    top_parts: int | None = None,
) -> State:
    """The state before any key has been seen.

    Args:
      rows: number of rows, after the sizes of any axes before them.
      head_size: of the values, or the sizes of its pieces.
      parts: of a row's sum, a divisor of the number of keys in a block; None for the
        sum itself. A part is the sum of every `parts`th key: where that is how keys are
        dealt to the lanes of a warp, no lane waits for another before it is wanted.
      top_parts: likewise, of the largest p (`State.top`); None for none.
    """
    m = jnp.full((*rows,), -jnp.inf, dtype)
    l = jnp.zeros((*rows,) if parts is None else (*rows, parts), dtype)
    top = None if top_parts is None else jnp.zeros((*rows, top_parts), jnp.int32)
    return State(m, l, zeros(rows, head_size, dtype), top)


def step(
    state: State,
    scores: Scores,
    product: Callable,
    arithmetic: Arithmetic = PLAIN,
) -> State:
    """Takes in one block of keys and values.

    Args:
      state: what the rows carry so far.
      scores: of the block, [rows, keys].
      product: the matrix product `p -> p @ v` with this block's values.
      arithmetic: the backend's.
    """
    top, alpha, p = update(state.m, scores, arithmetic)
    in_parts = state.l.ndim > alpha.ndim
    l = _scaled_rows(state.l, alpha, arithmetic) if in_parts else state.l * alpha
    acc = _scaled_rows(state.acc, alpha, arithmetic)
    return State(top, add_row_sums(l, p), added(acc, product(p)), state.top)


def update(
    m: jax.Array, scores: Scores, arithmetic: Arithmetic = PLAIN
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The part of `step` before the product, for a kernel that issues that elsewhere.

    Returns:
      The new running maximum [rows]; what l and acc so far are multiplied by [rows]; p,
      exp(score - maximum) [rows, keys].
    """
    x, unit, row, _ = scores
    scale = unit * LOG2_E
    largest = arithmetic.constant(jnp.max(x, axis=-1))
    here = (largest if row is None else largest - row[..., 0]) * scale
    # A bias of the lowest number stands for a mask; the product must not become -inf.
    lowest = jnp.finfo(here.dtype).min
    here = jnp.where(largest == -jnp.inf, largest, jnp.maximum(here, lowest))
    top = arithmetic.constant(jnp.maximum(m, here))
    alpha = arithmetic.exp2(m, 1.0, finite(top))
    # From the block's own maximum first: that is exactly 0 there, however large it is.
    shift = finite(top) - finite(here)
    x = x - arithmetic.along(finite(largest), -2, x.shape)
    p = arithmetic.exp2(x, scale, arithmetic.along(shift, -2, x.shape))
    return top, alpha, p


def accumulate(
    state: State,
    scores: Scores,
    product: Callable,
    arithmetic: Arithmetic = PLAIN,
) -> State:
    """`step` with m as it is: no maximum is taken and nothing is scaled again.

    As exact where `in_range` holds after the last block. No step may follow: it would
    not know that an m of -inf stood for 0.
    """
    m, l, acc, top = state
    shift = arithmetic.along(finite(m), -2, scores.x.shape)
    p = probabilities(scores, shift, arithmetic)
    top = None if top is None else larger(top, p)
    return State(m, add_row_sums(l, p), added(acc, product(p)), top)


def larger(top: jax.Array, p: jax.Array) -> jax.Array:
    """`State.top` with a block of p.

    Of integers Hopper finds the largest of three in one instruction.
    """
    *rows, parts = top.shape
    bits = lax.bitcast_convert_type(p, jnp.int32)
    return jnp.maximum(top, jnp.max(bits.reshape(*rows, -1, parts), axis=-2))


def add_row_sums(l: jax.Array, p: jax.Array) -> jax.Array:
    """l of a state with the sums of the rows of p."""
    if l.ndim < p.ndim:
        return l + jnp.sum(p, axis=-1)
    *rows, parts = l.shape
    return l + jnp.sum(p.reshape(*rows, -1, parts), axis=-2)


def in_range(state: State, dtype) -> jax.Array:
    """[rows], whether `accumulate` was as good as `step`, with products in `dtype`.

    Sums of p, each at most l, must be far from the ends of the range of `dtype`. Sums
    of values may leave that of float32, which then shows in them. An exponent may be
    off by the roundoff of m, and by its own: products in float32 want it smaller. An m
    of -inf stands for 0, which is far from what the maximum is, and so too far for
    float16.
    """
    kind = jnp.finfo(dtype)
    largest = float(kind.max)
    narrow = largest < 2.0**30
    m = jnp.abs(state.m if narrow else finite(state.m))
    wide = 2.0**18 if kind.bits > 16 else 2.0**100
    limit = largest / 2 if narrow else wide
    l = state.total
    good = (m <= 2.0**14) & (l >= 0.5) & (l <= limit)
    return good if narrow else good & has_finite_sums(state)


def has_finite_sums(state: State) -> jax.Array:
    """[rows], whether no value that was met is NaN or infinite, kept or not."""
    leaves = jax.tree.leaves(state.acc)
    rows = (jnp.sum(jnp.abs(acc), axis=-1) < jnp.inf for acc in leaves)  # not of NaN
    return functools.reduce(operator.and_, rows)


def finite(m: jax.Array) -> jax.Array:
    """m, or 0 where nothing has been kept: -inf - -inf would be NaN."""
    return jnp.where(m == -jnp.inf, 0.0, m)


def finish(
    state: State, sink=None, arithmetic: Arithmetic = PLAIN
) -> tuple[Block, jax.Array]:
    """Output [rows, value head size] and log-sum-exp [rows] (natural logarithm).

    A row that kept nothing has output 0 and log-sum-exp -inf, whatever values it met:
    0 times NaN is in its sums.

    Args:
      state: after the last block.
      sink: a logit that joins every row's softmax, without a value; or None. It
        broadcasts against rows, or has an axis of size 1 after theirs.
      arithmetic: the backend's.
    """
    m, l = finite(state.m), state.total
    empty, weight = l == 0.0, 1.0
    acc = jax.tree.map(
        lambda a: jnp.where(arithmetic.along(l, -2, a.shape) == 0.0, 0.0, a), state.acc
    )
    if sink is not None:
        sink = jnp.squeeze(sink, -1) if sink.ndim > m.ndim else sink
        sink = sink.astype(m.dtype) * LOG2_E
        # l may be large (`in_range`): m is then far below what a sink compares with.
        large, larger = l > 2.0**32, l > 2.0**64
        m += jnp.where(larger, 64.0, jnp.where(large, 32.0, 0.0))
        down = jnp.where(larger, 2.0**-64, jnp.where(large, 2.0**-32, 1.0))
        acc = _scaled_rows(acc, down, arithmetic)
        joint = jnp.maximum(m, sink)
        shift = jnp.where(empty, 0.0, joint)
        weight = jnp.exp2(m - shift)
        l = jnp.where(empty, 0.0, l * down * weight + jnp.exp2(sink - shift))
        m = jnp.where(empty, m, joint)
    l = jnp.where(empty, 1.0, l)  # a logarithm of 0 would have no derivative
    # A sum of two products would have other bits in another place of a program, where
    # the compiler rounds the other one of them.
    lse = jnp.where(empty, -jnp.inf, (m + jnp.log2(l)) * LN_2)
    return _scaled_rows(acc, weight / l, arithmetic), lse


def merge(
    o: jax.Array | Sequence[jax.Array],
    lse: jax.Array | Sequence[jax.Array],
    sink: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The result of whole rows from results over disjoint sets of keys.

    With lse the log-sum-exp of all of them, o = sum(exp(lse_i - lse) * o_i): as exact
    as one pass over the keys, whatever their order and wherever they were computed
    (Flash-Decoding; ring attention). A row of which no part kept a key is 0 and -inf.

    Args:
      o: [parts, *rows, value head size], outputs in float32, or wider. Or a sequence
        of [*rows, value head size], for a few parts that lie apart: nothing is stacked,
        and the result may take the place of one of them.
      lse: [parts, *rows], log-sum-exps (natural logarithm), or a sequence too. If there
        is a sink, only one part may have taken it in.
      sink: one that no part took in, as for `finish`; it broadcasts against rows.

    Returns:
      o [*rows, value head size] and lse [*rows].
    """
    top = lax.stop_gradient(_over_parts(jnp.max, jnp.maximum, lse))
    m, empty = finite(top), top == -jnp.inf
    m = m if sink is None else jnp.where(empty, m, jnp.maximum(m, sink))
    weight = jax.tree.map(lambda x: jnp.exp(x - m), lse)
    total = _over_parts(jnp.sum, operator.add, weight)
    if sink is not None:
        total = jnp.where(empty, total, total + jnp.exp(sink - m))
    inverse = 1.0 / jnp.where(empty, 1.0, total)

    def weighted(x, weight):
        # An empty part may hold anything.
        return jnp.where(weight[..., None] == 0.0, 0.0, x) * weight[..., None]

    parts = jax.tree.map(weighted, o, weight)
    merged = _over_parts(jnp.sum, operator.add, parts) * inverse[..., None]
    return merged, jnp.where(empty, -jnp.inf, m + jnp.log(jnp.where(empty, 1.0, total)))


def _over_parts(of_axis: Callable, of_two: Callable, x):
    """Over the first axis of an array, or the elements of a sequence."""
    if isinstance(x, Sequence):
        return functools.reduce(of_two, x)
    return of_axis(x, axis=0)


def of_whole_rows(scores: Scores, product: Callable) -> tuple[jax.Array, ...]:
    """Output, log-sum-exp and largest scores of rows that keep all of their keys.

    `step` and `finish` as XLA knows them: it makes one kernel of such a softmax, of
    which only the output is wanted, and so reads the scores once.

    Args:
      scores: of all keys, without -inf and `row`.
      product: as for `step`.
    """
    x, unit, *_ = scores
    top = lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    p = jnp.exp((x - top) * unit)
    l = jnp.sum(p, axis=-1, keepdims=True)
    lse = jnp.squeeze(top * unit + jnp.log(l), axis=-1)
    return product(p / l), lse, jnp.squeeze(top * unit, axis=-1)


def softmax(scores: Scores, sink=None, arithmetic: Arithmetic = PLAIN) -> jax.Array:
    """Probabilities of whole rows, as the forward computes them.

    Against the row's own maximum: right too where a log-sum-exp holds no sum
    (`lse_log2`), and shared with a forward in the same program.

    Args:
      scores: of all keys.
      sink: as for `finish`.
    """
    rows, dtype = scores.x.shape[:-1], scores.x.dtype
    found = []

    def product(p):
        found.append(p)
        return jnp.ones((*p.shape[:-1], 1), dtype)

    state = step(init(rows, 1, dtype=dtype), scores, product, arithmetic)
    inverse, _ = finish(state, sink)
    return found[0] * inverse


def delta(o: Block, lse: jax.Array, do: Block, dlse: jax.Array) -> jax.Array:
    """rowsum(o * do) - dlse over the last axis, in the dtype of lse.

    0 where a row kept nothing: its lse of -inf is a constant, whatever its cotangent.
    """
    products = jax.tree.map(
        lambda x, y: jnp.sum(x.astype(lse.dtype) * y.astype(lse.dtype), axis=-1), o, do
    )
    rowsum = functools.reduce(operator.add, jax.tree.leaves(products))
    return jnp.where(lse == -jnp.inf, 0.0, rowsum - dlse)


def sink_gradient(sink: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """What each row adds to the gradient of its sink (arrays that broadcast).

    The sink is one more score, whose value is 0: dp is 0 there.
    """
    p = jnp.exp(sink.astype(lse.dtype) - jnp.where(lse == -jnp.inf, jnp.inf, lse))
    return -p * delta


def lse_log2(lse: jax.Array) -> jax.Array:
    """The log-sum-exp in units of log2; inf, so that p = 0, where a row kept nothing.

    So too where it is so large that float32 leaves nothing of the sum in it, as where a
    bias of -1e9 masks a whole row. p would be any number, or infinite.
    """
    log2 = lse * LOG2_E
    return jnp.where(jnp.abs(log2) > 2.0**24, jnp.inf, log2)


def probabilities(
    scores: Scores, shift: jax.Array, arithmetic: Arithmetic = PLAIN
) -> jax.Array:
    """exp(scores) / 2**shift: the softmax of a block, where the shift is `lse_log2`.

    Args:
      shift: of a row, broadcasts against the block.
    """
    x, unit, row, _ = scores
    scale = unit * LOG2_E
    return arithmetic.exp2(x, scale, shift if row is None else shift + row * scale)


def score_gradient(p: jax.Array, dp: jax.Array, delta: jax.Array) -> jax.Array:
    """ds from p, dp = do v^T and delta (broadcast against p)."""
    return p * (dp - delta)


def zeros(rows: Sequence[int], size: int | tuple[int, ...], dtype) -> Block:
    """[*rows, size], or pieces of such sizes."""
    return jax.tree.map(lambda n: jnp.zeros((*rows, n), dtype), size)


def added(x: Block, y: Block) -> Block:
    """x + y, piece by piece."""
    return jax.tree.map(operator.add, x, y)


def scaled(x: Block, by: float) -> Block:
    """x * by, piece by piece."""
    return jax.tree.map(lambda a: a * by, x)


def _scaled_rows(x: Block, by: jax.Array, arithmetic: Arithmetic) -> Any:
    """x with each row multiplied by a number."""
    return jax.tree.map(lambda a: a * arithmetic.along(by, -2, a.shape), x)


def times(p: jax.Array, rows: Block, precision=None) -> Block:
    """p @ rows, piece by piece."""
    return jax.tree.map(lambda x: dot(p, x, "nn", precision), rows)


def dot(a: jax.Array, b: jax.Array, contract: str, precision=None) -> jax.Array:
    """A block's matrix product with float32 (or wider) accumulation.

    Args:
      a, b: two matrices.
      contract: "nn" for a @ b, "nt" for a @ b^T, "tn" for a^T @ b.
      precision: of the product where inputs are float32.
    """
    left, right = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}[contract]
    return axes.product(a, b, ((left,), (right,)), precision=precision)
