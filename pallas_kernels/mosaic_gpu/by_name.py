"""Kernels that run only if a caller names their backend: which calls they take.

They have been compiled, and interpreted on a CPU, and have not run on a card. So
`implementation=None` never chooses them. They make the forward pass; the next backend
in line makes the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels.backend import Call, Declined, Pass
from pallas_kernels.configs import Blocks
from pallas_kernels.core import clear, flash2
from pallas_kernels.core.arithmetic import Arithmetic
from pallas_kernels.core.axes import Named
from pallas_kernels.core.flash2 import Scores, State
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.pointwise import TABLES
from pallas_kernels.core.positions import ALL_ROWS
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import shared_memory, support
from pallas_kernels.mosaic_gpu.plan import PassPlan

DTYPES = (jnp.bfloat16, jnp.float16)
HEAD_SIZES = (64, 128)
FIRST_JAX = (0, 12)


def plan(
    call: Call,
    pass_: Pass,
    capabilities: Sequence[int],
    table: Mapping[int, Blocks],
    unfit: Callable[[Blocks, Call], str | None],
    arithmetic: Arithmetic = support.ARITHMETIC,
) -> PassPlan | Declined:
    """The plan of a pass (`backend.Backend`).

    Args:
      capabilities: compute capabilities, times ten, of the GPUs that the backend's
        kernels are for.
      table: blocks by the larger head size.
      unfit: why the kernel cannot have some blocks, or None.
      arithmetic: of the kernel.
    """
    why_not = unsupported(call, pass_, capabilities)
    if why_not is not None:
        return Declined(why_not)
    chosen = None if call.config is None else call.config.forward
    blocks = chosen or table[max(call.head_sizes)]
    why_not = unfit(blocks, call)
    if why_not is not None:
        return Declined(why_not)
    return PassPlan(Launch(blocks, call.precision, arithmetic, False, 1))


def unsupported(call: Call, pass_: Pass, capabilities: Sequence[int]) -> str | None:
    """Why such a backend has no kernel for a pass of a call here and now, or None."""
    if pass_ != "forward":
        return "it has a kernel for the forward pass alone"
    if call.interpret:
        return "its kernels are not interpreted"
    if call.is_invariant:
        return "Config(invariant=True): its order of blocks depends on the call"
    if jax.__version_info__ < FIRST_JAX:
        first = ".".join(map(str, FIRST_JAX))
        return f"its kernels need JAX {first}, and this is {jax.__version__}"
    if device.capability() not in capabilities:
        known = ", ".join(str(x / 10) for x in capabilities)
        return f"compute capability {device.capability() / 10} is not one of {known}"
    if not device.gpu_is_here():
        return "JAX lowers Mosaic GPU for this GPU only on a machine that has one"
    if call.dtype not in DTYPES:
        return f"dtype {jnp.dtype(call.dtype).name} is not bfloat16 or float16"
    if call.reads_bytes:
        return support.QUANTISED_KEYS
    if call.is_symbolic:
        return "the kernels need static sizes, and this call has a symbolic one"
    wrong = [n for n in call.head_sizes if n not in HEAD_SIZES]
    if wrong:
        return f"head size {wrong[0]} is not 64 or 128"
    if call.config is not None and call.config.splits not in (None, 1):
        return f"Config(splits={call.config.splits}): its programs are not divided"
    return _unknown_feature(call.spec) or call.lacking(support.OPERATIONS - {TABLES})


def _unknown_feature(spec: AttentionSpec) -> str | None:
    """What of a call such kernels do not have: they load scalars, and no vectors."""
    if spec.dropout is not None:
        return "its kernels have no dropout"
    if spec.lists_blocks:
        return "its kernels walk no lists of blocks"
    if spec.gives_largest:
        return "its kernels do not give the largest scores"
    if any({"t", "s"} & set(x.axes) for x in jax.tree.leaves(spec)):
        return "an operand has an element for each query or key"
    if spec.pages is not None:
        return "its kernels read no keys in pages"
    if spec.is_part or (spec.query_rows, spec.key_rows) != (ALL_ROWS, ALL_ROWS):
        return "its kernels know no sequence that several devices have"
    return None


def unfit(blocks: Blocks, declared) -> str | None:
    """Why the GPU cannot have these blocks, or None: as `shared_memory.unfit`."""
    if blocks.num_stages < 2:
        return f"num_stages={blocks.num_stages} is not 2 or more"
    return shared_memory.unfit(blocks, declared)


def operands(call: Call, blocks: Blocks) -> tuple[Named, Named, Named, AttentionSpec]:
    """What such a kernel gets: queries, keys, values and the spec.

    Values of keys that no query attends are 0 (`core.clear`): it makes no retry.
    """
    rows = blocks.block_q, blocks.block_kv, call.size["t"], call.size["s"]
    value = clear.unread(call.spec, call.value)
    return call.query, call.key, value, call.spec.with_table("s", *rows)


def scores_of(found: Pairs, products: jax.Array, dtype) -> Scores:
    """Scores of a block of products, whose maximum runs (`flash2.update`).

    Without a part for whole rows (`Scores.row`), which `update` reads from one column:
    JAX finds no layout for that.
    """
    scores = found.scores_of(products, dtype)
    return scores if scores.row is None else scores.settled


def finish(state: State, spec: AttentionSpec, launch: Launch, dtype):
    """Output, in `dtype`, and log-sum-exp of rows that have met all their keys."""
    output, log = flash2.finish(state, spec.sink, launch.arithmetic)
    assert not isinstance(output, tuple), "heads are not in pieces here"
    return output.astype(dtype), log
