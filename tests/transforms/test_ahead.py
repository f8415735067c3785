"""Kernels that are compiled while what comes after them is lowered."""

import functools
import gc
import itertools
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jax_flash2 import _ahead, _kept
from jax_flash2._operation import Operation
from pallas_kernels import device
from tests.cases import ON_GPU
from tests.lowering import on_gpu
from tests.settings import configured
from tests.tiers import deep
from tests.transforms.test_kept import A100, H200, HALVES, LONG, gradients, lower


@pytest.fixture(autouse=True)
def is_on(monkeypatch):
    monkeypatch.delenv(_ahead.VARIABLE)
    monkeypatch.setattr(_ahead, "_started", set())
    yield
    jax.clear_caches()


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
    monkeypatch.setattr(_ahead, "start", lambda digest, x: events.append(x))
    return events


def kernels(text: str) -> list[str]:
    """Mosaic GPU's modules, as the compiler compares them."""
    return sorted(re.findall(r'module = "((?:[^"\\]|\\.)*)"', text))


def program(factor: float = 1.0) -> jax.stages.Lowered:
    """One that is quick to compile."""
    run = jax.jit(lambda x: x * factor, keep_unused=True)
    return run.lower(jax.ShapeDtypeStruct((4,), jnp.float32))


# Which halves.


def test_each_half_before_the_next_is_lowered(begun):
    whole = lower(LONG, LONG, LONG, gpu=H200)
    forward, backward = begun[1], begun[3]
    assert begun == [HALVES[0], forward, HALVES[1], backward]
    found = [kernels(x.as_text()) for x in (forward, backward)]
    assert all(found) and sorted(itertools.chain(*found)) == kernels(whole)


@pytest.mark.parametrize("gpu", [A100, H200])
def test_triton_compiles_a_kernel_for_each_program(begun, gpu):
    assert "flash2_forward" in lower(gpu=gpu, implementation="triton")
    assert begun == []


def test_only_where_the_gpu_is(begun, monkeypatch):
    monkeypatch.setattr(device, "gpu_is_here", lambda: False)
    assert kernels(lower(LONG, LONG, LONG, gpu=H200))
    assert begun == []


@deep
def test_off(begun, monkeypatch):
    monkeypatch.setenv(_ahead.VARIABLE, _ahead.OFF)
    assert kernels(lower(LONG, LONG, LONG, gpu=H200))
    assert begun == []


@deep
def test_exports_are_for_other_machines(begun):
    unchecked = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    with on_gpu(H200):
        run = jax.jit(gradients)
        export.export(run, platforms=["cuda"], disabled_checks=unchecked)(*[LONG] * 3)
    assert begun == []


@deep
def test_programs_for_several_platforms_are_not_compiled(begun):
    with on_gpu(H200):
        traced = jax.jit(gradients).trace(LONG, LONG, LONG)
        text = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert kernels(text) and begun == []


def test_what_is_read_from_disk_is_not_compiled_ahead(begun, monkeypatch, tmp_path):
    """Its program most likely comes from JAX's cache."""
    monkeypatch.delenv(_kept.VARIABLE)
    with configured({"jax_compilation_cache_dir": str(tmp_path)}):
        first = lower(LONG, LONG, LONG, gpu=H200)
        assert len(begun) == 4
        assert lower(LONG, LONG, LONG, gpu=H200) == first
        assert len(begun) == 4
        (backward,) = tmp_path.glob("*/flash2_backward*")
        backward.write_bytes(b"damaged")
        again = lower(LONG, LONG, LONG, gpu=H200)
        # JAX 0.11 numbers modules: what a process makes anew is not the same.
        numbers = (0, 11) <= jax.__version_info__ < (0, 12)
        assert (again == first) != numbers
        assert len(kernels(again)) == len(kernels(first)) == 2
    assert len(begun) == 6 and begun[4] == "flash2_backward"


# How.


def test_what_cannot_be_compiled_is_left_to_the_program():
    def refused(x):
        return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((), x.dtype))(x)

    assert _ahead.compile_alone(program())
    assert not _ahead.compile_alone(jax.jit(refused).lower(1.0))


def test_a_half_is_compiled_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(_ahead, "compile_alone", compiled.append)
    one, other = program(), program(2.0)
    threads = [_ahead.start(x, y) for x, y in (("a", one), ("a", one), ("b", other))]
    assert threads[1] is None
    for thread in filter(None, threads):
        thread.join()
    assert sorted(map(id, compiled)) == sorted(map(id, (one, other)))


def test_few_others_wait(monkeypatch):
    """What is wanted soon would come after them."""
    first, ended = threading.Event(), threading.Event()

    def compile_alone(lowered):
        first.set()
        ended.wait()

    monkeypatch.setattr(_ahead, "compile_alone", compile_alone)
    threads = [_ahead.start(str(i), program()) for i in range(5)]
    has_begun = first.wait(60)
    ended.set()
    for thread in filter(None, threads):
        thread.join()
    assert has_begun
    assert threads[3:] == [None, None] and None not in threads[:3]
    (again := _ahead.start("4", program())).join()  # there is room for it now
    assert not again.is_alive()


def test_nothing_stays_of_what_was_compiled():
    """JAX 0.11 and 0.12 keep programs that are lowered with `keep_unused`."""
    client = jax.devices()[0].client

    def loaded() -> int:
        gc.collect()
        return len(client.live_executables())

    before = loaded()
    for i in range(10):
        assert _ahead.compile_alone(program(i + 0.5))
    assert loaded() == before


AT_THE_END = """
import atexit
import jax
from jax_flash2 import _ahead

lowered = jax.jit(lambda x: x + 1).lower(1.0)

@atexit.register
def late():
    _ahead.start("b", lowered)
    print("ended")
"""
WAITING = """
import threading, time
from jax_flash2 import _ahead

def compile_alone(lowered):
    print(lowered)
    while threading.main_thread().is_alive():
        time.sleep(0.01)

_ahead.compile_alone = compile_alone
threads = [_ahead.start(str(i), i) for i in range(3)]
"""


def printed(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@deep
def test_a_program_that_is_lowered_when_python_ends():
    """Python 3.12.0 to 3.12.2 start no thread any more."""
    assert printed(AT_THE_END) == ["ended"]


def test_an_end_of_python_waits_for_no_other_half():
    assert printed(WAITING) == ["0"]


@pytest.mark.skipif(not ON_GPU, reason="kernels run on GPUs")
@pytest.mark.parametrize("implementation", ["mosaic_gpu", None])
def test_same_results(monkeypatch, implementation):
    is_hopper = device.capability() == 90
    if implementation and not is_hopper:
        pytest.skip("no Hopper GPU")
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, LONG.shape, LONG.dtype) for key in keys]
    compiled, compile_alone = [], _ahead.compile_alone
    monkeypatch.setattr(
        _ahead, "compile_alone", lambda x: compiled.append(compile_alone(x))
    )

    def results():
        jax.clear_caches()
        run = functools.partial(gradients, implementation=implementation)
        return jax.device_get(jax.jit(run)(*arrays))

    ahead = results()
    for thread in threading.enumerate():
        if thread.name == "jax_flash2":
            thread.join()
    assert compiled == [True] * 2 * is_hopper
    monkeypatch.setenv(_ahead.VARIABLE, _ahead.OFF)
    for a, b in zip(ahead, results(), strict=True):
        assert np.any(a) and a.tobytes() == b.tobytes()
    assert np.all(np.isfinite(np.asarray(ahead[0], np.float32)))
