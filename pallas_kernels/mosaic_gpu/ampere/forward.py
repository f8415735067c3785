"""The forward kernel by mma.sync (Dao 2023, algorithm 1), for GPUs without wgmma.

**Not run on a card**: compiled for compute capabilities 8.0, 8.6, 8.9, 12.0 and 12.1,
and interpreted on a CPU (benchmarks/lab/099-mosaic-gpu-off-hopper.md).

A thread block has a block of query rows of one head and batch entry: a work tile. Its
warpgroups have 64 rows each, and do all the same:

    stage       copies           this warpgroup
    i           have come        s = q k[i]', p = exp(s - m), acc = acc alpha + p v[i]
    i + 1       under way

Queries, sums and probabilities are in registers; a warp reads whole tiles of keys and
values by ldmatrix. First come the edges of the range of keys, where pairs may be
masked, then the full blocks (`Range.at`). All have running maxima (`flash2.update`).

Shared memory (`Plan.declare`): num_stages times k [block_kv, H] and v [block_kv, Hv].
cp.async copies whole tiles, and threads store output from their registers: arrays are
padded to whole blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Named
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import by_name, memory, plan, support
from pallas_kernels.mosaic_gpu.ampere import products
from pallas_kernels.mosaic_gpu.ampere.heads import RowHeads
from pallas_kernels.mosaic_gpu.ampere.stages import AsyncCopies, TmaCopies
from pallas_kernels.mosaic_gpu.barriers import NamedBarriers
from pallas_kernels.mosaic_gpu.forward_program import KeyBlocks, Program
from pallas_kernels.mosaic_gpu.pipeline import Pipeline
from pallas_kernels.mosaic_gpu.shared_memory import Tile
from pallas_kernels.program import Where, query_rows

ROWS = 64  # of a warpgroup
_FIRST_WITH_TMA = 90  # compute capability times ten


def has_tma() -> bool:
    """Whether TMA copies keys and values, and not cp.async."""
    return device.capability() >= _FIRST_WITH_TMA


class KeysAndValues(NamedTuple):
    """Tiles of a block of keys, or what they are copied from."""

    k: Any
    v: Any


@dataclasses.dataclass(frozen=True)
class Plan(plan.Plan):
    """The plan of this kernel: a thread block for each work tile, without a producer.

    Attributes:
      row_heads: of keys and of values.
    """

    row_heads: KeysAndValues

    whole_blocks = True

    @classmethod
    def of(
        cls,
        operands: tuple[Named, Named, Named],
        spec: AttentionSpec,
        outputs: tuple[Named, Named],
        launch: Launch,
    ) -> Plan:
        """The plan of a call, whose arguments are those of `forward`."""
        arrays = [*operands, *jax.tree.leaves(spec), *outputs]
        layout = memory.TileGrid.of("forward", arrays, launch)
        q, *keys_and_values = operands
        row_heads = KeysAndValues(*map(RowHeads.of, keys_and_values))
        return cls(launch, layout, launch.blocks.block_q // ROWS, q.dtype, row_heads)

    @property
    def warpgroups(self) -> int:
        return self.consumers

    @property
    def ahead(self) -> int:
        """How many blocks of keys are under way while one is computed."""
        return self.stages - 1

    def declare(self) -> AsyncCopies | TmaCopies:
        """Shared memory of a thread block."""
        return declare(self.launch.blocks, tuple(self.width.values()), self.dtype)


def declare(blocks, heads: tuple[int, ...], dtype) -> AsyncCopies | TmaCopies:
    """Tiles and barriers of keys and values, for head sizes H and Hv."""
    stages, warpgroups = blocks.num_stages, blocks.block_q // ROWS
    shapes = ((stages, blocks.block_kv, width) for width in heads)
    tiles = KeysAndValues(*(Tile(support.tile(x, dtype)) for x in shapes))
    if has_tma():
        return TmaCopies(Pipeline.declare(tiles, stages, readers=warpgroups))
    barrier = NamedBarriers(warpgroups).barrier(warpgroups)
    return AsyncCopies(tiles, stages, barrier)


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
      q, k, v: operands, axes `t h`, `s h`, `s d` among others, those last. No value
        that no query attends is NaN or infinite.
      spec: of `Named` arrays, without axes `t` and `s`.
      outputs: shape structs of o (axes `t d` among others) and lse (`t` last).
      launch: block sizes and the rest.
    """
    plan = Plan.of((q, k, v), spec, outputs, launch)
    rows = plan.row_heads.k.array(k), plan.row_heads.v.array(v)
    found = plan.call(
        _kernel,
        (q, *rows, spec),
        outputs,
        refs=plan.declare(),
        name="flash2_forward_mma",
    )
    return tuple(x.value for x in found)


def _kernel(plan: Plan, inputs, outputs, stages) -> None:
    (q, k, v, spec), (o, lse) = inputs, outputs
    warpgroup = lax.axis_index("warpgroup")
    attend(Program(plan, q, k, v, spec, o, lse, stages, warpgroup))


def attend(program: Program) -> None:
    """The attention of this warpgroup's rows."""
    plan = program.plan
    tile = program.tile_of(plan.layout)
    keys = program.key_blocks(tile)
    copy = functools.partial(fill, program, tile.where, keys)
    # There is a block at least: the stages are filled before the loop.
    for i in range(plan.ahead):
        pl.when(i < keys.count)(functools.partial(copy, jnp.int32(i)))
    start = tile.start + program.warpgroup * ROWS
    spec, where = query_rows(tile.spec, tile.where, plan.layout, start, ROWS)
    queries = products.load_left(program.q.at(where))
    d = plan.width["d"]
    state = flash2.init([ROWS], d)._replace(acc=products.zeros(ROWS, d))
    edges = keys.edges
    for masked, lo, hi in ((True, jnp.int32(0), edges), (False, edges, keys.count)):
        one = functools.partial(step, program, spec, where, keys, copy, queries, masked)
        state = lax.fori_loop(lo, hi, one, state)
    store(program, spec, where, state)


def fill(program: Program, where: Where, keys: KeyBlocks, i) -> None:
    """Issues the copies of block number i of keys and values."""
    where, of = {**where, "s": keys.at(i)}, program.plan.row_heads
    k, v = program.k.at(of.k.at(where)), program.v.at(of.v.at(where))
    program.refs.fill(i, KeysAndValues(k, v))


def step(
    program: Program,
    spec: AttentionSpec,
    where: Where,
    keys: KeyBlocks,
    copy: Callable,
    queries: jax.Array,
    masked: bool,
    i,
    state: flash2.State,
) -> flash2.State:
    """Takes in block number i of keys and values.

    Args:
      spec: with what these rows have loaded.
      where: these rows.
      keys: the blocks of keys.
      copy: `fill` of a block.
      queries: of these rows, in registers.
      masked: whether pairs of the block may be masked.
      state: what the rows carry so far.
    """
    plan, stages = program.plan, program.refs
    stages.wait(i, keys.count)
    following = i + plan.ahead
    pl.when(following < keys.count)(lambda: copy(following))
    tiles = stages.at(i)
    right = products.load_right(support.transposed(tiles.k.ref))
    qk = products.multiply(products.zeros(ROWS, plan.block_kv), queries, right)
    found = plan.pairs(spec, {**where, "s": keys.at(i)}, masked)
    scores = by_name.scores_of(found, qk, plan.dtype)
    m, alpha, p = flash2.update(state.m, scores, plan.arithmetic)
    along = plan.along(alpha, plan.width["d"])
    left = products.as_left(p.astype(plan.dtype))
    acc = products.multiply(state.acc * along, left, products.load_right(tiles.v.ref))
    stages.release(i)
    return flash2.State(m, flash2.add_row_sums(state.l * alpha, p), acc)


def store(program: Program, spec, where, state: flash2.State) -> None:
    """Output and log-sum-exps of this warpgroup's rows."""
    launch, dtype = program.plan.launch, program.o.dtype
    output, log = by_name.finish(state, spec, launch, dtype)
    plgpu.store(program.o.at(where), output, optimized=False)
    plgpu.store(program.lse.at(where), log, optimized=False)
