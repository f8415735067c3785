"""Random search over shapes and combinations of arguments, by the one error rule."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, note
from hypothesis import strategies as st

from jax_flash2 import Config, Context
from jax_flash2._rows import METHODS
from pallas_kernels import device
from tests import tolerances
from tests.cases import FEATURES, FUNCTIONS, ON_GPU, PAIRWISE, SHAPES, WITH_BLOCKS, Case
from tests.divided import Divided, check_in_float64
from tests.mosaic import MOSAIC
from tests.tiers import deep

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
ARGUMENTS = FEATURES | FUNCTIONS


@st.composite
def problems(draw):
    """A case of random shapes and arguments, a dtype, a division, a seed, a choice."""
    k = draw(st.sampled_from([1, 2]))
    size = st.integers(1, 400 if ON_GPU else 45)
    t = draw(size)
    heads = st.sampled_from([1, 8, 16, 24, 33] + [64, 96, 128, 200] * ON_GPU)
    h = draw(heads)
    shapes = {
        "batch": draw(st.sampled_from([(), (2,), (3,), (1, 2)])),
        "t": t,
        "s": draw(st.just(t) | size),
        "n": k * draw(st.sampled_from([1, 2, 3])),
        "k": k,
        "h": h,
        "d": draw(st.just(h) | heads),
    }
    on = [name for name in ARGUMENTS if draw(st.booleans())]
    seed = draw(st.integers(0, 2**31))

    def arguments(rng, case: Case) -> dict:
        made = {"scale": float(rng.normal() * 0.3)}
        for name in on:
            if name in FUNCTIONS and 0 in (case.t, case.s):
                continue  # JAX reads nothing of an empty array
            made |= ARGUMENTS[name].random(rng, case)
        return made

    case = Case("random", arguments, **shapes)
    splits = draw(st.none() | st.integers(1, -(-case.s // 16)))
    return case, draw(st.sampled_from(DTYPES)), splits, seed, draw(st.booleans())


def _declined(error: ValueError) -> bool:
    return str(error).startswith("implementation='mosaic_gpu': ")


@deep
def test_random_problems(any_size, monkeypatch):
    """`pytest -s` prints how many problems there were, and the worst ratio.

    On a GPU only the kernels: the xla backend is the same program as on a CPU. There,
    programs of half of the problems have many tiles.
    """
    backends = ["triton"] if ON_GPU else list(WITH_BLOCKS)
    if ON_GPU and device.capability() == 90:
        backends.append("mosaic_gpu")
    multiprocessors = device.multiprocessors()
    problem_count, worst = 0, collections.defaultdict(list)

    @given(problems())
    def search(problem):
        nonlocal problem_count
        problem_count += 1
        case, dtype, splits, seed, few = problem
        count = 3 if ON_GPU and few else multiprocessors
        monkeypatch.setattr(device, "multiprocessors", lambda: count)
        arrays, arguments = case.inputs(dtype, seed)
        cotangents = tolerances.cotangents_for(case, dtype, seed + 1)
        exact = tolerances.exact(arrays, cotangents, arguments)
        plain = tolerances.plain(arrays, cotangents, arguments)
        for backend in backends:
            note(f"{backend}: {arguments}")
            options = {**arguments, **WITH_BLOCKS.get(backend, MOSAIC)}
            if backend in WITH_BLOCKS:
                config = options.get("config", Config())
                options["config"] = dataclasses.replace(config, splits=splits)
            try:
                actual = tolerances.evaluate(arrays, cotangents, options)
            except ValueError as error:
                if backend in WITH_BLOCKS or not _declined(error):
                    raise
                continue  # a dtype or a head size that it does not serve
            unit = tolerances.unit_roundoff(dtype)
            found = tolerances.check(actual, exact, plain, unit)
            worst[backend].append(max(found.values(), default=0.0))

    search()
    for backend in backends:
        found = worst[backend]
        print(
            f"{backend}: {len(found)} of {problem_count} problems, worst error "
            f"{max(found, default=0.0):.3f} of the allowed"
        )
    jax.clear_caches()


@st.composite
def divided_problems(draw):
    """A case whose rows lie on devices, the devices, how the rows lie, and a seed."""
    problem, _, _, seed, _ = draw(problems())
    parts = draw(st.integers(1, min(8, jax.device_count())))
    run = draw(st.integers(1, 4)) * draw(st.sampled_from([1, 3, 16]))
    if "dropout_rng" in problem.inputs(jnp.float32)[1]:
        run = -(-run // 16) * 16
    counts = [draw(st.integers(0, 2)) for _ in range(2)]
    counts = draw(st.just([counts[0]] * 2) | st.just(counts))
    t, s = (parts * run * count for count in counts)
    more_heads = draw(st.sampled_from([1, parts]))
    case = dataclasses.replace(
        problem, t=t, s=s, n=problem.n * more_heads, k=problem.k * more_heads
    )
    method = draw(st.none() | st.sampled_from(METHODS))
    return case, parts, draw(st.sampled_from([None, run])), method, seed


@deep
def test_random_divided_problems():
    """One result for any number of devices; a method may decline, with a reason."""
    served: list[str | None] = []

    @given(divided_problems())
    def search(problem):
        case, parts, stripe, method, seed = problem
        try:
            call = Divided(Context("x", stripe, method), (parts,))
            check_in_float64(call, case, seed)
        except ValueError as error:
            assert method is not None
            assert "cannot serve this call" in str(error)
            return
        served.append(method)

    search()
    print(f"{len(served)} problems, by {collections.Counter(served)}")
    jax.clear_caches()


def test_pairwise_cases_cover_every_pair():
    cases: list[set[str]] = [set()]  # the case "plain"
    names = {**ARGUMENTS, **SHAPES}
    for case in PAIRWISE:
        made = case.inputs(jnp.float32)[1]
        has = {
            name
            for name, feature in ARGUMENTS.items()
            if feature.typical(np.random.default_rng(0), case).keys() <= made.keys()
        }
        for name, shape in SHAPES.items():
            if all(getattr(case, field) == x for field, x in shape.items()):
                has.add(name)
        cases.append(has)
    for a, b in itertools.combinations(names, 2):
        met = {(a in has, b in has) for has in cases}
        assert met == {(x, y) for x in (False, True) for y in (False, True)}, (a, b)
