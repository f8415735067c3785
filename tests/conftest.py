"""Test settings that must be made before JAX starts, and the platform's facts."""

import os
import tempfile

# Eight CPU devices for pmap and sharding; many test processes on one GPU, where XLA
# would time candidates for every product of a reference.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_gpu_autotune_level=0",
        # Most of what the tests take on a CPU is the compiler: so it needs 6 parts of
        # 10.
        *(
            []
            if os.path.exists("/proc/driver/nvidia")
            else [
                "--xla_backend_optimization_level=0",
                "--xla_cpu_parallel_codegen_split_count=1",
                "--xla_cpu_prefer_vector_width=128",
            ]
        ),
    ]
)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# What was compiled is kept for the other test processes, other tiers and later runs, in
# which tests take a third of the time. JAX finds it by program, options and versions.
os.environ.update(
    JAX_COMPILATION_CACHE_DIR=f"{tempfile.gettempdir()}/jax_{os.getuid()}_tests",
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="0",
)
# Tests change what programs are made of; what was lowered before is then not meant.
os.environ["JAX_FLASH2_KEPT"] = os.environ["JAX_FLASH2_AHEAD"] = "off"
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import jax
import pytest

# A first example compiles; how long that takes is no one's fault. `search` is for long
# random runs: pytest tests/kernels/test_search.py --hypothesis-profile=search
# The default does not shrink what fails: each try compiles anew.
hypothesis.settings.register_profile(
    "default",
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.register_profile(
    "search",
    max_examples=int(os.environ.get("SEARCH_EXAMPLES", "2000")),
    deadline=None,
    derandomize=False,
)
hypothesis.settings.load_profile("default")


def pytest_configure(config):
    # A process may read what another one has not written to the end, and compiles it.
    for what in ("reading", "writing"):
        text = f"ignore:Error {what} persistent compilation cache"
        config.addinivalue_line("filterwarnings", text)


@pytest.fixture(autouse=True, scope="module")
def _let_go():
    """Of what a file's tests compiled; a process for each core would fill memory."""
    yield
    jax.clear_caches()


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of the xla backend on any platform as on CPUs; on GPUs they are large."""
    monkeypatch.setattr("jax_flash2._chunked._PAIRS_OF_GPUS", 0)


@pytest.fixture
def any_size(monkeypatch):
    """Calls for which Mosaic GPU's backward is not fast go to it, too."""
    from tests.mosaic import with_any_size

    with_any_size(monkeypatch)


@pytest.fixture
def multiprocessors(monkeypatch):
    """Sets how many the GPU is said to have: with few, programs have many tiles."""

    def set_count(count: int) -> None:
        jax.clear_caches()
        monkeypatch.setattr("pallas_kernels.device.multiprocessors", lambda: count)

    yield set_count
    jax.clear_caches()


def pytest_terminal_summary(terminalreporter):
    """How near the results came to what the error rule allows (`record_property`)."""
    found = [
        (value, report.nodeid)
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "share of the allowed error"
    ]
    if found:
        worst, test = max(found)
        terminalreporter.write_line(
            f"error rule: {len(found)} checks, worst {worst:.3f} of the allowed: {test}"
        )
