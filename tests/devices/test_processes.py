"""Rows divided over the devices of two processes, as on two hosts."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.project.test_recipes import sections
from tests.tiers import deep

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 240  # seconds

# The recipe by the ring, which so few rows would not take.
BEFORE = """
import jax, sys
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:" + sys.argv[1], 2, int(sys.argv[2]))
from jax_flash2 import _context
_context._rows = {"few_rows": 0, "many_rows": 1 << 17}.get
"""
# The recipe compares with one device, too, with a GPU's tolerance.
AFTER = """
assert (jax.process_count(), jax.device_count()) == (2, 4)
assert not gradient.is_fully_addressable
assert "ppermute" in str(jax.make_jaxpr(divided)(embedding, *batch))
for a, b in zip(jax.device_get((loss, gradient)), expected):
    np.testing.assert_allclose(a, b, rtol=0, atol=100 * 2.0**-23 * np.max(np.abs(b)))
"""


def unused_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@deep
def test_ring_over_two_processes(tmp_path):
    """Forward and backward, with two devices in each."""
    code = BEFORE + sections()["Long-context training"] + AFTER
    port = str(unused_port())
    flags = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    )
    logs = [tmp_path / str(rank) for rank in range(2)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, "-c", code, port, str(rank)],
                    cwd=ROOT,
                    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        end = time.monotonic() + TIME_LIMIT
        while any(p.poll() is None for p in processes) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        codes = [p.poll() for p in processes]  # None: still running
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
