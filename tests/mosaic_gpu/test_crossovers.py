"""The tuner of the Mosaic GPU kernels, on a machine without a GPU."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import (
    records,
    tune,
    tune_crossover,
    tune_mosaic,
    tune_problems,
    tune_tables,
)
from benchmarks.harness import Timing
from pallas_kernels import device, tables
from pallas_kernels.mosaic_gpu import measured, memory
from pallas_kernels.mosaic_gpu.hopper import gradient_blocks, tuning
from tests.cases import ON_GPU
from tests.lowering import on_gpu
from tests.tiers import deeply

H100 = tables.DEFAULT_GPUS["mosaic_gpu"]


@pytest.mark.parametrize("head", tune_mosaic.HEAD_SIZES)
def test_candidates_begin_with_the_table(head):
    """They are many, and the kernels can have all of them."""
    with on_gpu(H100):
        for regime in tune_mosaic.REGIMES:
            for kernel in tune_mosaic.kernels(regime, head):
                found = tune_mosaic.candidates(kernel, head, regime)
                table = measured.here().blocks[kernel]
                key = min(x for x in table if head <= x)
                assert found[0] == table[key][regime]
                assert len(found) > 1 or kernel == "dkv"


def test_every_entry_of_a_table_is_tuned():
    with on_gpu(H100):
        tuned = {
            (kernel, regime, min(x for x in measured.here().blocks[kernel] if h <= x))
            for regime in tune_mosaic.REGIMES
            for h in tune_mosaic.HEAD_SIZES
            for kernel in tune_mosaic.kernels(regime, h)
        }
        assert tuned == {
            (kernel, regime, head)
            for kernel, heads in measured.here().blocks.items()
            for head, regimes in heads.items()
            for regime in regimes
        }


@pytest.mark.parametrize("regime", tune_mosaic.REGIMES[:2])
def test_a_regime_is_tuned_on_calls_of_its_own(regime):
    with on_gpu(H100):
        for problem in _small(lambda: tune_mosaic.problems(regime, 64)):
            call = tune_mosaic.call_of(problem)
            keys = call.spec.mean_keys(call.size["s"])
            blocks = tuning.choose((64, 64), keys, call.spec)
            assert blocks == measured.here().blocks_of("forward", 64, regime)


def _small(make):
    """Problems whose arrays are shapes: nothing is computed."""
    found = []

    def arrays():
        found.extend(make())
        return [problem.arrays for problem in found]

    structs = jax.eval_shape(arrays)
    pairs = zip(found, structs, strict=True)
    return [dataclasses.replace(x, arrays=own) for x, own in pairs]


@pytest.mark.parametrize("keys", [64, 1024, 4096])
@pytest.mark.parametrize("condition", measured.CONDITIONS)
def test_a_ladder_has_its_condition_and_its_keys(condition, keys):
    with on_gpu(H100):
        for head in (64, 128):
            for problem in _small(
                functools.partial(tune_mosaic.ladder, condition, head, keys)
            ):
                mean = tune_mosaic.mean_keys(problem)
                least = 112 if condition == "window" else keys
                assert keys // 8 * 7 <= mean <= max(keys + 1, least), mean
                assert condition in _conditions(tune_mosaic.call_of(problem))


def _conditions(call) -> list[str]:
    makes_gradient = not isinstance(gradient_blocks.of_operand(call), str)
    found = tuning.conditions(call, makes_gradient=makes_gradient)
    found += ["documents"] * call.spec.traits.is_sparse
    return found + ["copied"] * memory.copies_operands(call.size)


@pytest.mark.parametrize("which", tune_crossover.PASSES)
@pytest.mark.parametrize(
    "condition",
    ["causal", "bias and its gradient", *deeply(*measured.CONDITIONS)],
)
def test_both_sides_of_a_crossover_lower(condition, which):
    if which not in tune_crossover.passes(condition):
        return
    with on_gpu(H100):
        for problem in _small(lambda: tune_mosaic.ladder(condition, 128, 512)):
            for backend in tune_crossover.BACKENDS:
                text = _lowered(tune_crossover.timed(problem, which, backend))
                assert backend in text
                # No kernel of Mosaic GPU makes the gradients of two operands.
                if condition != "bias" or which == "forward":
                    (other,) = {*tune_crossover.BACKENDS} - {backend}
                    assert other not in text


def _lowered(timed) -> str:
    """As for a GPU, of a program that is compiled for this machine otherwise."""
    texts = []

    def lower(function, *arguments):
        traced = jax.jit(function).trace(*arguments)
        texts.append(traced.lower(lowering_platforms=("cuda",)).as_text())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.programs.lower", lower)
        timed.lower()
    return texts[0]


@pytest.mark.parametrize(
    ("regime", "kernel", "head"),
    [
        ("many keys", "forward", 64),
        ("any", "backward", 64),
        *deeply(("any", "backward", 160), ("any", "dkv", 256), ("any", "dq", 256)),
        ("any", "dbias", 64),
    ],
)
def test_programs_of_blocks_lower(regime, kernel, head):
    with on_gpu(H100):
        problem, *_ = _small(lambda: tune_mosaic.problems_of(kernel, regime, head))
        blocks = tune_mosaic.candidates(kernel, head, regime)[-1]
        text = _lowered(tune.timed(tune_mosaic, problem, kernel, blocks))
    assert "mosaic_gpu" in text and "triton" not in text


def _rows(seconds: dict[int, tuple[float | None, float | None]]) -> list[dict]:
    rows = []
    for keys, pair in seconds.items():
        for peer, own in zip(tune_crossover.BACKENDS, pair, strict=True):
            row = {"mean_keys": keys, "peer": peer, "shape": {}, "arguments": []}
            rows.append(row if own is None else {**row, "seconds": own})
    return rows


def test_the_crossover_of_rows():
    def found(**seconds):
        return tune_crossover.crossover(
            _rows({int(k[1:]): x for k, x in seconds.items()})
        )

    assert found(k64=(3, 2), k128=(2, 2), k256=(1, 2)) == 128
    # One slower timing does not hide what is gained around it.
    assert found(k64=(1, 2), k128=(3, 2), k256=(1, 2)) == 64
    # More is lost with few keys than gained: between the last two.
    assert found(k64=(1, 2), k128=(8, 2), k256=(1, 4)) == 128 * math.sqrt(2) // 1
    assert found(k64=(1, 2), k128=(1, 2)) == 64
    assert math.isinf(found(k64=(1, 2), k128=(5, 2)))
    assert found(k64=(None, 2), k128=(1, 2)) == 128
    assert found(k64=(4, 2), k128=(2, None), k256=(1, 2)) == 128
    assert found(k64=(2, None)) is None
    # Two problems with as many keys: what both take together counts.
    both = _rows({64: (1, 2)}) + [
        {**row, "arguments": ["mask"]} for row in _rows({64: (5, 2)})
    ]
    assert math.isinf(tune_crossover.crossover(both))
    assert (
        tune_crossover.ratios(_rows({64: (1, 2), 128: (4, 2)})) == "64: 2.00, 128: 0.50"
    )


def test_a_table_gets_crossover_points_and_keeps_the_others(tmp_path):
    path = tmp_path / "mosaic_gpu_nvidia_x.json"
    before = json.loads(json.dumps(tables.read("mosaic_gpu", None)))
    old = {"forward": 1024, "backward": 512, "measured": "long ago"}
    small = {**old, "forward": None}
    before["crossovers"] = {"plain": {"95": old, "256": old}, "uneven": {"256": small}}
    path.write_text(json.dumps(before))
    made = {"date": "today", "commit": "abc", "versions": {"jax": "1"}}
    bands = 63, 95, 256
    blocks = {("backward", 160, "any"): [64, 64, 4, 2]}
    points = {
        ("plain", 64, "forward"): 96,
        ("plain", 80, "forward"): 128,
        ("uneven", 48, "backward"): math.inf,
    }
    tune_tables.write(path, "mosaic_gpu", "NVIDIA X", made, blocks, points, bands)
    found = json.loads(path.read_text())
    assert (found["gpu"], found["commit"]) == ("NVIDIA X", "abc")
    plain, uneven = (found["crossovers"][x] for x in ("plain", "uneven"))
    assert plain["63"] == plain["256"] == old
    assert plain["95"]["forward"] == 128  # the larger one of the two
    assert plain["95"]["backward"] == 512
    note = "NVIDIA X, today: benchmarks.tune, commit abc"
    assert plain["95"]["measured"] == f"forward: {note}; backward: long ago"
    assert {k: x["backward"] for k, x in uneven.items()} == {
        "63": None, "95": 512, "256": 512
    }  # fmt: skip
    assert [x["forward"] for x in uneven.values()] == [None] * 3
    assert found["blocks"]["backward"]["256"] == {"any": [64, 64, 4, 2]}
    assert found["numbers"] == before["numbers"]
    # Once more: what was found stays, and the note of a pass is replaced.
    again = {("plain", 64, "forward"): 64}
    later = {**made, "date": "tomorrow"}
    tune_tables.write(path, "mosaic_gpu", "NVIDIA X", later, {}, again, bands)
    plain = json.loads(path.read_text())["crossovers"]["plain"]["95"]
    assert plain["forward"] == 64
    later_note = note.replace("today", "tomorrow")
    assert plain["measured"] == f"forward: {later_note}; backward: long ago"
    both = {("plain", 64, "backward"): 32}
    tune_tables.write(path, "mosaic_gpu", "NVIDIA X", later, {}, both, bands)
    plain = json.loads(path.read_text())["crossovers"]["plain"]["95"]
    assert plain["measured"] == later_note  # one for both passes


def test_the_library_reads_what_the_tuner_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "TUNING", tmp_path)
    monkeypatch.setattr(tables, "DEFAULT_GPUS", {"mosaic_gpu": "NVIDIA X"})
    path = tables.table_path("mosaic_gpu", "NVIDIA X")
    own = {("plain", 64, "forward"): math.inf}
    made = {"date": "today", "commit": "abc", "versions": {}}
    path.write_text(json.dumps(tables.read("mosaic_gpu", H100)))
    tune_tables.write(path, "mosaic_gpu", "NVIDIA X", made, {}, own, (95,))
    tables.read.cache_clear()
    found = measured.of_gpu.__wrapped__("NVIDIA X")
    tables.read.cache_clear()
    assert math.isinf(found.crossover("plain", 64).forward)
    assert found.crossover("plain", 96) == measured.of_gpu(H100).crossover("plain", 96)


def test_rows_of_a_crossover(tmp_path, monkeypatch):
    """What is timed, and what is written of it; times are made up."""
    small = tune_mosaic.Problem(tune_mosaic._shape(64, 512, True))
    monkeypatch.setattr(tune_mosaic, "ladder", lambda *_: [small])
    monkeypatch.setattr(tune_mosaic, "mean_keys", lambda problem: 256)
    monkeypatch.setattr(tune_crossover._Sides, "start", lambda sides, pool: _Made())
    seconds = {"mosaic_gpu": Timing(1, [1.0]), "triton": Timing(1, [2.0])}
    monkeypatch.setattr(tune_crossover, "times", lambda *_: (seconds, {}))
    run = records.Run.start("tune", tmp_path, commit="abc")
    at = "causal", 64, "backward"
    rows = list(tune_crossover.measure(run, *at, [256], 1))
    assert [row["peer"] for row in rows] == list(tune_crossover.BACKENDS)
    assert tune_crossover.crossover(rows) == 256
    written = [json.loads(x) for x in run.path.read_text().splitlines()]
    assert [row["seconds"] for row in written] == [1.0, 2.0]
    assert np.unique([row["feature"] for row in written]) == ["crossover: causal"]


class _Made:
    compiling, arguments = None, None


@pytest.fixture
def on_xla(monkeypatch):
    """The tuner as for an H100, of small calls that the xla backend runs here."""
    attention = tune_problems.Problem.attention

    def on_any(problem, implementation, config):
        return attention(problem, "xla", None)

    def call_of(problem):
        with on_gpu(H100):
            return own(problem)

    own = tune_mosaic.call_of
    monkeypatch.setattr(tune_mosaic, "call_of", call_of)
    monkeypatch.setattr(tune_problems.Problem, "attention", on_any)
    monkeypatch.setattr(tune_mosaic, "HIDDEN", 64)
    monkeypatch.setattr(tune_mosaic, "TOKENS", 256)
    monkeypatch.setattr(tune_mosaic, "_STAGES", (2,))
    monkeypatch.setattr(device, "device_kind", lambda: H100)
    monkeypatch.setattr(device, "capability", lambda: 90)


@pytest.mark.skipif(ON_GPU, reason="a GPU has the kernels themselves")
@pytest.mark.parametrize("which", ["crossovers", *deeply("blocks")])
def test_the_tuner_from_its_flags_to_its_table(which, on_xla, tmp_path, monkeypatch):
    short = tune_mosaic._shape(64, 128, True)
    bias = tune_mosaic._bias(1, 128)
    monkeypatch.setattr(
        tune_mosaic,
        "problems",
        lambda *_: [
            tune_problems.Problem(short),
            tune_problems.Problem(short, arrays={"bias": bias}, operand="bias"),
        ],
    )
    given = {"tables_dir": str(tmp_path), "results_dir": str(tmp_path), "what": which}
    given |= {"head_sizes": "64", "repeats": "1", "ladder": "64,128"}
    given |= {"kernels": "backward,dbias,forward", "regimes": "any,few keys"}
    given |= {"conditions": "plain,bias and its gradient"}
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["tune"])
    with flagsaver.as_parsed(**given):
        tune.main()
    name = tables.table_path("mosaic_gpu", H100).name
    found, before = json.loads((tmp_path / name).read_text()), _table_of(H100)
    rows = [json.loads(x) for x in (tmp_path / "tune.jsonl").read_text().splitlines()]
    assert rows and all(row["seconds"] > 0 for row in rows)
    assert found["numbers"] == before["numbers"]
    if which == "blocks":
        assert {row["pass"] for row in rows} == {"forward", "backward", "dbias"}
        assert found["crossovers"] == before["crossovers"]
        assert set(found["blocks_measured"]) > set(before["blocks_measured"])
    else:
        assert {row["pass"] for row in rows} == {"forward", "backward"}
        assert found["blocks"] == before["blocks"]
        assert "benchmarks.tune" in found["crossovers"]["plain"]["95"]["measured"]


def _table_of(gpu: str) -> dict:
    return json.loads(tables.table_path("mosaic_gpu", gpu).read_text())
