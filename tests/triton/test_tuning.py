"""The tables of blocks, who reads them, and the tuner that writes them."""

import dataclasses
import json
import shutil
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import attention
from jax_flash2.tune import blocks as tune_blocks
from jax_flash2.tune import triton as tune_triton
from jax_flash2.tune.problems import Problem, Shape
from jax_flash2.tune.timing import Timing
from pallas_kernels import device, tables
from pallas_kernels.configs import Blocks
from pallas_kernels.device import Gpu
from pallas_kernels.triton import estimates, tuning
from tests.lowering import lower_for_gpu
from tests.tiers import deeply

H200 = Gpu.named("NVIDIA H200")
H200S = tables.table("triton", H200.kind)


@pytest.mark.parametrize("family", tables.FAMILIES, ids=lambda x: x.name)
def test_tables_are_whole_and_fit(family):
    found = tables.read("triton", None, family)
    gpu = Gpu.of(found["gpu"], int(family.name[3:]))
    assert gpu.family is family
    for head in tables.HEADS:
        for kernel in tuning.kernels((head, head)):
            regimes = found["blocks"][kernel][str(head)]
            assert "plain" in regimes
            assert set(regimes) <= set(tables.REGIMES)
            for regime, numbers in regimes.items():
                sizes = (
                    kernel,
                    Blocks(*numbers),
                    (head,) * 2,
                    tuning.ITEMSIZES.get(regime, 2),
                )
                assert tuning.fits(*sizes, gpu=gpu), (kernel, head, regime)
                left = (
                    family.products == "wgmma" or not Blocks(*numbers).left_in_registers
                )
                assert left, (kernel, head, regime)


BIAS = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
MASK = jax.ShapeDtypeStruct((8192, 8192), jnp.bool_)
IDS = jax.ShapeDtypeStruct((2, 8192), jnp.int32)
DROPOUT = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}


def _regimes_of(monkeypatch, call, shapes) -> set[str]:
    """For which blocks are chosen, of a forward pass."""
    found, choose = set(), tuning.choose

    def spy(kernel, config, **options):
        found.add(options["regime"])
        return choose(kernel, config, **options)

    monkeypatch.setattr(tuning, "choose", spy)
    lower_for_gpu(call, *shapes)
    return found


def _regimes(monkeypatch, shapes, arguments) -> set[str]:
    arrays = {n: x for n, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {n: x for n, x in arguments.items() if n not in arrays}

    def call(q, k, v, *more):
        named = dict(zip(arrays, more, strict=True))
        return attention(q, k, v, implementation="triton", **static, **named)

    return _regimes_of(monkeypatch, call, [*shapes, *arrays.values()])


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
        q, k, v, _ = jax.eval_shape(problem.rows, *problem.shape.structs())
        call = problem.attention("triton", None)
        found = _regimes_of(
            monkeypatch, call, [q, k, v, *(structs[x] for x in problem.arrays)]
        )
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
            options |= {"regime": regime, "gpu": H200}
            chosen = tuning.choose(kernel, None, pair_bytes=pair_bytes, **options)
            tuned = H200S[kernel][str(head)]
            best = Blocks(*tuned.get(regime, tuned["plain"]))
            assert chosen.num_stages >= min(best.num_stages, 2)
            assert dataclasses.replace(chosen, num_stages=best.num_stages) == best


@pytest.mark.parametrize("head", [64, 128])
def test_two_programs_with_a_mask_fit_a_multiprocessor(head):
    """With one, a mask of pairs took half as long again (128, T 8192)."""
    options = {"rows": (8192, 8192), "heads": (head, head), "itemsize": 2}
    options |= {"regime": "heavy", "gpu": H200, "pair_bytes": 1}
    blocks = tuning.choose("forward", None, **options)
    need = estimates.shared_memory("forward", blocks, (head, head), 2, pair_bytes=1)
    assert 2 * (need + 1024) <= 228 << 10


OPTIONS = {"rows": (4096, 4096), "heads": (128, 128), "itemsize": 2}


@pytest.fixture
def own_table(monkeypatch, tmp_path):
    """Gives "NVIDIA X" a table of its own."""

    def forget():
        tables.read.cache_clear()
        tuning._table.cache_clear()

    def give(content: str) -> None:
        for path in tables.TUNING.glob("triton_*"):
            shutil.copy(path, tmp_path)
        monkeypatch.setattr(tables, "TUNING", tmp_path)
        tables.table_path("triton", "NVIDIA X").write_text(content)
        forget()

    yield give
    monkeypatch.undo()
    forget()


def _table_of(regimes: dict, kernel: str = "dq", head: str = "128") -> str:
    return json.dumps({"gpu": "NVIDIA X", "blocks": {kernel: {head: regimes}}})


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120, 121])
def test_a_gpu_without_a_table_takes_its_familys(own_table, capability):
    gpu = Gpu.of("NVIDIA X", capability)
    tuned = tables.table("triton", None, gpu.family)["dkv"]["128"]["plain"]
    assert tuning.choose("dkv", None, gpu=gpu, **OPTIONS) == Blocks(*tuned)
    own_table(_table_of({"plain": [32, 16, 4, 1]}, kernel="dkv"))
    assert tuning.choose("dkv", None, gpu=gpu, **OPTIONS) == Blocks(32, 16, 4, 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "no JSON"),
        ("[]", "'gpu' must be 'NVIDIA X', got None"),
        ('{"gpu": "NVIDIA Y", "blocks": {}}', "'gpu' must be 'NVIDIA X', got 'NV"),
        ('{"gpu": "NVIDIA X"}', "'blocks' must be a dictionary, got None"),
        (_table_of({}, kernel="dkw"), "dkw: no such kernel"),
        (_table_of({}, head="130"), "dq, 130: no such head size"),
        (
            _table_of({"fast": [16, 16, 4, 1]}),
            "dq, 128, fast: no such regime, of plain",
        ),
        (
            _table_of({"plain": [16, 24, 4, 1]}),
            "dq, 128, plain: .*multiple of 16, got 24",
        ),
        (
            _table_of({"plain": [16, 48, 4, 1]}),
            "dq, 128, plain: block_kv=48 is no power",
        ),
        (_table_of({"plain": [16]}), "dq, 128, plain: .*missing"),
        (_table_of({"few": [16, 16, 4, 1]}), "dq, 128: no blocks for 'plain'"),
        (_table_of({"plain": [16, 16, 4, 1]}, kernel="dkv"), "dq, 128: no blocks"),
    ],
)
def test_a_table_that_is_wrong(own_table, content, words):
    """Named: its file, the GPU and the field."""
    own_table(content)
    match = f"triton_nvidia_x.json, of blocks for NVIDIA X: .*{words}"
    with pytest.raises(ValueError, match=match):
        tuning.choose("dq", None, gpu=Gpu.of("NVIDIA X", 90), **OPTIONS)


def test_blocks_of_a_table_that_do_not_fit(own_table):
    own_table(_table_of({"plain": [128, 128, 8, 4], "few": [16, 16, 4, 1]}))
    words = r"triton_nvidia_x.json, of .*NVIDIA X: dq, 128, plain: .* more memory than"
    with pytest.warns(UserWarning, match=words):
        found = tuning.choose("dq", None, gpu=Gpu.of("NVIDIA X", 90), **OPTIONS)
    assert found == Blocks(128, 128, 8, 2)  # with fewer stages


@pytest.mark.parametrize("regime", tables.REGIMES)
def test_candidates_begin_with_the_table_and_fit(monkeypatch, regime):
    monkeypatch.setattr(device, "gpu", lambda: H200)
    for head in (64, 128, 256):
        for kernel in tune_triton.kernels(regime, head):
            first, *others = tune_triton.candidates(kernel, head, regime)
            tuned = H200S[kernel][str(head)]
            if regime in tuned:
                best = Blocks(*tuned[regime])
                assert dataclasses.replace(first, num_stages=best.num_stages) == best
            for blocks in others:
                size = tuning.ITEMSIZES.get(regime, 2)
                need = estimates.shared_memory(kernel, blocks, (head, head), size)
                assert need <= 227 << 10


def _row(blocks, seconds):
    return {"feature": blocks} | ({} if seconds is None else {"seconds": seconds})


def test_the_fastest_in_bursts_are_finalists_and_decide_nothing(monkeypatch):
    """On an H200 blocks won by a fifth in bursts, and lost in settled clocks."""
    now, *others = (Blocks(64, 64, 4, stages) for stages in range(1, 10))
    burst = {now: 9.0} | {x: float(x.num_stages) for x in others}
    settled = {now: 5.0, others[0]: 6.0, others[1]: 4.0}

    def times(compiling, arguments, rounds, *, in_bursts):
        found = burst if in_bursts else settled
        timed = {b: Timing(1, [found.get(b, 7.0)] * rounds) for b in compiling}
        return timed, {}

    problem = Problem(Shape(1, 64, 1, 1, 64, False, "float32"))
    backend = SimpleNamespace(
        candidates=lambda *_: [now, *others],
        problems_of=lambda *_: [problem, problem],
    )
    start = lambda *_: tune_blocks._Programs(  # noqa: E731
        "dq", "plain", problem, dict.fromkeys([now, *others], Future()), []
    )
    monkeypatch.setattr(tune_blocks._Programs, "start", start)
    monkeypatch.setattr(tune_blocks, "times", times)
    rows = list(tune_blocks.measure(backend, "plain", "dq", 64, rounds=2))
    assert [row["in_bursts"] for row in rows] == [True] * 9 + [False] * 12
    assert tune_blocks.best(rows) == ([64, 64, 4, 3], pytest.approx(5 / 4))


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
