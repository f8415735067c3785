"""Calls of a server: tokens against caches, in pages or not, and what is exact."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from jax_flash2 import (
    append_to_pages,
    attention,
    merge,
    paged_attention,
    quantize_kv,
)

KINDS = {
    "bfloat16": jnp.bfloat16,
    "int8": jnp.int8,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
}
UNSHARED = "not in common"
# Calls come to other rows in turns until so many bytes: more than a GPU's cache has.
_CYCLED = 256 << 20
_BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences of equal length: batch, keys, query and key heads, head size, queries.

    Attributes:
      copies: of the batch, each with rows of its own, which calls take in turns.
    """

    batch: int
    s: int
    n: int
    k: int
    h: int
    t: int = 1

    def __str__(self) -> str:
        sizes = f"B {self.batch}, S {self.s}, {self.n} ({self.k}) x {self.h}"
        return sizes if self.t == 1 else f"{sizes}, T {self.t}"

    @property
    def rows(self) -> int:
        return self.batch * self.s

    @property
    def copies(self) -> int:
        most = _CYCLED if harness.is_gpu() else 1
        return max(1, most // (4 * self.rows * self.k * self.h))

    def small(self) -> Case:
        """For a CPU."""
        return dataclasses.replace(self, batch=min(self.batch, 2), s=128, h=16)


@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values [rows, K, H] of all copies, and scales [rows, K] or None."""

    keys: jax.Array
    values: jax.Array
    scales: tuple[jax.Array, jax.Array] | None = None

    @classmethod
    def of(cls, case: Case, kind: str) -> Cache:
        dtype, rows = KINDS[kind], case.copies * case.rows

        @jax.jit
        def made(key):
            x = jax.random.normal(key, (rows, case.k, case.h), _BF16)
            return (x, None) if dtype == _BF16 else quantize_kv(x, dtype)

        (keys, of_keys), (values, of_values) = map(made, _keys(2))
        return cls(keys, values, None if dtype == _BF16 else (of_keys, of_values))

    @property
    def arrays(self) -> tuple:
        return self.keys, self.values, self.scales


@dataclasses.dataclass(frozen=True)
class Program:
    """What is timed.

    Attributes:
      peer: who runs, in words.
      function: of each of `arguments`, in turns.
      size: bytes of keys, values and scales that it reads.
      last: of its results, those that `want` is.
      want: what is exact; None where nothing is compared.
      is_traced: whether JAX compiles the function.
    """

    peer: str
    function: Callable
    arguments: Sequence[tuple]
    size: int
    last: Callable[[Any], Any] = lambda out: out[-1]
    want: np.ndarray | None = None
    is_traced: bool = True


def _keys(count: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), count)


def query(case: Case) -> jax.Array:
    return jax.random.normal(
        jax.random.key(7), (case.batch, case.t, case.n, case.h), _BF16
    )


def tables(case: Case, page: int) -> list[np.ndarray]:
    """Page tables [B, C] of each copy; pages lie in any order."""
    rng = np.random.default_rng(0)
    pages = case.rows // page
    return [
        i * pages + rng.permutation(pages).reshape(case.batch, -1).astype(np.int32)
        for i in range(case.copies)
    ]


@functools.partial(jax.jit, compiler_options=harness.UNTUNED)
def _exact(q, k, v):
    """Softmax of the last T keys' queries [T, N, H], over keys [S, K, H]."""
    (t, n, h), (s, heads, _) = q.shape, k.shape
    product = functools.partial(jnp.einsum, precision="highest")
    q = q.astype(jnp.float32).reshape(t, heads, n // heads, h)
    scores = product("tkgh,skh->kgts", q, k) * h**-0.5
    kept = jnp.arange(s) <= jnp.arange(s - t, s)[:, None]
    p = jax.nn.softmax(jnp.where(kept, scores, -jnp.inf))
    return product("kgts,skh->tkgh", p, v).reshape(t, n, -1)


def exact(q, cache: Cache, rows: np.ndarray) -> np.ndarray:
    """What the last queries [T, N, H] of a sequence get from these rows."""
    found = [x[rows].astype(jnp.float32) for x in (cache.keys, cache.values)]
    if cache.scales is not None:
        found = [
            x * y[rows][..., None] for x, y in zip(found, cache.scales, strict=True)
        ]
    return np.asarray(_exact(q, *found))


def rows_of(table: np.ndarray, page: int) -> np.ndarray:
    """Numbers of the rows that are in a line of a page table."""
    return (table[:, None] * page + np.arange(page)).reshape(-1)


def in_pages(x: jax.Array, page: int) -> jax.Array:
    return x.reshape(-1, page, *x.shape[1:])


def paged(page: int, **options) -> Callable:
    """Our call, of a query, a cache's arrays, a table and lengths."""

    def function(q, keys, values, scales, table, lengths):
        given = {}
        if scales is not None:
            pools = [in_pages(x, page) for x in scales]
            given = dict(zip(("key_scale", "value_scale"), pools, strict=True))
        pools = (in_pages(x, page) for x in (keys, values))
        return paged_attention(q, *pools, table, lengths, **given, **options)

    return function


def _dense(q, keys, values, lengths):
    """Ours, of rows that lie in order."""
    more = {"query_offset": lengths - q.shape[1], "key_value_seq_lengths": lengths}
    return attention(q, keys, values, is_causal=True, **more)


def _read(x: jax.Array, y: jax.Array):
    return jnp.max(x), jnp.max(y)


def read(name: str, size: int, turns: int) -> Program:
    """A plain read of so many bytes, as numbers of two bytes."""
    arrays = [
        tuple(jnp.ones((2, size // 4), _BF16) * (i + 1)) for i in range(max(1, turns))
    ]
    return Program(name, _read, arrays, size)


def lengths_of(case: Case) -> jax.Array:
    return jnp.full(case.batch, case.s, jnp.int32)


def in_order(case: Case, cache: Cache) -> list[tuple]:
    """Keys and values [B, S, K, H] of each copy."""
    shape = case.copies, case.batch, case.s, case.k, case.h
    return [
        tuple(x.reshape(shape)[i] for x in (cache.keys, cache.values))
        for i in range(case.copies)
    ]


def ours(
    case: Case, kind: str, cache: Cache, pages: Sequence[int], **options
) -> Iterator[Program]:
    """A program for each size of pages."""
    q, lengths = query(case), lengths_of(case)
    size = sum(x.nbytes for x in jax.tree.leaves(cache.arrays)) // case.copies
    for page in pages:
        found = tables(case, page)
        given = [(q, *cache.arrays, jnp.asarray(x), lengths) for x in found]
        want = exact(q[-1], cache, rows_of(found[0][-1], page))
        yield Program(
            f"{kind}, pages of {page}", paged(page, **options), given, size, want=want
        )


def dense(case: Case, cache: Cache) -> Program:
    q, lengths = query(case), lengths_of(case)
    given = [(q, *x, lengths) for x in in_order(case, cache)]
    size = sum(x.nbytes for x in given[0][1:3])
    want = exact(q[-1], cache, np.arange(case.rows - case.s, case.rows))
    return Program("jax_flash2, dense", _dense, given, size, want=want)


def _of_rows(rows: int) -> Case:
    """One sequence of so many rows, from which others take pages."""
    heads = (32, 8, 128) if harness.is_gpu() else (4, 2, 16)
    return Case(1, rows, *heads)


def uneven(count: int, chunk: int, most: int, page: int = 64) -> Iterator[Program]:
    """`count` tokens and a chunk of a prompt: one ragged call, and the two apart.

    Each sequence has an eighth of `most` to `most` keys, in whole pages; the chunk is
    the newest part of a prompt four times as long.
    """
    rng = np.random.default_rng(0)
    held = rng.integers(most // 8 // page, most // page + 1, count)  # pages of each
    held = np.append(held, 4 * chunk // page)
    case = _of_rows(int(held.sum()) * page)
    cache, tokens = Cache.of(case, "bfloat16"), count + chunk
    table = np.zeros((count + 1, held.max()), np.int32)
    free = np.split(rng.permutation(held.sum()), np.cumsum(held)[:-1])
    for line, pages in zip(table, free, strict=True):
        line[: len(pages)] = pages
    q = jax.random.normal(jax.random.key(7), (tokens, case.n, case.h), _BF16)
    cu = jnp.asarray([*range(count + 1), tokens], jnp.int32)
    few = 4  # queries of the chunk that are compared
    of_token, of_chunk = (rows_of(pages, page) for pages in free[-2:])
    want = exact(q[-few:], cache, of_chunk)
    each = 4 * case.k * case.h * page  # bytes of a page of keys and values
    sizes = [each * int(held[:-1].sum()), each * int(held[-1])]
    arrays, given = cache.arrays, (jnp.asarray(table), jnp.asarray(held * page))

    def ragged(q, keys, values, scales, table, lengths, cu):
        call = paged(page, cu_query_lengths=cu)
        return call(q, keys, values, scales, table, lengths)

    name = f"{count} tokens and a chunk of {chunk}: one call"
    operands = [(q, *arrays, *given, cu)]
    yield Program(name, ragged, operands, sum(sizes), lambda x: x[-few:], want)
    operands = [(q[:count, None], *arrays, *(x[:-1] for x in given))]
    own = exact(q[count - 1 : count], cache, of_token)
    yield Program(f"the {count} tokens", paged(page), operands, sizes[0], want=own)
    operands = [(q[None, count:], *arrays, *(x[-1:] for x in given))]
    yield Program(
        "the chunk", paged(page), operands, sizes[1], lambda x: x[0, -few:], want
    )


def shared(count: int, prefix: int, own: int, page: int = 64) -> Iterator[Program]:
    """Requests with a prefix in common: read once, and by each of them.

    By each from the pages in common, of which many are in the GPU's cache then, and
    from pages of its own, as without sharing.
    """
    case = _of_rows(prefix + count * own)
    cache = Cache.of(case, "bfloat16")
    order = np.random.default_rng(0).permutation(case.rows // page).astype(np.int32)
    first, rest = order[: prefix // page], order[prefix // page :].reshape(count, -1)
    whole = np.concatenate([np.tile(first, (count, 1)), rest], 1)
    q = jax.random.normal(jax.random.key(7), (count, 1, case.n, case.h), _BF16)
    lengths = jnp.full(count, own, jnp.int32)
    want = exact(q[-1], cache, rows_of(whole[-1], page))
    row = 4 * case.k * case.h

    def once(q, keys, values, scales, first, rest, lengths):
        cache, parts = (keys, values, scales), {"return_residual": True}
        of_all = paged(page, is_causal=False, **parts)
        end = jnp.full(1, prefix, jnp.int32)
        common = of_all(q.swapaxes(0, 1), *cache, first[None], end)
        common = tuple(x.swapaxes(0, 1) for x in common)
        return merge(common, paged(page, **parts)(q, *cache, rest, lengths))[0]

    given = q, *cache.arrays, jnp.asarray(first), jnp.asarray(rest), lengths
    yield Program("read once", once, [given], row * case.rows, want=want)
    size, function = row * count * (prefix + own), paged(page)
    given = q, *cache.arrays, jnp.asarray(whole), lengths + prefix
    yield Program("read by each", function, [given], size, want=want)
    alone = _of_rows(count * (prefix + own))
    cache = Cache.of(alone, "bfloat16")
    order = np.random.default_rng(1).permutation(alone.rows // page).astype(np.int32)
    whole = order.reshape(count, -1)
    given = q, *cache.arrays, jnp.asarray(whole), lengths + prefix
    want = exact(q[-1], cache, rows_of(whole[-1], page))
    yield Program(UNSHARED, function, [given], size, want=want)


def prompt(rows: int, page: int = 64) -> Iterator[Program]:
    """As many queries as keys: in order, and from pages."""
    case = dataclasses.replace(_of_rows(rows), t=rows)
    cache, few = Cache.of(case, "bfloat16"), 4  # queries that are compared
    q, lengths, (table, *_) = query(case), lengths_of(case), tables(case, page)
    keys, values = in_order(case, cache)[0]
    size = keys.nbytes + values.nbytes

    def last(x):
        return x[-1, -few:]

    want = exact(q[-1, -few:], cache, np.arange(rows))
    given = (q, keys, values, lengths)
    yield Program("jax_flash2, dense", _dense, [given], size, last, want)
    want = exact(q[-1, -few:], cache, rows_of(table[-1], page))
    given = (q, *cache.arrays, jnp.asarray(table), lengths)
    for name in (None, "triton") if harness.is_gpu() else (None,):
        run = paged(page, implementation=name)
        words = f", {name}" if name else ""
        peer = f"bfloat16, pages of {page}{words}"
        yield Program(peer, run, [given], size, last, want)


def appended(case: Case, kind: str, page: int = 64) -> Program:
    """A token for each sequence, written into a pool in place."""
    cache = Cache.of(dataclasses.replace(case, s=page), kind)
    pools = [in_pages(x, page) for x in (cache.keys, cache.values)]
    new = jax.random.normal(jax.random.key(7), (2, case.batch, case.k, case.h), _BF16)
    slots = jnp.arange(case.batch, dtype=jnp.int32) * page
    scales = {}
    if cache.scales is not None:
        of = [in_pages(x, page) for x in cache.scales]
        scales = dict(zip(("key_scale", "value_scale"), of, strict=True))
    jitted = jax.jit(append_to_pages, donate_argnums=(0, 1), donate_argnames=[*scales])
    state = [*pools, *scales.values()]

    def run(new, slots):
        names = dict(zip(scales, state[2:], strict=True))
        state[:] = jitted(*state[:2], *new, slots, **names)
        return state[0]

    size = math.prod(new.shape) * (1 if scales else 2)
    name = f"append {case.batch} tokens, {kind}"
    return Program(name, run, [(new, slots)], size, is_traced=False)
