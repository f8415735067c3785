"""Random functions with attention, as people write it, and some that only look so.

`random_case` makes a function from a seed. It picks a way to lay out arrays, to scale,
bias and mask scores, to write the softmax, to multiply by values, and a transform
around it all; or a fault, which makes it something else than attention.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of some arrays.

    Attributes:
      words: what was picked.
      is_attention: whether `flashify` should replace it.
      dtype: of the arrays that are floats.
      layers: how often it attends to its own result.
    """

    words: str
    function: Callable
    arrays: tuple
    is_attention: bool
    dtype: Any
    layers: int = 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    b: int
    t: int
    s: int
    n: int
    k: int
    h: int


# Layouts: scores [..., T, S] of arrays, and what they do with probabilities.


def _rows_first(q, k, v, group):
    """[B, T, N, H], with heads repeated."""
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k)
    return s, lambda p: jnp.einsum("bnts,bsnh->btnh", p, v)


def _reversed(q, k, v, group):
    """Operands in the other order, and heads repeated by a broadcast."""
    b, s, n, h = k.shape

    def repeated(x):
        wide = jnp.broadcast_to(x[:, :, :, None], (b, s, n, group, h))
        return wide.reshape(b, s, n * group, h)

    k, v = map(repeated, (k, v))
    scores = jnp.einsum("bsnh,btnh->bnts", k, q)
    return scores, lambda p: jnp.einsum("bsnh,bnts->btnh", v, p)


def _grouped(q, k, v, group):
    """Query heads as [K, G], without a repeat."""
    b, t, n, h = q.shape
    q = q.reshape(b, t, n // group, group, h)
    s = jnp.einsum("btkgh,bskh->bkgts", q, k)

    def weighted(p):
        p = p.reshape(b, n // group, group, t, -1)
        return jnp.einsum("bkgts,bskh->btkgh", p, v).reshape(b, t, n, h)

    return s.reshape(b, n, t, -1), weighted


def _heads_first(q, k, v, group):
    """[B, N, T, H] and matrix products."""
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return q @ k.swapaxes(-1, -2), lambda p: (p @ v).swapaxes(1, 2)


def _merged(q, k, v, group):
    """[B * N, T, H], as torch.bmm wants it."""
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    b, t, n, h = q.shape
    q, k, v = (x.swapaxes(1, 2).reshape(b * n, -1, h) for x in (q, k, v))
    s = lax.batch_matmul(q, k.swapaxes(1, 2)).reshape(b, n, t, -1)

    def weighted(p):
        out = lax.batch_matmul(p.reshape(b * n, t, -1), v)
        return out.reshape(b, n, t, h).swapaxes(1, 2)

    return s, weighted


def _mapped(q, k, v, group):
    """`vmap` over batch and heads of a function of two matrices."""
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    s = jax.vmap(jax.vmap(lambda q, k: q @ k.T, (1, 1)), (0, 0))(q, k)
    both = jax.vmap(jax.vmap(lambda p, v: p @ v, (0, 1), 1), (0, 0))
    return s, lambda p: both(p, v)


LAYOUTS = (_rows_first, _reversed, _grouped, _heads_first, _merged, _mapped)

# Scales.


def _before(q, k):
    return q / math.sqrt(q.shape[-1]), k, lambda s: s


def _after(q, k):
    return q, k, lambda s: s * (q.shape[-1] ** -0.5)


def _divided(q, k):
    return q, k, lambda s: s / jnp.sqrt(jnp.asarray(q.shape[-1], s.dtype))


def _on_both(q, k):
    root = q.shape[-1] ** -0.25
    return q * root, k * root, lambda s: s


def _unscaled(q, k):
    return q * 0.5, k, lambda s: s


SCALES = (_before, _after, _divided, _on_both, _unscaled)


def _capped(s):
    return 3.0 * jnp.tanh(s / 3.0)


# Masks: functions of sizes and data that change scores [B, N, T, S].

_LOW = (-1e9, -1e30, "min")


def _low(rng, s_dtype=jnp.float32):
    return _LOW[rng.integers(len(_LOW))]


def _fill(low, dtype):
    return float(jnp.finfo(dtype).min) if low == "min" else low


def _positions(z: Sizes):
    return jnp.arange(z.t)[:, None], jnp.arange(z.s)[None, :]


def _tril(z, data, low):
    mask = jnp.tril(jnp.ones((z.t, z.s), bool))
    return lambda s: jnp.where(mask, s, _fill(low, s.dtype))


def _causal_compared(z, data, low):
    i, j = _positions(z)
    return lambda s: jnp.where((i >= j)[None, None], s, _fill(low, s.dtype))


def _future_infinite(z, data, low):
    mask = np.triu(np.full((z.t, z.s), -np.inf), 1)
    return lambda s: s + jnp.asarray(mask, s.dtype)


def _future_constant(z, data, low):
    mask = jnp.where(np.tril(np.ones((z.t, z.s))) == 0, -1e9, 0.0)
    return lambda s: s + mask.astype(s.dtype)


def _future_product(z, data, low):
    mask = jnp.tril(jnp.ones((z.t, z.s)))
    return lambda s: s + ((1.0 - mask) * -1e9).astype(s.dtype)


def _future_iota(z, data, low):
    rows = lax.broadcasted_iota(jnp.int32, (1, 1, z.t, z.s), 2)
    keys = lax.broadcasted_iota(jnp.int32, (1, 1, z.t, z.s), 3)
    return lambda s: jnp.where(
        jnp.broadcast_to(keys > rows, s.shape), jnp.asarray(_fill(low, s.dtype)), s
    )


def _window(z, data, low):
    i, j = _positions(z)
    mask = (j <= i) & (i - j < 3)
    return lambda s: jnp.where(mask, s, _fill(low, s.dtype))


def _band(z, data, low):
    i, j = _positions(z)
    return lambda s: jnp.where(jnp.abs(i - j) <= 2, s, _fill(low, s.dtype))


def _strict(z, data, low):
    """The first row has no key."""
    i, j = _positions(z)
    return lambda s: jnp.where(i > j, s, _fill(low, s.dtype))


def _padding(z, data, low):
    mask = data["valid"]
    return lambda s: jnp.where(mask[:, None, None, :], s, _fill(low, s.dtype))


def _padding_numbers(z, data, low):
    mask = data["valid"].astype(jnp.int32)[:, None, None, :]
    return lambda s: jnp.where(mask == 0, _fill(low, s.dtype), s)


def _padding_added(z, data, low):
    mask = data["valid"].astype(jnp.float32)[:, None, None, :]
    return lambda s: s + ((1.0 - mask) * _fill(low, jnp.float32)).astype(s.dtype)


def _padding_and_causal(z, data, low):
    i, j = _positions(z)
    mask = (i >= j) & data["valid"][:, None, None, :]
    return lambda s: jnp.where(mask, s, _fill(low, s.dtype))


def _padding_or_future(z, data, low):
    i, j = _positions(z)
    drop = (i < j) | ~data["valid"][:, None, None, :]
    return lambda s: jnp.where(drop, _fill(low, s.dtype), s)


def _arbitrary(z, data, low):
    mask = data["mask"]
    return lambda s: jnp.where(mask[:, None], s, _fill(low, s.dtype))


def _documents(z, data, low):
    ids, keys = data["ids"], data["key_ids"]
    same = ids[:, :, None] == keys[:, None, :]
    return lambda s: jnp.where(same[:, None], s, _fill(low, s.dtype))


def _documents_and_causal(z, data, low):
    i, j = _positions(z)
    ids = data["ids"]
    same = jnp.logical_and(i >= j, ids[:, :, None] == ids[:, None, :])
    return lambda s: jnp.where(same[:, None], s, _fill(low, s.dtype))


ANY_SIZE = (
    None,
    _tril,
    _causal_compared,
    _future_infinite,
    _future_constant,
    _future_product,
    _future_iota,
    _band,
    _strict,
    _padding,
    _padding_numbers,
    _padding_added,
    _padding_and_causal,
    _padding_or_future,
    _arbitrary,
    _documents,
)
SQUARE = (*ANY_SIZE, _window, _documents_and_causal)

# Softmaxes over the last axis: of scores, and of what weighs values by them.


def _softmax(s, weigh, dtype):
    return weigh(jax.nn.softmax(s, axis=-1).astype(dtype))


def _by_hand(s, weigh, dtype):
    e = jnp.exp(s - jnp.max(s, axis=-1, keepdims=True))
    return weigh((e / e.sum(-1, keepdims=True)).astype(dtype))


def _by_reciprocal(s, weigh, dtype):
    e = jnp.exp(s - lax.stop_gradient(s.max(-1))[..., None])
    return weigh((e * (1.0 / jnp.sum(e, -1, keepdims=True))).astype(dtype))


def _by_logsumexp(s, weigh, dtype):
    lse = jax.nn.logsumexp(s, axis=-1, keepdims=True)
    return weigh(jnp.exp(s - lse).astype(dtype))


def _by_log_softmax(s, weigh, dtype):
    return weigh(jnp.exp(jax.nn.log_softmax(s)).astype(dtype))


def _normalised_late(s, weigh, dtype):
    """Exponentials times values, then divided; [B, T, N, H] by [B, N, T]."""
    e = jnp.exp(s - s.max(axis=-1, keepdims=True))
    total = jnp.sum(e, axis=-1)
    return weigh(e.astype(dtype)) / total.swapaxes(1, 2)[..., None].astype(dtype)


SOFTMAXES = (
    _softmax,
    _softmax,
    _by_hand,
    _by_reciprocal,
    _by_logsumexp,
    _by_log_softmax,
    _normalised_late,
)

# What goes around: functions of (f, arrays) -> results.


def _plainly(f, *x):
    return f(*x)


def _jitted(f, *x):
    return jax.jit(f)(*x)


def _rematerialised(f, *x):
    return jax.checkpoint(f)(*x)


def _scanned(f, q, *x):
    def layer(h, _):
        return (h + f(h, *x)).astype(h.dtype), None

    return lax.scan(layer, q, None, length=2)[0]


def _looped(f, q, *x):
    return lax.fori_loop(0, 2, lambda _, h: (h + f(h, *x)).astype(h.dtype), q)


def _branched(f, q, *x):
    return lax.cond(jnp.sum(q) > -1e3, lambda y: f(y, *x), lambda y: y * 2.0, q)


AROUND = (_plainly, _plainly, _jitted, _rematerialised, _scanned, _looped, _branched)


def random_case(seed: int, faults: tuple = ()) -> Case:
    """The function of a seed.

    Args:
      faults: of which it has one, if there are any.
    """
    rng = np.random.default_rng(seed)

    def one_of(options):
        return options[rng.integers(len(options))]

    fault = one_of(faults) if faults else None
    n = one_of((1, 2, 4))
    group = one_of([x for x in (1, 2) if n % x == 0])
    t, square = int(one_of((3, 5, 8))), bool(rng.random() < 0.7)
    z = Sizes(one_of((1, 2)), t, t if square else 6, n, n // group, one_of((4, 8)))
    layout, scale = one_of(LAYOUTS), one_of(SCALES)
    softmax, around = one_of(SOFTMAXES), one_of(AROUND)
    mask = one_of(SQUARE if square else ANY_SIZE)
    low, dtype = _low(rng), one_of(("float32", "float32", "float32", "bfloat16"))
    has_cap = rng.random() < 0.2
    has_bias = not has_cap and rng.random() < 0.4
    if mask is _padding_added and (has_cap or has_bias):
        mask = _padding
    wide = bool(rng.random() < 0.5)
    data = _data(rng, z, one_of(("full", "head", "keys", "rows")) if has_bias else None)
    if mask is _strict and z.t > z.s:
        mask = _tril
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in (
            (z.b, z.t, z.n, z.h),
            (z.b, z.s, z.k, z.h),
            (z.b, z.s, z.k, z.h),
        )
    )
    names = sorted(data)

    def whole(q, k, v, *rest):
        return around(lambda q: attend(q, k, v, *rest), q)

    def attend(q, k, v, *rest):
        own = dict(zip(names, rest, strict=True))
        scaled_q, scaled_k, scaled = scale(q, k)
        s, weigh = layout(scaled_q, scaled_k, v, group)
        s = scaled(s)
        s = s.astype(jnp.promote_types(s.dtype, jnp.float32)) if wide else s
        steps = [_capped] if has_cap else []
        if has_bias:
            steps.append(lambda s: s + own["bias"].astype(s.dtype))
        if mask is not None:
            steps.append(mask(z, own, low))
        if fault is not None:
            return fault(s, steps, softmax, weigh, v.dtype).astype(q.dtype)
        for step in steps:
            s = step(s)
        return softmax(s, weigh, v.dtype).astype(q.dtype)

    parts = (layout, scale, mask, softmax, around, fault)
    words = " ".join("-" if x is None else x.__name__ for x in parts)
    words += f" {z} {dtype} wide={wide} cap={has_cap} bias={has_bias} low={low}"
    arrays = (q, k, v, *(data[x] for x in names))
    layers = 2 if around in (_scanned, _looped) else 1
    return Case(words, whole, arrays, fault is None, dtype, layers)


def _data(rng, z: Sizes, bias: str | None) -> dict[str, Any]:
    ids = np.sort(rng.integers(0, 3, (z.b, z.t)), axis=1)
    key_ids = rng.integers(0, 3, (z.b, z.s))
    valid = rng.random((z.b, z.s)) < 0.7
    mask = rng.random((z.b, z.t, z.s)) < 0.5
    if rng.random() < 0.5:
        valid[0] = False  # an entry without keys
    found = {"ids": ids, "key_ids": key_ids, "valid": valid, "mask": mask}
    shapes = {
        "full": (z.b, z.n, z.t, z.s),
        "head": (z.n, z.t, z.s),
        "keys": (z.b, 1, 1, z.s),
        "rows": (z.t, z.s),
    }
    if bias is not None:
        found["bias"] = np.float32(rng.standard_normal(shapes[bias]))
    return {k: jnp.asarray(x) for k, x in found.items()}
