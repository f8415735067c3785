"""Named barriers, whose numbers a kernel gives out, and ping-pong by them.

They are the hardware's 16 barriers of a thread block, which PTX `bar.sync` and
`bar.arrive` name by a number. Barriers in shared memory (`plgpu.Barrier`) are another
kind: they are declared with the tiles (`shared_memory`).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import support

_MOST_NAMED_BARRIERS = 16


@dataclasses.dataclass(frozen=True)
class NamedBarrier:
    """A barrier at which some warpgroups of a thread block meet.

    Attributes:
      number: of the hardware's barrier.
      warpgroups: how many of them sync or arrive.
    """

    number: int
    warpgroups: int

    def sync(self) -> None:
        """Waits until all of these warpgroups are here."""
        support.named_barrier("sync", jnp.int32(self.number), self.warpgroups)


@dataclasses.dataclass(frozen=True)
class PingPong:
    """Warpgroups that take turns: one issues its products while the others compute.

    Its barriers order what would be right in any order.

    Attributes:
      first: number of the first warpgroup's barrier; the others' follow.
      count: of the warpgroups that take turns, the first ones of the thread block.
    """

    first: int
    count: int

    def start(self, warpgroup) -> None:
        """Every warpgroup calls this once. Warpgroup 0 has the first turn."""

        @pl.when(warpgroup == self.count - 1)
        def _():
            self._bar("arrive", jnp.int32(0))

    def wait(self, warpgroup) -> None:
        """Waits until it is this warpgroup's turn."""
        self._bar("sync", warpgroup)

    def pass_on(self, warpgroup) -> None:
        """Gives the turn to the next warpgroup."""
        self._bar("arrive", lax.rem(warpgroup + 1, jnp.int32(self.count)))

    def _bar(self, instruction: str, whose) -> None:
        # The one whose turn it is syncs, and the one before it arrives.
        support.named_barrier(instruction, jnp.int32(self.first) + whose, warpgroups=2)


class NamedBarriers:
    """Gives out the numbers of a kernel's named barriers, each one once.

    Number 0 is the barrier of the whole thread block. Numbers from 1 on are those of
    its warpgroups, at which threads of one warpgroup meet (`support.warpgroup_any`).

    Args:
      warpgroups: all of the thread block.
    """

    def __init__(self, warpgroups: int):
        self._next = 1 + warpgroups

    def barrier(self, warpgroups: int) -> NamedBarrier:
        """A barrier at which so many warpgroups meet."""
        return NamedBarrier(self._take(1), warpgroups)

    def ping_pong(self, count: int) -> PingPong:
        """Turns of the first `count` warpgroups, with a barrier for each of them."""
        return PingPong(self._take(count), count)

    def _take(self, count: int) -> int:
        first, self._next = self._next, self._next + count
        assert self._next <= _MOST_NAMED_BARRIERS, "no named barrier is left"
        return first
