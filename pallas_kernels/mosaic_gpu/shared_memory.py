"""Shared memory of a thread block: one declaration, and the bytes that it takes.

A kernel declares its tiles and barriers once, as a pytree of `Tile`, `plgpu.SMEM` and
`plgpu.Barrier` (such as `hopper.forward_plan.Refs`). `memory.call` gives the leaves of
the declaration to Pallas as scratch types, and the kernel gets the same tree with Refs
in their place. `num_bytes` counts the same leaves as Pallas does, so that a plan fits
if Pallas says so.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.configs import Blocks

# Pallas places every allocation at a multiple of so many bytes (`SMEM_ALIGNMENT`).
_ALIGNMENT = 1 << 10
_BARRIER = 8  # bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile in shared memory, declared outside of a kernel and bound inside it.

    Attributes:
      forms: outside of the kernel, what `support.tile` declares; inside it, the Ref, or
        two Refs of the same bytes where the tile has two forms.
    """

    forms: Any

    @property
    def ref(self):
        """The tile as products, loads and stores see it."""
        return self.forms[0] if isinstance(self.forms, tuple) else self.forms

    @property
    def copied(self):
        """The tile as TMA copies it from and to global memory."""
        return self.forms[1] if isinstance(self.forms, tuple) else self.forms

    def at(self, index) -> Tile:
        """One tile of several, in each form."""
        if isinstance(self.forms, tuple):
            return Tile(tuple(x.at[index] for x in self.forms))
        return Tile(self.forms.at[index])


def is_barrier(x) -> bool:
    return isinstance(x, plgpu.Barrier)


def num_bytes(declared) -> int:
    """Bytes of shared memory that Pallas allocates for a declaration."""
    return sum(map(_bytes, jax.tree.leaves(declared, is_leaf=is_barrier)))


def unfit(blocks: Blocks, declared) -> str | None:
    """Why a kernel of this folder cannot have these blocks, or None.

    Args:
      blocks: of a caller's `Config`, or chosen.
      declared: its shared memory.
    """
    for name in ("max_registers", "left_in_registers"):
        if getattr(blocks, name):
            return f"{name} is for the Triton kernels"
    need, limit = num_bytes(declared), device.shared_memory_limit()
    if need <= limit:
        return None
    kib = -(-need >> 10)
    return f"{blocks} needs {kib} KiB of shared memory and this GPU has {limit >> 10}"


def _bytes(x) -> int:
    if isinstance(x, plgpu.RefUnion):  # forms in the same place
        return max(map(_bytes, x.refs))
    if is_barrier(x):
        shape: Any = x.num_barriers  # JAX 0.10 has a number here
        return _BARRIER * (shape if isinstance(shape, int) else math.prod(shape))
    if x.memory_space == plgpu.TMEM:
        return 0
    size = math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT
