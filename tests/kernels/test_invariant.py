"""Equal bits: whatever a row's neighbours are, and however its sequence is cut."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_flash2 import Blocks, Config, Context, attention, explain, paged_attention
from pallas_kernels import device, layout
from tests.cases import ON_GPU
from tests.lowering import on_gpu
from tests.tiers import deep, deeply

BACKENDS = ["triton"] if ON_GPU else ["triton", "xla"]
# What the tests otherwise leave out (`conftest`): without it LLVM contracts a product
# and a sum in some programs and not in others, and two roundings are not one.
COMPILED = {} if ON_GPU else {"xla_backend_optimization_level": "2"}
SMALL = Blocks(16, 16, num_warps=4, num_stages=2)


def jit(function: Callable) -> Callable:
    return jax.jit(function, compiler_options=COMPILED)


def _options(backend: str, **fields) -> dict[str, Any]:
    interpret = backend == "triton" and not ON_GPU
    config = Config(interpret=interpret, **fields)
    return {"implementation": backend, "config": config, "return_residual": True}


def _assert_equal(found, expected, message: str) -> None:
    for name, one, other in zip(("output", "lse"), found, expected, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_array_equal(one, other, f"{message}: {name}")


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Sequences whose rows are compared, however they are cut.

    Attributes:
      arguments: of `attention`, beside the options.
      b, t, n, k, h, d: sizes.
      dtype: of the operands.
      segments: whether documents are packed in a row.
    """

    arguments: tuple[tuple[str, Any], ...] = ()
    b: int = 2
    t: int = 70
    n: int = 4
    k: int = 2
    h: int = 16
    d: int = 16
    dtype: str = "float32"
    segments: bool = False

    def arrays(self) -> list[jax.Array]:
        rng = np.random.default_rng(0)
        shapes = (self.n, self.h), (self.k, self.h), (self.k, self.d)
        return [
            jnp.asarray(2 * rng.standard_normal((self.b, self.t, *x)), self.dtype)
            for x in shapes
        ]

    def ids(self) -> jax.Array:
        first = self.t // 3
        second = min(11, self.t - first)
        documents = np.repeat([3, 1, 2], [first, second, self.t - first - second])
        return jnp.asarray(np.broadcast_to(documents, (self.b, self.t)), jnp.int32)


class Cut:
    """Calls of parts of such sequences, each compiled once for its sizes."""

    def __init__(self, sequences: Sequences, options: dict[str, Any]):
        self.of = sequences
        self.options = {"is_causal": True, **dict(sequences.arguments), **options}
        self._call = jit(self._attend)

    def _attend(self, q, k, v, first, lengths, ids):
        more = {}
        if self.of.segments:
            more = {"query_segment_ids": ids[0], "key_value_segment_ids": ids[1]}
        more |= {"query_offset": first, "key_value_seq_lengths": lengths}
        return attention(q, k, v, **more, **self.options)

    def rows(self, first: int, end: int, capacity: int = 0, batch=slice(None)):
        """Rows [first, end) of some entries, with NaN in a cache of more rows."""
        q, k, v = (x[batch] for x in self.of.arrays())
        ids = self.of.ids()[batch]
        if self.options["is_causal"]:  # later keys are not in the cache yet
            k, v, known = k[:, :end], v[:, :end], ids[:, :end]
        else:
            known = ids
        lengths = jnp.full(len(q), k.shape[1], jnp.int32)
        room = max(0, capacity - k.shape[1])
        width = [(0, 0), (0, room), (0, 0), (0, 0)]
        k, v = (jnp.pad(x, width, constant_values=jnp.nan) for x in (k, v))
        known = jnp.pad(known, width[:2])
        return self._call(
            q[:, first:end], k, v, first, lengths, (ids[:, first:end], known)
        )

    def check(self, *sizes: int) -> None:
        """Chunks of such sizes of one entry of the batch against all in one call."""
        t, last = self.of.t, self.of.b - 1
        whole = [x[last:] for x in self.rows(0, t)]
        for size in sizes:
            for first in range(0, t - size + 1, max(size, t // 5)):
                # The capacity is that of all chunks: one program serves them.
                found = self.rows(first, first + size, t + 20, slice(last, None))
                expected = [x[:, first : first + size] for x in whole]
                _assert_equal(found, expected, f"{size} rows from {first}")


def _every_third(b, n, q, kv):
    """A mask with blocks to skip between others, of which kernels make lists."""
    return (q // 16 + kv // 16) % 3 != 1


def _of_pairs(s, b, h, q, kv):
    """A score in which a product and a sum may be rounded as one."""
    return 1.3 * s + PAIRS[q, kv]


PAIRS = jnp.asarray(np.random.default_rng(1).standard_normal((90, 90)), jnp.float32)
ALIBI = ("alibi_slopes", np.array([0.1, 0.3, 0.0, 0.5], np.float32))
SINKS = ("sinks", np.array([0.0, 1.0, -3.0, 0.5], np.float32))
CAP = ("logits_soft_cap", 5.0)
SEQUENCES = {
    "everything": Sequences(
        (("local_window_size", (40, 0)), CAP, SINKS), segments=True
    ),
    "alibi_mqa": Sequences((ALIBI, SINKS), k=1, h=64, d=48, dtype="bfloat16"),
    "window_half": Sequences(
        (("local_window_size", (9, 0)),), h=80, d=1, dtype="float16"
    ),
    "wide": Sequences((CAP,), b=1, n=2, h=256, d=256, dtype="bfloat16"),
    "one_element": Sequences((ALIBI,), h=1, d=64),
    "listed": Sequences((("mask_mod", _every_third), CAP)),
    "score_of_pairs": Sequences((("score_mod", _of_pairs),)),
    "not_causal": Sequences((("is_causal", False), CAP)),
}
_FIRST = ["everything"]


@pytest.mark.parametrize(
    "name", [*_FIRST, *deeply(*(x for x in SEQUENCES if x not in _FIRST))]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_may_be_cut_anywhere(backend, name):
    sizes = (1, 9) if name in _FIRST else (1, 7, 33, SEQUENCES[name].t)
    Cut(SEQUENCES[name], _options(backend, invariant=True)).check(*sizes)


@settings(deadline=None, max_examples=40)
@given(st.data())
@deep
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_sequences_and_cuts(backend, data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    k, group, t = draw(1, 2, 3), draw(1, 2, 5), data.draw(st.integers(2, 150))
    sizes = {"b": draw(1, 2, 3), "t": t, "n": group * k, "k": k}
    sizes |= {"h": draw(1, 3, 16, 33, 64, 80), "d": draw(1, 16, 17, 64)}
    n = sizes["n"]
    options = {
        "local_window_size": (data.draw(st.integers(0, t)), 0),
        "logits_soft_cap": 5.0,
        "sinks": np.linspace(-2, 1, n, dtype=np.float32),
        "alibi_slopes": np.linspace(0, 1, n, dtype=np.float32),
    }
    chosen = tuple(x for x in options.items() if data.draw(st.booleans()))
    dtype = draw("float32", "bfloat16", "float16")
    cut = Cut(
        Sequences(chosen, **sizes, dtype=dtype), _options(backend, invariant=True)
    )
    whole = cut.rows(0, t)
    first = data.draw(st.integers(0, t - 1))
    end = data.draw(st.integers(first + 1, t))
    entry = data.draw(st.integers(0, sizes["b"] - 1))
    found = cut.rows(
        first, end, data.draw(st.integers(0, 300)), slice(entry, entry + 1)
    )
    expected = [x[entry : entry + 1, first:end] for x in whole]
    _assert_equal(found, expected, f"{cut.of}, rows {first} to {end} of {entry}")


def _pools(arrays, page: int, entries: int, seed: int):
    """Keys and values in pages in any order, beside NaN, and the table."""
    rng = np.random.default_rng(seed)
    batch, rows = arrays[0].shape[:2]
    table = rng.permutation(batch * entries + 3)[: batch * entries]
    table = table.reshape(batch, entries)
    place = table[:, np.arange(rows) // page], np.arange(rows) % page
    pools = []
    for x in arrays:
        shape = (batch * entries + 3, page, *x.shape[2:])
        pool = np.full(shape, np.nan, np.float32)
        pool[place] = np.asarray(x, np.float32)
        pools.append(jnp.asarray(pool, x.dtype))
    return (*pools, jnp.asarray(table, jnp.int32))


@pytest.mark.parametrize(
    ("page", "entries", "size"),
    [(16, 7, 1), *deeply((8, 20, 7), (64, 2, 1), (1, 100, 7))],
)
@pytest.mark.parametrize("backend", ["triton", *deeply(*BACKENDS[1:])])
def test_pages_hold_what_a_dense_call_has(backend, page, entries, size):
    """Decoding and chunks against pages in any order; a call against all rows."""
    options = _options(backend, invariant=True)
    of = Sequences((CAP, SINKS))
    q, k, v = of.arrays()
    whole = Cut(of, options).rows(0, of.t)

    call: Callable = paged_attention

    @jit
    def attend(q, pools, lengths):
        return call(q, *pools, lengths, **dict(of.arguments), **options)

    for seed in (0, 1):
        pools = _pools((k, v), page, entries, seed)
        for end in (of.t, 40):
            found = attend(q[:, end - size : end], pools, jnp.full(2, end))
            expected = [x[:, end - size : end] for x in whole]
            _assert_equal(found, expected, f"{size} rows to {end}")


@deep
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ragged_batch_has_the_same_bits(backend):
    """Of a sequence of few tokens and one of many, in calls of their own."""
    options = _options(backend, invariant=True)
    of = Sequences((CAP, SINKS))
    q, k, v = of.arrays()
    whole = Cut(of, options).rows(0, of.t)
    options |= {**dict(of.arguments), "cu_query_lengths": jnp.array([0, 1, 21])}
    call = jit(functools.partial(paged_attention, **options))
    tokens, lengths = [q[0, -1:], q[1, 9:29]], jnp.array([of.t, 29])
    found = call(jnp.concatenate(tokens), *_pools((k, v), 16, 7, 2), lengths)
    expected = [jnp.concatenate([x[0, -1:], x[1, 9:29]]) for x in whole]
    _assert_equal(found, expected, "a ragged batch")


@deep
@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.skipif(ON_GPU, reason="xla declines")
def test_vmap_changes_no_bit(backend):
    """Over queries alone, and over keys alone."""
    of = Sequences(b=1, t=20)
    q, k, v = of.arrays()
    attend = functools.partial(
        attention, is_causal=True, **_options(backend, invariant=True)
    )
    one = jit(attend)(q, k, v)
    queries, keys = (jnp.stack([2 * x, -x, x]) for x in (q, k))
    of_queries = jit(jax.vmap(attend, (0, None, None)))(queries, k, v)
    of_keys = jit(jax.vmap(attend, (None, 0, None)))(q, keys, v)
    _assert_equal([x[2] for x in of_queries], one, "queries")
    _assert_equal([x[2] for x in of_keys], one, "keys")


# Multiprocessors, rows of the cache and `Config.splits`.
CUTS = [(1, 0, None), (999, 500, None), (999, 0, None), (999, 500, 1)]


@pytest.mark.parametrize("largest", [False, *deeply(True)])
def test_parts_of_the_keys_are_the_same_whoever_makes_them(largest, monkeypatch):
    """One program for all, or one for each; and with more that hold no key."""
    monkeypatch.setattr(layout, "PART", 64)
    of = Sequences((("return_max_logit", largest), SINKS, CAP), t=150, d=48)
    blocks = dataclasses.replace(SMALL, block_kv=32)
    found = []
    for programs, capacity, splits in CUTS if largest else CUTS[:2]:
        monkeypatch.setattr(device, "multiprocessors", lambda n=programs: n)
        jax.clear_caches()
        options = _options("triton", invariant=True, forward=blocks, splits=splits)
        found.append(Cut(of, options).rows(100, 150, capacity))
    jax.clear_caches()
    for other in found[1:]:
        for one, first in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(one, first)


@pytest.mark.parametrize("is_paged", [False, *deeply(True)], ids=["dense", "paged"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_neighbour_changes_no_row(backend, is_paged):
    """Without `invariant`: of a block, one row begins again and others do not."""
    of = Sequences(t=64, dtype="bfloat16")
    q, k, v = of.arrays()
    options = _options(backend, **({"forward": SMALL} if backend == "triton" else {}))
    options["is_causal"] = False

    @jit
    def attend(q):
        if not is_paged:
            return attention(q, k, v, **options)
        pools = _pools((k, v), 16, 4, 0)
        call: Callable = paged_attention
        return call(q, *pools, jnp.full(2, of.t), **options)

    found = attend(q)
    # Far above what the first blocks had, and in the other entry far below.
    far = q.at[0, 1::2].multiply(300).at[1, 5].multiply(300)
    other = attend(far)
    same = np.ones((2, of.t), bool)
    same[0, 1::2] = same[1, 5] = False
    assert not np.array_equal(found[1][~same], other[1][~same])
    _assert_equal([x[same] for x in other], [x[same] for x in found], "a neighbour")


def test_what_breaks_the_promise_is_an_error():
    q = jnp.ones((1, 32, 2, 64), jnp.bfloat16)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"splits": 2}, "splits=2 .*must be None or 1"),
        ({"forward": Blocks(16, 48, 4, 2)}, "block_kv=48 .*must divide 2048"),
    )
    for fields, words in wrong:
        with pytest.raises(ValueError, match=words):
            Config(invariant=True, **fields)
    invariant = Config(invariant=True)
    with pytest.raises(ValueError, match=r"'reference': .*Config\(invariant=True"):
        attention(q, q, q, implementation="reference", config=invariant)
    with pytest.raises(ValueError, match="no rows divided over devices"):
        jax.eval_shape(
            jax.vmap(
                lambda x: attention(
                    x, x, x, config=invariant, context=Context("i", None)
                ),
                axis_name="i",
            ),
            jax.ShapeDtypeStruct((2, *q.shape), q.dtype),
        )
    if not ON_GPU:
        blocks = Config(invariant=True, forward=SMALL)
        with pytest.raises(ValueError, match="only with blocks of its own"):
            attention(q, q, q, implementation="xla", config=blocks)


def test_kernels_that_do_not_promise_it_decline():
    q = jax.ShapeDtypeStruct((4, 4096, 8, 128), jnp.bfloat16)
    with on_gpu("NVIDIA H100 80GB HBM3"):
        plain = explain(q, q, q, is_causal=True)
        found = explain(q, q, q, is_causal=True, config=Config(invariant=True))
    assert plain.startswith("implementation: mosaic_gpu")
    lines = found.splitlines()
    assert lines[0] == "implementation: triton"
    for name, words in (
        ("mosaic_gpu", "which sums a tile makes depends on its other rows"),
        ("xla", "XLA chooses kernels of products by all sizes of a call on 'cuda'"),
    ):
        (line,) = (x for x in lines if x.startswith(f"  {name}: "))
        assert line == f"  {name}: Config(invariant=True): {words}"
