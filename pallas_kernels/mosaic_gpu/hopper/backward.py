"""The backward kernel for Hopper: one pass of five products (Dao 2023, algorithm 2).

Grid: (key blocks, key/value heads, batch axes). A thread block owns a block of keys. It
visits work tiles: the query heads of its group, and the blocks of queries that meet its
keys. What its warps do with tiles 0, 1, ... over time, where there are two consumers:

    warp 0     | load k, v | load q, do of 0 | load q, do of 1 | ...              TMA
               |                    |  pipeline of num_stages stages
               |                    v
    consumer 0 | s0 | dp0, p0, dz0 | dv, dk | dq0, s1 | dp1, p1, dz1 | dv, dk | dq1, s2
    consumer 1 | s0 | dp0, p0, dz0 | dv, dk | dq0, s1 | dp1, p1, dz1 | dv, dk | dq1, s2
               |               |               ^   |
               |               +-- dz0 of all -+   |  dq0, float32
               |                   keys            v
    warps 1, 2 |                         wait for the semaphore, add dq0, signal  TMA

    s = k q^T    dp = v do^T    dv += p do    dk += dz q    dq = dz^T k

Consumers (`backward_consumer`) compute 64 keys each, transposed, [keys, queries], and
sum dk and dv in their registers. p goes to its product from registers, dz from shared
memory, of which all consumers together make dq of the block. The products of the next
queries and keys run while dq goes to shared memory. The producer warpgroup has a warp
that loads, by TMA, and one or two warps that add dq to global memory, by TMA too, in
float32. For heads above 128 there is no room to compute ahead like that, and p is
rounded before dz is made of it.

The additions to a block of dq have one order, that of the key blocks which meet it, so
that the same inputs give the same bits. A semaphore of the block counts them, and the
first one stores. Where each consumer makes rows of dq, for heads up to 64, each of two
warps adds those of one consumer, which have a semaphore of their own. A thread block
waits only for those of lower indices, which a GPU starts before it. Blocks of queries
come from the last on. So a thread block comes to each of them some tiles after the
thread block before it, and none waits for another's end (`tiles.Tiles`):

    time ->   1     2     3     4     5     6
    keys 0    dq3   dq2   dq1   dq0                 stores
    keys 1          dq3   dq2   dq1   dq0           adds when the semaphore is 1
    keys 2                dq3   dq2   dq1   dq0     adds when the semaphore is 2

Where much of the time would pass before all have had their first turn, dq is the sum of
a few accumulators, and every other thread block, or every fourth, adds to the same one.
With `Config(deterministic=False)` a thread block waits for the one that stores alone,
and all others add in any order.

Of a mask of lists some blocks of keys may have far more visits than others, as global
keys among windows. Such a block comes last of its head, and several thread blocks share
its visits (`core.visits.Sharing`). The last of them waits for dk and dv of the others,
and stores the sums.

Shared memory: k, v [block_kv, ...]; num_stages times q, do [block_q, ...], their
log-sum-exps and delta, and dz [block_kv, block_q]; twice dq [block_q, H] in float32.
For heads above 128 there is one tile of dz and one of dq. Heads are as wide as
`tuning.head_tiles`: beyond an array 0 is read, and nothing is written.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import division
from pallas_kernels.core.axes import Named
from pallas_kernels.core.ranges import minimum
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.core.visits import blocks_of_keys_met
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu.hopper import gradients
from pallas_kernels.mosaic_gpu.hopper.backward_consumer import compute
from pallas_kernels.mosaic_gpu.hopper.backward_plan import Plan, Program, Refs
from pallas_kernels.mosaic_gpu.hopper.gradients import Inputs, Saved
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.plan import by_role, wait_until_stored
from pallas_kernels.mosaic_gpu.tiles import Turn

_ACCUMULATOR = "w"  # the axis of the arrays that dq is the sum of


def backward(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named],
    outputs: tuple[Named, Named, Named],
    *,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Gradients of q, over `AttentionSpec.gradient_unit`, and of k and v.

    Blocks of dq that no keys meet may not be written; where there are more keys than
    these (`AttentionSpec.is_part`) they are 0.

    Args:
      q, k, v, spec, launch: as in the forward; queries and do are 0 beyond the spec's
        lengths.
      saved: lse_log2 and delta (axis `t` among others), and do (`t d`).
      outputs: shape structs of dq, in float32, dk and dv.
    """
    inputs = Inputs(q, k, v, spec, Saved(*saved))
    plan = Plan.of(inputs, outputs, launch)
    layout, dq_struct, dkv_structs = plan.layout, outputs[0], outputs[1:]
    count = plan.dq_accumulators
    accumulators = {_ACCUMULATOR: count} if count > 1 else {}
    results = [
        division.partial(dq_struct, accumulators),
        *(division.partial(x, layout.parts) for x in dkv_structs),
        *plan.partial_sums,
    ]
    inputs = inputs.with_visits(layout)
    dq, *dkv = plan.call(
        by_role(Program.of, _produce, compute),
        inputs,
        results,
        refs=Refs.declare(plan),
        name="flash2_backward",
    )
    if spec.is_part or count > 1:
        met = blocks_of_keys_met(spec, layout.size, layout.rows, inputs.visits)
        dq = _of_written(dq, met).summed([_ACCUMULATOR])
    return dq.to(dq_struct.axes), *division.summed(dkv[:2], dkv_structs)


def _of_written(dq: Named, met: Named) -> Named:
    """dq or its accumulators, with 0 where nothing was added.

    Args:
      met: int32, how many blocks of keys each row meets.
    """
    axes = tuple(None if a == "h" else a for a in dq.axes)
    number = jnp.int32(0)
    if _ACCUMULATOR in dq.axes:
        axis = dq.axes.index(_ACCUMULATOR)
        number = lax.broadcasted_iota(jnp.int32, dq.shape, axis)
    return Named(jnp.where(met.to(axes) > number, dq.value, 0.0), dq.axes)


def _produce(program: Program) -> None:
    """The role of the producer: one of its warps loads, and one or two add dq."""

    @plgpu.warp_map
    def _(warp):
        pl.when(warp == 0)(lambda: gradients.load(program))
        is_adder = (warp > 0) & (warp <= program.plan.adder_warps)
        pl.when(is_adder)(lambda: _add(program, warp - 1))


def _add(program: Program, first) -> None:
    """Adds dq of all work tiles or of every other, or a part of it, of all.

    When its turn comes is read a work tile ahead, while the last one is on its way.

    Args:
      first: the number of this warp among those that add.
    """
    plan, tiles = program.plan, program.tiles
    part, first = (first, 0) if plan.dq_parts > 1 else (0, first)
    step = plan.adder_warps // plan.dq_parts

    def turn_of(tile) -> Turn:
        return tiles.turn(tiles.place(tile), plan.dq_accumulators)

    def visit(i, turn: Turn) -> Turn:
        tile = first + i * step
        following = turn_of(minimum(tile + step, tiles.count - 1))
        _add_tile(program, tile, part, turn)
        return following

    @pl.when(tiles.count > first)
    def _():
        count = lax.div(tiles.count - first + step - 1, jnp.int32(step))
        lax.fori_loop(jnp.int32(0), count, visit, turn_of(first))


def _add_tile(program: Program, tile, part, turn: Turn) -> None:
    """Adds dq of a work tile to global memory, after the additions that come first.

    Args:
      part: which one of it (`Plan.dq_parts`).
      turn: when.
    """
    plan, refs, tiles = program.plan, program.refs, program.tiles
    count, parts = plan.dq_accumulators, plan.dq_parts
    number = (tiles.number(turn) * count + turn.accumulator) * parts + part
    here = {**tiles.at(turn), _ACCUMULATOR: turn.accumulator}
    dq, source = program.outputs[0], refs.dq.copied.at[program.dq_stage(tile)]
    if parts > 1:
        here["t"] = Rows(here["t"].start + part * ROWS, ROWS)
        source = plan.dq_part.of(part, source)
    semaphore, barrier = program.semaphores.at[number], program.dq_barrier(tile, part)
    in_order = plan.launch.deterministic
    done = turn.waits_for(in_order=in_order)
    plgpu.semaphore_wait(semaphore, done, decrement=False, memory_scope="gpu")
    plgpu.barrier_wait(refs.dq_full.at[barrier])

    @pl.when(turn.before == 0)
    def _():
        plgpu.copy_smem_to_gmem(source, dq.at(here))

    @pl.when(turn.before > 0)
    def _():
        plgpu.copy_smem_to_gmem(source, dq.at(here), reduction_op="add")

    wait_until_stored()
    plgpu.barrier_arrive(refs.dq_empty.at[barrier])

    def tell():
        plgpu.wait_smem_to_gmem(0)
        plgpu.semaphore_signal(semaphore, 1, memory_scope="gpu")

    if in_order:
        tell()
    else:
        pl.when(turn.before == 0)(tell)
