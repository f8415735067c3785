"""Backend "mosaic_gpu_blackwell": a forward kernel by tcgen05, where it is named.

**Not run on a card.** It is for data-centre Blackwell (compute capability 10.0, 10.3).
Consumer Blackwell (12.0) has no tensor memory: `ampere` is for it.
"""

from __future__ import annotations

from pallas_kernels import device
from pallas_kernels.backend import Call, Declined, Pass
from pallas_kernels.configs import Blocks
from pallas_kernels.mosaic_gpu import by_name, support
from pallas_kernels.mosaic_gpu.blackwell import forward as kernel
from pallas_kernels.mosaic_gpu.blackwell import plan as plans
from pallas_kernels.mosaic_gpu.plan import PassPlan

CAPABILITIES = (100, 103)
# By the larger head size. With 128 keys a thread has a row of 128 scores: at head size
# 64 that spills up to 468 bytes, and at 128 tensor memory is too small.
_BLOCKS = {64: Blocks(256, 64, 8, 4), 128: Blocks(256, 64, 8, 3)}

_ARITHMETIC = support.arithmetic(support.ROW_OF_A_THREAD)

lowering_context = support.lowering_context


def plan(call: Call, pass_: Pass, /) -> PassPlan | Declined:
    """The plan of a pass (`backend.Backend`)."""
    return by_name.plan(call, pass_, CAPABILITIES, _BLOCKS, _unfit, _ARITHMETIC)


def _unfit(blocks: Blocks, call: Call) -> str | None:
    """Why the kernel cannot have these blocks, or None."""
    if blocks.block_q not in (128, 256):
        return f"block_q={blocks.block_q} is not 128 or 256"
    if blocks.num_warps != blocks.block_q // 32:
        return f"num_warps={blocks.num_warps} is not 4 for each 128 rows of block_q"
    if blocks.block_kv not in (64, 128):
        return f"block_kv={blocks.block_kv} is not 64 or 128"
    need = plans.columns(blocks, call.head_sizes[1])
    limit = device.gpu().tensor_memory
    if need > limit:
        return f"{blocks} needs {need} of {limit} columns of tensor memory"
    declared = plans.declare(blocks, call.head_sizes, call.dtype, call.size)
    return by_name.unfit(blocks, declared)


def forward(plan: PassPlan, call: Call, outputs):
    """Output and log-sum-exp (`backend.Backend`)."""
    operands = by_name.operands(call, plan.launch.blocks)
    return kernel.forward(*operands, outputs, launch=plan.launch)
