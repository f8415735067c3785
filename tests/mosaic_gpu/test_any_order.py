"""`Config(deterministic=False)`: blocks of keys add to dq in any order, on Hopper."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Config, attention, explain
from pallas_kernels import tables
from pallas_kernels.mosaic_gpu.tiles import Turn
from tests import mosaic_interpreter
from tests.cases import ON_GPU, by_name
from tests.lowering import lower_for_gpu, on_gpu
from tests.modules import mosaic_modules
from tests.mosaic import MOSAIC, check, on_hopper, with_heads
from tests.mosaic_gpu.test_backward import divided_case
from tests.mosaic_gpu.test_functions import global_keys
from tests.tiers import deep, deeply

FREE = Config(deterministic=False)
CASES = ["causal", "segments_causal_gqa", "window_offset"]
H100 = tables.DEFAULT_GPUS["mosaic_gpu"]


@pytest.mark.skipif(
    ON_GPU or not mosaic_interpreter.IS_SUPPORTED, reason="no interpreter for them"
)
@pytest.mark.parametrize("head", [64, *deeply(128, 160)])
@pytest.mark.parametrize("name", [CASES[1], *deeply(CASES[0], CASES[2])])
def test_error_rule(name, head, monkeypatch, any_size, record_property):
    from tests.mosaic_gpu.test_interpreted import check as check_interpreted

    mosaic_interpreter.install(monkeypatch)
    case = with_heads(dataclasses.replace(by_name(name), t=330, s=330), head)
    assert "query" in check_interpreted(case, record_property, config=FREE)


@deep
@on_hopper
@pytest.mark.parametrize("head", [64, 128, 160])
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_error_rule_on_hopper(
    name, divided, head, multiprocessors, any_size, record_property
):
    """Divided dk and dv leave in float32 from where dq was on its way."""
    if divided:
        multiprocessors(4000)
        case = divided_case(name, head, {})
    else:
        case = with_heads(by_name(name), head).full()
    check(case, "bfloat16", record_property, config=FREE)


@deep
@on_hopper
@pytest.mark.parametrize("head", [64, 128])
def test_repeats_on_hopper(head):
    """100 times, of programs that share global keys: all near those in order."""
    shape = 2, 4096, 16, head
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]

    def gradients(config):
        @jax.jit
        def run(q, k, v, do):
            call = functools.partial(attention, mask_mod=global_keys, config=config)
            found = jax.vjp(functools.partial(call, **MOSAIC), q, k, v)[1](do)
            return [x.astype(jnp.float32) for x in found]

        return run

    expected, free = gradients(None)(*arrays), gradients(FREE)
    largest = max(float(jnp.max(jnp.abs(x))) for x in expected)
    for _ in range(100):
        pairs = zip(free(*arrays), expected, strict=True)
        worst = max(float(jnp.max(jnp.abs(x - y))) for x, y in pairs)
        assert worst <= 2.0**-7 * largest


def _gradient(config, q):
    def loss(q):
        out = attention(q, q, q, is_causal=True, config=config, **MOSAIC)
        return jnp.sum(out, dtype=jnp.float32)

    return jax.grad(loss)(q)


def test_what_is_lowered():
    """By default there is an order; without one dq is the sum of one array."""
    for heads in 2, 64:
        q = jax.ShapeDtypeStruct((1, 4096, heads, 64), jnp.bfloat16)
        ordered, same, free = (
            lower_for_gpu(functools.partial(_gradient, config), q, device=H100)
            for config in (None, Config(deterministic=True), FREE)
        )
        kernels, equal, others = map(mosaic_modules, (ordered, same, free))
        assert kernels == equal != others
        several = re.compile(rf"-> \(tensor<[24]x1x4096x{heads}x64xf32>")  # dq
        assert bool(several.search(ordered)) == (heads == 2)
        assert not several.search(free)


@pytest.mark.parametrize(("before", "done"), [(0, 0), (1, 1), (7, 1)])
def test_what_is_waited_for(before, done):
    turn = Turn(head=0, block=0, accumulator=0, before=before)
    assert turn.waits_for(in_order=True) == before
    assert turn.waits_for(in_order=False) == done


def test_explained():
    shape = jax.ShapeDtypeStruct((2, 8192, 16, 64), jnp.bfloat16)
    with on_gpu(H100):
        texts = [explain(shape, shape, shape, config=x) for x in (None, FREE)]
    words = "dq: blocks of keys add to it in any order"
    assert [words in text for text in texts] == [False, True]


def test_it_chooses_no_other_backend():
    """Wide heads go to xla, unless blocks are given."""
    wide = jax.ShapeDtypeStruct((2, 2048, 4, 512), jnp.bfloat16)
    with on_gpu(H100):
        found = [explain(wide, wide, wide, config=x) for x in (None, FREE)]
    assert [x.splitlines()[0] for x in found] == ["implementation: xla"] * 2


def test_others_have_one_order_anyway():
    q = jax.random.normal(jax.random.key(0), (2, 70, 4, 32))
    for name in ("xla", "triton"):
        own = {"interpret": name == "triton"}
        run = functools.partial(attention, is_causal=True, implementation=name)
        found = [
            jax.vjp(functools.partial(run, config=x), q, q, q)[1](q)
            for x in (Config(**own), Config(deterministic=False, **own))
        ]
        jax.tree.map(np.testing.assert_array_equal, *found)


def test_it_is_a_bool():
    with pytest.raises(TypeError, match="deterministic must be a bool, got 0"):
        Config(deterministic=0)  # type: ignore[arg-type]
