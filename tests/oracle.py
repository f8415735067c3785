"""Quadratic attention and its gradients in NumPy: what every result is compared with.

Written from the documentation of `attention`, and sharing no code with the library.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

# Arguments that have gradients, beside what a score_mod captures; "gain" is of a term
# that only tests have.
OPERANDS = ("bias", "alibi_slopes", "sinks", "scale", "gain")

# out, lse, max_logit if asked for, query, key, value (gradients), OPERANDS, and
# "score_mod_..." for each array of `tests.functions.Learnt`
Results = dict[str, np.ndarray]


class Pairs(NamedTuple):
    """What is known of each pair of query and key, [*B, N, T, S]."""

    p: np.ndarray  # probability, before dropout
    dz: np.ndarray  # gradient of the score before its soft cap
    distance: np.ndarray  # |query position - key position|
    of_gain: np.ndarray | float  # derivative of the score by the gain of a test's term
    of_score: np.ndarray  # gradient of the score that a score_mod gives
    slope: np.ndarray | float  # of a score_mod
    of_captured: Results  # derivatives of a score_mod by each array that it captures


def attention(
    arrays, cotangents, arguments, rounded=None, tf32: bool = False
) -> tuple[Results, Pairs]:
    """Output, log-sum-exp and all gradients.

    Args:
      arrays: query, key and value.
      cotangents: of the output and of the log-sum-exp.
      arguments: the others of `attention`, by name; score_mod and mask_mod are those of
        `tests.functions`. Also "term" and "gain": the last term of the score and its
        operand (`tests.toy_score.InNumPy`).
      rounded: None for the exact results, in float64. A dtype for what plain attention
        in it gives: products take operands in that dtype and sum in float32, and
        everything else is in float32.
      tf32: whether products take only the upper bits of their operands.
    """
    wide = np.float64 if rounded is None else np.float32

    def narrow(x):
        return x if rounded is None else x.astype(rounded).astype(wide)

    def product(a, b):
        """Of matrices; in float32 term by term, not by a library's better order."""
        if rounded is None:
            return a @ b
        a, b = (upper_bits(x) if tf32 else x for x in (a, b))
        return np.einsum("...ij,...jk->...ik", a, b)

    q, k, v, do, dlse = (np.asarray(x).astype(wide) for x in (*arrays, *cotangents))
    *batch, t, n, h = q.shape
    s, heads = k.shape[-3:-1]
    q, k, v, do = (np.moveaxis(x, -2, -3) for x in (q, k, v, do))  # heads, then rows
    k, v = (x.repeat(n // heads, -3) for x in (k, v))
    dlse = np.moveaxis(dlse, -1, -2)
    scale = wide(h**-0.5 if arguments.get("scale") is None else arguments["scale"])
    cap = arguments.get("logits_soft_cap")
    slopes, sinks = (
        np.asarray(arguments.get(name, value), wide)[..., None, None]
        for name, value in (("alibi_slopes", 0.0), ("sinks", -np.inf))
    )
    offset = np.broadcast_to(arguments.get("query_offset", 0), batch)
    position = np.arange(t)[:, None] + offset[..., None, None, None]
    distance = np.abs(position - np.arange(s)).astype(wide)
    with np.errstate(all="ignore"):
        qk = product(q, k.swapaxes(-1, -2))
        z = scale * qk + np.asarray(arguments.get("bias", 0.0), wide)
        z = z - slopes * distance
        capped = score = z if cap is None else cap * np.tanh(z / wide(cap))
        keep = kept_pairs(arguments, (*batch, n, t, s), position)
        score_mod, slope, of_captured = arguments.get("score_mod"), 1.0, {}
        if score_mod is not None:
            score, slope, of_captured = score_mod.in_numpy(capped, position)
            of_captured = {n: np.where(keep, x, 0.0) for n, x in of_captured.items()}
        term, gain = arguments.get("term"), arguments.get("gain")
        of_gain, term_slope = 0.0, 1.0
        if term is not None:
            gain = np.asarray(gain, wide)
            of_gain, term_slope = term.of_operand(score), term.slope(score, gain)
            score = term.value(score, gain)
        score = np.where(keep, score, -np.inf)
        largest = np.maximum(score.max(-1, keepdims=True, initial=-np.inf), sinks)
        empty = ~(score > -np.inf).any(-1, keepdims=True)
        m = np.where(empty, 0.0, largest)
        e = np.where(empty, 0.0, np.exp(score - m))
        total = np.where(empty, 1.0, e.sum(-1, keepdims=True) + np.exp(sinks - m))
        p = e / total
        lse = np.where(empty, -np.inf, m + np.log(total))
        weight = dropout_weight(arguments, batch, n, t, s).astype(wide)
        dropped = narrow(p * weight)
        out = narrow(product(dropped, v))
        dv = product(dropped.swapaxes(-1, -2), do)
        dp = product(do, v.swapaxes(-1, -2)) * weight
        # Of the rounded output, as is kept: the same where nothing is rounded.
        delta = (out * do).sum(-1, keepdims=True) - dlse[..., None]
        delta = np.where(empty, 0.0, delta)
        dz = p * (dp - delta)
        d_gain = (dz * np.where(keep, of_gain, 0.0)).sum((-2, -1))
        if term is not None:
            dz = dz * np.where(keep, term_slope, 0.0)
        d_captured = {n: score_mod.summed(n, dz * x) for n, x in of_captured.items()}
        of_score, dz = dz, dz * slope
        if cap is not None:
            dz = dz * (1 - np.where(keep, capped / wide(cap), 0) ** 2)
        ds = narrow(dz)
        results = {
            "out": out,
            "lse": lse[..., 0],
            "max_logit": score.max(-1, initial=-np.inf),
            "query": scale * product(ds, k),
            "key": scale * product(ds.swapaxes(-1, -2), q),
            "value": dv,
            "bias": dz,
            "alibi_slopes": -(dz * distance).sum((-2, -1)),
            "sinks": -np.where(empty, 0.0, np.exp(sinks - lse) * delta).sum((-2, -1)),
            "scale": (dz * np.where(dz == 0, 0.0, qk)).sum(),
            "gain": d_gain,
        }
    for name, x in d_captured.items():
        results[name] = x if rounded is None else x.astype(np.float32)
    for name in ("key", "value"):
        x = results[name]
        grouped = x.reshape(*batch, heads, n // heads, *x.shape[-2:])
        results[name] = narrow(grouped.sum(-3))
    results["query"] = narrow(results["query"])
    for name in ("out", "query", "key", "value"):
        results[name] = np.moveaxis(results[name], -3, -2)
    for name in ("lse", "max_logit"):
        results[name] = np.moveaxis(results[name], -2, -1)
    if not arguments.get("return_max_logit"):
        del results["max_logit"]
    for name in OPERANDS:
        x = results.pop(name)
        argument = arguments.get(name)
        if isinstance(argument, np.ndarray | jax.Array):
            x = summed_to(x, argument.shape)
            results[name] = x if rounded is None else x.astype(argument.dtype)
    of_gain = np.where(keep, of_gain, 0.0)
    return results, Pairs(p, dz, distance, of_gain, of_score, slope, of_captured)


def kept_pairs(arguments, shape: tuple[int, ...], position: np.ndarray) -> np.ndarray:
    """Which keys each query attends to, [*B, N, T, S]."""
    *batch, _, t, s = shape
    keep = np.ones(shape, bool)
    rows, columns = np.arange(t)[:, None], np.arange(s)
    window = arguments.get("local_window_size")
    left, right = window if isinstance(window, tuple) else (window, window)
    right = 0 if arguments.get("is_causal") else right
    if left is not None:
        keep &= columns >= position - left
    if right is not None:
        keep &= columns <= position + right
    for name, numbers in (("query", rows), ("key_value", columns)):
        lengths = arguments.get(f"{name}_seq_lengths")
        if lengths is not None:
            keep &= numbers < np.asarray(lengths).reshape(*batch, 1, 1, 1)
    starts = arguments.get("key_value_seq_starts")
    if starts is not None:
        keep &= columns >= np.asarray(starts).reshape(*batch, 1, 1, 1)
    ids = arguments.get("query_segment_ids")
    if ids is not None:
        others = arguments.get("key_value_segment_ids")
        ids, others = (np.asarray(ids if x is None else x) for x in (ids, others))
        keep &= ids[..., None, :, None] == others[..., None, None, :]
    if "mask" in arguments:
        keep &= np.asarray(arguments["mask"])
    if "mask_mod" in arguments:
        keep &= arguments["mask_mod"].in_numpy(position)
    if "bias" in arguments:
        keep &= ~is_mask(arguments["bias"], arguments.get("logits_soft_cap"))
    return keep


def is_mask(bias, soft_cap: float | None) -> np.ndarray:
    """Where a bias masks a pair: it is -inf, or under a soft cap very low."""
    if soft_cap is None:
        return np.asarray(bias) == -np.inf
    lowest = max(-(2.0**24), float(jax.numpy.finfo(bias.dtype).min))
    return np.asarray(bias, np.float64) <= lowest


def dropout_weight(arguments, batch, n: int, t: int, s: int) -> np.ndarray:
    """What dropout multiplies each probability by, [*B, N, T, S]: 0, or 1 / (1 - rate).

    The cipher gives two words: for query rows r and r + 8 of sixteen, and each for key
    rows c, c + 8, c + 16 and c + 24 of thirty-two.
    These take the bytes (3, 2), (2, 1), (1, 0) and (0, 3) of the word.
    """
    rate = arguments.get("dropout_rate", 0.0)
    if not rate:
        return np.ones((1, 1))
    threshold = round((1 - rate) * 2**16)
    broadcast = arguments.get("broadcast_dropout", False)
    shape = () if broadcast else (*batch, n)
    key, tweak = (x[..., None, None] for x in dropout_seeds(arguments, shape))

    def group_and_place(size, count):
        rows = np.arange(size, dtype=np.uint64)
        return rows // (8 * count) * 8 + rows % 8, rows // 8 % count

    (rows, row_place), (columns, place) = group_and_place(t, 2), group_and_place(s, 4)
    x0, x1 = columns + 0 * key, rows[:, None] ^ tweak
    x0, x1 = philox(x0, x1, key)
    word = np.where(row_place[:, None] == 1, x1, x0)
    bits = (word << np.uint64(32) | word) >> (np.uint64(48) - 8 * place)
    bits &= np.uint64(0xFFFF)
    return np.where(bits < threshold, 2**16 / threshold, 0.0)


def dropout_seeds(arguments, shape: tuple[int, ...]) -> list[np.ndarray]:
    """A seed of two words for each batch entry and head, of `shape` (or ()).

    The cipher, with each word of the random key in turn, of the head's number (the
    last axis) and the batch entry's.
    """
    heads = shape[-1] if shape else 1
    number = np.arange(np.prod(shape, dtype=int), dtype=np.uint64)
    seed = [number % np.uint64(heads), number // np.uint64(heads)]
    rng = arguments["dropout_rng"]
    for word in np.asarray(jax.random.key_data(rng), np.uint64).reshape(-1):
        seed = philox(*seed, word)
    return [x.reshape(shape) for x in seed]


def philox(x0, x1, key):
    """Philox 2x32 with 7 rounds, in uint64 (Salmon et al. 2011)."""
    low = np.uint64(0xFFFFFFFF)
    for _ in range(7):
        product = x0 * np.uint64(0xD256D193)
        x0, x1 = (product >> np.uint64(32)) ^ key ^ x1, product & low
        key = (key + np.uint64(0x9E3779B9)) & low
    return x0, x1


def upper_bits(x: np.ndarray) -> np.ndarray:
    """What tensor cores take of a float32: sign, exponent and 10 bits."""
    bits = np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32)


def summed_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum over what `shape` was broadcast over."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)
