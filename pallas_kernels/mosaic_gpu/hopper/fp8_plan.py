"""The plan of the forward kernel in eight bits: which calls, blocks and shared memory.

Values come transposed, [Hv, keys], since products of eight bits read both operands
along the sum. Where there is room (`with_sums`), eight rows follow them, the first of
ones: the product then makes the sums of probabilities, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Call, Declined, Pass
from pallas_kernels.configs import Blocks
from pallas_kernels.core.axes import Named
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import measured, shared_memory, support
from pallas_kernels.mosaic_gpu.barriers import NamedBarriers
from pallas_kernels.mosaic_gpu.forward_program import schedule, tile_grid
from pallas_kernels.mosaic_gpu.hopper import forward_plan, tuning
from pallas_kernels.mosaic_gpu.hopper.forward_plan import PassesPlan, unfit_rows
from pallas_kernels.mosaic_gpu.hopper.fp8_bytes import DTYPE
from pallas_kernels.mosaic_gpu.hopper.tuning import ROWS
from pallas_kernels.mosaic_gpu.plan import PassPlan
from pallas_kernels.mosaic_gpu.shared_memory import Tile

HEAD_SIZES = (64, 128, 256)
# Columns of a product, at most.
_MOST_COLUMNS = 256
# The sum of a block of probabilities from which on one may have been cut to it: the
# largest number of `DTYPE`.
LARGEST = float(jnp.finfo(DTYPE).max)


def plan(call: Call, pass_: Pass) -> PassPlan | Declined:
    """The plan of a pass of a call with operands of eight bits (`backend.Backend`)."""
    if pass_ != "forward":
        return Declined("operands of eight bits have no gradients")
    why_not = _unsupported(call)
    if why_not is not None:
        return Declined(why_not)
    chosen = None if call.config is None else call.config.forward
    table = measured.here().numbers.fp8_blocks
    blocks = chosen or Blocks(*table[call.head_sizes[0]])
    why_not = _unfit(blocks, call)
    if why_not is not None:
        return Declined(why_not)
    if odd := call.spec.odd_stripe(t=ROWS, s=blocks.block_kv):
        return Declined(f"blocks would lie in several stripes of {odd} rows")
    return PassPlan(Launch(blocks, None, support.ARITHMETIC, False, 1))


def _unsupported(call: Call) -> str | None:
    """Why no kernel in eight bits makes a call, or None."""
    if call.dtype != DTYPE:
        return f"its FP8 kernel takes {jnp.dtype(DTYPE).name}, not {call.dtype.name}"
    h, d = call.head_sizes
    if h != d or h not in HEAD_SIZES:
        known = ", ".join(map(str, HEAD_SIZES))
        return f"head sizes {h} and {d} are not both one of {known}, as with FP8"
    if call.config is not None and call.config.splits not in (None, 1):
        return (
            f"Config(splits={call.config.splits}): the forward's programs are not "
            "divided"
        )
    return _unknown_feature(call.spec)


def _unknown_feature(spec: AttentionSpec) -> str | None:
    """What of a call the kernel does not have: it knows masks, and no scores."""
    found = {
        "terms of the score": spec.score.terms,
        "sinks": spec.sink is not None,
        "dropout": spec.dropout is not None,
        "largest scores": spec.gives_largest,
        "parts of rows": spec.is_part,
        "masks of pairs": spec.has_mask_of_pairs or spec.lists_blocks,
        "functions of pairs": spec.operations - support.OPERATIONS,
    }
    lacking = [name for name, is_there in found.items() if is_there]
    return f"its FP8 kernel lacks {', '.join(lacking)}" if lacking else None


def _unfit(blocks: Blocks, call: Call) -> str | None:
    """Why the kernel cannot have these blocks, or None."""
    if why_not := unfit_rows(blocks):
        return why_not
    if blocks.block_kv not in (128, 256):
        return f"block_kv={blocks.block_kv} is not 128 or 256, as with FP8"
    storage = Storage.of(blocks, call.head_sizes[0], call.size)
    return shared_memory.unfit(blocks, storage.declare())


# The order of addresses.
_FIELDS = ("k", "v", "q", "o", "lse", "tile_words", "q_full", "tile_taken", "pass_done")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[*_FIELDS, "pair_values", "values_came"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Refs(forward_plan.Refs):
    """Shared memory of a thread block, in another order, never with `pair_values`.

    Attributes:
      v: values, and ones for sums, [Hv + 8 or Hv, block_kv] in each stage.
    """


@dataclasses.dataclass(frozen=True)
class Storage(forward_plan.Storage):
    """What decides which tiles and barriers shared memory holds."""

    @classmethod
    def of(cls, blocks: Blocks, head: int, size: Mapping[str, int]) -> Storage:
        """With the most barriers that a schedule may have."""
        columns = min(head, 128)
        heads, dtypes = (head, head), (DTYPE, jnp.bfloat16)
        return cls(blocks, heads, *dtypes, columns, retries=1, clears=False, size=size)

    @property
    def value_rows(self) -> int:
        """Rows of a tile of values, those for sums among them."""
        head = self.heads[1]
        return head + (support.COLUMNS if with_sums(head) else 0)

    def declare(self) -> Refs:
        """Tiles and barriers of a thread block."""
        shape = self.blocks.num_stages, self.value_rows, self.blocks.block_kv
        values = Tile(support.tile(shape, DTYPE))
        found = vars(super().declare())
        return Refs(**{**found, "v": self.pipeline(values)})


def with_sums(head: int) -> bool:
    """Whether the product with values has columns for sums of probabilities."""
    return head + support.COLUMNS <= _MOST_COLUMNS


@dataclasses.dataclass(frozen=True)
class Plan(PassesPlan):
    """What is chosen for a call before its kernel is traced.

    Attributes:
      running: how many blocks after the edges have a running maximum in the first pass.
    """

    storage: Storage
    running: int

    @classmethod
    def of(
        cls,
        operands: tuple[Named, Named, Named],
        spec: AttentionSpec,
        outputs: tuple[Named, ...],
        launch: Launch,
    ) -> Plan:
        """The plan of a call.

        Args:
          operands: queries, keys and values as the caller gave them.
          spec: of `Named`.
          outputs: shape structs.
          launch: blocks and arithmetic.
        """
        layout = tile_grid(operands, spec, outputs, launch)
        tiles = schedule(layout, uniform_cost=spec.cost_is_monotone)
        storage = Storage.of(launch.blocks, layout.size["h"], layout.size)
        storage = dataclasses.replace(storage, taken_tiles=tiles.taken_tiles)
        consumers = storage.consumers
        ping_pong = NamedBarriers(consumers + 1).ping_pong(consumers)
        early = tuning.may_await_keys_early(launch.blocks)
        own = layout, consumers, DTYPE, tiles, storage, ping_pong, early
        # In an edge a row may have few keys, whose maximum says little of the others.
        return cls(launch, *own, running=int(bool(spec.masks)))

    @property
    def head(self) -> int:
        """The size of heads."""
        return self.width["h"]

    @property
    def sums(self) -> bool:
        """Whether the product with values makes the sums of probabilities."""
        return with_sums(self.head)
