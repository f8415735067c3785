"""What the tests of the Mosaic GPU backend share."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, attention
from pallas_kernels import device
from pallas_kernels.mosaic_gpu import measured
from tests import tolerances
from tests.cases import CASES, ON_GPU, Case, by_name
from tests.functions import is_data
from tests.lowering import lower_for_gpu

MOSAIC = {"implementation": "mosaic_gpu"}

SERVED = [case for case in CASES if max(case.h, case.d) <= 256]

# All that the backend serves, together.
EVERYTHING = dataclasses.replace(
    by_name("plain"),
    name="everything_served",
    arguments=lambda rng, case: {
        **by_name("segments").arguments(rng, case),
        **by_name("alibi_batch").arguments(rng, case),
        **by_name("lengths").arguments(rng, case),
        **by_name("mask_full").arguments(rng, case),
        **by_name("bias_shared").arguments(rng, case),
        **by_name("dropout").arguments(rng, case),
        "sinks": np.float32(rng.standard_normal(case.n)),
        "logits_soft_cap": 4.0,
        "local_window_size": (25, None),
    },
    n=4,
    d=24,
)

SERVED.append(EVERYTHING)

on_hopper = pytest.mark.skipif(
    not (ON_GPU and device.capability() == 90), reason="runs on Hopper GPUs"
)

# On Hopper the tests of the error rule compile what these lower.
off_hopper = pytest.mark.skipif(
    ON_GPU and device.capability() == 90, reason="compiled by the other tests"
)


def lowered(case: Case, dtype, **more) -> str:
    """The module of a call's forward pass for a Hopper GPU, and of all gradients."""
    arrays, arguments = case.full().inputs(dtype)
    data = {n: x for n, x in arguments.items() if is_data(x)}
    static = {n: x for n, x in arguments.items() if n not in data}

    def run(arrays, data):
        def call(arrays, data):
            return attention(*arrays, **static, **data, **MOSAIC, **more)

        out, vjp = jax.vjp(call, arrays, data)
        return out, vjp(out)

    return lower_for_gpu(run, arrays, data)


def with_numbers(monkeypatch, **numbers) -> None:
    """Changes numbers of the backend's table (`measured.Numbers`)."""
    table = measured.here()
    changed = dataclasses.replace(table.numbers, **numbers)
    table = dataclasses.replace(table, numbers=changed)
    monkeypatch.setattr(measured, "here", lambda: table)


def with_any_size(monkeypatch) -> None:
    """Calls for which the backward is not fast go to it, too, and share blocks."""
    numbers = {"fewest_tiles": 0, "rows_of_a_part": 1}
    with_numbers(monkeypatch, widths_that_keep_no_scores=(), **numbers)


def with_heads(case: Case, size: int) -> Case:
    return dataclasses.replace(case, h=size, d=size)


BLOCKS = {
    "one_warpgroup": Blocks(64, 64, num_warps=4, num_stages=1),
    "three_warpgroups": Blocks(192, 128, num_warps=12, num_stages=3),
    "few_keys": Blocks(128, 64, num_warps=8, num_stages=4),
}


def check(case: Case, dtype, record_property, arrays=None, **more):
    made, arguments = case.inputs(dtype)
    arrays = made if arrays is None else arrays
    cotangents = tolerances.cotangents_for(case, dtype)
    exact = tolerances.exact(arrays, cotangents, arguments)
    plain = tolerances.plain(arrays, cotangents, arguments)
    actual = tolerances.evaluate(arrays, cotangents, {**arguments, **MOSAIC, **more})
    found = tolerances.check(actual, exact, plain, tolerances.unit_roundoff(dtype))
    worst = float(max(found.values(), default=0.0))
    record_property("share of the allowed error", worst)


def assert_same_bits(run: Callable, arrays: Sequence, times: int):
    """A compiled call gives the bits of its first results, and no NaN, so many times.

    They are compared where they are: to copy them takes longer than the call.
    """

    @jax.jit
    def count(first, found):
        pairs = zip(*map(jax.tree.leaves, (first, found)), strict=True)
        return sum(jnp.sum(a != b) for a, b in pairs)

    first = run(*arrays)
    differ = [count(first, run(*arrays)) for _ in range(times)]
    assert not np.any(jax.device_get(differ))


def in_both_dtypes(cases: Sequence[Case]) -> list:
    """(case, dtype): all in bfloat16, and every fourth in float16.

    Each takes some ten seconds of a core beside a GPU, most of it to compile.
    """
    pairs = [(case, "bfloat16") for case in cases]
    pairs += [(case, "float16") for case in cases[::4]]
    return [pytest.param(*pair, id="-".join((pair[0].name, pair[1]))) for pair in pairs]
