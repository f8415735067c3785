"""Versions beside each other: what is said of them, and of those that are not there."""

import shutil

import pytest

import jax_flash2
from benchmarks import records, versions
from tests.project.test_benchmarks import ran
from tests.tiers import deep


@deep
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--versions=nothing", "'nothing' is no folder and no commit"),
        ("--calls=nothing", "found in no call's name"),
    ],
)
def test_versions_that_there_are_not(flag, message):
    done = ran("versions", "--small", "--calls=window 1024", flag)
    assert done.returncode != 0
    assert message in done.stderr


@deep
def test_versions_side_by_side(tmp_path):
    for name in ("jax_flash2", "pallas_kernels"):
        shutil.copytree(records.ROOT / name, tmp_path / name)
    versions = f"--versions=.,{tmp_path}"
    done = ran("versions", "--small", "--calls=window 1024", "--rounds=1", versions)
    assert done.returncode == 0, done.stderr
    (header,) = (x for x in done.stdout.splitlines() if x.startswith("call"))
    assert header == f"call | pass | . | {tmp_path}"
    rows = [x for x in done.stdout.splitlines() if x.startswith("window 1024")]
    assert [row.split(" | ")[1] for row in rows] == ["forward", "forward and backward"]
    assert all(row.split(" | ")[2].endswith("us (1.000)") for row in rows)


@deep
def test_a_version_that_is_wrong_is_seen():
    def attention(*arrays, implementation=None, **more):
        out = jax_flash2.attention(*arrays, implementation="xla", **more)
        return out if implementation == "xla" else 1.1 * out

    call = versions.CALLS["window 1024, 1 x 16384, 32 x 64"].small()
    for wrong, function in ((False, jax_flash2.attention), (True, attention)):
        for _, error in versions.programs(call, function).values():
            assert (error > 2**-5) == wrong
    row = {"seconds": 1e-3, "wrong": True}
    assert versions.cell(row, 2e-3) == "1000 us (2.000) WRONG"
