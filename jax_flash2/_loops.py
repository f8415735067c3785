"""The loop of the xla backend over pairs of blocks, and products that are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core.axes import Named
from pallas_kernels.core.dropout import BLOCK
from pallas_kernels.core.masks import Tiling
from pallas_kernels.core.masks.relation import reduced
from pallas_kernels.core.ranges import Range, block_ends
from pallas_kernels.core.spec import AttentionSpec

# Numbers of blocks are not below 0: JAX need not look.
COUNTED = {"allow_negative_indices": False}

Starts = Mapping[str, Any]  # the first row of `t` and of `s` of a block


@dataclasses.dataclass(frozen=True)
class PairLoop:
    """Pairs of blocks of a call.

    Attributes:
      size: of `t` and `s`.
      block: rows of a block of each.
      batch: names of the batch axes.
    """

    size: Mapping[str, int]
    block: Mapping[str, int]
    batch: tuple[str, ...]

    def count(self, name: str) -> int:
        """Number of blocks of `t` or `s`."""
        return -(-self.size[name] // self.block[name])

    def run(self, spec: AttentionSpec, visit: Callable, state) -> Any:
        """Runs `state = visit(starts, state)` over the pairs of blocks that are needed.

        In one order: by query block, and for each by key block.
        """

        def visit_at(i, j, state):
            return visit({"t": i * self.block["t"], "s": j * self.block["s"]}, state)

        count_q = self.count("t")
        t, s = self.size["t"], self.size["s"]
        if spec.lists_blocks:
            return self._over_list(spec, visit_at, state)
        spec = spec.with_table("s", self.block["t"], self.block["s"], t, s)
        axes = (*self.batch, "n", "i")
        spec = jax.tree.map(lambda leaf: leaf.to(axes), spec.for_ranges())
        needed = spec.kv_blocks(*block_ends(self.block["t"], t), s, self.block["s"])
        assert isinstance(needed, Range)

        if isinstance(needed.need_lo, int) and isinstance(needed.need_hi, int):
            first, count = needed.need_lo, needed.need_hi - needed.need_lo

            def at(number, state):
                number = jnp.int32(number)
                i = lax.div(number, jnp.int32(count))
                return visit_at(i, first + number - i * count, state)

            # Of static bounds `fori_loop` makes an int64 under x64.
            visits = np.int32(count_q * count)
            return lax.fori_loop(np.int32(0), visits, at, state)

        def of_all(x, reduce):
            """Over all of the batch, for each query block or for all alike."""
            return x if isinstance(x, int) else reduce(x, tuple(range(x.ndim - 1)))

        def of(bounds, i):
            bounds = jnp.broadcast_to(jnp.asarray(bounds, jnp.int32), (count_q,))
            return lax.dynamic_index_in_dim(bounds, i, keepdims=False, **COUNTED)

        first, end = of_all(needed.need_lo, jnp.min), of_all(needed.need_hi, jnp.max)
        # Query blocks that need something, first: what others do not need may be NaN.
        visited = jnp.broadcast_to(end > first, (count_q,))
        order = jnp.argsort(~visited, stable=True).astype(jnp.int32)
        count = jnp.sum(visited, dtype=jnp.int32)

        def body(carry):
            number, j, state = carry
            i = of(order, number)
            is_last = j + 1 >= of(end, i)
            number = number + is_last.astype(jnp.int32)
            following = jnp.where(is_last, of(first, of(order, number)), j + 1)
            return number, following, visit_at(i, j, state)

        carry = np.int32(0), of(first, of(order, 0)), state
        return lax.while_loop(lambda carry: carry[0] < count, body, carry)[-1]

    def _over_list(self, spec: AttentionSpec, visit_at: Callable, state) -> Any:
        """`run` where blocks to skip may lie between those that are needed."""
        t, s = self.block["t"], self.block["s"]
        sizes = self.size["t"], self.size["s"]
        tiling = Tiling(t, s, *sizes, spec.positions)
        some = reduced(spec.relation(tiling).some, jnp.any, (*self.batch, "n"))
        needed = jnp.broadcast_to(some.to(("i", "j")), tiling.counts).reshape(-1)
        order = jnp.argsort(~needed, stable=True).astype(jnp.int32)

        def at(number, state):
            pair = lax.dynamic_index_in_dim(order, number, keepdims=False, **COUNTED)
            i = lax.div(pair, jnp.int32(self.count("s")))
            return visit_at(i, pair - i * self.count("s"), state)

        count = jnp.sum(needed, dtype=jnp.int32)
        return lax.fori_loop(np.int32(0), count, at, state)


def as_matrices(x: Named, names: Sequence[str], size: Mapping[str, int]) -> Named:
    """An operand of a product that XLA makes of the same matrices for every call.

    It has the axes of batch and heads that `vmap` may have given to the other operand
    alone. And it has heads of more than one element: XLA would multiply those without
    a product, and together with what follows.

    Args:
      x: the operand.
      names: axes of batch and heads of either operand.
      size: of these axes.
    """
    own = (*names, *(name for name in x.axes if name not in names))
    shape = dict(zip(x.axes, x.shape, strict=True))
    room = BLOCK - 1 if "h" in own and shape["h"] == 1 else 0
    width = [(0, room if name == "h" else 0) for name in own]
    shape |= {name: size[name] for name in names}
    value = jnp.broadcast_to(x.to(own), [shape[name] for name in own])
    return Named(jnp.pad(value, width), own)
