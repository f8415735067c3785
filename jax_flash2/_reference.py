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

from jax_flash2._chunked import spec_block
from pallas_kernels.core.axes import Heads, Named, batch_axes, sizes, vmap_named
from pallas_kernels.core.spec import AttentionSpec


def _head(q: Named, k: Named, v: Named, spec: AttentionSpec, precision):
    """One head: q [T, H], k [S, H], v [S, Hv] -> o [T, Hv], lse [T]."""
    t, s = q.shape[0], k.shape[0]
    rows = jnp.arange(t, dtype=jnp.int32)[:, None]
    columns = jnp.arange(s, dtype=jnp.int32)[None, :]
    spec = spec_block(spec, ("t", "s"))

    def existing(x, count, limit):
        """Padding replaced by zeros: no NaN there may meet a product."""
        return jnp.where((jnp.arange(count) < limit)[:, None], x, jnp.zeros_like(x))

    q_limit, kv_limit = spec.q_limit(t), spec.kv_limit(s)
    q = existing(q.value, t, q_limit)
    k, v = existing(k.value, s, kv_limit), existing(v.value, s, kv_limit)
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    qk = jnp.matmul(q, k.T, precision=precision, preferred_element_type=dtype)
    x, unit = spec.score.apply(qk)
    scores = x * unit
    keep = spec.keep(rows, columns)
    keep = jnp.broadcast_to(True if keep is None else keep, scores.shape)
    any_kept = jnp.any(keep, axis=1)
    # Where nothing is kept, any finite row will do: its result is replaced.
    safe = jnp.where(keep | ~any_kept[:, None], scores, -jnp.inf)
    safe = jnp.where(any_kept[:, None], safe, 0.0)
    lse = jax.nn.logsumexp(safe, axis=1)
    p = jnp.where(keep, jnp.exp(safe - lse[:, None]), 0.0)
    o = jnp.matmul(
        p.astype(v.dtype), v, precision=precision, preferred_element_type=dtype
    )
    # So that cotangents of rows without keys, padding among them, end here.
    o = jnp.where(any_kept[:, None], o, 0.0)
    return o.astype(v.dtype), jnp.where(any_kept, lse, -jnp.inf)


def attend(problem, arrays) -> tuple[jax.Array, jax.Array]:
    """Output (axes of query) and lse (rows last)."""
    q, k, v, spec = problem.named(arrays)
    operands = [q, k, v, *jax.tree.leaves(spec)]
    size = sizes(operands)
    precision = problem.precision or lax.Precision.DEFAULT
    o_axes = tuple("d" if a == "h" else a for a in q.axes)
    batch = batch_axes(operands)
    o_axes = (*(a for a in batch if a not in o_axes), *o_axes)
    lse_axes = (*(a for a in o_axes if a not in ("t", "d")), "t")
    if 0 in size.values():
        shapes = [tuple(size[a] for a in axes) for axes in (o_axes, lse_axes)]
        dtype = jnp.promote_types(q.dtype, jnp.float32)
        return jnp.zeros(shapes[0], v.dtype), jnp.full(shapes[1], -jnp.inf, dtype)
    heads = Heads.of(size)
    trees = jax.tree.map(heads.split, (q, k, v, spec))
    outs = [heads.split_axes(axes) for axes in (o_axes, lse_axes)]

    def head(q, k, v, spec):
        return _head(q, k, v, spec, precision)

    o, lse = vmap_named(head, (*batch, *heads.names), outs)(*trees)
    return heads.merge(o, o_axes), heads.merge(lse, lse_axes)
