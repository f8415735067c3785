"""The plan, shared memory and thread blocks of `backward`, Hopper's backward kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.axes import Named, sizes
from pallas_kernels.core.visits import Sharing
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import memory, support
from pallas_kernels.mosaic_gpu.hopper import gradients, tuning
from pallas_kernels.mosaic_gpu.hopper.gradients import (
    F32,
    Inputs,
    KeyProgram,
    declare_stages,
)
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.shared_memory import Tile
from pallas_kernels.mosaic_gpu.tiles import KeyGrid

PART = "u"  # the axis of parts of shared blocks


@dataclasses.dataclass(frozen=True)
class Plan(gradients.Plan):
    """The plan of the backward kernel.

    Attributes:
      dq_accumulators: how many arrays dq is the sum of.
      in_float32: whether dk and dv are, which are parts then (`division`).
      drops_keys: whether keys that no query attends to must become zeros.
      overlaps_exponents: whether all exponents of a work tile are computed while the
        product for dp runs (`tuning.overlaps_exponents`).
    """

    dq_accumulators: int
    in_float32: bool
    drops_keys: bool
    overlaps_exponents: bool

    @classmethod
    def of(cls, inputs: Inputs, outputs: Sequence[Named], launch: Launch) -> Plan:
        spec, operands = inputs.spec, inputs.with_outputs(outputs)
        rows = {"t": launch.blocks.block_q, "s": launch.blocks.block_kv}
        options = {
            "blocks_alike": tuning.blocks_alike(spec),
            "sharing": tuning.sharing(spec, sizes([inputs.q, inputs.k]), rows),
        }
        layout = KeyGrid.of("dkv", operands, launch, **options)
        dtype, width = inputs.q.dtype, tuning.head_tiles(layout.size)
        accumulators = 1  # without an order none waits for its turn
        if launch.deterministic:
            accumulators = tuning.dq_accumulators(spec, layout)
        return cls(
            launch,
            layout,
            consumers=launch.blocks.block_kv // ROWS,
            dtype=dtype,
            dq_accumulators=accumulators,
            in_float32=bool(layout.parts) or outputs[1].dtype != dtype,
            drops_keys=spec.drops_keys,
            overlaps_exponents=tuning.overlaps_exponents(width, spec),
        )

    @property
    def pipelines_scores(self) -> bool:
        """Whether the scores of the next work tile are computed during this one.

        There is room for that, in registers and in shared memory, for heads up to 128.
        What the pairs of the next tile have in global memory is then prefetched, too.
        """
        return tuning.pipelines_scores(self.width)

    @property
    def dz_stages(self) -> int:
        return self.stages if self.pipelines_scores else 1

    @property
    def dq_stages(self) -> int:
        """How many blocks of dq may be on their way to global memory."""
        return 2 if self.pipelines_scores else 1

    @property
    def dq_parts(self) -> int:
        """In how many parts a block of dq is added, each in turn by itself.

        Where consumers make rows of it, no part waits for the other consumer's.
        """
        return self.consumers if isinstance(self.dq_part, RowsOfDq) else 1

    @property
    def adder_warps(self) -> int:
        """How many warps of the producer warpgroup add dq to global memory."""
        return max(tuning.adder_warps(self.width), self.dq_parts)

    @property
    def pair_block(self) -> dict[str, int]:
        return {"s": ROWS, "t": self.block_q}

    @property
    def sharing(self) -> Sharing | None:
        """How thread blocks share blocks of keys that have many visits, or None."""
        return self.layout.sharing if isinstance(self.layout, KeyGrid) else None

    @property
    def partial_sums(self) -> list[Named]:
        """Shape structs of dk and dv of the parts of shared blocks but the last one."""
        if self.sharing is None:
            return []
        names = [x for x in self.layout.names if x != "s"]
        shape = *(self.layout.size[x] for x in names), self.sharing.more, self.block_kv
        axes = *names, PART, "s"
        structs = (jax.ShapeDtypeStruct((*shape, self.width[x]), F32) for x in "hd")
        return [Named(x, (*axes, h)) for x, h in zip(structs, "hd", strict=True)]

    @functools.cached_property
    def dq_part(self) -> RowsOfDq | ColumnsOfDq:
        """Which part of a block of dq each consumer makes."""
        if self.block_q == ROWS * self.consumers:
            return RowsOfDq(self.width["h"])
        return ColumnsOfDq(self.block_q, self.width["h"] // self.consumers)


@dataclasses.dataclass(frozen=True)
class RowsOfDq:
    """Each consumer makes all columns of 64 rows of dq."""

    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return ROWS, self.columns

    def operands(self, consumer, dz, k):
        """What of dz, [keys, queries], and of k is multiplied for the part."""
        return dz.at[:, pl.ds(consumer * ROWS, ROWS)], k

    def of(self, consumer, dq):
        """The part in a block of dq."""
        return dq.at[pl.ds(consumer * ROWS, ROWS)]


@dataclasses.dataclass(frozen=True)
class ColumnsOfDq:
    """Each consumer makes all rows of some columns of dq."""

    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def operands(self, consumer, dz, k):
        """As of `RowsOfDq`."""
        return dz, k.at[:, pl.ds(consumer * self.columns, self.columns)]

    def of(self, consumer, dq):
        return dq.at[:, pl.ds(consumer * self.columns, self.columns)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs:
    """Shared memory of a thread block: the order of the fields is that of addresses.

    Attributes:
      delta: [block_q] in each stage.
      do: [block_q, Hv] in each stage.
      do_full, do_empty: barriers of the stages of do and delta (`pipeline.Pipeline`).
      dq: blocks of dq on their way to global memory, [block_q, H] in float32 in each
        stage of dq. Where dk and dv are in float32, they leave from here, too.
      dq_full: a barrier for each part of each stage of dq (`Plan.dq_parts`), at which
        the consumers that make it arrive when it is written.
      dq_empty: likewise, at which the warp that adds it arrives when TMA has read it.
      dz: the gradient of the scores, transposed, [block_kv, block_q] in each stage of
        dz.
      k: [1, block_kv, H].
      keys_full: the barrier at which k and v arrive.
      lse: [block_q] in each stage.
      q: [block_q, H] in each stage.
      q_full, q_empty: barriers of the stages of q and lse.
      v: [1, block_kv, Hv].
    """

    delta: Tile
    do: Tile
    do_full: Any
    do_empty: Any
    dq: Tile
    dq_full: Any
    dq_empty: Any
    dz: Tile
    k: Tile
    keys_full: Any
    lse: Tile
    q: Tile
    q_full: Any
    q_empty: Any
    v: Tile

    @classmethod
    def declare(cls, plan: Plan) -> Refs:
        size, rows, keys = plan.layout.size, plan.block_q, plan.block_kv
        swizzled, consumers = dict(plan.swizzled), plan.consumers
        if not plan.pipelines_scores:  # a consumer makes some columns of dq
            swizzled["h"] = math.gcd(swizzled["h"], plan.width["h"] // consumers)

        def rows_of(head: str, *shape: int, along: str) -> Tile:
            return plan.head_tile(head, *shape, swizzled=swizzled[head], along=along)

        q = rows_of("h", plan.stages, rows, along="t")
        do = rows_of("d", plan.stages, rows, along="t")
        # Parts of dk and dv in float32 pass through dq, too.
        parts = (memory.head_elements(size[x]) for x in "hd")
        dq_swizzled = math.gcd(swizzled["h"], *parts)
        dq_shape = plan.dq_stages, rows, plan.width["h"]
        # Both operands of a product have one swizzle.
        dz = support.tile((plan.dz_stages, keys, rows), plan.dtype, swizzled["h"])
        of_parts = plan.dq_stages * plan.dq_parts
        barriers = functools.partial(plgpu.Barrier, num_barriers=of_parts)
        return cls(
            **declare_stages(plan, q, do),
            do=do,
            dq=Tile(support.tile(dq_shape, F32, dq_swizzled)),
            dq_full=barriers(num_arrivals=consumers // plan.dq_parts),
            dq_empty=barriers(num_arrivals=1),
            dz=Tile(dz),
            k=rows_of("h", 1, keys, along="s"),
            q=q,
            v=rows_of("d", 1, keys, along="s"),
        )


@dataclasses.dataclass(frozen=True)
class Program(KeyProgram):
    """A thread block.

    Attributes:
      semaphores: of all parts of blocks of dq in global memory, each of which counts
        additions.
      shared: of the blocks of keys that may be shared, each of which counts parts.
    """

    plan: Plan
    refs: Refs
    semaphores: Any = None
    shared: Any = None

    @classmethod
    def of(cls, plan: Plan, inputs: Inputs, outputs, refs: Refs) -> Program:
        program = cls.start(plan, inputs, outputs, refs)
        count = program.tiles.all_sums * plan.dq_accumulators * plan.dq_parts
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))
        shared = None
        if plan.sharing is not None:
            count = program.tiles.shared
            shared = pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))
        return dataclasses.replace(program, semaphores=semaphores, shared=shared)

    def dz(self, tile):
        """Where dz of a work tile is put, of all keys of the thread block."""
        stage = self.query_pipeline.stage(tile) if self.plan.pipelines_scores else 0
        return self.refs.dz.ref.at[stage]

    def dq_stage(self, tile):
        """In which stage of dq the block of a work tile is."""
        return lax.rem(tile, jnp.int32(self.plan.dq_stages))

    def dq_barrier(self, tile, part):
        """Which of `dq_full` and of `dq_empty` is that of a part."""
        parts = self.plan.dq_parts
        return self.dq_stage(tile) * parts + (part if parts > 1 else 0)
