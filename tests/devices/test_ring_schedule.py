"""Kernels run while the keys of a ring travel (`tests.ring_schedule`)."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ring_schedule
from tests.ring_schedule import Step
from tests.tiers import deeply

# What XLA prints, without most of its attributes and of what is between.
TEXT = """
HloModule jit_call, is_scheduled=true

%fused (p: bf16[8]) -> bf16[8] {
  ROOT %convert.1 = bf16[8]{0} convert(%p)
}

%body.1 (arg: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %collective-permute-start.1 = ((bf16[8]{0}), bf16[8]{0}) collective-permute-start(%x)
  %call.1 = (f32[8]{0}, f32[1]{0}) custom-call(%q), backend_config={\
ir = "flash2_x", name = "flash2_forward", num_warps = 8 : i32}
  %collective-permute-done.1 = bf16[8]{0} collective-permute-done(\
%collective-permute-start.1), metadata={op_name="jit(call)/ppermute"}
  ROOT %tuple.1 = (s32[], bf16[8]{0}) tuple(%i, %collective-permute-done.1)
}

ENTRY %main (p: bf16[8]) -> bf16[8] {
  %p.1 = bf16[8]{0} parameter(0), metadata={op_name="flash2_forward"}
  %collective-permute-start = ((bf16[8]{0}), bf16[8]{0}) collective-permute-start(%p.1)
  %call = (f32[8]{0}, f32[1]{0}) custom-call(%q), backend_config={\
ir = "flash2_x", name = "flash2_forward", num_warps = 8 : i32}
  %fusion = bf16[8]{0} fusion(%p.1), kind=kLoop, calls=%fused
  %collective-permute-done = bf16[8]{0} collective-permute-done(\
%collective-permute-start), metadata={op_name="jit(call)/ppermute"}
  %while = (s32[], bf16[8]{0}) while(%tuple), condition=%condition.1, body=%body.1, \
backend_config={"known_trip_count":{"n":"2"}}
  ROOT %permute = bf16[8]{0} collective-permute(%fusion), channel_id=1
}
"""


def test_steps():
    program = ring_schedule.steps(TEXT)
    round_ = [
        Step("start", "collective-permute-start.1"),
        Step("kernel", "flash2_forward"),
        Step("done", "collective-permute-start.1"),
    ]
    first = [Step(x.kind, x.name.removesuffix(".1")) for x in round_]
    assert program == {
        "body.1": round_,
        "main": [*first, Step("loop", "body.1", 2), Step("permutation", "permute")],
    }
    assert [x.kind for x in ring_schedule.executed(program)] == [
        *["start", "kernel", "done"] * 3,
        "permutation",
    ]
    assert list(ring_schedule.show(program))[3:5] == [
        "loop of 2 rounds",
        "  start 1",
    ]


def test_faults():
    program = ring_schedule.steps(TEXT)
    assert ring_schedule.faults(program, "forward", 4) == [
        "no kernel runs beside permute",
        "4 permutations instead of 3",
    ]
    round_ = {"main": program["body.1"]}
    assert ring_schedule.faults(round_, "backward", 2) == []
    late = {"main": [Step("permutation", "first"), *program["body.1"]]}
    assert ring_schedule.faults(late, "backward", 4) == [
        "no kernel runs beside first",
        "2 permutations instead of 4",
    ]
    conditional = {"main": [*program["body.1"], Step("conditional", "cond.1")]}
    assert ring_schedule.faults(conditional, "forward", 2) == [
        "cond.1 is a conditional"
    ]


def _has_compiler() -> bool:
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    names = (f"jax_plugins.xla_cuda{version}" for version in (12, 13))
    return any(importlib.util.find_spec(name) is not None for name in names)


@pytest.mark.skipif(not _has_compiler(), reason="XLA's compiler for GPUs is missing")
@pytest.mark.parametrize(
    ("which", "devices", "rows"),
    deeply(
        ("both", "4", "stripes"),
        ("forward", "2", "stripes"),
        ("both", "2", "stripes"),
        ("forward", "4", "stripes"),
        ("backward", "4", "stripes"),
        ("both", "4", "one-run"),
        ("both", "8", "stripes"),
        ("both", "8", "one-run"),
        ("both", "4", "triton"),
        ("both", "8", "triton"),
    ),
)
def test_kernels_run_while_keys_travel(which, devices, rows):
    """In a process of its own: the tests' flags are for compiling on CPUs."""
    env = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "tests.ring_schedule", which, devices, rows]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
