"""A backend in one short file: what a new one has to have (`pallas_kernels.backend`).

Quadratic in memory, and served by `pallas_kernels.core` alone: no mask and no score
feature is named here.
"""

import contextlib

import jax
import jax.numpy as jnp

from pallas_kernels.core import clear, flash2
from pallas_kernels.core.axes import Heads, Named, batch_axes, sizes, summed_to
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.spec import sink_gradient

lowering_context = contextlib.nullcontext


def slower(call, /):
    del call


def division(call, /):
    return ()


def unsupported(call, /):
    return "head sizes above 256" if max(call.head_sizes) > 256 else None


class _Whole:
    """All pairs of a call as one block, with every array broadcast to all axes."""

    def __init__(self, q, k, v, spec, precision, *rows):
        operands = [q, k, v, *jax.tree.leaves(spec), *rows]
        size = sizes(operands)
        self.heads, self.precision = Heads.of(size), precision
        self.size = {**size, "g": self.heads.group}
        self.lead = (*batch_axes(operands), *self.heads.names)
        ends = {name: (0, size[name]) for name in ("t", "s")}
        fields = jax.tree.map(lambda x: self.heads.split(x).to(self.axes("ts")), spec)
        self.spec, self.pairs = fields, Pairs(fields, ends, precision=precision)
        k, v = (clear.dropped_keys(spec, x) for x in (k, v))
        self.q, self.k, self.v = self.all(q, "th"), self.all(k, "sh"), self.all(v, "sd")
        self.scores = self.pairs.scores_of(self.dot(self.q, self.k.mT), q.dtype)

    def axes(self, own):
        return (*self.lead, *own)

    def all(self, x, own):
        """With every axis; what lies beyond a length is 0, not NaN."""
        shape = [self.size[a] for a in self.axes(own)]
        x = jnp.broadcast_to(self.heads.split(x).to(self.axes(own)), shape)
        if len(own) == 1:
            return x
        limit = self.spec.q_limit if own[0] == "t" else self.spec.kv_limit
        rows = self.size[own[0]]
        return jnp.where(jnp.arange(rows)[:, None] < limit(rows), x, 0)

    def dot(self, a, b):
        wide = jnp.promote_types(a.dtype, jnp.float32)
        return jnp.matmul(a, b, precision=self.precision, preferred_element_type=wide)

    def sum(self, x, own, out):
        axes = self.heads.split_axes(out.axes)
        x = summed_to(Named(x, self.axes(own)), axes)
        return self.heads.merge(Named(x, axes)).value.astype(out.dtype)


def forward(q, k, v, spec, outputs, *, config, precision):
    del config
    whole = _Whole(q, k, v, spec, precision)
    *rows, size = whole.v.shape
    state = flash2.init([*rows[:-1], whole.size["t"]], size, dtype=outputs[1].dtype)

    def product(p):
        return whole.dot(whole.pairs.drop(p).astype(v.dtype), whole.v)

    sink = (
        None if spec.sink is None else whole.heads.split(spec.sink).to(whole.axes("t"))
    )
    o, lse = flash2.finish(flash2.step(state, whole.scores, product), sink)
    found = (o * spec.dropout_scale, "td"), (lse, "t")
    return [whole.sum(*x, out) for x, out in zip(found, outputs, strict=True)]


def backward(q, k, v, spec, saved, outputs, *, config, precision):
    del config
    o, lse, do, dlse = saved
    q, do = (clear.masked_rows(spec, x, lse, by_entry=False) for x in (q, do))
    saved = o, lse, do, dlse
    whole = _Whole(q, k, v, spec, precision, *saved)
    o, lse, do, dlse = map(whole.all, saved, ("td", "t", "td", "t"))
    delta = flash2.delta(o, lse, do, dlse)
    again = whole.pairs.recompute(whole.scores, flash2.lse_log2(lse)[..., None])
    pulled = again.pull(whole.dot(do, whole.v.mT), delta[..., None])
    unit, low = whole.spec.gradient_unit, pulled.dz.astype(q.dtype)
    found = [
        (whole.dot(low, whole.k) * unit, "th"),
        (whole.dot(low.mT, whole.q) * unit, "sh"),
        (whole.dot(again.dropped.astype(do.dtype).mT, do) * spec.dropout_scale, "sd"),
    ]
    qk = whole.dot(whole.q, whole.k.mT)
    for name in spec.score.operands:
        of_pairs = pulled.operand(name, qk) * spec.dropout_scale
        found.append((jnp.broadcast_to(of_pairs, qk.shape), "ts"))
    if spec.sink is not None:
        sink = whole.heads.split(spec.sink)
        rows = (Named(x, whole.axes("t")) for x in (lse, delta))
        found.append((sink_gradient(sink, *rows).to(whole.axes("t")), "t"))
    return [whole.sum(*x, out) for x, out in zip(found, outputs, strict=True)]
