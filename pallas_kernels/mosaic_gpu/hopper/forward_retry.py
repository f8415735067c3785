"""A retry's loop over keys, in one consumer of the forward kernel.

One loop with one body, whatever a block's maximum and mask are: few tiles come here,
and a body is a fifth of what the kernel takes to compile (benchmarks/lab/105). Step i,
for keys and values i:

    products   qk = q k[i]'     acc *= alpha, acc += p v[i]   each waited for
    softmax    p of block i, from qk, between the two

Arithmetic is that of the first pass (`forward_loop.KeyLoop`), step by step: a tile that
is here because of values which count for nothing has the same bits without them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import flash2
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.mosaic_gpu import clear_keys
from pallas_kernels.mosaic_gpu.hopper.forward_loop import KeyLoop, larger


@dataclasses.dataclass(frozen=True)
class RetryLoop(KeyLoop):
    """As `KeyLoop`, without values of keys that no query attends."""

    def run(self, acc) -> flash2.State:
        """As of `KeyLoop`."""
        first, (m, total, _, top) = self.first, self.no_keys
        step = functools.partial(self._step, acc)
        state = lax.fori_loop(first, first + self.count, step, (m, total, top))
        self.queries_read()
        m, total, top = state
        return flash2.State(m, total, acc[...], top)

    def _step(self, acc, i, state):
        """Block i, and its values."""
        m, total, top = state
        self.program.refs.v.wait(i)
        if self.plan.drops_keys:  # first of all, since it takes the most registers
            self._clear_values(i)
        qk, pairs = self.block(True, i)
        m, alpha, p = self._softmax(i, m, qk, pairs)
        acc[...] = acc[...] * self.plan.along(alpha, self.plan.width["d"])
        total = flash2.add_row_sums(total * alpha, p)
        plgpu.wgmma(acc, self.operand(pairs, p), self.values_at(i))
        self.finish_values(i)
        return m, total, larger(top, p)

    def _softmax(self, i, m: jax.Array, qk: jax.Array, pairs: Pairs):
        """What `flash2.update` gives for block i, whose maximum may be fixed."""
        dtype, arithmetic = self.program.q.dtype, self.plan.arithmetic

        def running():
            return flash2.update(m, pairs.scores_of(qk, dtype), arithmetic)

        def fixed(masked: bool):
            own = dataclasses.replace(pairs, masked=masked)
            shift = self.plan.along(flash2.finite(m), self.plan.block_kv)
            p = flash2.probabilities(own.scores_of(qk, dtype), shift, arithmetic)
            return m, jnp.ones_like(m), p

        def of_fixed():
            full = functools.partial(fixed, False)
            if not self.plan.one_running:
                return full()
            return lax.cond(number < self.edges, functools.partial(fixed, True), full)

        number = i - self.first
        if self.plan.storage.retries == 1:
            return running()
        return lax.cond(number < self.running, running, of_fixed)

    def _clear_values(self, i) -> None:
        """Clears values of block i whose keys no query attends.

        One warpgroup does it for all.
        """
        tile = self.values_at(i)
        is_first = self.program.warpgroup == 0
        pl.when(is_first)(lambda: clear_keys.clear(tile, self._attended_keys(i)))
        self.plan.values_cleared.sync()

    def _attended_keys(self, i) -> jax.Array:
        """Which keys of block i some query may attend, [block_kv]."""
        keys, size = self.program.spec.keys, self.plan.layout.size["s"]
        return clear_keys.attended_keys(self.spec, keys, self.keys_at(i), size)
