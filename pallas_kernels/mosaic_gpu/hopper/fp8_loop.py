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

from pallas_kernels.core.flash2 import LN_2, finite
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.mosaic_gpu import support
from pallas_kernels.mosaic_gpu.hopper import fp8_bytes
from pallas_kernels.mosaic_gpu.hopper.fp8_plan import LARGEST, Plan
from pallas_kernels.mosaic_gpu.hopper.fp8_program import Program, WorkTile
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.program import Where
from pallas_kernels.program import pairs as pairs_of_block

# log2 of the probability of a running maximum.
_RUNNING_ROOM = 8


class Sums(NamedTuple):
    """What rows carry along the keys, beside the sums of values and the maximum.

    Attributes:
      total: sums of probabilities, [ROWS], or parts of them, [ROWS, 8].
      peak: the largest sum of a block with a fixed maximum, likewise.
    """

    total: jax.Array
    peak: jax.Array

    def added(self, part: jax.Array) -> Sums:
        """With those of one more block, whose maximum is fixed, or no larger."""
        return Sums(self.total + part, jnp.maximum(self.peak, part))


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

    @property
    def room(self) -> int:
        """log2 of the probability at the maximum."""
        return _RUNNING_ROOM if self.all_running else self.plan.room

    def run(self, acc):
        """Goes through the keys.

        Args:
          acc: where values, and sums of probabilities, are summed.

        Returns:
          The maximum of each row, `Sums`, and the sums of values.
        """
        first, head = self.first, self.plan.head
        last = first + self.tile.count - 1
        x = self._masked(self._products(first), first)
        m = jnp.max(x, axis=-1) * self.unit
        words, part = self._probabilities(x, m)
        part = self._nothing if part is None else part
        state = m, part, fp8_bytes.joined(words)
        step = functools.partial(self._running_step, acc)
        m, total, p = lax.fori_loop(first + 1, first + self.running, step, state)
        sums = Sums(total, jnp.zeros_like(total))
        if not self.all_running:
            step = functools.partial(self._fixed_step, acc, m)
            start = first + self.running
            sums, p = lax.fori_loop(start, last + 1, step, (sums, p))
        self.queries_read()
        self._add_values(acc, last, p)
        self._finish_values(last)
        values = acc[...]
        if self.plan.sums:
            sums, values = sums.added(values[:, head:]), values[:, :head]
        return m, sums, values

    @property
    def _nothing(self) -> jax.Array:
        return jnp.zeros([ROWS, support.COLUMNS], jnp.float32)

    def _running_step(self, acc, i, state):
        """Block i with a running maximum, and the values of the block before it."""
        i = support.opaque(i)
        m, total, p = state
        x = self._products(i, lambda: self._add_values(acc, i - 1, p))
        x = self._masked(x, i)
        largest = jnp.maximum(m, jnp.max(x, axis=-1) * self.unit)
        alpha = jnp.exp2(m - finite(largest))
        words, part = self._probabilities(x, largest)
        self._finish_values(i - 1)
        values = acc[...]
        if part is None:
            total = total + values[:, self.plan.head :]
            total = total * self._along(alpha, support.COLUMNS)
            values = fp8_bytes.cleared(values, self.plan.head)
        else:
            total = total * alpha + part
        acc[...] = values * self._along(alpha, values.shape[-1])
        return largest, total, fp8_bytes.joined(words)

    def _fixed_step(self, acc, m, i, state):
        """Block i with a fixed maximum, and the values of the block before it."""
        i = support.opaque(i)
        sums, p = state
        x = self._products(i, lambda: self._add_values(acc, i - 1, p))
        words, part = self._probabilities(x, m)
        self._finish_values(i - 1)
        if part is None:
            values = acc[...]
            part = values[:, self.plan.head :]
            acc[...] = fp8_bytes.cleared(values, self.plan.head)
        return sums.added(part), fp8_bytes.joined(words)

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

    def _probabilities(self, x: jax.Array, m: jax.Array):
        """Words of a block, and sums of its rows where the product makes none.

        Args:
          x: of `_scores`.
          m: the maximum of each row, in units of log2.
        """
        shift = self._along(self.room - finite(m), self.plan.block_kv)
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

    def is_right(self, m: jax.Array, sums: Sums, start) -> jax.Array:
        """Whether the sums of these rows can be stored."""
        if self.all_running:
            return jnp.int32(0) == 0
        peak = sums.peak if sums.peak.ndim == 1 else jnp.max(sums.peak, axis=-1)
        beyond = start + support.numbers_along(0, ROWS) >= self.plan.layout.size["t"]
        good = ((peak < LARGEST) & (m > -jnp.inf)) | beyond
        out = support.warpgroup_any(self.program.warpgroup, jnp.where(good, 0, 1))
        return (out == 0) | (self.running == self.tile.count)

    def store(self, m: jax.Array, sums: Sums, values: jax.Array) -> None:
        """The epilogue: output and log-sum-exp of these rows."""
        refs, me, head = self.program.refs, self.program.warpgroup, self.plan.head
        total = sums.total
        total = total if total.ndim == 1 else jnp.sum(total, axis=-1)
        empty = total == 0.0
        nothing = 0.0 * self.unit  # NaN, if there is NaN in queries or keys
        scale = self.program.scales.value.load((), self.where)
        by = self._along(jnp.where(empty, nothing, scale / total), head)
        output = (values * by).astype(jnp.bfloat16)
        surplus = fp8_bytes.SURPLUS if self.plan.sums else 1.0
        log = (finite(m) - self.room) * LN_2 + jnp.log(total * (1.0 / surplus))
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
