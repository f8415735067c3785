"""The Mosaic GPU kernels in a ring: parts of the keys, numbers of rows, float32."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import Blocks, Config, Context, explain
from tests import tolerances
from tests.cases import Case, by_name
from tests.divided import Divided, without_pairs
from tests.lowering import lower_for_gpu
from tests.mosaic import EVERYTHING, MOSAIC, on_hopper, with_heads
from tests.tiers import deeply

ROWS, STRIPE = 512, 128  # of a device


def _of_devices(case: Case, parts: int, head: int | None = None) -> Case:
    case = case if head is None else with_heads(case, head)
    arguments = without_pairs(case.arguments)
    rows = parts * ROWS
    return dataclasses.replace(case, t=rows, s=rows, arguments=arguments)


def _call(layout: int | None, parts: int) -> Divided:
    return Divided(Context("x", layout, "ring"), (parts,), mapped=True)


VARIANTS = [
    *itertools.product(["causal"], [64, 128], [STRIPE, None], [2]),
    *itertools.product(["plain", "segments", "lengths"], [128], [STRIPE], [3]),
    *itertools.product(["short_window"], [64, 128], [STRIPE, None], [3]),
    ("head_192_128", None, 2 * STRIPE, 2),  # of several blocks
    ("everything_served", None, STRIPE, 3),
    ("everything_served", None, None, 2),
]


def _named(name: str) -> Case:
    if name == EVERYTHING.name:
        return EVERYTHING
    if name == "short_window":
        window = {"is_causal": True, "local_window_size": (100, None)}
        return dataclasses.replace(
            by_name("causal"), arguments=lambda rng, case: window
        )
    return by_name(name)


@pytest.mark.parametrize(
    ("name", "head", "layout", "parts"), [VARIANTS[0], *deeply(*VARIANTS[1::2])]
)
def test_lowers(name, head, layout, parts, any_size):
    case = _of_devices(_named(name), parts, head)
    arrays, arguments = case.inputs(jnp.bfloat16)

    def run(*arrays):
        def call(*arrays):
            return _call(layout, parts)(*arrays, **arguments, **MOSAIC)

        out, pull = jax.vjp(call, *arrays)
        return out, pull(out)

    text = lower_for_gpu(run, *arrays)
    assert text.count("custom_call @mosaic_gpu") >= parts


@on_hopper
@pytest.mark.parametrize(
    ("name", "head", "layout", "parts"), [*VARIANTS[:3], *deeply(*VARIANTS[3:])]
)
def test_error_rule(name, head, layout, parts, any_size, record_property):
    case = _of_devices(_named(name), parts, head)
    arrays, arguments = case.inputs("bfloat16")
    cotangents = tolerances.cotangents_for(case, "bfloat16")
    exact = tolerances.exact(arrays, cotangents, arguments)
    plain = tolerances.plain(arrays, cotangents, arguments)
    options = {**arguments, **MOSAIC}
    call = _call(layout, parts)
    actual = tolerances.evaluate(arrays, cotangents, options, call)
    found = tolerances.check(actual, exact, plain, tolerances.unit_roundoff("bfloat16"))
    worst = float(max(found.values(), default=0.0))
    record_property("share of the allowed error", worst)


@pytest.mark.parametrize(
    ("stripe", "head", "config", "words"),
    [
        (32, 128, None, "several stripes of 32 rows"),
        (128, 128, Config(forward=Blocks(128, 256, 8, 2)), "several stripes of 128"),
        (256, 256, None, "KiB of shared memory"),
    ],
)
def test_what_is_declined(stripe, head, config, words):
    x = jax.ShapeDtypeStruct((2, 1, 256, 2, head), jnp.bfloat16)
    texts = []

    def ask(x):
        def on_each(x):
            context = Context("x", stripe, "ring")
            options = {"is_causal": True, "context": context, "config": config}
            texts.append(explain(x, x, x, **options))
            return x

        return jax.vmap(on_each, axis_name="x")(x)

    lower_for_gpu(ask, x)
    assert words in texts[0]
