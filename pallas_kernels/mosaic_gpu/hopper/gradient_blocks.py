"""Which blocks the kernels of the backward pass can have, and which a call has.

These are the table's, or the caller's: `Config.dkv` is for the kernel that makes the
gradients of query, key and value, or of key and value if `dq` makes that of query. So
`Config.dq` is for wide heads only, and nothing is for `Config.dk` and `Config.dv`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax.numpy as jnp

from pallas_kernels import passes
from pallas_kernels.backend import Call
from pallas_kernels.configs import Blocks
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import memory, shared_memory, support
from pallas_kernels.mosaic_gpu.hopper import (
    backward_plan,
    dbias,
    dkv,
    dq,
    gradients,
    tuning,
)
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS

# Rows of blocks of queries and of keys that each kernel can have.
#
# backward: a warpgroup owns 64 keys, and of three the tiles fit no shared memory.
# dkv: both warpgroups own the same 64 keys, and the pairs of 64 queries are as wide as
#   a swizzled part of their operands.
# dq, dbias: a warpgroup owns 64 queries. Sums of more than 128 keys are too many
#   registers.
ROWS_OF_BLOCKS = {
    "backward": ((64, 128), (64, 128)),
    "dkv": ((64,), (64,)),
    "dq": ((64, 128, 192), (64, 128)),
    "dbias": ((64, 128, 192), (64, 128)),
}
_PART = 64  # columns of a swizzled part of two bytes an element
# The field of `Config` that has the blocks of a kernel.
FIELDS = {"backward": "dkv", "dkv": "dkv", "dq": "dq", "dbias": "dbias"}


def consumers(kernel: str, blocks: Blocks) -> int:
    """How many warpgroups of a kernel compute."""
    if kernel == "dkv":
        return dkv.CONSUMERS
    return (blocks.block_kv if kernel == "backward" else blocks.block_q) // ROWS


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What a declaration of shared memory reads of a layout.

    Attributes:
      size: of the call's axes.
    """

    size: Mapping[str, int]


def declared(
    kernel: str,
    blocks: Blocks,
    size: Mapping[str, int],
    *,
    in_float32: bool = False,
    pair_values: Any = None,
    by_distance: bool = False,
) -> Any:
    """The shared memory of a kernel (`shared_memory.num_bytes`).

    Args:
      kernel: of `FIELDS`.
      size: of the call's axes.
      in_float32: whether dk and dv are, which are parts then.
      pair_values: dtype of values of pairs whose tiles come by TMA, or None.
      by_distance: whether "dbias" is `ddistance`.
    """
    launch = Launch(blocks, None, support.ARITHMETIC, False, 1)
    layout = cast(memory.TileGrid, _Sizes(size))
    known = launch, layout, consumers(kernel, blocks), jnp.bfloat16
    if kernel == "backward":
        options = 1, in_float32, False, False
        return backward_plan.Refs.declare(backward_plan.Plan(*known, *options))
    if kernel == "dkv":
        return dkv.Refs.declare(dkv.Plan(*known, in_float32))
    if kernel == "dq":
        return dq.Refs.declare(gradients.Plan(*known))
    return dbias.Refs.declare(dbias.Plan(*known, pair_values, by_distance))


def unfit(
    kernel: str,
    blocks: Blocks,
    size: Mapping[str, int],
    *,
    in_float32: bool = False,
    pair_values: Any = None,
    by_distance: bool = False,
) -> str | None:
    """Why a kernel of the backward pass cannot have these blocks, or None.

    Args:
      kernel, size, in_float32, pair_values, by_distance: as of `declared`.
    """
    names = "block_q", "block_kv"
    for name, rows in zip(names, ROWS_OF_BLOCKS[kernel], strict=True):
        if getattr(blocks, name) not in rows:
            allowed = ", ".join(map(str, rows[:-1]))
            allowed = f"{allowed} or {rows[-1]}" if allowed else f"{rows[-1]}"
            return f"{name}={getattr(blocks, name)} is not {allowed}"
    warps = 4 * consumers(kernel, blocks)
    if blocks.num_warps != warps:
        return f"num_warps={blocks.num_warps} is not {warps}, 4 for each warpgroup"
    width = tuning.head_tiles(size)
    # What comes next is waited for while a kernel still reads what it has.
    pipelined = kernel != "backward" or tuning.pipelines_scores(width)
    if pipelined and blocks.num_stages < 2:
        return f"num_stages={blocks.num_stages} is less than 2"
    if kernel == "backward" and pipelined and _cuts_a_part(blocks, width["h"]):
        keys = f"half of block_kv={blocks.block_kv}"
        return f"block_q={blocks.block_q} is {keys}, with heads of {size['h']}"
    options = {"in_float32": in_float32, "pair_values": pair_values}
    options |= {"by_distance": by_distance}
    return shared_memory.unfit(blocks, declared(kernel, blocks, size, **options))


def _cuts_a_part(blocks: Blocks, width: int) -> bool:
    """Whether warpgroups would make less than a swizzled part of the columns of dq.

    They make rows of it where there are 64 for each of them, and else columns.
    """
    count = consumers("backward", blocks)
    return blocks.block_q != ROWS * count and width // count % _PART != 0


def of_call(call: Call) -> dict[str, Blocks] | str:
    """Blocks of the kernels for the gradients of query, key and value, or why not.

    Returns:
      As `tuning.of_backward`, with those of the caller; or a reason.
    """
    width = memory.forward_tiles(call.size)
    found = tuning.of_backward((width["h"], width["d"]))
    if found is None:
        return f"there is no kernel for gradients of head sizes {call.head_sizes}"
    config = call.config
    if config is None:
        return found
    fields = {FIELDS[kernel]: kernel for kernel in found}
    for field in ("dk", "dv", "dq"):
        if getattr(config, field) and field not in fields:
            return f"Config.{field} is for a kernel of its own, which is not used here"
    for field, kernel in fields.items():
        blocks = getattr(config, field)
        if blocks is None:
            continue
        if why_not := unfit(kernel, blocks, call.size, in_float32=call.spec.is_part):
            return f"Config.{field}: {why_not}"
        found[kernel] = blocks
    return found


def _square(blocks: Blocks) -> Blocks:
    """With as many queries as keys, and a warpgroup for each 64."""
    rows = min(blocks.block_q, blocks.block_kv)
    own = {"block_q": rows, "block_kv": rows, "num_warps": 4 * rows // ROWS}
    return dataclasses.replace(blocks, **own)


def of_operand(call: Call) -> Blocks | str:
    """Blocks of the kernel for the gradient of a bias, or of what is read at distances.

    Returns:
      The blocks, square ones for the latter; or why there is no kernel.
    """
    score = call.spec.score
    by_distance = any(score.zero(name) is not None for name in score.operands)
    if len(score.operands) != 1 or not (score.pair_operands or by_distance):
        return (
            "there is a kernel only for one operand, with an element for each pair or "
            "for each distance"
        )
    if why_not := passes.unmade_table(call.spec):
        return why_not
    blocks = tuning.of_dbias(call.size)
    if blocks is None:
        return f"there is no kernel for a bias with head sizes {call.head_sizes}"
    chosen = call.config and call.config.dbias
    blocks = chosen or blocks
    blocks = _square(blocks) if by_distance else blocks
    # What `prefetch.pair_values` gives, of operands that may be shape structs.
    dtypes = [x.dtype for x in score.pair_operands.values()]
    pair_values = next((x for x in dtypes if x.itemsize == 2), None)
    options = {"pair_values": pair_values, "by_distance": by_distance}
    why_not = unfit("dbias", blocks, call.size, **options)
    while why_not and not chosen and blocks.num_stages > 2:  # a table's, without sums
        blocks = dataclasses.replace(blocks, num_stages=blocks.num_stages - 1)
        why_not = unfit("dbias", blocks, call.size, **options)
    if why_not:
        return f"Config.dbias: {why_not}" if chosen else why_not
    if odd := call.spec.odd_stripe(t=blocks.block_q, s=blocks.block_kv):
        return f"blocks would lie in several stripes of {odd} rows"
    return blocks
