"""`Blocks` and `Config`: what a caller may say about how the kernels of a call run."""

from __future__ import annotations

import dataclasses

# Each kernel has its blocks in `Config`.
KERNELS = ("forward", "dkv", "dk", "dv", "dq", "dbias")
# Others have the blocks of one of those, for fewer keys: the kernel of tangents.
LIKE = {"tangent": "dq"}

# Keys of a part of an invariant call: parts begin at its multiples (`division`).
PART = 2048

_REGISTER_BOUNDS = range(24, 256, 8)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How one kernel cuts its work.

    Attributes:
      block_q: query rows of a block, a multiple of 16. The Triton kernels want a power
        of two, here and below; the Mosaic GPU kernels 64, 128 or 192, not all of them
        each.
      block_kv: key rows of a block, a multiple of 16. The Mosaic GPU kernels want 64 or
        128, the forward one also 192 or 256.
      num_warps: warps (of 32 threads) that share a block, 1 to 16. The Mosaic GPU
        kernels want 4 for each 64 query rows, and that of `Config.dkv` 4 for each 64
        keys, or 8 for wide heads.
      num_stages: depth of the software pipeline of loads, at least 1.
      max_registers: most registers of a thread, a multiple of 8 from 24 to 248; None
        lets the compiler choose. A multiprocessor has 65,536 registers: fewer for each
        thread let more programs share it, too few spill to memory.
      left_in_registers: how many of the tiles that are left operands of every product
        stay in registers, 0 to 2. That leaves shared memory and its bandwidth to the
        other operands. The tiles are, in this order: for `forward` queries; for `dq`
        output gradients, then queries; for `dkv` and `dk` values, then keys; for `dv`
        keys. It helps on GPUs of compute capability 9 (Hopper); the tables use it only
        there.

    Raises:
      TypeError, ValueError: if a field is not as above.

    Example:
      >>> from jax_flash2 import Blocks
      >>> Blocks(128, 64, num_warps=4, num_stages=3).block_kv
      64
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    left_in_registers: int = 0

    def __post_init__(self):
        for name in ("block_q", "block_kv", "num_warps", "num_stages"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
        for name in ("block_q", "block_kv"):
            value = getattr(self, name)
            if value < 16 or value % 16:
                raise ValueError(f"{name} must be a multiple of 16, got {value!r}")
        if not 1 <= self.num_warps <= 16:
            raise ValueError(f"num_warps must be from 1 to 16, got {self.num_warps}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be an int >= 1, got {self.num_stages!r}")
        most = self.max_registers
        if most is not None and (
            not isinstance(most, int) or most not in _REGISTER_BOUNDS
        ):
            raise ValueError(
                "max_registers must be None or a multiple of 8 from 24 to 248, "
                f"got {most!r}"
            )
        left = self.left_in_registers
        if isinstance(left, bool) or left not in (0, 1, 2):
            raise ValueError(f"left_in_registers must be 0, 1 or 2, got {left!r}")


@dataclasses.dataclass(frozen=True)
class Config:
    """Configuration of the kernels of one call.

    The "xla" backend uses `block_q` and `block_kv` of `forward`, and of `dkv` for the
    backward pass. Kernels of the "mosaic_gpu" backend run with blocks that they can
    have, of `forward`, `dkv`, `dq` and `dbias`; with others the call, or the pass, goes
    to the "triton" backend, and `explain` says why.

    Attributes:
      forward: blocks of the forward kernel; None, here and below, lets the library
        choose.
      dkv: blocks of the kernel that computes the gradients of key and value. That of
        the "mosaic_gpu" backend computes the gradient of query, too, if heads are not
        wide (above 192, or 320 for key and value together).
      dk, dv: blocks of the two kernels that replace it for head sizes above 128; None
        uses `dkv`. The "mosaic_gpu" backend has no such kernels.
      dq: blocks of the kernel that computes the gradient of query, and of that of
        tangents (forward mode), which loads twice as much for a key. The "mosaic_gpu"
        backend has one of the gradient, for wide heads only, and one of tangents, for
        heads of 64 and 128.
      dbias: blocks of the kernel that computes the gradient of `bias`, `alibi_slopes`
        or a `scale` that is an array.
      splits: into how many parts each kernel divides the work of a block of rows, from
        1 (not at all) to S / 16 for S keys. Parts run side by side, and the kernels
        put them together: keys of few queries, query heads that share a key/value head,
        heads and batch entries that share a bias. None lets the library choose from the
        sizes of a call and the GPU. With a number, and with blocks given too, the bits
        of an output row do not depend on how many rows are in the batch.
      interpret: run the kernels in Pallas's interpreter: slow, on any platform.
      invariant: give each row of output, log-sum-exp and largest scores the same bits
        however its sequence is cut: in one call, in chunks of queries, or row by row
        against a cache, dense (`query_offset`) or in pages; whatever the capacity, the
        order of pages, the rest of the batch and other documents in a row. So training
        and sampling agree (RECIPES.md, "Equal bits in training and sampling"). For
        calls with the same `Config`, backend, dtype, precision and numbers of heads,
        and for rows with the same masks and terms of the score. Keys are visited from
        the first on, in tiles that do not depend on the call, and in parts that begin
        at multiples of 2,048. `splits` may be 1 (a program does all parts) or None
        (each part has a program, where these are few): the bits are the same. The
        "triton" backend serves it, and on CPUs "xla", with blocks of its own; others
        decline. Rows may not be divided over devices. Gradients are those of any call.
        A call of many rows is slower. Tested with interpreted kernels and XLA on a CPU;
        `python -m benchmarks.bits` tests a GPU, and none has run it.
      deterministic: give gradients of equal inputs equal bits. With False the backward
        kernel of "mosaic_gpu" for heads that are not wide (see `dkv`) adds to the
        gradient of query in any order, as other libraries do, so that no program waits
        for all before it; last bits then differ from call to call. All other kernels
        have one order anyway.

    Raises:
      TypeError, ValueError: if a field is not as above.

    Example:
      >>> from jax_flash2 import Blocks, Config
      >>> Config(forward=Blocks(128, 64, num_warps=4, num_stages=3)).interpret
      False
    """

    forward: Blocks | None = None
    dkv: Blocks | None = None
    dk: Blocks | None = None
    dv: Blocks | None = None
    dq: Blocks | None = None
    dbias: Blocks | None = None
    splits: int | None = None
    interpret: bool = False
    invariant: bool = False
    deterministic: bool = True

    def __post_init__(self):
        for kernel in KERNELS:
            blocks = getattr(self, kernel)
            if blocks is not None and not isinstance(blocks, Blocks):
                raise TypeError(
                    f"{kernel} must be a jax_flash2.Blocks or None, got {blocks!r}"
                )
        splits = self.splits
        if splits is not None:
            if isinstance(splits, bool) or not isinstance(splits, int):
                raise TypeError(f"splits must be an int or None, got {splits!r}")
            if splits < 1:
                raise ValueError(f"splits must be at least 1, got {splits}")
        for name in ("interpret", "invariant", "deterministic"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {value!r}")
        if self.invariant:
            self._check_invariant()

    def _check_invariant(self) -> None:
        """Raises a ValueError if other fields break what `invariant` promises."""
        if self.splits not in (None, 1):
            raise ValueError(
                f"splits={self.splits} does not go with invariant=True: parts of the "
                f"keys begin at multiples of {PART} there, so splits must be None or 1"
            )
        blocks = self.forward
        if blocks is not None and PART % blocks.block_kv:
            raise ValueError(
                f"block_kv={blocks.block_kv} of forward does not go with "
                f"invariant=True: it must divide {PART}, the keys of a part"
            )

    def blocks(self, kernel: str) -> Blocks | None:
        """The caller's blocks for one of `KERNELS`, or of those in `LIKE`."""
        chosen = getattr(self, LIKE.get(kernel, kernel))
        return self.dkv if chosen is None and kernel in ("dk", "dv") else chosen
