"""Sequences with their own numbers of queries, as blocks of equally many queries.

The tokens of all sequences lie one after the other. Sequences are cut in blocks of as
many queries, the last of which may be padding, and the blocks are the batch of a call:
each has the pages of its sequence, and a length that ends with its own last query. How
many there may be follows from the numbers of tokens and of sequences.

Tokens that are sampled and chunks of prompts want different programs: the first wait
for memory and have few rows, the second multiply large tiles. So if there are many
tokens for the sequences, those with few have a call of their own. No sequence is in
both, so that its bits do not depend on the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tables import FEW_ROWS, padded

# Queries of a block of sequences that have many: more than `tables.FEW_ROWS`, of which
# tables have other blocks. Of large heads as many as have so many elements: the tiles
# of kernels are smaller, and what is padded takes memory.
_MANY, _ELEMENTS = 128, 128 * 256


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a call, of some sequences or all.

    Attributes:
      size: queries of a block.
      count: int32 [B], queries of each sequence, 0 of one that has no blocks here.
      begin: int32 [B], the first token of each sequence.
      before: int32 [B], blocks of the sequences before each.
      sequence: int32 [blocks], the sequence of each block; None if each has one.
      first: int32 [blocks], the number in its sequence of the first query of a block.
    """

    size: int
    count: jax.Array
    begin: jax.Array
    before: jax.Array
    sequence: jax.Array | None
    first: jax.Array

    @classmethod
    def of_each(cls, size: int, count: jax.Array, begin: jax.Array) -> Blocks:
        """One for each sequence, of which none has more than `size` queries."""
        numbers = jnp.arange(count.shape[0], dtype=jnp.int32)
        return cls(size, count, begin, numbers, None, jnp.zeros_like(numbers))

    @classmethod
    def of_all(
        cls, size: int, count: jax.Array, begin: jax.Array, blocks: int
    ) -> Blocks:
        """As many blocks, which hold all queries, those of a sequence in order."""
        ends = jnp.cumsum((count + size - 1) // size, dtype=jnp.int32)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])[:-1]
        numbers = jnp.arange(blocks, dtype=jnp.int32)
        of = jnp.minimum(_count(ends, numbers), count.shape[0] - 1)
        return cls(size, count, begin, before, of, (numbers - before[of]) * size)

    def of_sequence(self, x: jax.Array) -> jax.Array:
        """What each sequence has one of, for each block."""
        return x if self.sequence is None else x[self.sequence]

    def queries(self, x: jax.Array) -> jax.Array:
        """[blocks, size, ..] of an array of tokens."""
        first = self.of_sequence(self.begin) + self.first
        row = first[:, None] + jnp.arange(self.size)
        if not x.shape[0]:
            return jnp.zeros((*row.shape, *x.shape[1:]), x.dtype)
        return x[jnp.clip(row, 0, x.shape[0] - 1)]

    def arguments(self, given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Tables and lengths of the sequences, as those of the blocks."""
        count = self.of_sequence(self.count)
        new = jnp.clip(count - self.first, 0, self.size)
        found: dict[str, Any] = {n: self.of_sequence(x) for n, x in given.items()}
        offset = found["lengths"] - count + self.first
        return {**found, "query_seq_lengths": new, "offset": offset}

    def rows(self, x: jax.Array, b: jax.Array, row: jax.Array) -> jax.Array:
        """Of [blocks, size, ..], those of numbered queries of sequences b."""
        return x[self.before[b] + row // self.size, row % self.size]


@dataclasses.dataclass(frozen=True)
class Ragged:
    """How tokens lie in blocks.

    Attributes:
      tokens_of: how many tokens there are.
      cu: int32 [B + 1], the first token of each sequence, and the end of the last.
      calls: the blocks of each call.
    """

    tokens_of: int
    cu: jax.Array
    calls: tuple[Blocks, ...]

    @classmethod
    def of(cls, tokens: int, cu: jax.Array, group: int, head_size: int) -> Ragged:
        """Blocks of as few rows as the mean sequence has, or those and larger ones.

        Args:
          tokens: how many there are, with padding.
          cu: as above; clipped so that it rises from 0 to `tokens`.
          group: query heads that are rows of one block in the kernels.
          head_size: of queries.
        """
        cu = jax.lax.cummax(jnp.clip(cu, 0, tokens))
        count, begin, sequences = jnp.diff(cu), cu[:-1], cu.shape[0] - 1
        mean = _power_of_two(-(-tokens // sequences))
        few, packed = (max(1, rows // max(1, group)) for rows in (padded(1), FEW_ROWS))
        many = min(_MANY, max(1, _ELEMENTS // padded(head_size)))
        size, most = min(many, _power_of_two(tokens)), (few, packed)
        if mean <= few and tokens <= max(many, sequences):
            size, most = mean, ()
        elif mean > packed:
            most = (few,)
        calls, least = [], 1
        for n in most:
            own = jnp.where((least <= count) & (count <= n), count, 0)
            calls.append(Blocks.of_each(n, own, begin))
            least = n + 1
        if least <= tokens or not calls:
            ends = min(sequences, tokens // least)  # of sequences with so many
            blocks = max(1, (tokens + ends * (size - 1)) // size)
            own = jnp.where(least <= count, count, 0)
            calls.append(Blocks.of_all(size, own, begin, blocks))
        return cls(tokens, cu, tuple(calls))

    def tokens(self, results: Sequence[jax.Array], padding: float) -> jax.Array:
        """[tokens, ..] of the arrays of the calls' blocks, inverse to `queries`."""
        token = jnp.arange(self.tokens_of, dtype=jnp.int32)
        b = jnp.clip(_count(self.cu, token) - 1, 0, self.cu.shape[0] - 2)
        row = token - self.cu[b]
        found = jnp.asarray(padding, results[0].dtype)
        for blocks, x in zip(self.calls, results, strict=True):
            inside = (row >= 0) & (row < blocks.count[b])
            rows = blocks.rows(x, jnp.where(inside, b, 0), jnp.where(inside, row, 0))
            found = jnp.where(inside.reshape(-1, *[1] * (x.ndim - 2)), rows, found)
        return found


def _power_of_two(x: int) -> int:
    """The first from x on."""
    return 1 << max(0, x - 1).bit_length()


def _count(bounds: jax.Array, numbers: jax.Array) -> jax.Array:
    """How many of the bounds are at most each number; in one kernel, not in a loop."""
    return jnp.sum(bounds <= numbers[:, None], axis=1, dtype=jnp.int32)
