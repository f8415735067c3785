"""The gradient of a bias for Hopper, of one with an element for each pair.

Grid: (query blocks, key blocks, heads and batch axes that the gradient has). A program
owns a tile of the gradient and loops over the heads and batch entries that the bias was
broadcast over, which are summed in registers, in one order. A warpgroup computes 64
rows, [queries, keys]. One more warpgroup loads, by TMA.

Shared memory: a ring of num_stages places for rows of queries beside those of keys: q
and k of an element come first, then do and v. If the bias has two bytes, its tile lies
there too.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, division, program
from pallas_kernels.core.axes import Axes, Named
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import memory, pairwise, prefetch, support, tuning
from pallas_kernels.mosaic_gpu.ring import Ring
from pallas_kernels.mosaic_gpu.tuning import ROWS

_F32 = jnp.float32


def layout_of(operands, launch: Launch, summed: Axes) -> memory.Layout:
    """Of tiles of pairs, whose programs loop over the axes that the bias lacks.

    A part is as large as the result, and that is large where it has many tiles: so they
    are divided only if there are fewer than one for each multiprocessor.
    """
    own = "t", "s"
    whole = dataclasses.replace(launch, splits=1)
    found = memory.Layout.of("dbias", operands, whole, own=own, looped=summed)
    if found.tiles >= device.multiprocessors():
        return found
    return memory.Layout.of("dbias", operands, launch, own=own, looped=summed)


def dbias(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named],
    output: Named,
    *,
    summed: Axes,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """The gradient of the score's bias, in a tuple.

    Args:
      q, k, v, spec, saved, launch: as of `backward.backward`.
      output: its shape struct, axes `t s` last.
      summed: axes of batch and heads that it lacks.
    """
    blocks = launch.blocks
    operands = [q, k, v, *jax.tree.leaves(spec), *saved, output]
    layout = layout_of(operands, launch, summed)
    computing, keys = blocks.block_q // ROWS, blocks.block_kv
    width = tuning.head_tiles(layout.size)
    elements, wider = memory.of_tiles(layout.size, width)
    numbers = prefetch.pair_values(spec)  # the bias, or nothing

    def kernel(inputs, outputs, refs):
        q, k, v, spec, (lse_log2, delta, do) = inputs
        (result,) = outputs
        me = lax.axis_index("warpgroup")
        ring = Ring(refs, blocks.num_stages)
        spec, where, tile = program.tile_program(spec, layout)
        first, end = (jnp.int32(x) for x in layout.own_elements(where))
        of_keys = {"s": Rows(tile["s"].start, keys)}

        def element(index):
            """The spec, where it is, and its block of keys, if any is needed."""
            own_spec, here, _, needed = program.element(spec, where, layout, index)
            return own_spec, {**here, **of_keys}, needed

        def of_rows(here, start, size: int):
            return {**here, "t": Rows(tile["t"].start + start, size)}

        @pl.when(me == computing)
        def load():
            plgpu.set_max_registers(tuning.REGISTERS[computing][0], action="decrease")

            def fetch(index, i):
                _, here, needed = element(index)
                here, count = of_rows(here, 0, blocks.block_q), jnp.int32(needed.count)

                @pl.when(count > 0)
                def _():
                    ring.fill(i, rows=q.at(here), keys=k.at(here))
                    ring.fill(i + 1, rows=do.at(here), keys=v.at(here))

                return i + 2 * count

            lax.fori_loop(first, end, fetch, jnp.int32(0))

        @pl.when(me < computing)
        def compute():
            plgpu.set_max_registers(tuning.REGISTERS[computing][1], action="increase")
            mine, block_sum = pl.ds(me * ROWS, ROWS), plgpu.ACC((ROWS, keys), _F32)
            own_tile = of_rows({**where, **of_keys}, me * ROWS, ROWS)
            with_bias = spec
            for view in prefetch.pair_values(spec)[: len(numbers)]:
                bias, here = refs["bias"].at[me], refs["bias here"].at[me]
                plgpu.copy_gmem_to_smem(view.at(own_tile), bias, here)
                plgpu.barrier_wait(here)
                with_bias = prefetch.with_pair_tile(spec, bias)

            def product(block, i):
                """Issues that of rows and keys in place i."""
                ring.wait("rows", i)
                rows = refs["rows"].at[support.keep_in_loop(ring.slot(i), i), mine]
                plgpu.wgmma(block, rows, support.transposed(ring.tile("keys", i)))

            def add(index, state):
                i, total = state
                _, here, needed = element(index)
                edges = needed.edges
                unmasked = isinstance(edges, int) and edges == 0
                masked = False if unmasked else jnp.int32(edges) > 0

                def visit():
                    own_spec, _, _, _ = program.element(with_bias, where, layout, index)
                    own = of_rows(here, me * ROWS, ROWS)
                    lse, change = (
                        support.load_vector(x.at(own), 0) for x in (lse_log2, delta)
                    )

                    def of_pairs(qk_sum, dp_sum):
                        product(qk_sum, i)
                        product(dp_sum, i + 1)
                        qk = plgpu.wgmma_accumulator_load(qk_sum, wait_n=1)
                        ring.release("rows", i)
                        pairs = program.pairs(own_spec, own, ("t", "s"), masked, launch)
                        found = pairs.scores_of(qk, q.dtype)
                        again = pairs.recompute(found, pairs.along(lse, "t"))
                        dp = plgpu.wgmma_accumulator_load(dp_sum, wait_n=0)
                        ring.release("rows", i + 1)
                        pulled = again.pull(dp, pairs.along(change, "t"))
                        return total + pulled.operand("bias", qk)

                    return pl.run_scoped(of_pairs, block_sum, block_sum)

                if isinstance(needed.count, int) and needed.count == 1:
                    return i + 2, visit()
                count = jnp.int32(needed.count)
                return i + 2 * count, lax.cond(count > 0, visit, lambda: total)

            total = jnp.zeros((ROWS, keys), _F32)
            _, total = lax.fori_loop(first, end, add, (jnp.int32(0), total))
            total = (total * spec.dropout_scale).astype(result.dtype)
            pairwise.store(result.at(own_tile), total)

    shape = computing, ROWS, keys
    rows = {
        "rows": (blocks.num_stages, blocks.block_q, width["h"]),
        "keys": (blocks.num_stages, keys, width["h"]),
    }
    array = {"rows": layout.size["t"], "keys": layout.size["s"]}
    tiles = {
        name: support.tile(x, q.dtype, elements["h"], (array[name], layout.size["h"]))
        for name, x in rows.items()
    }
    scratch = Ring.shared(tiles, blocks.num_stages, computing)
    for pairs in numbers:
        scratch["bias"] = support.tile(shape, pairs.dtype)
        scratch["bias here"] = plgpu.Barrier(num_barriers=computing)
    found = memory.call(
        kernel,
        layout,
        (q, k, v, spec, saved),
        (division.partial(output, layout.parts),),
        block={"t": ROWS, "s": keys, **wider},
        tiles=width,
        scratch=scratch,
        warpgroups=computing + 1,
        name="flash2_dbias",
    )
    return division.summed(found, (output,))
