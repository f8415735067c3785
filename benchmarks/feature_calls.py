"""Calls of `attention` with one feature each, on top of a causal mask."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash2
from jax_flash2.tune.problems import Shape, random_mask


@dataclasses.dataclass(frozen=True)
class Feature:
    """Arguments of `attention` beside `is_causal`.

    Attributes:
      static: those that are no arrays.
      arrays: those that are.
      operand: the one of them whose gradient is taken too.
      pairs: kept by the masks, as a part of causal attention's.
      split: cuts each sequence in this many, in the batch.
      beside: name of the feature whose time this one's is compared with.
      mapped: `jax.vmap` maps a function of one head over batch and heads.
      keywords: makes arguments of the arrays.
    """

    static: dict = dataclasses.field(default_factory=dict)
    arrays: dict = dataclasses.field(default_factory=dict)
    operand: str | None = None
    pairs: float = 1.0
    split: int = 1
    beside: str = "plain"
    mapped: bool = False
    keywords: Callable[[dict], dict] = dict


def features(shape: Shape) -> dict[str, Feature]:
    """By name; the first is plain."""
    batch, length, heads = shape.batch, shape.length, shape.heads
    window, documents = min(1024, length), 8
    causal = length * (length + 1) / 2
    in_window = causal - (length - window) * (length - window + 1) / 2
    ids = np.arange(length) // -(-length // documents)
    in_documents = sum(n * (n + 1) / 2 for n in np.bincount(ids).tolist())

    def short(split):
        """Plain attention on sequences of length / split."""
        part = length // split
        return Feature(pairs=split * part * (part + 1) / 2 / causal, split=split)

    rng = np.random.default_rng(0)

    def normal(*sizes):
        return jnp.asarray(rng.standard_normal(sizes, np.float32), shape.dtype)

    def rows(x):
        return jnp.asarray(np.broadcast_to(x, (batch, length)), jnp.int32)

    keys = length - length // 4
    in_keys = causal - (length - keys) * (length - keys + 1) / 2
    lengths = {"key_value_seq_lengths": jnp.full(batch, keys, jnp.int32)}
    padding = jnp.broadcast_to(jnp.arange(length) < keys, (batch, 1, 1, length))
    same = jnp.asarray(ids[:, None] == ids)[None, None]
    drawn = random_mask(length)
    in_drawn = float(jnp.sum(jnp.tril(drawn), dtype=jnp.float32))
    slopes = jnp.asarray(2.0 ** (-8 * np.arange(1, heads + 1) / heads), jnp.float32)
    dropout = {"dropout_rate": 0.1}
    key = {"dropout_rng": jax.random.PRNGKey(0)}
    return {
        "plain": Feature(),
        "plain, T / 4": short(4),
        f"plain, T / {documents}": short(documents),
        "window": Feature(
            {"local_window_size": (window - 1, None)},
            pairs=in_window / causal,
            beside="plain, T / 4",
        ),
        "vmap over heads": Feature(mapped=True),
        "key lengths, 3/4 T": Feature(arrays=lengths, pairs=in_keys / causal),
        "one segment": Feature(arrays={"query_segment_ids": rows(0)}),
        f"{documents} segments": Feature(
            arrays={"query_segment_ids": rows(ids)},
            pairs=in_documents / causal,
            beside=f"plain, T / {documents}",
        ),
        "mask [1, 1, T, T], random": Feature(
            arrays={"mask": drawn}, pairs=in_drawn / causal
        ),
        f"mask [1, 1, T, T], {documents} documents": Feature(
            arrays={"mask": same},
            pairs=in_documents / causal,
            beside=f"plain, T / {documents}",
        ),
        "mask [B, 1, 1, T], 3/4 T": Feature(
            arrays={"mask": padding}, pairs=in_keys / causal
        ),
        "offset, traced": Feature(arrays={"query_offset": jnp.int32(0)}),
        "soft cap": Feature({"logits_soft_cap": 50.0}),
        "ALiBi": Feature(arrays={"alibi_slopes": slopes}, operand="alibi_slopes"),
        "sinks": Feature(arrays={"sinks": jnp.zeros(heads)}, operand="sinks"),
        "bias [1, N, T, T]": Feature(
            arrays={"bias": normal(1, heads, length, length)}, operand="bias"
        ),
        "bias [1, 1, T, T]": Feature(
            arrays={"bias": normal(1, 1, length, length)}, operand="bias"
        ),
        "bias [B, 1, 1, T]": Feature(
            arrays={"bias": normal(batch, 1, 1, length)}, operand="bias"
        ),
        "dropout": Feature(dropout, key),
    }


def passes(shape: Shape, feature: Feature) -> dict[str, Callable]:
    """Functions of (query, key, value, output gradient, arrays of the feature)."""

    def call(q, k, v, arrays):
        def attention(q, k, v):
            own = {"is_causal": shape.causal, **feature.static}
            own |= feature.keywords(arrays)
            return jax_flash2.attention(q, k, v, **own)

        heads = jax.vmap(attention, 1, 1)
        return (jax.vmap(heads) if feature.mapped else attention)(q, k, v)

    def forward(q, k, v, do, arrays):
        del do
        return call(q, k, v, arrays)

    def both(q, k, v, do, arrays):
        _, vjp = jax.vjp(lambda *x: call(*x, arrays), q, k, v)
        return vjp(do)

    def operand(q, k, v, do, arrays):
        def with_operand(q, k, v, x):
            return call(q, k, v, {**arrays, feature.operand: x})

        _, vjp = jax.vjp(with_operand, q, k, v, arrays[feature.operand])
        return vjp(do)

    found = {"forward": forward, "forward_backward": both}
    return found | ({"with_operand": operand} if feature.operand else {})
