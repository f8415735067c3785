"""The benchmarks: what is measured, what is said of it, and that each one runs."""

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    comparison,
    figures,
    harness,
    options,
    peers,
    profiles,
    records,
    tables,
)
from benchmarks.programs import JaxPeer, TorchPeer, check_fits
from benchmarks.shapes import PASSES, Shape
from jax_flash2.tune.problems import random_mask
from tests.tiers import deep, deeply

TOY = Shape(2, 64, 2, 2, 16, True, "float32")
GROUPED = Shape(1, 32, 4, 2, 8, False, "float32")


def attention(q, k, v, *, causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")


def load_broken():
    """Wrong in one row of one head, the last of all."""
    return lambda q, k, v, *, causal: (
        attention(q, k, v, causal=causal).at[-1, -1, -1].multiply(1.1)
    )


def load_nan():
    return lambda q, k, v, *, causal: attention(q, k, v, causal=causal) * jnp.nan


def load_failing():
    def fails(q, k, v, *, causal):
        raise ValueError("head size 16\nis too small")

    return fails


def load_absent():
    import no_such_module_at_all  # noqa: F401


BROKEN = JaxPeer("broken", "Broken", load_broken)
NAN = JaxPeer("nan", "NaN", load_nan)
FAILING = JaxPeer("failing", "Failing", load_failing)
ABSENT = JaxPeer("absent", "Absent", load_absent)
UNGROUPED = JaxPeer("ungrouped", "Ungrouped", lambda: attention, gqa=False)
OURS, XLA = peers.PEERS["jax_flash2"], peers.PEERS["xla"]


@pytest.fixture(autouse=True)
def small_ceiling(monkeypatch):
    monkeypatch.setattr(harness, "matmul_tflops", lambda: 1.0)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of one comparison, as read back from its file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "matmul_tflops", lambda: 1.0)
        folder = tmp_path_factory.mktemp("results")
        run = records.Run.start("toy", folder)
        compare = functools.partial(comparison.compare, run, [TOY], rounds=2)
        returned = compare([OURS, XLA, FAILING, ABSENT], list(PASSES))
        returned += compare([BROKEN, NAN], ["forward"])
    read = records.newest(folder, "toy")
    assert read == json.loads(json.dumps(returned))
    return {(row["pass"], row["peer"]): row for row in read}


def test_flops_by_hand():
    shape = Shape(2, 8192, 16, 4, 128, False, "bfloat16")
    causal = dataclasses.replace(shape, causal=True)
    assert shape.flops("forward") == 2**40  # 4 * 2 * 8192 * 8192 * 16 * 128
    assert causal.flops("forward") == 2**39
    assert causal.flops("backward") == 5 * 2**38
    assert causal.flops("forward_backward") == 7 * 2**38


@pytest.mark.parametrize("shape", [*deeply(TOY), GROUPED], ids=str)
def test_reference_is_the_gradient_of_plain_attention(shape):
    *inputs, do = operands = shape.operands()
    plain = jax.jit(functools.partial(attention, causal=shape.causal))
    with jax.default_matmul_precision("highest"):
        out, vjp = jax.vjp(plain, *inputs)
        want = dict(zip(PASSES["forward_backward"], (out, *vjp(do)), strict=True))
    got = harness.reference(shape, operands)
    assert (got.pop("dq_rounding") >= 0.0).all()
    for name, x in got.items():
        last = np.asarray(want[name])[-1, :, -harness.checked_heads(shape, name) :]
        np.testing.assert_allclose(x, last, atol=1e-5, rtol=1e-4)


def test_row_error():
    want = np.array([[3.0, 4.0], [0.0, 0.1], [6.0, 8.0]])
    got = want + np.array([[0.0, 0.5], [0.0, 0.1], [0.0, 0.0]])
    # Of 5; the short row's is of the median length, 5, and so smaller.
    assert harness.row_error(got, want) == pytest.approx(0.1)
    assert harness.row_error(got * np.nan, want) == np.inf
    excused = np.array([[0.25], [0.0], [0.0]])
    assert harness.row_error(got, want, excused) == pytest.approx(0.05)


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("peer", ["jax_flash2", "xla"])
def test_rows_are_complete(rows, which, peer):
    row = rows[which, peer]
    assert row["failure"] is None and row["wrong"] is False
    assert Shape(**row["shape"]) == TOY
    assert len(row["timings"]) == 2
    assert row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
    assert row["tflops"] * row["seconds"] == pytest.approx(TOY.flops(which) / 1e12)
    assert set(row["row_error"]) == set(row["max_abs_error"]) == set(PASSES[which])
    assert max(row["row_error"].values()) < (1e-2 if harness.is_gpu() else 1e-4)  # TF32
    assert row["memory"]["total"] > row["memory"]["temp"] >= 0
    assert row["calls"] >= 1 and row["matmul_tflops"] == 1.0
    assert row["versions"]["jax"] == jax.__version__
    assert row["device"] and row["date"]
    assert row["commit"][:9] in row["run_id"]


def test_wrong_absent_and_failing_peers_are_named(rows):
    assert rows["forward", "broken"]["wrong"]
    assert 0.05 < rows["forward", "broken"]["row_error"]["out"] <= 0.1
    assert rows["forward", "nan"]["wrong"]
    assert rows["forward", "nan"]["row_error"] == {"out": None}
    for which in PASSES:
        absent = rows[which, "absent"]["failure"]
        assert absent == "not installed: No module named 'no_such_module_at_all'"
        assert rows[which, "failing"]["failure"] == "ValueError: head size 16"
        assert "seconds" not in rows[which, "failing"]
    text = tables.comparison(list(rows.values()))
    for part in ("WRONG", "absent", "fails", "not installed", "XLA standard"):
        assert part in text


@deep
def test_grouped_heads_and_a_peer_without(tmp_path):
    run = records.Run.start("toy", tmp_path)
    everyone = [OURS, XLA, UNGROUPED]
    rows = comparison.compare(run, [GROUPED], everyone, ["forward_backward"], rounds=1)
    assert [row.get("wrong") for row in rows] == [False, False, None]
    assert rows[2]["failure"] == "NotImplementedError: no grouped-query attention"


def test_budget_and_resume(tmp_path, capsys):
    shapes = [TOY, GROUPED]
    compare = functools.partial(
        comparison.compare, shapes=shapes, peers=[XLA], passes=["forward"], rounds=1
    )
    first = records.Run.start("toy", tmp_path)
    third = records.Run.start("toy", tmp_path / "third")
    assert compare(first, budget_seconds=0.0) == []
    assert "2 shapes not begun" in capsys.readouterr().out
    seconds = iter([0.0, 0.0, 0.0, *[9.0] * 9])  # late after the first shape
    with pytest.MonkeyPatch.context() as patch:
        clock = types.SimpleNamespace(monotonic=lambda: next(seconds))
        patch.setattr(comparison, "time", clock)
        assert len(compare(third, together=2, budget_seconds=1.0)) == 1
    assert "1 shapes not begun" in capsys.readouterr().out
    compare(first, shapes=[GROUPED])
    second = records.Run.start("toy", tmp_path, resume=True)
    assert len(compare(second)) == 2
    assert second.facts["run_id"] == first.facts["run_id"]
    assert len(records.newest(tmp_path, "toy")) == 2
    facts = {**first.facts, "run_id": "other", "commit": "other"}
    other = dataclasses.replace(first, facts=facts)
    other.write({"shape": {}, "pass": "", "peer": ""})
    with pytest.raises(ValueError, match="has commit 'other'"):
        records.Run.start("toy", tmp_path, resume=True)


def test_of_rows_about_the_same_the_last_counts(tmp_path):
    run = records.Run.start("toy", tmp_path)
    for value in (1, 2):
        run.write({"shape": {}, "pass": "forward", "peer": "x", "value": value})
    assert [row["value"] for row in records.newest(tmp_path, "toy")] == [2]
    assert records.newest(tmp_path, "nothing") == []


def test_timing_takes_turns_and_goes_on_after_a_failure(monkeypatch):
    """On a clock that the first call after another program's takes three seconds of."""
    calls, clock = [], [0.0]
    monkeypatch.setattr(harness.timing.time, "perf_counter", lambda: clock[0])

    def program(name, fails_at=None):
        def call():
            clock[0] += 1.0 if calls[-1:] == [name] else 3.0
            calls.append(name)
            if fails_at and calls.count(name) > fails_at:
                raise RuntimeError("late")

        return harness.Program(call, lambda x: x, lambda x: {}, memory={})

    programs = {"a": program("a"), "b": program("b"), "c": program("c", fails_at=2)}
    timings, failures = harness.time_interleaved(
        programs, rounds=6, min_seconds=1.0, settle_seconds=2.0
    )
    first, turns = "".join(calls[:6]), "".join(calls[6:])
    assert first == "aabbcc" and turns.count("c") == 1
    rounds = turns.replace("c", "")
    assert {rounds[i : i + 6] for i in range(0, 36, 6)} == {"aaabbb", "bbbaaa"}
    assert {name: timings[name].seconds for name in timings} == {
        "a": [1.0] * 6,
        "b": [1.0] * 6,
    }
    assert failures == {"c": "RuntimeError: late"}


def test_one_process_times_while_none_compiles(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "is_gpu", lambda: True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []

    def times(name):
        with harness.alone():
            seen.append(name)

    with ThreadPoolExecutor() as pool:
        for name, context in (("one", harness.alone), ("two", harness.compiling)):
            with context():
                later = pool.submit(times, f"after {name}")
                with pytest.raises(TimeoutError):
                    later.result(timeout=0.2)
                seen.append(name)
            later.result(timeout=30)
        with harness.compiling(), harness.compiling():
            seen.append("two compile")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        with harness.alone():
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
            pool.submit(times, "other GPU").result(timeout=30)
    assert seen == ["one", "after one", "two", "after two", "two compile", "other GPU"]


def test_kernels_and_the_pauses_between_them():
    events = [
        profiles.Event("one", 0.0, 4000.0),
        profiles.Event("two", 3000.0, 2000.0),  # beside the first, on another stream
        profiles.Event("one", 9000.0, 2000.0),
    ]
    assert profiles.idle(reversed(events)) == 4000.0
    assert [line.split() for line in profiles.lines(events, 2)] == [
        ["3.0", "us", "1.0", "x", "one"],
        ["1.0", "us", "0.5", "x", "two"],
        ["2.0", "us", "no", "kernel"],
    ]
    assert profiles.lines([], 2) == ["no kernel of a GPU was seen"]


def test_part_of_the_calls():
    def of(part):
        return options.Part(types.SimpleNamespace(value=part), None).of(range(7))

    assert [list(of(f"{i}/3")) for i in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    for part in ("3/3", "1", "a/b"):
        with pytest.raises(ValueError, match="expected I/N"):
            of(part)


def test_integers_on_the_command_line():
    parse = options._Integers().parse
    assert parse("512,1k, 16k,1M") == [512, 1024, 16384, 2**20]
    for bad in ("", "0", "k", "1.5"):
        with pytest.raises(ValueError):
            parse(bad)


def test_progress_without_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with options.Progress(2, "shape") as progress:
        progress.step("one")
    assert capsys.readouterr().out == "[1/2] one\n"


def test_a_program_too_large_for_the_gpu_is_not_run(monkeypatch):
    compiled = jax.jit(lambda x: x + 1).lower(jnp.zeros(1024)).compile()
    device = type("Device", (), {"memory_stats": lambda self: {"bytes_limit": 8192}})
    monkeypatch.setattr(jax, "devices", lambda: [device()])
    with pytest.raises(MemoryError, match="not run: needs"):
        check_fits(compiled)


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
@pytest.mark.parametrize("shape", [TOY, GROUPED], ids=str)
def test_torch_peers(tmp_path, shape):
    if harness.is_gpu():  # torch's FlashAttention-2 there takes no float32
        shape = dataclasses.replace(shape, dtype="float16")
    load = functools.partial(peers._torch_sdpa, "MATH")

    def load_heads_last():
        attention = load()

        def heads_last(q, k, v, *, causal):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return attention(q, k, v, causal=causal).transpose(1, 2)

        return heads_last

    everyone = [
        peers.PEERS["torch_flash2"],
        TorchPeer("repeats", "repeats heads", load, gqa=False),
        TorchPeer("heads_last", "heads last", load_heads_last, heads_first=False),
    ]
    run = records.Run.start("toy", tmp_path)
    rows = comparison.compare(run, [shape], everyone, list(PASSES), rounds=1)
    assert [(row["peer"], row["failure"], row.get("wrong")) for row in rows] == [
        (peer.name, None, False) for _ in PASSES for peer in everyone
    ]
    repeated = {row["note"] for row in rows if row["peer"] == "repeats"}
    assert any(repeated) == (shape.group > 1)


def test_a_random_mask_has_no_block_of_one_kind():
    mask = np.asarray(random_mask(256))
    kept = mask.reshape(16, 16, 16, 16).mean((1, 3))
    assert mask.shape == (1, 1, 256, 256)
    assert kept.min() > 0.0 and kept.max() < 1.0
    assert mask.mean() == pytest.approx(0.9, abs=0.01)


SMALL = ["--head_size=16", "--repeats=1"]
MAINS = {
    "attention": [
        *("--lengths=64", "--tokens=64", "--hidden=32", "--head_sizes=16", "--nogqa"),
        *("--causal=true", "--passes=forward", "--peers=jax_flash2,xla", "--repeats=1"),
    ],
    "occupancy": [
        *("--heads=1", "--length=64", "--passes=forward", "--peers=jax_flash2,xla"),
        *SMALL,
    ],
    "memory": ["--lengths=64,128", "--heads=1", "--head_size=16"],
    "compile_time": ["--length=64", "--heads=1", *SMALL],
    "first_calls": [
        *("--calls=plain", "--length=64", "--heads=4", "--head_size=16"),
        *("--peers=jax_flash2,xla", "--jobs=2"),
    ],
    "dispatch": ["--calls=3", "--heads=1", *SMALL],
    "cpu": ["--lengths=64", "--heads=1", *SMALL],
    "features": ["--length=64", "--heads=1", "--head_size=16", "--repeats=1"],
}


def ran(name, *arguments):
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=records.ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


@deep
def test_kernels_of_a_machine_without_a_gpu():
    sizes = ["--length=64", "--heads=1", "--head_size=16", "--batch=1"]
    done = ran("kernels", *sizes, "--seconds=0.01", "--peers=jax_flash2,read")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no kernel of a GPU was seen") == 2


@deep
def test_kernels_of_a_models_calls():
    calls = ["--calls=SDXL, text", "--small", "--implementation=reference"]
    done = ran("kernels", *calls, "--seconds=0.01", "--passes=forward,forward_backward")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("jax_flash2, SDXL, text (2 x 40 to 72, 2 x 64), f") == 2
    assert done.stdout.count("no kernel of a GPU was seen") == 2
    done = ran("kernels", "--calls=nothing")
    assert done.returncode and "--calls=nothing: found in no call's name" in done.stderr


@deep
def test_serving_runs_and_says_which_goals_are_met(tmp_path):
    done = ran("serving", "--quick", "--small", f"--results_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    rows = records.newest(tmp_path, "serving")
    ours = [row for row in rows if row["failure"] is None]
    assert not any(row["wrong"] for row in ours)
    compared = {row["peer"] for row in ours if row["row_error"] is not None}
    assert {"e5m2, pages of 64", "bfloat16, pages of 1", "the chunk"} <= compared
    assert all(x in done.stdout for x in ("without sharing", "prompt of 128: bfloat16"))
    assert figures.sections(tmp_path)["serving"] in done.stdout


@deep
def test_tangents_are_compared_with_exact_ones():
    sizes = ["--length=64", "--width=128", "--calls=causal"]
    done = ran("tangents", *sizes, "--peers=xla", "--repeats=1")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count(" causal, xla: ") == done.stdout.count("row error") == 2
    assert "128 x 64, 2 x 64 causal: tangent: xla\n" in done.stdout


@deep
def test_bits_are_compared():
    done = ran("bits", "--quick")
    assert done.returncode == 0, done.stderr + done.stdout
    promised = [x for x in done.stdout.splitlines() if x.startswith("  invariant: ")]
    assert len(promised) == 11
    assert all(line.endswith(": equal") for line in promised)
    assert "tiles of 16 rows against 64: " in done.stdout


@pytest.mark.parametrize(
    "name", ["attention", *deeply(*(name for name in MAINS if name != "attention"))]
)
def test_each_benchmark_runs(name, tmp_path):
    command = [sys.executable, "-W", "error", "-m", f"benchmarks.{name}"]
    done = subprocess.run(
        [*command, *MAINS[name], f"--results_dir={tmp_path}"],
        cwd=records.ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = records.newest(tmp_path, name)
    assert {"jax_flash2", "xla"} - {row["peer"] for row in rows} <= (
        {"xla"} if name == "features" else set()
    )
    for row in rows:
        assert (row["failure"] is None) == (row["peer"] != "cudnn"), row["failure"]
    assert figures.TABLES[name](rows) in done.stdout
    assert figures.sections(tmp_path)[name] == figures.TABLES[name](rows)
    assert bool(figures.plots(tmp_path)) == (name in figures.PLOTS)
