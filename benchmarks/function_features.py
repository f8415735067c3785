"""Functions of pairs beside what they stand for, as features of `benchmarks.features`.

Masks that keep no runs of keys have lists of blocks: their time is given for each pair
of the blocks that are visited, relative to attention without a mask over sequences of
about as many keys.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from benchmarks.feature_calls import Feature
from benchmarks.function_calls import Example, examples
from benchmarks.function_peers import BLOCK, kept_blocks
from jax_flash2.tune.problems import Shape

# In the order of the table, with what is built in beside each.
_BUILT_IN = {
    "causal": "plain",
    "window": "window",
    "8 documents": "8 documents",
    "soft cap": "soft cap",
    "ALiBi": "ALiBi",
    "relative bias": "plain",
    "relative bias, its gradient": "plain",
}
_LISTED = "prefix", "window with global keys", "2-D neighbours", "dilated blocks"


def function_features(shape: Shape) -> dict[str, Feature]:
    """By name; the first is plain."""
    length = shape.length
    causal = length * (length + 1) / 2
    calls = examples(shape)
    found = {"plain": Feature(), **_built_in(shape, calls)}
    for name, beside in _BUILT_IN.items():
        found[f"{name}, a function"] = _feature(
            calls[name], pairs=found[beside].pairs, beside=beside
        )
    for name in _LISTED:
        mask_mod = calls[name].functions(np, calls[name].arrays)[1]
        block = min(BLOCK, length)
        some, every = kept_blocks(np, mask_mod, length, block, block)
        visited = float(some.sum()) * block * block
        split = _split(visited / length, length)
        beside = f"no mask, T / {split}"
        pairs = length * length / split / causal
        found[beside] = Feature({"is_causal": False}, pairs=pairs, split=split)
        about = f"{name}, blocks ({every.sum() / some.sum():.0%} whole)"
        found[about] = _feature(calls[name], pairs=visited / causal, beside=beside)
    # All blocks but those of the diagonal are whole: each kept pair counts.
    part = length // 4
    pairs = 4 * part * (part + 1) / 2 / causal
    found["plain, T / 4"] = Feature(pairs=pairs, split=4)
    dilated = calls["dilated blocks"]
    found["dilated blocks, kept pairs"] = _feature(
        dilated, pairs=_kept(dilated, length) / causal, beside="plain, T / 4"
    )
    return found


def _built_in(shape: Shape, calls: dict[str, Example]) -> dict[str, Feature]:
    length = shape.length
    causal = length * (length + 1) / 2
    window = min(1024, length // 4)
    ids = calls["8 documents"].arrays["ids"]
    rows = jnp.asarray(np.broadcast_to(ids, (shape.batch, length)), jnp.int32)
    slopes = jnp.asarray(calls["ALiBi"].arrays["slopes"])

    def pairs(name):
        return _kept(calls[name], length) / causal

    return {
        "window": Feature(
            {"local_window_size": (window - 1, 0)}, pairs=pairs("window")
        ),
        "8 documents": Feature(
            arrays={"query_segment_ids": rows}, pairs=pairs("8 documents")
        ),
        "soft cap": Feature({"logits_soft_cap": 20.0}),
        "ALiBi": Feature(arrays={"alibi_slopes": slopes}),
    }


def _feature(example: Example, **about) -> Feature:
    def keywords(arrays):
        score_mod, mask_mod = example.functions(jnp, arrays)
        return {"score_mod": score_mod, "mask_mod": mask_mod}

    return Feature(
        static={"is_causal": False},
        arrays={name: jnp.asarray(x) for name, x in example.arrays.items()},
        operand=example.operand,
        keywords=keywords,
        **about,
    )


def _split(keys: float, length: int) -> int:
    """Into how many parts, a power of two, of about so many keys a sequence is cut."""
    most = max(1, length // BLOCK)
    return min(most, 1 << max(0, round(math.log2(length / keys))))


def _kept(example: Example, length: int) -> int:
    """How many pairs its mask keeps."""
    mask_mod = example.functions(np, example.arrays)[1]
    columns = np.arange(length)
    rows = (columns[i : i + 512, None] for i in range(0, length, 512))
    return sum(int(mask_mod(0, 0, x, columns).sum()) for x in rows)
