"""The tables of blocks, who reads them, and the tuner that writes them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import attention
from jax_flash2.tune import blocks as tune_blocks
from jax_flash2.tune import triton as tune_triton
from pallas_kernels import device, tables
from pallas_kernels.configs import Blocks
from pallas_kernels.triton import tuning
from tests.lowering import lower_for_gpu
from tests.tiers import deeply

H200 = "NVIDIA H200"
TABLES = sorted(tables.TUNING.glob("triton_nvidia_*.json"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_are_whole_and_fit(path):
    found = json.loads(path.read_text())
    assert tables.table_path("triton", found["gpu"]) == path
    for head in tables.HEADS:
        for kernel in tuning.kernels((head, head)):
            regimes = found["blocks"][kernel][str(head)]
            assert "plain" in regimes
            assert set(regimes) <= set(tables.REGIMES)
            for regime, blocks in regimes.items():
                size = tuning.ITEMSIZES.get(regime, 2)
                need = tuning.shared_memory(kernel, Blocks(*blocks), (head,) * 2, size)
                assert need <= 227 << 10, (kernel, head, regime)


BIAS = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
MASK = jax.ShapeDtypeStruct((8192, 8192), jnp.bool_)
IDS = jax.ShapeDtypeStruct((2, 8192), jnp.int32)
DROPOUT = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}


def _regimes(monkeypatch, shapes, arguments) -> set[str]:
    """For which blocks are chosen, of a forward pass."""
    found, choose = set(), tuning.choose

    def spy(kernel, config, **options):
        found.add(options["regime"])
        return choose(kernel, config, **options)

    monkeypatch.setattr(tuning, "choose", spy)
    arrays = {n: x for n, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {n: x for n, x in arguments.items() if n not in arrays}

    def call(q, k, v, *more):
        named = dict(zip(arrays, more, strict=True))
        return attention(q, k, v, implementation="triton", **static, **named)

    lower_for_gpu(call, *shapes, *arrays.values())
    return found


@pytest.mark.parametrize(
    ("shape", "arguments", "regime"),
    [
        ((4, 4096, 16), {}, "plain"),
        ((2, 8192, 16), {"key_value_seq_lengths": jnp.full(2, 8000)}, "long"),
        ((1, 16384, 16), {"is_causal": False}, "long"),
        ((1, 16384, 2), {}, "few"),
        ((1, 8192, 1), {}, "single"),
        ((2, 8192, 16), {"local_window_size": (1000, 0)}, "short"),
        ((2, 8192, 16), {"local_window_size": (1000, None)}, "short"),
        ((16, 1024, 16), {}, "short"),
        ((8, 2048, 16), {}, "short"),
        ((8, 2048, 16), {"is_causal": False}, "plain"),
        ((16, 1024, 16), {"is_causal": False}, "whole"),
        ((2, 8192, 16), {"logits_soft_cap": 30.0}, "heavy"),
        ((2, 8192, 16), {"alibi_slopes": jnp.ones(16)}, "long"),
        ((2, 8192, 16), {"mask": MASK}, "heavy"),
        ((2, 8192, 16), DROPOUT, "dropout"),
        ((2, 8192, 16), {"query_segment_ids": IDS}, "short"),
        ((2, 8192, 16), {"bias": BIAS}, "bias"),
        ((2, 8192, 16), {"bias": BIAS, **DROPOUT}, "bias"),
        ((2, 8192, 16), {"logits_soft_cap": 30.0, **DROPOUT}, "dropout"),
        ((2, 8192, 16), {"mask": MASK, "query_segment_ids": IDS}, "heavy"),
    ],
)
def test_a_call_takes_the_blocks_of_its_regime(monkeypatch, shape, arguments, regime):
    x = jax.ShapeDtypeStruct((*shape, 128), jnp.bfloat16)
    arguments = {"is_causal": True, **arguments}
    assert _regimes(monkeypatch, (x, x, x), arguments) == {regime}


@pytest.mark.parametrize("head", [64, *deeply(128, 256)])
@pytest.mark.parametrize("regime", [r for r in tables.REGIMES if "float" not in r])
def test_a_regime_is_tuned_on_calls_of_its_own(monkeypatch, regime, head):
    problems = []

    def arrays():
        problems.extend(tune_triton.problems(regime, head))
        return [problem.arrays for problem in problems]

    for problem, structs in zip(problems, jax.eval_shape(arrays), strict=True):
        arguments = {"is_causal": problem.shape.causal, **problem.static, **structs}
        q, k, v, _ = jax.eval_shape(problem.rows, *problem.shape.structs())
        found = _regimes(monkeypatch, (q, k, v), arguments)
        assert found == {regime}, problem.shape


def test_pieces_hold_a_head_and_little_more():
    known = {40: (64,), 72: (64, 16), 96: (64, 32), 112: (128,), 192: (128, 64)}
    for size in range(1, 513):
        pieces = tables.pieces(size)
        assert size <= sum(pieces) <= tables.padded(size)
        assert all(n == tables.padded(n) for n in pieces)
        assert list(pieces) == sorted(pieces, reverse=True)
        assert pieces == known.get(size, pieces)


@pytest.mark.parametrize(("regime", "pair_bytes"), [("heavy", 1), ("bias", 2)])
def test_blocks_that_do_not_fit_with_pairs_have_fewer_stages(regime, pair_bytes):
    for head in (64, 128, 256):
        for kernel in tuning.kernels((head, head)):
            options = {"rows": (8192, 8192), "heads": (head, head), "itemsize": 2}
            options |= {"regime": regime, "gpu": H200, "limit": 227 << 10}
            chosen = tuning.choose(kernel, None, pair_bytes=pair_bytes, **options)
            tuned = tables.table("triton", H200)[kernel][str(head)]
            best = Blocks(*tuned.get(regime, tuned["plain"]))
            assert chosen.num_stages >= min(best.num_stages, 2)
            assert dataclasses.replace(chosen, num_stages=best.num_stages) == best


@pytest.mark.parametrize("head", [64, 128])
def test_two_programs_with_a_mask_fit_a_multiprocessor(head):
    """With one, a mask of pairs took half as long again (128, T 8192)."""
    options = {"rows": (8192, 8192), "heads": (head, head), "itemsize": 2}
    options |= {"regime": "heavy", "gpu": H200, "pair_bytes": 1, "limit": 227 << 10}
    blocks = tuning.choose("forward", None, **options)
    need = tuning.shared_memory("forward", blocks, (head, head), 2, pair_bytes=1)
    assert 2 * (need + 1024) <= 228 << 10


def test_a_gpu_without_a_table_takes_the_h200s_where_it_fits():
    assert tables.table("triton", "NVIDIA Unheard Of") == tables.table("triton", H200)
    options = {"rows": (4096, 4096), "heads": (128, 128), "itemsize": 2}
    options |= {"regime": "single", "gpu": "NVIDIA Unheard Of"}
    tuned = tables.table("triton", H200)["forward"]["128"]
    here = tuning.choose("forward", None, limit=227 << 10, **options)
    assert here == Blocks(*tuned["single"])
    small = tuning.choose("forward", None, limit=99 << 10, **options)
    heads, itemsize = options["heads"], options["itemsize"]

    def need(blocks):
        return tuning.shared_memory("forward", blocks, heads, itemsize)

    assert need(small) <= 99 << 10 < need(here)


@pytest.mark.parametrize("regime", tables.REGIMES)
def test_candidates_begin_with_the_table_and_fit(monkeypatch, regime):
    monkeypatch.setattr(device, "device_kind", lambda: H200)
    for head in (64, 128, 256):
        for kernel in tune_triton.kernels(regime, head):
            first, *others = tune_triton.candidates(kernel, head, regime)
            tuned = tables.table("triton", H200)[kernel][str(head)]
            if regime in tuned:
                best = Blocks(*tuned[regime])
                assert dataclasses.replace(first, num_stages=best.num_stages) == best
            for blocks in others:
                size = tuning.ITEMSIZES.get(regime, 2)
                need = tuning.shared_memory(kernel, blocks, (head, head), size)
                assert need <= 227 << 10


def _row(blocks, seconds):
    return {"feature": blocks} | ({} if seconds is None else {"seconds": seconds})


def test_best_takes_the_smallest_mean_by_a_margin():
    now, other, half_done, broken = [64, 64, 4, 2], [64, 64, 4, 3], [1] * 4, [2] * 4

    def best(a, b):
        rows = [
            _row(now, 1.0),
            _row(other, a),
            _row(half_done, 0.1),
            _row(broken, None),
        ]
        return tune_blocks.best([*rows, _row(now, 1.0), _row(other, b)])

    found, gain = best(0.5, 1.5)
    assert found == other and gain == pytest.approx(0.75**-0.5)
    assert best(0.999, 1.0) == (now, 1.0)
    assert best(0.9, 1.2) == (now, 1.0)
