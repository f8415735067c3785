"""Kernels that are compiled while what comes after them is lowered."""

import functools
import itertools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jax_flash2 import _ahead
from jax_flash2._operation import Operation
from pallas_kernels import device
from tests.cases import ON_GPU
from tests.lowering import on_gpu
from tests.transforms.test_kept import A100, H200, HALVES, LONG, gradients, lower


@pytest.fixture
def begun(monkeypatch):
    """What happens, in order, as if the GPU were here.

    Names of halves, as they are traced in modules of their own, and those modules.
    """
    events, make = [], Operation._implementation

    def traced(self, *arrays, **params):
        events.append(self.name)
        return make(self, *arrays, **params)

    monkeypatch.setattr(Operation, "_implementation", traced)
    monkeypatch.setattr(device, "gpu_is_here", lambda: True)
    monkeypatch.setattr(_ahead, "start", events.append)
    yield events
    jax.clear_caches()


def kernels(text: str) -> list[str]:
    """Mosaic GPU's modules, as the compiler compares them."""
    return sorted(re.findall(r'module = "((?:[^"\\]|\\.)*)"', text))


def test_each_half_before_the_next_is_lowered(begun):
    program = lower(LONG, LONG, LONG, gpu=H200)
    forward, backward = begun[1], begun[3]
    assert begun == [HALVES[0], forward, HALVES[1], backward]
    found = [kernels(x.as_text()) for x in (forward, backward)]
    assert all(found) and sorted(itertools.chain(*found)) == kernels(program)


@pytest.mark.parametrize("gpu", [A100, H200])
def test_triton_compiles_a_kernel_for_each_program(begun, gpu):
    assert "flash2_forward" in lower(gpu=gpu, implementation="triton")
    assert begun == []


def test_only_where_the_gpu_is(begun, monkeypatch):
    monkeypatch.setattr(device, "gpu_is_here", lambda: False)
    assert kernels(lower(LONG, LONG, LONG, gpu=H200))
    assert begun == []


def test_exports_are_for_other_machines(begun):
    unchecked = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    with on_gpu(H200):
        run = jax.jit(gradients)
        export.export(run, platforms=["cuda"], disabled_checks=unchecked)(*[LONG] * 3)
    assert begun == []


def test_what_cannot_be_compiled_is_left_to_the_program():
    def of(function):
        return jax.jit(function).lower(1.0)

    def refused(x):
        return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((), x.dtype))(x)

    found = [_ahead.start(of(x)) for x in (lambda x: x + 1, refused)]
    assert [x and x.result() for x in found] == [True, False]


AT_THE_END = """
import atexit
import jax
from jax_flash2 import _ahead

lowered = jax.jit(lambda x: x + 1).lower(1.0)
assert _ahead.start(lowered).result()
atexit.register(lambda: print(_ahead.start(lowered)))
"""


def test_a_program_that_is_lowered_when_python_ends():
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"


@pytest.mark.skipif(not ON_GPU, reason="kernels run on GPUs")
@pytest.mark.parametrize("implementation", ["mosaic_gpu", None])
def test_same_results(monkeypatch, implementation):
    if implementation and device.capability() != 90:
        pytest.skip("no Hopper GPU")
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, LONG.shape, LONG.dtype) for key in keys]
    begun, start = [], _ahead.start
    monkeypatch.setattr(_ahead, "start", lambda x: begun.append(start(x)))

    def results():
        jax.clear_caches()
        run = functools.partial(gradients, implementation=implementation)
        return jax.device_get(jax.jit(run)(*arrays))

    ahead = results()
    assert len(begun) == (2 if device.capability() == 90 else 0)
    assert all(x.result() for x in begun)
    monkeypatch.setattr(_ahead, "is_worthwhile", lambda backends: False)
    for a, b in zip(ahead, results(), strict=True):
        assert np.any(a) and a.tobytes() == b.tobytes()
    assert jnp.all(jnp.isfinite(ahead[0]))
