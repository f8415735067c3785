"""A backend in one short file: what a new one has to have (`pallas_kernels.backend`).

Quadratic in memory, and served by `pallas_kernels.core` alone: no mask and no score
feature is named here.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Declined, Plan
from pallas_kernels.core import clear, flash2
from pallas_kernels.core.axes import Heads, Named, batch_axes, sizes, summed_to
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.spec import sink_gradient


def plan(call, pass_, /):
    large = max(call.head_sizes) > 256
    return Declined("head sizes above 256") if large else Plan()


class _Whole:
    """All pairs of a call as one block, with every array broadcast to all axes."""

    def __init__(self, call, *rows):
        operands = [*call.operands, *rows]
        size = sizes(operands)
        self.heads, self.precision = Heads.of(size), call.precision
        self.size = {**size, "g": self.heads.group}
        self.lead = (*batch_axes(operands), *self.heads.names)
        self.spec = jax.tree.map(lambda x: self.split(x, "ts"), call.spec)
        ends = {name: (0, size[name]) for name in ("t", "s")}
        self.pairs = Pairs(self.spec, ends, precision=call.precision)
        k, v = (clear.dropped_keys(call.spec, x) for x in (call.key, call.value))
        rows = (call.query, "th"), (k, "sh"), (v, "sd")
        self.q, self.k, self.v = (
            self.all(clear.padding(call.spec, x), a) for x, a in rows
        )
        self.qk = self.dot(self.q, self.k.mT)
        self.scores = self.pairs.scores_of(self.qk, call.dtype)

    def split(self, x, own):
        return self.heads.split(x).to((*self.lead, *own))

    def all(self, x, own):
        shape = [self.size[a] for a in (*self.lead, *own)]
        return jnp.broadcast_to(self.split(x, own), shape)

    def dot(self, a, b):
        wide = jnp.promote_types(a.dtype, jnp.float32)
        return jnp.matmul(a, b, precision=self.precision, preferred_element_type=wide)

    def sum(self, x, own, out):
        axes = self.heads.split_axes(out.axes)
        x = summed_to(Named(x, (*self.lead, *own)), axes)
        return self.heads.merge(Named(x, axes)).value.astype(out.dtype)


def forward(_, call, outputs):
    whole = _Whole(call)
    state = flash2.init(whole.q.shape[:-1], whole.size["d"], dtype=outputs[1].dtype)

    def product(p):
        return whole.dot(whole.pairs.drop(p).astype(whole.v.dtype), whole.v)

    sink = None if call.spec.sink is None else whole.split(call.spec.sink, "t")
    o, lse = flash2.finish(flash2.step(state, whole.scores, product), sink)
    found = (o * call.spec.dropout_scale, "td"), (lse, "t")
    return [whole.sum(*x, out) for x, out in zip(found, outputs, strict=True)]


def backward(_, call, saved, wanted):
    o, lse, do, dlse = saved
    spec, scale = call.spec, call.spec.dropout_scale
    q, do = (clear.masked_rows(spec, x, lse, by_entry=False) for x in (call.query, do))
    whole = _Whole(dataclasses.replace(call, query=q), *saved)
    o, lse, do, dlse = map(whole.all, (o, lse, do, dlse), ("td", "t", "td", "t"))
    delta = flash2.delta(o, lse, do, dlse)
    again = whole.pairs.recompute(whole.scores, flash2.lse_log2(lse)[..., None])
    pulled = again.pull(whole.dot(do, whole.v.mT), delta[..., None])
    unit, dz = whole.spec.gradient_unit, pulled.dz.astype(q.dtype)
    dv = whole.dot(again.dropped.astype(do.dtype).mT, do) * scale
    found = {"query": (whole.dot(dz, whole.k) * unit, "th"), "value": (dv, "sd")}
    found["key"] = whole.dot(dz.mT, whole.q) * unit, "sh"
    for name in spec.score.operands:
        x = jnp.broadcast_to(pulled.operand(name, whole.qk) * scale, dz.shape)
        found[name] = x, "ts"
    if spec.sink is not None:
        rows = (Named(x, (*whole.lead, "t")) for x in (lse, delta))
        sink = sink_gradient(whole.heads.split(spec.sink), *rows)
        found["sink"] = sink.to((*whole.lead, "t")), "t"
    return {name: whole.sum(*found[name], out) for name, out in wanted.items()}
