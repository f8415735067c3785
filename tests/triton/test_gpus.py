"""`tests.gpus`: kernels compiled for GPUs that are not here, and what a fault is."""

import dataclasses
import re
import subprocess
import sys

import pytest

from pallas_kernels.device import Gpu
from tests import gpus
from tests.gpu_calls import CALLS, SPILLED
from tests.gpu_targets import TARGETS
from tests.tiers import deep

GOOD = gpus.Kernel(
    name="dq",
    blocks=[64, 64, 8, 2, None, 0],
    estimate=80 << 10,
    threads=256,
    shared_memory=72 << 10,
    registers=160,
    spilled=0,
)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("rtx4090", {}, None),
        ("rtx4090", {"spilled": 128}, None),
        ("rtx4090", {"spilled": 129}, "dq spills 129 bytes a thread"),
        ("gh200", {"spilled": 480}, None),
        (
            "b200",
            {"shared_memory": 81 << 10},
            "takes 82944 bytes of .* estimated 81920",
        ),
        ("a100", {"estimate": 94 << 10}, "of which 96256 is more than 1.3 times"),
        ("a100", {"estimate": 94 << 10, "name": "dslopes"}, "more than 1.3 times"),
        ("rtx4090", {"threads": 128}, "leaves 4 warps on a multiprocessor"),
        ("a100", {"threads": 128}, None),
    ],
)
def test_what_a_fault_is(name, changes, words):
    kernel = dataclasses.replace(GOOD, **changes)
    found = list(kernel.faults(TARGETS[name], 128))
    assert len(found) == (words is not None)
    assert all(re.search(words or "", x) for x in found)


def test_exceptions_are_of_calls_that_there_are():
    kernel = dataclasses.replace(GOOD, spilled=232)
    assert not [*kernel.faults(TARGETS["rtx4090"], 128, 240)]
    assert {call.name for call in CALLS} >= {*SPILLED}


def test_described_gpus_are_those_that_the_library_knows():
    for target in TARGETS.values():
        gpu = Gpu.named(target.kind)
        assert gpu.capability == round(10 * float(target.capability))
        assert gpu.core_count == target.multiprocessors
        assert gpu.shared_memory == target.shared_memory


def test_calls_have_names_of_their_own():
    assert len({call.name for call in CALLS}) == len(CALLS) == 79
    assert sum(call.quick for call in CALLS) == 15


@deep
@pytest.mark.skipif(gpus.missing() is not None, reason=str(gpus.missing()))
@pytest.mark.parametrize("name", gpus.FAMILIES)
def test_calls_compile_for_a_gpu_of_each_family(name):
    command = [sys.executable, "-m", "tests.gpus", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"ok {name}: ") == 15
