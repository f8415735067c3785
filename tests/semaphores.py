"""Semaphores of interpreted Mosaic GPU kernels: signals and waits are counted.

The interpreter runs programs one after the other, in the order in which a GPU starts
them. So no wait needs to block: the signals that it needs have come, and no more.
"""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback


class Semaphores:
    """Of a kernel, numbered; `signals` and `waits` of each are counted on the host."""

    at = property(lambda self: self)

    def __init__(self):
        self.signals, self.waits = collections.Counter(), collections.Counter()
        self.early: set[str] = set()

    def __getitem__(self, number):
        return self, number

    def signal(self, number, count) -> np.int32:
        self.signals[int(number)] += int(count)
        return np.int32(0)

    def wait(self, number, count) -> np.int32:
        number, there = int(number), self.signals[int(number)]
        self.waits[number] += 1
        if there != count:
            self.early.add(f"semaphore {number}: {there} signals, not {count}")
        return np.int32(0)

    def unmet(self) -> set[str]:
        alone = self.signals.keys() - self.waits.keys()
        return self.early | {f"semaphore {n}: nobody waits" for n in alone}


_made: list[Semaphores] = []


def new(kind) -> Semaphores:
    """In place of `pl.get_global`."""
    del kind
    _made.append(Semaphores())
    return _made[-1]


def forget() -> None:
    _made.clear()


def counting(name: str):
    """In place of `plgpu.semaphore_signal` or `plgpu.semaphore_wait`."""

    def count(semaphore, number, **_):
        own, place = semaphore
        kind = jax.ShapeDtypeStruct((), jnp.int32)
        io_callback(getattr(own, name), kind, place, jnp.int32(number))

    return count


def unmet() -> set[str]:
    """What waits lacked, of all kernels since `forget`, and signals for nobody."""
    return set().union(*(x.unmet() for x in _made))
