"""The problems that tests and benchmarks share, each named once.

A `Case` gives shapes and a function that makes the other arguments of `attention`.
`small` shapes let the kernels run interpreted on a CPU: they span several blocks of 16,
with a last block that overhangs. `full` ones are for compiled kernels.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2 import Blocks, Config, _backends
from pallas_kernels.configs import KERNELS
from tests import functions

Arguments = Callable[[np.random.Generator, "Case"], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `attention`: shapes, and the arguments beyond query, key and value."""

    name: str
    arguments: Arguments = lambda rng, case: {}
    batch: tuple[int, ...] = (2,)
    t: int = 40
    s: int = 40
    n: int = 2
    k: int = 2
    h: int = 16
    d: int = 16

    def full(self) -> Case:
        """The same with more rows, for compiled kernels and their larger blocks."""
        return dataclasses.replace(self, t=self.t * 9 + 7, s=self.s * 9 + 7)

    def has(self, argument: str) -> bool:
        return argument in self.arguments(np.random.default_rng(0), self)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (
            (*self.batch, self.t, self.n, self.h),
            (*self.batch, self.s, self.k, self.h),
            (*self.batch, self.s, self.k, self.d),
        )

    def broadcast(self, axes) -> tuple[int, ...]:
        """[*B, N, T, S] with 1 for all but `axes` among `b`, `n`, `t` and `s`."""
        sizes = {"n": self.n, "t": self.t, "s": self.s}
        batch = (size if "b" in axes else 1 for size in self.batch)
        return (*batch, *(x if a in axes else 1 for a, x in sizes.items()))

    def inputs(self, dtype, seed: int = 0) -> tuple[tuple[jax.Array, ...], dict]:
        """(query, key, value) and keyword arguments."""
        rng = np.random.default_rng(seed)
        arrays = tuple(
            jnp.asarray(rng.standard_normal(shape), dtype) for shape in self.shapes
        )
        return arrays, self.arguments(rng, self)


def _segments(rng, case: Case) -> dict:
    """Sorted ids: documents packed one after another, other borders for each row."""

    def ids(size):
        borders = rng.random((*case.batch, size)) < 0.1
        return np.cumsum(borders, axis=-1).astype(np.int32)

    q = ids(case.t)
    return {
        "query_segment_ids": q,
        "key_value_segment_ids": q if case.t == case.s else ids(case.s),
    }


def _unsorted_segments(rng, case: Case) -> dict:
    return {
        "query_segment_ids": rng.integers(0, 3, (*case.batch, case.t), np.int32),
        "key_value_segment_ids": rng.integers(0, 4, (*case.batch, case.s), np.int32),
    }


def _lengths(rng, case: Case) -> dict:
    return {
        "query_seq_lengths": rng.integers(0, case.t + 1, case.batch, np.int32),
        "key_value_seq_lengths": rng.integers(0, case.s + 1, case.batch, np.int32),
    }


def _mask(*axes: str) -> Arguments:
    """A random mask with the given axes; the others are broadcast."""

    def arguments(rng, case: Case) -> dict:
        return {"mask": rng.random(case.broadcast(axes)) < 0.6}

    return arguments


def _block_mask(rng, case: Case) -> dict:
    """A mask with wholly kept and wholly masked blocks, and rows that keep nothing."""
    rows, columns = np.arange(case.t)[:, None], np.arange(case.s)[None, :]
    return {"mask": ((rows // 16 + columns // 16) % 3 != 1) & (rows % 13 != 5)}


def _traced_offset(rng, case: Case) -> dict:
    offsets = rng.integers(-case.t // 2, case.s // 2, case.batch).astype(np.int32)
    return {"is_causal": True, "query_offset": offsets}


def _bias(*axes: str, dtype=np.float32) -> Arguments:
    """A random bias with the given axes; the others are broadcast."""

    def arguments(rng, case: Case) -> dict:
        return {"bias": jnp.asarray(rng.standard_normal(case.broadcast(axes)), dtype)}

    return arguments


def _masking_bias(*axes: str, lowest=(-np.inf,)) -> Arguments:
    """A random bias in which some pairs, and all of a row, have numbers that mask."""

    def arguments(rng, case: Case) -> dict:
        shape = case.broadcast(axes)
        bias = np.float32(rng.standard_normal(shape))
        masks = (rng.random(shape) < 0.3) | (np.arange(shape[-2]) == 5)[:, None]
        return {"bias": np.where(masks, rng.choice(np.float32(lowest), shape), bias)}

    return arguments


def _slopes(rng, case: Case) -> dict:
    return {"alibi_slopes": np.float32(0.3 * rng.random(case.n))}


def _slopes_batch(rng, case: Case) -> dict:
    return {"alibi_slopes": np.float32(0.3 * rng.random((*case.batch, case.n)))}


def _sinks(rng, case: Case) -> dict:
    return {"sinks": np.float32(rng.standard_normal(case.n))}


def _dropout(rng, case: Case) -> dict:
    key = jax.random.key(int(rng.integers(2**31)))
    return {"dropout_rate": 0.3, "dropout_rng": key}


def _with(*functions: Arguments, **fixed) -> Arguments:
    def arguments(rng, case: Case) -> dict:
        made = dict(fixed)
        for function in functions:
            made |= function(rng, case)
        return made

    return arguments


def _offset(rng, case: Case) -> dict:
    return {"query_offset": rng.integers(-9, 9, case.batch).astype(np.int32)}


def _scale(rng, case: Case) -> dict:
    """As data, which has a gradient."""
    return {"scale": np.asarray(0.3 * rng.standard_normal(), np.float32)}


def _any_window(rng, case: Case) -> dict:
    sides = [None if x < 0 else x for x in rng.integers(-9, 40, 2).tolist()]
    return {"local_window_size": tuple(sides)}


def _any_segments(rng, case: Case) -> dict:
    made = _unsorted_segments(rng, case)
    return made if rng.random() < 0.5 else {k: np.sort(x) for k, x in made.items()}


def _any_mask(rng, case: Case) -> dict:
    axes = [a for a in "bnts" if rng.random() < 0.7]
    return {"mask": rng.random(case.broadcast(axes)) < 0.7}


def _any_bias(rng, case: Case) -> dict:
    shape = case.broadcast([a for a in "bnts" if rng.random() < 0.6])
    shape = shape[rng.integers(0, len(shape)) :]
    bias = np.float32(rng.standard_normal(shape))
    masks = rng.random(shape) < rng.choice([0.0, 0.2])
    return {"bias": np.where(masks, np.float32(-np.inf), bias)}


def _any_offset(rng, case: Case) -> dict:
    offset = rng.integers(-30, 30, case.batch if rng.random() < 0.5 else ())
    return {"query_offset": np.asarray(offset, np.int32)}


def _any_slopes(rng, case: Case) -> dict:
    return (_slopes if rng.random() < 0.5 else _slopes_batch)(rng, case)


def _any_dropout(rng, case: Case) -> dict:
    return {
        **_dropout(rng, case),
        "dropout_rate": float(rng.uniform(0.05, 0.8)),
        "broadcast_dropout": bool(rng.random() < 0.3),
    }


@dataclasses.dataclass(frozen=True)
class Feature:
    """Something that a call has or has not.

    Attributes:
      typical: arguments for it, in cases.
      any: random arguments for it, in the random search; None for the typical ones.
    """

    typical: Arguments
    any: Arguments | None = None

    @property
    def random(self) -> Arguments:
        return self.any or self.typical


# Every feature, and every kind of shape: the one list, for cases and random search.
FEATURES: dict[str, Feature] = {
    "causal": Feature(_with(is_causal=True)),
    "window": Feature(_with(local_window_size=(25, 9)), _any_window),
    "lengths": Feature(_lengths),
    "segments": Feature(_segments, _any_segments),
    "mask": Feature(_mask("n", "t", "s"), _any_mask),
    "offset": Feature(_offset, _any_offset),
    "scale": Feature(_scale),
    "bias": Feature(_bias("n", "t", "s"), _any_bias),
    "soft_cap": Feature(_with(logits_soft_cap=3.0)),
    "alibi": Feature(_slopes, _any_slopes),
    "sinks": Feature(_sinks),
    "dropout": Feature(_dropout, _any_dropout),
}
SHAPES = {
    "gqa": {"n": 4},
    "cross": {"s": 50},
    "value": {"d": 24},
    "batch": {"batch": (3,)},
}
# A caller's functions of pairs, which capture arrays (`tests.functions`).
FUNCTIONS = {
    "score_mod": Feature(functions.learnt),
    "mask_mod": Feature(functions.kept),
}


def _pairwise() -> list[Case]:
    """Cases in which any two of all that have names meet: both, one, the other.

    Of `count` cases each name has a subset of its own of more than half of them: any
    two have one case in common, and each has one that the other lacks (Kleitman and
    Spencer 1973). Where neither is, is the case "plain".
    """
    features = FEATURES | FUNCTIONS
    names = [*FEATURES, *SHAPES, *FUNCTIONS]
    count = next(
        n for n in itertools.count(2) if math.comb(n, n // 2 + 1) >= len(names)
    )
    subsets = itertools.combinations(range(count), count // 2 + 1)
    of = dict(zip(names, subsets, strict=False))
    cases = []
    for i in range(count):
        has = [name for name in names if i in of[name]]
        shape = {k: x for name in has for k, x in SHAPES.get(name, {}).items()}
        made = [features[name].typical for name in has if name in features]
        cases.append(Case(f"pairwise_{i}", _with(*made), t=37, **shape))
    return cases


PAIRWISE = _pairwise()
CASES = [
    *PAIRWISE,
    Case("plain"),
    Case("plain_exact_blocks", t=32, s=48),
    Case("cross", t=19, s=50),
    Case("one_query", t=1, s=33),
    Case("one_key", t=21, s=1),
    Case("causal", _with(is_causal=True)),
    Case("causal_more_keys", _with(is_causal=True, query_offset=13), t=20, s=33),
    Case("causal_more_queries", _with(is_causal=True, query_offset=-11), t=44, s=33),
    Case("causal_offset_scalar", _with(is_causal=True, query_offset=np.int32(7))),
    Case("causal_offset_batch", _traced_offset, t=37, s=45),
    Case("window", _with(local_window_size=(5, 9))),
    Case("window_left", _with(local_window_size=(18, None)), t=33, s=50),
    Case("window_causal", _with(local_window_size=20, is_causal=True)),
    Case("window_offset", _with(_traced_offset, local_window_size=(17, 3))),
    Case("window_empty_rows", _with(local_window_size=(3, 3), query_offset=30)),
    Case("gqa", _with(is_causal=True), n=6, k=2),
    Case("mqa", n=4, k=1, t=25, s=37),
    Case("lengths", _lengths, batch=(4,)),
    Case("lengths_causal", _with(_lengths, is_causal=True), batch=(4,), n=4),
    Case("key_lengths", lambda rng, case: {"key_value_seq_lengths": np.int32([0, 33])}),
    Case(
        "key_starts",
        _with(key_value_seq_starts=np.int32([40, 17]), is_causal=True, query_offset=9),
    ),
    Case("segments", _segments),
    Case("segments_causal_gqa", _with(_segments, is_causal=True), n=4),
    Case("segments_cross", _segments, t=29, s=47),
    Case("segments_unsorted", _unsorted_segments),
    Case("mask_full", _mask("b", "n", "t", "s")),
    Case("mask_shared", _mask("t", "s"), n=4),
    Case("mask_keys", _mask("b", "s")),
    Case("mask_keys_heads", _mask("b", "n", "s"), n=4),
    Case("mask_whole", _mask("b", "n"), n=4),
    Case("mask_rows_heads", _mask("n", "t"), n=4),
    Case("mask_blocks_causal", _with(_block_mask, is_causal=True)),
    Case("scale", _with(scale=0.7, is_causal=True)),
    Case("scale_negative", _with(scale=-0.3, local_window_size=(9, 9))),
    Case("scale_zero", _with(scale=0.0)),
    Case("scale_data", _with(_scale, _lengths, logits_soft_cap=3.0), n=4),
    Case("scale_data_zero", _with(scale=np.zeros((), np.float32)), t=20, s=20),
    Case("head_1_3", _with(is_causal=True), h=1, d=3),
    Case("head_40", _with(is_causal=True), h=40, d=40, t=33, s=33),
    Case("head_72_24", h=72, d=24, t=33, s=20),
    Case("head_80", _with(is_causal=True), h=80, d=80, t=20, s=33),
    Case("head_96", h=96, d=96, t=17, s=20),
    Case("head_160", _with(is_causal=True), h=160, d=160, t=17, s=20),
    Case("head_192_128", _with(is_causal=True), h=192, d=128, t=20, s=20),
    Case("head_64_256", h=64, d=256, t=20, s=20),
    Case("head_256", _with(is_causal=True), h=256, d=256, t=20, s=20),
    Case("head_256_few_queries", t=5, h=256, d=256),
    Case("head_320_512", h=320, d=512, t=20, s=20),
    Case("head_512", _with(is_causal=True), h=512, d=512, t=20, s=33),
    Case("no_batch", _with(is_causal=True), batch=()),
    Case("two_batch_axes", _segments, batch=(2, 3), n=1, k=1, t=20, s=20),
    Case("bias", _bias("b", "n", "t", "s")),
    Case("bias_shared", _bias("n", "t", "s"), batch=(3,), n=4),
    Case("bias_everyone", _with(_bias("t", "s"), is_causal=True), n=4, t=37, s=45),
    Case("bias_half", _bias("b", "t", "s", dtype=jnp.bfloat16), n=4),
    Case(
        "bias_half_heads",
        _with(_bias("n", "t", "s", dtype=jnp.bfloat16), _lengths, is_causal=True),
        n=4,
        k=2,
    ),
    Case("bias_keys", _with(_bias("b", "s"), is_causal=True), n=4, t=20, s=33),
    Case("bias_rows", _with(_bias("n", "t"), _lengths), n=4),
    Case("bias_keys_heads", _with(_bias("n", "s"), is_causal=True), n=4),
    Case("bias_heads", _bias("n"), n=4, t=20, s=33),
    Case("bias_one", _with(_bias(), _sinks), t=20, s=20),
    Case("bias_masked", _with(_bias("n", "t", "s"), _block_mask), batch=(3,)),
    Case("soft_cap", _with(is_causal=True, logits_soft_cap=2.0)),
    Case("soft_cap_bias", _with(_bias("n", "t", "s"), _lengths, logits_soft_cap=3.0)),
    Case("bias_masks", _with(_masking_bias("n", "t", "s"), is_causal=True), n=4),
    Case(
        "soft_cap_bias_masks",
        _with(
            _masking_bias("b", "t", "s", lowest=(-np.inf, -1e9, -1e38)),
            _slopes,
            logits_soft_cap=3.0,
        ),
        n=4,
    ),
    Case("bias_rows_alone", _bias("n", "t"), t=37, s=33),
    Case("alibi_alone", _slopes, t=37, s=33),
    Case("alibi", _with(_slopes, is_causal=True), n=4),
    Case("alibi_batch", _with(_slopes_batch, _traced_offset), n=2, t=37, s=45),
    Case("alibi_two_sided", _with(_slopes, _segments, logits_soft_cap=5.0)),
    Case("sinks", _with(_sinks, is_causal=True), n=4),
    Case("sinks_empty_rows", _with(_sinks, _lengths, local_window_size=(3, 3))),
    Case("dropout", _dropout, t=37, s=45),
    Case("dropout_causal_gqa", _with(_dropout, is_causal=True), n=4),
    Case(
        "dropout_bias",
        _with(_dropout, _bias("n", "t", "s"), _sinks, broadcast_dropout=True),
    ),
    Case(
        "everything",
        _with(
            _segments,
            _lengths,
            _mask("n", "t", "s"),
            is_causal=True,
            local_window_size=(25, None),
            query_offset=np.int32(2),
        ),
        n=4,
        d=24,
    ),
    Case(
        "everything_learnt",
        _with(
            _segments,
            _bias("n", "t", "s"),
            _slopes,
            _sinks,
            _dropout,
            is_causal=True,
            local_window_size=(25, None),
            logits_soft_cap=4.0,
        ),
        n=4,
        d=24,
    ),
]

SMALL_BLOCKS = Blocks(block_q=16, block_kv=16, num_warps=4, num_stages=1)
INTERPRETED = Config(**dict.fromkeys(KERNELS, SMALL_BLOCKS), interpret=True)

ON_GPU = jax.default_backend() == "gpu"
# Of one kind of GPU, and of elements of two bytes: `tests.kernels.runners` has them.
APART = (
    "mosaic_gpu",
    "mosaic_gpu_ampere",
    "mosaic_gpu_blackwell",
)
# How each other one is called here: compiled kernels on a GPU, interpreted elsewhere.
BACKENDS = {
    name: {
        "implementation": name,
        **({"config": INTERPRETED} if entry.platform and not ON_GPU else {}),
    }
    for name, entry in reversed(_backends.BACKENDS.items())
    if name not in APART
}
# The xla backend also with many small blocks.
WITH_BLOCKS = {
    "xla_blocks": {"implementation": "xla", "config": INTERPRETED},
    **BACKENDS,
}


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
