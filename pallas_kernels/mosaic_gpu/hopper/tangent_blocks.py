"""Which calls the tangent kernel serves, and which blocks it has for them.

Like the kernel of `dq`, whose loop it has, it takes the caller's blocks of `Config.dq`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import jax

from pallas_kernels.backend import Call
from pallas_kernels.configs import Blocks
from pallas_kernels.core.positions import ALL_ROWS
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import memory, shared_memory, support
from pallas_kernels.mosaic_gpu.hopper import tangent
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS

# By head size. No others were timed: with these shared memory is full, and no register
# is spilled (benchmarks/lab/116-tangents-on-hopper.md).
_BLOCKS = {64: Blocks(192, 64, 12, 4), 128: Blocks(128, 64, 8, 2)}
_OPERANDS = {"query", "key", "value"}
_ALL = (True, True, True)


def launch(blocks: Blocks, precision=None) -> Launch:
    """The kernel's launch with these blocks. Its work is not divided."""
    return Launch(blocks, precision, support.ARITHMETIC, False, 1)


def of_call(call: Call) -> Blocks | str:
    """Blocks of the kernel, or why it does not serve the call."""
    why_not = _unserved(call)
    if why_not is not None:
        return why_not
    chosen = call.config and call.config.dq
    if chosen and (why_not := unfit(chosen, call)):
        return f"Config.dq: {why_not}"
    return chosen or _BLOCKS[call.head_sizes[0]]


def _unserved(call: Call) -> str | None:
    """What of a call the kernel does not have, or None."""
    spec, heads = call.spec, {*call.head_sizes}
    if len(heads) > 1 or not heads <= _BLOCKS.keys():
        return f"for tangents head sizes {call.head_sizes} are not 64 both, or 128"
    if spec.dropout is not None:
        return "its kernel for tangents has no dropout"
    if spec.lists_blocks:
        return "its kernel for tangents walks no lists of blocks"
    if spec.score.terms or {*call.differentiable} - _OPERANDS:
        return "its kernel for tangents changes no scores, and no sum of a row"
    if any({"t", "s"} <= set(x.axes) for x in jax.tree.leaves(spec)):
        return "its kernel for tangents reads no array with an element for each pair"
    if spec.is_part or (spec.query_rows, spec.key_rows) != (ALL_ROWS, ALL_ROWS):
        return "its kernel for tangents knows no sequence that several devices have"
    return None


def unfit(blocks: Blocks, call: Call) -> str | None:
    """Why the kernel cannot have these blocks, or None."""
    if blocks.block_q not in (2 * ROWS, 3 * ROWS):
        return f"block_q={blocks.block_q} is not 128 or 192, as for tangents"
    if blocks.block_kv not in (64, 128):
        return f"block_kv={blocks.block_kv} is not 64 or 128"
    warps = blocks.block_q // 16
    if blocks.num_warps != warps:
        return f"num_warps={blocks.num_warps} is not {warps}, 4 for each warpgroup"
    if blocks.num_stages < 2:  # keys are awaited early (`tuning.may_await_keys_early`)
        return f"num_stages={blocks.num_stages} is less than 2"
    layout = cast(memory.TileGrid, _Sizes(call.size))
    known = launch(blocks), layout, blocks.block_q // ROWS, call.dtype
    return shared_memory.unfit(blocks, tangent.Refs.declare(tangent.Plan(*known, _ALL)))


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What a declaration of shared memory reads of a layout.

    Attributes:
      size: of the call's axes.
    """

    size: Mapping[str, int]
