"""Tables in the user's folder: found, checked, used and named, and adopted."""

import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.adopt import _of_pass, adopt
from jax_flash2 import explain
from jax_flash2.tune.table import Table
from pallas_kernels import tables, user_tables
from pallas_kernels.configs import Blocks
from pallas_kernels.device import Gpu
from pallas_kernels.mosaic_gpu import hopper, measured
from pallas_kernels.triton import tuning
from tests.lowering import on_gpu

H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"
assert hopper and tuning  # who read them say what they may have


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's, empty."""
    monkeypatch.setenv(user_tables.VARIABLE, str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget():
    user_tables.read.cache_clear()
    measured.of_gpu.cache_clear()


@pytest.mark.parametrize(
    ("platform", "given", "expected"),
    [
        ("linux", {}, "HOME/.local/share/jax_flash2"),
        ("linux", {"XDG_DATA_HOME": "/data"}, "/data/jax_flash2"),
        ("darwin", {}, "HOME/Library/Application Support/jax_flash2"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/jax_flash2"),
        ("linux", {"JAX_FLASH2_TUNING": "~/mine"}, "HOME/mine"),
        ("linux", {"JAX_FLASH2_TUNING": "off"}, None),
    ],
)
def test_where_a_table_is(monkeypatch, platform, given, expected):
    for name in ("JAX_FLASH2_TUNING", "XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "platform", platform)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = user_tables.folder()
    assert found == (expected and Path(expected.replace("HOME", "/home/me")))


def chosen(gpu: str) -> Blocks:
    """Of the Triton forward kernel, plain, at heads of 64."""
    with on_gpu(gpu):
        options = {"rows": (4096, 4096), "heads": (64, 64), "itemsize": 2}
        return tuning.choose("forward", None, gpu=Gpu.named(gpu), **options)


def explained(gpu: str) -> str:
    x = jax.ShapeDtypeStruct((2, 4096, 16, 64), jnp.bfloat16)
    with on_gpu(gpu):
        return explain(x, x, x)


def test_calls_use_a_table_and_explain_names_it(folder, monkeypatch):
    before, other = chosen(L4), chosen("NVIDIA A10")
    table = Table(folder, "triton", L4)
    mine = [32, 32, 4, 2]
    assert list(mine) != [before.block_q, before.block_kv, 4, 2]
    table.put("blocks", "forward", 64, {"plain": mine})
    forget()
    assert chosen(L4) == Blocks(*mine)
    assert chosen("NVIDIA A10") == other
    assert f"with blocks of yours: {table.path}" in explained(L4)
    assert "of yours" not in explained("NVIDIA A10")
    # A second run keeps what the first one found.
    Table(folder, "triton", L4).put("blocks", "dq", 64, {"plain": mine})
    assert set(json.loads(table.path.read_text())["blocks"]) == {"forward", "dq"}
    monkeypatch.setenv(user_tables.VARIABLE, user_tables.OFF)
    forget()
    assert chosen(L4) == before


def test_a_table_of_hopper_is_over_the_shipped_one(folder):
    table, before = Table(folder, "mosaic_gpu", H100), measured.of_gpu(H100)
    table.put("blocks", "forward", 128, {"few keys": [64, 128, 4, 2]})
    table.put("crossovers", "plain", 48, {"forward": math.inf})
    forget()
    with on_gpu(H100):
        now = measured.of_gpu(H100)
    assert now.blocks_of("forward", 96, "few keys") == Blocks(64, 128, 4, 2)
    own = before.blocks_of("forward", 96, "many keys")
    assert now.blocks_of("forward", 96, "many keys") == own
    assert math.isinf(now.crossover("plain", 40).forward)
    assert now.crossover("plain", 40).backward == before.crossover("plain", 48).backward
    assert now.crossover("plain", 49) == before.crossover("plain", 49)
    assert now.numbers == before.numbers


GOOD, DEEP = [64, 64, 4, 2], [192, 128, 12, 9]


def of(backend: str, part: str, entries, gpu: str) -> dict:
    return {"gpu": gpu, "backend": backend, part: entries}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("{", "Expecting property name"),
        ("[]", "the file: expected an object, got list"),
        (of("triton", "blocks", {"forward": {"64": {"plain": GOOD}}}, "X"), "gpu"),
        (of("triton", "blocks", {}, L4), "blocks: expected entries"),
        (of("triton", "blocks", {"fwd": {}}, L4), "blocks, fwd: expected one of for"),
        (of("triton", "blocks", {"dq": {"65": {}}}, L4), "blocks, dq, 65: expected"),
        (of("triton", "blocks", {"dq": {"a": {}}}, L4), "blocks, dq, a: expected a he"),
        (of("triton", "blocks", {"dq": {"64": 3}}, L4), "blocks, dq, 64: expected an"),
        (
            of("triton", "blocks", {"dq": {"64": {"x": GOOD}}}, L4),
            "dq, 64, x: expected",
        ),
        (
            of("triton", "blocks", {"dq": {"64": {"plain": [64, 64, "4", 2]}}}, L4),
            "blocks, dq, 64, plain: .* num_warps must be an int",
        ),
        (
            of("triton", "blocks", {"dq": {"64": {"plain": [48, 64, 4, 2]}}}, L4),
            "dq, 64, plain: block_q=48 is no power of two",
        ),
        (
            of("triton", "blocks", {"dq": {"64": {"plain": [256, 256, 8, 3]}}}, L4),
            "dq, 64, plain: .* does not fit 99 KiB of shared memory",
        ),
        (of("triton", "crossovers", {"plain": {}}, L4), "crossovers, plain: expected"),
        (
            of("mosaic_gpu", "blocks", {"dkv": {"64": {"any": GOOD}}}, H100),
            "blocks, dkv, 64: expected one of .256.",
        ),
        (
            of("mosaic_gpu", "blocks", {"forward": {"64": {"few keys": GOOD}}}, H100),
            None,
        ),
        (
            of(
                "mosaic_gpu",
                "blocks",
                {"dq": {"256": {"any": [192, 128, 12, 3]}}},
                H100,
            ),
            "blocks, dq, 256, any: .* needs .* KiB of shared memory",
        ),
        (
            of("mosaic_gpu", "crossovers", {"plain": {"64": {"forward": -1}}}, H100),
            "plain, 64, forward: expected a number of keys or null, got -1",
        ),
        (
            of("mosaic_gpu", "crossovers", {"plain": {"512": {"forward": 1}}}, H100),
            "plain, 512: expected a head size up to 256",
        ),
    ],
)
def test_a_bad_table_is_named_and_the_shipped_one_serves(folder, content, field):
    text = content if isinstance(content, str) else json.dumps(content)
    backend = "mosaic_gpu" if "mosaic_gpu" in text else "triton"
    gpu = H100 if backend == "mosaic_gpu" else L4
    path = folder / tables.table_path(backend, gpu).name
    path.write_text(text)
    if field is None:
        assert "of yours" in explained(gpu)
        return
    with pytest.warns(UserWarning, match=field) as caught:
        found = explained(gpu)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert str(path) in message and gpu in message
    path.unlink()
    forget()
    assert found == explained(gpu)


def test_a_table_that_was_sent_is_adopted(tmp_path):
    sent = Table(tmp_path / "sent", "mosaic_gpu", H100)
    sent.put("blocks", "backward", 128, {"any": [128, 64, 4, 2]})
    sent.put("crossovers", "plain", 63, {"forward": 96})
    sent.put("crossovers", "uneven", 256, {"forward": None, "backward": 1})
    before = tables.read("mosaic_gpu", H100)
    (tmp_path / "shipped").mkdir()
    found = json.loads(adopt(sent.path, tmp_path / "shipped").read_text())
    made = json.loads(sent.path.read_text())
    note = f"{H100}, {made['date']}: jax_flash2.tune {made['versions']['jax_flash2']}"
    assert found["gpu"] == H100 and found["versions"] == made["versions"]
    assert found["numbers"] == before["numbers"]
    assert found["blocks"]["backward"]["128"] == {"any": [128, 64, 4, 2]}
    assert found["blocks"]["forward"] == before["blocks"]["forward"]
    assert found["blocks_measured"]["backward, 128, any"] == note
    assert _of_pass("forward: a; b. c; backward: d", "forward") == "a; b. c"
    plain, old = found["crossovers"]["plain"], before["crossovers"]["plain"]
    assert (plain["63"]["forward"], plain["64"]) == (96, old["64"])
    assert plain["63"]["backward"] == old["63"]["backward"]
    _, found_before, of_before = old["63"]["measured"].partition("; backward: ")
    assert found_before
    assert plain["63"]["measured"] == f"forward: {note}; backward: {of_before}"
    uneven = found["crossovers"]["uneven"]["256"]
    assert uneven == {"forward": None, "backward": 1, "measured": note}
    # Of a note with a part for each pass, the part of the other one stays.
    second = Table(tmp_path / "second", "mosaic_gpu", H100)
    second.put("crossovers", "plain", 63, {"backward": 5})
    text = second.path.read_text().replace(made["date"][:10], "later")
    second.path.write_text(text)
    again = json.loads(adopt(second.path, tmp_path / "shipped").read_text())
    noted = again["crossovers"]["plain"]["63"]["measured"]
    assert noted.startswith(f"forward: {note}; backward: {H100}, later")
