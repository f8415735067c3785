"""What every kernel has: a plan, and roles of its warpgroups.

A thread block has consumer warpgroups, which compute, and one producer warpgroup, which
copies. The producer fills the stages of a pipeline in shared memory by TMA, and the
consumers read and release them (`pipeline.Pipeline`). (The kernel in `ampere` has no
producer.)

A kernel is divided by role. Its files have

- a `Plan`, which is made once, outside of the kernel: blocks, layout, widths of tiles;
- `Refs`, which is its shared memory and its barriers, declared and then bound;
- a `Program`, which is what a thread block has: the plan, operands, shared memory, the
  number of the warpgroup, and which rows are its own;
- a function for each role: what the producer loads, what a consumer computes and
  stores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import backend
from pallas_kernels.core.arithmetic import Arithmetic
from pallas_kernels.core.axes import Named
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import memory
from pallas_kernels.program import Where
from pallas_kernels.program import pairs as pairs_of_block


@dataclasses.dataclass(frozen=True)
class PassPlan(backend.Plan):
    """The plan of a pass that one kernel makes: `launch` has the kernel's blocks."""

    launch: Launch


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel decides once, before it is traced.

    Attributes:
      launch: the blocks and the rest.
      layout: how thread blocks divide the call.
      consumers: how many warpgroups compute; the producer is one more.
      dtype: of the operands, and of what is made of scores where it meets an operand.
    """

    launch: Launch
    layout: memory.TileGrid
    consumers: int
    dtype: Any

    # Rows of a consumer's products.
    rows: ClassVar[int] = 64
    # Registers of a thread that copies, and of one that computes, by how many consumers
    # there are.
    registers: ClassVar[Mapping[int, tuple[int, int]]]
    # Whether arrays with head elements must have whole blocks of rows (`memory.call`).
    whole_blocks: ClassVar[bool] = False

    @property
    def arithmetic(self) -> Arithmetic:
        return self.launch.arithmetic

    @property
    def block_q(self) -> int:
        return self.launch.blocks.block_q

    @property
    def block_kv(self) -> int:
        return self.launch.blocks.block_kv

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return self.launch.blocks.num_stages

    @property
    def warpgroups(self) -> int:
        """Of a thread block."""
        return self.consumers + 1

    @property
    def programs(self) -> int | None:
        """How many thread blocks there are; None for one for each tile of the grid."""
        return None

    @property
    def width(self) -> Mapping[str, int]:
        """Columns of tiles of heads, by axis: `h` of queries and keys, `d` of values.

        Beyond an array a tile holds 0, and nothing of it is written.
        """
        return {name: self.layout.size[name] for name in "hd"}

    @property
    def pair_block(self) -> dict[str, int]:
        """The block of pairs that a consumer computes: its axes in order, their sizes.

        This one is of a consumer that owns rows of queries.
        """
        return {"t": self.rows, "s": self.block_kv}

    def pairs(
        self, spec: AttentionSpec, where: Where, masked, *, tables: bool = True
    ) -> Pairs:
        """The block of pairs at `where`.

        Args:
          spec: with what does not vary inside the loop loaded.
          masked: whether some of them may be masked.
          tables: whether to load what is read at distances now.
        """
        rows, columns = self.pair_block
        order = rows, columns
        return pairs_of_block(spec, where, order, masked, self.launch, tables=tables)

    def along(self, x: jax.Array, columns: int) -> jax.Array:
        """A number of each of a consumer's rows, repeated in so many columns."""
        return self.arithmetic.along(x, -2, (self.rows, columns))

    def call(
        self,
        kernel: Callable,
        inputs: Any,
        results: Sequence[Named],
        *,
        refs: Any,
        name: str,
    ) -> tuple[Named, ...]:
        """Runs `kernel(plan, inputs, results, refs)` in every thread block.

        Args:
          inputs: a tree of `Named` arrays.
          results: shape structs.
          refs: shared memory as declared. The kernel gets the same tree, bound.
          name: of the kernel in profiles.
        """
        _, wider = memory.of_tiles(self.layout.size, self.width)
        return memory.call(
            functools.partial(kernel, self),
            self.layout,
            inputs,
            tuple(results),
            block={**self.pair_block, **wider},
            tiles=self.width,
            scratch=refs,
            warpgroups=self.warpgroups,
            name=name,
            programs=self.programs,
            whole_blocks=self.whole_blocks,
        )


def by_role(start: Callable, produce: Callable, consume: Callable) -> Callable:
    """A kernel in which each warpgroup has a role (`Plan.call`).

    The last warpgroup produces, all others consume. The producer gives up registers,
    and the consumers take them.

    Args:
      start: makes the program of a thread block, of what the kernel is given.
      produce, consume: the roles, functions of the program.
    """

    def kernel(*given) -> None:
        program = start(*given)
        plan, warpgroup = program.plan, program.warpgroup
        fewer, more = plan.registers[plan.consumers]

        @pl.when(warpgroup == plan.consumers)
        def _():
            plgpu.set_max_registers(fewer, action="decrease")
            produce(program)

        @pl.when(warpgroup < plan.consumers)
        def _():
            plgpu.set_max_registers(more, action="increase")
            consume(program)

    return kernel


def wait_until_stored() -> None:
    """Waits until TMA has read the tiles that this warpgroup stores."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
