"""What the forward kernel runs with: operands, shared memory and work tiles."""

from __future__ import annotations

import dataclasses
import functools
import math

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.lists import Visited
from pallas_kernels.layout import Rows
from pallas_kernels.mosaic_gpu import clear_keys, memory, prefetch
from pallas_kernels.mosaic_gpu.forward_program import WorkTile
from pallas_kernels.mosaic_gpu.hopper.forward_plan import Plan, Refs, edges_first
from pallas_kernels.mosaic_gpu.hopper.retries import PassesProgram, TilesPass
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.program import Where

# Of values that are cleared at once, by a producer with few registers.
_MOST_COLUMNS = 64


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

    def visited(self, found: Visited, this) -> Visited:
        """As of the base: the same in all passes."""
        del this
        blocks = edges_first(found)
        # If all have a running maximum, there is one loop, over edges.
        return blocks.all_edges() if self.plan.all_running else blocks

    def fill(self, this: TilesPass, loaded, i, tile: WorkTile, keys: Where) -> None:
        """As of the base, and values of pairs; in a retry values may be cleared."""
        refs, use = self.refs, loaded + i
        fill = functools.partial(super().fill, this, loaded, i, tile, keys)
        if refs.values_came is None:
            fill()
        else:
            pl.when(this.is_first)(fill)
            pl.when(~this.is_first)(lambda: self._fill_cleared(use, tile, keys))
        self._fill_pair_values(use, tile, keys)

    def _fill_pair_values(self, i, tile: WorkTile, keys: Where) -> None:
        """Loads those of each computing warpgroup's queries, if TMA brings them."""
        pipeline = self.refs.pair_values
        if pipeline is None:
            return
        (pair_values,) = prefetch.pair_values(self.spec)
        for own in range(self.plan.consumers):
            rows = {"t": Rows(tile.start + own * ROWS, ROWS)}
            use = i * self.plan.consumers + own
            pipeline.fill(use, pair_values.at({**keys, **rows}))

    def _fill_cleared(self, i, tile: WorkTile, keys: Where) -> None:
        """Loads keys and values of use i, with zeros for keys that no query attends."""
        values, came = self.refs.v, self.refs.values_came
        columns = math.gcd(self.plan.width["d"], _MOST_COLUMNS)
        self.refs.k.fill(i, self.k.at(keys))
        values.fill(i, self.v.at(keys), arrive_at=came)
        plgpu.barrier_wait(came)

        @pl.loop(0, self.plan.block_kv // ROWS)
        def _(n):
            own = {**keys, "s": Rows(keys["s"].start + n * ROWS, ROWS)}
            size = self.plan.layout.size["s"]
            attended = clear_keys.attended_keys(tile.spec, self.spec.keys, own, size)
            for first in range(0, self.plan.width["d"], columns):
                part = pl.ds(n * ROWS, ROWS), pl.ds(first, columns)
                clear_keys.clear(values.at(i).ref.at[part], attended)

        values.say_full(i)
