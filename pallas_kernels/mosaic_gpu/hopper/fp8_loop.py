"""The loop over keys of the forward kernel in eight bits, in one consumer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.flash2 import LN_2, LOG2_E, finite
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.mosaic_gpu import support
from pallas_kernels.mosaic_gpu.hopper import fp8_bytes
from pallas_kernels.mosaic_gpu.hopper.fp8_plan import LARGEST, Plan
from pallas_kernels.mosaic_gpu.hopper.fp8_program import Program, WorkTile
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.program import Where
from pallas_kernels.program import pairs as pairs_of_block

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
      total: sums of probabilities, [ROWS], or parts of them, [ROWS, 8].
      peak: the largest sum of a block, likewise.
    """

    total: jax.Array
    peak: jax.Array

    def added(self, part: jax.Array) -> Sums:
        """With those of one more block."""
        return Sums(self.total + part, jnp.maximum(self.peak, part))

    def of_rows(self) -> Sums:
        """Both [ROWS]."""
        if self.total.ndim == 1:
            return self
        return Sums(jnp.sum(self.total, axis=-1), jnp.max(self.peak, axis=-1))


def wait_until_stored() -> None:
    """Waits until TMA has read the tiles that this warpgroup stores."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclasses.dataclass(frozen=True)
class KeyLoop:
    """A warpgroup's rows of a work tile, and its way through their keys.

    Blocks are numbered in the order in which the pipelines bring them, over all work
    tiles; this one's first is `first`. A step has the probabilities of the block before
    in registers, as in `forward_loop`.

    Attributes:
      program: the warpgroup's.
      tile: the work tile.
      spec: with what these rows have loaded.
      where: head and batch entry, and which rows these are.
      unit: what makes products scores in units of log2.
      first: number of the first block.
      running: how many blocks have a running maximum.
      all_running: whether all have, in the second pass.
      queries_read: called when no more products read the queries.
    """

    program: Program
    tile: WorkTile
    spec: AttentionSpec
    where: Where
    unit: jax.Array
    first: Any
    running: jax.Array
    all_running: bool
    queries_read: Callable[[], None]

    @property
    def plan(self) -> Plan:
        return self.program.plan

    def run(self, acc):
        """Goes through the keys.

        Args:
          acc: where values, and sums of probabilities, are summed.

        Returns:
          `Rows`, the largest sum of a block with a fixed base [ROWS], and the sums of
          values.
        """
        first, head = self.first, self.plan.head
        last, start = first + self.tile.count - 1, first + self.running
        x = self._masked(self._products(first), first)
        words, rows, _ = self._running_words(x, first)
        step = functools.partial(self._running_step, acc)
        state = rows, fp8_bytes.joined(words)
        rows, p = lax.fori_loop(first + 1, start, step, state)
        nothing = jnp.zeros_like(rows.total)
        if self.plan.sums:
            nothing = jnp.zeros([ROWS, support.COLUMNS], jnp.float32)
        sums = Sums(nothing, nothing)
        if not self.all_running:
            step = functools.partial(self._fixed_step, acc, rows.base)
            sums, p = lax.fori_loop(start, last + 1, step, (sums, p))
        self.queries_read()
        self._add_values(acc, last, p)
        self._finish_values(last)
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
        x = self._products(i, lambda: self._add_values(acc, i - 1, p))
        words, rows, alpha = self._running_words(self._masked(x, i), i, rows)
        self._finish_values(i - 1)
        values = acc[...]
        acc[...] = values * self._along(alpha, values.shape[-1])
        return rows, fp8_bytes.joined(words)

    def _fixed_step(self, acc, base, i, state):
        """Block i with a fixed base, and the values of the block before it."""
        i = support.opaque(i)
        sums, p = state
        x = self._products(i, lambda: self._add_values(acc, i - 1, p))
        words, part = self._fixed_words(x, base)
        self._finish_values(i - 1)
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

    def _along(self, x: jax.Array, columns: int) -> jax.Array:
        return support.ARITHMETIC.along(x, -2, (ROWS, columns))

    # Scores and probabilities.

    def _products(self, i, before_wait: Callable | None = None) -> jax.Array:
        """Products of queries and the keys of block i.

        Args:
          before_wait: issues products that run on after those of queries and keys.
        """
        refs, me = self.program.refs, self.program.warpgroup
        ping_pong = self.plan.ping_pong

        def issue(qk):
            refs.k.wait(i)
            ping_pong.wait(me)
            queries = refs.q.ref.at[support.keep_in_loop(me, i)]
            plgpu.wgmma(qk, queries, support.transposed(refs.k.at(i).ref))
            if before_wait is not None:
                before_wait()
            ping_pong.pass_on(me)
            return plgpu.wgmma_accumulator_load(qk, wait_n=int(before_wait is not None))

        shape = ROWS, self.plan.block_kv
        x = pl.run_scoped(issue, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        refs.k.release(i)
        return x

    def _masked(self, x: jax.Array, i) -> jax.Array:
        """Products of block i, -inf where a mask says so."""
        where = {**self.where, "s": self.tile.keys_at(i - self.first)["s"]}
        pairs = pairs_of_block(self.spec, where, ("t", "s"), True, self.plan.launch)
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
        p = jnp.exp2(x * self.unit - self._along(finite(base), self.plan.block_kv))
        total = jnp.sum(p, axis=-1)
        if before is not None:
            alpha = jnp.exp2(before.base - finite(base))
            total = total + before.total * alpha
        if not self.all_running:
            keys = (i - self.first + 1) * self.plan.block_kv
            most = keys.astype(jnp.float32) * _MEAN
            part = jnp.minimum(most / total, 1.0)
            p = p * self._along(part, self.plan.block_kv)
            base, total = base - jnp.log(part) * LOG2_E, total * part
            alpha = alpha * part
        return fp8_bytes.rounded(p), Rows(base, total), alpha

    def _fixed_words(self, x: jax.Array, base: jax.Array):
        """Words of a block, and sums of its rows where the product makes none."""
        shift = self._along(-finite(base), self.plan.block_kv)
        if self.plan.sums:
            return fp8_bytes.by_bits(x, self.unit, shift), None
        p = jnp.exp2(x * self.unit + shift)
        return fp8_bytes.rounded(p), jnp.sum(p, axis=-1)

    # Values.

    def _add_values(self, acc, i, p) -> None:
        """Issues the product of probabilities and values of block i."""
        values = self.program.refs.v
        values.wait(i)
        plgpu.wgmma(acc, p, support.transposed(values.at(i).ref))

    def _finish_values(self, i) -> None:
        """Waits for the product with values of block i, and releases their stage."""
        plgpu.wgmma_wait(0)
        self.program.refs.v.release(i)

    # Results.

    def is_right(self, rows: Rows, peak: jax.Array, start) -> jax.Array:
        """Whether the sums of these rows can be stored."""
        if self.all_running:
            return jnp.int32(0) == 0
        beyond = start + support.numbers_along(0, ROWS) >= self.plan.layout.size["t"]
        keys = (self.tile.count * self.plan.block_kv).astype(jnp.float32)
        good = (peak < LARGEST) & (rows.total >= keys * _FEWEST) | beyond
        out = support.warpgroup_any(self.program.warpgroup, jnp.where(good, 0, 1))
        return (out == 0) | (self.running == self.tile.count)

    def store(self, rows: Rows, values: jax.Array) -> None:
        """The epilogue: output and log-sum-exp of these rows."""
        refs, me, head = self.program.refs, self.program.warpgroup, self.plan.head
        base, total = rows
        empty = total == 0.0
        nothing = 0.0 * self.unit  # NaN, if there is NaN in queries or keys
        scale = self.program.scales.value.load((), self.where)
        by = self._along(jnp.where(empty, nothing, scale / total), head)
        output = (values * by).astype(jnp.bfloat16)
        log = finite(base) * LN_2 + jnp.log(total)
        wait_until_stored()  # of the previous work tile, which used the same tiles
        refs.lse.ref[me] = jnp.where(empty, -jnp.inf, log)
        tile, columns = refs.o.at(me), self.plan.storage.output_columns
        for column in range(0, head, columns):
            part, to = output, self.program.o.at(self.where)
            if columns < head:
                some = slice(column, column + columns)
                part, to = part[:, some], to.at[:, some]
                wait_until_stored()
            tile.ref[...] = part
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile.copied, to)
        plgpu.copy_smem_to_gmem(refs.lse.ref.at[me], self.program.lse.at(self.where))
