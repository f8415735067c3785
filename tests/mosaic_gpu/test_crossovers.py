"""The tuner of the Mosaic GPU kernels, on a machine without a GPU."""

import dataclasses
import functools
import json
import math

import jax
import pytest

from jax_flash2.tune import __main__ as tune
from jax_flash2.tune import blocks as tune_blocks
from jax_flash2.tune import crossover, hopper, problems, programs
from jax_flash2.tune.timing import Timing
from pallas_kernels import device, tables, user_tables
from pallas_kernels.mosaic_gpu import measured, memory
from pallas_kernels.mosaic_gpu.hopper import gradient_blocks, tuning
from tests.cases import ON_GPU
from tests.lowering import on_gpu
from tests.tiers import deeply

H100 = tables.DEFAULT_GPUS["mosaic_gpu"]


@pytest.mark.parametrize("head", hopper.HEAD_SIZES)
def test_candidates_begin_with_the_table(head):
    """They are many, and the kernels can have all of them."""
    with on_gpu(H100):
        for regime in hopper.REGIMES:
            for kernel in hopper.kernels(regime, head):
                found = hopper.candidates(kernel, head, regime)
                table = measured.here().blocks[kernel]
                key = min(x for x in table if head <= x)
                assert found[0] == table[key][regime]
                assert len(found) > 1 or kernel == "dkv"


def test_every_entry_of_a_table_is_tuned():
    with on_gpu(H100):
        tuned = {
            (kernel, regime, min(x for x in measured.here().blocks[kernel] if h <= x))
            for regime in hopper.REGIMES
            for h in hopper.HEAD_SIZES
            for kernel in hopper.kernels(regime, h)
        }
        assert tuned == {
            (kernel, regime, head)
            for kernel, heads in measured.here().blocks.items()
            for head, regimes in heads.items()
            for regime in regimes
        }


@pytest.mark.parametrize("regime", hopper.REGIMES[:2])
def test_a_regime_is_tuned_on_calls_of_its_own(regime):
    with on_gpu(H100):
        for problem in _small(lambda: hopper.problems(regime, 64)):
            call = hopper.call_of(problem)
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
                functools.partial(hopper.ladder, condition, head, keys)
            ):
                mean = hopper.mean_keys(problem)
                least = 112 if condition == "window" else keys
                assert keys // 8 * 7 <= mean <= max(keys + 1, least), mean
                assert condition in _conditions(hopper.call_of(problem))


def _conditions(call) -> list[str]:
    makes_gradient = not isinstance(gradient_blocks.of_operand(call), str)
    found = tuning.conditions(call, makes_gradient=makes_gradient)
    found += ["documents"] * call.spec.traits.is_sparse
    return found + ["copied"] * memory.copies_operands(call.size)


@pytest.mark.parametrize("which", crossover.PASSES)
@pytest.mark.parametrize(
    "condition",
    ["bias and its gradient", *deeply("causal", *measured.CONDITIONS)],
)
def test_both_sides_of_a_crossover_lower(condition, which):
    with on_gpu(H100):
        for problem in _small(lambda: hopper.ladder(condition, 128, 512)):
            for backend in crossover.BACKENDS:
                text = _lowered(crossover.timed(problem, which, backend))
                assert backend in text
                # No kernel of Mosaic GPU makes the gradients of two operands.
                if condition != "bias" or which == "forward":
                    (other,) = {*crossover.BACKENDS} - {backend}
                    assert other not in text


def _lowered(timed) -> str:
    """As for a GPU, of a program that is compiled for this machine otherwise."""
    texts = []

    def lower(function, *arguments):
        traced = jax.jit(function).trace(*arguments)
        texts.append(traced.lower(lowering_platforms=("cuda",)).as_text())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "lower", lower)
        timed.lower()
    return texts[0]


@pytest.mark.parametrize(
    ("regime", "kernel", "head"),
    [
        ("many keys", "forward", 64),
        *deeply(("any", "backward", 64), ("any", "backward", 160), ("any", "dkv", 256)),
        *deeply(("any", "dq", 256)),
        ("any", "dbias", 64),
    ],
)
def test_programs_of_blocks_lower(regime, kernel, head):
    with on_gpu(H100):
        problem, *_ = _small(lambda: hopper.problems_of(kernel, regime, head))
        blocks = hopper.candidates(kernel, head, regime)[-1]
        text = _lowered(tune_blocks.timed(hopper, problem, kernel, blocks))
    assert "mosaic_gpu" in text and "triton" not in text


def _rows(seconds: dict[int, tuple[float | None, float | None]]) -> list[dict]:
    rows = []
    for keys, pair in seconds.items():
        for peer, own in zip(crossover.BACKENDS, pair, strict=True):
            row = {"mean_keys": keys, "peer": peer, "shape": {}, "arguments": []}
            rows.append(row if own is None else {**row, "seconds": own})
    return rows


def test_the_crossover_of_rows():
    def found(**seconds):
        return crossover.crossover(_rows({int(k[1:]): x for k, x in seconds.items()}))

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
    assert math.isinf(crossover.crossover(both))
    assert crossover.ratios(_rows({64: (1, 2), 128: (4, 2)})) == "64: 2.00, 128: 0.50"


def test_rows_of_a_crossover(monkeypatch):
    """What is timed; times are made up."""
    small = hopper.Problem(hopper._shape(64, 512, True))
    monkeypatch.setattr(hopper, "ladder", lambda *_: [small])
    monkeypatch.setattr(hopper, "mean_keys", lambda problem: 256)
    monkeypatch.setattr(crossover._Sides, "start", lambda sides, pool: _Made())
    seconds = {"mosaic_gpu": Timing(1, [1.0]), "triton": Timing(1, [2.0])}
    monkeypatch.setattr(crossover, "times", lambda *_, in_bursts: (seconds, {}))
    rows = list(crossover.measure("causal", 64, "backward", [256], 1))
    assert [row["peer"] for row in rows] == list(crossover.BACKENDS)
    assert crossover.crossover(rows) == 256
    assert [row["seconds"] for row in rows] == [1.0, 2.0]
    assert {row["feature"] for row in rows} == {"crossover: causal"}


class _Made:
    compiling, arguments = None, None


@pytest.fixture
def on_xla(monkeypatch):
    """The tuner as for an H100, of small calls that the xla backend runs here."""
    attention = problems.Problem.attention

    def on_any(problem, implementation, config):
        return attention(problem, "xla", None)

    def call_of(problem):
        with on_gpu(H100):
            return own(problem)

    own = hopper.call_of
    monkeypatch.setattr(hopper, "call_of", call_of)
    monkeypatch.setattr(problems.Problem, "attention", on_any)
    monkeypatch.setattr(hopper, "HIDDEN", 64)
    monkeypatch.setattr(hopper, "TOKENS", 256)
    monkeypatch.setattr(hopper, "_STAGES", (2,))
    monkeypatch.setattr(device, "device_kind", lambda: H100)
    monkeypatch.setattr(device, "capability", lambda: 90)
    monkeypatch.setenv(user_tables.VARIABLE, user_tables.OFF)  # and restored
    yield
    tune._forget()


@pytest.mark.skipif(ON_GPU, reason="a GPU has the kernels themselves")
@pytest.mark.parametrize("part", ["crossovers", *deeply("blocks")])
def test_the_tuner_from_its_command_to_its_table(
    part, on_xla, tmp_path, monkeypatch, capsys
):
    short, bias = hopper._shape(64, 128, True), hopper._bias(1, 128)
    with_bias = problems.Problem(short, arrays={"bias": bias}, operand="bias")
    calls = [problems.Problem(short), with_bias]
    monkeypatch.setattr(hopper, "problems", lambda *_: calls)
    monkeypatch.setattr(crossover, "LADDER", (64, 96, 128))
    only = {
        "crossovers": "crossover, (plain|bias and its gradient), heads of 64, backward",
        "blocks": "mosaic_gpu (forward|backward|dbias), heads of 64, (any|few keys)",
    }
    log = tmp_path / "timings.jsonl"
    command = ["--quick", "--rounds=1", f"--only={only[part]}"]
    before = measured.of_gpu(H100)
    tune.main([*command, f"--folder={tmp_path}", f"--timings={log}"])
    path = tmp_path / tables.table_path("mosaic_gpu", H100).name
    said = capsys.readouterr().out
    assert str(path) in said and "attach the files to an issue" in said
    found = json.loads(path.read_text())
    rows = [json.loads(x) for x in log.read_text().splitlines()]
    assert rows and all(row["seconds"] > 0 for row in rows)
    assert {row["device"] for row in rows} == {found["gpu"]} == {H100}
    if part == "blocks":
        assert {row["pass"] for row in rows} == {"forward", "backward", "dbias"}
        assert {k: list(x) for k, x in found["blocks"].items()} == {
            kernel: ["64"] for kernel in ("forward", "backward", "dbias")
        }
        assert found["crossovers"] == {}
    else:  # every second rung
        assert {row["keys"] for row in rows} == {64, 128}
        points = found["crossovers"]
        assert set(points) == {"plain", "bias and its gradient"}
        keys = points["plain"]["64"]["backward"]
        now = measured.of_gpu(H100).crossover("plain", 64)
        assert now.backward == (math.inf if keys is None else keys)
        assert now.forward == before.crossover("plain", 64).forward


@pytest.mark.parametrize(
    ("gpu", "capability", "words"),
    [(None, 90, "JAX sees none"), ("Tesla T4", 75, "Tesla T4 runs no kernels")],
)
def test_the_tuner_says_where_there_are_no_kernels(monkeypatch, gpu, capability, words):
    monkeypatch.setattr(device, "device_kind", lambda: gpu)
    monkeypatch.setattr(device, "capability", lambda: capability)
    with pytest.raises(SystemExit, match=words):
        tune.main(["--folder=unused"])


def test_what_most_calls_have_is_tuned_first():
    """Five minutes must be enough for it."""
    with on_gpu(H100):
        names = [step.name for step in tune.steps(90)]
    assert len(names) == len(set(names))
    first = names[: names.index("crossover, causal, heads of 64, backward") + 1]
    assert len(first) == 24
    assert all("heads of 64" in x or "heads of 128" in x for x in first)
    assert first[0] == "mosaic_gpu forward, heads of 128, many keys"
    assert "triton dq, heads of 64, plain" in first
    assert not any("crossover" in step.name for step in tune.steps(89))


def test_the_tuner_goes_on_after_what_does_not_fit(monkeypatch, tmp_path, capsys):
    """And begins nothing when its time is over."""

    def measure(given):
        yield {}

    def fails(given):
        raise ValueError("no blocks fit")

    def found(given, rows):
        return "blocks", ("dq", 64, {"plain": [64, 64, 4, 2]}), "found"

    steps = [tune.Step(x.__name__, "triton", 0, x, found) for x in (fails, measure)]
    monkeypatch.setattr(tune, "steps", lambda capability: steps)
    monkeypatch.setattr(device, "device_kind", lambda: "NVIDIA L4")
    monkeypatch.setattr(device, "capability", lambda: 89)
    monkeypatch.setenv(user_tables.VARIABLE, user_tables.OFF)  # and restored
    with pytest.raises(SystemExit, match="no table was written"):
        tune.main([f"--folder={tmp_path}", "--minutes=-1"])
    assert "2 steps not begun" in capsys.readouterr().out
    tune.main([f"--folder={tmp_path}"])
    said = capsys.readouterr().out
    assert "fails: skipped, ValueError: no blocks fit" in said
    assert "measure: found" in said
    (path,) = tmp_path.iterdir()
    assert set(json.loads(path.read_text())["blocks"]) == {"dq"}
    tune._forget()
