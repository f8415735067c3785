"""Backend "xla": FlashAttention-2's loops in plain JAX, on any platform.

The recurrences and block ranges of the kernels, over all heads and batch entries at
once. Memory is linear in T and S, forward and backward. One loop visits the pairs of
blocks that any head or batch entry needs, and adds to whole arrays; a call of one block
has no loop. Masks are evaluated in every block: beside the exponents that costs little,
and a second loop without them would double a program and the time to compile it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash2._loops import COUNTED, PairLoop, Starts, as_matrices
from pallas_kernels import device
from pallas_kernels.backend import Call, Declined, Pass, Plan
from pallas_kernels.configs import Blocks
from pallas_kernels.core import clear, flash2, gather
from pallas_kernels.core.axes import (
    Axes,
    Heads,
    Named,
    batch_axes,
    contract,
    sizes,
    summed_to,
)
from pallas_kernels.core.dropout import BLOCK
from pallas_kernels.core.pairs import Pairs, Recomputed
from pallas_kernels.core.pointwise import tables
from pallas_kernels.core.promotion import at_least_float32
from pallas_kernels.core.scores.score import Pulled
from pallas_kernels.core.spec import AttentionSpec, sink_gradient

# Most query rows of a block on CPUs, and most pairs (benchmarks/lab/033).
_ROWS = 256
_PAIRS = _ROWS**2
# Of all heads and batch entries elsewhere, where products of large matrices are fast,
# for each element of a head (benchmarks/lab/065): some 2 MiB in a backward pass.
_PAIRS_OF_GPUS = 2**17
# Rows of a block of an invariant call, whatever its sizes.
_INVARIANT = {"t": 16, "s": 256}

Names = tuple[str, ...]


def plan(call: Call, pass_: Pass, /) -> Plan | Declined:
    """This backend makes every pass of every call, by XLA's own kernels.

    But one: where XLA chooses kernels by the number of matrices, no bits are promised.
    """
    if not call.is_invariant or pass_ != "forward":
        return Plan()
    if not _on_cpu():
        return Declined(
            "Config(invariant=True): XLA chooses kernels of products by all sizes of a "
            f"call on {device.target()!r}"
        )
    if call.config is not None and call.config.forward is not None:
        return Declined(
            "Config(invariant=True, forward=...): only with blocks of its own does XLA "
            "make the same products of all calls"
        )
    return Plan()


def _block(rows: int, most: int) -> int:
    """Rows of a block: as few equal blocks of at most `most` rows as hold them all."""
    blocks = -(-rows // most)
    return rows if blocks == 1 else -(-rows // (BLOCK * blocks)) * BLOCK


def _on_cpu() -> bool:
    return device.target() == "cpu"


def _pairs(elements: list[int], head_size: int) -> int:
    """Most pairs of a block, for axes of batch and heads of such sizes."""
    if _on_cpu() or not all(isinstance(n, int) for n in elements):
        return _PAIRS
    return max(_PAIRS, _PAIRS_OF_GPUS * head_size // max(1, math.prod(elements)))


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How a call is cut.

    Attributes:
      size: of every named axis, with the query heads `n` as (`k`, `g`).
      block: rows of a block of `t` and of `s`.
      heads: how query heads are split.
      batch: names of the batch axes.
      precision: of products of float32 operands.
      fuses_softmax: whether XLA makes one kernel of a softmax, as it does on GPUs, and
        a block is one: all keys of its rows, none masked.
      invariant: whether blocks have the rows of `_INVARIANT`, in a loop, even if the
        call has fewer: XLA then makes the same products of them.
    """

    size: dict[str, int]
    block: dict[str, int]
    heads: Heads
    batch: tuple[str, ...]
    precision: Any
    fuses_softmax: bool = False
    invariant: bool = False

    @classmethod
    def of(
        cls, operands, spec, blocks: Blocks | None, precision, *, invariant=False
    ) -> _Cut:
        operands = [*operands, *jax.tree.leaves(spec)]
        unmasked = not spec.masks and not spec.score.may_mask and spec.sink is None
        size = sizes(operands)
        heads = Heads.of(size)
        if invariant:
            most = dict(_INVARIANT)
        elif blocks is not None:
            most = {"t": blocks.block_q, "s": blocks.block_kv}
        else:
            elements = [size[a] for a in (*batch_axes(operands), "n") if a in size]
            pairs = _pairs(elements, max(size["h"], size["d"]))
            rows = math.isqrt(pairs)
            if unmasked and _ROWS * size["s"] <= pairs:
                rows = pairs // size["s"]
            most = {"t": rows, "s": max(rows, pairs // _block(size["t"], rows))}
        if spec.pages is not None:
            most["s"] = min(most["s"], gather.MOST_ROWS)
        block = {name: _block(size[name], most[name]) for name in ("t", "s")}
        size = {**size, "g": heads.group}
        batch = batch_axes(operands)
        if invariant:
            return cls(size, most, heads, batch, precision, invariant=True)
        cut = cls(size, block, heads, batch, precision)
        fused = unmasked and cut.count("s") == 1 and not _on_cpu()
        return dataclasses.replace(cut, fuses_softmax=fused)

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

    def rows(
        self,
        x: Named,
        spec: AttentionSpec,
        padding: float = 0.0,
        *,
        rows_last: bool = False,
    ) -> Named:
        """An operand of rows `t` or `s`: batch and heads first, in whole blocks.

        Rows beyond the lengths become `padding`: no NaN there may meet a product.
        """
        if isinstance(x, gather.Gathered):
            return x
        # XLA makes the fewest copies where heads are split after the change of order in
        # a loop, and before it where one block has all.
        is_loop = self.count("t") * self.count("s") > 1 or self.invariant
        x = (x if is_loop else self.heads.split(x)).squeezed()
        row, *head = (a for a in ("t", "s", "h", "d") if a in x.axes)
        own = (*head, row) if rows_last else (row, *head)
        lead = (a for a in (*self.batch, "n", "k", "g") if a in x.axes)
        x = self.heads.split(x.ordered((*lead, *own)))
        size = self.size[row]
        scalars = self.scalars(spec, self.axes())
        limit = scalars.q_limit(size) if row == "t" else scalars.kv_limit(size)
        x = self._extended(x, padding)
        if isinstance(limit, int):
            return x
        limit = Named.broadcast(limit, self.axes())
        numbers = Named(jnp.arange(x.shape[x.axes.index(row)], dtype=jnp.int32), (row,))
        axes = (*(a for a in self.axes() if a in (*limit.axes, *x.axes)), *own)
        exists = numbers.to(axes) < limit.to(axes)
        return Named(jnp.where(exists, x.to(axes), jnp.asarray(padding, x.dtype)), axes)

    def fields(self, spec: AttentionSpec) -> AttentionSpec:
        """The spec with heads split, and with rows in whole blocks."""
        spec = spec.without_lists()
        return jax.tree.map(lambda x: self._extended(self.heads.split(x)), spec)

    def at(self, x: Named | gather.Gathered, starts: Starts) -> Named:
        """The block of it that starts there."""
        if isinstance(x, gather.Gathered):
            return x.rows(starts["s"], self.block["s"])
        value = x.value
        for axis, name in enumerate(map(str, x.axes)):
            if name in starts and self.count(name) > 1:
                start, size = starts[name], self.block[name]
                value = lax.dynamic_slice_in_dim(value, start, size, axis, **COUNTED)
        return Named(value, x.axes)

    def put(self, whole: Named, x: Any, starts: Starts) -> jax.Array:
        """`whole` with x in place of the block that starts there."""
        names = list(map(str, whole.axes))
        if not any(a in starts and self.count(a) > 1 for a in names):
            return x
        first = [starts.get(a, np.int32(0)) for a in names]
        return lax.dynamic_update_slice(whole.value, x, first, **COUNTED)

    def zeros(self, axes: Names, dtype) -> jax.Array:
        """An array of whole blocks."""
        rows = {name: self.count(name) * self.block[name] for name in ("t", "s")}
        return jnp.zeros([{**self.size, **rows}[a] for a in axes], dtype)

    def pairs(self, fields: AttentionSpec, starts: Starts) -> Pairs:
        """The block of pairs that starts there."""
        axes = self.axes("t", "s")
        spec = jax.tree.map(lambda x: self.at(x, starts).to(axes), fields)
        if self.invariant:
            # XLA rounds a product with a sum or before it, by what it makes one loop.
            spec = lax.optimization_barrier(spec)
        if self.size["s"] % self.block["s"]:
            spec = spec.with_end(self.size["s"])
        rows = {name: (start, self.block[name]) for name, start in starts.items()}
        return Pairs(spec, rows, precision=self.precision)

    def product(self, a: Named, b: Named, axes: Axes) -> jax.Array:
        if _on_cpu():
            # Of bfloat16: "Unsupported element type for DotThunk" (JAX 0.12.0.1).
            a, b = (
                Named(x.value.astype(at_least_float32(x.dtype)), x.axes) for x in (a, b)
            )
        if self.invariant:
            names = [name for name in self.key_axes() if name in (*a.axes, *b.axes)]
            a, b = (as_matrices(x, names, self.size) for x in (a, b))
        return contract(a, b, axes, self.precision)

    def named(self, pairs: jax.Array) -> Named:
        """A block of pairs; an axis of size 1 is one that no operand is mapped over."""
        *lead, t, s = self.axes("t", "s")
        axes = zip(lead, pairs.shape, strict=False)
        return Named(
            pairs, (*(None if n == 1 else a for a, n in axes), t, s)
        ).squeezed()

    def of_operand(self, pulled: Pulled, name: str, qk, axes: Names) -> jax.Array:
        """What a block adds to the gradient of an operand of the score."""
        x, places = pulled.operand(name, qk), pulled.places(name)
        if places is None:
            return summed_to(self.named(x), axes)
        if isinstance(places, tables.Distances):
            # On a device's rows it has the axes of operands; parts have several.
            if places.first is not None and places.first.size == 1:
                first = places.first.reshape(())
                return tables.of_distances(self.named(x), first, axes)
            places = places.numbers()
        pair_axes = self.axes("t", "s")
        where = Named.broadcast(places, pair_axes[len(pair_axes) - places.ndim :])
        return tables.gradient(self.named(x), where, axes)

    def visit_pairs(self, spec: AttentionSpec, visit: Callable, state) -> Any:
        """Runs `state = visit(starts, state)` over the pairs of blocks that are needed.

        In one order: by query block, and for each by key block.
        """
        if self.count("t") == self.count("s") == 1 and not (
            spec.is_part or self.invariant
        ):
            return visit({"t": 0, "s": 0}, state)
        size = {name: self.size[name] for name in self.block}
        loop = PairLoop(size, self.block, self.batch)
        return loop.run(spec, visit, state)

    def result(self, x: jax.Array, axes: Axes, out: Named) -> jax.Array:
        """`x` without padding, with the axes and dtype of `out`, summed over others."""
        for axis, name in enumerate(axes):
            if name in ("t", "s") and x.shape[axis] != self.size[name]:
                x = lax.slice_in_dim(x, 0, self.size[name], axis=axis)
        named = self.heads.merge(Named(x, axes))
        return summed_to(named, out.axes).astype(out.dtype)


def forward(_: Plan, call: Call, outputs):
    """The results of a call (`backend.Backend`)."""
    call = call.widened
    q, k, v, spec = call.query, call.key, call.value, call.spec
    blocks = None if call.config is None else call.config.forward
    cut = _Cut.of([q, k, v], spec, blocks, call.precision, invariant=call.is_invariant)
    # Not the keys: scores of those that are dropped are replaced, whatever they are.
    spec, v = clear.scale_of_values(spec), clear.dropped_keys(spec, v)
    fields, (k, v) = gather.blocks(spec, (k, v), cut.size, q.dtype)
    q, k, v = (cut.rows(x, spec) for x in (q, k, v))
    fields = cut.fields(fields)
    rows, columns, pair_axes = (cut.axes(*x) for x in ("t", ("t", "d"), ("t", "s")))
    result_axes = (columns, rows, rows)[: len(outputs)]
    state_axes = result_axes if cut.fuses_softmax else (rows, rows, columns)

    def visit(starts, state):
        whole = list(map(Named, state, state_axes))
        q_block, *of_keys = (cut.at(x, starts) for x in (q, k, v))
        pairs = cut.pairs(fields, starts)
        k_block, v_block = (
            Named(pairs.widened(x.value, q.dtype), x.axes) for x in of_keys
        )
        qk = cut.product(q_block, k_block, pair_axes)

        def product(p):
            p = cut.named(pairs.left(p).astype(v_block.dtype))
            return cut.product(p, v_block, columns)

        scores = pairs.scores_of(qk, q.dtype)
        if cut.fuses_softmax:
            found = flash2.of_whole_rows(scores, product)[: len(outputs)]
            return tuple(map(cut.put, whole, found, [starts] * len(outputs)))
        old = flash2.State(*(cut.at(x, starts).value for x in whole))
        new = flash2.step(old, scores, product)
        return flash2.State(
            *(cut.put(x, y, starts) for x, y in zip(whole, new[:3], strict=True))
        )

    dtype = outputs[1].dtype
    if cut.fuses_softmax:
        state = tuple(cut.zeros(axes, dtype) for axes in result_axes)
        o, *of_rows = cut.visit_pairs(spec, visit, state)
    else:
        shape = cut.zeros(rows, dtype).shape
        state = flash2.init(shape, cut.size["d"], dtype=dtype)
        sink = None if spec.sink is None else cut.heads.split(spec.sink).to(rows)
        state = cut.visit_pairs(spec, visit, state)
        o, *of_rows = flash2.finish(state, sink)
        of_rows += [state.largest] if spec.gives_largest else []
    found = (cast(jax.Array, o) * spec.dropout_scale, *of_rows)
    return list(map(cut.result, found, result_axes, outputs))


def _delta(o: Named, lse: Named, do: Named, dlse: Named) -> Named:
    """Of all rows (`flash2.delta`)."""
    names = (a for x in (o, do, lse, dlse) for a in x.axes if a not in (None, "d"))
    axes = tuple(dict.fromkeys(names))
    columns = (*axes, "d")
    value = flash2.delta(o.to(columns), lse.to(axes), do.to(columns), dlse.to(axes))
    return Named(value, axes)


def backward(_, call: Call, saved, wanted: Mapping[str, Named]):
    """Gradients (`backend.Backend`)."""
    q, k, v, spec = call.query, call.key, call.value, call.spec
    blocks = None if call.config is None else call.config.dkv
    cut = _Cut.of([q, k, v, *saved], spec, blocks, call.precision)
    rows, pair_axes = (cut.axes(*x) for x in ("t", ("t", "s")))
    o, lse, do, dlse = saved
    q, do = (clear.masked_rows(spec, x, lse, by_entry=False) for x in (q, do))
    # Left operands of products whose sum is over rows: XLA's fast products take no
    # transposed one. In a loop each block is transposed instead, in a smaller program.
    is_one = cut.count("t") == 1
    q_last, do_last = (cut.rows(x, spec, rows_last=is_one) for x in (q, do))
    delta = cut.rows(_delta(o, lse, do, dlse), spec)  # in the caller's order of axes
    k, v = (clear.dropped_keys(spec, x) for x in (k, v))
    q, k, v, do, dlse = (cut.rows(x, spec) for x in (q, k, v, do, dlse))
    lse = cut.rows(lse, spec, flash2.PADDING_LSE)
    lse_log2 = Named(flash2.lse_log2(lse.to(rows)), rows)
    fields = cut.fields(spec)
    sink = None if spec.sink is None else cut.heads.split(spec.sink)
    own: dict[str, Names] = {  # the axes of each gradient
        "query": cut.axes("t", "h"),
        "key": cut.key_axes("h", "s"),
        "value": cut.key_axes("d", "s"),
    }
    operands = [name for name in spec.score.operands if name in wanted]
    for name in operands:
        axes = cut.heads.split_axes(wanted[name].axes)
        own[name] = tuple(a for a in axes if a is not None)
    own = {name: axes for name, axes in own.items() if name in wanted}

    # Where no sum may be lost in the log-sum-exp, what the forward saved costs less.
    is_whole = cut.count("s") == 1 and not (cut.fuses_softmax or spec.is_part)

    def recompute(pairs, scores, starts):
        if is_whole:
            p = flash2.softmax(scores, None if sink is None else sink.to(rows))
            return Recomputed(pairs, scores, p)
        lse_block = cut.at(lse_log2, starts).value
        return pairs.recompute(scores, pairs.along(lse_block, "t"))

    def delta_of(again, dp, starts):
        if is_whole:  # fewer terms, if there are fewer keys than columns
            total = jnp.sum(again.p * again.pairs.drop(dp), -1) * spec.dropout_scale
            of_lse, kept = (cut.at(x, starts).to(rows) for x in (dlse, lse))
            return jnp.where(kept == -jnp.inf, 0.0, total - of_lse)
        return cut.at(delta, starts).to(rows)

    def visit(starts, sums):
        q_block, q_left, do_block, do_left, k_block, v_block = (
            cut.at(x, starts) for x in (q, q_last, do, do_last, k, v)
        )
        pairs = cut.pairs(fields, starts)
        qk = cut.product(q_block, k_block, pair_axes)
        again = recompute(pairs, pairs.scores_of(qk, q.dtype), starts)
        dropped = cut.named(again.dropped.astype(do.dtype))
        dp = cut.product(do_block, v_block, pair_axes)
        pulled = again.pull(dp, pairs.along(delta_of(again, dp, starts), "t"))
        more = {name: cut.of_operand(pulled, name, qk, own[name]) for name in operands}
        if "query" in own:
            dz = cut.named(pulled.dz.astype(q.dtype))
            more["query"] = cut.product(dz, k_block, own["query"])
            more["key"] = cut.product(q_left, dz, own["key"])
            more["value"] = cut.product(do_left, dropped, own["value"])
        added = {}
        for name, axes in own.items():
            total = Named(sums[name], axes)
            new = cut.at(total, starts).value + more[name]
            added[name] = cut.put(total, new, starts)
        return added

    sums = {name: cut.zeros(axes, lse.dtype) for name, axes in own.items()}
    sums = cut.visit_pairs(spec, visit, sums)
    found = {}
    for name, axes in own.items():
        unit = spec.dropout_scale
        if name in ("query", "key"):
            unit = cut.scalars(spec, axes).gradient_unit
        found[name] = sums[name] * unit, axes
    if sink is not None:
        of_sink = sink_gradient(sink, Named(lse.to(rows), rows), delta)
        found["sink"] = of_sink.value, of_sink.axes
    pairs = ((name, *found[name], out) for name, out in wanted.items())
    return {name: cut.result(x, axes, out) for name, x, axes, out in pairs}
