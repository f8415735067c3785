"""Rows that count for nothing, made zeros: 0 times NaN is NaN.

Padding, keys that no query looks at, and queries that look at no key may hold anything.
Where a backend does not leave such rows out as it loads them, it clears them here,
before they meet a product. Fields of specs hold `Named` arrays.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.core.axes import Named
from pallas_kernels.core.spec import AttentionSpec


def padding(spec: AttentionSpec, x: Named) -> Named:
    """Rows of queries or of keys, with 0 in those beyond a length."""
    name, side = ("t", "query") if "t" in x.axes else ("s", "key")
    for limit in spec.limits(side):
        axes = (*limit.squeezed().axes, name)
        rows = Named(jnp.arange(x.shape[x.axes.index(name)]), (name,))
        x = _only(x, Named(rows.to(axes) < limit.to(axes), axes))
    return x


def unread(spec: AttentionSpec, x: Named) -> Named:
    """Rows of queries or keys, with 0 in padding and in keys that no query attends."""
    x = padding(spec, x)
    return dropped_keys(spec, x) if "s" in x.axes else x


def dropped_keys(spec: AttentionSpec, x: Named) -> Named:
    """Rows of keys or values, with 0 in those of keys that a mask drops for all."""
    if "p" in x.axes:
        return x  # of pages only what is needed is read
    keys = spec.attended_keys(x.shape[x.axes.index("s")])
    return x if keys is None else _only(x, keys)


def scale_of_values(spec: AttentionSpec) -> AttentionSpec:
    """The spec, with 0 as the scale of values that no query reads."""
    scale = spec.value_scale
    if scale is None or "s" not in scale.axes:
        return spec
    return dataclasses.replace(spec, value_scale=unread(spec, scale))


def masked_rows(
    spec: AttentionSpec, x: Named, lse: Named, *, by_entry: bool = True
) -> Named:
    """Rows of queries, with 0 in those that look at no key, for the backward pass.

    Rows beyond a query length may stay as they are.

    Args:
      spec: of the call.
      x: queries, or cotangents of their outputs.
      lse: log-sum-exp over all keys: -inf in such rows.
      by_entry: whether nothing is multiplied for a batch entry without any keys.
    """
    first = spec.traits.keeps_first_key
    first = first and spec.has_all_rows and not spec.score.may_mask
    if spec.rows_have_keys or (by_entry and first):
        return x
    return _only(x, Named(lse.value != -jnp.inf, lse.axes))


def _only(x: Named, kept: Named) -> Named:
    """x, and 0 where it is not kept."""
    x = x.squeezed()
    axes = (*(a for a in kept.axes if a not in x.axes), *x.axes)
    zero = jnp.zeros((), x.dtype)
    return Named(jnp.where(kept.to(axes), x.to(axes), zero), axes)
