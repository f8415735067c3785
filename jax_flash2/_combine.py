"""and_masks(), or_masks() and not_mask(): functions of pairs made of others."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jax_flash2._mods import check_function

MaskMod = Callable[..., Any]


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """A `mask_mod` that keeps the pairs which all of these keep.

    Args:
      *mask_mods: functions (b, h, q, kv) of `attention` or `make_block_mask`, one at
        least.

    Returns:
      A function (b, h, q, kv), of a bool.

    Raises:
      TypeError: if there is none, or one is no function of these four.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_flash2 import and_masks, attention
      >>> causal = lambda b, h, q, kv: kv <= q
      >>> near = lambda b, h, q, kv: q - kv < 4
      >>> x = jnp.ones((1, 16, 2, 8))
      >>> attention(x, x, x, mask_mod=and_masks(causal, near)).shape
      (1, 16, 2, 8)
    """
    return _joined("and_masks", operator.and_, mask_mods)


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """A `mask_mod` that keeps the pairs which one of these keeps at least.

    Args:
      *mask_mods: as of `and_masks`.

    Returns:
      A function (b, h, q, kv), of a bool.

    Raises:
      TypeError: if there is none, or one is no function of these four.

    Example:
      >>> from jax_flash2 import or_masks
      >>> causal = lambda b, h, q, kv: kv <= q
      >>> of_prefix = lambda b, h, q, kv: kv < 3
      >>> prefix_lm = or_masks(causal, of_prefix)
      >>> prefix_lm(0, 0, 1, 2), prefix_lm(0, 0, 1, 3)
      (True, False)
    """
    return _joined("or_masks", operator.or_, mask_mods)


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """A `mask_mod` that keeps the pairs which this one drops.

    Args:
      mask_mod: as of `and_masks`.

    Returns:
      A function (b, h, q, kv), of a bool.

    Raises:
      TypeError: if it is no function of these four.

    Example:
      >>> from jax_flash2 import not_mask
      >>> itself = lambda b, h, q, kv: q == kv
      >>> others = not_mask(itself)
      >>> bool(others(0, 0, 1, 1)), bool(others(0, 0, 1, 2))
      (False, True)
    """
    check_function("mask_mod of not_mask", mask_mod, False)
    return lambda b, h, q, kv: jnp.logical_not(mask_mod(b, h, q, kv))


def _joined(name: str, join: Callable, mask_mods: tuple) -> MaskMod:
    if not mask_mods:
        raise TypeError(f"{name} takes one mask_mod at least, got none")
    for mask_mod in mask_mods:
        check_function(f"mask_mod of {name}", mask_mod, False)

    def joined(b, h, q, kv):
        return functools.reduce(join, (f(b, h, q, kv) for f in mask_mods))

    return joined
