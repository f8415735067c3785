"""What the forward kernel runs with: operands, shared memory and work tiles."""

from __future__ import annotations

import dataclasses

from pallas_kernels.core.lists import Visited
from pallas_kernels.layout import Rows
from pallas_kernels.mosaic_gpu import memory, prefetch
from pallas_kernels.mosaic_gpu.forward_program import WorkTile
from pallas_kernels.mosaic_gpu.hopper.forward_plan import Plan, Refs, edges_first
from pallas_kernels.mosaic_gpu.hopper.retries import PassesProgram
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.program import Where


@dataclasses.dataclass(frozen=True)
class Program(PassesProgram):
    """A plan with what its kernel is given, in one warpgroup of a thread block.

    Attributes:
      largest: a view of the largest scores, or None if nobody asks for them.
    """

    plan: Plan
    refs: Refs
    largest: memory.View | None

    @classmethod
    def of(cls, plan: Plan, inputs, outputs, refs: Refs) -> Program:
        o, lse, *rest = outputs
        largest = rest[0] if rest else None
        return super().of(plan, inputs, (o, lse), refs, largest=largest)

    def visited(self, found: Visited, is_final) -> Visited:
        """As of the base: the same in all passes."""
        del is_final
        blocks = edges_first(found)
        # If all have a running maximum, there is one loop, over edges.
        return blocks.all_edges() if self.plan.all_running else blocks

    def fill(self, loaded, i, tile: WorkTile, keys: Where) -> None:
        """As of the base, and values of pairs if TMA brings them."""
        super().fill(loaded, i, tile, keys)
        refs, consumers = self.refs, self.plan.consumers
        if refs.pair_values is None:
            return
        (pair_values,) = prefetch.pair_values(self.spec)
        for own in range(consumers):
            rows = {"t": Rows(tile.start + own * ROWS, ROWS)}
            use = (loaded + i) * consumers + own
            refs.pair_values.fill(use, pair_values.at({**keys, **rows}))
