"""The benchmark of rows divided over devices: its rows, its tables, bytes moved."""

import dataclasses
import math
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import (
    context_alone,
    context_peers,
    context_rows,
    context_tables,
    figures,
    harness,
    records,
)
from benchmarks.context_calls import MASKS, Case, by_rows, bytes_moved, mesh_of
from benchmarks.context_peers import PEERS
from tests.tiers import deep, deeply

pytestmark = pytest.mark.skipif(
    jax.device_count() < 3, reason="needs three devices, simulated or not"
)


def case_of(mask: str, parts: int, heads: int = 6) -> Case:
    case = Case("weak", mask, MASKS[mask], parts, 32, heads, 3, 8, "float32", 16)
    return case.resized(parts, 32)


def test_bytes_by_hand():
    """Two devices of 32 rows, K 3, H 8: 192 bytes a row of keys and as many of values.

    Of two devices the ring's backward moves gradients alone.
    """
    ring, window = case_of("full", 2), case_of("window1024", 2)
    assert bytes_moved(ring, "ring", "forward") == 32 * 192
    assert bytes_moved(ring, "ring", "forward_backward") == 2 * 32 * 192
    three = ring.resized(3, 32)
    assert bytes_moved(three, "ring", "forward_backward") == (2 + 2 + 2) * 32 * 192
    assert bytes_moved(ring, "gather", "forward_backward") == 2 * 32 * 192
    # Heads: half of (6 + 3 + 3 + 6) * 8 numbers of 4 bytes a row.
    assert bytes_moved(ring, "heads", "forward") == 32 * 18 * 8 * 4 // 2
    assert window.mask.window == 32
    assert bytes_moved(window, "halo", "forward") == 32 * 192
    half = dataclasses.replace(ring, dtype="bfloat16")
    assert bytes_moved(half, "ring", "forward") == 32 * 96
    assert bytes_moved(half, "ring", "forward_backward") == 32 * 96 + 32 * 192
    assert bytes_moved(case_of("documents", 2), "ring", "forward") == 32 * (192 + 4)
    assert bytes_moved(ring.resized(1, 64), "ring", "forward") == 0


def received(text: str, parts: int) -> int:
    """Bytes that the collectives of a compiled program bring to a device."""
    size, total = {"f32": 4, "s32": 4, "u32": 4}, 0.0
    kinds = "collective-permute|all-to-all|all-gather"
    for line in text.splitlines():
        op = re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line)
        if op is None:
            continue
        part = 1 if op[2] == "collective-permute" else (parts - 1) / parts
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", op[1]):
            total += part * size[dtype] * math.prod(map(int, dims.split(",")))
    return round(total)


@pytest.mark.parametrize("parts", [3, *deeply(2)])
@pytest.mark.parametrize(
    ("mask", "method", "which"),
    [
        ("window1024", "halo", "forward_backward"),
        *deeply(
            ("documents", "ring", "forward_backward"),
            ("causal", "ring", "forward"),
            ("documents", "gather", "forward_backward"),
            ("documents", "heads", "forward_backward"),
        ),
    ],
)
def test_bytes_are_those_of_the_program(mask, method, which, parts):
    case = case_of(mask, parts, heads=3 if parts == 3 else 6)
    if method == "heads":
        case = dataclasses.replace(case, heads=6, kv_heads=6)
    text = str(context_rows.compiled(case, PEERS[method], which).as_text())
    assert received(text, parts) == bytes_moved(case, method, which)


def test_pairs_and_their_balance():
    """Counted from a mask; stripes share them out, runs of rows do not."""
    for name in MASKS:
        case = case_of(name, 4)
        row, key = np.arange(128)[:, None], np.arange(128)
        kept = (row >= key) if case.mask.causal else np.ones((128, 128), bool)
        if case.mask.window is not None:
            kept &= row - key < case.mask.window
        if case.mask.documents:
            (ids,) = case.ids()
            assert len(np.unique(ids)) > 8
            kept &= ids[:, None] == ids
        np.testing.assert_array_equal(case.keys(), kept.sum(1))
        assert case.work().sum() == kept.sum()
        assert case.flops("forward") == 4 * kept.sum() * 6 * 8
    striped = case_of("causal", 4).work()
    runs = dataclasses.replace(
        case_of("causal", 4), mask=dataclasses.replace(MASKS["causal"], striped=False)
    )
    assert striped.max() / striped.mean() < 1.4 < runs.work().max() / striped.mean()


def test_two_chunks_a_device_for_transformer_engine():
    order = PEERS["te_ring"].order(case_of("causal", 2))
    assert order.reshape(4, 16)[:, 0].tolist() == [0, 48, 16, 32]
    packed = PEERS["te_ring"].order(case_of("documents", 2))
    assert packed[:3].tolist() == [0, 2, 4]


def rows_of(case: Case, names: list[str], rounds: int = 1) -> dict[tuple, dict]:
    peers, found = [PEERS[name] for name in names], {}
    passes = context_rows.WHICH
    to_check = context_rows.to_check(case, peers)
    checked = context_rows.errors(case, to_check, passes)
    for which in passes:
        for row in context_rows.rows_of(
            *(case, peers, which, checked),
            rounds=rounds,
            most_seconds=1.0,
            ceiling=1.0,
        ):
            found[which, row["peer"]] = row
    context_rows._COMPILING.clear()
    return found


@deep
def test_first_calls_alone():
    """Nothing is beside them to be compared with."""
    case = case_of("causal", 2)
    for row in rows_of(case, ["jax_flash2"], rounds=0).values():
        assert row["failure"] is None and row["calls"] == 1 and row["seconds"] > 0
        assert row["bytes"] == bytes_moved(case, row["method"], row["pass"])
        assert "efficiency" not in row and "of_kernels" not in row


def checked_rows(mask: str, parts: int, choice: str, names: list[str]) -> list[dict]:
    case = case_of(mask, parts)
    found = rows_of(case, names)
    for (which, name), row in found.items():
        if row["peer"] in ("te_ring", "te_gather"):
            assert row["failure"].startswith("not installed"), row["failure"]
            continue
        assert row["failure"] is None and not row["wrong"], row
        assert max(row["row_error"].values()) < (1e-2 if harness.is_gpu() else 1e-5)
        assert row["checked_rows"] == case.total and row["devices"] == parts
        assert row["one_device"]["rows"] == case.total
        ideal = row["one_device"]["seconds"] / parts
        assert row["efficiency"] == pytest.approx(ideal / row["seconds"])
        assert row["memory"]["total"] > 0
        if PEERS[name].ours:
            assert row["method"] == (choice if name == "jax_flash2" else name)
            assert row["bytes"] == bytes_moved(case, row["method"], which)
            quotient = row["kernels_seconds"] / row["seconds"]
            assert row["of_kernels"] == pytest.approx(quotient)
    return list(found.values())


def test_rows_of_a_window_and_its_table(tmp_path):
    rows = checked_rows("window1024", 2, "halo", ["jax_flash2", "halo", "te_ring"])
    assert [row["peer"] for row in rows] == ["jax_flash2", "te_ring"] * 2
    run = records.Run.start("context", tmp_path)
    read = [run.write(row) for row in rows]
    text = context_tables.context(read)
    for part in ("jax_flash2 (halo)", "2 x 32, 6 (3) x 8", "absent", "Weak scaling"):
        assert part in text
    assert len(figures.context(read, tmp_path)) == 2
    assert records.newest(tmp_path, "context") == read


@deep
@pytest.mark.parametrize(
    ("mask", "parts", "choice"),
    [("causal", 3, "gather"), ("documents", 8, "gather"), ("full", 2, "gather")],
)
def test_rows_of_every_peer(mask, parts, choice):
    if parts > jax.device_count():
        pytest.skip("too few devices")
    names = ["jax_flash2", "ring", "xla_gathered", "xla_partitioned"]
    checked_rows(mask, parts, choice, names)


@pytest.mark.parametrize("method", ["ring", *deeply("gather", "heads", "halo")])
def test_alone_nothing_is_sent(method):
    """The part of one device, by the same code: right where all of it is its own."""
    case = case_of("window1024" if method == "halo" else "full", 3)
    operands = [x[:, :32] for x in case.operands(by_rows(mesh_of(1)))]
    program = jax.jit(context_alone.passes(case, method)["forward"])
    text = str(program.lower(*operands).compile().as_text())
    assert "collective" not in text and "all-to-all" not in text
    (got,) = program(*operands)
    assert got.shape == operands[0].shape and np.isfinite(got).all()
    if method in ("ring", "gather"):  # three times the same keys
        alone = context_alone.passes(case.resized(1, 32), None)["forward"]
        np.testing.assert_allclose(got, alone(*operands)[0], atol=1e-5)


def test_one_device_does_what_fits(monkeypatch):
    case = dataclasses.replace(case_of("full", 4), rows=64)
    most = case.resized(1, 128).flops("forward") / 1e12 / context_rows._REACHED
    monkeypatch.setattr(context_rows, "_FEWEST_ROWS", 128)
    whole = context_rows.whole(case, "forward", most_seconds=most, ceiling=1.0)
    assert (whole.rows, whole.failure) == (128, None)
    assert whole.flops == case.resized(1, 128).flops("forward")
    none = context_rows.whole(case, "forward", most_seconds=most / 9, ceiling=1.0)
    assert none.program is None


@deep
def test_the_benchmark_runs_and_goes_on(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "benchmarks.context", "--tiny"]
    command += ["--cpu_devices=8", "--masks=causal", f"--results_dir={tmp_path}"]
    command += ["--repeats=1", "--devices=2,8", "--resume"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}

    def run(*more):
        done = subprocess.run(
            [*command, *more], cwd=records.ROOT, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return records.newest(tmp_path, "context"), done.stdout

    rows, _ = run("--scaling=weak")
    assert len(rows) == 2 * 2 * 3
    rows, text = run("--scaling=weak,strong", "--peers=jax_flash2")
    assert len(rows) == 2 * 2 * 3 + 2 * 2
    assert {row["scaling"] for row in rows} == {"weak", "strong"}
    assert all(row["failure"] is None for row in rows)
    assert figures.TABLES["context"](rows) in text
    assert len(figures.plots(tmp_path)) == 2
    assert set(context_peers.EVERYWHERE) <= set(PEERS)
