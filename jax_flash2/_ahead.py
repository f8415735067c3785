"""Kernels that are compiled while JAX still lowers what comes after them.

JAX lowers a whole program before XLA compiles any of it: seconds of Python on one core,
for a program with gradients. Then XLA compiles Mosaic GPU's kernels one after the
other, each once in a process, whatever programs have it. So a half of a call is
compiled alone, on a thread of its own, as soon as it is lowered: the backward is
lowered meanwhile, and XLA finds the forward's kernel compiled, or waits for the rest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from pallas_kernels import device

# The backend whose kernels the GPU's compiler finds again. It compiles one at a time.
_BACKEND = "mosaic_gpu"


def is_worthwhile(backends: Sequence[str]) -> bool:
    """Whether a half that these make has a kernel that XLA will find compiled."""
    return _BACKEND in backends and device.gpu_is_here()


def start(lowered: jax.stages.Lowered) -> Future | None:
    """Begins to compile a half, which no other thread touches from now on.

    What it finds wrong it keeps to itself: the program that has the half says it.

    Returns:
      Whether the half could be compiled, once it is; None where Python is ending.
    """
    with contextlib.suppress(RuntimeError):
        return _thread().submit(_compile, lowered)
    return None


def _compile(lowered: jax.stages.Lowered) -> bool:
    with contextlib.suppress(Exception):
        lowered.compile()
        return True
    return False


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="jax_flash2")
