"""The forward kernel for Hopper (Dao 2023, algorithm 1; Shah 2024, FlashAttention-3).

A tile is a block of query rows of one head and batch entry. A program goes through
several, one a round (`rounds`, `schedule.Schedule`; `memory.Layout` for their order).

A program has warpgroups that compute, of 64 query rows each, and one that only loads:
it brings keys and values by TMA into a ring of tiles in shared memory, in the order of
`Range.at`, and runs on into the next round while the last one is computed and stored.
First come the blocks in which pairs may be masked, or one, with `flash2.update`, then
all the others with the maximum as it is (`flash2.accumulate`). A mask with an element
for each pair may mask some pairs of any block: then only the first block has that.
Where a row was not in its range, its warpgroup stores nothing: after the last round,
the program goes through the rounds that are left in another pass, with maxima alone.
Values of padding, or of keys that no query keeps, may be NaN, and 0 times NaN is NaN.
Where such keys may be and a sum is not finite, a pass comes before that one, which puts
zeros in their place.

A step issues the products of the next keys, then those of the last probabilities with
their values, and computes the next probabilities while the second run (Shah 2024,
section 3.2). Warpgroups take turns at this: one computes while another multiplies
(section 3.1).

Shared memory: q [block_q, H], num_stages times k [block_kv, H], v [block_kv, Hv], and o
[block_q, Hv] or half of its columns at a time, where that fits
(`tuning.output_columns`): the next queries then come as soon as the last product has
read these. Else o is written over q. If there is room, numbers of two bytes, one for
each pair, come by TMA too, [block_q, block_kv] at a time.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, program
from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Named
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch, Rows
from pallas_kernels.mosaic_gpu import dropped, early, memory, rounds, support, tuning
from pallas_kernels.mosaic_gpu.ring import Ring
from pallas_kernels.mosaic_gpu.schedule import Schedule, has
from pallas_kernels.mosaic_gpu.tuning import ROWS

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
        "forward", operands, launch, by_block=spec.traits.cost_grows
    )
    # Beside a part, keys of other devices travel, which holds some multiprocessors:
    # programs that start late must find their tiles taken.
    alike = spec.cost_is_monotone and not spec.is_part
    schedule = Schedule.of(layout.tiles, device.multiprocessors(), alike=alike)
    computing, keys = blocks.block_q // ROWS, blocks.block_kv
    width = memory.forward_tiles(layout.size)
    h, d = width["h"], width["d"]
    of_output = outputs[0].dtype
    numbers = early.by_tiles(spec)  # at most one array
    if not tuning.pairs_fit(blocks, (h, d), of_output.itemsize):
        numbers = []
    columns = tuning.output_columns(
        blocks,
        (h, d),
        of_output.itemsize,
        halves=not numbers and layout.size["d"] == d,
    )
    turns = support.Turns(computing, warpgroups=computing + 1)
    # From global memory, what keys or pairs have comes while the products are made.
    loads_early = not numbers and any("s" in x.axes for x in jax.tree.leaves(spec))
    # Where all blocks may have masked pairs, they would all have a running maximum.
    peaks, drops_keys = int(spec.maximum_may_grow), spec.drops_keys
    few_steps = spec.has_mask_of_pairs and not peaks
    more_passes = drops_keys + 1 - peaks
    cleared = 2 * computing + 2  # a named barrier, after those of turns

    def kernel(inputs, outputs, refs):
        q, k, v, all_spec = inputs
        o, lse = outputs
        me, number = lax.axis_index("warpgroup"), lax.axis_index("program")
        ring = Ring(refs, blocks.num_stages)
        own_ring = Ring(refs, computing)  # a tile of pairs for each warpgroup
        own_rounds = rounds.of(schedule, number, refs)

        def tile_of(r):
            """Of round r: the spec with scalars loaded, where it is, its first row."""
            tile = own_rounds.tile(r)
            return program.query_start(all_spec, layout.at_tile(tile))

        def keys_of(tile, has_all_steps):
            spec, where, start = tile
            needed = program.key_blocks(spec, where, layout, start)
            needed = needed.with_an_edge(1).with_a_block().all_edges(has_all_steps)
            return needed, jnp.int32(needed.count)

        def keys_at(where, block):
            return {**where, "s": Rows(block * keys, keys)}

        def rounds_left(number):
            """What warpgroups have left, when all are through pass `number`."""
            plgpu.barrier_wait(refs["walked"].at[number])
            first = number * computing
            each = (refs["numbers of rounds"][first + i] for i in range(computing))
            return functools.reduce(operator.or_, each)

        def more(go, state):
            """`state = go(number, has_all_steps, state)` for all passes but the first.

            In the last one all blocks have a running maximum.
            """
            if more_passes < 2:
                return go(0, 1, state) if more_passes else state
            return lax.fori_loop(0, 2, lambda i, state: go(i, i, state), state)

        @pl.when(me == computing)
        def load():
            plgpu.set_max_registers(tuning.REGISTERS[computing][0], action="decrease")

            def visit(has_all_steps, r, first):
                tile = tile_of(r)
                needed, count = keys_of(tile, has_all_steps)

                @pl.loop(0, count)
                def _(i):
                    here = keys_at(tile[1], needed.at(i)[1])
                    ring.fill(first + i, k=k.at(here))
                    ring.fill(first + i, v=v.at(here))
                    for view in early.by_tiles(all_spec)[: len(numbers)]:
                        for own in range(computing):
                            rows = {"t": Rows(tile[2] + own * ROWS, ROWS)}
                            place = (first + i) * computing + own
                            own_ring.fill(place, pairs=view.at({**here, **rows}))

                return first + count

            def once(r, first):
                first = visit(peaks, r, first)
                own_rounds.take(r + 1)
                return first

            def again(number, has_all_steps, first):
                left = rounds.InSet(schedule, rounds_left(number))
                return left.fold(functools.partial(visit, has_all_steps), first)

            own_rounds.take(0)
            more(again, own_rounds.fold(once, jnp.int32(0)))

        @pl.when(me < computing)
        def compute():
            plgpu.set_max_registers(tuning.REGISTERS[computing][1], action="increase")
            q_tile, q_here = support.copied(refs, "q").at[me], refs["q here"].at[me]
            of_o = "o" if columns else "q"
            lse_tile = refs["lse"].at[me]
            nothing = flash2.init([ROWS], 1)

            def along(x, columns):
                return arithmetic.along(x, -2, (ROWS, columns))

            def fetch_q(r):
                _, where, start = tile_of(r)
                own = {**where, "t": Rows(start + me * ROWS, ROWS)}
                plgpu.commit_smem()  # all of its warps have read the last one
                plgpu.copy_gmem_to_smem(q.at(own), q_tile, q_here)

            def products(i, before=None):
                """Of q and tile i of keys; `before` issues others to run after them."""

                def issue(qk):
                    ring.wait("k", i)
                    turns.wait(me)
                    own = refs["q"].at[support.as_if_varying(me, i)]
                    plgpu.wgmma(qk, own, support.transposed(ring.tile("k", i)))
                    if before is not None:
                        before()
                    turns.pass_on(me)
                    wait_n = 0 if before is None else 1
                    return plgpu.wgmma_accumulator_load(qk, wait_n=wait_n)

                qk = pl.run_scoped(issue, plgpu.ACC((ROWS, keys), _F32))
                ring.release("k", i)
                return qk

            def walk(first, count, edges, steps, pairs, q_read, looked_at, acc):
                """Through the keys: tiles of the ring from number `first` on.

                Args:
                  edges: how many of the `count` blocks may have masked pairs.
                  steps: how many of these have a running maximum.
                  pairs: of whether they may, and the tile's number.
                  q_read: called when no more products read q.
                  looked_at: of a tile's number, at which of its keys; None where values
                    are taken as they are.
                """
                last = first + count - 1

                def add(i, p):
                    if looked_at is None:
                        ring.wait("v", i)
                    plgpu.wgmma(acc, p, ring.tile("v", i))

                def before_products(i):
                    """The values of tile i are ready for `add`."""
                    if looked_at is not None:
                        ring.wait("v", i)
                        tile = ring.tile("v", i)
                        pl.when(me == 0)(lambda: dropped.clear(tile, looked_at(i)))
                        support.named_barrier("sync", jnp.int32(cleared), computing)

                def added(i):
                    plgpu.wgmma_wait(0)
                    ring.release("v", i)

                def scores(masked, i, before=None):
                    """Of a tile, and what makes of probabilities a left operand."""
                    here = pairs(masked, i) if loads_early else None
                    qk = products(i, before)
                    here = pairs(masked, i) if here is None else here
                    left = functools.partial(_left, here, v.dtype)
                    return here.scores_of(qk, q.dtype), left

                def edge(i, state):
                    i = support.unknown(i)
                    m, total, p = state
                    before_products(i - 1)
                    found, left = scores(True, i, lambda: add(i - 1, p))
                    m, alpha, p = flash2.update(m, found, arithmetic)
                    added(i - 1)
                    acc[...] = acc[...] * along(alpha, d)
                    total = flash2.add_row_sums(total * alpha, p)
                    return m, total, left(p)

                def other(masked, shift, i, state):
                    i = support.unknown(i)
                    total, p = state
                    before_products(i - 1)
                    found, left = scores(masked, i, lambda: add(i - 1, p))
                    p = flash2.probabilities(found, along(shift, keys), arithmetic)
                    total = flash2.add_row_sums(total, p)
                    added(i - 1)
                    return total, left(p)

                found, left = scores(True, first)
                m, _, p = flash2.update(nothing.m, found, arithmetic)
                state = m, jnp.sum(p, axis=-1), left(p)
                m, *state = lax.fori_loop(first + 1, first + steps, edge, state)
                state, shift = tuple(state), flash2.finite(m)
                if few_steps:
                    masked = functools.partial(other, True, shift)
                    state = lax.fori_loop(first + steps, first + edges, masked, state)
                full = functools.partial(other, False, shift)
                total, p = lax.fori_loop(first + edges, last + 1, full, state)
                q_read()
                before_products(last)
                add(last, p)
                added(last)
                return flash2.State(m, total, acc[...])

            def visit(chosen, has_all_steps, r, state):
                """One round, of those in `chosen`; the rounds left are in the state."""
                first, left = state
                is_first = chosen is own_rounds
                tile = spec, where, start = tile_of(r)
                needed, count = keys_of(tile, has_all_steps)
                edges, rows = jnp.int32(needed.edges), start + me * ROWS
                steps = 1 + has_all_steps * (edges - 1) if few_steps else edges
                spec, own = program.query_rows(spec, where, layout, rows, ROWS)

                def pairs(masked, i):
                    here = keys_at(own, needed.at(i - first)[1])
                    if not numbers:
                        return program.pairs(spec, here, ("t", "s"), masked, launch)
                    place = i * computing + me
                    own_ring.wait("pairs", place)
                    there = early.in_tile(spec, own_ring.tile("pairs", place))
                    found = program.pairs(there, here, ("t", "s"), masked, launch)
                    own_ring.release("pairs", place, loaded=True)
                    return found

                def looked_at(i):
                    here = keys_at(own, needed.at(i - first)[1])
                    return dropped.looked_at(
                        spec, all_spec.keys, here, layout.size["s"]
                    )

                def fetch_next():
                    if is_first:
                        own_rounds.wait_for(r + 1)
                    pl.when(chosen.has_next(r))(lambda: fetch_q(r + 1))

                pl.when(~chosen.has_last(r))(lambda: fetch_q(r))  # else it was fetched
                plgpu.barrier_wait(q_here)
                q_read = fetch_next if columns else lambda: None
                clears = looked_at if drops_keys and not is_first else None
                through = functools.partial(
                    walk, first, count, edges, steps, pairs, q_read, clears
                )
                state = pl.run_scoped(through, plgpu.ACC((ROWS, d), _F32))
                beyond = rows + support.numbers_along(0, ROWS) >= layout.size["t"]
                in_range = flash2.in_range(state, v.dtype) | beyond
                out = support.anywhere(me, jnp.where(in_range, 0, 1))
                good = (out == 0) | (steps == count)
                if drops_keys and is_first:
                    finite = flash2.has_finite_sums(state) | beyond
                    good &= support.anywhere(me, jnp.where(finite, 0, 1)) == 0
                if is_first:
                    left |= (~good).astype(jnp.int32) << r
                else:
                    good &= has(left, r)
                    left &= ~(good.astype(jnp.int32) << r)

                @pl.when(good)
                def store():
                    result, log = flash2.finish(state, spec.sink, arithmetic)
                    result = (result * spec.dropout_scale).astype(o.dtype)
                    _wait_until_stored()  # of the last round, from the same tiles
                    lse_tile[...] = log
                    for first_column in range(0, d, columns or d):
                        part, there = result, o.at(own)
                        if 0 < columns < d:
                            here = slice(first_column, first_column + columns)
                            part, there = part[:, here], there.at[:, here]
                            _wait_until_stored()
                        refs[of_o].at[me][...] = part
                        plgpu.commit_smem()
                        o_tile = support.copied(refs, of_o).at[me]
                        plgpu.copy_smem_to_gmem(o_tile, there)
                    plgpu.copy_smem_to_gmem(lse_tile, lse.at(own))

                if not columns:
                    _wait_until_stored()
                    fetch_next()
                return first + count, left

            turns.start(me)

            def again(number, has_all_steps, state):
                refs["numbers of rounds"][number * computing + me] = state[1]
                plgpu.barrier_arrive(refs["walked"].at[number])
                left = rounds.InSet(schedule, rounds_left(number))
                return left.fold(functools.partial(visit, left, has_all_steps), state)

            own_rounds.wait_for(0)
            once = functools.partial(visit, own_rounds, peaks)
            more(again, own_rounds.fold(once, (jnp.int32(0), jnp.int32(0))))
            _wait_until_stored()

    found = memory.call(
        kernel,
        layout,
        (q, k, v, spec),
        outputs,
        block={"t": ROWS, "s": keys, **memory.of_tiles(layout.size, width)[1]},
        tiles=width,
        scratch=_shared(
            blocks, layout.size, (h, d), v.dtype, of_output, numbers, columns
        )
        | rounds.shared(schedule, more_passes, computing),
        warpgroups=computing + 1,
        name="flash2_forward",
        programs=schedule.programs,
    )
    return tuple(x.value for x in found)


def _left(pairs: Pairs, dtype, p: jax.Array) -> jax.Array:
    """What meets the values, of probabilities."""
    return pairs.drop(p).astype(dtype)


def _wait_until_stored() -> None:
    """Until the tiles that this warpgroup stores have been read."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _shared(
    blocks,
    size,
    heads: tuple[int, int],
    dtype,
    of_output,
    numbers: list[Named],
    columns: int,
) -> dict[str, Any]:
    """Tiles and barriers of a program, by name."""
    computing, stages = blocks.block_q // ROWS, blocks.num_stages
    h, d = heads
    refs = {
        "q": support.tile((computing, ROWS, h), dtype, array=(size["t"], size["h"])),
        "lse": plgpu.SMEM((computing, ROWS), _F32),
        "q here": plgpu.Barrier(num_barriers=computing),
    }
    for pairs in numbers:
        tile = support.tile((computing, ROWS, blocks.block_kv), pairs.dtype)
        refs |= Ring.shared({"pairs": tile}, computing, readers=1)
    for name, n, head in (("k", h, "h"), ("v", d, "d")):
        shape, array = (stages, blocks.block_kv, n), (size["s"], size[head])
        tiles = {name: support.tile(shape, dtype, array=array)}
        refs |= Ring.shared(tiles, stages, readers=computing)
    if columns:
        array = size["t"], size["d"]
        # Parts of float32 rows divide the padded array, which may be narrower.
        row = memory.head_elements(size["d"]) if of_output.itemsize > 2 else columns
        refs["o"] = support.tile((computing, ROWS, columns), of_output, row, array)
    return refs
