"""`jax.experimental.jet` over a call: a rule for the primitive of the forward.

The call's operands are polynomials of a number t. Derivatives of its results along t
are tangents of tangents (`_derivatives`), in memory linear in the sequence length. Each
order doubles the work of the one before, as nested forward mode does.
"""

from __future__ import annotations

import contextlib
import math

import jax
import jax.numpy as jnp

from jax_flash2._operation import is_differentiable
from jax_flash2._vjp import FORWARD


def _rule(primals, series, *, problem, axes, marker):
    """Results and their Taylor coefficients, from those of the operands.

    Args:
      primals: the operands.
      series: for each, the coefficients of t, t^2 and so on.
    """
    del marker

    def results(t):
        def value(x, terms):
            if not is_differentiable(x):
                return x
            total = jnp.zeros_like(x)
            for term in reversed(terms):
                total = (total + term) * t.astype(x.dtype)
            return x + total

        arrays = map(value, primals, series)
        return tuple(FORWARD(*arrays, problem=problem, axes=axes))

    def derivative(function):
        return lambda t: jax.jvp(function, (t,), (jnp.ones_like(t),))[1]

    zero = jnp.zeros((), jnp.float32)
    function, orders = results, []
    for _ in range(1 + len(series[0])):
        orders.append(function(zero))
        function = derivative(function)
    found, *terms = orders
    coefficients = [
        [x / math.factorial(order) for order, x in enumerate(of_result, start=1)]
        for of_result in zip(*terms, strict=True)
    ]
    return list(found), coefficients


# Experimental in JAX: where it is missing there is nothing to give a rule to.
with contextlib.suppress(ImportError):
    from jax.experimental import jet

    jet.jet_rules[FORWARD.primitive] = _rule
