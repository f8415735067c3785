"""`Blocks` and `Config`: what a caller may say about how the kernels of a call run."""

from __future__ import annotations

import dataclasses

# Each kernel has its blocks in `Config`.
KERNELS = ("forward", "dkv", "dk", "dv", "dq", "dbias")
# Others have the blocks of one of those, for fewer keys: the kernel of tangents.
LIKE = {"tangent": "dq"}

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
        backend has one of the gradient, for wide heads only, and "mosaic_gpu_tangent"
        one of tangents.
      dbias: blocks of the kernel that computes the gradient of `bias`, `alibi_slopes`
        or a `scale` that is an array.
      splits: into how many parts each kernel divides the work of a block of rows, from
        1 (not at all) to S / 16 for S keys. Parts run side by side, and the kernels
        put them together: keys of few queries, query heads that share a key/value head,
        heads and batch entries that share a bias. None lets the library choose from the
        sizes of a call and the GPU. With a number, and with blocks given too, the bits
        of an output row do not depend on how many rows are in the batch.
      interpret: run the kernels in Pallas's interpreter: slow, on any platform.

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
        if not isinstance(self.interpret, bool):
            raise TypeError(f"interpret must be a bool, got {self.interpret!r}")

    def blocks(self, kernel: str) -> Blocks | None:
        """The caller's blocks for one of `KERNELS`, or of those in `LIKE`."""
        chosen = getattr(self, LIKE.get(kernel, kernel))
        return self.dkv if chosen is None and kernel in ("dk", "dv") else chosen
