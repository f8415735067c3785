"""Backend "reference": quadratic attention, differentiated by JAX. The tests' oracle.

It shares the meaning of masks and scores with the kernels (`pallas_kernels.core`), and
none of their recurrences: a plain softmax over a whole row. Products take operands in
the input dtype and softmax is in float32, as in `jax.nn.dot_product_attention`; float64
inputs (under x64) make it the exact answer that others are compared with.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash2 import _sharding
from jax_flash2._chunked import spec_block
from jax_flash2._operation import Problem, forward_outputs
from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Heads, Named, batch_axes, sizes, vmap_named
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.spec import AttentionSpec


def _head(q: Named, k: Named, v: Named, spec: AttentionSpec, precision):
    """One head: q [T, H], k [S, H], v [S, Hv] -> o [T, Hv], lse [T]."""
    t, s = q.shape[0], k.shape[0]
    spec = spec_block(spec, ("t", "s"))
    pairs = Pairs(spec, {"t": (0, t), "s": (0, s)}, precision=precision)

    def existing(x: Named, limit) -> jax.Array:
        """Padding replaced by zeros: no NaN there may meet a product."""
        rows = (jnp.arange(x.shape[0]) < limit)[:, None]
        return jnp.where(rows, x.value, jnp.zeros_like(x.value))

    queries = existing(q, spec.q_limit(t))
    keys, values = (existing(x, spec.kv_limit(s)) for x in (k, v))
    scores = pairs.scores(queries, keys).value
    keep = scores > -jnp.inf
    any_kept = jnp.any(keep, axis=1)
    # Where nothing is kept, any finite row will do: its result is replaced.
    safe = jnp.where(any_kept[:, None], scores, 0.0)
    # Not exp(scores - lse): where a bias of -1e9 masks a row, nothing is left in the
    # log-sum-exp of the logarithm of the sum.
    m = jnp.max(safe, axis=1)
    if spec.sink is not None:
        m = jnp.maximum(m, spec.sink.astype(m.dtype))
    m = lax.stop_gradient(m)
    p = jnp.where(keep, jnp.exp(safe - m[:, None]), 0.0)
    total = jnp.sum(p, axis=1)
    if spec.sink is not None:
        total = total + jnp.exp(spec.sink.astype(m.dtype) - m)
    total = jnp.where(any_kept, total, 1.0)
    lse = m + jnp.log(total)
    p = pairs.drop(p / total[:, None]) * spec.dropout_scale
    o = flash2.dot(p.astype(v.dtype), values, "nn", precision)
    # So that cotangents of rows without keys, padding among them, end here.
    o = jnp.where(any_kept[:, None], o, 0.0)
    return o.astype(v.dtype), jnp.where(any_kept, lse, -jnp.inf)


def attend(problem: Problem, arrays) -> tuple[jax.Array, jax.Array]:
    """Output (axes of query) and lse (rows last); on each device of its own part."""
    operands = list(map(Named, arrays, problem.axes))
    division = _sharding.explicit_division(operands)

    def part(*arrays):
        return _attend(problem, arrays)

    if division is not None:
        outputs = tuple(x.axes for x in forward_outputs(problem, operands))
        part = _sharding.on_each_device(division, part, problem.axes, outputs)
    out, lse = part(*arrays)
    return out, lse


def _attend(problem: Problem, arrays) -> tuple[jax.Array, jax.Array]:
    q, k, v, spec = problem.named(arrays)
    operands = [q, k, v, *jax.tree.leaves(spec)]
    o, lse = forward_outputs(problem, operands)
    size = sizes(operands)
    if 0 in size.values():
        return jnp.zeros(o.shape, o.dtype), jnp.full(lse.shape, -jnp.inf, lse.dtype)
    precision = problem.precision or lax.Precision.DEFAULT
    heads = Heads.of(size)
    trees = jax.tree.map(heads.split, (q, k, v, spec))
    outs = [heads.split_axes(x.axes) for x in (o, lse)]

    def head(q, k, v, spec):
        return _head(q, k, v, spec, precision)

    names = (*batch_axes(operands), *heads.names)
    results = vmap_named(head, names, outs)(*trees)
    out, log_sum_exp = map(heads.merge, results, (o.axes, lse.axes))
    return out, log_sum_exp
