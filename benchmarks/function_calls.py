"""Examples of functions of pairs, in one text for JAX, torch and CuTe.

Most are those of FlexAttention's own documentation and of its users. Where libraries
differ in the name of a function, an example takes the library as an argument.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_flash2.tune.problems import Shape

# Of the library (`jax.numpy`, `torch` or `function_peers`' for CuTe) and the example's
# arrays: functions of (score, b, h, q, kv) and of (b, h, q, kv), or None.
Functions = Callable[[Any, Mapping[str, Any]], tuple[Callable | None, Callable | None]]


@dataclasses.dataclass(frozen=True)
class Example:
    """A call.

    Attributes:
      functions: its score_mod and mask_mod.
      arrays: that they read.
      operand: the name of the array whose gradient is taken, too.
      slope: of the library and the score, the derivative of score_mod by the score,
        for peers that do not find it themselves; None if it is 1.
    """

    functions: Functions
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    operand: str | None = None
    slope: Callable[[Any, Any], Any] | None = None


def examples(shape: Shape) -> dict[str, Example]:
    """By name."""
    length, heads = shape.length, shape.heads
    window, prefix = min(1024, length // 4), length // 4
    width = 1 << (int(math.log2(length)) // 2)
    far = 128
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, length), 7, replace=False))
    ids = np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)
    slopes = np.exp2(-8 * np.arange(1, heads + 1) / heads).astype(np.float32)
    table = rng.standard_normal((heads, 2 * far + 1)).astype(np.float32)

    def causal(b, h, q, kv):
        return q >= kv

    def of_window(b, h, q, kv):
        return (q >= kv) & (q - kv < window)

    def of_prefix(b, h, q, kv):
        return (kv < prefix) | (q >= kv)

    def of_neighbours(b, h, q, kv):
        rows = abs(q // width - kv // width) <= 6
        return rows & (abs(q % width - kv % width) <= 6)

    def dilated(b, h, q, kv):
        return (q >= kv) & ((q // 128 - kv // 128) % 4 == 0)

    def global_keys(b, h, q, kv):
        return (q >= kv) & ((q - kv < window) | (kv < 64))

    def of_documents(xp, arrays):
        own = arrays["ids"]
        return None, lambda b, h, q, kv: (q >= kv) & (own[q] == own[kv])

    def of_cap(xp, arrays):
        return lambda s, b, h, q, kv: 20.0 * xp.tanh(s / 20.0), causal

    def slope_of_cap(xp, score):
        found = xp.tanh(score / 20.0)
        return 1.0 - found * found

    def of_slopes(xp, arrays):
        own = arrays["slopes"]
        return lambda s, b, h, q, kv: s + own[h] * (kv - q), causal

    def of_table(xp, arrays):
        own = arrays["table"]

        def relative(s, b, h, q, kv):
            return s + own[h, xp.clip(q - kv, -far, far) + far]

        return relative, causal

    def masks(mask_mod):
        return Example(lambda xp, arrays: (None, mask_mod))

    return {
        "causal": masks(causal),
        "window": masks(of_window),
        "window with global keys": masks(global_keys),
        "prefix": masks(of_prefix),
        "8 documents": Example(of_documents, {"ids": ids}),
        "soft cap": Example(of_cap, slope=slope_of_cap),
        "ALiBi": Example(of_slopes, {"slopes": slopes}),
        "relative bias": Example(of_table, {"table": table}),
        "relative bias, its gradient": Example(of_table, {"table": table}, "table"),
        "2-D neighbours": masks(of_neighbours),
        "dilated blocks": masks(dilated),
    }
