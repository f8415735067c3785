"""The one error rule: how far a result may be from the exact one.

Against the reference in float64, the largest error of an output is at most 2 times, of
a gradient at most 3 times, that of plain quadratic attention in the input dtype with
float32 softmax, plus two roundings of the largest exact value for an output and four
for a gradient (which is a difference, dp - delta, of rounded values). A gradient also
recomputes p = exp(s - lse): four float32 roundings of numbers as large as lse (s and
lse, each before and after its scaling) become a relative error of p. The log-sum-exp
itself has these roundings too.

Results are sums over pairs, which may cancel: the roundings are of the root of the sum
of the squared terms, where that is larger. The terms are p * v and p * do, and for the
other gradients those with ds = p * (dp - delta), of which dp and delta (made of the
rounded output) may cancel too: a term counts p * |dp| beside ds, or for a sink beside
p * delta.
"""

from __future__ import annotations

import functools

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
    inputs = dict(zip(("query", "key", "value"), arrays, strict=True))
    data, static = {}, {}
    for name, x in arguments.items():
        if name in OPERANDS:
            inputs[name] = jnp.asarray(x)
        elif isinstance(x, np.ndarray | jax.Array):
            # An input: of constants XLA would compute much itself, slowly.
            data[name] = jnp.asarray(x)
        else:
            static[name] = x
    operands = inputs, cotangents, data
    leaves, tree = jax.tree.flatten(operands)
    kinds = tuple((x.shape, x.dtype) for x in leaves)
    results = _program(frozenset(static.items()), (tree, kinds))(*operands)
    return {name: np.asarray(x, np.float64) for name, x in results.items()}


@functools.lru_cache(maxsize=16)
def _program(static: frozenset, kinds):
    """Kept, so that other numbers of the same shapes are not compiled again.

    A program is for one kind of operands: all that is compiled is let go with it.
    """
    del kinds
    options = dict(static)

    @jax.jit
    def run(inputs, cotangents, data):
        def call(inputs):
            return attention(**inputs, return_residual=True, **data, **options)

        (out, lse), vjp = jax.vjp(call, inputs)
        return {"out": out, "lse": lse, **vjp(cotangents)[0]}

    return run


def cotangents_for(case, dtype, seed: int = 1):
    """Random cotangents of the output and of the log-sum-exp."""
    rng = np.random.default_rng(seed)
    shape = (*case.batch, case.t, case.n)
    return (
        jnp.asarray(rng.standard_normal((*shape, case.d)), dtype),
        jnp.asarray(rng.standard_normal(shape), jnp.float32),
    )


def exact(arrays, cotangents, arguments) -> Results:
    """The reference in float64 on the same (rounded) inputs, on the CPU.

    For each that is a sum over pairs there is also "... terms", the size of the terms.
    """
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):

        def wide(x):
            return jnp.asarray(np.asarray(x, np.float64))

        arrays, cotangents = jax.tree.map(wide, (arrays, cotangents))
        arguments = {k: wide(x) if k in OPERANDS else x for k, x in arguments.items()}
        arguments |= {"implementation": "reference", "precision": "highest"}
        query, key, _ = arrays
        *batch, t, n, _ = query.shape
        bias = arguments.get("bias")
        pairs = (*batch, n, t, key.shape[-3])
        full = jnp.broadcast_to(0.0 if bias is None else bias, pairs)
        do, dlse = cotangents
        # Of the log-sum-exp alone, the gradient of a bias is p.
        only_lse = (jnp.zeros_like(do), jnp.ones_like(dlse))
        arguments["bias"] = full
        results = evaluate(arrays, cotangents, arguments)
        p = evaluate(arrays, only_lse, arguments)["bias"]
        ds = results.pop("bias")
        if bias is not None:
            results["bias"] = _summed_to(ds, bias.shape)
        terms = _terms(arrays, cotangents, arguments, results, ds, p, bias)
    return results | terms


def _summed_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum over what `shape` was broadcast over."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)


def _terms(arrays, cotangents, arguments, results: Results, ds, p, bias) -> Results:
    query, key, value = (np.asarray(x) for x in arrays)
    do, dlse = (np.asarray(x) for x in cotangents)
    *batch, t, n, h = query.shape
    s, k = key.shape[-3:-1]
    # |dp| is about |do| |v| / sqrt(Hv).
    largest = np.max(np.linalg.norm(value, axis=-1), initial=0.0)
    largest /= value.shape[-1] ** 0.5
    kept = 1 - arguments.get("dropout_rate", 0)
    dp = np.linalg.norm(do, axis=-1) * largest / kept
    dp = dp + np.abs(dlse)
    pairs = ds**2 + (p * np.moveaxis(dp, -1, -2)[..., None]) ** 2
    scale = arguments.get("scale")
    scale = h**-0.5 if scale is None else scale

    def for_queries(weights, x):
        return np.einsum("...nts,...snh->...tnh", weights, x.repeat(n // k, -2) ** 2)

    def for_keys(weights, x):
        full = np.einsum("...nts,...tnh->...snh", weights, x**2)
        return full.reshape(*batch, s, k, n // k, x.shape[-1]).sum(-2)

    terms = {
        "out": for_queries((p / kept) ** 2, value),
        "query": for_queries(pairs * scale**2, key),
        "key": for_keys(pairs * scale**2, query),
        "value": for_keys((p / kept) ** 2, do),
    }
    # What a score is the sum of, for the log-sum-exp.
    keys = key.repeat(n // k, -2)
    scores = scale**2 * np.einsum("...tnh,...snh->...nts", query**2, keys**2)
    scores = scores + np.asarray(arguments["bias"]) ** 2
    if bias is not None:
        terms["bias"] = _summed_to(pairs, bias.shape)
    if "alibi_slopes" in arguments:
        offset = np.asarray(arguments.get("query_offset", 0))
        offset = np.broadcast_to(offset, batch)[..., None, None, None]
        distance = np.arange(t)[:, None] + offset - np.arange(s)
        slopes = np.asarray(arguments["alibi_slopes"])
        scores = scores + (slopes[..., None, None] * distance) ** 2
        over = (pairs * distance**2).sum((-2, -1))
        terms["alibi_slopes"] = over.sum(tuple(range(over.ndim - slopes.ndim)))
    terms["lse"] = (p**2 * np.where(p > 0, scores, 0.0)).sum(-1)
    if "sinks" in arguments:
        lse = np.where(np.isfinite(results["lse"]), results["lse"], np.inf)
        p = np.exp(arguments["sinks"] - lse)
        delta = np.sum(results["out"] * do, -1) - dlse
        over = p**2 * (delta**2 + dp**2)
        terms["sinks"] = over.sum(tuple(range(lse.ndim - 1)))
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
        size = np.max(np.abs(e[finite]))
        size = max(size, np.max(exact.get(f"{name} terms", 0.0), initial=0.0))
        factor, roundings = OUTPUT if name in ("out", "lse") else GRADIENT
        share = roundings * unit
        if name != "out":
            share += 4 * (1.0 if name == "lse" else largest_lse) * 2.0**-24
        allowed = factor * plain_error + share * size
        found[name] = 0.0 if error == 0 else error / max(allowed, 1e-30)
    return found


def check(actual: Results, exact: Results, plain: Results, unit: float) -> dict:
    """Asserts the error rule; returns the ratios to the allowed error."""
    found = ratios(actual, exact, plain, unit)
    too_far = {name: r for name, r in found.items() if not r <= 1.0}
    assert not too_far, f"error as a share of the allowed one: {too_far}"
    return found
