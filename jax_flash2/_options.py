"""Checks the arguments of attention that are compiled into the program."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import numpy as np

from jax_flash2 import _backends
from pallas_kernels.core.masks import Window

# Why an argument may not be traced.
STATIC = "because it is compiled into the program"
# Windows reach no farther than this, so that int32 sums of positions do not overflow.
FAR = 1 << 28
# The value of `precision` that asks for products of eight bits.
FP8 = "fp8"


def check_soft_cap(x) -> float | None:
    if x is None:
        return None
    try:
        if isinstance(x, bool | str):
            raise TypeError
        x = float(x)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            f"logits_soft_cap must be a Python number {STATIC}, got {type(x).__name__}"
        ) from error
    if not (math.isfinite(x) and x > 0):
        raise ValueError(f"logits_soft_cap must be finite and > 0, got {x}")
    return x


def check_bool(name: str, x) -> None:
    if not isinstance(x, bool | np.bool_):
        hint = (
            f", {STATIC}: name it in static_argnames of jax.jit, or bind it with "
            "functools.partial"
            if isinstance(x, jax.core.Tracer)
            else ""
        )
        raise TypeError(f"{name} must be a Python bool, got {x!r}{hint}")


def check_implementation(implementation) -> None:
    names = _backends.names()
    if implementation is None or implementation in names:
        return
    hint = ""
    if implementation == "cudnn":
        hint = " (jax_flash2.nn.dot_product_attention takes the names of jax.nn's)"
    elif isinstance(implementation, tuple | list):
        hint = ": one name, or None for the first that serves"
    elif isinstance(implementation, str):
        near = difflib.get_close_matches(implementation.lower(), names, 1)
        hint = f": did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"implementation must be None or one of {names}, got {implementation!r}{hint}"
    )


def check_precision(precision) -> jax.lax.Precision | None:
    """Returns the first precision that is at least as exact as the one requested."""
    if precision is None or precision == (None, None):
        # As jax.numpy does.
        precision = jax.config.jax_default_matmul_precision
        if precision is None:
            return None
    pair = precision if isinstance(precision, tuple | list) else (precision,)
    found = [_precision(x) for x in pair]
    if len(pair) not in (1, 2) or None in found:
        raise ValueError(
            "precision must be None, 'default', 'high', 'highest', 'fp8', a "
            "jax.lax.Precision, a jax.lax.DotAlgorithmPreset or a pair of these, got "
            f"{precision!r}"
        )
    return max(found, key=_PRECISIONS.index)


_PRECISIONS = (
    jax.lax.Precision.DEFAULT,
    jax.lax.Precision.HIGH,
    jax.lax.Precision.HIGHEST,
)


def _precision(x) -> jax.lax.Precision | None:
    """The precision for one operand; None if `x` is not a precision."""
    if isinstance(x, bool):
        return None
    try:
        return jax.lax.Precision(x)
    except (TypeError, ValueError):
        pass
    name = x.name if isinstance(x, jax.lax.DotAlgorithmPreset) else x
    if not isinstance(name, str) or name not in jax.lax.DotAlgorithmPreset.__members__:
        return None
    # TF32, the default, is as exact as bfloat16 and float16; several products of
    # those, float32 and float64 are more exact.
    wide = name.startswith(("F32", "F64")) or name[:-1].endswith("_X")
    return jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT


def check_window(window: Any, is_causal: bool) -> Window | None:
    if window is None:
        return Window(None, 0) if is_causal else None
    sides = (window, window) if not isinstance(window, tuple | list) else window
    if len(sides) != 2:
        raise ValueError(
            f"local_window_size must be an int or a pair (left, right), got {window!r}"
        )
    bounds: list[int | None] = []
    for side in sides:
        if side is not None:
            if isinstance(side, bool):
                raise TypeError(f"local_window_size must contain ints, got {window!r}")
            try:
                side = operator.index(side)
            except TypeError as error:
                raise TypeError(
                    "local_window_size must contain Python ints or None, got "
                    f"{window!r}"
                ) from error
            if side < 0:
                raise ValueError(
                    f"local_window_size must not be negative, got {window!r}: None is "
                    "without a bound, as in (None, 0)"
                )
            side = side if side < FAR else None
        bounds.append(side)
    left, right = bounds
    return Window(left, 0 if is_causal else right)


# What other functions of attention call an argument.
_NAMES = {
    "alibi": "alibi_slopes",
    "attention_mask": "mask",
    "attn_bias": "bias",
    "attn_logits_soft_cap": "logits_soft_cap",
    "attn_mask": "mask",
    "causal": "is_causal",
    "dropout": "dropout_rate",
    "dropout_p": "dropout_rate",
    "k": "key",
    "kv_segment_ids": "key_value_segment_ids",
    "kv_seq_lengths": "key_value_seq_lengths",
    "logit_soft_cap": "logits_soft_cap",
    "q": "query",
    "q_segment_ids": "query_segment_ids",
    "return_lse": "return_residual",
    "segment_ids": "query_segment_ids",
    "sliding_window": "local_window_size",
    "sm_scale": "scale",
    "soft_cap": "logits_soft_cap",
    "softcap": "logits_soft_cap",
    "softmax_scale": "scale",
    "v": "value",
    "window": "local_window_size",
    "window_size": "local_window_size",
}
_OF_FLAX = ("deterministic", "dtype", "force_fp32_for_softmax", "module")

Function = TypeVar("Function", bound=Callable)


def names_unknown_keywords(function: Function) -> Function:
    """A function whose error for an unknown keyword says which one is meant."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*arguments, **keywords):
        check_keywords(function.__name__, known, keywords)
        return function(*arguments, **keywords)

    return checked  # pyright: ignore[reportReturnType]


def check_keywords(name: str, known, keywords) -> None:
    """Raises a TypeError if a function `name` knows no such keyword.

    Args:
      known: names of its parameters.
      keywords: what it is given.
    """
    for keyword in keywords:
        if keyword in known:
            continue
        hint = ""
        if keyword in _OF_FLAX:
            hint = ": pass flax_attention as attention_fn to Flax's modules"
        elif meant := _NAMES.get(keyword) or _nearest(keyword, known):
            hint = f": did you mean {meant!r}?"
        raise TypeError(
            f"{name}() got an unexpected keyword argument {keyword!r}{hint}"
        )


def _nearest(keyword: str, known) -> str | None:
    return next(iter(difflib.get_close_matches(keyword, known, 1)), None)


def is_zero(x: Any) -> bool:
    """Whether it is known to be the integer 0."""
    return isinstance(x, int | np.integer) and x == 0
