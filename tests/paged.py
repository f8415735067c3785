"""Caches in pages: random problems, and what attention over the same rows gives.

Rows that no query needs are NaN in the pools and their scales, and entries of the table
for pages without a needed row are anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_flash2 import Blocks, Config
from tests import tolerances
from tests.cases import ON_GPU

INT8, E4M3, E5M2 = jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2
INT4 = jnp.int4  # in uint8, two elements a byte
_SPREAD = {INT8: 40, INT4: 3}  # of integers that stand for numbers of about 1
SCALES = ("", "K", "BK", "PS1", "PSK")  # axes of the five kinds of scales


def only(backend: str, block: int = 16, splits: int | None = None) -> dict[str, Any]:
    """Options of `paged_attention` for a backend as it runs here."""
    if backend != "triton":
        return {"implementation": backend}
    blocks = Blocks(16, block, num_warps=4, num_stages=2)
    config = Config(forward=blocks, splits=splits, interpret=not ON_GPU)
    return {"implementation": "triton", "config": config}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sequences with their keys in pages.

    Attributes:
      name: for tests.
      lengths: keys of each sequence.
      counts: queries of each sequence (`cu_query_lengths`), or None for t of each.
      padding: tokens beyond those.
      c: pages of a sequence.
      kind: dtype of the elements of pools, if it is not that of the queries.
      scales: of keys and of values, axes of one of `SCALES`.
      d: head size of values; with `is_latent`, of those that are a part of keys.
      starts, new: `key_value_seq_starts` and `query_seq_lengths`.
      block, splits: of the kernel.
      more: other arguments.
    """

    name: str
    lengths: tuple[int, ...] = (80, 0, 37)
    t: int = 1
    counts: tuple[int, ...] | None = None
    padding: int = 0
    n: int = 4
    k: int = 2
    h: int = 16
    d: int = 16
    page: int = 16
    c: int = 5
    dtype: Any = jnp.float32
    kind: Any = None
    scales: tuple[str, str] = ("PSK", "PSK")
    layout: str = "PSKH"
    is_latent: bool = False
    starts: tuple[int, ...] | None = None
    new: tuple[int, ...] | None = None
    block: int = 16
    splits: int | None = None
    more: tuple[tuple[str, Any], ...] = ()

    def made(self, seed: int = 0) -> Made:
        return Made(self, np.random.default_rng(seed))

    def options(self, backend: str) -> dict[str, Any]:
        return only(backend, self.block, self.splits)


class Made:
    """The arrays of a problem: `arguments` of `paged_attention`, and what is exact."""

    def __init__(self, problem: Problem, rng: np.random.Generator):
        self.problem = x = problem
        self.b, self.pages = len(x.lengths), len(x.lengths) * x.c + 4
        table = rng.permutation(self.pages)[: self.b * x.c].reshape(self.b, x.c)
        if self.b > 1:
            table[1, 0] = table[0, 0]  # a shared page
        self.table = table
        self.more = {
            name: y(rng) if callable(y) else y
            for name, y in problem.more
            if y is not None
        }
        self.count = np.array(x.counts or x.new or [x.t] * self.b)
        self.t = int(self.count.max(initial=0)) if x.counts else x.t
        self.tokens = int(self.count.sum()) + x.padding
        self.lengths = np.array(x.lengths, np.int32)
        self.starts = np.array(x.starts or [0] * self.b, np.int32)
        self.seen = self._seen(rng)
        key, value = (self._pool(rng, i, head) for i, head in enumerate((x.h, x.d)))
        if x.is_latent:
            value = key[0], key[1], None, key[3][..., : x.d]
        rows = (self.b, self.t, x.n, x.h)
        self.query = jnp.asarray(rng.standard_normal(rows), x.dtype)
        self.whole = [
            pool[3][table].reshape(self.b, -1, x.k, pool[3].shape[-1])
            for pool in (key, value)
        ]
        if x.kind is not None:
            self.whole = [
                y * z for y, z in zip(self.whole, (key[2], value[2]), strict=True)
            ]
        self.arguments = self._arguments(key, value)

    def _seen(self, rng) -> np.ndarray:
        """Which rows of the pool queries need; sets other entries to anything."""
        x = self.problem
        window = self.more.get("local_window_size")
        left = window[0] if isinstance(window, tuple) else window
        seen = np.zeros((self.pages, x.page), bool)
        self.entries = self.table.copy()
        for b, length in enumerate(self.lengths):
            first = int(self.starts[b])
            if left is not None:
                first = max(first, length - self.count[b] - left, 0)
            s = np.arange(first, length)
            seen[self.table[b, s // x.page], s % x.page] = True
            free = ~np.isin(np.arange(x.c), s // x.page)
            self.entries[b, free] = rng.choice([-1, 10**6, -7, 2**30, 5], free.sum())
        return seen

    def _pool(self, rng, side: int, head: int):
        """Pool, scale, the scale against rows [B, S, K, 1], and its exact elements."""
        x = self.problem
        values = rng.standard_normal((self.pages, x.page, x.k, head))
        mask = self.seen[..., None, None]
        if x.kind is None:
            pool = np.asarray(jnp.asarray(values, x.dtype).astype(jnp.float32))
            made = jnp.where(mask, jnp.asarray(pool, x.dtype), jnp.nan)
            return made.astype(x.dtype), None, None, np.where(mask, pool, 0.0)
        # Of size about 1 at their largest; scales are random, so that none may be lost.
        spread = _SPREAD.get(x.kind)
        pool = np.rint(values * spread) if spread else values
        if x.kind == INT4:
            codes = np.where(mask, np.clip(pool, -8, 7), -8).astype(np.int32) & 15
            made = jnp.asarray(codes[..., ::2] | codes[..., 1::2] << 4, jnp.uint8)
            exact = np.where(mask, np.clip(pool, -8, 7), 0.0)
        else:
            pool = jnp.asarray(pool, jnp.float32).astype(x.kind)
            exact = np.where(mask, np.asarray(pool.astype(jnp.float32)), 0.0)
            filler = jnp.asarray(-128 if x.kind == INT8 else np.nan, x.kind)
            made = jnp.where(mask, pool, filler)
        axes, size = (
            x.scales[side],
            {"P": self.pages, "S": x.page, "K": x.k, "B": self.b, "1": 1},
        )
        scale = rng.uniform(0.5, 2.0, [size[a] for a in axes])
        scale = np.asarray(scale / (spread or 1), np.float32)
        if axes[:1] == "P":
            wide = np.broadcast_to(scale, (self.pages, x.page, x.k))[self.table]
            wide = wide.reshape(self.b, -1, x.k, 1)
            scale = np.where(self.seen[..., None], scale, np.nan)
        else:
            wide = scale[:, None, :, None] if axes == "BK" else scale[..., None]
        return made, jnp.asarray(scale), np.asarray(wide, np.float64), exact

    def _arguments(self, key, value) -> dict[str, Any]:
        x = self.problem
        letters = x.layout.replace("2", "")
        order = [*map("PSKH".index, letters)]
        pools = [
            None if y is None else jnp.transpose(y, order) for y in (key[0], value[0])
        ]
        if "2" in x.layout:
            pools = [jnp.stack(pools, x.layout.index("2")), None]
        elif x.is_latent:
            pools = [pools[0], None]
        found = {
            "query": self.query,
            "key_pages": pools[0],
            "value_pages": pools[1],
            "page_table": jnp.asarray(self.entries, jnp.int32),
            "key_value_seq_lengths": jnp.asarray(self.lengths),
            "kv_layout": x.layout,
            **self.more,
        }
        if x.kind is not None:
            found |= {"key_scale": key[1], "value_scale": value[1]}
        if x.is_latent:
            found["value_head_size"] = x.d
        if x.starts is not None:
            found["key_value_seq_starts"] = jnp.asarray(self.starts)
        if x.new is not None:
            found["query_seq_lengths"] = jnp.asarray(x.new)
        if x.counts is not None:
            ends = np.cumsum([0, *x.counts])
            found["cu_query_lengths"] = jnp.asarray(ends, jnp.int32)
            found["query"] = jnp.asarray(self.of_tokens(self.query, 0.0))
        return found

    def of_tokens(self, x, padding):
        """[tokens, ..] of what sequences have [B, T, ..] of."""
        if self.problem.counts is None:
            return x
        rows = [x[b, :n] for b, n in enumerate(self.count)]
        rest = np.full((self.problem.padding, *x.shape[2:]), padding, x.dtype)
        return np.concatenate([*map(np.asarray, rows), rest])

    def expected(self) -> tuple[dict, dict]:
        """The exact results, and those of plain attention, as `tolerances` has them."""
        arrays = self.query, *self.whole
        own = {"is_causal": True, **self.more}
        tree = own.pop("tree_mask", None)
        arguments = {
            **own,
            "query_offset": self.lengths - self.count,
            "query_seq_lengths": self.count,
            "key_value_seq_lengths": self.lengths,
        }
        s = np.arange(self.whole[0].shape[1])
        arguments["mask"] = (s >= self.starts[:, None])[:, None, None]
        if tree is not None:
            number = s - (self.lengths - self.count)[:, None, None]
            t, inside = np.arange(self.t)[:, None], np.clip(number, 0, self.t - 1)
            tree = np.broadcast_to(tree, (self.b, self.t, self.t))
            kept = (number < 0) | tree[np.arange(self.b)[:, None, None], t, inside]
            arguments["mask"] = arguments["mask"] & kept[:, None]
            arguments["is_causal"] = False
        rows = self.query.shape[:3]
        cotangents = np.zeros((*rows, self.whole[1].shape[-1])), np.zeros(rows)
        found = []
        for of in (tolerances.exact, tolerances.plain):
            results = of(arrays, cotangents, arguments)
            kept = {n: y for n, y in results.items() if n.split()[0] in ("out", "lse")}
            for name, y in kept.items():
                padding = -np.inf if name == "lse" else 0.0
                kept[name] = np.asarray(self.of_tokens(y, padding))
            found.append(kept)
        return found[0], found[1]

    def check(self, out, lse) -> None:
        """Asserts the error rule."""
        actual = {
            "out": np.asarray(out, np.float64),
            "lse": np.asarray(lse, np.float64),
        }
        exact, plain = self.expected()
        unit = tolerances.unit_roundoff(self.problem.dtype)
        tolerances.check(actual, exact, plain, unit)


def _slopes(rng):
    return np.asarray(2.0 ** -rng.uniform(1, 4, 4), np.float32)


def _sinks(rng):
    return np.asarray(rng.standard_normal(4), np.float32)


def _tree(rng):
    """Of random parents or none, another one for each of three sequences."""
    mask = np.zeros((3, 5, 5), bool)
    for tree in mask:
        for t in range(5):
            tree[t] = tree[rng.integers(t)] if t and rng.random() < 0.7 else False
            tree[t, t] = True
    return mask


BF16 = jnp.bfloat16
PROBLEMS = [
    Problem("pages", d=24),
    Problem(
        "small_pages_window",
        t=4,
        page=4,
        c=20,
        lengths=(80, 4, 37, 2),
        more=(("local_window_size", 9), ("logits_soft_cap", 5.0), ("sinks", _sinks)),
    ),
    Problem(
        "int8_parts_starts",
        kind=INT8,
        dtype=BF16,
        h=32,
        d=32,
        splits=2,
        starts=(3, 0, 20),
    ),
    Problem(
        "e4m3_heads_first",
        kind=E4M3,
        dtype=BF16,
        scales=("K", "PS1"),
        layout="KPSH",
        page=32,
        c=3,
        n=2,
    ),
    Problem(
        "e5m2_float16", kind=E5M2, dtype=jnp.float16, scales=("PS1", ""), layout="PSK2H"
    ),
    Problem(
        "alibi_padded_queries",
        t=4,
        new=(4, 0, 2),
        kind=E4M3,
        scales=("BK", "BK"),
        layout="PKSH",
        more=(("alibi_slopes", _slopes),),
    ),
    Problem(
        "ragged_int8",
        lengths=(30, 7, 5, 50),
        counts=(1, 7, 0, 4),
        padding=4,
        kind=INT8,
        scales=("BK", "PSK"),
        layout="P2SKH",
        page=8,
        c=7,
    ),
    Problem(
        "ragged_calls",
        lengths=(30, 40, 5, 50, 3),
        counts=(1, 23, 2, 9, 0),
        padding=2,
        k=1,
        c=4,
        starts=(2, 0, 0, 20, 0),
        more=(("alibi_slopes", _slopes), ("sinks", _sinks)),
    ),
    Problem("latent", k=1, h=80, d=64, is_latent=True, lengths=(20, 32), c=2, t=2),
    Problem(
        "rows_not_causal",
        page=1,
        c=40,
        lengths=(33, 40, 7),
        t=2,
        dtype=BF16,
        more=(("is_causal", False),),
    ),
    Problem(
        "tree_int8_parts",
        t=5,
        kind=INT8,
        splits=2,
        lengths=(66, 3, 37),
        starts=(3, 0, 20),
        more=(("tree_mask", _tree),),
    ),
    Problem(
        "int4_parts",
        kind=INT4,
        dtype=BF16,
        h=64,
        d=128,
        n=2,
        scales=("PSK", "BK"),
        splits=2,
        starts=(3, 0, 20),
    ),
    Problem(
        "int4_both_in_one",
        kind=INT4,
        h=64,
        d=64,
        t=2,
        page=8,
        c=10,
        scales=("PS1", "PSK"),
        layout="PSK2H",
    ),
    Problem("int4_small_heads", kind=INT4, h=6, d=10, layout="KPSH"),
    Problem("odd_pages", page=24, c=4, block=32, lengths=(95, 0, 40)),
]


def by_name(name: str) -> Problem:
    return next(x for x in PROBLEMS if x.name == name)
