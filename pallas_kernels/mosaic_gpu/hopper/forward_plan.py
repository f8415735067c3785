"""The plan of a forward kernel, which is made once, before the kernel is traced.

`Plan` holds all choices about a call. `Storage` is the part of it that decides what
shared memory holds: `Storage.declare` is the only list of its tiles and barriers
(`Refs`). Their bytes are the sum over that list, and whether a configuration fits is
asked of it. Named barriers take no shared memory: `Plan.of` gives them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, program
from pallas_kernels.configs import Blocks
from pallas_kernels.core.axes import Named
from pallas_kernels.core.lists import BlockList, Visited
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import memory, prefetch, shared_memory, support
from pallas_kernels.mosaic_gpu.barriers import NamedBarriers, PingPong
from pallas_kernels.mosaic_gpu.forward_program import TilesPlan, schedule, tile_grid
from pallas_kernels.mosaic_gpu.hopper import tuning
from pallas_kernels.mosaic_gpu.hopper.tuning import REGISTERS, ROWS
from pallas_kernels.mosaic_gpu.pipeline import Pipeline
from pallas_kernels.mosaic_gpu.shared_memory import Tile
from pallas_kernels.mosaic_gpu.tile_scheduler import MOST_TILES

# Most passes over work tiles after the first one.
MOST_RETRIES = 2
# A group of barriers has no more.
_MOST_STAGES = 32
# Blocks of queries for which it is asked, a tenth of a millisecond each, how many edges
# they have.
_MOST_LOOKED_AT = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs:
    """Shared memory of a thread block: the order of the fields is that of addresses.

    The order is kept so that compiled kernels stay the same, byte for byte.

    Attributes:
      k: keys, [block_kv, H] in each stage.
      lse: log-sum-exps, [ROWS] of each computing warpgroup; then the largest scores,
        likewise, if they are a result.
      tile_words: int32. First come the tiles that are unfinished before each retry, a
        set of slots from each computing warpgroup. Then come the tiles that a dynamic
        schedule has given this thread block, one for each slot.
      o: output, [ROWS, output columns] of each computing warpgroup; None if output is
        written over the queries.
      pair_values: values with one element for each pair, [ROWS, block_kv] of each
        computing warpgroup; None if TMA brings none. A stage is a warpgroup's.
      q: queries, [ROWS, H] of each computing warpgroup.
      q_full: a barrier of each computing warpgroup, at which its queries arrive.
      tile_taken: a barrier for each slot, which has a tile from then on; None if the
        schedule is static.
      v: values, [block_kv, Hv] in each stage.
      values_came: a barrier at which values arrive in a retry, before those of
        unattended keys become zeros; None if there are no such keys.
      pass_done: a barrier for each retry, at which computing warpgroups arrive when
        they are through the pass before it.
    """

    k: Pipeline
    lse: Tile
    tile_words: Tile
    o: Tile | None
    pair_values: Pipeline | None
    q: Tile
    q_full: Any
    tile_taken: Any
    v: Pipeline
    values_came: Any
    pass_done: Any


@dataclasses.dataclass(frozen=True)
class Storage:
    """What decides which tiles and barriers shared memory holds.

    Whether blocks fit is asked before the schedule and the number of retries are known.
    So `taken_tiles`, `retries` and `clears` are by default those that take the most
    barriers, of 8 bytes: one for each of 31 slots, one for the second retry, and one
    for values that are cleared.

    Attributes:
      blocks: of the kernel.
      heads: widths of tiles of heads, of keys and of values.
      dtype: of queries, keys and values.
      output_dtype: of the output.
      output_columns: columns of the output's tile; 0 if there is none.
      pair_values: dtype of values of pairs that come by TMA, or None.
      retries: how many passes may come after the first one.
      clears: whether values of keys that no query attends become zeros in them.
      taken_tiles: how many work tiles a thread block may take; 0 of a static schedule.
      largest: whether the largest scores are a result.
      size: sizes of the call's axes, which tiles are copied from and to. They decide
        the forms of tiles, and not how many bytes these take.
    """

    blocks: Blocks
    heads: tuple[int, int]
    dtype: Any
    output_dtype: Any
    output_columns: int = 0
    pair_values: Any = None
    retries: int = MOST_RETRIES
    clears: bool = True
    taken_tiles: int = MOST_TILES
    largest: bool = False
    size: Mapping[str, int] | None = None

    @property
    def consumers(self) -> int:
        """How many warpgroups compute."""
        return self.blocks.block_q // ROWS

    def declare(self) -> Refs:
        """Tiles and barriers of a thread block."""
        consumers = self.consumers
        h, d = self.heads
        size = self.size or {"t": 0, "s": 0, "h": h, "d": d}

        def key_pipeline(width: int, head: str) -> Pipeline:
            shape = self.blocks.num_stages, self.blocks.block_kv, width
            tile = support.tile(shape, self.dtype, array=(size["s"], size[head]))
            return self.pipeline(Tile(tile))

        queries = size["t"], size["h"]
        taken, retries = self.taken_tiles, max(self.retries, 1)
        words = retries * consumers + taken
        of_rows = consumers * (1 + self.largest)
        return Refs(
            k=key_pipeline(h, "h"),
            lse=Tile(plgpu.SMEM((of_rows, ROWS), jnp.float32)),
            tile_words=Tile(plgpu.SMEM((words,), jnp.int32)),
            o=self._output_tile(size),
            pair_values=self._pair_pipeline(),
            q=Tile(support.tile((consumers, ROWS, h), self.dtype, array=queries)),
            q_full=plgpu.Barrier(num_barriers=consumers),
            tile_taken=plgpu.Barrier(num_barriers=taken) if taken else None,
            v=key_pipeline(d, "d"),
            values_came=plgpu.Barrier() if self.clears else None,
            pass_done=plgpu.Barrier(num_barriers=retries, num_arrivals=consumers),
        )

    def pipeline(self, tiles: Tile) -> Pipeline:
        """Of tiles of keys or values, which all computing warpgroups read."""
        return Pipeline.declare(tiles, self.blocks.num_stages, readers=self.consumers)

    def _output_tile(self, size: Mapping[str, int]) -> Tile | None:
        columns, dtype = self.output_columns, jnp.dtype(self.output_dtype)
        if not columns:
            return None
        # Parts of float32 rows divide the padded array, which may be narrower.
        row = memory.head_elements(size["d"]) if dtype.itemsize > 2 else columns
        shape = self.consumers, ROWS, columns
        return Tile(support.tile(shape, dtype, row, (size["t"], size["d"])))

    def _pair_pipeline(self) -> Pipeline | None:
        if self.pair_values is None:
            return None
        shape = self.consumers, ROWS, self.blocks.block_kv
        tile = Tile(support.tile(shape, self.pair_values))
        return Pipeline.declare(tile, self.consumers, readers=1)

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory that the kernel allocates."""
        return shared_memory.num_bytes(self.declare())

    @property
    def fits(self) -> bool:
        return self.num_bytes <= device.shared_memory_limit()

    def with_output_tile(self, *, halves: bool = False) -> Storage:
        """The same with a tile of its own for output, if that fits, or must be.

        With such a tile the next queries come while output is computed and stored. It
        must be where output and queries differ in size.

        Args:
          halves: whether the tile may have half of the columns, if no more fit.
        """
        h, d = self.heads
        whole = dataclasses.replace(self, output_columns=d)
        if h != d or jnp.dtype(self.output_dtype).itemsize > 2 or whole.fits:
            return whole
        half = dataclasses.replace(self, output_columns=d // 2)
        if halves and half.output_columns % 64 == 0 and half.fits:
            return half
        return dataclasses.replace(self, output_columns=0)

    def fits_with_pair_values(self, dtype) -> bool:
        """Whether there is room for blocks of values with an element for each pair.

        With one stage there is none, since it would be a deadlock: the producer loads
        the values of a block before its pairs, and waits until the previous values have
        been used, which is after these pairs have been.
        """
        pairs = dataclasses.replace(self.with_output_tile(), pair_values=dtype)
        return self.blocks.num_stages > 1 and pairs.fits


def unfit(blocks: Blocks, heads: tuple[int, int], output_dtype) -> str | None:
    """Why the forward kernel cannot have these blocks, or None.

    Args:
      blocks: of a caller's `Config`, or chosen.
      heads: widths of tiles of heads, of keys and of values, which have two bytes an
        element.
      output_dtype: of the output.
    """
    if why_not := unfit_rows(blocks):
        return why_not
    if blocks.block_kv not in (64, 128, 192, 256):
        return f"block_kv={blocks.block_kv} is not 64, 128, 192 or 256"
    storage = Storage(blocks, heads, jnp.bfloat16, output_dtype).with_output_tile()
    return shared_memory.unfit(blocks, storage.declare())


def unfit_rows(blocks: Blocks) -> str | None:
    """Why no kernel with passes can have these warpgroups and stages, or None."""
    warpgroups, rest = divmod(blocks.block_q, ROWS)
    if rest or warpgroups not in REGISTERS:
        return f"block_q={blocks.block_q} is not 64, 128 or 192"
    each = f"each {ROWS} rows of block_q={blocks.block_q}"
    if blocks.num_warps != 4 * warpgroups:
        return f"num_warps={blocks.num_warps} is not 4 for {each}"
    if blocks.num_stages < warpgroups:
        return f"num_stages={blocks.num_stages} is less than one for {each}"
    if blocks.num_stages > _MOST_STAGES:
        return f"num_stages={blocks.num_stages} is more than {_MOST_STAGES}"
    return None


@dataclasses.dataclass(frozen=True)
class PassesPlan(TilesPlan):
    """The plan of a kernel with passes over work tiles (`retries`).

    Attributes:
      storage: what shared memory holds.
      ping_pong: turns of the computing warpgroups.
      awaits_keys_early: whether a step awaits the next keys before the last product
        (`RowsLoop.wait_for_next`).
    """

    storage: Storage
    ping_pong: PingPong
    awaits_keys_early: bool

    registers = REGISTERS

    @property
    def output_columns(self) -> int:
        return self.storage.output_columns

    @property
    def width(self) -> dict[str, int]:
        return dict(zip("hd", self.storage.heads, strict=True))


@dataclasses.dataclass(frozen=True)
class Plan(PassesPlan):
    """What is chosen for a call before its kernel is traced.

    A block of keys is taken with a running maximum (`flash2.update`), or with a fixed
    one, as in `flash2.accumulate`: see `forward`.

    Attributes:
      all_running: 1 if every block is taken with a running maximum in the first pass,
        else 0.
      one_running: whether only the first block has a running maximum, in the first pass
        and in the first of two retries.
      one_edge: whether every work tile is known to have one edge (`KeyLoop`).
      drops_keys: whether there may be keys that no query attends.
      loads_first: whether operands of keys or pairs are loaded from global memory while
        the product of queries and keys is made.
      finds_level: whether a step asks whether its block is level (`Pairs.level`), if
        none of its pairs may be masked.
    """

    all_running: int
    one_running: bool
    one_edge: bool
    drops_keys: bool
    loads_first: bool
    finds_level: bool

    @classmethod
    def of(
        cls,
        operands: tuple[Named, Named, Named],
        spec: AttentionSpec,
        outputs: tuple[Named, ...],
        launch: Launch,
    ) -> Plan:
        """The plan of a call, whose arguments are those of `forward`."""
        layout = tile_grid(operands, spec, outputs, launch)
        # In ring attention a collective occupies some multiprocessors. Thread blocks
        # that start late must find their tiles taken.
        uniform_cost = spec.cost_is_monotone and not spec.is_part
        tiles = schedule(layout, uniform_cost=uniform_cost)
        width = memory.forward_tiles(layout.size)
        all_running, drops_keys = int(spec.maximum_may_grow), spec.drops_keys
        dtype = operands[2].dtype
        storage = _storage(spec, layout, (dtype, outputs[0].dtype), launch.blocks)
        storage = dataclasses.replace(
            storage,
            retries=drops_keys + 1 - all_running,
            clears=drops_keys,
            taken_tiles=tiles.taken_tiles,
        )
        has_list = isinstance(spec.table, BlockList)
        may_drop_pairs = spec.has_mask_of_pairs or has_list
        of_keys = sum("s" in x.axes for x in jax.tree.leaves(spec))
        if has_list and of_keys > 1:  # registers do not hold that many meanwhile
            of_keys = 0
        finds_level = tuning.finds_level(width, spec, launch.blocks)
        # Registers do not hold both tables and products of three warpgroups.
        of_keys += spec.score.reads_distances and not finds_level
        # All warpgroups of the thread block: the consumers and the producer.
        barriers = NamedBarriers(storage.consumers + 1)
        return cls(
            launch,
            layout,
            storage.consumers,
            dtype,
            tiles,
            storage,
            barriers.ping_pong(storage.consumers),
            tuning.awaits_keys_early(width, spec, launch.blocks),
            all_running,
            # Where masks may drop some pairs of any block, all of them would have a
            # running maximum.
            one_running=may_drop_pairs and not all_running,
            one_edge=have_one_edge(spec, layout) and not all_running,
            drops_keys=drops_keys,
            loads_first=storage.pair_values is None and of_keys > 0,
            finds_level=finds_level,
        )


def have_one_edge(spec: AttentionSpec, layout: memory.TileGrid) -> bool:
    """Whether all blocks of queries are known to have one edge: no data decide it.

    A causal call whose blocks have as many queries as keys is one.
    """
    decided_by = spec.masks, spec.offset, spec.query_rows, spec.key_rows, spec.table
    if jax.tree.leaves(decided_by) or layout.num_blocks["t"] > _MOST_LOOKED_AT:
        return False
    size, rows = layout.size, layout.rows
    starts = range(0, size["t"], rows["t"])
    ends = (min(start + rows["t"], size["t"]) for start in starts)
    spec = program.with_end(spec, layout)
    tiles = (
        spec.kv_blocks(*of_queries, size["s"], rows["s"])
        for of_queries in zip(starts, ends, strict=True)
    )
    return all(edges_first(tile).edges == 1 for tile in tiles)


def edges_first(blocks: Visited) -> Visited:
    """Blocks of keys as a work tile visits them, one of which is an edge at least."""
    # `with_an_edge`: if all blocks are full, one is made an edge.
    # `with_a_block`: if there is no block, there is one now, an edge.
    return blocks.with_an_edge(1).with_a_block()


def _storage(
    spec: AttentionSpec, layout: memory.TileGrid, dtypes: tuple, blocks: Blocks
) -> Storage:
    """What shared memory holds, with barriers and words of any schedule.

    Args:
      dtypes: of the operands and of the output.
    """
    width = memory.forward_tiles(layout.size)
    heads = width["h"], width["d"]
    storage = Storage(
        blocks, heads, *dtypes, largest=spec.gives_largest, size=layout.size
    )
    pair_values = prefetch.pair_values(spec)  # at most one array
    if not storage.fits_with_pair_values(jnp.bfloat16):
        pair_values = []
    storage = storage.with_output_tile(
        halves=not pair_values and layout.size["d"] == heads[1]
    )
    if not pair_values:
        return storage
    (array,) = pair_values
    return dataclasses.replace(storage, pair_values=array.dtype)
