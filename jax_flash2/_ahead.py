"""Kernels that are compiled while JAX still lowers what comes after them.

JAX lowers a whole program before XLA compiles any of it: seconds of Python on one core,
for a program with gradients. Then Mosaic GPU compiles its kernels, one after the other.
It keeps what it compiled for all programs of the process. So a half of a call is
compiled alone, on another thread, as soon as it is lowered: the backward is lowered
meanwhile, and XLA then finds the forward's kernel, or waits until it is compiled.

The environment variable `JAX_FLASH2_AHEAD` set to "off" leaves all to XLA.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

import jax

from pallas_kernels import device

try:
    from jax._src.interpreters import pxla
except ImportError:  # a private name: see `_let_go`
    pxla = None

VARIABLE = "JAX_FLASH2_AHEAD"
OFF = "off"
_BACKEND = "mosaic_gpu"  # whose compiler keeps what it compiled
_MOST = 3  # halves that are compiled, or wait for it; more would come too late

_room = threading.BoundedSemaphore(_MOST)
_turn = threading.Lock()
_started: set[str] = set()


def is_worthwhile(backends: Sequence[str]) -> bool:
    """Whether XLA may find the kernels of a half that these make compiled."""
    is_on = os.environ.get(VARIABLE) != OFF
    return is_on and _BACKEND in backends and device.gpu_is_here()


def start(digest: str, lowered: jax.stages.Lowered) -> threading.Thread | None:
    """Begins to compile a half, once in a process.

    Errors are dropped: the program that has the half meets them again.

    Args:
      digest: names the half.
      lowered: the half, which the caller no longer touches.

    Returns:
      The thread; None if the half was started before, if others wait, or if Python
      starts no thread any more.
    """
    if digest in _started or not _room.acquire(blocking=False):
        return None
    thread = threading.Thread(target=_in_turn, args=(lowered,), name="jax_flash2")
    try:
        thread.start()
    except RuntimeError:  # Python is ending
        _room.release()
        return None
    _started.add(digest)
    return thread


def _in_turn(lowered: jax.stages.Lowered) -> None:
    try:
        with _turn:
            if threading.main_thread().is_alive():  # else Python waits for this one
                compile_alone(lowered)
    finally:
        _room.release()


def compile_alone(lowered: jax.stages.Lowered) -> bool:
    """Compiles a half, keeps nothing of it, and says whether it could."""
    try:
        lowered.compile()
    except Exception:
        return False
    with contextlib.suppress(AttributeError):
        _let_go(lowered)
    return True


def _let_go(lowered) -> None:
    """Lets go of what was compiled, which caches of JAX hold on to.

    In 0.11.2 to 0.12.0.1 they keep each program that is lowered with `keep_unused`.
    """
    lowered._lowering._executable = None
    if pxla is not None:
        pxla._cached_compilation.evict_weakref(lowered.compiler_ir())
