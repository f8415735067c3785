"""Dropout: which probabilities are kept, from counters, the same in every backend.

The bits of a (query, key) pair follow from a seed and the pair's row numbers alone, by
Philox 2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): no
state, no array of T x S, and the same mask whatever the block sizes, the orientation of
a block or the order of the loops. Forward and backward make it anew.

One call of the cipher gives 64 bits for four pairs, 16 bits for each: rows r and r + 8
of sixteen, of queries and of keys. A tensor core's result has just these rows in one
thread, so that the bits need not change hands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core.arithmetic import Arithmetic
from pallas_kernels.core.positions import Numbering

GROUP = 16  # rows of a block are multiples of it, and so is where they start
_LEVELS = 1 << 16
_MULTIPLIER, _WEYL = 0xD256D193, 0x9E3779B9
# The fewest rounds that pass BigCrush (Salmon et al. 2011, table 2).
_ROUNDS = 7


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Drops each probability with a chance of `rate`, a multiple of 2**-16.

    Attributes:
      seed: two uint32 for each batch entry and head; as blocks, scalars or arrays that
        broadcast against pairs.
      threshold: 16-bit numbers below it are kept (static).
    """

    seed: tuple[Any, Any]
    threshold: int = dataclasses.field(metadata={"static": True})

    @staticmethod
    def threshold_of(rate: float) -> int:
        return round((1.0 - rate) * _LEVELS)

    @property
    def scale(self) -> float:
        """What kept probabilities are multiplied by."""
        return _LEVELS / self.threshold

    @property
    def limit(self) -> int:
        """A pair is kept if its bits are below it."""
        return self.threshold * _LEVELS

    def bits(
        self,
        rows: Mapping[str, tuple[Any, int]],
        numberings: Mapping[str, Numbering],
        order: tuple[str, str],
        arithmetic: Arithmetic,
    ) -> jax.Array:
        """32 bits for each pair of a block, of which the upper 16 count.

        Args:
          rows: (start, size) of `t` (queries) and `s` (keys), multiples of 16.
          numberings: of both; stripes and where they start are multiples of 16.
          order: the block's axes: ("t", "s"), or ("s", "t") for a transposed one.
          arithmetic: the backend's.
        """
        shape = tuple(rows[name][1] // 2 for name in order)

        def numbers(name: str, first) -> jax.Array:
            """Counters of the rows `t` or `s`, two rows each, against the block."""
            start, size = rows[name]
            numbering = dataclasses.replace(numberings[name], first=first)
            start = first_pair(start)
            pair = start + lax.iota(jnp.int32, size // 2)
            index = counters(pair, numbering)
            return jnp.expand_dims(index, 1 - order.index(name))

        def of_one(key, tweak, firsts):
            pairs = {name: numbers(name, firsts[name]) for name in order}
            words = _philox(pairs["s"], pairs["t"] ^ tweak, key, shape, arithmetic)
            # A word belongs to query rows r or r + 8, its halves to key rows r, r + 8.
            if order[0] == "t":
                bits = _halves(_joined(*words))
            else:
                bits = _joined(*map(_halves, words))
            groups = tuple(x for n in shape for x in (n // 8, 8))
            bits = jnp.transpose(bits.reshape(*groups, 2, 2), (0, 4, 1, 2, 5, 3))
            return bits.reshape(tuple(2 * n for n in shape))

        seed = [x.astype(jnp.uint32) for x in self.seed]
        firsts = {name: x.first for name, x in numberings.items()}
        leaves, tree = jax.tree.flatten((*seed, firsts))
        if all(x.ndim == 0 for x in leaves):
            return of_one(seed[0], seed[1], firsts)
        lead = jnp.broadcast_shapes(*(x.shape[:-2] for x in leaves))
        leaves = [jnp.broadcast_to(x, (*lead, 1, 1)).reshape(-1) for x in leaves]
        bits = jax.vmap(of_one)(*tree.unflatten(leaves))
        return bits.reshape(*lead, *bits.shape[1:])


def first_pair(row) -> jax.Array:
    """The pair of rows that a row is the first of, a multiple of 16."""
    return lax.div(jnp.asarray(row, jnp.int32), jnp.int32(2))


def counters(pair: jax.Array, numbering: Numbering) -> jax.Array:
    """The cipher's counters, uint32, one for two rows that are 8 apart.

    Args:
      pair: int32: 8 * i + j is the pair of the rows 16 * i + j and 16 * i + j + 8.
      numbering: of the rows.
    """
    return numbering.of_groups(2).at(pair).astype(jnp.uint32)


def _joined(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.concatenate([a[..., None], b[..., None]], axis=-1)


def _halves(x: jax.Array) -> jax.Array:
    """Each half of a word as the upper half of one; what lies below decides nothing."""
    return _joined(x << jnp.uint32(16), x)


def _philox(x0, x1, key, shape, arithmetic: Arithmetic):
    """Two words of 32 bits for counters (x0, x1) that broadcast against `shape`."""
    words = cipher(x0, x1, key, arithmetic.wide_product)
    return tuple(jnp.broadcast_to(x, shape) for x in words)


def cipher(x0, x1, key, wide_product: Callable) -> tuple[Any, Any]:
    """Two words for the counters (x0, x1), of whatever has uint32's `^` and `+`."""
    for _ in range(_ROUNDS):
        high, low = wide_product(x0, np.uint32(_MULTIPLIER))
        x0, x1 = high ^ key ^ x1, low
        key = key + np.uint32(_WEYL)
    return x0, x1
