"""What tables and plots say of results, and what is kept of them."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks import cost_tables, figures, peers, records, tables, trim
from benchmarks.shapes import PASSES, Shape

TOY = Shape(2, 64, 2, 2, 16, True, "float32")


def test_marks_tell_failures_apart():
    def mark(failure):
        return tables.mark({"failure": failure})

    assert mark("not installed: No module named 'x'") == "absent"
    assert mark("JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory") == "OOM"
    assert mark("RESOURCE_EXHAUSTED: Shared memory size limit exceeded") == "fails"
    assert mark("MemoryError: not run: needs 9 GiB of 8") == "too large"
    assert mark(None) is None
    assert tables.mark({"failure": None, "wrong": True}) == "WRONG"


def test_memory_growth_tells_linear_from_quadratic():
    def of(peer, power):
        return [
            {
                "shape": dataclasses.asdict(dataclasses.replace(TOY, length=length)),
                "peer": peer,
                "memory": {"temp": length**power},
            }
            for length in (64, 128, 512)
        ]

    rows = of("linear", 1) + of("square", 2)
    assert cost_tables.is_linear(cost_tables.growths(rows, "linear")) is True
    assert cost_tables.is_linear(cost_tables.growths(rows, "square")) is False
    assert list(cost_tables.growths(rows, "square").values()) == pytest.approx([4, 4])
    assert cost_tables.is_linear(cost_tables.growths(rows, "nobody")) is None


def write_attention(folder) -> None:
    """Made-up rows of every kind that the plots draw."""
    run = records.Run.start("attention", folder)
    shapes = [
        Shape(1, length, heads, 2, size, causal, "bfloat16")
        for size, heads, causal in [(64, 2, True), (64, 2, False), (128, 4, True)]
        for length in (512, 1024)
    ]
    for shape in shapes:
        for which in PASSES:
            for i, peer in enumerate(peers.PEERS, 1):
                row = {"shape": dataclasses.asdict(shape), "pass": which, "peer": peer}
                failures = {
                    "flash4": "not installed: No module named 'flash_attn'",
                    "xla": "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory",
                    "tokamax_triton": None if shape.causal else "no grouped heads",
                }
                row["failure"] = failures.get(peer)
                if row["failure"] is None:
                    seconds = i * 1e-3
                    tflops = shape.flops(which) / seconds / 1e12
                    row |= {"seconds": seconds, "tflops": tflops}
                    row |= {"wrong": peer == "pallas_mha", "row_error": {"out": 1.0}}
                run.write({**row, "matmul_tflops": 685.0})


def test_figures_of_made_up_results(tmp_path):
    write_attention(tmp_path)
    parts, paths = figures.sections(tmp_path), figures.plots(tmp_path)
    names = {path.name for path in paths}
    drawn = {f"attention_{which}.png" for which in ("forward", "backward")}
    assert names == drawn | {"speed.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    # cuDNN is the sixth peer: six times the seconds on every shape.
    full, overview = cells(parts["attention"]), cells(parts["attention_overview"])
    overall = [line for line in full if "all 6" in line]
    assert len(overall) == len(PASSES)
    assert all("6.00 (6.00 to 6.00)" in line for line in overall)
    (cudnn,) = [line for line in overview if line[0] == "cuDNN (jax.nn)"]
    assert cudnn == ["cuDNN (jax.nn)", *["6.00 (6.00 to 6.00)", "6"] * 2]
    (header,) = [line for line in overview if line[0] == "B x T, N (K) x H"]
    own = {name: x for name, x in peers.PEERS.items() if not x.same_forward}
    labels = {name: peer.label for name, peer in own.items()}
    for name in ("flash4", "xla", "pallas_mha"):  # without a number
        assert labels.pop(name) not in header
    assert set(labels.values()) == set(header[1:])
    for part in (parts["attention"], parts["attention_overview"]):
        assert "matrix product runs at 685 TFLOP/s" in part
        assert "**" in part
    for text in ("OOM", "absent", "WRONG", "no grouped heads"):
        assert text in parts["attention"]
    others = set(parts) - {"attention", "attention_overview"}
    assert {parts[name] for name in others} == {figures.NOT_MEASURED}


def test_counts_of_shapes_and_reasons_are_told():
    def row(peer, length, failure=None):
        shape = dataclasses.replace(TOY, length=length)
        row = {"shape": dataclasses.asdict(shape), "pass": "forward", "peer": peer}
        times = {} if failure else {"seconds": 1.0, "tflops": 1.0}
        return {**row, "failure": failure, **times}

    large = "MemoryError: not run: needs {} GiB of 104.9"
    rows = [row(peer, length) for peer in ("jax_flash2", "xla") for length in (64, 128)]
    rows += [row("jax_flash2", n) for n in (256, 512)]
    rows += [row("xla", 256, large.format(40.4)), row("xla", 512, large.format(80.8))]
    assert ["XLA standard", "1.00 (1.00 to 1.00)", "2"] in cells(tables.by_peer(rows))
    assert "1.00 (1.00 to 1.00), 2 of 4" in tables.ratios(rows)
    (reason,) = tables.failures(rows).splitlines()
    assert reason.startswith("- too large: XLA standard: needs 40.4 to 80.8 GiB")


def cells(text: str) -> list[list[str]]:
    """Of every line of the tables in it."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[x.strip() for x in line.split("|")[1:-1]] for line in lines]


def test_trimmed_results_make_the_same_tables(tmp_path):
    write_attention(tmp_path)
    write_attention(tmp_path)
    before, path = figures.sections(tmp_path), tmp_path / "attention.jsonl"
    size = path.stat().st_size
    trim.trim(path)
    text = path.read_text()
    assert figures.sections(tmp_path) == before
    assert len(text) < size / 3 and "timings" not in text
    trim.trim(path)
    assert path.read_text() == text
    facts = [set(records.FACTS) & set(json.loads(x)) for x in text.splitlines()]
    assert facts == [set(records.FACTS)] + [{"run_id"}] * (len(facts) - 1)


def test_of_the_tuner_the_fastest_blocks_stay(tmp_path):
    run = records.Run.start("tune", tmp_path)
    for mean in (9.0, 1.0):  # the newest timing of the same blocks counts
        for blocks in range(8):
            row = {"shape": {}, "pass": "dq", "peer": "plain", "arguments": []}
            row |= {"feature": [blocks], "failure": None, "seconds": mean + blocks}
            run.write({**row, "timings": [mean + blocks]})
    run.write({**row, "feature": [9], "failure": "too large", "seconds": 0.0})
    path = tmp_path / "tune.jsonl"
    for _ in range(2):
        trim.trim(path)
        rows = records.read(path)
        assert [row["feature"] for row in rows] == [[0], [1], [2], [3]]
        assert [row["seconds"] for row in rows] == [1.0, 2.0, 3.0, 4.0]
        assert all(row["device"] and "timings" not in row for row in rows)


def test_results_stay_small():
    """If not: python -m benchmarks.trim."""
    files = (records.ROOT / records.RESULTS_DIR).iterdir()
    assert sum(file.stat().st_size for file in files) <= 2e6


def test_tables_without_matplotlib(tmp_path, monkeypatch):
    write_attention(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "TFLOP/s" in figures.sections(tmp_path)["attention"]
    with pytest.raises(ImportError):
        figures.plots(tmp_path)


def test_marks_are_filled():
    text = "a\n<!-- x -->\nold\n<!-- /x -->\nb"
    new = figures.filled(text, {"x": "|1|", "y": "unused"})
    assert new == "a\n<!-- x -->\n\n|1|\n\n<!-- /x -->\nb"
    assert figures.filled(new, {"x": "|1|"}) == new
    with pytest.raises(ValueError, match="no results for the mark 'x'"):
        figures.filled(text, {})
    for bad in ("<!-- x --> ", "<!-- x --> <!-- y --> <!-- /y --> <!-- /x -->"):
        with pytest.raises(ValueError, match="'x' is not closed"):
            figures.filled(bad, {"x": "", "y": ""})


@pytest.mark.parametrize("name", figures.DOCUMENTS)
def test_documents_have_the_newest_results(name):
    """If not: python -m benchmarks.figures --write."""
    text = (records.ROOT / name).read_text()
    assert "<!-- " in text
    assert figures.filled(text, figures.sections(Path(records.RESULTS_DIR))) == text
