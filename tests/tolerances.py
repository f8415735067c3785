"""The one error rule: how far a result may be from the exact one.

Against the oracle in float64, the largest error of an output is at most 2 times, of a
gradient at most 3 times, that of plain quadratic attention in the input dtype with
float32 softmax, plus two roundings of the largest exact value for an output and four
for a gradient (which is a difference, dp - delta, of rounded values). A gradient also
recomputes p = exp(s - lse): four float32 roundings of numbers as large as lse (s and
lse, each before and after its scaling) become a relative error of p. The log-sum-exp
itself and the largest scores have these roundings too. An output has two float32
roundings more, whatever its dtype, of numbers as large as exponents, ln p, and at least
1. The rule holds for each head by itself.

Results are sums over pairs, which may cancel: the roundings are of the root of the sum
of the squared terms, where that is larger. The terms are p * v and p * do, and for the
other gradients those with ds = p * (dp - delta), of which dp and delta (made of the
rounded output) may cancel too: a term counts p * |dp| beside ds, or for a sink beside
p * delta.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2 import attention
from tests import oracle
from tests.cases import ON_GPU
from tests.functions import is_data
from tests.oracle import OPERANDS, Results, summed_to

# (times the error of plain attention, roundings of the largest exact value)
OUTPUT = (2.0, 2.0)
GRADIENT = (3.0, 4.0)
# The axis of heads of each result, from the last; those with fewer axes have none.
HEADS = {
    "lse": -1,
    "lse tangent": -1,
    "max_logit": -1,
    "bias": -3,
    "alibi_slopes": -1,
    "sinks": -1,
    "gain": -1,
    "score_mod_gain": -1,
    "score_mod_keys": None,
    "scale": None,
}


def evaluate(arrays, cotangents, arguments, call: Callable = attention) -> Results:
    """A call and its gradients, in one compiled program, as float64 arrays.

    Args:
      call: `attention`, or what is called like it (hashable).
    """
    inputs = dict(zip(("query", "key", "value"), arrays, strict=True))
    data, static = {}, {}
    for name, x in arguments.items():
        if not is_data(x):
            static[name] = x
            continue
        # An input: of constants XLA would compute much itself, slowly.
        kind = inputs if name in (*OPERANDS, "score_mod") else data
        kind[name] = jax.tree.map(jnp.asarray, x)
    operands = inputs, cotangents, data
    leaves, tree = jax.tree.flatten(operands)
    kinds = tuple((x.shape, x.dtype) for x in leaves)
    results = _program(call, frozenset(static.items()), (tree, kinds))(*operands)
    return {name: np.asarray(x, np.float64) for name, x in results.items()}


@functools.lru_cache(maxsize=16)
def _program(function: Callable, static: frozenset, kinds):
    """Kept, so that other numbers of the same shapes are not compiled again.

    A program is for one kind of operands: all that is compiled is let go with it.
    """
    del kinds
    options = dict(static)

    @jax.jit
    def run(inputs, cotangents, data):
        def call(inputs):
            return function(**inputs, return_residual=True, **data, **options)

        results, vjp = jax.vjp(call, inputs)
        # The largest scores have no gradient, whatever their cotangent.
        others = tuple(map(jnp.ones_like, results[2:]))
        named = dict(zip(("out", "lse", "max_logit"), results, strict=False))
        return named | of_arrays(vjp((*cotangents, *others))[0])

    return run


def of_arrays(inputs: dict) -> dict[str, jax.Array]:
    """Each array by its name: of a score_mod those that it captures."""
    found = jax.tree.leaves_with_path(inputs)
    return {jax.tree_util.keystr(at, simple=True, separator="_"): x for at, x in found}


def cotangents_for(case, dtype, seed: int = 1):
    """Random cotangents of the output and of the log-sum-exp."""
    rng = np.random.default_rng(seed)
    shape = (*case.batch, case.t, case.n)
    return (
        jnp.asarray(rng.standard_normal((*shape, case.d)), dtype),
        jnp.asarray(rng.standard_normal(shape), jnp.float32),
    )


def exact(arrays, cotangents, arguments) -> Results:
    """The oracle in float64 on the same (rounded) inputs.

    For each that is a sum over pairs there is also "... terms", the size of the terms,
    and for the output "out exponent terms", with each times its exponent.
    """
    wide = [np.asarray(x).astype(np.float64) for x in (*arrays, *cotangents)]
    arrays, cotangents = wide[:3], wide[3:]
    results, pairs = oracle.attention(arrays, cotangents, arguments)
    return results | _terms(arrays, cotangents, arguments, results, pairs)


def _terms(arrays, cotangents, arguments, results: Results, pairs) -> Results:
    query, key, value = arrays
    do, dlse = cotangents
    p, dz, distance, of_gain, of_score, slope, of_captured = pairs
    *batch, _, n, h = query.shape
    s, k = key.shape[-3:-1]
    # |dp| is about |do| |v| / sqrt(Hv).
    largest = np.max(np.linalg.norm(value, axis=-1), initial=0.0)
    largest /= value.shape[-1] ** 0.5
    kept = 1 - arguments.get("dropout_rate", 0)
    dp = np.linalg.norm(do, axis=-1) * largest / kept
    dp = dp + np.abs(dlse)
    of_dp = (p * np.moveaxis(dp, -1, -2)[..., None]) ** 2
    squares = dz**2 + slope**2 * of_dp
    scale = arguments.get("scale")
    scale = h**-0.5 if scale is None else float(scale)

    def for_queries(weights, x):
        return np.einsum("...nts,...snh->...tnh", weights, x.repeat(n // k, -2) ** 2)

    def for_keys(weights, x):
        full = np.einsum("...nts,...tnh->...snh", weights, x**2)
        return full.reshape(*batch, s, k, n // k, x.shape[-1]).sum(-2)

    # What a score is the sum of, for the log-sum-exp and the scale.
    keys = key.repeat(n // k, -2)
    products = np.einsum("...tnh,...snh->...nts", query**2, keys**2)
    bias = np.asarray(arguments.get("bias", 0.0), np.float64)
    slopes = np.asarray(arguments.get("alibi_slopes", 0.0), np.float64)[..., None, None]
    scores = slope**2 * (scale**2 * products + bias**2 + (slopes * distance) ** 2)
    lse = np.where(np.isfinite(results["lse"]), results["lse"], np.inf)
    of_sink = np.exp(arguments.get("sinks", -np.inf) - lse)
    delta = np.sum(results["out"] * do, -1) - dlse
    terms = {
        "out": for_queries((p / kept) ** 2, value),
        "lse": np.moveaxis(
            (p**2 * np.where((p > 0) & np.isfinite(scores), scores, 0.0)).sum(-1),
            -1,
            -2,
        ),
        "query": for_queries(squares * scale**2, key),
        "key": for_keys(squares * scale**2, query),
        "value": for_keys((p / kept) ** 2, do),
        "bias": squares,
        "alibi_slopes": (squares * distance**2).sum((-2, -1)),
        "gain": (squares * of_gain**2).sum((-2, -1)),
        "sinks": (of_sink**2 * (delta**2 + dp**2)).swapaxes(-1, -2).sum(-1),
        "scale": (squares * products).sum(),
    }
    for name, of in of_captured.items():
        own = (of_score**2 + of_dp) * of**2
        terms[name] = arguments["score_mod"].summed(name, own)
    of_exponents = (p * np.log(np.where(p > 0, p, 1.0)) / kept) ** 2
    if "max_logit" in results:  # those of any score may be of the largest
        of_pairs = np.where(p > 0, np.where(np.isfinite(scores), scores, 0.0), 0.0)
        largest = of_pairs.max(-1, initial=0.0)
        terms["max_logit"] = np.moveaxis(largest, -1, -2)
    found = {
        f"{name} terms": np.sqrt(
            summed_to(x, results[name].shape) if name in OPERANDS else x
        )
        for name, x in terms.items()
        if name in results
    }
    return found | {"out exponent terms": np.sqrt(for_queries(of_exponents, value))}


def plain(arrays, cotangents, arguments) -> Results:
    """Quadratic attention in the input dtype: what the error is measured by."""
    dtype = arrays[0].dtype
    tf32 = _is_tf32(dtype, arguments.get("precision"))
    return oracle.attention(arrays, cotangents, arguments, dtype, tf32)[0]


def _is_tf32(dtype, precision) -> bool:
    return jnp.dtype(dtype) == jnp.float32 and ON_GPU and precision != "highest"


def unit_roundoff(dtype, precision=None) -> float:
    """Largest relative error of one rounding; float32 on a GPU may be TF32.

    Tensor cores take the upper bits of a float32 as TF32: they cut, not round, and a
    product of two such numbers is off by twice 2**-10.
    """
    if _is_tf32(dtype, precision):
        return 2.0**-9
    return float(jnp.finfo(dtype).eps) / 2


def _by_head(name: str, x: np.ndarray) -> np.ndarray:
    """[heads, the rest]; one head where the result has no axis of heads."""
    axis = HEADS.get(name, -2)
    if axis is None or x.ndim < -axis:
        return x.reshape(1, -1)
    return np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)


def ratios(actual: Results, exact: Results, plain: Results, unit: float) -> dict:
    """For each result, its error as a share of what is allowed, of the worst head."""
    assert set(actual) == {name for name in exact if not name.endswith(" terms")}
    found = {}
    lse = exact["lse"][np.isfinite(exact["lse"])]
    largest_lse = np.max(np.abs(lse), initial=0.0)
    for name, a in actual.items():
        if a.shape != exact[name].shape:
            found[name] = np.inf
            continue
        terms = np.broadcast_to(exact.get(f"{name} terms", 0.0), a.shape)
        results = (a, exact[name], plain[name], terms)
        a, e, p, terms = (_by_head(name, x) for x in results)
        finite = np.isfinite(e)
        if not np.array_equal(np.isfinite(a), finite):
            found[name] = np.inf
            continue

        def largest(x, finite=finite):
            return np.max(np.abs(np.where(finite, x, 0.0)), axis=1, initial=0.0)

        with np.errstate(invalid="ignore"):
            error, plain_error = largest(a - e), largest(p - e)
        assert np.isfinite(plain_error).all(), f"{name}: the baseline is not finite"
        size = np.maximum(largest(e), largest(terms))
        is_output = name in ("out", "lse", "max_logit")
        factor, roundings = OUTPUT if is_output else GRADIENT
        share = roundings * unit
        allowed = factor * plain_error + share * size
        if name == "out":
            of_exponents = largest(_by_head(name, exact["out exponent terms"]))
            allowed += 2 * 2.0**-24 * np.maximum(size, of_exponents)
        else:
            numbers = 1.0 if is_output else largest_lse
            allowed += 4 * 2.0**-24 * numbers * size
        allowed = np.maximum(allowed, 1e-30)
        found[name] = np.max(np.where(error == 0, 0.0, error / allowed), initial=0.0)
    return found


def check(actual: Results, exact: Results, plain: Results, unit: float) -> dict:
    """Asserts the error rule; returns the ratios to the allowed error."""
    found = ratios(actual, exact, plain, unit)
    too_far = {name: r for name, r in found.items() if not r <= 1.0}
    assert not too_far, f"error as a share of the allowed one: {too_far}"
    return found
