"""Sequences with their own numbers of queries, as blocks of equally many queries.

The tokens of all sequences lie one after the other. Each sequence is cut in blocks of
as many queries, the last of which may be padding, and the blocks are the batch of a
call: each has the pages of its sequence, and a length that ends with its own last
query. There are at most tokens // block + B of them, whatever the lengths are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tables import FEW_ROWS


@dataclasses.dataclass(frozen=True)
class Ragged:
    """How tokens lie in blocks.

    Attributes:
      tokens_of: how many tokens there are.
      block: queries of a block.
      cu: int32 [B + 1], the first token of each sequence, and the end of the last.
      before: int32 [B], blocks of the sequences before each.
      sequence: int32 [blocks], the sequence of each block.
      first: int32 [blocks], the number in its sequence of the first query of a block.
    """

    tokens_of: int
    block: int
    cu: jax.Array
    before: jax.Array
    sequence: jax.Array
    first: jax.Array

    @classmethod
    def of(cls, tokens: int, cu: jax.Array, group: int) -> Ragged:
        """Blocks for as many tokens as the sequences have on average, in few rows.

        Args:
          tokens: how many there are, with padding.
          cu: as above; clipped so that it rises from 0 to `tokens`.
          group: query heads that are rows of one block in the kernels.
        """
        cu = jax.lax.cummax(jnp.clip(cu, 0, tokens))
        sequences = cu.shape[0] - 1
        mean = -(-tokens // max(1, sequences))
        block = max(
            1, min(FEW_ROWS // max(1, group), 1 << max(0, mean - 1).bit_length())
        )
        count = jnp.diff(cu)
        ends = jnp.cumsum((count + block - 1) // block, dtype=jnp.int32)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])[:-1]
        numbers = jnp.arange(tokens // block + sequences, dtype=jnp.int32)
        of = jnp.minimum(_count(ends, numbers), sequences - 1)
        first = (numbers - before[of]) * block
        return cls(tokens, block, cu, before, of, first)

    def queries(self, x: jax.Array) -> jax.Array:
        """[blocks, block, ..] of an array of tokens."""
        row = (self.cu[self.sequence] + self.first)[:, None] + jnp.arange(self.block)
        if not self.tokens_of:
            return jnp.zeros((*row.shape, *x.shape[1:]), x.dtype)
        return x[jnp.clip(row, 0, self.tokens_of - 1)]

    def of_sequence(self, x: jax.Array) -> jax.Array:
        """What each sequence has one of, for each block."""
        return x[self.sequence]

    def of_blocks(self, given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Tables and lengths of the sequences, as those of the blocks."""
        count = jnp.diff(self.cu)[self.sequence]
        new = jnp.clip(count - self.first, 0, self.block)
        found: dict[str, Any] = {n: self.of_sequence(x) for n, x in given.items()}
        offset = found["lengths"] - count + self.first
        return {**found, "query_seq_lengths": new, "offset": offset}

    def tokens(self, x: jax.Array, padding: float) -> jax.Array:
        """[tokens, ..] of an array of blocks, inverse to `queries`."""
        token = jnp.arange(self.tokens_of, dtype=jnp.int32)
        b = jnp.clip(_count(self.cu, token) - 1, 0, self.cu.shape[0] - 2)
        row = token - self.cu[b]
        at = self.before[b] + row // self.block
        inside = (token >= self.cu[0]) & (token < self.cu[-1])
        inside = inside.reshape(-1, *[1] * (x.ndim - 2))
        found = x[jnp.where(row >= 0, at, 0), row % self.block]
        return jnp.where(inside, found, jnp.asarray(padding, x.dtype))


def _count(bounds: jax.Array, numbers: jax.Array) -> jax.Array:
    """How many of the bounds are at most each number; in one kernel, not in a loop."""
    return jnp.sum(bounds <= numbers[:, None], axis=1, dtype=jnp.int32)
