"""The gradient of queries for Hopper, by itself (Dao 2023, algorithm 2).

For wide heads, whose gradients do not fit one kernel's registers
(`tuning.makes_dq_apart`); `dkv` makes those of keys and values. Grid: (query blocks,
query heads, batch axes). A program owns a block of queries and loops over the blocks of
keys that it meets. A warpgroup computes 64 rows, [queries, keys]: dz goes to its
product from registers, and dq is summed there. The scores of the next keys are made
beside dq. One more warpgroup loads keys and values, by TMA. No program waits for
another.

Shared memory: q, do [64, ...] of each warpgroup, dq in place of q; num_stages times k
[block_kv, H], once v [block_kv, Hv].
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import program
from pallas_kernels.core.axes import Named
from pallas_kernels.core.ranges import minimum
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import memory, support, tuning
from pallas_kernels.mosaic_gpu.ring import Ring
from pallas_kernels.mosaic_gpu.tuning import ROWS

_F32 = jnp.float32


def dq(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named],
    output: Named,
    *,
    launch: Launch,
) -> jax.Array:
    """The gradient of q.

    Args:
      q, k, v, spec, saved, launch: as of `backward.backward`.
      output: shape struct of dq.
    """
    blocks = launch.blocks
    operands = [q, k, v, *jax.tree.leaves(spec), *saved, output]
    by_block = spec.traits.cost_grows
    layout = memory.Layout.of("dq", operands, launch, by_block=by_block)
    computing, keys = blocks.block_q // ROWS, blocks.block_kv
    width = tuning.head_tiles(layout.size)
    elements, wider = memory.of_tiles(layout.size, width)

    def kernel(inputs, outputs, refs):
        q, k, v, all_spec, (lse_log2, delta, do) = inputs
        (dq,) = outputs
        me = lax.axis_index("warpgroup")
        of_keys, of_values = Ring(refs, blocks.num_stages), Ring(refs, 1)
        spec, where, start = program.query_start(all_spec, layout)
        needed = program.key_blocks(spec, where, layout, start)
        count = jnp.int32(needed.count)

        def keys_at(i):
            return Rows(needed.in_order(i)[1] * keys, keys)

        @pl.when(me == computing)
        def load():
            plgpu.set_max_registers(tuning.REGISTERS[computing][0], action="decrease")

            @pl.loop(0, count)
            def _(i):
                here = {**where, "s": keys_at(i)}
                of_keys.fill(i, k=k.at(here))
                of_values.fill(i, v=v.at(here))

        @pl.when(me < computing)
        def compute():
            plgpu.set_max_registers(tuning.REGISTERS[computing][1], action="increase")
            rows = start + me * ROWS
            own_spec, own = program.query_rows(spec, where, layout, rows, ROWS)
            q_tile, do_tile = refs["q"].at[me], refs["do"].at[me]
            plgpu.copy_gmem_to_smem(q.at(own), q_tile, refs["own here"].at[me])
            plgpu.copy_gmem_to_smem(do.at(own), do_tile, refs["own here"].at[me])
            lse, change = (support.load_vector(x.at(own), 0) for x in (lse_log2, delta))
            block_sum = plgpu.ACC((ROWS, keys), _F32)

            def own_tile(name, i):
                return refs[name].at[support.keep_in_loop(me, i)]

            def issue_scores(qk_sum, i):
                k_tile = of_keys.tile("k", i)
                plgpu.wgmma(qk_sum, own_tile("q", i), support.transposed(k_tile))

            def scores(i):
                def issue(qk_sum):
                    issue_scores(qk_sum, i)
                    return plgpu.wgmma_accumulator_load(qk_sum, wait_n=0)

                return pl.run_scoped(issue, block_sum)

            def visit(dq_sum, i, qk):
                """dq of a block of keys, the scores of the next."""
                i = support.opaque(i)
                more, after = i + 1 < count, minimum(i + 1, count - 1)
                edges = needed.edges
                unmasked = isinstance(edges, int) and edges == 0
                masked = False if unmasked else needed.in_order(i)[0]

                def of_pairs(dp_sum):
                    of_values.wait("v", i)
                    v_tile = of_values.tile("v", i)
                    do_own = own_tile("do", i)
                    plgpu.wgmma(dp_sum, do_own, support.transposed(v_tile))
                    here = {**own, "s": keys_at(i)}
                    pairs = program.pairs(own_spec, here, ("t", "s"), masked, launch)
                    found = pairs.scores_of(qk, q.dtype)
                    again = pairs.recompute(found, pairs.along(lse, "t"))
                    # The compiler moves nothing across this branch: exponents are made
                    # while the product runs.
                    pl.when(more)(lambda: of_keys.wait("k", after))
                    dp = plgpu.wgmma_accumulator_load(dp_sum, wait_n=0)
                    of_values.release("v", i)
                    return again.dz(dp, pairs.along(change, "t")).astype(q.dtype)

                dz = pl.run_scoped(of_pairs, block_sum)

                def products(qk_sum):
                    plgpu.wgmma(dq_sum, dz, of_keys.tile("k", i))
                    issue_scores(qk_sum, after)
                    plgpu.wgmma_wait(0)
                    return plgpu.wgmma_accumulator_load(qk_sum, wait_n=0)

                qk = pl.run_scoped(products, block_sum)
                pl.when(more)(lambda: of_keys.release("k", i))
                return qk

            def walk(dq_sum):
                end = support.opaque(count)

                @pl.when(count > 0)
                def _():
                    of_keys.wait("k", jnp.int32(0))
                    step = functools.partial(visit, dq_sum)
                    lax.fori_loop(jnp.int32(0), end, step, scores(jnp.int32(0)))

                return dq_sum[...]

            plgpu.barrier_wait(refs["own here"].at[me])
            found = pl.run_scoped(walk, plgpu.ACC((ROWS, width["h"]), _F32))
            # A row without keys may have met values that are not finite.
            kept = support.ARITHMETIC.along(lse, -2, found.shape) != jnp.inf
            found = jnp.where(kept, found * own_spec.gradient_unit, 0.0)
            q_tile[...] = found.astype(dq.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, dq.at(own))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def of_heads(name, count, size):
        return support.tile((count, size, width[name]), q.dtype, elements[name])

    of_k = {"k": of_heads("h", blocks.num_stages, keys)}
    tiles = {
        "q": of_heads("h", computing, ROWS),
        "do": of_heads("d", computing, ROWS),
        "own here": plgpu.Barrier(num_barriers=computing, num_arrivals=2),
        **Ring.shared(of_k, blocks.num_stages, computing),
        **Ring.shared({"v": of_heads("d", 1, keys)}, 1, computing),
    }
    (found,) = memory.call(
        kernel,
        layout,
        (q, k, v, spec, saved),
        (output,),
        block={"t": ROWS, "s": keys, **wider},
        tiles=width,
        scratch=tiles,
        warpgroups=computing + 1,
        name="flash2_dq",
    )
    return found.value
