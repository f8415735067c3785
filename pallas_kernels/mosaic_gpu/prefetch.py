"""Prefetch of pair values: operands with an element for each query and key.

In the forward, TMA brings blocks of a bias to shared memory. In the backward, threads
load the pair values of the next tile while they compute this one, as they lie in
memory. A bias then takes half of the registers that its block takes, a mask a word or
two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pallas_kernels import layout
from pallas_kernels.core.axes import Named
from pallas_kernels.mosaic_gpu import memory, support


@dataclasses.dataclass(frozen=True)
class _Block(layout.View):
    """A block of pair values that has been loaded, wherever a loop has come to."""

    def read(self, index, mask, other):
        raise NotImplementedError("it is loaded whole")

    def write(self, index, value, mask):
        raise NotImplementedError("it is only read")


@dataclasses.dataclass(frozen=True)
class _Tile(_Block):
    """In shared memory."""

    def load(
        self, order: tuple[str, ...], where: Mapping[str, Any], padding: float = 0
    ):
        del where, padding
        assert order == ("t", "s"), f"{order=}"
        return support.load_tile(self.ref)


@dataclasses.dataclass(frozen=True)
class _Fetched(_Block):
    """In registers. What stands for the Ref is a `View` of what it was loaded from."""

    words: jax.Array

    def load(
        self, order: tuple[str, ...], where: Mapping[str, Any], padding: float = 0
    ):
        del where, padding
        assert order == ("s", "t"), f"{order=}"
        return self.ref.fetched(self.words)


def pair_values(spec) -> list:
    """The arrays of a spec that TMA could bring: two bytes for each pair.

    A spec has at most one, its bias: masks are boolean.

    Args:
      spec: of `Named` arrays or of `View`s.
    """
    return [x for x in jax.tree.leaves(spec) if _comes_by_tma(x)]


def with_pair_tile(spec, ref):
    """The spec with its pair values in a tile in shared memory."""
    return jax.tree.map(lambda x: _Tile(ref, x.axes) if _comes_by_tma(x) else x, spec)


def is_fetched(spec) -> bool:
    """Whether `fetch` would find anything."""
    return any(map(_is_fetched, jax.tree.leaves(spec)))


def fetch(spec, order: tuple[str, str], where: Mapping[str, Any]) -> list[jax.Array]:
    """A block's pair values, for `with_fetched`: those of two bytes, and masks.

    Args:
      spec: of `View`s.
      order, where: of the block, which is transposed.
    """
    return [x.fetch(order, where) for x in jax.tree.leaves(spec) if _is_fetched(x)]


def with_fetched(spec, words: Sequence[jax.Array]):
    """The spec with what was fetched of it."""
    left = iter(words)
    return jax.tree.map(
        lambda x: _Fetched(x, x.axes, next(left)) if _is_fetched(x) else x, spec
    )


def _comes_by_tma(x) -> bool:
    if isinstance(x, Named):
        x = x.squeezed()
    elif not isinstance(x, memory.View):
        return False
    is_boolean = x.boolean if isinstance(x, memory.View) else memory.is_boolean(x)
    return {"t", "s"} <= set(x.axes) and not is_boolean and x.dtype.itemsize == 2


def _is_fetched(x) -> bool:
    if not isinstance(x, memory.View):
        return False
    return _comes_by_tma(x) or (x.boolean and {"t", "s"} <= set(x.axes))
