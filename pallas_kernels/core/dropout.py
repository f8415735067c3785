"""Dropout: which probabilities are kept, from counters, the same in every backend.

The bits of a (query, key) pair follow from a seed and the pair's row numbers alone, by
Philox 2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): no
state, no array of T x S, and the same mask whatever the block sizes, the orientation of
a block or the order of the loops. Forward and backward make it anew.

One call of the cipher gives two words of 32 bits for eight pairs. A word x belongs to a
row of queries, r or r + 8 of sixteen, and to rows of keys c, c + 8, c + 16 and c + 24
of thirty-two: their pairs' numbers are the upper 16 bits of x, turned to the left by 0,
8, 16 and 24 bits. A tensor core's result has these rows in one thread, so that the bits
need not change hands. In a transposed one a thread has two of the four keys, and makes
the same words for those alone.

The upper byte of such a number, a pair's own, decides, except in one case of 256: on a
tie the lower byte does, so that rates are exact to 2**-16. It is the next pair's own.
The covariance of two such pairs, kept with chance p, is 2**-8 (the chance of a tie)
times at most p (1 - p): a correlation of at most 1/256, and none where p is a multiple
of 1/256. (FlashAttention's own kernels have 8 bits for a pair, and round the rate to
1/256.)

The seed follows from a random key by the same cipher (`seeds`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core.arithmetic import Arithmetic, wide_product
from pallas_kernels.core.positions import Numbering

BLOCK = 16  # rows of a block are multiples of it, and so is where they start
GROUP = 32  # keys of a stripe are, and so is the number of its first one
_QUERIES, _KEYS = 2, 4  # rows of a call of the cipher, each 8 after the one before
_TURNS = 0, 16  # bits that a word is turned by for the first two keys and the others
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
    arguments: ClassVar = {"seed": "dropout_rng"}

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
          rows: (start, size) of `t` (queries) and `s` (keys), multiples of `BLOCK`. If
            the keys' size is a multiple of `GROUP`, so is their start.
          numberings: of both; stripes and where they start are multiples of `GROUP`, of
            queries of `BLOCK`.
          order: the block's axes: ("t", "s"), or ("s", "t") for a transposed one.
          arithmetic: the backend's.
        """
        count = rows_of_calls(rows, order)
        shape = tuple(rows[name][1] // count[name] for name in order)

        def of_one(key, tweak, firsts):
            def numbers(name: str) -> list[jax.Array]:
                """Of the calls' rows `t` or `s`, against the block's calls."""
                start, size = rows[name]
                group = first_group(start, count[name])
                group += lax.iota(jnp.int32, size // count[name])
                numbering = dataclasses.replace(numberings[name], first=firsts[name])
                found = numbers_of_calls(name, group, numbering, count[name])
                return [jnp.expand_dims(x, 1 - order.index(name)) for x in found]

            (t,), (s, *turns) = numbers("t"), numbers("s")
            words = cipher(s, t ^ tweak, key, arithmetic.wide_product)
            # New last axes, for what a call has of the block's first and second axis.
            if order[0] == "t":
                turns = [x[..., None] for x in turns]
                bits = _stacked(bits_of_keys(_stacked(words), turns, turned))
            else:
                of_words = (bits_of_keys(x, turns, turned) for x in words)
                bits = _stacked([_stacked(x) for x in of_words])
            eights = (x for n in shape for x in (n // 8, 8))
            bits = bits.reshape(*eights, *bits.shape[2:])
            bits = jnp.transpose(bits, (0, 4, 1, 2, 5, 3))
            return bits.reshape(tuple(rows[name][1] for name in order))

        seed = [x.astype(jnp.uint32) for x in self.seed]
        firsts = {name: x.first for name, x in numberings.items()}
        leaves, tree = jax.tree.flatten((*seed, firsts))
        if all(x.ndim == 0 for x in leaves):
            return of_one(seed[0], seed[1], firsts)
        lead = jnp.broadcast_shapes(*(x.shape[:-2] for x in leaves))
        leaves = [jnp.broadcast_to(x, (*lead, 1, 1)).reshape(-1) for x in leaves]
        bits = jax.vmap(of_one)(*tree.unflatten(leaves))
        return bits.reshape(*lead, *bits.shape[1:])


@functools.partial(jax.jit, static_argnames=("batch", "heads"))
def seeds(
    words: jax.Array, batch: tuple[int, ...] = (), heads: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """The seed of each batch entry and head, from the words of a random key.

    The numbers of head and entry are the counters, enciphered with one word of the key
    after the other. So no two heads of a call have the same seed. Each seed follows
    from the key's words and these two numbers alone: a key has the same seeds mapped
    by `jax.vmap` or not, whatever its implementation.

    Args:
      words: uint32, of `jax.random.key_data`: any number of words.
      batch, heads: the shape of the batch, and () or (number of heads,).

    Returns:
      Two uint32 arrays [*batch, *heads].
    """
    shape = (math.prod(batch), *heads)
    entry = lax.broadcasted_iota(jnp.uint32, shape, 0)
    head = lax.broadcasted_iota(jnp.uint32, shape, 1) if heads else entry * np.uint32(0)
    for word in words.reshape(-1):
        head, entry = cipher(head, entry, word, wide_product)
    return head.reshape(*batch, *heads), entry.reshape(*batch, *heads)


def rows_of_calls(
    rows: Mapping[str, tuple[Any, int]], order: tuple[str, str]
) -> dict[str, int]:
    """How many rows `t` and `s` of a block a call of the cipher is made for.

    Args:
      rows, order: of `Dropout.bits`.
    """
    whole = order[0] == "t" and rows["s"][1] % GROUP == 0
    return {"t": _QUERIES, "s": _KEYS if whole else _KEYS // 2}


def first_group(row, count: int) -> jax.Array:
    """The group (`numbers_of_calls`) that a row, a multiple of `BLOCK`, is in."""
    return lax.div(jnp.asarray(row, jnp.int32), jnp.int32(count))


def numbers_of_calls(
    name: str, group: jax.Array, numbering: Numbering, count: int
) -> list[jax.Array]:
    """What calls need to know of their rows: counters and, of half their keys, turns.

    Args:
      name: of the rows, `t` or `s`.
      group: int32: 8 * i + j is the group of the `count` rows 8 * count * i + j,
        8 * count * i + j + 8 and so on.
      numbering: of the rows.
      count: of `rows_of_calls`.
    """
    turns = []
    if name == "s" and count < _KEYS:
        # The first two keys of four or the others.
        turns = [((group & 8) * 2).astype(jnp.uint32)]
        sixteen = lax.shift_right_logical(group, jnp.full_like(group, 4))
        group, count = sixteen * 8 + (group & 7), _KEYS
    return [numbering.of_groups(count).at(group).astype(jnp.uint32), *turns]


def bits_of_keys(word, turns: Sequence[Any], turned: Callable) -> list[Any]:
    """The bits of the pairs that a word is for, by keys.

    Args:
      turns: of `numbers_of_calls`.
      turned: as the function of this name.
    """
    words = [turned(word, by) for by in turns or _TURNS]
    return [x for y in words for x in (y, y << np.uint32(8))]


def turned(word, by):
    """A word turned by 0 or 16 bits: then its halves change places."""
    half = np.uint32(16)
    return jnp.where(by == 0, word, (word << half) | (word >> half))


def _stacked(x: Sequence[jax.Array]) -> jax.Array:
    """Two or four arrays along a new last axis, by twos, as Triton does it."""
    if len(x) == 1:
        return x[0][..., None]
    halves = [_stacked(x[i::2])[..., None] for i in range(2)]
    return jnp.concatenate(halves, -1).reshape(*x[0].shape, len(x))


def cipher(x0, x1, key, wide_product: Callable) -> tuple[Any, Any]:
    """Two words for the counters (x0, x1), of whatever has uint32's `^` and `+`."""
    for _ in range(_ROUNDS):
        high, low = wide_product(x0, np.uint32(_MULTIPLIER))
        x0, x1 = high ^ key ^ x1, low
        key = key + np.uint32(_WEYL)
    return x0, x1
