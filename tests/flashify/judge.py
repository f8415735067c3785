"""Whether a function and its flashified form agree: results and gradients.

The error rule (`tests.tolerances`), with the function itself in float64 as the exact
one, and in its own dtype as the plain one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.tolerances import GRADIENT, OUTPUT, unit_roundoff


def results(function, arrays, dtype, weights_seed: int = 0) -> list[np.ndarray]:
    """The result, and the gradients of a random sum of it by all floats."""
    arrays = [_as(x, dtype) for x in arrays]
    floats = [i for i, x in enumerate(arrays) if _is_float(x)]
    shape = jax.eval_shape(function, *arrays)
    rng = np.random.default_rng(weights_seed)
    weights = [rng.standard_normal(x.shape) for x in jax.tree.leaves(shape)]

    def loss(chosen):
        own = list(arrays)
        for i, x in zip(floats, chosen, strict=True):
            own[i] = x
        out = function(*own)
        wide = jnp.promote_types(dtype, jnp.float32)
        leaves = zip(jax.tree.leaves(out), weights, strict=True)
        return sum(jnp.sum(x.astype(wide) * w.astype(wide)) for x, w in leaves), out

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    found, out = gradient([arrays[i] for i in floats])
    leaves = jax.tree.leaves(out), found
    return [np.asarray(x, np.float64) for own in leaves for x in own]


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _as(x, dtype):
    return jnp.asarray(x, dtype) if _is_float(x) else x


def exact(function, arrays) -> list[np.ndarray]:
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) if _is_float(x) else x for x in arrays]
        return results(function, wide, "float64")


def share(function, other, arrays, dtype, outputs: int = 1, layers: int = 1) -> float:
    """The largest error of `other` as a share of what is allowed.

    Args:
      layers: how often the function attends to its own result; each rounds.
    """
    plain, actual = (results(f, arrays, dtype) for f in (function, other))
    right = exact(function, arrays)
    unit, worst = unit_roundoff(dtype), 0.0
    for i, (a, p, e) in enumerate(zip(actual, plain, right, strict=True)):
        assert a.shape == p.shape
        finite = np.isfinite(p)
        if not np.array_equal(np.isfinite(a), finite):
            return np.inf
        finite &= np.isfinite(e)
        a, p, e = (np.where(finite, x, 0.0) for x in (a, p, e))
        factor, roundings = OUTPUT if i < outputs else GRADIENT
        roundings *= layers
        size = max(np.max(np.abs(e), initial=0.0), 1.0)
        allowed = factor * np.max(np.abs(p - e), initial=0.0) + roundings * unit * size
        error = np.max(np.abs(a - e), initial=0.0)
        worst = max(worst, error / max(allowed, 1e-30))
    return float(worst)
