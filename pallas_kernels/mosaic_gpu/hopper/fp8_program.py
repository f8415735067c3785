"""What the forward kernel in eight bits runs with: operands, scales, work tiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.core.flash2 import LOG2_E
from pallas_kernels.core.lists import Visited
from pallas_kernels.mosaic_gpu.hopper.forward_plan import edges_first
from pallas_kernels.mosaic_gpu.hopper.fp8_plan import Plan, Refs
from pallas_kernels.mosaic_gpu.hopper.retries import PassesProgram


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scales:
    """What numbers of eight bits are multiplied by, with axes of batch and heads.

    Attributes:
      unit: products of queries and keys, which makes them scores in units of log2.
      value: values.
    """

    unit: Any
    value: Any


@dataclasses.dataclass(frozen=True)
class Program(PassesProgram):
    """A plan with what its kernel is given, in one warpgroup of a thread block.

    Attributes:
      scales: of views, of which nothing is loaded yet.
    """

    plan: Plan
    refs: Refs
    scales: Scales

    @classmethod
    def of(cls, plan: Plan, inputs, outputs, refs: Refs) -> Program:
        *operands, scales = inputs
        return super().of(plan, operands, outputs, refs, scales=scales)

    def visited(self, found: Visited, this) -> Visited:
        """As of the base; in the second pass all have a running maximum, as edges."""
        return edges_first(found).all_edges(this.is_final.astype(jnp.int32))


def unit_of(scale: float) -> float:
    """What a product of real queries and keys is multiplied by, in units of log2."""
    return scale * LOG2_E
