"""Programs that wait for each other, while others hold most of the same GPU.

A program of the backward kernel waits only for programs of lower indices. So it is
enough that a single multiprocessor is left.
"""

import contextlib
import ctypes
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import attention
from pallas_kernels import device
from tests.cases import by_name
from tests.mosaic import MOSAIC, assert_same_bits, on_hopper
from tests.tiers import deeply

# A kernel that does nothing for so many nanoseconds.
_WAIT = b"""\
.version 7.0
.target sm_80
.address_size 64
.visible .entry nothing(.param .u64 nanoseconds)
{
    .reg .u64 %begun, %now, %least;
    .reg .pred %early;
    ld.param.u64 %least, [nanoseconds];
    mov.u64 %begun, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begun;
    setp.lt.u64 %early, %now, %least;
    @%early bra again;
    ret;
}
"""
_SHARED_MEMORY_ATTRIBUTE, _NON_BLOCKING, _NOT_READY = 8, 1, 600
_SECONDS = 5


class _Driver:
    """The CUDA driver, in the context that JAX uses."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *arguments) -> None:
        status = getattr(self.library, name)(*arguments)
        assert status == 0, f"{name} returned {status}"

    def is_busy(self, stream) -> bool:
        return self.library.cuStreamQuery(stream) == _NOT_READY


@contextlib.contextmanager
def _held(multiprocessors: int):
    """That many do nothing else; yields whether they are still held."""
    driver = _Driver()
    stream, module, kernel = (ctypes.c_void_p() for _ in range(3))
    driver("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    driver("cuModuleLoadData", ctypes.byref(module), _WAIT)
    driver("cuModuleGetFunction", ctypes.byref(kernel), module, b"nothing")
    all_of_it = device.shared_memory_limit()
    driver("cuFuncSetAttribute", kernel, _SHARED_MEMORY_ATTRIBUTE, all_of_it)
    nanoseconds = ctypes.c_uint64(_SECONDS * 10**9)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(nanoseconds))
    grid, block = (multiprocessors, 1, 1), (32, 1, 1)
    driver("cuLaunchKernel", kernel, *grid, *block, all_of_it, stream, parameters, None)
    try:
        yield functools.partial(driver.is_busy, stream)
    finally:
        driver("cuStreamSynchronize", stream)
        driver("cuStreamDestroy_v2", stream)
        driver("cuModuleUnload", module)


def _gradients(name: str, size: int):
    """A compiled call with its gradients, and its operands."""
    case = by_name(name)
    arrays, arguments = case.inputs(jnp.bfloat16)
    shape = (2, size, 4, 128)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in arrays]

    @jax.jit
    def run(q, k, v):
        call = functools.partial(attention, **arguments, **MOSAIC)
        out, vjp = jax.vjp(call, q, k, v)
        return out, *vjp(out)

    return run, arrays


@on_hopper
@pytest.mark.parametrize("free", [1, 8])
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_beside_a_kernel_that_holds_the_gpu(name, free, any_size):
    """The call ends before that kernel does, with the same bits."""
    run, arrays = _gradients(name, 2048)
    alone = jax.device_get(run(*arrays))
    with _held(device.multiprocessors() - free) as still_held:
        found = jax.block_until_ready(run(*arrays))
        assert still_held()
    for a, b in zip(jax.device_get(found), alone, strict=True):
        np.testing.assert_array_equal(a, b)


_PROCESS = """
import hashlib, jax
from tests.devices.test_busy_gpu import _gradients
run, arrays = _gradients("causal", 4096)
found = set()
for _ in range(100):
    leaves = jax.device_get(run(*arrays))
    found.add(hashlib.sha256(b"".join(x.tobytes() for x in leaves)).hexdigest())
print(*found)
"""


@on_hopper
def test_two_processes_on_one_gpu():
    start = functools.partial(subprocess.Popen, stdout=subprocess.PIPE, text=True)
    both = [start([sys.executable, "-c", _PROCESS]) for _ in range(2)]
    first, second = (x.communicate(timeout=300)[0].split() for x in both)
    assert all(x.returncode == 0 for x in both)
    assert len(first) == 1 and first == second


@on_hopper
@pytest.mark.parametrize("size", deeply(2048))
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_a_thousand_times_the_same_bits(name, size):
    assert_same_bits(*_gradients(name, size), 1000)
