"""Backend "xla": FlashAttention-2's loops in plain JAX, on any platform.

The same recurrences and block ranges as the kernels, over one head at a time, which
`vmap_named` maps over heads and batch. Memory is linear in T and S, forward and
backward. Loop bounds are those that every head and batch entry needs together, so that
mapped loops stay loops.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core import flash2
from pallas_kernels.core.axes import (
    Axes,
    Heads,
    Named,
    batch_axes,
    operand_sum,
    sizes,
    summed_to,
    vmap_named,
)
from pallas_kernels.core.dropout import GROUP
from pallas_kernels.core.mask import Range, everything
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.spec import AttentionSpec, sink_gradient

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
    return -(-rows // (GROUP * blocks)) * GROUP


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
    def group_size(self) -> dict[str, int]:
        """Sizes with the query heads as (`k`, `g`)."""
        return {**self.size, "g": self.heads.group}

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
        t, s = self.size["t"], self.size["s"]
        spec = spec.with_table(along, self.block_q, self.block_kv, t, s)
        axes = (*self.batch, "n", "i" if along == "j" else "j")
        spec = jax.tree.map(lambda leaf: leaf.to(axes), spec.for_ranges())
        if along == "j":
            lo = jnp.arange(self.num_q, dtype=jnp.int32) * self.block_q
            hi = jnp.minimum(lo + self.block_q, t)
            rows = spec.kv_blocks(lo, hi, s, self.block_kv)
        else:
            lo = jnp.arange(self.num_kv, dtype=jnp.int32) * self.block_kv
            hi = jnp.minimum(lo + self.block_kv, s)
            rows = spec.q_blocks(lo, hi, t, self.block_q)

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


def _without_padding(
    x: Named, spec: AttentionSpec, size: int | None = None, padding: float = 0
) -> jax.Array:
    """Rows beyond the lengths as zeros: no NaN there may meet a product.

    Args:
      size: rows from it on are padding too; None if those are zeros already.
      padding: what the rows become.
    """
    name = x.axes[0]
    count = x.shape[0]
    size = count if size is None else size
    spec = jax.tree.map(lambda leaf: leaf.value, spec)
    limit = spec.q_limit(size) if name == "t" else spec.kv_limit(size)
    if isinstance(limit, int) and limit == count:
        return x.value
    exists = jnp.arange(count, dtype=jnp.int32) < limit
    exists = exists.reshape(-1, *[1] * (len(x.shape) - 1))
    return jnp.where(exists, x.value, jnp.full_like(x.value, padding))


@dataclasses.dataclass(frozen=True)
class _Head:
    """One head: rows [T or S, ..], its spec, and how they are cut in blocks."""

    plan: _Plan
    spec: AttentionSpec
    precision: Any

    def pairs(self, masked: bool, i, j, *, ends: bool = False) -> Pairs:
        """Query block i against key block j.

        Args:
          ends: mask the keys beyond the array also where a block of queries keeps every
            key there is: for sums over keys, which a gradient of keys is not.
        """
        plan, spec = self.plan, self.spec
        rows = {
            "t": (i * plan.block_q, plan.block_q),
            "s": (j * plan.block_kv, plan.block_kv),
        }
        if not masked:
            spec = spec.only_positions()
        spec = spec_block(spec, ("t", "s"), **rows)
        if (masked or ends) and plan.size["s"] % plan.block_kv:
            spec, masked = spec.with_end(plan.size["s"]), True
        return Pairs(spec, rows, masked=masked, precision=self.precision)

    def query_rows(self, i, *arrays):
        return self._rows(i, self.plan.block_q, arrays)

    def key_rows(self, j, *arrays):
        return self._rows(j, self.plan.block_kv, arrays)

    @staticmethod
    def _rows(block, size: int, arrays):
        return [lax.dynamic_slice_in_dim(x, block * size, size) for x in arrays]


def forward(q: Named, k: Named, v: Named, spec, outputs, *, config, precision):
    """Output and log-sum-exp, with the dtypes and axes of `outputs`."""
    del config
    plan = _Plan.of([q, k, v, *jax.tree.leaves(spec)])
    ranges = plan.ranges(spec, "j")
    dtype = outputs[1].dtype

    def of_head(q, k, v, spec):
        q, k, v = (_without_padding(x, spec) for x in (q, k, v))
        head = _Head(plan, spec, precision)

        def query_block(i):
            (q_block,) = head.query_rows(i, q)

            def visit(masked, j, state):
                k_block, v_block = head.key_rows(j, k, v)
                pairs = head.pairs(masked, i, j)
                scores = pairs.scores(q_block, k_block)

                def product(p):
                    p = pairs.drop(p).astype(v.dtype)
                    return flash2.dot(p, v_block, "nn", precision)

                return flash2.step(state, scores, product)

            state = flash2.init(plan.block_q, v.shape[1], dtype=dtype)
            state = _at(ranges, i).fold(visit, state)
            sink = None if spec.sink is None else spec.sink.value
            o, lse = flash2.finish(state, sink)
            return (o * spec.dropout_scale).astype(v.dtype), lse

        o, lse = lax.map(query_block, jnp.arange(plan.num_q, dtype=jnp.int32))
        t = plan.size["t"]
        return o.reshape(-1, v.shape[1])[:t], lse.reshape(-1)[:t]

    trees = plan.padded((q, k, v, spec))
    return plan.map_heads(of_head, trees, [x.axes for x in outputs])


def _saved_rows(plan: _Plan, saved, spec):
    """do, lse in units of log2, and delta of one head, from o, lse, do and dlse."""
    o, lse, do, dlse = saved
    lse = _without_padding(lse, spec, plan.size["t"], flash2.PADDING_LSE)
    o, do, dlse = (_without_padding(x, spec) for x in (o, do, dlse))
    return do, flash2.lse_log2(lse), flash2.delta(o, lse, do, dlse)


def backward(q: Named, k: Named, v: Named, spec, saved, outputs, *, config, precision):
    """Gradients of q, k, v and the spec's operands from o, lse, do and dlse."""
    del config
    plan = _Plan.of([q, k, v, *jax.tree.leaves(spec), *saved])
    ranges = plan.ranges(spec, "i")
    dtype = saved[1].dtype

    def of_head(q, k, v, spec, saved):
        q, k, v = (_without_padding(x, spec) for x in (q, k, v))
        do, lse, delta = _saved_rows(plan, saved, spec)
        head = _Head(plan, spec, precision)

        def key_block(dq, j):
            k_block, v_block = head.key_rows(j, k, v)

            def visit(masked, i, state):
                dq, dk, dv = state
                q_block, do_block, dq_block = head.query_rows(i, q, do, dq)
                lse_block, delta_block = head.query_rows(
                    i, lse[:, None], delta[:, None]
                )
                pairs = head.pairs(masked, i, j)
                scores = pairs.scores(q_block, k_block)
                p = flash2.probabilities(scores, lse_block)
                dropped = pairs.drop(p).astype(do.dtype)
                dv = dv + flash2.dot(dropped, do_block, "tn", precision)
                dp = pairs.product(do_block, v_block)
                dz = pairs.score_gradient(p, scores, dp, delta_block)
                dz = dz.astype(q.dtype)
                dk = dk + flash2.dot(dz, q_block, "tn", precision)
                dq_block = dq_block + flash2.dot(dz, k_block, "nn", precision)
                dq = lax.dynamic_update_slice_in_dim(dq, dq_block, i * plan.block_q, 0)
                return dq, dk, dv

            zeros = (jnp.zeros(x.shape, dtype) for x in (k_block, v_block))
            dq, dk, dv = _at(ranges, j).fold(visit, (dq, *zeros))
            return dq, (dk, dv)

        blocks = jnp.arange(plan.num_kv, dtype=jnp.int32)
        dq, (dk, dv) = lax.scan(key_block, jnp.zeros(q.shape, dtype), blocks)
        unit = spec.gradient_unit
        t, s = plan.size["t"], plan.size["s"]
        dk, dv = (x.reshape(-1, x.shape[-1])[:s] for x in (dk, dv))
        return (dq * unit)[:t], dk * unit, dv * spec.dropout_scale, delta[:t]

    trees = plan.padded((q, k, v, spec, saved))
    # A key/value head's gradient is the sum over its group of query heads.
    group = ("g",) if plan.heads.names else ()
    dq, dk, dv, *of_operands = outputs
    delta_axes = (*plan.batch, *(["n"] if plan.heads.names else []), "t")
    axes = [dq.axes, (*group, *dk.axes), (*group, *dv.axes), delta_axes]
    *gradients, delta = plan.map_heads(of_head, trees, axes)
    if group:
        gradients[1:] = [jnp.sum(x, axis=0) for x in gradients[1:]]
    structs = iter(of_operands)
    for name in spec.score.operands:
        gradient = _operand_gradient(plan, ranges, trees, name, precision)
        gradients.append(summed_to(gradient, next(structs).axes))
    if spec.sink is not None:
        rows = sink_gradient(spec.sink, saved[1], Named(delta, delta_axes))
        gradients.append(summed_to(rows, next(structs).axes))
    return [x.astype(out.dtype) for x, out in zip(gradients, outputs, strict=True)]


def _operand_gradient(plan: _Plan, ranges: Range, trees, name: str, precision) -> Named:
    """The gradient of a field of the score, summed over what makes it small."""
    trees = jax.tree.map(plan.heads.split, trees)
    field = trees[3].score.operands[name].squeezed()
    batch = (*plan.batch, *plan.heads.names)
    own, looped = operand_sum(field, batch)
    mapped = tuple(a for a in batch if a not in looped)
    block = {"t": plan.block_q, "s": plan.block_kv}
    shape = {"t": plan.num_q * plan.block_q, "s": plan.num_kv * plan.block_kv}
    count = math.prod(plan.group_size[a] for a in looped)

    def add_head(total, q, k, v, spec, saved):
        q, k, v = (_without_padding(x, spec) for x in (q, k, v))
        do, lse, delta = _saved_rows(plan, saved, spec)
        head = _Head(plan, spec, precision)

        def key_block(total, j):
            k_block, v_block = head.key_rows(j, k, v)

            def visit(masked, i, total):
                rows = (q, do, lse[:, None], delta[:, None])
                q_block, do_block, lse_block, delta_block = head.query_rows(i, *rows)
                pairs = head.pairs(masked, i, j, ends=True)
                scores = pairs.scores(q_block, k_block)
                p = flash2.probabilities(scores, lse_block)
                dp = pairs.product(do_block, v_block)
                dz = pairs.score_gradient(p, scores, dp, delta_block)
                more = pairs.operand_gradient(name, dz, own)
                at = {"t": i * plan.block_q, "s": j * plan.block_kv}
                starts = [at[a] for a in own]
                old = lax.dynamic_slice(total, starts, [block[a] for a in own])
                return lax.dynamic_update_slice(total, old + more, starts)

            return _at(ranges, j).fold(visit, total), None

        blocks = jnp.arange(plan.num_kv, dtype=jnp.int32)
        return lax.scan(key_block, total, blocks)[0]

    def over_loop(*trees):
        def element(total, index):
            places: dict[str, Any] = {}
            for axis in reversed(looped):
                places[axis] = index % plan.group_size[axis]
                index = index // plan.group_size[axis]
            chosen = jax.tree.map(functools.partial(_chosen, places=places), trees)
            return add_head(total, *chosen), None

        dtype = trees[4][1].dtype
        zeros = jnp.zeros([shape[a] for a in own], dtype)
        total, _ = lax.scan(element, zeros, jnp.arange(count, dtype=jnp.int32))
        total = total[tuple(slice(plan.size[a]) for a in own)]
        return (total * trees[3].dropout_scale,)

    axes = (*mapped, *own)
    (result,) = vmap_named(over_loop, mapped, [axes])(*trees)
    if plan.heads.names and plan.heads.names[1] not in looped:
        at = axes.index("g")
        result = result.reshape(*result.shape[: at - 1], -1, *result.shape[at + 1 :])
        axes = (*axes[: at - 1], "n", *axes[at + 1 :])
    return Named(result, axes)


def _chosen(x: Named, places: dict[str, Any]) -> Named:
    """The element of `x` at `places`."""
    value, axes = x.value, list(x.axes)
    for name, place in places.items():
        if name in axes:
            value = lax.dynamic_index_in_dim(value, place, axes.index(name), False)
            axes.remove(name)
    return Named(value, tuple(axes))
