"""The tangent kernel: one program per block of query rows, the loop of `dq`.

It takes the forward's output and log-sum-exp, so that one sum of the size of the output
is all that a program carries. Of five products of the forward's size, those of tangents
that are zero are left out.

Shared memory: q and its tangent [block_q, H], if not kept in registers, and num_stages
times k, v [block_kv, ...] and their tangents.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels import division, program
from pallas_kernels.core import flash2
from pallas_kernels.core import tangent as sums_of
from pallas_kernels.core.axes import Named
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import load_tree
from pallas_kernels.triton import memory
from pallas_kernels.triton.memory import Launch

_OF_HEADS = ("query", "key", "value")


def tangent(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named],
    tangents: Mapping[str, Named],
    outputs: tuple[Named, Named],
    *,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """The tangents of output and log-sum-exp.

    Args:
      q, k, v, spec, launch: as in the forward.
      saved: o (axes `t d` among others) and lse (`t`).
      tangents: by the names of `Call.differentiable`, those that are not zero.
      outputs: shape structs of the results, like o and lse.
    """
    inputs = q, k, v, spec, saved, dict(tangents)
    layout = memory.BlockGrid.of(
        "tangent", [*jax.tree.leaves(inputs), *outputs], launch
    )

    def kernel(q, k, v, spec, saved, along, outputs):
        dq, dk, dv = map(along.get, _OF_HEADS)
        along = {name: x for name, x in along.items() if name not in _OF_HEADS}
        o, lse = saved
        spec, where, kv_blocks = program.query_program(spec, layout)
        along = load_tree(along, ("t", "s"), where)
        lse_block = lse.load(("t",), where, padding=-jnp.inf)
        lse_log2 = flash2.lse_log2(lse_block)
        rows = [x.load(("t", "h"), where) for x in (q, dq) if x is not None]
        q_block, *dq_block = launch.left(*rows)

        def visit(masked, j, sums):
            here = program.visit_at(spec, where, layout, "s", j, masked)
            pairs = program.pairs(spec, here, ("t", "s"), masked, launch)
            k_block = k.load(("s", "h"), here)
            qk = pairs.product(q_block, k_block)
            dqk = jnp.zeros(pairs.shape, jnp.float32)
            for block in dq_block:
                dqk += pairs.product(block, k_block)
            if dk is not None:
                dqk += pairs.product(q_block, dk.load(("s", "h"), here))
            scores = pairs.scores_of(qk, q.dtype)
            again = pairs.recompute(scores, pairs.along(lse_log2, "t"))
            own = load_tree(along, ("t", "s"), here)
            weighted = again.push(dqk, qk, own)
            values = [x.load(("s", "d"), here) for x in (v, dv) if x is not None]
            return sums_of.step(sums, again, weighted, *values)

        is_first = where.get("z", 0) == 0
        sizes = layout.pieces["d"]
        sums = sums_of.init(spec, lse_block, along, sizes, is_first=is_first)
        sums = kv_blocks.fold(visit, sums)
        found = sums_of.finish(sums, spec, o.load(("t", "d"), where), lse_block)
        # Rows beyond a query length are results too: 0.
        where["t"] = layout.rows_at("t", where["t"].start)
        for view, value in zip(outputs, found, strict=True):
            view.store(value, where)

    name = "flash2_tangent"
    found = memory.call(kernel, layout, inputs, outputs, name=name, launch=launch)
    return division.summed(found, outputs)
