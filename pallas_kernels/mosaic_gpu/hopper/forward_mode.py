"""Backend "mosaic_gpu_tangent": a tangent kernel by wgmma, for a caller who names it.

**Not run on a card.** The other passes are those of backend "mosaic_gpu", which has the
kernels for the same GPU (Hopper) that have run.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax

from pallas_kernels.backend import Call, Declined, Pass, Plan
from pallas_kernels.configs import Blocks
from pallas_kernels.core import clear
from pallas_kernels.core.positions import ALL_ROWS
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import hopper, memory, shared_memory, support
from pallas_kernels.mosaic_gpu.hopper import tangent as kernel
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.plan import PassPlan

HEAD_SIZES = (64, 128)
# By head size. Not timed: with them nothing is spilled, and shared memory is full.
_BLOCKS = {64: Blocks(192, 64, 12, 4), 128: Blocks(128, 64, 8, 2)}
_DIFFERENTIABLE = ("query", "key", "value")
_ALL = (True, True, True)

lowering_context = support.lowering_context


def plan(call: Call, pass_: Pass, /) -> Plan | Declined:
    """The plan of a pass (`backend.Backend`)."""
    if pass_ not in ("forward", "tangent"):
        return Declined("it has a kernel for tangents alone")
    forward_plan = hopper.plan(call, "forward")
    if isinstance(forward_plan, Declined):
        return forward_plan
    chosen = None if call.config is None else call.config.dq
    why_not = _unsupported(call)
    blocks = None if why_not else chosen or _BLOCKS[call.head_sizes[0]]
    if blocks is not None:
        why_not = _unfit(blocks, call)
    if blocks is None or why_not is not None:
        return Declined(str(why_not))
    if pass_ == "forward":
        return forward_plan
    return PassPlan(Launch(blocks, call.precision, support.ARITHMETIC, False, 1))


def _unsupported(call: Call) -> str | None:
    """What of a call the kernel does not have, or None."""
    spec = call.spec
    if call.is_quantised:
        return "operands in eight bits have no tangents"
    heads = set(call.head_sizes)
    if len(heads) > 1 or heads - set(HEAD_SIZES):
        return f"head sizes {call.head_sizes} are not 64 both, or 128"
    if spec.dropout is not None:
        return "its kernel has no dropout"
    if spec.lists_blocks:
        return "its kernel walks no lists of blocks"
    if spec.score.terms or set(call.differentiable) - set(_DIFFERENTIABLE):
        return "its kernel changes no scores, and no sum of a row"
    if any({"t", "s"} <= set(x.axes) for x in jax.tree.leaves(spec)):
        return "an operand has an element for each pair"
    if spec.is_part or (spec.query_rows, spec.key_rows) != (ALL_ROWS, ALL_ROWS):
        return "its kernel knows no sequence that several devices have"
    return None


def _unfit(blocks: Blocks, call: Call) -> str | None:
    """Why the kernel cannot have these blocks, or None."""
    if blocks.block_q not in (2 * ROWS, 3 * ROWS):
        return f"Config.dq: block_q={blocks.block_q} is not 128 or 192"
    if blocks.block_kv not in (64, 128):
        return f"Config.dq: block_kv={blocks.block_kv} is not 64 or 128"
    if blocks.num_warps != blocks.block_q // 16:
        return f"Config.dq: num_warps={blocks.num_warps} is not 4 for each 64 queries"
    if blocks.num_stages < 2:
        return f"Config.dq: num_stages={blocks.num_stages} is less than 2"
    launch = Launch(blocks, None, support.ARITHMETIC, False, 1)
    layout = cast(memory.TileGrid, _Sizes(call.size))
    whole = kernel.Plan(launch, layout, blocks.block_q // ROWS, call.dtype, _ALL)
    return shared_memory.unfit(blocks, kernel.Refs.declare(whole))


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What a declaration of shared memory reads of a layout: sizes of the axes."""

    size: Any


def forward(plan: Any, call: Call, outputs):
    """Output and log-sum-exp (`backend.Backend`)."""
    return hopper.forward(plan, call, outputs)


def tangent(
    plan: PassPlan, call: Call, saved, tangents, outputs
) -> tuple[jax.Array, ...]:
    """The tangents of output and log-sum-exp (`backend.Backend`)."""
    blocks, size = plan.launch.blocks, call.size
    spec = call.spec.with_table(
        "s", blocks.block_q, blocks.block_kv, size["t"], size["s"]
    )
    k, v = (clear.unread(call.spec, x) for x in (call.key, call.value))
    along = {
        name: x if name == "query" else clear.unread(call.spec, x)
        for name, x in tangents.items()
    }
    operands = call.query, k, v, spec, saved, along, outputs
    return kernel.tangent(*operands, launch=plan.launch)
