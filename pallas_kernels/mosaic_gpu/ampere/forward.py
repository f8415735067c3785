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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Named
from pallas_kernels.core.lists import Visited
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import by_name, memory, support
from pallas_kernels.mosaic_gpu.ampere import products
from pallas_kernels.mosaic_gpu.ampere.heads import RowHeads
from pallas_kernels.mosaic_gpu.ampere.stages import AsyncCopies, TmaCopies
from pallas_kernels.mosaic_gpu.barriers import NamedBarriers
from pallas_kernels.mosaic_gpu.pipeline import Pipeline
from pallas_kernels.mosaic_gpu.shared_memory import Tile
from pallas_kernels.program import Where, key_blocks, pairs, query_rows, query_start

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
class Plan:
    """What is chosen for a call before its kernel is traced.

    Attributes:
      launch: blocks and arithmetic.
      layout: of the grid: a thread block for each work tile.
      heads: head sizes, by axis.
      dtype: of queries, keys and values.
      row_heads: of keys and of values.
    """

    launch: Launch
    layout: memory.TileGrid
    heads: dict[str, int]
    dtype: Any
    row_heads: KeysAndValues

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
        heads = {name: layout.size[name] for name in ("h", "d")}
        q, *keys_and_values = operands
        row_heads = KeysAndValues(*map(RowHeads.of, keys_and_values))
        return cls(launch, layout, heads, q.dtype, row_heads)

    @property
    def warpgroups(self) -> int:
        return self.launch.blocks.block_q // ROWS

    @property
    def block_kv(self) -> int:
        return self.launch.blocks.block_kv

    @property
    def ahead(self) -> int:
        """How many blocks of keys are under way while one is computed."""
        return self.launch.blocks.num_stages - 1

    def declare(self) -> AsyncCopies | TmaCopies:
        """Shared memory of a thread block."""
        return declare(self.launch.blocks, tuple(self.heads.values()), self.dtype)


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

    def kernel(inputs, outputs, stages):
        (q, k, v, spec), (o, lse) = inputs, outputs
        warpgroup = lax.axis_index("warpgroup")
        attend(Program(plan, q, k, v, spec, o, lse, stages, warpgroup))

    found = memory.call(
        kernel,
        plan.layout,
        (q, *rows, spec),
        outputs,
        block={"t": ROWS, "s": plan.block_kv},
        scratch=plan.declare(),
        warpgroups=plan.warpgroups,
        name="flash2_forward_mma",
        tiles=plan.heads,
        whole_blocks=True,
    )
    return tuple(x.value for x in found)


@dataclasses.dataclass(frozen=True)
class Program:
    """A plan with what its kernel is given, in one warpgroup of a thread block.

    Attributes:
      plan: of the call.
      q, k, v, o, lse: views of global memory.
      spec: of views, of which nothing is loaded yet.
      stages: shared memory.
      warpgroup: the number of this one.
    """

    plan: Plan
    q: memory.View
    k: memory.View
    v: memory.View
    spec: AttentionSpec
    o: memory.View
    lse: memory.View
    stages: AsyncCopies | TmaCopies
    warpgroup: jax.Array


class Keys(NamedTuple):
    """The blocks of keys of a work tile.

    Attributes:
      where: head and batch entry.
      blocks: their range, with one block at least.
      count: how many there are.
    """

    where: Where
    blocks: Visited
    count: jax.Array

    def at(self, i, size: int) -> Where:
        """Where block number i of `size` keys lies."""
        return {**self.where, "s": Rows(self.blocks.at(i)[1] * size, size)}


def attend(program: Program) -> None:
    """The attention of this warpgroup's rows."""
    plan = program.plan
    spec, where, start = query_start(program.spec, plan.layout)
    # At least one block: the stages are filled before the loop.
    blocks = key_blocks(spec, where, plan.layout, start).with_a_block()
    keys = Keys(where, blocks, jnp.int32(blocks.count))
    for i in range(plan.ahead):
        pl.when(i < keys.count)(functools.partial(fill, program, keys, jnp.int32(i)))
    start += program.warpgroup * ROWS
    spec, where = query_rows(spec, where, plan.layout, start, ROWS)
    queries = products.load_left(program.q.at(where))
    d = plan.heads["d"]
    state = flash2.init([ROWS], d)._replace(acc=products.zeros(ROWS, d))
    edges = jnp.int32(blocks.edges)
    for masked, lo, hi in ((True, jnp.int32(0), edges), (False, edges, keys.count)):
        one = functools.partial(step, program, spec, where, keys, queries, masked)
        state = lax.fori_loop(lo, hi, one, state)
    store(program, spec, where, state)


def fill(program: Program, keys: Keys, i) -> None:
    """Issues the copies of block number i of keys and values."""
    where, of = keys.at(i, program.plan.block_kv), program.plan.row_heads
    k, v = program.k.at(of.k.at(where)), program.v.at(of.v.at(where))
    program.stages.fill(i, KeysAndValues(k, v))


def step(
    program: Program, spec, where, keys: Keys, queries, masked: bool, i, state
) -> flash2.State:
    """Takes in block number i of keys and values.

    Args:
      spec: with what these rows have loaded.
      where: these rows.
      queries: of these rows, in registers.
      masked: whether pairs of the block may be masked.
      state: what the rows carry so far.
    """
    plan, stages = program.plan, program.stages
    stages.wait(i, keys.count)
    following = i + plan.ahead
    pl.when(following < keys.count)(lambda: fill(program, keys, following))
    tiles = stages.at(i)
    right = products.load_right(support.transposed(tiles.k.ref))
    qk = products.multiply(products.zeros(ROWS, plan.block_kv), queries, right)
    block = {**where, **keys.at(i, plan.block_kv)}
    found = pairs(spec, block, ("t", "s"), masked, plan.launch)
    scores = by_name.scores_of(found, qk, plan.dtype)
    m, alpha, p = flash2.update(state.m, scores, plan.launch.arithmetic)
    along = plan.launch.arithmetic.along(alpha, -2, (ROWS, plan.heads["d"]))
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
