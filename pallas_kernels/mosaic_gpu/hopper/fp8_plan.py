"""The plan of the forward kernel in eight bits: which calls, blocks and shared memory.

Values come transposed, [Hv, keys], since products of eight bits read both operands
along the sum. Where there is room (`with_sums`), eight rows follow them, the first of
ones: the product then makes the sums of probabilities, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.backend import Call, Declined, Pass
from pallas_kernels.backend import Plan as PassPlan
from pallas_kernels.configs import Blocks
from pallas_kernels.core.axes import Named
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import measured, memory, shared_memory, support
from pallas_kernels.mosaic_gpu.barriers import NamedBarriers, PingPong
from pallas_kernels.mosaic_gpu.hopper.fp8_bytes import DTYPE
from pallas_kernels.mosaic_gpu.hopper.tuning import REGISTERS, ROWS
from pallas_kernels.mosaic_gpu.pipeline import Pipeline
from pallas_kernels.mosaic_gpu.shared_memory import Tile
from pallas_kernels.mosaic_gpu.tile_scheduler import MOST_TILES, Schedule

HEAD_SIZES = (64, 128, 256)
# Columns of a product, at most.
_MOST_COLUMNS = 256
# The sum of a block of probabilities from which on one may have been cut to it: the
# largest number of `DTYPE`.
LARGEST = float(jnp.finfo(DTYPE).max)


@dataclasses.dataclass(frozen=True)
class ForwardPlan(PassPlan):
    """Of the forward pass: `launch` has the blocks of its kernel."""

    launch: Launch


def plan(call: Call, pass_: Pass) -> ForwardPlan | Declined:
    """The plan of a pass of a call with operands of eight bits (`backend.Backend`)."""
    if pass_ != "forward":
        return Declined("operands of eight bits have no gradients")
    why_not = _unsupported(call)
    if why_not is not None:
        return Declined(why_not)
    chosen = None if call.config is None else call.config.forward
    table = measured.here().numbers.fp8_blocks
    blocks = chosen or Blocks(*table[call.head_sizes[0]])
    why_not = _unfit(blocks, call)
    if why_not is not None:
        return Declined(why_not)
    if odd := call.spec.odd_stripe(t=ROWS, s=blocks.block_kv):
        return Declined(f"blocks would lie in several stripes of {odd} rows")
    return ForwardPlan(Launch(blocks, None, support.ARITHMETIC, False, 1))


def _unsupported(call: Call) -> str | None:
    """Why no kernel in eight bits makes a call, or None."""
    if call.dtype != DTYPE:
        return f"its FP8 kernel takes {jnp.dtype(DTYPE).name}, not {call.dtype.name}"
    h, d = call.head_sizes
    if h != d or h not in HEAD_SIZES:
        known = ", ".join(map(str, HEAD_SIZES))
        return f"head sizes {h} and {d} are not both one of {known}, as with FP8"
    if call.config is not None and call.config.splits not in (None, 1):
        return (
            f"Config(splits={call.config.splits}): the forward's programs are not "
            "divided"
        )
    return _unknown_feature(call.spec)


def _unknown_feature(spec: AttentionSpec) -> str | None:
    """What of a call the kernel does not have: it knows masks, and no scores."""
    found = {
        "terms of the score": spec.score.terms,
        "sinks": spec.sink is not None,
        "dropout": spec.dropout is not None,
        "largest scores": spec.gives_largest,
        "parts of rows": spec.is_part,
        "masks of pairs": spec.has_mask_of_pairs or spec.lists_blocks,
        "functions of pairs": spec.operations - support.OPERATIONS,
    }
    lacking = [name for name, is_there in found.items() if is_there]
    return f"its FP8 kernel lacks {', '.join(lacking)}" if lacking else None


def _unfit(blocks: Blocks, call: Call) -> str | None:
    """Why the kernel cannot have these blocks, or None."""
    warpgroups, rest = divmod(blocks.block_q, ROWS)
    if rest or warpgroups not in REGISTERS:
        return f"block_q={blocks.block_q} is not 64, 128 or 192"
    if blocks.num_warps != 4 * warpgroups:
        return f"num_warps={blocks.num_warps} is not 4 for each {ROWS} of block_q"
    if blocks.num_stages < warpgroups:
        return f"num_stages={blocks.num_stages} is less than one for each {ROWS} rows"
    if blocks.block_kv not in (128, 256):
        return f"block_kv={blocks.block_kv} is not 128 or 256, as with FP8"
    for name in ("max_registers", "left_in_registers"):
        if getattr(blocks, name):
            return f"{name} is for the Triton kernels"
    storage = Storage.of(blocks, call.head_sizes[0], call.size)
    need, limit = storage.num_bytes, device.shared_memory_limit()
    if need <= limit:
        return None
    kib = -(-need >> 10)
    return f"{blocks} needs {kib} KiB of shared memory and this GPU has {limit >> 10}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs:
    """Shared memory of a thread block.

    Attributes:
      k: keys, [block_kv, H] in each stage.
      v: values, and ones for sums, [Hv + 8 or Hv, block_kv] in each stage.
      q: queries, [ROWS, H] of each computing warpgroup.
      o: output, [ROWS, output columns] of each computing warpgroup.
      lse: log-sum-exps, [ROWS] of each computing warpgroup.
      tile_words: int32: the unfinished tiles of each computing warpgroup, a set of
        slots; then the tiles that a dynamic schedule has given this thread block.
      q_full: a barrier of each computing warpgroup, at which its queries arrive.
      tile_taken: a barrier for each slot, which has a tile from then on; None if the
        schedule is static.
      pass_done: where computing warpgroups arrive after the first pass.
    """

    k: Pipeline
    v: Pipeline
    q: Tile
    o: Tile
    lse: Tile
    tile_words: Tile
    q_full: Any
    tile_taken: Any
    pass_done: Any


@dataclasses.dataclass(frozen=True)
class Storage:
    """What decides which tiles and barriers shared memory holds.

    Attributes:
      blocks: of the kernel.
      head: size of heads.
      output_columns: of a tile of output: all of a head's, or half of them.
      taken_tiles: how many work tiles a thread block may take; 0 of a static schedule.
      size: of the call's axes.
    """

    blocks: Blocks
    head: int
    output_columns: int
    taken_tiles: int
    size: Mapping[str, int]

    @classmethod
    def of(cls, blocks: Blocks, head: int, size: Mapping[str, int]) -> Storage:
        """With the most barriers that a schedule may have."""
        return cls(blocks, head, min(head, 128), MOST_TILES, size)

    @property
    def consumers(self) -> int:
        """How many warpgroups compute."""
        return self.blocks.block_q // ROWS

    @property
    def value_rows(self) -> int:
        """Rows of a tile of values, those for sums among them."""
        return self.head + (support.COLUMNS if with_sums(self.head) else 0)

    def declare(self) -> Refs:
        """Tiles and barriers of a thread block."""
        consumers, stages = self.consumers, self.blocks.num_stages
        keys, h, taken = self.blocks.block_kv, self.head, self.taken_tiles

        def pipeline(tile) -> Pipeline:
            return Pipeline.declare(Tile(tile), stages, readers=consumers)

        queries, of_keys = (self.size[a] for a in ("t", "s"))
        values = support.tile((stages, self.value_rows, keys), DTYPE)
        columns = self.output_columns
        output = support.tile(
            (consumers, ROWS, columns), jnp.bfloat16, columns, (queries, h)
        )
        return Refs(
            k=pipeline(support.tile((stages, keys, h), DTYPE, array=(of_keys, h))),
            v=pipeline(values),
            q=Tile(support.tile((consumers, ROWS, h), DTYPE, array=(queries, h))),
            o=Tile(output),
            lse=Tile(plgpu.SMEM((consumers, ROWS), jnp.float32)),
            tile_words=Tile(plgpu.SMEM((consumers + taken,), jnp.int32)),
            q_full=plgpu.Barrier(num_barriers=consumers),
            tile_taken=plgpu.Barrier(num_barriers=taken) if taken else None,
            pass_done=plgpu.Barrier(num_barriers=1, num_arrivals=consumers),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory that the kernel allocates."""
        return shared_memory.num_bytes(self.declare())


def with_sums(head: int) -> bool:
    """Whether the product with values has columns for sums of probabilities."""
    return head + support.COLUMNS <= _MOST_COLUMNS


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is chosen for a call before its kernel is traced.

    Attributes:
      launch: blocks and arithmetic.
      layout: of the grid of work tiles.
      schedule: which thread blocks compute which work tiles.
      storage: what shared memory holds.
      running: how many blocks after the edges have a running maximum in the first pass.
      ping_pong: turns of the computing warpgroups.
    """

    launch: Launch
    layout: memory.TileGrid
    schedule: Schedule
    storage: Storage
    running: int
    ping_pong: PingPong

    @classmethod
    def of(
        cls,
        operands: tuple[Named, Named, Named],
        spec: AttentionSpec,
        outputs: tuple[Named, ...],
        launch: Launch,
    ) -> Plan:
        """The plan of a call.

        Args:
          operands: queries, keys and values as the caller gave them.
          spec: of `Named`.
          outputs: shape structs.
          launch: blocks and arithmetic.
        """
        arrays = [*operands, *jax.tree.leaves(spec), *outputs]
        layout = memory.TileGrid.of(
            "forward", arrays, launch, by_block=spec.traits.cost_grows
        )
        schedule = Schedule.of(
            layout.tiles,
            device.multiprocessors(),
            uniform_cost=spec.cost_is_monotone,
        )
        storage = Storage.of(launch.blocks, layout.size["h"], layout.size)
        taken = 0 if schedule.is_static else schedule.most_tiles
        storage = dataclasses.replace(storage, taken_tiles=taken)
        barriers = NamedBarriers(storage.consumers + 1)
        # In an edge a row may have few keys, whose maximum says little of the others.
        running = int(bool(spec.masks))
        ping_pong = barriers.ping_pong(storage.consumers)
        return cls(launch, layout, schedule, storage, running, ping_pong)

    @property
    def block_kv(self) -> int:
        return self.launch.blocks.block_kv

    @property
    def consumers(self) -> int:
        """How many warpgroups compute. One more loads: the producer."""
        return self.storage.consumers

    @property
    def head(self) -> int:
        """The size of heads."""
        return self.storage.head

    @property
    def sums(self) -> bool:
        """Whether the product with values makes the sums of probabilities."""
        return with_sums(self.head)
