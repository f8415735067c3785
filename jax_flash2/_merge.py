"""Attention over keys in parts: `merge` puts the results of the parts together."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_flash2._arrays import as_array, check_array, unwrapped
from pallas_kernels.core import flash2
from pallas_kernels.core.promotion import at_least_float32


def merge(
    *parts: tuple[jax.Array, jax.Array], sinks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention over all keys, from attention over parts of them.

    The parts may be computed at any time, in any order and on any device: a prefix that
    many rows share and what follows it, a cache in pieces, chunks that travel in a
    ring. With parts i that have outputs o_i and log-sum-exps l_i,

        l = log(sum_i exp(l_i)),    o = sum_i exp(l_i - l) * o_i

    is the result of one call with all keys, if no key is in two parts. It is computed
    in float32 or wider, from outputs that were rounded to their own dtype. It is
    differentiable, and so are its gradients. A part without keys for a row (log-sum-exp
    -inf) adds nothing to it, whatever its output holds, and its gradients are 0. (Those
    of the formula as it stands are NaN.)

    Args:
      *parts: pairs (output, log-sum-exp), at least one. Outputs have one shape
        [*B, T, N, Hv] (or [T, Hv]) and a floating-point dtype; log-sum-exps have the
        shape [*B, T, N] (or [T]) and are natural logarithms in float32 or float64.
        Give each part the positions that it has in the whole: `query_offset` minus the
        number of keys before the part.
      sinks: [N], logits that join the softmax of every row and that no part took in
        (floating-point); None, the default, for none. Sinks belong into one call, or
        here.

    Returns:
      The output, in the dtype of the first part's, and the log-sum-exp. Rows without
      keys in any part are 0 and -inf.

    Raises:
      TypeError: if a part is no pair of arrays, or its dtype is not as above.
      ValueError: if there is no part, or shapes differ or do not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash2 import attention, merge
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 100, 2, 16))
      >>> def part(lo, hi):
      ...     return attention(
      ...         q, k[:, lo:hi], v[:, lo:hi],
      ...         is_causal=True, query_offset=-lo, return_residual=True,
      ...     )
      >>> out, lse = merge(part(0, 30), part(30, 100))
      >>> bool(jnp.allclose(out, attention(q, k, v, is_causal=True), atol=2e-3))
      True

    References:
      Dao et al., "Flash-Decoding for long-context inference", 2023. Liu et al., "Ring
      Attention with Blockwise Transformers", 2023, section 3.
    """
    if not parts:
        raise ValueError("parts: merge needs at least one pair, got none")
    pairs = [_checked(f"parts[{i}]", part) for i, part in enumerate(parts)]
    outputs, logs = zip(*pairs, strict=True)
    for i, x in enumerate(outputs):
        if x.shape != outputs[0].shape:
            raise ValueError(
                f"parts[{i}][0] must have the shape of parts[0][0], "
                f"{outputs[0].shape}, got {x.shape}"
            )
    dtypes = (x.dtype for x in (*outputs, *logs))
    wide = max(map(at_least_float32, dtypes), key=lambda x: x.itemsize)
    if sinks is not None:
        sinks = as_array("sinks", sinks)
        _check_floating("sinks", sinks)
        heads = outputs[0].shape[-2:-1] if outputs[0].ndim > 2 else ()
        if not heads:
            raise ValueError(
                f"sinks must be None for outputs without heads, got {sinks.shape} "
                f"beside outputs {outputs[0].shape}"
            )
        if sinks.shape != heads:
            raise ValueError(f"sinks must have shape [N]={heads}, got {sinks.shape}")
        sinks = sinks.astype(wide)
    o, lse = ([x.astype(wide) for x in xs] for xs in (outputs, logs))
    merged, total = flash2.merge(o, lse, sinks)
    return merged.astype(outputs[0].dtype), total.astype(logs[0].dtype)


def _checked(name: str, part: Any) -> tuple[jax.Array, jax.Array]:
    """A part, if it is an output with its log-sum-exp; raises elsewhere."""
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise TypeError(
            f"{name} must be a pair (output, log-sum-exp), as "
            f"attention(return_residual=True) gives, got {type(part).__name__}"
        )
    output, log = (unwrapped(x) for x in part)
    for i, x in enumerate((output, log)):
        check_array(f"{name}[{i}]", x)
    _check_floating(f"{name}[0]", output)
    if log.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(f"{name}[1] must be float32 or float64, got {log.dtype.name}")
    if log.shape != output.shape[:-1]:
        raise ValueError(
            f"{name}[1] must have shape {output.shape[:-1]}, that of {name}[0] without "
            f"its last axis, got {log.shape}"
        )
    return as_array(f"{name}[0]", output), as_array(f"{name}[1]", log)


def _check_floating(name: str, x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype.name}")
