"""Backend "xla": FlashAttention-2's loops in plain JAX, on any platform.

The recurrences and block ranges of the kernels, over all heads and batch entries at
once. Memory is linear in T and S, forward and backward. A loop visits the blocks that
any head or batch entry needs; a call of one block has no loop. Masks are evaluated in
every block: beside the exponents that costs little, and a second loop without them
would double a program and the time to compile it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import device
from pallas_kernels.configs import Blocks
from pallas_kernels.core import flash2
from pallas_kernels.core.axes import (
    Axes,
    Heads,
    Named,
    batch_axes,
    contract,
    sizes,
    summed_to,
)
from pallas_kernels.core.dropout import GROUP
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.spec import AttentionSpec, sink_gradient

# Most query rows and most pairs of a block. On 2 CPU cores, float32, B 1, N 4, H 64,
# T 1024 and 4096, blocks of 128 to 512 rows were within 15 % of each other (JAX 0.10.2,
# 2026-11-21). Few queries have as many pairs with more keys.
_QUERIES = 256
_PAIRS = _QUERIES**2

Names = tuple[str, ...]


def unsupported(**facts) -> str | None:
    """None: this backend serves every call."""
    del facts
    return None


def _block(rows: int, most: int) -> int:
    """Rows of a block: as few equal blocks of at most `most` rows as hold them all."""
    blocks = -(-rows // most)
    return rows if blocks == 1 else -(-rows // (GROUP * blocks)) * GROUP


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a call is cut.

    Attributes:
      size: of every named axis, with the query heads `n` as (`k`, `g`).
      block: rows of a block of `t` and of `s`.
      heads: how query heads are split.
      batch: names of the batch axes.
      precision: of products of float32 operands.
    """

    size: dict[str, int]
    block: dict[str, int]
    heads: Heads
    batch: tuple[str, ...]
    precision: Any

    @classmethod
    def of(cls, operands, blocks: Blocks | None, precision) -> _Plan:
        size = sizes(operands)
        heads = Heads.of(size)
        queries = _block(size["t"], blocks.block_q if blocks else _QUERIES)
        most = blocks.block_kv if blocks else max(_QUERIES, _PAIRS // queries)
        block = {"t": queries, "s": _block(size["s"], most)}
        size = {**size, "g": heads.group}
        return cls(size, block, heads, batch_axes(operands), precision)

    def count(self, name: str) -> int:
        """Number of blocks of `t` or `s`."""
        return -(-self.size[name] // self.block[name])

    def axes(self, *names: str) -> Names:
        """All axes of batch and heads, and then these."""
        return (*self.batch, *self.heads.names, *names)

    def key_axes(self, *names: str) -> Names:
        """All axes of batch and key/value heads, and then these."""
        return (*self.batch, *self.heads.names[:1], *names)

    def _extended(self, x: Named, padding: float = 0.0) -> Named:
        """Its rows extended to whole blocks."""
        width = [
            (0, self.count(a) * self.block[a] - n if a in ("t", "s") else 0)
            for a, n in zip(x.axes, x.shape, strict=True)
        ]
        if not any(map(sum, width)):
            return x
        return Named(jnp.pad(x.value, width, constant_values=padding), x.axes)

    def scalars(self, spec: AttentionSpec, axes: Axes) -> AttentionSpec:
        """The spec, of which what a batch entry has one of are arrays with `axes`."""
        return jax.tree.map(
            lambda x: x.to(axes) if set(x.squeezed().axes) <= set(self.batch) else x,
            spec,
        )

    def rows(self, x: Named, spec: AttentionSpec, padding: float = 0.0) -> Named:
        """An operand of rows `t` or `s`: batch and heads first, in whole blocks.

        Rows beyond the lengths become `padding`: no NaN there may meet a product.
        """
        x = self.heads.split(x).squeezed()
        row, *head = (a for a in ("t", "s", "h", "d") if a in x.axes)
        x = x.ordered((*(a for a in self.axes() if a in x.axes), row, *head))
        size = self.size[row]
        scalars = self.scalars(spec, self.axes())
        limit = scalars.q_limit(size) if row == "t" else scalars.kv_limit(size)
        x = self._extended(x, padding)
        if isinstance(limit, int):
            return x
        limit = Named.broadcast(limit, self.axes())
        numbers = Named(jnp.arange(x.shape[x.axes.index(row)], dtype=jnp.int32), (row,))
        axes = (*(a for a in self.axes() if a in (*limit.axes, *x.axes)), row, *head)
        exists = numbers.to(axes) < limit.to(axes)
        return Named(jnp.where(exists, x.to(axes), jnp.asarray(padding, x.dtype)), axes)

    def fields(self, spec: AttentionSpec) -> AttentionSpec:
        """The spec with heads split, and with rows in whole blocks."""
        return jax.tree.map(lambda x: self._extended(self.heads.split(x)), spec)

    def at(self, x: Named, **places) -> Named:
        """The blocks of `t` and `s` at these numbers."""
        value = x.value
        for axis, name in enumerate(x.axes):
            if name in places and self.count(name) > 1:
                start = places[name] * self.block[name]
                value = lax.dynamic_slice_in_dim(value, start, self.block[name], axis)
        return Named(value, x.axes)

    def add(self, total: Named, x: jax.Array, **places) -> jax.Array:
        """`total` with x added to the blocks at these numbers."""
        old = self.at(total, **places).value
        starts = [
            jnp.int32(places[a] * self.block[a] if a in places else 0)
            for a in map(str, total.axes)
        ]
        if not any(a in places and self.count(str(a)) > 1 for a in total.axes):
            return old + x
        return lax.dynamic_update_slice(total.value, old + x, starts)

    def pairs(self, fields: AttentionSpec, i, j) -> Pairs:
        """Query block i against key block j."""
        axes = self.axes("t", "s")
        spec = jax.tree.map(lambda x: self.at(x, t=i, s=j).to(axes), fields)
        if self.size["s"] % self.block["s"]:
            spec = spec.with_end(self.size["s"])
        rows = {
            name: (place * self.block[name], self.block[name])
            for name, place in (("t", i), ("s", j))
        }
        return Pairs(spec, rows, precision=self.precision)

    def product(self, a: Named, b: Named, axes: Axes) -> jax.Array:
        if device.platform() == "cpu":
            # XLA for CPUs refuses some products of bfloat16 (JAX 0.10.2 to 0.12.0.1:
            # "Unsupported element type for DotThunk").
            a, b = (
                Named(x.value.astype(jnp.promote_types(x.dtype, jnp.float32)), x.axes)
                for x in (a, b)
            )
        return contract(a, b, axes, self.precision)

    def named(self, pairs: jax.Array) -> Named:
        """A block of pairs; an axis of size 1 is one that no operand is mapped over."""
        *lead, t, s = self.axes("t", "s")
        axes = zip(lead, pairs.shape, strict=False)
        return Named(
            pairs, (*(None if n == 1 else a for a, n in axes), t, s)
        ).squeezed()

    def loop(self, along: str, spec: AttentionSpec) -> Callable:
        """The loop over the blocks of `along` that a block of the other axis needs.

        Returns:
          A function of that block's number, of `state = visit(number, state)` and of
          the first state; it returns the last.
        """
        if self.count(along) == 1:
            return lambda block, visit, state: visit(0, state)
        t, s = self.size["t"], self.size["s"]
        over, own, other = ("j", "i", "t") if along == "s" else ("i", "j", "s")
        spec = spec.with_table(over, self.block["t"], self.block["s"], t, s)
        axes = (*self.batch, "n", own)
        spec = jax.tree.map(lambda leaf: leaf.to(axes), spec.for_ranges())
        lo = jnp.arange(self.count(other), dtype=jnp.int32) * self.block[other]
        hi = jnp.minimum(lo + self.block[other], self.size[other])
        blocks = spec.kv_blocks if along == "s" else spec.q_blocks
        needed = blocks(lo, hi, self.size[along], self.block[along])

        def bound(x, reduce):
            """Over all of the batch."""
            if isinstance(x, int):
                return lambda block: np.int32(x)
            x = reduce(x, axis=tuple(range(x.ndim - 1)))
            x = jnp.broadcast_to(x, lo.shape)
            return lambda block: x[block]

        first, end = bound(needed.need_lo, jnp.min), bound(needed.need_hi, jnp.max)

        def run(block, visit, state):
            def body(i, state):
                # Of static bounds `fori_loop` makes an int64 under x64.
                return visit(jnp.int32(i), state)

            return lax.fori_loop(first(block), end(block), body, state)

        return run

    def result(self, x: jax.Array, axes: Axes, out: Named) -> jax.Array:
        """`x` without padding, with the axes and dtype of `out`, summed over others."""
        for axis, name in enumerate(axes):
            if name in ("t", "s") and x.shape[axis] != self.size[name]:
                x = lax.slice_in_dim(x, 0, self.size[name], axis=axis)
        named = self.heads.merge(Named(x, axes))
        return summed_to(named, out.axes).astype(out.dtype)


def _joined(blocks: jax.Array, row: int) -> jax.Array:
    """Blocks [blocks, ..., rows, ...] as one array whose rows are axis `row`."""
    x = jnp.moveaxis(blocks, 0, row)
    return x.reshape(*x.shape[:row], -1, *x.shape[row + 2 :])


def forward(q: Named, k: Named, v: Named, spec, outputs, *, config, precision):
    """Output and log-sum-exp, with the dtypes and axes of `outputs`."""
    blocks = None if config is None else config.forward
    plan = _Plan.of([q, k, v, *jax.tree.leaves(spec)], blocks, precision)
    loop = plan.loop("s", spec)
    q, k, v = (plan.rows(x, spec) for x in (q, k, v))
    fields = plan.fields(spec)
    rows, columns, pair_axes = (plan.axes(*x) for x in ("t", ("t", "d"), ("t", "s")))
    sink = None if spec.sink is None else plan.heads.split(spec.sink).to(rows)
    shape = [plan.block.get(a, plan.size[a]) for a in rows]
    nothing = flash2.init(shape, plan.size["d"], dtype=outputs[1].dtype)

    def query_block(i):
        q_block = plan.at(q, t=i)

        def visit(j, state):
            k_block, v_block = (plan.at(x, s=j) for x in (k, v))
            pairs = plan.pairs(fields, i, j)
            qk = plan.product(q_block, k_block, pair_axes)

            def product(p):
                p = plan.named(pairs.drop(p).astype(v.dtype))
                return plan.product(p, v_block, columns)

            return flash2.step(state, pairs.scores_of(qk, q.dtype), product)

        o, lse = flash2.finish(loop(i, visit, nothing), sink)
        return (o * spec.dropout_scale).astype(v.dtype), lse

    if plan.count("t") == 1:
        o, lse = query_block(0)
    else:
        numbers = jnp.arange(plan.count("t"), dtype=jnp.int32)
        o, lse = (_joined(x, len(rows) - 1) for x in lax.map(query_block, numbers))
    return list(map(plan.result, (o, lse), (columns, rows), outputs))


def backward(q: Named, k: Named, v: Named, spec, saved, outputs, *, config, precision):
    """Gradients of q, k, v and the spec's operands from o, lse, do and dlse."""
    blocks = None if config is None else config.dkv
    plan = _Plan.of([q, k, v, *jax.tree.leaves(spec), *saved], blocks, precision)
    loop = plan.loop("t", spec)
    q, k, v, o, do, dlse = (
        plan.rows(x, spec) for x in (q, k, v, saved[0], saved[2], saved[3])
    )
    lse = plan.rows(saved[1], spec, flash2.PADDING_LSE)
    fields = plan.fields(spec)
    rows, columns, pair_axes = (plan.axes(*x) for x in ("t", ("t", "d"), ("t", "s")))
    delta = flash2.delta(o.to(columns), lse.to(rows), do.to(columns), dlse.to(rows))
    delta = Named(delta, rows)
    lse_log2 = Named(flash2.lse_log2(lse.to(rows)), rows)
    # The axes of each gradient.
    q_axes = plan.axes("t", "h")
    kv_axes = {"dk": plan.key_axes("s", "h"), "dv": plan.key_axes("s", "d")}
    of_operands: dict[str, Names] = {
        name: tuple(a for a in plan.heads.split_axes(out.axes) if a is not None)
        for name, out in zip(spec.score.operands, outputs[3:], strict=False)
    }

    def zeros(axes: Names, row_count: Callable) -> jax.Array:
        shape = [row_count(a) if a in ("t", "s") else plan.size[a] for a in axes]
        return jnp.zeros(shape, lse.dtype)

    def key_block(sums, j):
        k_block, v_block = (plan.at(x, s=j) for x in (k, v))

        def visit(i, state):
            sums, of_keys = map(dict, state)
            q_block, do_block = (plan.at(x, t=i) for x in (q, do))
            lse_block, delta_block = (
                plan.at(x, t=i).value[..., None] for x in (lse_log2, delta)
            )
            pairs = plan.pairs(fields, i, j)
            qk = plan.product(q_block, k_block, pair_axes)
            scores = pairs.scores_of(qk, q.dtype)
            p = flash2.probabilities(scores, lse_block)
            dropped = plan.named(pairs.drop(p).astype(do.dtype))
            of_keys["dv"] += plan.product(dropped, do_block, kv_axes["dv"])
            dp = plan.product(do_block, v_block, pair_axes)
            dz = pairs.score_gradient(p, scores, dp, delta_block)
            for name, axes in of_operands.items():
                more = plan.named(pairs.operand_gradient(name, dz, qk))
                total = Named(sums[name], axes)
                sums[name] = plan.add(total, summed_to(more, axes), t=i, s=j)
            dz = plan.named(dz.astype(q.dtype))
            of_keys["dk"] += plan.product(dz, q_block, kv_axes["dk"])
            more = plan.product(dz, k_block, q_axes)
            sums["dq"] = plan.add(Named(sums["dq"], q_axes), more, t=i)
            return sums, of_keys

        nothing = {n: zeros(axes, plan.block.get) for n, axes in kv_axes.items()}
        return loop(j, visit, (sums, nothing))

    sums = {
        name: zeros(axes, lambda a: plan.count(a) * plan.block[a])
        for name, axes in {"dq": q_axes, **of_operands}.items()
    }
    if plan.count("s") == 1:
        sums, of_keys = key_block(sums, 0)
    else:
        blocks = jnp.arange(plan.count("s"), dtype=jnp.int32)
        sums, of_keys = lax.scan(key_block, sums, blocks)
        of_keys = {n: _joined(x, len(kv_axes[n]) - 2) for n, x in of_keys.items()}

    def unit(axes: Names):
        return plan.scalars(spec, axes).gradient_unit

    found = [
        (sums["dq"] * unit(q_axes), q_axes),
        (of_keys["dk"] * unit(kv_axes["dk"]), kv_axes["dk"]),
        (of_keys["dv"] * spec.dropout_scale, kv_axes["dv"]),
        *((sums[n] * spec.dropout_scale, axes) for n, axes in of_operands.items()),
    ]
    if spec.sink is not None:
        sink = sink_gradient(
            plan.heads.split(spec.sink), Named(lse.to(rows), rows), delta
        )
        found.append((sink.value, sink.axes))
    return [
        plan.result(x, axes, out) for (x, axes), out in zip(found, outputs, strict=True)
    ]
