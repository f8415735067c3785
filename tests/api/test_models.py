"""Calls of published models: listed, checked, and the same as others compute them."""

import jax.numpy as jnp
import pytest

from benchmarks import harness, model_rows, model_tables, profiles
from benchmarks.model_calls import GROUPS
from benchmarks.peers import OURS
from tests.tiers import deep, deeply

CALLS = [(group, call) for group, calls in GROUPS.items() for call in calls]


def test_calls_are_named_and_sourced():
    names = [call.name for _, call in CALLS]
    assert len(names) == len(set(names)) >= 40
    for _, call in CALLS:
        assert call.source
        assert call.n % call.kv_heads == 0
        assert call.trained or call.causal


def _rows(call, group):
    call = call.small()
    (compiling,) = model_rows.started([call], "float32", list(model_rows.PEERS))
    return model_rows.rows_of(call, group, "float32", compiling, rounds=1)


def _table(rows):
    facts = {"device": "a GPU", "date": "2026-11-25T00:00", "commit": "0123456789"}
    return model_tables.models(
        [{**facts, "dirty": False, "versions": {}, **row} for row in rows]
    )


def _checked(group, call):
    rows = _rows(call, group)
    by_peer = {(row["peer"], row["pass"]): row for row in rows}
    for (peer, which), row in by_peer.items():
        if peer == OURS:
            assert row["failure"] is None, (call.name, which, row["failure"])
        if row["failure"] is None:
            assert not row["wrong"], (call.name, peer, which)
    return rows


QUICK = ["gpt-oss 20B, local", "BLOOM 7B", "T5 large, decoder"]


@pytest.mark.parametrize("name", [QUICK[0], *deeply(*QUICK[1:])])
def test_a_call_and_its_table(name):
    ((group, call),) = [x for x in CALLS if x[1].name == name]
    rows = _checked(group, call)
    text = _table(rows)
    assert name in text
    assert ("(XLA)" in text) == (not call.sinks)  # jax.nn has no sinks


@deep
@pytest.mark.parametrize(("group", "call"), CALLS[::8], ids=lambda x: str(x))
def test_every_eighth_call(group, call):
    _checked(group, call)


def test_a_wrong_peer_is_no_best(monkeypatch):
    (call,) = [x for _, x in CALLS if x.name == "Multi-query decode"]

    def wrong(call, q, k, v, arrays):
        del call, k, arrays
        return jnp.zeros_like(q) + v.sum()

    monkeypatch.setattr(
        model_rows, "PEERS", {OURS: model_rows.PEERS[OURS], "xla": wrong}
    )
    rows = _rows(call, "serving")
    assert [row["wrong"] for row in rows] == [False, True]
    assert "WRONG" not in _table(rows[:1])
    assert "(XLA)" not in _table(rows)


def test_short_calls_are_timed_by_their_kernels(monkeypatch):
    """Which a profiler sees: two calls of one kernel of 3 us."""
    events = [profiles.Event("kernel", x, 3000.0) for x in (0.0, 5000.0)]
    monkeypatch.setattr(harness, "is_gpu", lambda: True)
    monkeypatch.setattr(profiles, "watched", lambda call, seconds: (events, 2))
    monkeypatch.setattr(model_rows, "_SHORT_SECONDS", 60.0)
    (call,) = [x for _, x in CALLS if x.name == "Multi-query decode"]
    rows = _rows(call, "serving")
    assert {row["kernel_seconds"] for row in rows if not row["failure"]} == {3e-6}
    assert " 3 " in _table(rows)


def test_ratios_of_groups():
    """To the faster of jax.nn's two, whose results are right."""
    seconds = {
        ("one", "a"): {OURS: 2.0, "cudnn": 3.0, "xla": 9.0, "tokamax": 1.0},
        ("one", "b"): {OURS: 2.0, "cudnn": 1.0, "xla": 24.0},  # cuDNN is wrong
        ("two", "c"): {OURS: 1.0, "xla": 0.5},
        ("two", "d"): {OURS: 1.0},
    }
    rows = [
        {"group": group, "call": call, "sizes": "s", "pass": "forward", "peer": peer}
        | {"seconds": x, "wrong": call == "b" and peer == "cudnn"}
        for (group, call), times in seconds.items()
        for peer, x in times.items()
    ]
    lines = [[x.strip() for x in x.split("|")[1:-1]] for x in _table(rows).splitlines()]
    assert ["one", "forward", "2", "1.50", "4.24"] in lines
    assert ["two", "forward", "1", "0.50", "0.50"] in lines
    assert ["all", "both passes", "3", "0.50", "2.08"] in lines
    (a,) = [line for line in lines if line[:1] == ["a"]]
    assert a[3:] == ["2e+06", "3e+06 (cuDNN)", "1e+06", "1.50", "0.50"]
