"""The tables of blocks, who reads them, and the tuner that writes them."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import tune
from jax_flash2 import attention
from pallas_kernels import configs
from pallas_kernels.configs import Blocks
from pallas_kernels.triton import support
from tests.lowering import lower_for_gpu

H200 = "NVIDIA H200"
TABLES = sorted(configs.TUNING.glob("*.json"))
SIZES = {"float32": 4, "float32 highest": configs.SPLIT_ITEMSIZE}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_are_whole_and_fit(path):
    found = json.loads(path.read_text())
    assert configs.table_path(found["gpu"]) == path
    for head in configs.HEADS:
        for kernel in configs.kernels((head, head)):
            regimes = found["blocks"][kernel][str(head)]
            assert "plain" in regimes
            assert set(regimes) <= set(configs.REGIMES)
            for regime, blocks in regimes.items():
                size = SIZES.get(regime, 2)
                need = configs.shared_memory(kernel, Blocks(*blocks), (head,) * 2, size)
                assert need <= 227 << 10, (kernel, head, regime)


def _warps_and_grid(batch, length, heads, **arguments):
    x = jax.ShapeDtypeStruct((batch, length, heads, 128), jnp.bfloat16)
    arguments = {"implementation": "triton", "is_causal": True, **arguments}
    text = lower_for_gpu(functools.partial(attention, **arguments), x, x, x)
    return tuple(
        int(re.search(rf"{a} = (\d+)", text)[1]) for a in ("num_warps", "grid_x")
    )


@pytest.mark.parametrize(
    ("shape", "arguments", "regime"),
    [
        ((4, 4096, 16), {}, "plain"),
        ((2, 8192, 16), {"key_value_seq_lengths": jnp.full(2, 8000)}, "plain"),
        ((1, 16384, 2), {}, "few"),
        ((1, 8192, 1), {}, "single"),
        ((2, 8192, 16), {"local_window_size": (1000, 0)}, "short"),
        ((2, 8192, 16), {"local_window_size": (1000, None)}, "short"),
        ((16, 1024, 16), {}, "short"),
        ((8, 2048, 16), {}, "short"),
        ((8, 2048, 16), {"is_causal": False}, "plain"),
        ((2, 8192, 16), {"logits_soft_cap": 30.0}, "heavy"),
        ((2, 8192, 16), {"alibi_slopes": jnp.ones(16)}, "plain"),
        ((2, 8192, 16), {"mask": jnp.ones((8192, 8192), bool)}, "heavy"),
        (
            (2, 8192, 16),
            {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)},
            "dropout",
        ),
        ((2, 8192, 16), {"bias": jnp.ones((8192, 8192))}, "bias"),
    ],
)
def test_a_call_takes_the_blocks_of_its_regime(shape, arguments, regime):
    tuned = configs.table(H200)["forward"]["128"]
    rows, _, warps, *_ = tuned.get(regime, tuned["plain"])
    assert _warps_and_grid(*shape, **arguments) == (warps, shape[1] // rows)


@pytest.mark.parametrize("head", [64, 128])
def test_two_programs_with_a_mask_fit_a_multiprocessor(head):
    """With one, a mask of pairs took half as long again (128, T 8192)."""
    options = {"rows": (8192, 8192), "heads": (head, head), "itemsize": 2}
    options |= {"kind": "heavy", "gpu": H200, "pair_bytes": 1, "limit": 227 << 10}
    blocks = configs.choose("forward", None, **options)
    need = configs.shared_memory("forward", blocks, (head, head), 2, pair_bytes=1)
    assert 2 * (need + 1024) <= 228 << 10


def test_a_gpu_without_a_table_takes_the_h200s_where_it_fits():
    assert configs.table("NVIDIA Unheard Of") == configs.table(H200)
    options = {"rows": (4096, 4096), "heads": (128, 128), "itemsize": 2}
    options |= {"kind": "single", "gpu": "NVIDIA Unheard Of"}
    tuned = configs.table(H200)["forward"]["128"]
    here = configs.choose("forward", None, limit=227 << 10, **options)
    assert here == Blocks(*tuned["single"])
    small = configs.choose("forward", None, limit=99 << 10, **options)
    heads, itemsize = options["heads"], options["itemsize"]

    def need(blocks):
        return configs.shared_memory("forward", blocks, heads, itemsize)

    assert need(small) <= 99 << 10 < need(here)


@pytest.mark.parametrize("regime", configs.REGIMES)
def test_candidates_begin_with_the_table_and_fit(monkeypatch, regime):
    monkeypatch.setattr(support, "device_kind", lambda: H200)
    for head in (64, 128, 256):
        for kernel in tune.kernels(regime, head):
            first, *others = tune.candidates(kernel, head, regime)
            tuned = configs.table(H200)[kernel][str(head)]
            if regime in tuned and regime != "bias":
                assert first == Blocks(*tuned[regime])
            for blocks in others:
                size = tune.itemsize(regime)
                need = configs.shared_memory(kernel, blocks, (head, head), size)
                assert need <= 227 << 10


def _row(blocks, seconds, length=64):
    shape = {"head_size": 128, "length": length}
    row = {"pass": "dq", "shape": shape, "peer": "plain", "feature": blocks}
    return row | ({} if seconds is None else {"seconds": seconds})


def test_best_takes_the_smallest_mean_by_a_margin():
    now, other, half_done, broken = [64, 64, 4, 2], [64, 64, 4, 3], [1] * 4, [2] * 4
    at = ("dq", 128, "plain")

    def best(a, b):
        rows = [
            _row(now, 1.0),
            _row(other, a),
            _row(half_done, 0.1),
            _row(broken, None),
        ]
        return tune.best([*rows, _row(now, 1.0, 128), _row(other, b, 128)])[at]

    assert best(0.5, 1.5) == other
    assert best(0.999, 1.0) == now
    assert best(0.9, 1.2) == now


def test_a_table_keeps_what_was_not_measured(tmp_path):
    path = tmp_path / "nvidia_x.json"
    made = {"date": "today"}
    tune.write_table(path, "NVIDIA X", made, {("dq", 64, "plain"): [16, 16, 4, 1]})
    tune.write_table(path, "NVIDIA X", made, {("dq", 64, "few"): [32, 16, 4, 1]})
    found = json.loads(path.read_text())
    assert found["gpu"] == "NVIDIA X"
    dq = found["blocks"].pop("dq")
    assert dq["64"] == {
        **configs.table(H200)["dq"]["64"],
        "plain": [16, 16, 4, 1],
        "few": [32, 16, 4, 1],
    }
    others = dict(configs.table(H200))
    del others["dq"]
    assert found["blocks"] == others
