"""The Mosaic GPU kernels in JAX's interpreter, without a GPU: what is theirs alone.

What every backend keeps is in `tests/kernels`, for these as for others.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Config
from pallas_kernels import device
from pallas_kernels.mosaic_gpu.hopper import tuning
from pallas_kernels.mosaic_gpu.tile_scheduler import Schedule
from tests import mosaic_interpreter, tolerances
from tests.cases import ON_GPU, Case, by_name
from tests.kernels.runners import RUNNERS
from tests.kernels.test_attention import check_same_bits
from tests.mosaic import BLOCKS, with_heads
from tests.tiers import deep

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernels"),
    pytest.mark.skipif(
        not mosaic_interpreter.IS_SUPPORTED, reason="JAX has no interpreter for them"
    ),
]


def check(case, record_property, **more) -> dict[str, np.ndarray]:
    runner = RUNNERS["mosaic_gpu"]
    return runner.check(case, runner.dtypes[0], record_property, **more)


def of_two_blocks(case: Case) -> Case:
    """Of queries and of keys, the second one not whole."""
    return dataclasses.replace(case, t=5 * case.t + 7, s=5 * case.s + 7)


HEADS = [(128, 128), (192, 128), (256, 256), (64, 192)]


@deep
@pytest.mark.parametrize("heads", HEADS, ids=["_".join(map(str, x)) for x in HEADS])
def test_wider_heads(heads, monkeypatch, record_property):
    mosaic_interpreter.install(monkeypatch)
    h, d = heads
    case = dataclasses.replace(by_name("lengths_causal"), t=200, s=230, h=h, d=d)
    assert "query" in check(case, record_property)


@deep
def test_most_tiles(monkeypatch, record_property):
    """A program takes as many tiles as it may, and leaves one to the next program."""
    mosaic_interpreter.install(monkeypatch)
    monkeypatch.setattr(device, "multiprocessors", lambda: 1)
    case = dataclasses.replace(by_name("lengths_causal"), batch=(4,), t=200, s=230)
    case = with_heads(dataclasses.replace(case, n=4, k=2), 64)
    schedule = Schedule.of(4 * 4 * 2, 1, uniform_cost=False)
    assert schedule.tiles == schedule.most_tiles + 1 and schedule.thread_blocks == 2
    assert "query" in check(case, record_property)


@deep
@pytest.mark.parametrize(
    "name", ["segments_causal_gqa", "dropout_bias", "window_offset", "alibi_two_sided"]
)
def test_gradients_apart(name, monkeypatch, record_property):
    """Of heads above 192, each by a kernel of its own."""
    mosaic_interpreter.install(monkeypatch)
    case = with_heads(dataclasses.replace(by_name(name), t=200, s=230), 208)
    assert "query" in check(case, record_property)


@deep
@pytest.mark.parametrize("head", [64, 128])
def test_parts_of_gradients(head, monkeypatch, record_property):
    """Parts of dk and dv in float32 leave from where dq was on its way."""
    mosaic_interpreter.install(monkeypatch)
    monkeypatch.setattr(device, "multiprocessors", lambda: 8)
    case = dataclasses.replace(by_name("plain"), batch=(1,), t=900, s=130, n=2, k=1)
    assert "query" in check(with_heads(case, head), record_property)


@deep
def test_parts_of_gradients_apart(monkeypatch, record_property):
    """Parts of dk and dv in float32 leave in place of queries; dq has no parts."""
    mosaic_interpreter.install(monkeypatch)
    monkeypatch.setattr(device, "multiprocessors", lambda: 8)
    case = dataclasses.replace(by_name("plain"), batch=(1,), t=130, s=520, n=2, k=1)
    assert "query" in check(with_heads(case, 208), record_property)


@deep
@pytest.mark.parametrize("name", ["bias_half_heads", "dropout_bias"])
def test_parts_of_a_bias(name, monkeypatch, record_property):
    """Batch entries are dealt out to programs, whose sums are added in one order."""
    mosaic_interpreter.install(monkeypatch)
    monkeypatch.setattr(device, "multiprocessors", lambda: 24)
    case = dataclasses.replace(by_name(name), batch=(5,), t=130, s=150)
    assert "bias" in check(with_heads(case, 64), record_property)


@deep
@pytest.mark.parametrize("name", ["causal", "lengths_causal"])
def test_several_dq_accumulators(name, monkeypatch, record_property):
    """Some blocks of queries meet one block of keys: a sum of theirs is not written."""
    mosaic_interpreter.install(monkeypatch)
    monkeypatch.setattr(tuning, "dq_accumulators", lambda *_: 2)
    case = with_heads(dataclasses.replace(by_name(name), t=200, s=500), 64)
    assert "query" in check(case, record_property)


@deep
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("name", ["window_offset", "bias_half_heads"])
def test_blocks(name, blocks, monkeypatch, record_property):
    mosaic_interpreter.install(monkeypatch)
    case = with_heads(of_two_blocks(by_name(name)), 64)
    check(case, record_property, config=Config(forward=blocks))


class Rising(Case):
    """Some of the last scores are far above all before: sums of p leave float32."""

    def inputs(self, dtype, seed: int = 0):
        (q, k, v), arguments = super().inputs(dtype, seed)
        late = np.arange(self.s) >= self.s - 60
        return (q, jnp.where(late[:, None, None], 60 * k, k), v), arguments


@deep
@pytest.mark.parametrize(
    ("name", "head"), [("plain", 64), ("lengths", 64), ("mask_full", 64), ("plain", 96)]
)
def test_rows_out_of_range_are_made_again(name, head, monkeypatch, record_property):
    """With running maxima: without and with keys that no query attends."""
    mosaic_interpreter.install(monkeypatch)
    case = dataclasses.replace(by_name(name), batch=(2,), t=200, s=500)
    check(Rising(**vars(with_heads(case, head))), record_property)


@deep
@pytest.mark.parametrize(
    ("name", "head"),
    [*((x, 64) for x in BLOCKS), ("one_warpgroup", 96), ("few_keys", 96)],
)
def test_retries_of_tiles_that_are_taken(name, head, monkeypatch):
    """Both retries of a dynamic schedule: NaN beyond lengths, and rows out of range.

    With one stage no keys may be awaited early: a consumer would wait for ever.
    """
    mosaic_interpreter.install(monkeypatch)
    monkeypatch.setattr(device, "multiprocessors", lambda: 1)
    case = dataclasses.replace(by_name("plain"), batch=(2,), t=200, s=330)
    case, blocks = with_heads(case, head), BLOCKS[name]
    lengths = np.int32([300, 40])
    (q, k, v), _ = case.inputs(jnp.bfloat16)
    place = np.arange(case.s)
    k = jnp.where(((place >= 240) & (place < 280))[:, None, None], 60 * k, k)
    more = {"config": Config(forward=blocks), "key_value_seq_lengths": lengths}
    cotangents = tolerances.cotangents_for(case, jnp.bfloat16)
    clean = mosaic_interpreter.evaluate((q, k, v), cotangents, more)
    padding = (place >= lengths[:, None])[..., None, None]
    k, v = (jnp.where(padding, jnp.nan, x) for x in (k, v))
    dirty = mosaic_interpreter.evaluate((q, k, v), cotangents, more)
    assert all(np.isfinite(x).all() for x in dirty.values())
    check_same_bits(clean, dirty)


@deep
@pytest.mark.parametrize("axes", ["ts", "bs"])
def test_rounds_that_met_nan_are_made_again(axes, monkeypatch):
    """Without the keys that hold it, which no query keeps: no bit of a result changes.

    Nor where queries beyond the array meet what is not finite.
    """
    mosaic_interpreter.install(monkeypatch)
    case = dataclasses.replace(by_name("plain"), batch=(1,), t=130, s=150, h=64, d=64)
    mask = np.random.default_rng(0).random(case.broadcast(axes)) < 0.7
    dropped = np.arange(case.s) % 70 < 9
    arguments = {"mask": mask & ~dropped}
    (q, k, v), _ = case.inputs(jnp.bfloat16)
    cotangents = tolerances.cotangents_for(case, jnp.bfloat16)
    clean = mosaic_interpreter.evaluate((q, k, v), cotangents, arguments)
    k, v = (jnp.where(dropped[:, None, None], np.nan, x) for x in (k, v))
    dirty = mosaic_interpreter.evaluate((q, k, v), cotangents, arguments)
    check_same_bits(clean, dirty)


@deep
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_warpgroups_do_not_race_for_what_is_made_0(dtype, monkeypatch):
    """Keys beyond lengths, which hold NaN; no bit of a result changes.

    With ALiBi, too, whose arithmetic is another one where no pair is masked.
    """
    mosaic_interpreter.install(monkeypatch, races=True)
    case = dataclasses.replace(by_name("plain"), batch=(2,), t=200, s=230, h=64, d=64)
    (q, k, v), _ = case.inputs(dtype)
    cotangents = tolerances.cotangents_for(case, dtype)
    lengths = np.int32([190, 40])
    arguments = {"key_value_seq_lengths": lengths, "is_causal": True}
    if dtype == "float16":
        arguments["alibi_slopes"] = np.float32(0.5 ** np.arange(1, case.n + 1))
    clean = mosaic_interpreter.evaluate((q, k, v), cotangents, arguments)
    padding = (np.arange(case.s) >= lengths[:, None])[..., None, None]
    k, v = (jnp.where(padding, jnp.nan, x) for x in (k, v))
    dirty = mosaic_interpreter.evaluate((q, k, v), cotangents, arguments)
    assert not mosaic_interpreter.found_races()
    check_same_bits(clean, dirty)


@deep
@pytest.mark.parametrize(
    ("name", "head"), [("causal", 64), ("causal", 128), ("plain", 128), ("plain", 256)]
)
def test_barriers_order_all_accesses(name, head, monkeypatch):
    mosaic_interpreter.install(monkeypatch, races=True)
    case = with_heads(dataclasses.replace(by_name(name), t=200, s=330), head)
    arrays, arguments = case.inputs(jnp.bfloat16)
    cotangents = tolerances.cotangents_for(case, jnp.bfloat16)
    found = mosaic_interpreter.evaluate(arrays, cotangents, arguments)
    assert "query" in found
    assert not mosaic_interpreter.found_races()
