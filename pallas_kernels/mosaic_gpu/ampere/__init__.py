"""Backend "mosaic_gpu_ampere": a forward kernel by mma.sync, for a caller who names it.

**Not run on a card.** It is for Ampere (compute capability 8.0, 8.6), Ada (8.9) and
consumer Blackwell (12.0, 12.1), which have neither wgmma nor tcgen05.
"""

from __future__ import annotations

from pallas_kernels.backend import Call, Declined, Pass
from pallas_kernels.configs import Blocks
from pallas_kernels.mosaic_gpu import by_name, support
from pallas_kernels.mosaic_gpu.ampere import forward as kernel
from pallas_kernels.mosaic_gpu.plan import PassPlan

CAPABILITIES = (80, 86, 89, 120, 121)
# By the larger head size. Two warpgroups: two warps for each scheduler.
_BLOCKS = {64: Blocks(128, 64, 8, 2), 128: Blocks(128, 64, 8, 2)}
# Where TMA copies: with 64 keys these spill up to 84 bytes at head size 128.
_BLOCKS_WITH_TMA = {64: Blocks(128, 64, 8, 2), 128: Blocks(128, 32, 8, 4)}

lowering_context = support.lowering_context


def plan(call: Call, pass_: Pass, /) -> PassPlan | Declined:
    """The plan of a pass (`backend.Backend`)."""
    table = _BLOCKS_WITH_TMA if kernel.has_tma() else _BLOCKS
    return by_name.plan(call, pass_, CAPABILITIES, table, _unfit)


def _unfit(blocks: Blocks, call: Call) -> str | None:
    """Why the kernel cannot have these blocks, or None."""
    if blocks.block_q not in (64, 128):
        return f"block_q={blocks.block_q} is not 64 or 128"
    if blocks.num_warps != blocks.block_q // 16:
        return f"num_warps={blocks.num_warps} is not 4 for each 64 rows of block_q"
    if blocks.block_kv not in (32, 64, 128):
        return f"block_kv={blocks.block_kv} is not 32, 64 or 128"
    declared = kernel.declare(blocks, call.head_sizes, call.dtype)
    return by_name.unfit(blocks, declared)


def forward(plan: PassPlan, call: Call, outputs):
    """Output and log-sum-exp (`backend.Backend`)."""
    operands = by_name.operands(call, plan.launch.blocks)
    return kernel.forward(*operands, outputs, launch=plan.launch)
