"""Keys in pages, copied into rows for the kernels of Hopper."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import paged_attention
from pallas_kernels import device
from pallas_kernels.backend import Call, Declined
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import Lengths
from pallas_kernels.core.pages import Pages
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.mosaic_gpu import hopper
from pallas_kernels.mosaic_gpu.hopper import paged
from tests.cases import ON_GPU
from tests.lowering import described_as_here, kernel_modules, lower_for_gpu
from tests.paged import Problem
from tests.tiers import deep

B, PAGE, PAGES, HEADS, H = 2, 16, 40, 2, 64
TABLE = np.random.default_rng(0).integers(-3, PAGES + 3, (B, 20))
LENGTHS = np.array([300, 37])


def structs(t: int, room: int, heads: int = 8) -> tuple:
    """Of queries, pools, a table and lengths of two sequences."""
    of = jax.ShapeDtypeStruct
    pool = of((999, 64, 2, H), jnp.bfloat16)
    table, lengths = of((2, room // 64), jnp.int32), of((2,), jnp.int32)
    return of((2, t, heads, H), jnp.bfloat16), pool, pool, table, lengths


def call(t: int, dtype="bfloat16") -> Call:
    """One of t queries; what no query looks at is NaN."""
    rng = np.random.default_rng(1)
    pool = rng.standard_normal((2, PAGES, PAGE, HEADS, H)).astype(np.float32)
    needed = np.zeros((PAGES, PAGE), bool)
    for pages, length in zip(TABLE.clip(0, PAGES - 1), LENGTHS, strict=True):
        s = np.arange(length)
        needed[pages[s // PAGE], s % PAGE] = True
    pool[:, ~needed] = np.nan
    k, v = (Named(jnp.asarray(x, dtype), ("p", "r", "k", "h")) for x in pool)
    q = rng.standard_normal((B, t, 4, H)).astype(np.float32)
    masks = (Lengths(key_value=Named(jnp.asarray(LENGTHS, jnp.int32), ("b0",))),)
    table = Named(jnp.asarray(TABLE, jnp.int32), ("b0", "c"))
    spec = AttentionSpec(Score(H**-0.5), masks, pages=Pages(table, PAGES, PAGE))
    values = Named(v.value, ("p", "r", "k", "d"))
    return Call(Named(jnp.asarray(q, dtype), ("b0", "t", "n", "h")), k, values, spec)


def test_rows_are_those_of_the_table_and_others_are_0():
    given = call(128)
    found = paged.in_order(given)
    assert found.spec.pages is None and found.spec.masks == given.spec.masks
    rows = TABLE.clip(0, PAGES - 1)[:, :, None], np.arange(PAGE)
    for x, pool in ((found.key, given.key), (found.value, given.value)):
        wanted = np.asarray(pool.value, np.float32)[rows].reshape(B, -1, HEADS, H)
        wanted[np.arange(wanted.shape[1]) >= LENGTHS[:, None]] = 0
        got = np.asarray(x.to(("b0", "s", "k", x.axes[-1])), np.float32)
        np.testing.assert_array_equal(got, wanted)
        assert x.dtype == pool.dtype


def test_structs_are_those_of_the_rows():
    given = call(128)
    found, wanted = paged.structs_in_order(given.structs), paged.in_order(given)
    assert found.static == wanted.structs.static


def test_a_plan_is_that_of_rows_in_order():
    with described_as_here(90):
        own = hopper.plan(call(256).structs, "forward")
        rows = hopper.plan(paged.in_order(call(256)).structs, "forward")
        wide = hopper.plan(call(256, "float32").structs, "forward")
    assert own.launch == rows.launch and "512 query rows are few" in own.slower
    assert isinstance(wide, Declined)


@pytest.mark.parametrize(
    ("name", "t", "room", "is_copied"),
    [
        pytest.param("mosaic_gpu", 256, 256, True, marks=deep),
        (None, 2048, 4096, True),
        (None, 2048, 4160, False),  # room for more than two keys a query
        (None, 1920, 2048, False),  # fewer than 8,192 query rows of a head of keys
        ("triton", 2048, 2048, False),
    ],
    ids=["named", "default", "much room", "few queries", "Triton named"],
)
def test_long_prompts_are_copied_into_rows(name, t, room, is_copied):
    def run(*arrays):
        return paged_attention(*arrays, implementation=name)

    with described_as_here(90) as gpu:
        text = lower_for_gpu(run, *structs(t, room), device=gpu)
    assert text.count("@mosaic_gpu_v2(") == is_copied
    assert bool(kernel_modules(text)) == (not is_copied)


def _prompts():
    """Of 256 queries, after keys that were there and without any."""
    sizes = {"t": 256, "n": 4, "k": 2, "h": 64, "d": 64, "dtype": jnp.bfloat16}
    more = {"window": ("local_window_size", (100, 0)), "cap": ("logits_soft_cap", 5.0)}
    for page, (name, *own) in itertools.product((16, 64), (("causal",), *more.items())):
        name = f"{name}_{page}"
        sizes |= {"page": page, "c": 320 // page}
        yield Problem(name, (300, 256), **sizes, more=tuple(own))


def _marked(problem: Problem):
    """In the first tier each size of pages meets another mask."""
    marks = [] if problem.name in ("cap_16", "window_64") else deep
    return pytest.param(problem, id=problem.name, marks=marks)


@pytest.mark.parametrize("problem", [*map(_marked, _prompts())])
def test_prompts(problem):
    """By Hopper's kernels where they run, and else by xla."""
    made, is_hopper = problem.made(), ON_GPU and device.capability() == 90
    name = "mosaic_gpu" if is_hopper else "xla"
    data = {n: x for n, x in made.arguments.items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in made.arguments.items() if n not in data}
    options = {"implementation": name, "return_residual": True, **static}
    made.check(*jax.jit(lambda data: paged_attention(**data, **options))(data))
