"""The plan of a forward kernel by tcgen05, made before the kernel is traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.configs import Blocks
from pallas_kernels.core.axes import Named
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import support
from pallas_kernels.mosaic_gpu.forward_program import TilesPlan, schedule, tile_grid
from pallas_kernels.mosaic_gpu.pipeline import Pipeline
from pallas_kernels.mosaic_gpu.shared_memory import Tile

ROWS = 128  # of a consumer: all lanes of tensor memory
# Registers of a thread that loads, and of one that computes, by consumers.
REGISTERS = {1: (24, 240), 2: (24, 240)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs:
    """Shared and tensor memory of a thread block.

    Attributes:
      k: keys, [block_kv, H] in each stage.
      v: values, [block_kv, Hv] in each stage.
      q: queries, [ROWS, H] of each consumer.
      o: output, [ROWS, Hv] of each consumer.
      lse: log-sum-exps, [ROWS] of each consumer.
      q_full: a barrier of each consumer, at which its queries arrive.
      scored, summed: barriers of each consumer, at which its products of queries and
        keys arrive, and those of probabilities and values.
      scores: tensor memory: scores, float32 [ROWS, block_kv] of each consumer.
      probabilities: tensor memory: the same in 16 bits.
      sums: tensor memory: sums of values, float32 [ROWS, Hv] of each consumer.
    """

    k: Pipeline
    v: Pipeline
    q: Tile
    o: Tile
    lse: Tile
    q_full: Any
    scored: Any
    summed: Any
    scores: Any
    probabilities: Any
    sums: Any


def declare(
    blocks: Blocks, heads: tuple[int, int], dtype, size: Mapping[str, int]
) -> Refs:
    """Tiles, barriers and tensor memory of a thread block.

    Args:
      heads: H and Hv.
      dtype: of queries, keys, values and output.
      size: of the call's axes, which tiles are copied from and to.
    """
    consumers, stages = blocks.block_q // ROWS, blocks.num_stages
    h, d = heads

    def keys(width: int) -> Pipeline:
        shape = stages, blocks.block_kv, width
        tile = Tile(support.tile(shape, dtype, array=(size["s"], width)))
        return Pipeline.declare(tile, stages, readers=consumers)

    def rows(width: int) -> Tile:
        shape = consumers, ROWS, width
        return Tile(support.tile(shape, dtype, array=(size["t"], width)))

    square = consumers, ROWS, blocks.block_kv
    return Refs(
        k=keys(h),
        v=keys(d),
        q=rows(h),
        o=rows(d),
        lse=Tile(plgpu.SMEM((consumers, ROWS), jnp.float32)),
        q_full=plgpu.Barrier(num_barriers=consumers),
        scored=plgpu.Barrier(num_barriers=consumers, orders_tensor_core=True),
        summed=plgpu.Barrier(num_barriers=consumers, orders_tensor_core=True),
        scores=plgpu.TMEM(square, jnp.float32),
        probabilities=plgpu.TMEM(square, dtype, packed=True),
        sums=plgpu.TMEM((consumers, ROWS, d), jnp.float32),
    )


def columns(blocks: Blocks, value_size: int) -> int:
    """Columns of tensor memory: of scores, of probabilities, and of sums of values."""
    scores = blocks.block_kv + blocks.block_kv // 2
    return blocks.block_q // ROWS * (scores + value_size)


@dataclasses.dataclass(frozen=True)
class Plan(TilesPlan):
    """The plan of this kernel."""

    rows = ROWS
    registers = REGISTERS

    @classmethod
    def of(
        cls,
        operands: tuple[Named, Named, Named],
        spec: AttentionSpec,
        outputs: tuple[Named, Named],
        launch: Launch,
    ) -> Plan:
        """The plan of a call, whose arguments are those of `forward`."""
        layout = tile_grid(operands, spec, outputs, launch)
        consumers, dtype = launch.blocks.block_q // ROWS, operands[0].dtype
        tiles = schedule(layout, uniform_cost=True)
        return cls(launch, layout, consumers, dtype, tiles)

    def declare(self) -> Refs:
        heads = self.width["h"], self.width["d"]
        return declare(self.launch.blocks, heads, self.dtype, self.layout.size)
