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
from jax_flash2._operation import Problem, forward_outputs
from pallas_kernels.core import clear, gather
from pallas_kernels.core.arithmetic import widened
from pallas_kernels.core.axes import Heads, Named, batch_axes, contract, sizes
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.promotion import own_rules


def attend(problem: Problem, arrays) -> tuple[jax.Array, ...]:
    """What `_vjp.forward` gives; on each device of its own part."""
    operands = list(map(Named, arrays, problem.axes))
    division = _sharding.explicit_division(operands, problem.argument)

    def part(*arrays):
        return _attend(problem, arrays)

    if division is not None:
        outputs = tuple(x.axes for x in forward_outputs(problem, operands))
        part = _sharding.on_each_device(division, part, problem.axes, outputs)
    return tuple(part(*arrays))


@own_rules()
def _attend(problem: Problem, arrays) -> tuple[jax.Array, ...]:
    call = problem.named(arrays).widened
    q, k, v, spec = call.query, call.key, call.value, call.spec
    operands = [q, k, v, *jax.tree.leaves(spec)]
    outputs = o, *of_rows = forward_outputs(problem, operands)
    size = sizes(operands)
    if 0 in size.values():
        empty = (jnp.full(x.shape, -jnp.inf, x.dtype) for x in of_rows)
        return jnp.zeros(o.shape, o.dtype), *empty
    heads, precision = Heads.of(size), call.precision or lax.Precision.DEFAULT
    lead = (*batch_axes(operands), *heads.names)
    rows, columns, pair_axes = (*lead, "t"), (*lead, "t", "d"), (*lead, "t", "s")
    q, k, v = (heads.split(x).squeezed() for x in (q, k, v))
    sink = None if spec.sink is None else heads.split(spec.sink).to(rows)
    spec, (k, v) = gather.whole(spec, (k, v), size, q.dtype)
    k, v = (Named(widened(x.value, q.dtype), x.axes) for x in (k, v))
    k, v = (clear.dropped_keys(spec, x) for x in (k, v))
    spec = clear.scale_of_values(spec)
    spec = jax.tree.map(lambda x: heads.split(x).to(pair_axes), spec)
    ends = {"t": (0, size["t"]), "s": (0, size["s"])}
    pairs = Pairs(spec, ends, precision=precision, is_differentiated=True)

    def existing(x: Named, row: str, limit) -> Named:
        """Padding replaced by zeros: no NaN there may meet a product."""
        if isinstance(limit, int):
            return x
        axes = (*lead, row, *(a for a in ("h", "d") if a in x.axes))
        inside = jnp.arange(size[row]) < limit[..., 0]
        value = jnp.where(inside[..., None], x.to(axes), jnp.zeros((), x.dtype))
        return Named.broadcast(value, axes)

    q = existing(q, "t", spec.q_limit(size["t"]))
    k, v = (existing(x, "s", spec.kv_limit(size["s"])) for x in (k, v))

    def scores_of(q: Named) -> jax.Array:
        return pairs.scores_of(contract(q, k, pair_axes, precision), q.dtype).value

    # A query without keys may hold NaN too.
    zeros = Named(jnp.zeros_like(q.value), q.axes)
    looks = jnp.any(scores_of(zeros) > -jnp.inf, axis=-1, keepdims=True)
    axes = (*lead, "t", "h")
    q = Named.broadcast(jnp.where(looks, q.to(axes), jnp.zeros((), q.dtype)), axes)
    scores = scores_of(q)
    keep = scores > -jnp.inf
    any_kept = jnp.any(keep, axis=-1)
    # Where nothing is kept, any finite row will do: its result is replaced.
    safe = jnp.where(any_kept[..., None], scores, 0.0)
    # Not exp(scores - lse): where a bias of -1e9 masks a row, nothing is left in the
    # log-sum-exp of the logarithm of the sum.
    m = jnp.max(safe, axis=-1)
    largest = lax.stop_gradient(jnp.where(any_kept, m, -jnp.inf))
    if sink is not None:
        m = jnp.maximum(m, sink.astype(m.dtype))
    m = lax.stop_gradient(m)
    p = jnp.where(keep, jnp.exp(safe - m[..., None]), 0.0)
    total = jnp.sum(p, axis=-1)
    if sink is not None:
        total = total + jnp.exp(sink.astype(m.dtype) - m)
    total = jnp.where(any_kept, total, 1.0)
    log_sum_exp = jnp.where(any_kept, m + jnp.log(total), -jnp.inf)
    p = pairs.left(p / total[..., None]) * spec.dropout_scale
    out = contract(Named(p.astype(v.dtype), pair_axes), v, columns, precision)
    # So that cotangents of rows without keys, padding among them, end here.
    out = jnp.where(any_kept[..., None], out, 0.0)
    found = [Named(out, columns), Named(log_sum_exp, rows)]
    found += [Named(largest, rows)] if spec.gives_largest else []
    return tuple(
        jnp.broadcast_to(heads.merge(x).to(like.axes), like.shape).astype(like.dtype)
        for x, like in zip(found, outputs, strict=True)
    )
