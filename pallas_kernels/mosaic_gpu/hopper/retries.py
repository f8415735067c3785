"""What the forward kernels for Hopper do alike: passes over work tiles, and results.

A pass goes through work tiles of a thread block (`tile_scheduler`), the first one
through all of them. A warpgroup notes which of its rows are unfinished, and stores
nothing of them. A retry, which is another pass, goes through these tiles again.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layout import Rows
from pallas_kernels.mosaic_gpu import memory
from pallas_kernels.mosaic_gpu.forward_program import TilesProgram, WorkTile
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.plan import wait_until_stored
from pallas_kernels.mosaic_gpu.tile_scheduler import DynamicPass, TileSet, tiles_of
from pallas_kernels.program import Where


@dataclasses.dataclass(frozen=True)
class TilesPass:
    """A pass over work tiles.

    Attributes:
      tiles: of the thread block, those that it goes through.
      is_first: whether it goes through all of them.
      is_final: whether it is the last of the retries.
    """

    tiles: TileSet | DynamicPass
    is_first: jax.Array
    is_final: jax.Array


@dataclasses.dataclass(frozen=True)
class PassesProgram(TilesProgram):
    """One with retries, whose Refs have those of `forward_plan.Refs`."""

    @classmethod
    def scheduler_of(cls, plan, refs, thread_block):
        words, taken = refs.tile_words.ref, refs.tile_taken
        return tiles_of(plan.schedule, thread_block, words, taken)

    def passes(self, visit: Callable, state, hand_in: Callable | None = None):
        """Runs `state = visit(pass, slot, state)` for the work tiles of all passes.

        They are one loop, so that what visits a work tile is there once.

        Args:
          hand_in: of a consumer, `hand_in(retry, state)` before each retry.
        """
        retries = self.plan.storage.retries

        def before(number, state):
            """Hands in, waits for the others, and gives the slots of a retry."""
            if hand_in is not None:
                hand_in(number - 1, state)
            plgpu.barrier_wait(self.refs.pass_done.at[number - 1])
            consumers, words = self.plan.consumers, self.refs.tile_words.ref
            mine = (words[(number - 1) * consumers + i] for i in range(consumers))
            return functools.reduce(operator.or_, mine)

        def run(number, state):
            is_first, is_final = number == 0, (number == retries) & (number > 0)
            slots = lax.cond(
                is_first, lambda: jnp.int32(0), functools.partial(before, number, state)
            )
            tiles = self.scheduler.of_pass(is_first, slots)
            this = TilesPass(tiles, is_first, is_final)
            return tiles.fold(functools.partial(visit, this), state)

        return lax.fori_loop(jnp.int32(0), jnp.int32(1 + retries), run, state)


def run_passes(program: PassesProgram, attend: Callable, *state: jax.Array) -> None:
    """A consumer's way through the work tiles of all passes.

    Args:
      attend: computes a work tile, `state = attend(pass, slot, state)`.
      state: how many blocks of keys the pipelines have had, the set of tiles that this
        warpgroup has not finished, and more.
    """
    plan, scheduler, refs = program.plan, program.scheduler, program.refs
    me = program.warpgroup

    def hand_in(retry, state):
        refs.tile_words.ref[retry * plan.consumers + me] = state[1]
        plgpu.barrier_arrive(refs.pass_done.at[retry])

    plan.ping_pong.start(me)
    scheduler.wait_for(0)
    program.passes(attend, state, hand_in)
    wait_until_stored()


def fetch_queries(program: PassesProgram, tile: WorkTile) -> None:
    """Loads this warpgroup's queries of a work tile."""
    me = program.warpgroup
    rows = {**tile.where, "t": Rows(tile.start + me * ROWS, ROWS)}
    # A fence between this warpgroup's accesses to shared memory and those of TMA, then
    # a barrier of the warpgroup: all of its warps have read the previous queries.
    plgpu.commit_smem()
    queries, full = program.refs.q.copied.at[me], program.refs.q_full.at[me]
    plgpu.copy_gmem_to_smem(program.q.at(rows), queries, full)


def store(
    program: PassesProgram,
    where: Where,
    output: jax.Array,
    of_rows: Sequence[tuple[Any, jax.Array, memory.View]],
) -> None:
    """Stores the results of this warpgroup's rows, after `wait_until_stored`.

    Args:
      where: head and batch entry, and which rows these are.
      output: [ROWS, Hv], in the type of the result.
      of_rows: a number for each row, with its place in shared memory, and the result.
    """
    plan, refs, me = program.plan, program.refs, program.warpgroup
    columns, d = plan.output_columns, plan.width["d"]
    for at, numbers, _ in of_rows:
        at[...] = numbers
    tile = (refs.q if refs.o is None else refs.o).at(me)
    for first in range(0, d, columns or d):
        part: Any = output
        to: Any = program.o.at(where)
        if 0 < columns < d:
            some = slice(first, first + columns)
            part, to = part[:, some], to.at[:, some]
            wait_until_stored()
        tile.ref[...] = part
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.copied, to)
    for at, _, view in of_rows:
        plgpu.copy_smem_to_gmem(at, view.at(where))
