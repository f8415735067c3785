"""The forward kernel for Hopper (Dao 2023, algorithm 1; Shah 2024, FlashAttention-3).

Grid: (query blocks, query heads, batch axes). A program has warpgroups that compute, of
64 query rows each, and one that only loads: it brings keys and values by TMA into a
ring of tiles in shared memory, in the order of `Range.at`. That is first the blocks in
which pairs may be masked, or one, with `flash2.update`, then all the others with the
maximum as it is (`flash2.accumulate`). If a row was not in its range, its warpgroup
goes through the keys again, with maxima alone.

A round issues the products of the next keys, then those of the last probabilities with
their values, and computes the next probabilities while the second run (Shah 2024,
section 3.2). Warpgroups take turns at this: one computes while another multiplies
(section 3.1).

Shared memory: q [block_q, H], and num_stages times k [block_kv, H], v [block_kv, Hv].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import program
from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Named
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import memory, support
from pallas_kernels.mosaic_gpu.ring import Ring
from pallas_kernels.mosaic_gpu.tuning import ROWS

# Registers of a thread that loads, and of one that computes, by warpgroups of these.
_REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
_F32 = jnp.float32


def forward(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    outputs: tuple[Named, Named],
    *,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Output and log-sum-exp.

    Args:
      q, k, v: operands, axes `t h`, `s h`, `s d` among others, those last.
      spec: of `Named` arrays, with the tables for these blocks.
      outputs: shape structs of o (axes `t d` among others) and lse (`t` last).
      launch: block sizes and the rest.
    """
    blocks, arithmetic = launch.blocks, launch.arithmetic
    operands = [q, k, v, *jax.tree.leaves(spec), *outputs]
    layout = memory.Layout.of(
        "forward", operands, launch, blocks_last=spec.later_rows_see_more
    )
    computing, keys = blocks.block_q // ROWS, blocks.block_kv
    h, d = (memory.head_elements(layout.size[name]) for name in ("h", "d"))
    turns = support.Turns(computing, warpgroups=computing + 1)

    def kernel(inputs, outputs, refs):
        q, k, v, spec = inputs
        o, lse = outputs
        me = lax.axis_index("warpgroup")
        ring = Ring(refs, blocks.num_stages)
        spec, where, start = program.query_start(spec, layout)
        needed = program.key_blocks(spec, where, layout, start)
        needed = needed.with_an_edge(1).with_a_block()
        count, edges = jnp.int32(needed.count), jnp.int32(needed.edges)

        def keys_at(where, block):
            return {**where, "s": Rows(block * keys, keys)}

        @pl.when(me == computing)
        def load():
            plgpu.set_max_registers(_REGISTERS[computing][0], action="decrease")

            @pl.loop(0, count)
            def _(i):
                here = keys_at(where, needed.at(i)[1])
                ring.fill(i, k=k.at(here))
                ring.fill(i, v=v.at(here))

        @pl.when(me < computing)
        def compute():
            plgpu.set_max_registers(_REGISTERS[computing][1], action="increase")
            rows = start + me * ROWS
            own_spec, own = program.query_rows(spec, where, layout, rows, ROWS)
            q_tile, q_here = refs["q"].at[me], refs["q here"].at[me]
            plgpu.copy_gmem_to_smem(q.at(own), q_tile, q_here)
            turns.start(me)
            plgpu.barrier_wait(q_here)

            def along(x, columns):
                return arithmetic.along(x, -2, (ROWS, columns))

            def scores(masked, block, qk):
                here = keys_at(own, block)
                pairs = program.pairs(own_spec, here, ("t", "s"), masked, launch)
                return pairs.scores_of(qk, q.dtype)

            def products(i, before=None):
                """Of q and tile i of keys; `before` issues others to run after them."""

                def issue(qk):
                    ring.wait("k", i)
                    turns.wait(me)
                    plgpu.wgmma(qk, q_tile, support.transposed(ring.tile("k", i)))
                    if before is not None:
                        before()
                    turns.pass_on(me)
                    wait_n = 0 if before is None else 1
                    return plgpu.wgmma_accumulator_load(qk, wait_n=wait_n)

                qk = pl.run_scoped(issue, plgpu.ACC((ROWS, keys), _F32))
                ring.release("k", i)
                return qk

            def walk(acc):
                def add(i, p):
                    ring.wait("v", i)
                    plgpu.wgmma(acc, p, ring.tile("v", i))

                def added(i):
                    plgpu.wgmma_wait(0)
                    ring.release("v", i)

                def edge(i, state):
                    m, total, p = state
                    qk = products(i, lambda: add(i - 1, p))
                    found = scores(True, needed.at(i)[1], qk)
                    m, alpha, p = flash2.update(m, found, arithmetic)
                    added(i - 1)
                    acc[...] = acc[...] * along(alpha, d)
                    total = flash2.add_row_sums(total * alpha, p)
                    return m, total, p.astype(v.dtype)

                def full(shift, i, state):
                    total, p = state
                    qk = products(i, lambda: add(i - 1, p))
                    found = scores(False, needed.at(i)[1], qk)
                    p = flash2.probabilities(found, along(shift, keys), arithmetic)
                    total = flash2.add_row_sums(total, p)
                    added(i - 1)
                    return total, p.astype(v.dtype)

                found = scores(True, needed.at(jnp.int32(0))[1], products(jnp.int32(0)))
                m, _, p = flash2.update(nothing.m, found, arithmetic)
                state = m, jnp.sum(p, axis=-1), p.astype(v.dtype)
                m, *state = lax.fori_loop(jnp.int32(1), edges, edge, state)
                shift = flash2.finite(m)
                total, p = lax.fori_loop(
                    edges, count, lambda i, x: full(shift, i, x), tuple(state)
                )
                add(count - 1, p)
                added(count - 1)
                return flash2.State(m, total, acc[...])

            def walk_again(acc):
                """By itself, with the tile of the ring that has its number."""
                k_tile, v_tile = refs["k"].at[me], refs["v"].at[me]
                k_here, v_here = refs["k again"].at[me], refs["v again"].at[me]
                every = needed.all_edges()

                def visit(i, state):
                    m, total = state
                    block = every.at(i)[1]
                    here = keys_at(own, block)
                    plgpu.commit_smem()  # all of its warps have read both tiles
                    plgpu.copy_gmem_to_smem(k.at(here), k_tile, k_here)
                    plgpu.copy_gmem_to_smem(v.at(here), v_tile, v_here)

                    def issue(qk):
                        plgpu.barrier_wait(k_here)
                        plgpu.wgmma(qk, q_tile, support.transposed(k_tile))
                        return qk[...]

                    qk = pl.run_scoped(issue, plgpu.ACC((ROWS, keys), _F32))
                    found = scores(True, block, qk)
                    m, alpha, p = flash2.update(m, found, arithmetic)
                    acc[...] = acc[...] * along(alpha, d)
                    plgpu.barrier_wait(v_here)
                    plgpu.wgmma(acc, p.astype(v.dtype), v_tile)
                    total = flash2.add_row_sums(total * alpha, p)
                    plgpu.wgmma_wait(0)
                    return m, total

                state = nothing.m, nothing.l
                m, total = lax.fori_loop(jnp.int32(0), count, visit, state)
                return flash2.State(m, total, acc[...])

            nothing = flash2.init([ROWS], 1)
            sums = plgpu.ACC((ROWS, d), _F32)
            state = pl.run_scoped(walk, sums)
            plgpu.barrier_arrive(refs["walked"])
            good = flash2.in_range(state, v.dtype)
            lost = jnp.max(jnp.where(good, 0, 1)) > 0

            def repaired():
                plgpu.barrier_wait(refs["walked"])
                return pl.run_scoped(walk_again, sums)

            state = lax.cond((edges < count) & lost, repaired, lambda: state)
            # A row without keys may have met values that are not finite.
            kept = along(state.l, d) != 0.0
            state = state._replace(acc=jnp.where(kept, state.acc, 0.0))
            result, log = flash2.finish(state, own_spec.sink, arithmetic)
            o_tile = refs["o"].at[me] if "o" in refs else q_tile
            lse_tile = refs["lse"].at[me]
            o_tile[...] = result.astype(o.dtype)
            lse_tile[...] = log
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_tile, o.at(own))
            plgpu.copy_smem_to_gmem(lse_tile, lse.at(own))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return memory.call(
        kernel,
        layout,
        (q, k, v, spec),
        outputs,
        block={"t": ROWS, "s": keys},
        scratch=_shared(blocks, h, d, v.dtype),
        warpgroups=computing + 1,
        name="flash2_forward",
    )


def _shared(blocks, h: int, d: int, dtype) -> dict[str, Any]:
    """Tiles and barriers of a program, by name."""
    computing, stages = blocks.block_q // ROWS, blocks.num_stages
    refs = {
        "q": support.tile((computing, ROWS, h), dtype),
        "lse": plgpu.SMEM((computing, ROWS), _F32),
        "q here": plgpu.Barrier(num_barriers=computing),
        "walked": plgpu.Barrier(num_barriers=(), num_arrivals=computing),
    }
    for name, size in (("k", h), ("v", d)):
        tiles = {name: support.tile((stages, blocks.block_kv, size), dtype)}
        refs |= Ring.shared(tiles, stages, readers=computing)
        refs[f"{name} again"] = plgpu.Barrier(num_barriers=computing)
    if h != d:
        refs["o"] = support.tile((computing, ROWS, d), dtype)
    return refs
