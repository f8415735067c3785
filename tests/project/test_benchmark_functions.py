"""The benchmark of functions of pairs: examples, lists of blocks, rows, table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    cost_tables,
    feature_calls,
    feature_rows,
    function_peers,
    function_rows,
    harness,
)
from benchmarks.function_calls import examples
from benchmarks.function_features import function_features
from benchmarks.peers import OURS
from jax_flash2.tune.problems import Shape
from tests.tiers import deep

TOY = Shape(2, 256, 2, 2, 16, False, "float32")
EXAMPLES = examples(TOY)
FACTS = {"versions": {}, "device": "", "date": "", "commit": "", "dirty": False}


def mask_of(name: str) -> np.ndarray:
    _, mask_mod = EXAMPLES[name].functions(np, EXAMPLES[name].arrays)
    rows, columns = np.indices((TOY.length, TOY.length))
    return mask_mod(0, 0, rows, columns)


def listed(counts: np.ndarray, places: np.ndarray, shape: tuple) -> np.ndarray:
    found = np.zeros(shape, bool)
    for row, count in enumerate(counts):
        found[row, places[row, :count]] = True
    return found


@pytest.mark.parametrize("queries", [32, 48])
@pytest.mark.parametrize("name", EXAMPLES)
def test_lists_of_blocks_give_the_mask(name, queries):
    example, mask = EXAMPLES[name], mask_of(name)
    _, mask_mod = example.functions(np, example.arrays)
    some, every = function_peers.kept_blocks(np, mask_mod, TOY.length, queries, 32)

    def of_pairs(flags):
        wide = flags.repeat(queries, 0).repeat(32, 1)
        return wide[: TOY.length]

    for flags in (some, every, some.T):
        counts, places = function_peers.set_places(flags)
        assert counts.dtype == places.dtype == np.int32
        np.testing.assert_array_equal(listed(counts, places, flags.shape), flags)
    parts = of_pairs(some & ~every)
    assert not (parts & of_pairs(every)).any()
    np.testing.assert_array_equal(parts & mask | of_pairs(every), mask)


@pytest.mark.parametrize("name", EXAMPLES)
def test_slopes_are_derivatives(name):
    example = EXAMPLES[name]
    arrays = jax.tree.map(jnp.asarray, dict(example.arrays))
    score_mod, _ = example.functions(jnp, arrays)
    if score_mod is None:
        assert example.slope is None
        return
    for score in (-30.0, 0.5, 11.0):
        want = jax.grad(score_mod)(score, 0, 1, 200, 100)
        got = example.slope(jnp, score) if example.slope else 1.0
        np.testing.assert_allclose(got, want, rtol=1e-5)


@deep
def test_rows_beside_absent_peers(monkeypatch):
    def absent(call):
        raise ImportError("no such package\nat all")

    label = function_peers.FLASH4
    monkeypatch.setattr(function_rows, "started_by", lambda *_: {label: absent})
    rows = function_rows.rows_of(TOY, "soft cap", peers=["flash4"], rounds=1)
    assert [(row["pass"], row["peer"]) for row in rows] == [
        (which, peer) for which in function_rows.PASSES for peer in (OURS, label)
    ]
    for row in rows:
        if row["peer"] == OURS:
            assert row["failure"] is None and not row["wrong"]
        else:
            assert row["failure"] == "not installed: no such package"
    assert "| absent" in function_rows.table(rows)


@deep
def test_ours_in_any_order_stands_beside_ours():
    rows = function_rows.rows_of(TOY, "causal", peers=["any_order"], rounds=1)
    beside = function_rows.ANY_ORDER
    forward, both = function_rows.PASSES
    named = [(row["pass"], row["peer"]) for row in rows]
    assert named == [(forward, OURS), (both, OURS), (both, beside)]
    assert not any(row["failure"] or row["wrong"] for row in rows)
    text = function_rows.results([{**FACTS, **row} for row in rows])
    assert f"times as fast as {beside}" in text


@deep
def test_functions_are_what_stands_beside_them():
    """And a table has a line for each, whatever the shapes."""
    shape = Shape(2, 512, 2, 2, 16, True, "float32")
    found = function_features(shape)
    operands = shape.operands()

    def out(feature):
        return feature_calls.passes(shape, feature)["forward"](
            *operands, feature.arrays
        )

    same = [x for x in found if x.endswith(", a function") and "bias" not in x]
    assert len(same) == 5
    for name in same:
        want = out(found[found[name].beside])
        np.testing.assert_allclose(out(found[name]), want, atol=1e-5)
    few = {name: found[name] for name in ("plain", same[0])}
    rows = [{**FACTS, **x} for x in feature_rows.rows_of(shape, few, rounds=1)]
    other = [{**row, "shape": {**row["shape"], "heads": 4}} for row in rows]
    table = cost_tables.features(rows + other)
    assert table.count(f"| {same[0]}") == table.count("2 x 512, ") == 2


def test_of_a_peers_forms_the_faster_counts():
    def row(which, peer, seconds, failure=None):
        about = {"shape": vars(TOY), "feature": "causal", "pass": which, "peer": peer}
        return {**about, "failure": failure, "seconds": seconds}

    wide = function_peers.FLASH4_WIDE
    rows = [
        row("forward", OURS, 1e-3),
        row("forward", function_peers.FLASH4, 3e-3),
        row("forward", wide, 2e-3),
        row("forward_backward", OURS, 1e-3),
        row("forward_backward", function_peers.FLASH4, 4e-3),
        row("forward_backward", wide, 0.0, "ValueError: too wide"),
    ]
    text = function_rows.table(rows)
    cells = [x.strip() for x in text.splitlines()[2].split("|")[1:-1]]
    assert cells[3:] == ["1.000", "2.000", "2.00", "1.000", "4.000", "4.00"]
    assert "FlexAttention" not in text
    assert f"- fails: {wide}: ValueError: too wide" in text
    assert "Forward: 2.00 times as fast as FlashAttention-4 (CuTe)" in text


def test_heads_of_64_have_two_forms():
    for size, count in ((64, 3), (128, 2)):
        shape = Shape(2, 256, 2, 2, size, False, "bfloat16")
        assert len(function_peers.started_by(["flex", "flash4"], shape)) == count


def test_failures_are_told_in_a_line_without_colours():
    error = ValueError("\n\n  \x1b[91m\x1b[1merror[NO]:\x1b[0m no such type\nhere")
    assert harness.describe(error) == "ValueError: error[NO]: no such type"
    assert harness.describe(ImportError("torch")) == "not installed: torch"
    assert harness.describe(KeyError()) == "KeyError: "
