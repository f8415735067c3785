"""A backend in one short file; it names no mask and no term (`backend.Backend`)."""

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Declined, Plan
from pallas_kernels.core import clear, flash2
from pallas_kernels.core.axes import Heads, Named, batch_axes, sizes
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.spec import sink_gradient


def plan(call, pass_, /):
    if pass_ == "tangent":
        return Declined("JAX's loops make tangents")
    return Declined("head sizes above 256") if max(call.head_sizes) > 256 else Plan()


class _Whole:
    """All pairs of a call as one block, with every array broadcast to all axes."""

    def __init__(self, call, query, *rows):
        size = sizes([*call.operands, *rows])
        self.heads, self.precision = Heads.of(size), call.precision
        self.size = {**size, "g": self.heads.group}
        self.lead = (*batch_axes([*call.operands, *rows]), *self.heads.names)
        self.spec = jax.tree.map(lambda x: self.split(x, "ts"), call.spec)
        ends = {name: (0, size[name]) for name in ("t", "s")}
        self.pairs = Pairs(self.spec, ends, precision=call.precision)
        arrays = (clear.unread(call.spec, x) for x in (query, call.key, call.value))
        self.q, self.k, self.v = map(self.all, arrays, ("th", "sh", "sd"))
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

    def values(self, p):
        return self.dot(self.pairs.drop(p).astype(self.v.dtype), self.v)

    def sum(self, x, own, out):
        return self.heads.result(Named(x, (*self.lead, *own)), out)


def forward(_, call, outputs):
    whole, sink = _Whole(call, call.query), call.spec.sink
    state = flash2.init(whole.q.shape[:-1], whole.size["d"], dtype=outputs[1].dtype)
    state = flash2.step(state, whole.scores, whole.values)
    o, lse = flash2.finish(state, None if sink is None else whole.split(sink, "t"))
    found = [(o * call.spec.dropout_scale, "td"), (lse, "t")]
    found += [(state.largest, "t")] if call.spec.gives_largest else []
    return [whole.sum(*x, out) for x, out in zip(found, outputs, strict=True)]


def backward(_, call, saved, wanted):
    spec, scale, (o, lse, do, dlse) = call.spec, call.spec.dropout_scale, saved
    rows = (clear.padding(spec, x) for x in (call.query, do))
    q, do = (clear.masked_rows(spec, x, lse, by_entry=False) for x in rows)
    whole = _Whole(call, q, *saved)
    o, lse, do, dlse = map(whole.all, (o, lse, do, dlse), ("td", "t", "td", "t"))
    delta = flash2.delta(o, lse, do, dlse)
    again = whole.pairs.recompute(whole.scores, flash2.lse_log2(lse)[..., None])
    pulled = again.pull(whole.dot(do, whole.v.mT), delta[..., None])
    dz, unit = pulled.dz.astype(q.dtype), whole.spec.gradient_unit
    dv = whole.dot(again.dropped.astype(do.dtype).mT, do) * scale
    found = {"query": (whole.dot(dz, whole.k) * unit, "th"), "value": (dv, "sd")}
    found["key"] = whole.dot(dz.mT, whole.q) * unit, "sh"
    for name in spec.score.operands:
        of_pairs = pulled.operand(name, whole.qk) * scale
        found[name] = jnp.broadcast_to(of_pairs, dz.shape), "ts"
    if spec.sink is not None:
        rows = (Named(x, (*whole.lead, "t")) for x in (lse, delta))
        sink = sink_gradient(whole.heads.split(spec.sink), *rows)
        found["sink"] = sink.to((*whole.lead, "t")), "t"
    return {name: whole.sum(*found[name], out) for name, out in wanted.items()}
