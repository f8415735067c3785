"""The one error rule: how far a result may be from the exact one.

Against the reference in float64, the largest error of an output is at most 2 times, of
a gradient at most 3 times, that of plain quadratic attention in the input dtype with
float32 softmax, plus two roundings of the largest exact value for an output and four
for a gradient (which is a difference, dp - delta, of rounded values). A gradient also
recomputes p = exp(s - lse): four float32 roundings of numbers as large as lse (s and
lse, each before and after its scaling) become a relative error of p.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2 import attention
from tests.cases import ON_GPU

# (times the error of plain attention, roundings of the largest exact value)
OUTPUT = (2.0, 2.0)
GRADIENT = (3.0, 4.0)


class Results(NamedTuple):
    """Outputs and gradients of a call, as float64 NumPy arrays."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def evaluate(arrays, cotangents, arguments) -> Results:
    """`attention` and its gradients, in one compiled program."""

    @jax.jit
    def run(arrays, cotangents):
        def call(q, k, v):
            return attention(q, k, v, return_residual=True, **arguments)

        outputs, vjp = jax.vjp(call, *arrays)
        return *outputs, *vjp(cotangents)

    results = run(arrays, cotangents)
    return Results(*(np.asarray(x, np.float64) for x in results))


def cotangents_for(case, dtype, seed: int = 1):
    """Random cotangents of the output and of the log-sum-exp."""
    rng = np.random.default_rng(seed)
    shape = (*case.batch, case.t, case.n)
    return (
        jnp.asarray(rng.standard_normal((*shape, case.d)), dtype),
        jnp.asarray(rng.standard_normal(shape), jnp.float32),
    )


def exact(arrays, cotangents, arguments) -> Results:
    """The reference in float64 on the same (rounded) inputs."""
    with jax.enable_x64(True):
        arrays, cotangents = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x, np.float64)), (arrays, cotangents)
        )
        precision = {"implementation": "reference", "precision": "highest"}
        return evaluate(arrays, cotangents, {**arguments, **precision})


def plain(arrays, cotangents, arguments) -> Results:
    """Quadratic attention in the input dtype: what the error is measured by."""
    return evaluate(arrays, cotangents, {**arguments, "implementation": "reference"})


def unit_roundoff(dtype, precision=None) -> float:
    """Largest relative error of one rounding; float32 on a GPU may be TF32.

    Tensor cores take the upper bits of a float32 as TF32: they cut, not round.
    """
    if dtype == jnp.float32 and ON_GPU and precision != "highest":
        return 2.0**-10
    return float(jnp.finfo(dtype).eps) / 2


def ratios(actual: Results, exact: Results, plain: Results, unit: float) -> dict:
    """For each result, its error as a share of what is allowed."""
    result = {}
    lse = exact.lse[np.isfinite(exact.lse)]
    largest_lse = np.max(np.abs(lse), initial=0.0)
    for name, a, e, p in zip(Results._fields, actual, exact, plain, strict=True):
        finite = np.isfinite(e)
        if not (np.array_equal(np.isfinite(a), finite)):
            result[name] = np.inf
            continue
        a, e, p = a[finite], e[finite], p[finite]
        if e.size == 0:
            continue
        factor, roundings = OUTPUT if name in ("out", "lse") else GRADIENT
        share = roundings * unit
        if name not in ("out", "lse"):
            share += 4 * largest_lse * 2.0**-24
        allowed = factor * np.max(np.abs(p - e)) + share * np.max(np.abs(e))
        error = np.max(np.abs(a - e))
        result[name] = 0.0 if error == 0 else error / max(allowed, 1e-30)
    return result


def check(actual: Results, exact: Results, plain: Results, unit: float) -> dict:
    """Asserts the error rule; returns the ratios to the allowed error."""
    found = ratios(actual, exact, plain, unit)
    too_far = {name: r for name, r in found.items() if not r <= 1.0}
    assert not too_far, f"error as a share of the allowed one: {too_far}"
    return found
