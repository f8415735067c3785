"""Random search over shapes and combinations of arguments, by the one error rule."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, note
from hypothesis import strategies as st

from tests import tolerances
from tests.cases import BACKENDS, FEATURES, ON_GPU, SHAPES, Case, pairwise

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@st.composite
def problems(draw):
    """A case of random shapes and arguments, a dtype and a seed."""
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
    on = {
        name: draw(st.booleans())
        for name in (
            *("causal", "window", "lengths", "segments", "mask", "offset"),
            *("bias", "soft_cap", "alibi", "sinks", "dropout"),
        )
    }
    seed = draw(st.integers(0, 2**31))

    def arguments(rng, case: Case) -> dict:
        made = {"is_causal": on["causal"], "scale": float(rng.normal() * 0.3)}
        if on["window"]:
            sides = [None if x < 0 else x for x in rng.integers(-9, 40, 2).tolist()]
            made["local_window_size"] = tuple(sides)
        if on["lengths"]:
            for name, size in (("query", case.t), ("key_value", case.s)):
                lengths = rng.integers(0, size + 1, case.batch)
                made[f"{name}_seq_lengths"] = np.asarray(lengths, np.int32)
        if on["segments"]:
            for name, size in (("query", case.t), ("key_value", case.s)):
                ids = rng.integers(0, 3, (*case.batch, size))
                ids = ids if rng.random() < 0.5 else np.sort(ids, axis=-1)
                made[f"{name}_segment_ids"] = ids.astype(np.int32)
        if on["mask"]:
            full = (*case.batch, case.n, case.t, case.s)
            shape = [size if rng.random() < 0.7 else 1 for size in full]
            made["mask"] = rng.random(shape) < 0.7
        if on["offset"]:
            offset = rng.integers(-30, 30, case.batch if rng.random() < 0.5 else ())
            made["query_offset"] = np.asarray(offset, np.int32)
        if on["bias"]:
            full = (*case.batch, case.n, case.t, case.s)
            shape = [size if rng.random() < 0.6 else 1 for size in full]
            shape = shape[rng.integers(0, len(shape)) :]
            made["bias"] = np.float32(rng.standard_normal(shape))
        if on["soft_cap"]:
            made["logits_soft_cap"] = float(rng.uniform(0.5, 20.0))
        if on["alibi"]:
            shape = (case.n,) if rng.random() < 0.5 else (*case.batch, case.n)
            made["alibi_slopes"] = np.float32(0.2 * rng.random(shape))
        if on["sinks"]:
            made["sinks"] = np.float32(rng.standard_normal(case.n))
        if on["dropout"]:
            made["dropout_rate"] = float(rng.uniform(0.05, 0.8))
            made["dropout_rng"] = jax.random.key(int(rng.integers(2**31)))
            made["broadcast_dropout"] = bool(rng.random() < 0.3)
        return made

    return Case("random", arguments, **shapes), draw(st.sampled_from(DTYPES)), seed


def test_random_problems():
    """`pytest -s` prints how many problems there were, and the worst ratio.

    On a GPU only the kernels: the xla backend is the same program as on a CPU.
    """
    backends = ["triton"] if ON_GPU else list(BACKENDS)
    worst = []

    @given(problems())
    def search(problem):
        case, dtype, seed = problem
        arrays, arguments = case.inputs(dtype, seed)
        cotangents = tolerances.cotangents_for(case, dtype, seed + 1)
        exact = tolerances.exact(arrays, cotangents, arguments)
        plain = tolerances.plain(arrays, cotangents, arguments)
        for backend in backends:
            note(f"{backend}: {arguments}")
            options = {**arguments, **BACKENDS[backend]}
            actual = tolerances.evaluate(arrays, cotangents, options)
            unit = tolerances.unit_roundoff(dtype)
            found = tolerances.check(actual, exact, plain, unit)
            worst.append(max(found.values(), default=0.0))

    search()
    problem_count = len(worst) // len(backends)
    print(f"{problem_count} problems, worst error {max(worst):.3f} of the allowed")
    jax.clear_caches()


def test_pairwise_cases_cover_every_pair():
    cases: list[set[str]] = [set()]  # the case "plain"
    names = {**FEATURES, **SHAPES}
    for case in pairwise():
        made = case.inputs(jnp.float32)[1]
        has = {
            name
            for name, function in FEATURES.items()
            if function(np.random.default_rng(0), case).keys() <= made.keys()
        }
        for name, shape in SHAPES.items():
            if all(getattr(case, field) == x for field, x in shape.items()):
                has.add(name)
        cases.append(has)
    for a, b in itertools.combinations(names, 2):
        met = {(a in has, b in has) for has in cases}
        assert met == {(x, y) for x in (False, True) for y in (False, True)}, (a, b)
