"""Calls that are compiled for GPUs that need not be here: `tests.gpus`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash2 import Config

BF16, F16, F32 = "bfloat16", "float16", "float32"
CAUSAL = {"is_causal": True}
DROPOUT = {"dropout_rate": 0.1}

# Calls of which kernels spill more than all others may, and how many bytes a thread at
# most: no blocks that were compiled spill less on the GPUs that are meant, but those of
# ALiBi, which would cost all causal calls a stage (benchmarks/lab/097).
SPILLED = {
    "float32 512 full short": {"dq": 240, "tangent": 1008},
    "float32 highest 256 causal": {
        "dk": 408,
        "dq": 1568,
        "forward": 212,
        "tangent": 43888,
    },
    "float32 64 bias": {"forward": 144},
    "bf16 128 ALiBi causal": {"forward": 160},
}


@dataclasses.dataclass(frozen=True)
class GpuCall:
    """One call, of arrays that are shapes only.

    Attributes:
      name: its words.
      rows: B, T, S.
      heads: N, K, H, and the head size of values.
      dtype: of query, key and value.
      arguments: the others of `attention`; an array is given by its dtype, and by its
        axes in small letters, with "1" for a broadcast one.
      gradients: whether the backward and a tangent are compiled, too.
      quick: whether it is one of those that stand for all.
    """

    name: str
    rows: tuple[int, int, int]
    heads: tuple[int, int, int, int]
    dtype: str = BF16
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gradients: bool = True
    quick: bool = False

    def structs(self, struct) -> tuple[tuple, dict, dict]:
        """Query, key and value; other arrays by name; the other arguments.

        Args:
          struct: makes one of a shape and a dtype.
        """
        (b, t, s), (n, k, h, d) = self.rows, self.heads
        size = {"b": b, "t": t, "s": s, "n": n, "1": 1, "2": 2}
        shapes = (b, t, n, h), (b, s, k, h), (b, s, k, d)
        arrays, static = {}, {}
        for name, value in self.arguments.items():
            if isinstance(value, tuple) and isinstance(value[0], str):
                dtype, axes = value
                arrays[name] = struct(tuple(size[a] for a in axes), jnp.dtype(dtype))
            else:
                static[name] = value
        dtype = jnp.dtype(self.dtype)
        return tuple(struct(x, dtype) for x in shapes), arrays, static


def of_arrays(call, names, static):
    """`call(*operands, *others)` of arrays alone, the others in the order of names."""

    def run(operands, others):
        return call(*operands, **dict(zip(names, others, strict=True)), **static)

    return run


def with_gradients(run):
    """Also gradients of operands and all others of floating point, and a tangent."""

    def both(operands, others, cotangent):
        is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in others]
        floats = [x for x, yes in zip(others, is_float, strict=True) if yes]

        def of_floats(operands, floats):
            given = iter(floats)
            pairs = zip(others, is_float, strict=True)
            return run(operands, [next(given) if yes else x for x, yes in pairs])

        out, pull = jax.vjp(of_floats, operands, floats)
        _, along = jax.jvp(of_floats, (operands, floats), (operands, floats))
        return out, pull(cotangent), along

    return both


def _capped(score, b, h, q, kv):
    return 50.0 * jnp.tanh(score / 50.0)


def _square(head: int, t: int = 4096, b: int = 2, n: int = 0, d: int = 0):
    """As many heads as make 2,048 elements, at least 8."""
    n = n or max(2048 // head, 8)
    return (b, t, t), (n, n, head, d or head)


def _plain() -> Iterator[GpuCall]:
    quick = (64, 128, 256)
    for head in (16, 32, 64, 80, 96, 128, 160, 192, 256):
        more = {"arguments": CAUSAL, "quick": head in quick}
        yield GpuCall(f"bf16 {head} causal", *_square(head), **more)
    for head in (64, 128, 256):
        more = {"quick": head == 128}
        yield GpuCall(f"bf16 {head} full", *_square(head, b=8), **more)
    mla = _square(192, n=16, d=128)
    yield GpuCall("bf16 192/128 causal", *mla, arguments=CAUSAL, quick=True)
    yield GpuCall("bf16 512 full short", (8, 512, 512), (8, 8, 512, 512), quick=True)
    yield GpuCall("bf16 512 causal", *_square(512, n=4), arguments=CAUSAL)
    grouped = (2, 8192, 8192), (32, 8, 128, 128)
    yield GpuCall("bf16 128 causal grouped", *grouped, arguments=CAUSAL)
    window = {"local_window_size": (1023, 0), **CAUSAL}
    yield GpuCall("bf16 128 window grouped", *grouped, arguments=window)
    for head, n in ((64, 32), (128, 32), (256, 16)):
        many = (2, 16384, 16384), (n, n, head, head)
        yield GpuCall(f"bf16 {head} causal long", *many, arguments=CAUSAL)
    for head in (64, 128, 256):
        one = (1, 16384, 16384), (1, 1, head, head)
        more = {"arguments": CAUSAL, "quick": head == 128}
        yield GpuCall(f"bf16 {head} causal one head", *one, **more)
    few = (1, 8192, 8192), (4, 4, 128, 128)
    yield GpuCall("bf16 128 causal four heads", *few, arguments=CAUSAL)
    lengths = {"key_value_seq_lengths": ("int32", "b")}
    short = (32, 512, 512), (12, 12, 64, 64)
    yield GpuCall("bf16 64 lengths short", *short, arguments=lengths)
    segments = {"query_segment_ids": ("int32", "bt"), **CAUSAL}
    for head in (64, 128):
        yield GpuCall(f"bf16 {head} segments", *_square(head), arguments=segments)
    sinks = {"sinks": (F32, "n"), "local_window_size": (127, 0)}
    gpt_oss = (1, 8192, 8192), (64, 8, 64, 64)
    yield GpuCall("bf16 64 sinks window grouped", *gpt_oss, arguments=sinks)


def _of_pairs() -> Iterator[GpuCall]:
    """What costs something for every pair of query and key."""
    shared = {"bias": (BF16, "1nts")}
    for head in (32, 64, 128, 256):
        more = {"arguments": shared, "quick": head == 64}
        yield GpuCall(f"bf16 {head} bias", *_square(head, 2048, 4), **more)
    wide = {"bias": (F32, "bnts"), **CAUSAL}
    yield GpuCall("bf16 64 float32 bias causal", *_square(64, 2048), arguments=wide)
    wide = {"bias": (F32, "1nts")}
    yield GpuCall("bf16 128 float32 bias", *_square(128, 2048, 4), arguments=wide)
    of_keys = {"bias": (F32, "b11s")}
    yield GpuCall("bf16 64 bias of keys", *_square(64, 2048), arguments=of_keys)
    random = {"dropout_rng": ("uint32", "2"), **DROPOUT}
    mask = {"mask": ("bool", "11ts")}
    features = {
        "dropout causal": {**random, **CAUSAL},
        "soft cap causal": {"logits_soft_cap": 50.0, **CAUSAL},
        "mask": mask,
        "ALiBi causal": {"alibi_slopes": (F32, "n"), **CAUSAL},
    }
    quick = {"bf16 64 dropout causal", "bf16 128 mask"}
    for head in (64, 128, 256):
        for words, arguments in features.items():
            name = f"bf16 {head} {words}"
            more = {"arguments": arguments, "quick": name in quick}
            yield GpuCall(name, *_square(head), **more)
    for head in (64, 128):
        arguments = {"score_mod": _capped}
        yield GpuCall(f"bf16 {head} function", *_square(head), arguments=arguments)
    window = {"logits_soft_cap": 50.0, "local_window_size": (4095, 0), **CAUSAL}
    gemma = (1, 8192, 8192), (8, 4, 256, 256)
    yield GpuCall("bf16 256 soft cap window grouped", *gemma, arguments=window)
    every = wide | random | {"logits_soft_cap": 30.0, **CAUSAL}
    name = "bf16 128 float32 bias dropout soft cap"
    yield GpuCall(name, *_square(128, 2048), arguments=every)
    every = wide | mask | random
    name = "bf16 64 float32 bias mask dropout"
    yield GpuCall(name, *_square(64, 2048), arguments=every)


def _decoding() -> Iterator[GpuCall]:
    lengths = {"key_value_seq_lengths": ("int32", "b")}
    for words, rows, heads, more in (
        ("128 one query", (4, 1, 32768), (32, 8, 128, 128), {"quick": True}),
        ("128 one query lengths", (16, 1, 8192), (32, 8, 128, 128), {}),
        ("64 one query", (4, 1, 32768), (64, 8, 64, 64), {}),
        ("256 one query", (4, 1, 8192), (8, 4, 256, 256), {}),
        ("128 eight queries", (4, 8, 8192), (32, 8, 128, 128), {}),
        ("512 one query", (4, 1, 8192), (16, 1, 512, 512), {}),
    ):
        if "lengths" in words:
            more = {"arguments": lengths}
        yield GpuCall(f"bf16 {words}", rows, heads, gradients=False, **more)
    heads = 32, 8, 128, 128
    name = "float32 128 one query"
    yield GpuCall(name, (4, 1, 8192), heads, F32, gradients=False)


def _invariant() -> Iterator[GpuCall]:
    """One tile for all calls, in parts of the keys by one program or by many."""
    arguments = {"config": Config(invariant=True), **CAUSAL}
    more = {"arguments": arguments, "gradients": False}
    for head in (64, 128, 256):
        name = f"bf16 {head} causal invariant"
        yield GpuCall(name, (2, 8192, 8192), (16, 4, head, head), **more)
    yield GpuCall(
        "bf16 128 causal invariant one query", (1, 1, 32768), (32, 8, 128, 128), **more
    )


def _other_dtypes() -> Iterator[GpuCall]:
    for head in (64, 128, 256):
        more = {"arguments": CAUSAL, "quick": head == 128}
        yield GpuCall(f"fp16 {head} causal", *_square(head), F16, **more)
    for head in (32, 64, 96, 128, 192, 256):
        more = {"arguments": CAUSAL, "quick": head in (64, 128)}
        yield GpuCall(f"float32 {head} causal", *_square(head, 2048), F32, **more)
    short = (8, 512, 512), (8, 8, 512, 512)
    yield GpuCall("float32 512 full short", *short, F32)
    highest = {"precision": "highest", **CAUSAL}
    for head in (64, 128, 256):
        more = {"arguments": highest, "quick": head == 128}
        yield GpuCall(
            f"float32 highest {head} causal", *_square(head, 2048), F32, **more
        )
    bias = {"bias": (F32, "1nts")}
    for head in (64, 128):
        name = f"float32 {head} bias"
        yield GpuCall(name, *_square(head, 1024), F32, bias)
    random = {"dropout_rng": ("uint32", "2"), **DROPOUT}
    yield GpuCall("float32 128 dropout", *_square(128, 2048), F32, random)


CALLS = (
    *_plain(),
    *_of_pairs(),
    *_decoding(),
    *_invariant(),
    *_other_dtypes(),
)
