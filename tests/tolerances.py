"""The one error rule: how far a result may be from the exact one.

Against the reference in float64, the largest error of an output is at most 2 times, of
a gradient at most 3 times, that of plain quadratic attention in the input dtype with
float32 softmax, plus two roundings of the largest exact value for an output and four
for a gradient (which is a difference, dp - delta, of rounded values). A gradient also
recomputes p = exp(s - lse): four float32 roundings of numbers as large as lse (s and
lse, each before and after its scaling) become a relative error of p.

The gradients of bias, ALiBi's slopes and sinks are sums over many pairs, which may
cancel: there the roundings are of the root of the sum of the squared terms, and a term
counts p * |dp| too, for dp - delta is the difference of two such numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2 import attention
from tests.cases import ON_GPU

# (times the error of plain attention, roundings of the largest exact value)
OUTPUT = (2.0, 2.0)
GRADIENT = (3.0, 4.0)
OPERANDS = ("bias", "alibi_slopes", "sinks")  # arguments that have gradients

Results = dict[str, np.ndarray]  # out, lse, query, key, value (gradients), OPERANDS


def evaluate(arrays, cotangents, arguments) -> Results:
    """`attention` and its gradients, in one compiled program, as float64 arrays."""
    operands = {
        name: jnp.asarray(arguments[name]) for name in OPERANDS & arguments.keys()
    }
    others = {name: x for name, x in arguments.items() if name not in operands}
    inputs = dict(zip(("query", "key", "value"), arrays, strict=True)) | operands

    @jax.jit
    def run(inputs, cotangents):
        def call(inputs):
            return attention(**inputs, return_residual=True, **others)

        (out, lse), vjp = jax.vjp(call, inputs)
        return {"out": out, "lse": lse, **vjp(cotangents)[0]}

    results = run(inputs, cotangents)
    return {name: np.asarray(x, np.float64) for name, x in results.items()}


def cotangents_for(case, dtype, seed: int = 1):
    """Random cotangents of the output and of the log-sum-exp."""
    rng = np.random.default_rng(seed)
    shape = (*case.batch, case.t, case.n)
    return (
        jnp.asarray(rng.standard_normal((*shape, case.d)), dtype),
        jnp.asarray(rng.standard_normal(shape), jnp.float32),
    )


def exact(arrays, cotangents, arguments) -> Results:
    """The reference in float64 on the same (rounded) inputs.

    For each of `OPERANDS` there is also "... terms": the size of the terms of its sum.
    """
    with jax.enable_x64(True):

        def wide(x):
            return jnp.asarray(np.asarray(x, np.float64))

        arrays, cotangents = jax.tree.map(wide, (arrays, cotangents))
        arguments = {k: wide(x) if k in OPERANDS else x for k, x in arguments.items()}
        arguments |= {"implementation": "reference", "precision": "highest"}
        results = evaluate(arrays, cotangents, arguments)
        if OPERANDS & arguments.keys():
            results |= _terms(arrays, cotangents, arguments, results)
    return results


def _terms(arrays, cotangents, arguments, results: Results) -> Results:
    query, key, value = arrays
    *batch, t, n, _ = query.shape
    s = key.shape[-3]
    full = jnp.broadcast_to(arguments.get("bias", 0.0), (*batch, n, t, s))
    do, dlse = cotangents
    with_pairs = {**arguments, "bias": full}
    pairs = evaluate(arrays, cotangents, with_pairs)["bias"] ** 2
    # The gradient of the log-sum-exp alone is p; |dp| is about |do| |v| / sqrt(Hv).
    only_lse = (jnp.zeros_like(do), jnp.ones_like(dlse))
    p = evaluate(arrays, only_lse, with_pairs)["bias"]
    largest = np.max(np.linalg.norm(value, axis=-1)) / value.shape[-1] ** 0.5
    dp = np.linalg.norm(do, axis=-1) * largest / (1 - arguments.get("dropout_rate", 0))
    dp = np.moveaxis(dp + np.abs(dlse), -1, -2)[..., None]
    pairs = pairs + (p * dp) ** 2
    terms = {}
    if "bias" in arguments:
        shape = arguments["bias"].shape
        missing = range(pairs.ndim - len(shape))
        terms["bias"] = pairs.sum(tuple(missing))
        ones = tuple(i for i, size in enumerate(shape) if size == 1)
        terms["bias"] = terms["bias"].sum(ones, keepdims=True)
    if "alibi_slopes" in arguments:
        offset = np.asarray(arguments.get("query_offset", 0))
        offset = np.broadcast_to(offset, batch)[..., None, None, None]
        distance = np.arange(t)[:, None] + offset - np.arange(s)
        over = (pairs * distance**2).sum((-2, -1))
        lost = over.ndim - arguments["alibi_slopes"].ndim
        terms["alibi_slopes"] = over.sum(tuple(range(lost)))
    if "sinks" in arguments:
        lse = np.where(np.isfinite(results["lse"]), results["lse"], np.inf)
        p = np.exp(arguments["sinks"] - lse)
        delta = np.sum(results["out"] * do, -1) - dlse
        terms["sinks"] = ((p * delta) ** 2).sum(tuple(range(lse.ndim - 1)))
    return {f"{name} terms": np.sqrt(x) for name, x in terms.items()}


def plain(arrays, cotangents, arguments) -> Results:
    """Quadratic attention in the input dtype: what the error is measured by."""
    return evaluate(arrays, cotangents, {**arguments, "implementation": "reference"})


def unit_roundoff(dtype, precision=None) -> float:
    """Largest relative error of one rounding; float32 on a GPU may be TF32.

    Tensor cores take the upper bits of a float32 as TF32: they cut, not round, and a
    product of two such numbers is off by twice 2**-10. (Plain attention is no measure
    of that: XLA takes small products to other units.)
    """
    if dtype == jnp.float32 and ON_GPU and precision != "highest":
        return 2.0**-9
    return float(jnp.finfo(dtype).eps) / 2


def ratios(actual: Results, exact: Results, plain: Results, unit: float) -> dict:
    """For each result, its error as a share of what is allowed."""
    found = {}
    lse = exact["lse"][np.isfinite(exact["lse"])]
    largest_lse = np.max(np.abs(lse), initial=0.0)
    for name, a in actual.items():
        e, p = exact[name], plain[name]
        finite = np.isfinite(e)
        if a.shape != e.shape or not np.array_equal(np.isfinite(a), finite):
            found[name] = np.inf
            continue
        if not finite.any():
            continue
        error, plain_error = (np.max(np.abs(x[finite] - e[finite])) for x in (a, p))
        size = np.max(np.abs(exact.get(f"{name} terms", e)[finite]))
        factor, roundings = OUTPUT if name in ("out", "lse") else GRADIENT
        share = roundings * unit
        if name not in ("out", "lse"):
            share += 4 * largest_lse * 2.0**-24
        allowed = factor * plain_error + share * size
        found[name] = 0.0 if error == 0 else error / max(allowed, 1e-30)
    return found


def check(actual: Results, exact: Results, plain: Results, unit: float) -> dict:
    """Asserts the error rule; returns the ratios to the allowed error."""
    found = ratios(actual, exact, plain, unit)
    too_far = {name: r for name, r in found.items() if not r <= 1.0}
    assert not too_far, f"error as a share of the allowed one: {too_far}"
    return found
