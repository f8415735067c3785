"""The loop over keys of the forward kernel in eight bits, in one consumer."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core.flash2 import LN_2, LOG2_E, finite
from pallas_kernels.mosaic_gpu import support
from pallas_kernels.mosaic_gpu.hopper import fp8_bytes
from pallas_kernels.mosaic_gpu.hopper.forward_loop import RowsLoop
from pallas_kernels.mosaic_gpu.hopper.fp8_plan import LARGEST
from pallas_kernels.mosaic_gpu.hopper.fp8_program import Program
from pallas_kernels.mosaic_gpu.hopper.retries import store
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.plan import wait_until_stored

# log2 of the probability of a running maximum.
_ROOM = 8
# The mean probability of the keys so far, at most, where a fixed base follows.
_MEAN = 0.5
# Bits of probabilities lose up to 2**-7 of each key. With a mean of so much, that is a
# sixteenth of a row's sum at most.
_FEWEST = 0.125


class Rows(NamedTuple):
    """What rows carry along the keys with running maxima, beside the sums of values.

    Attributes:
      base: log2 of the size of a score that has probability 1, [ROWS].
      total: sums of probabilities, [ROWS].
    """

    base: jax.Array
    total: jax.Array


class Sums(NamedTuple):
    """What rows carry along the keys with a fixed base.

    Attributes:
      total: sums of probabilities in parts, [ROWS, 8].
      peak: the largest part of a block's sum, likewise.
    """

    total: jax.Array
    peak: jax.Array

    def added(self, part: jax.Array) -> Sums:
        """With those of one more block."""
        return Sums(self.total + part, jnp.maximum(self.peak, part))

    def of_rows(self) -> Sums:
        """Both [ROWS]."""
        return Sums(jnp.sum(self.total, axis=-1), jnp.max(self.peak, axis=-1))


@dataclasses.dataclass(frozen=True)
class KeyLoop(RowsLoop):
    """The way of the rows of the kernel in eight bits through their keys.

    A step has the probabilities of the block before in registers, as in `forward_loop`.

    Attributes:
      unit: what makes products scores in units of log2.
      all_running: whether all blocks have a running maximum, in the second pass.
    """

    program: Program
    unit: jax.Array
    all_running: jax.Array

    def run(self, acc):
        """Goes through the keys.

        Args:
          acc: where values, and sums of probabilities, are summed.

        Returns:
          `Rows`, the largest sum of a block with a fixed base [ROWS], and the sums of
          values.
        """
        first, head = self.first, self.plan.head
        last, start = self.last, first + self.running
        self.wait_for_next(first - 1)
        x = self._masked(self.products(first), first)
        words, rows, _ = self._running_words(x, first)
        self.wait_for_next(first)
        step = functools.partial(self._running_step, acc)
        state = rows, fp8_bytes.joined(words)
        rows, p = lax.fori_loop(first + 1, start, step, state)
        nothing = jnp.zeros([ROWS, support.COLUMNS], jnp.float32)
        sums = Sums(nothing, nothing)
        step = functools.partial(self._fixed_step, acc, rows.base)
        sums, p = lax.fori_loop(start, last + 1, step, (sums, p))
        self.queries_read()
        self.add_values(acc, last, p)
        self.finish_values(last)
        values = acc[...]
        if self.plan.sums:
            sums = sums.added(values[:, head:] * self._is_fixed(last))
            values = values[:, :head]
        total, peak = sums.of_rows()
        return Rows(rows.base, rows.total + total), peak, values

    def _running_step(self, acc, i, state):
        """Block i with a running maximum, and the values of the block before it."""
        i = support.opaque(i)
        rows, p = state
        x = self.products(i, lambda: self.add_values(acc, i - 1, p))
        words, rows, alpha = self._running_words(self._masked(x, i), i, rows)
        self.wait_for_next(i)
        self.finish_values(i - 1)
        values = acc[...]
        acc[...] = values * self.plan.along(alpha, values.shape[-1])
        return rows, fp8_bytes.joined(words)

    def _fixed_step(self, acc, base, i, state):
        """Block i with a fixed base, and the values of the block before it."""
        i = support.opaque(i)
        sums, p = state
        x = self.products(i, lambda: self.add_values(acc, i - 1, p))
        words, part = self._fixed_words(x, base)
        self.wait_for_next(i)
        self.finish_values(i - 1)
        if part is None:
            values = acc[...]
            part = values[:, self.plan.head :] * self._is_fixed(i - 1)
            sums = sums.added(part)
            acc[...] = fp8_bytes.cleared(values, sums.total)
        else:
            sums = sums.added(part)
        return sums, fp8_bytes.joined(words)

    def _is_fixed(self, i) -> jax.Array:
        """1.0 if block i has a fixed base, so that nothing has summed it; or 0.0."""
        return jnp.where(i >= self.first + self.running, 1.0, 0.0)

    # Scores and probabilities.

    def _masked(self, x: jax.Array, i) -> jax.Array:
        """Products of block i, -inf where a mask says so."""
        pairs = self.plan.pairs(self.spec, self.keys_at(i), True)
        return pairs.scores_of(x, self.program.q.dtype).x

    def _running_words(self, x: jax.Array, i, before: Rows | None = None):
        """Words of block i, exponentials that are rounded, with sums of the exact ones.

        Args:
          x: of `_masked`.
          before: of the blocks before it, if there are any.

        Returns:
          The words, `Rows` with this block, and what sums of values are multiplied by.
        """
        base = jnp.max(x, axis=-1) * self.unit - _ROOM
        alpha = jnp.float32(1.0)
        if before is not None:
            base = jnp.maximum(base, before.base)
        p = jnp.exp2(x * self.unit - self.plan.along(finite(base), self.plan.block_kv))
        total = jnp.sum(p, axis=-1)
        if before is not None:
            alpha = jnp.exp2(before.base - finite(base))
            total = total + before.total * alpha
        keys = (i - self.first + 1) * self.plan.block_kv
        most = keys.astype(jnp.float32) * _MEAN
        most = jnp.where(self.all_running, jnp.inf, most)
        part = jnp.minimum(most / total, 1.0)
        p = p * self.plan.along(part, self.plan.block_kv)
        base, total = base - jnp.log(part) * LOG2_E, total * part
        alpha = alpha * part
        return fp8_bytes.rounded(p), Rows(base, total), alpha

    def _fixed_words(self, x: jax.Array, base: jax.Array):
        """Words of a block, and parts of sums where the product makes none."""
        shift = self.plan.along(-finite(base), self.plan.block_kv)
        if self.plan.sums:
            return fp8_bytes.by_bits(x, self.unit, shift), None
        p = jnp.exp2(x * self.unit + shift)
        return fp8_bytes.rounded(p), support.sums_of_rows(p)

    def values_at(self, i):
        """As of the base, where they are transposed."""
        return support.transposed(super().values_at(i))

    # Results.

    def is_right(self, rows: Rows, peak: jax.Array, start) -> jax.Array:
        """Whether the sums of these rows can be stored."""
        beyond = start + support.numbers_along(0, ROWS) >= self.plan.layout.size["t"]
        keys = (self.count * self.plan.block_kv).astype(jnp.float32)
        good = (peak < LARGEST) & (rows.total >= keys * _FEWEST) | beyond
        out = support.warpgroup_any(self.program.warpgroup, jnp.where(good, 0, 1))
        return (out == 0) | (self.running == self.count)

    def store(self, rows: Rows, values: jax.Array) -> None:
        """The epilogue: output and log-sum-exp of these rows."""
        refs, me, head = self.program.refs, self.program.warpgroup, self.plan.head
        base, total = rows
        empty = total == 0.0
        nothing = 0.0 * self.unit  # NaN, if there is NaN in queries or keys
        scale = self.program.scales.value.load((), self.where)
        by = self.plan.along(jnp.where(empty, nothing, scale / total), head)
        output = (values * by).astype(jnp.bfloat16)
        log = (finite(base) + jnp.log2(total)) * LN_2
        wait_until_stored()  # of the previous work tile, which used the same tiles
        at, log = refs.lse.ref.at[me], jnp.where(empty, -jnp.inf, log)
        store(self.program, self.where, output, [(at, log, self.program.lse)])
