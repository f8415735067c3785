"""Rows divided over devices: every feature, method and layout means what it does."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import Context
from tests import tolerances
from tests.cases import BACKENDS, FEATURES, ON_GPU, PAIRWISE, Case, by_name
from tests.divided import Divided, check_in_float64, without_pairs
from tests.tiers import deep, deeply

# Compiled kernels have larger blocks.
SCALE = 8 if ON_GPU else 1
STRIPE = 32 * SCALE
# Devices, and the rows of each: some have rows that no key of a length is left for.
PARTS = {1: 64 * SCALE, 2: 96 * SCALE, 3: 64 * SCALE, 8: 64 * SCALE}
METHODS = ("ring", "gather", "heads", "halo")
LAYOUTS = (None, STRIPE)


def sized(case: Case, parts: int, method: str) -> Case:
    """The case with whole stripes on each device, and heads that devices divide."""
    # Divided heads are as many as devices: a stripe of each is enough.
    rows = STRIPE if method == "heads" and parts == 8 else PARTS[parts]
    keys = rows if case.t == case.s or method == "halo" else rows + STRIPE
    case = dataclasses.replace(case, t=parts * rows, s=parts * keys)
    if method == "heads":
        case = dataclasses.replace(case, n=case.n * parts, k=case.k * parts)
    if method in ("ring", "halo"):
        case = dataclasses.replace(case, arguments=without_pairs(case.arguments))
    return case


def serves(case: Case, method: str, layout: int | None) -> bool:
    """Whether the method is for such a call."""
    if method != "halo":
        return True
    _, arguments = case.inputs(jnp.float32)
    window, offset = (
        arguments.get(name) for name in ("local_window_size", "query_offset")
    )
    if window is None or offset is not None:
        return False
    before, after = window
    causal = arguments.get("is_causal", False)
    fits = before is not None and (causal or after is not None)
    return fits and (layout is None or (causal and before <= STRIPE))


def alone() -> list[Case]:
    """Each feature by itself, with what it needs to be asked for."""
    cases = [Case(name, feature.typical, n=4) for name, feature in FEATURES.items()]
    return [
        *cases,
        *map(by_name, ("causal_more_queries", "bias_keys", "mask_keys", "alibi_batch")),
        *map(by_name, ("bias_rows", "mask_rows_heads", "lengths_causal", "scale_data")),
        by_name("sinks_empty_rows"),
        *(
            Case(f"short_window_{n}", lambda rng, case: SHORT_WINDOW, n=n)
            for n in (2, 4)
        ),
        Case("short_window_segments", _short_window_and_segments, n=4),
    ]


SHORT_WINDOW = {"is_causal": True, "local_window_size": (13, None)}


def _short_window_and_segments(rng, case: Case) -> dict:
    parts = ("segments", "alibi", "sinks", "dropout", "lengths")
    made = [FEATURES[name].typical(rng, case) for name in parts]
    return {**SHORT_WINDOW, **{k: x for part in made for k, x in part.items()}}


def combinations() -> list:
    """Cases with methods that serve them, on one number of devices: all of them in
    turns. Layouts and methods take turns, too; of two cases each is tried. Those of
    one case are in the first tier.
    """
    found = []
    whole = {"pairwise_1", "short_window_segments"}
    for turn, case in enumerate([*alone(), *PAIRWISE]):
        for number, method in enumerate(METHODS):
            meet = case in PAIRWISE
            turns = LAYOUTS[(turn + number // 2) % 2 :][:1]
            for layout in LAYOUTS if case.name in whole else turns:
                if not serves(case, method, layout):
                    continue
                by_itself = not meet and case.name not in whole
                if by_itself and method != "ring" and (turn // 2 + number) % 2:
                    continue  # one feature: the ring, and one other method
                # Neither the method nor the layout alone decides it.
                place = turn + number + 2 * (layout is None)
                parts = list(PARTS)[place % len(PARTS)]
                label = f"{case.name}-{method}-{layout or 'runs'}-{parts}"
                first = case.name == "short_window_segments" and parts in (2, 3)
                marks = () if first else deep
                values = case, method, layout, parts
                found.append(pytest.param(*values, id=label, marks=marks))
    return found


@pytest.mark.parametrize(("case", "method", "layout", "parts"), combinations())
def test_one_result_for_any_number_of_devices(case, method, layout, parts):
    """In float64, output, log-sum-exp and every gradient; so dropout has its bits."""
    case = sized(case, parts, method)
    if parts > jax.device_count():
        pytest.skip(f"{parts} devices")
    check_in_float64(Divided(Context("x", layout, method), (parts,)), case)


def _served(*words: str) -> list[Case]:
    return [x for x in [*alone(), *PAIRWISE] if x.name in words]


KERNELS = [
    *itertools.product(_served("short_window_2"), ["ring"], [STRIPE], [2]),
]
MORE_KERNELS = [
    *itertools.product(_served("pairwise_6"), ["ring"], [None], [3]),
    *itertools.product(
        _served("short_window_segments"), ["halo", "heads"], [None], [2]
    ),
    *itertools.product(_served("short_window_segments"), ["ring"], [STRIPE], [3]),
    *itertools.product(_served("pairwise_0"), ["ring"], [None], [3]),
    *itertools.product(_served("pairwise_5"), ["gather"], [STRIPE], [3]),
]


@pytest.mark.parametrize(
    ("case", "method", "layout", "parts", "dtype"),
    [
        *((*x, "float32") for x in KERNELS),
        *deeply(*((*x, "bfloat16") for x in MORE_KERNELS)),
    ],
)
def test_kernels_keep_the_error_rule(
    case, method, layout, parts, dtype, record_property
):
    if method == "halo" and parts > jax.device_count():
        pytest.skip(f"{parts} devices")
    case = sized(case, parts, method)
    arrays, arguments = case.inputs(dtype)
    cotangents = tolerances.cotangents_for(case, dtype)
    exact = tolerances.exact(arrays, cotangents, arguments)
    plain = tolerances.plain(arrays, cotangents, arguments)
    call = Divided(Context("x", layout, method), (parts,))
    options = {**arguments, **BACKENDS["triton"]}
    actual = tolerances.evaluate(arrays, cotangents, options, call)
    found = tolerances.check(actual, exact, plain, tolerances.unit_roundoff(dtype))
    worst = float(max(found.values(), default=0.0))
    record_property("share of the allowed error", worst)
