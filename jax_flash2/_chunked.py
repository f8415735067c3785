"""Backend "xla": FlashAttention-2's loops in plain JAX, on any platform.

The same recurrences and block ranges as the kernels, over one head at a time, which
`vmap_named` maps over heads and batch. Memory is linear in T and S, forward and
backward. Loop bounds are those that every head and batch entry needs together, so that
mapped loops stay loops.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Axes, Heads, Named, batch_axes, sizes, vmap_named
from pallas_kernels.core.mask import DataDependent, Range, everything
from pallas_kernels.core.spec import AttentionSpec

# Most rows of a block. On 2 CPU cores, float32, B 1, N 4, H 64, T 1024 and 4096, 128 to
# 512 were within 15 % of each other (JAX 0.10.2, 2026-11-21).
BLOCK = 256


def unsupported(**facts) -> str | None:
    """None: this backend serves every call."""
    del facts
    return None


def spec_block(spec: AttentionSpec, order: tuple[str, str], **starts) -> AttentionSpec:
    """The spec of one head with its leaves as blocks that broadcast against `order`.

    Args:
      spec: leaves are `Named` with axes among `t` and `s`.
      order: axes of a block of scores.
      starts: first row of the block of each axis, `BLOCK` rows long; the whole axis
        without.
    """

    def block(leaf: Named):
        x = leaf.value
        for axis, name in enumerate(leaf.axes):
            if name in starts:
                start, rows = starts[name]
                x = lax.dynamic_slice_in_dim(x, start, rows, axis)
        return Named(x, leaf.axes).to(order) if leaf.axes else x

    return jax.tree.map(block, spec)


def _block(rows: int) -> int:
    """Rows of a block: as few equal blocks of at most `BLOCK` rows as hold them all."""
    blocks = -(-rows // BLOCK)
    return -(-rows // (8 * blocks)) * 8


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a call is cut: block sizes, numbers of rows, heads."""

    size: dict[str, int]
    block_q: int
    block_kv: int
    heads: Heads
    batch: tuple[str, ...]

    @classmethod
    def of(cls, operands) -> _Plan:
        size = sizes(operands)
        block_q, block_kv = (_block(size[name]) for name in ("t", "s"))
        return cls(size, block_q, block_kv, Heads.of(size), batch_axes(operands))

    @property
    def num_q(self) -> int:
        return -(-self.size["t"] // self.block_q)

    @property
    def num_kv(self) -> int:
        return -(-self.size["s"] // self.block_kv)

    def padded(self, tree):
        """Every `t` and `s` axis extended with zeros to whole blocks."""
        rows: dict[str | None, int] = {
            "t": self.num_q * self.block_q,
            "s": self.num_kv * self.block_kv,
        }

        def pad(x: Named) -> Named:
            width = [
                (0, rows.get(name, size) - size)
                for name, size in zip(x.axes, x.shape, strict=True)
            ]
            return Named(jnp.pad(x.value, width), x.axes) if any(map(sum, width)) else x

        return jax.tree.map(pad, tree)

    def ranges(self, spec: AttentionSpec, along: str) -> Range:
        """Block ranges along `j` (for each query block) or `i`, over all of the batch.

        Returns:
          A `Range` of integers, or of int32 arrays with one entry a block.
        """
        spec = spec.with_tables(
            self.block_q, self.block_kv, self.size["t"], self.size["s"]
        )
        other = "i" if along == "j" else "j"
        keep = tuple(a for a in spec.masks if not isinstance(a, DataDependent))
        spec = dataclasses.replace(spec, masks=keep)
        spec = dataclasses.replace(
            spec, **{"q_table" if along == "j" else "kv_table": None}
        )
        axes = (*self.batch, "n", other)
        spec = jax.tree.map(lambda leaf: leaf.to(axes), spec)
        t, s = self.size["t"], self.size["s"]
        if along == "j":
            lo = np.arange(self.num_q, dtype=np.int32) * self.block_q
            rows = spec.kv_blocks(
                lo, np.minimum(lo + self.block_q, t), s, self.block_kv
            )
        else:
            lo = np.arange(self.num_kv, dtype=np.int32) * self.block_kv
            rows = spec.q_blocks(lo, np.minimum(lo + self.block_kv, s), t, self.block_q)

        def over_batch(x, function):
            if isinstance(x, int):
                return x
            x = function(x, axis=tuple(range(x.ndim - 1)))
            return jnp.broadcast_to(x, lo.shape)

        functions = (jnp.min, jnp.max, jnp.min, jnp.max)
        rows = Range(*map(over_batch, rows, functions))
        return rows & everything(rows.need_lo, rows.need_hi)

    def map_heads(self, function, trees, out_axes: list[Axes]) -> list[jax.Array]:
        """`function` of single-head operands, over heads and batch."""
        trees = jax.tree.map(self.heads.split, trees)
        names = (*self.batch, *self.heads.names)
        outs = [self.heads.split_axes(axes) for axes in out_axes]
        results = vmap_named(function, names, outs)(*trees)
        return list(map(self.heads.merge, results, out_axes))


def _at(rows: Range, i) -> Range:
    return Range(*(x if isinstance(x, int) else x[i] for x in rows))


def _without_padding(x: Named, spec: AttentionSpec) -> jax.Array:
    """Rows beyond the lengths as zeros: no NaN there may meet a product."""
    name = x.axes[0]
    count = x.shape[0]
    spec = jax.tree.map(lambda leaf: leaf.value, spec)
    limit = spec.q_limit(count) if name == "t" else spec.kv_limit(count)
    if isinstance(limit, int):
        return x.value
    exists = jnp.arange(count, dtype=jnp.int32) < limit
    exists = exists.reshape(-1, *[1] * (len(x.shape) - 1))
    return jnp.where(exists, x.value, jnp.zeros_like(x.value))


def _scores(plan: _Plan, spec: AttentionSpec, qk, masked, q_start, kv_start):
    """A block of scores `(x, unit)`, -inf where masked."""
    x, unit = spec.score.apply(qk)
    if not masked:
        return x, unit
    starts = {"t": (q_start, plan.block_q), "s": (kv_start, plan.block_kv)}
    spec = spec_block(spec, ("t", "s"), **starts)
    if plan.size["s"] % plan.block_kv:
        spec = spec.with_end(plan.size["s"])
    q = q_start + jnp.arange(plan.block_q, dtype=jnp.int32)
    kv = kv_start + jnp.arange(plan.block_kv, dtype=jnp.int32)
    keep = spec.keep(q[:, None], kv[None, :])
    return (x if keep is None else jnp.where(keep, x, -jnp.inf)), unit


def forward(q: Named, k: Named, v: Named, spec, outputs, *, config, precision):
    """Output and log-sum-exp, with the dtypes and axes of `outputs`."""
    del config
    plan = _Plan.of([q, k, v, *jax.tree.leaves(spec)])
    ranges = plan.ranges(spec, "j")
    dtype = outputs[1].dtype

    def head(q, k, v, spec):
        q, k, v = (_without_padding(x, spec) for x in (q, k, v))

        def query_block(i):
            start = i * plan.block_q
            q_block = lax.dynamic_slice_in_dim(q, start, plan.block_q)

            def visit(masked, j, state):
                kv_start = j * plan.block_kv
                k_block, v_block = (
                    lax.dynamic_slice_in_dim(x, kv_start, plan.block_kv) for x in (k, v)
                )
                qk = flash2.dot(q_block, k_block, "nt", precision)
                x, unit = _scores(plan, spec, qk, masked, start, kv_start)

                def product(p):
                    return flash2.dot(p.astype(v.dtype), v_block, "nn", precision)

                return flash2.step(state, x, unit, product)

            state = flash2.init(plan.block_q, v.shape[1], dtype)
            o, lse = flash2.finish(_at(ranges, i).fold(visit, state))
            return o.astype(v.dtype), lse

        o, lse = lax.map(query_block, jnp.arange(plan.num_q, dtype=jnp.int32))
        t = plan.size["t"]
        return o.reshape(-1, v.shape[1])[:t], lse.reshape(-1)[:t]

    trees = plan.padded((q, k, v, spec))
    return plan.map_heads(head, trees, [x.axes for x in outputs])


def backward(q: Named, k: Named, v: Named, spec, saved, outputs, *, config, precision):
    """Gradients of q, k and v from `saved`: o, lse, do and dlse."""
    del config
    plan = _Plan.of([q, k, v, *jax.tree.leaves(spec), *saved])
    ranges = plan.ranges(spec, "i")
    dtype = saved[1].dtype

    def head(q, k, v, spec, saved):
        q, k, v = (_without_padding(x, spec) for x in (q, k, v))
        o, lse, do, dlse = (_without_padding(x, spec) for x in saved)
        delta = flash2.delta(o, lse, do, dlse)
        lse = flash2.lse_log2(lse)

        def key_block(dq, j):
            kv_start = j * plan.block_kv
            k_block, v_block = (
                lax.dynamic_slice_in_dim(x, kv_start, plan.block_kv) for x in (k, v)
            )

            def visit(masked, i, state):
                dq, dk, dv = state
                start = i * plan.block_q
                q_block, do_block, lse_block, delta_block, dq_block = (
                    lax.dynamic_slice_in_dim(x, start, plan.block_q)
                    for x in (q, do, lse, delta, dq)
                )
                qk = flash2.dot(q_block, k_block, "nt", precision)
                x, unit = _scores(plan, spec, qk, masked, start, kv_start)
                p = flash2.probabilities(x, unit, lse_block[:, None])
                dv = dv + flash2.dot(p.astype(do.dtype), do_block, "tn", precision)
                dp = flash2.dot(do_block, v_block, "nt", precision)
                ds = flash2.score_gradient(p, dp, delta_block[:, None])
                dqk = spec.score.gradient(ds).astype(q.dtype)
                dk = dk + flash2.dot(dqk, q_block, "tn", precision)
                dq_block = dq_block + flash2.dot(dqk, k_block, "nn", precision)
                dq = lax.dynamic_update_slice_in_dim(dq, dq_block, start, 0)
                return dq, dk, dv

            zeros = (jnp.zeros(x.shape, dtype) for x in (k_block, v_block))
            dq, dk, dv = _at(ranges, j).fold(visit, (dq, *zeros))
            return dq, (dk, dv)

        blocks = jnp.arange(plan.num_kv, dtype=jnp.int32)
        dq, (dk, dv) = lax.scan(key_block, jnp.zeros(q.shape, dtype), blocks)
        unit = spec.score.gradient_unit
        dk, dv = (x.reshape(-1, x.shape[-1])[: plan.size["s"]] for x in (dk, dv))
        return (dq * unit)[: plan.size["t"]], dk * unit, dv

    trees = plan.padded((q, k, v, spec, saved))
    # A key/value head's gradient is the sum over its group of query heads.
    group = ("g",) if plan.heads.names else ()
    dq, dk, dv = outputs
    axes = [dq.axes, (*group, *dk.axes), (*group, *dv.axes)]
    gradients = plan.map_heads(head, trees, axes)
    if group:
        gradients[1:] = [jnp.sum(x, axis=0) for x in gradients[1:]]
    return [x.astype(out.dtype) for x, out in zip(gradients, outputs, strict=True)]
