"""explain(): which implementation runs a call, and why the others do not."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax

from jax_flash2 import _backends, _context, _fp8, _options
from jax_flash2._api import attention, given
from jax_flash2._block_mask import BlockMask
from jax_flash2._make_block_mask import counts


def explain(*arguments: Any, **keywords: Any) -> str:
    """Says which implementation runs a call here, and why the others do not.

    `explain` checks the call as `attention` does, but computes nothing. Under
    `jax.vmap` it speaks of one element; which kernels run is decided again, with all
    elements, when the program is lowered.

    Args:
      *arguments, **keywords: the arguments of `attention`. Each array may be a
        `jax.ShapeDtypeStruct`.

    Returns:
      A text with a line for the decision, one for about how many operations the
      products of both passes have, and one for each pass (forward, backward, gradients
      of bias and the like) that names who makes it, why not those before it in the
      list, and how its work is divided beyond blocks, heads and batch entries. Then
      come a line for each implementation, and how the axes were read, with notes on
      what is legal but seldom meant. If the named implementation does not support the
      call, the first line says why.

    Raises:
      TypeError, ValueError: if an argument is wrong, as `attention`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash2 import explain
      >>> x = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.float32)
      >>> print(explain(x, x, x, implementation="xla").splitlines()[0])
      implementation: xla
    """
    parameters = inspect.signature(attention).parameters
    _options.check_keywords("explain", parameters, keywords)
    found = given(*arguments, **keywords)
    structs = {
        name: x
        for name, x in vars(found).items()
        if isinstance(x, jax.ShapeDtypeStruct | BlockMask)
    }
    texts, notes = [], []

    def check(arrays):
        call = dataclasses.replace(found, **arrays).checked()
        parts = (*call.spec.score.terms, *call.spec.masks)
        notes.extend(x.words for x in parts if x.words)
        if found.mask_mod is not None:
            kinds = ", ".join(type(x).__name__ for x in call.spec.masks)
            notes.append(f"masks, those of mask_mod among them: {kinds}")
        if found.in_eight_bits:
            narrow = _fp8.in_eight_bits(call)
            texts.append(_backends.explain(found.implementation, narrow))
        elif found.context is not None:
            texts.append(_context.explain(call, found.implementation, found.context))
        elif _context.on_mesh(divided, call, found.implementation) is None:
            texts.append(_backends.explain(found.implementation, call))

    def divided(call, implementation, context):
        texts.append(_context.explain(call, implementation, context))
        return _context.attend(call, implementation, context)

    jax.eval_shape(check, structs)
    return "\n".join(
        [*texts[:1], *(f"  {x}" for x in (*found.reading(), *notes, *counts(found)))]
    )
