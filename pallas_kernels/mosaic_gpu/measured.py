"""What was measured of these kernels on a GPU: the table that `here` reads, typed.

Python has the rules; the table of the GPU has their numbers, and says of each on which
GPU and when it was measured (`pallas_kernels/tuning`). Blocks and crossover points in
the user's own table take their place (`user_tables`), which `jax_flash2.tune` writes.
The table of the H100 serves Hopper GPUs that have none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

from pallas_kernels import device, tables, user_tables
from pallas_kernels.configs import Blocks

BACKEND = "mosaic_gpu"

# Kernels that have blocks in a table, and for which calls they have other ones.
REGIMES = {
    "forward": ("many keys", "few keys"),
    "backward": ("any",),
    "dkv": ("any",),
    "dq": ("any",),
    "dbias": ("any",),
}

# What a call may have, each with crossover points of its own. Those of a call are the
# largest of its conditions' (`hopper.tuning.conditions`).
CONDITIONS = {
    "plain": "none of the next four",
    "causal": "later queries attend more keys; neither a window nor a bias of pairs",
    "bias": "two bytes or one for each pair",
    "bias and its gradient": "the same, and `dbias` makes its gradient",
    "wide bias": "four bytes for each pair",
    "window": "a query attends a window of keys",
    "causal window": "the same, where later queries attend others; no bias of pairs",
    "mask": "a bit is loaded for each pair",
    "dropout": "a bit is drawn for each pair",
    "causal lengths": "causal, with lengths of keys, and nothing else",
    "uneven": "blocks of queries take unlike times, in no order: other lengths, masks",
    "documents": "most blocks of keys may be skipped",
    "copied": "operands are copied, since TMA cannot read them as they are",
}


@dataclasses.dataclass(frozen=True)
class Crossover:
    """Keys for a query, on average, from which on these kernels are the faster ones.

    Both are infinite where they never are.
    """

    forward: float
    backward: float


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Numbers of choices and of scheduling, as they were measured or reckoned.

    Attributes:
      many_keys: keys for a query from which blocks of "many keys" are the faster ones.
      many_level_keys: the same where blocks may be level (`hopper.tuning.finds_level`).
      fewest_query_rows: query rows of a call, at least.
      fewest_tiles: work tiles of a call for each multiprocessor, at least.
      fewest_rows_beside_pages: query rows of a head of keys, from which on keys are
        copied out of pages.
      most_room_of_pages: keys that a table has room for, for each query, up to which
        they are.
      filled_part: the part of a tile, at least, that a head must fill in the backward
        kernel, since products with the rest are lost.
      widths_that_keep_no_scores: widths of tiles of heads at which the backward kernel
        has too few registers to keep scores, as a soft cap wants.
      most_order_bytes: bytes at most of what orders the additions to dq where arrays
        decide which blocks meet.
      adder_warps: how many warps add blocks of dq to global memory, by the width of
        tiles of heads up to which it is so. Two have twice the time for each block.
        Where a block has parts (`hopper.backward_plan.Plan.dq_parts`), each has a warp.
      blocks_of_a_document: blocks of keys that a document is taken to have. How long
        it is, no choice can see.
      shared_blocks: blocks of keys of a head that have several thread blocks, at most,
        where a mask of lists has some that nearly all queries visit.
      parts_of_a_shared_block: how many thread blocks each of them has, at most.
      rows_of_a_part: query rows that each of these visits, at least, where the block
        of keys is visited by all.
      addition_part: the part of a work tile's time that one addition to dq and the news
        of it take.
      first_turns_part: the part of the time that may pass before all thread blocks have
        had their first turn to add.
      rows_of_an_accumulator: query rows for each array that dq is the sum of, at least.
        These arrays are read once more: for few rows that takes as long as they save.
      most_accumulators: how many such arrays there may be.
      mean_tiles: work tiles of a thread block of a dynamic schedule, on average, at
        most. It has a few more slots, since some thread blocks take more.
      waves: thread blocks for each multiprocessor that loops over heads are divided to
        make. A multiprocessor has one at a time, whose start and end nothing hides.
      cached_key_bytes: bytes of keys and values that the GPU's cache holds beside all
        else.
      in_turn: thread blocks that wait for each other's additions, for each
        multiprocessor, of as many heads as lie side by side.
      cached_query_bytes: more of them, if queries, do and dq have no more bytes.
      fp8_blocks: of the forward kernel in eight bits, by size of heads, as `Blocks`.
    """

    many_keys: int
    many_level_keys: int
    fewest_query_rows: int
    fewest_tiles: float
    fewest_rows_beside_pages: int
    most_room_of_pages: float
    filled_part: float
    widths_that_keep_no_scores: tuple[int, ...]
    most_order_bytes: int
    adder_warps: Mapping[int, int]
    blocks_of_a_document: int
    shared_blocks: int
    parts_of_a_shared_block: int
    rows_of_a_part: int
    addition_part: float
    first_turns_part: float
    rows_of_an_accumulator: int
    most_accumulators: int
    mean_tiles: int
    waves: int
    cached_key_bytes: int
    in_turn: float
    cached_query_bytes: int
    fp8_blocks: Mapping[int, tuple[int, int, int, int]]

    @classmethod
    def read(cls, table: Mapping) -> Numbers:
        values = {name: entry["value"] for name, entry in table.items()}
        widths = "widths_that_keep_no_scores"
        values[widths] = tuple(values[widths])
        for name in ("adder_warps", "fp8_blocks"):
            values[name] = _by_size(values[name])
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The table of a GPU. Sizes of heads are the largest ones that an entry is for.

    Attributes:
      gpu: whose table it is.
      blocks: by kernel, size of heads and regime (`REGIMES`).
      crossovers: by condition (`CONDITIONS`) and size of heads.
      numbers: all others.
    """

    gpu: str
    blocks: Mapping[str, Mapping[int, Mapping[str, Blocks]]]
    crossovers: Mapping[str, Mapping[int, Crossover]]
    numbers: Numbers

    def blocks_of(self, kernel: str, head_size: int, regime: str = "any") -> Blocks:
        """The blocks of a kernel for heads of up to `head_size`."""
        return up_to(self.blocks[kernel], head_size)[regime]

    def crossover(self, condition: str, head_size: int) -> Crossover:
        """The crossover points of a condition, likewise."""
        return up_to(self.crossovers[condition], head_size)


def up_to(entries: Mapping, size: int):
    """The entry of the smallest size that is not below `size`."""
    return entries[min(x for x in entries if size <= x)]


def here() -> Measured:
    """The table for the GPU that is meant."""
    return of_gpu(device.device_kind())


@functools.cache
def of_gpu(gpu: str | None) -> Measured:
    """The table of a kind of GPU; that of the H100 if it has none, or None is given.

    With the entries of the user's table in the place of those that the library ships.
    """
    found, own = tables.read(BACKEND, gpu), user_tables.read(BACKEND, gpu)

    def entries(part: str) -> Iterator[tuple[str, dict]]:
        for name, heads in found[part].items():
            yield name, _by_size(user_tables.over(heads, own[part].get(name, {})))

    blocks = {
        kernel: {
            size: {regime: Blocks(*x) for regime, x in regimes.items()}
            for size, regimes in heads.items()
        }
        for kernel, heads in entries("blocks")
    }
    crossovers = {
        condition: {size: _crossover(x) for size, x in heads.items()}
        for condition, heads in entries("crossovers")
    }
    return Measured(found["gpu"], blocks, crossovers, Numbers.read(found["numbers"]))


def _by_size(entries: Mapping) -> dict:
    return {int(size): x for size, x in entries.items()}


def _crossover(entry: Mapping) -> Crossover:
    points = entry["forward"], entry["backward"]
    return Crossover(*(math.inf if x is None else x for x in points))
