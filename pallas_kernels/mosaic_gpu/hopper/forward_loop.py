"""The forward kernel's loops over keys, in one consumer (Shah 2024, 3.1 and 3.2).

Step i of the loop, for keys i and values i - 1, when registers hold p of block i - 1:

    products   qk = q k[i]'      issued in this warpgroup's turn (ping-pong)
               acc += p v[i-1]   issued right after it
    softmax    p of block i, from qk, while the second product runs
    wait       for keys i + 1, or before the next products (`Plan.awaits_keys_early`)
    wait       for the second product; values i - 1 have been read

The first block's scores are made before the loop, and the final block's values meet
their probabilities after it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import flash2
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.ranges import Range
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.mosaic_gpu import prefetch, support
from pallas_kernels.mosaic_gpu.forward_program import KeyBlocks
from pallas_kernels.mosaic_gpu.hopper.forward_program import Program
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.program import Where


@dataclasses.dataclass(frozen=True)
class RowsLoop:
    """A warpgroup's rows of a work tile, and the blocks of keys that they attend.

    Blocks are numbered in the order in which the pipelines bring them, over all work
    tiles. This one's are the `count` blocks from number `first` on.

    Attributes:
      program: the warpgroup's.
      spec: with what these rows have loaded.
      where: head and batch entry, and which rows these are.
      keys: the blocks of keys.
      first: number of the first block.
      running: how many blocks are taken with a running maximum.
      queries_read: called when no more products read the queries.
    """

    program: Any
    spec: AttentionSpec
    where: Where
    keys: KeyBlocks
    first: Any
    running: Any
    queries_read: Callable[[], None]

    @property
    def plan(self):
        return self.program.plan

    @property
    def last(self) -> jax.Array:
        """The number of the last block."""
        return self.first + self.count - 1

    @property
    def count(self) -> jax.Array:
        """How many blocks there are."""
        return self.keys.count

    def keys_at(self, i) -> Where:
        """Where these rows and the keys of block i lie."""
        return {**self.where, "s": self.keys.at(i - self.first)}

    def visit(self, start, end, step: Callable, state):
        """Runs `state = step(i, place, state)` for the blocks from `start` to `end`.

        `place()` is `keys_at(i)`. Where a list numbers the blocks, each step reads the
        number of the block after it: products are issued after the loads of a block's
        pairs, which ask where it lies.
        """

        # Numbers are hidden from the optimiser: so two backward kernels spilled no
        # registers (lab note 077).
        def of_range(i, state):
            i = support.opaque(i)
            return step(i, functools.partial(self.keys_at, i), state)

        def of_list(i, state):
            here, state = state
            i = support.opaque(i)
            there = self.keys_at(jnp.minimum(i + 1, self.last))["s"]
            rows = dataclasses.replace(there, start=here)
            state = step(i, lambda: {**self.where, "s": rows}, state)
            return there.start, state

        if isinstance(self.keys.blocks, Range):
            return lax.fori_loop(start, end, of_range, state)
        here = self.keys_at(jnp.minimum(start, self.last))["s"].start
        return lax.fori_loop(start, end, of_list, (here, state))[1]

    def products(self, i, before_wait: Callable | None = None) -> jax.Array:
        """Products of the queries and the keys of block i.

        These have come, if the plan awaits keys early.

        Args:
          before_wait: issues products that run on after those of queries and keys.
        """
        return self.products_beside(i, before_wait, lambda: None)[0]

    def products_beside(
        self, i, before_wait: Callable | None, find: Callable
    ) -> tuple[jax.Array, Any]:
        """The same, and what is found before these products are waited for."""
        refs, me = self.program.refs, self.program.warpgroup
        ping_pong = self.plan.ping_pong

        def issue(qk):
            if not self.plan.awaits_keys_early:
                refs.k.wait(i)
            ping_pong.wait(me)
            # Else addresses of all parts of the queries stay in registers.
            queries = refs.q.ref.at[support.keep_in_loop(me, i)]
            plgpu.wgmma(qk, queries, support.transposed(refs.k.at(i).ref))
            if before_wait is not None:
                before_wait()
            ping_pong.pass_on(me)
            found = find()
            wait_n = 0 if before_wait is None else 1
            return plgpu.wgmma_accumulator_load(qk, wait_n=wait_n), found

        accumulator = (ROWS, self.plan.block_kv), jnp.float32
        found = pl.run_scoped(issue, plgpu.WGMMAAccumulatorRef(*accumulator))
        refs.k.release(i)
        return found

    def wait_for_next(self, i) -> None:
        """Waits for the keys after block i, if there are any and the plan says so."""
        if self.plan.awaits_keys_early:
            self.program.refs.k.wait_unless_beyond(i + 1, self.last)

    def add_values(self, acc, i, p) -> None:
        """Issues the product of probabilities and values of block i."""
        self.program.refs.v.wait(i)
        plgpu.wgmma(acc, p, self.values_at(i))

    def values_at(self, i):
        """Values of block i as a product reads them, [block_kv, Hv]."""
        return self.program.refs.v.at(i).ref

    def finish_values(self, i) -> None:
        """Waits for the product with values of block i, and releases their stage."""
        plgpu.wgmma_wait(0)
        self.program.refs.v.release(i)


@dataclasses.dataclass(frozen=True)
class KeyLoop(RowsLoop):
    """The way of the forward kernel's rows through their keys.

        block    first    first + running    first + edges    first + count
        maximum    |   running   |               fixed               |
        pairs      |        may be masked          |   not masked    |

    The blocks before `first + edges` are the edges. `running` is 1 with
    `Plan.one_running`, else it is `edges`, and in the final retry it is `count`.

    Attributes:
      edges: in how many blocks pairs may be masked.
      no_keys: the state of rows that have met no keys.
    """

    program: Program
    edges: Any
    no_keys: flash2.State

    def run(self, acc) -> flash2.State:
        """Goes through the keys.

        Args:
          acc: where the output is summed, [ROWS, Hv] in registers.

        Returns:
          The state of the rows after all keys.
        """
        first, last = self.first, self.last
        self.wait_for_next(first - 1)
        place = functools.partial(self.keys_at, first)
        scores, drop = self._scores(True, first, place)
        m, _, p = flash2.update(self.no_keys.m, scores, self.plan.arithmetic)
        sums, p = support.sums_of_rows(p), drop(p)
        self.wait_for_next(first)
        state: Any = m, sums, p.astype(self.program.v.dtype)
        step = functools.partial(self._running_step, acc)
        state = self.visit(first + 1, first + self.running, step, state)
        m, *state = state
        state, shift = (*state, self.no_keys.top), flash2.finite(m)
        start = first + self.running
        # A loop that never has a block is left out: it would take time to compile.
        if self.plan.one_running and not self.plan.one_edge:
            step = functools.partial(self._fixed_step, acc, True, shift)
            state = self.visit(start, first + self.edges, step, state)
            start = jnp.maximum(start, first + self.edges)
        if not self.plan.all_running:
            step = functools.partial(self._fixed_step, acc, False, shift)
            state = self.visit(start, last + 1, step, state)
        sums, p, top = state
        self.queries_read()
        self.add_values(acc, last, p)
        self.finish_values(last)
        return flash2.State(m, jnp.sum(sums, axis=-1), acc[...], top)

    def _running_step(self, acc, i, place: Callable, state):
        """Block i with a running maximum, and the values of the block before it.

        Args:
          place: of `visit`.
        """
        m, sums, p = state
        values = functools.partial(self.add_values, acc, i - 1, p)
        scores, drop = self._scores(True, i, place, values)
        m, alpha, p = flash2.update(m, scores, self.plan.arithmetic)
        sums = sums * self.plan.along(alpha, support.COLUMNS)
        sums, p = support.sums_of_rows(p, sums), drop(p)
        self.wait_for_next(i)
        self.finish_values(i - 1)
        acc[...] = acc[...] * self.plan.along(alpha, self.plan.width["d"])
        return m, sums, p.astype(self.program.v.dtype)

    def _fixed_step(self, acc, masked: bool, shift, i, place: Callable, state):
        """Block i with a fixed maximum, and the values of the block before it.

        Args:
          masked: whether pairs of the block may be masked.
          shift: the fixed maximum of each row.
          place: of `visit`.
        """
        sums, p, top = state
        values = functools.partial(self.add_values, acc, i - 1, p)
        qk, pairs = self._products(masked, i, place, values)
        shift = self.plan.along(shift, self.plan.block_kv)
        p = pairs.probabilities(qk, self.program.q.dtype, shift)
        sums, top, p = support.sums_of_rows(p, sums), larger(top, p), pairs.drop(p)
        self.wait_for_next(i)
        self.finish_values(i - 1)
        return sums, p.astype(self.program.v.dtype), top

    # Scores.

    def _scores(
        self, masked: bool, i, place: Callable, before_wait: Callable | None = None
    ):
        """Scores of block i.

        Args:
          masked: whether pairs of the block may be masked.
          place: called for where these rows and its keys lie.
          before_wait: issues products that run on after those of queries and keys.

        Returns:
          The scores, and the dropout of their probabilities.
        """
        qk, pairs = self._products(masked, i, place, before_wait)
        return pairs.scores_of(qk, self.program.q.dtype), pairs.drop

    def _products(
        self, masked: bool, i, place: Callable, before_wait: Callable | None = None
    ):
        """Products of block i, and its pairs; the arguments are those of `_scores`."""
        if self.plan.finds_level and not masked:
            pairs = self.plan.pairs(self.spec, place(), masked, tables=False)
            find = functools.partial(pairs.spec.score.level, pairs.distances)
            qk, level = self.products_beside(i, before_wait, find)
            return qk, dataclasses.replace(pairs, level=level)
        # A load from global memory does not block. The thread goes on to issue the
        # products, and waits at the first use of what was loaded, in `scores_of`.
        pairs = self._pairs(masked, i, place) if self.plan.loads_first else None
        qk = self.products(i, before_wait)
        return qk, self._pairs(masked, i, place) if pairs is None else pairs

    def _pairs(self, masked: bool, i, place: Callable) -> Pairs:
        """The pairs of these rows and block i, with what they have loaded."""
        plan, pipeline = self.plan, self.program.refs.pair_values
        keys = place()
        if pipeline is None:
            return plan.pairs(self.spec, keys, masked)
        use = i * plan.consumers + self.program.warpgroup
        pipeline.wait(use)
        spec = prefetch.with_pair_tile(self.spec, pipeline.at(use).ref)
        pairs = plan.pairs(spec, keys, masked)
        pipeline.release(use, loaded=True)
        return pairs


def larger(top: jax.Array | None, p: jax.Array) -> jax.Array | None:
    """`flash2.larger` by slices of a thread's columns."""
    if top is None:
        return None
    for part in support.slices(lax.bitcast_convert_type(p, jnp.int32)):
        top = jnp.maximum(top, part)
    return top
