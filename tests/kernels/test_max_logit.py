"""The largest score of each row (`return_max_logit`) where other tests do not ask.

They do in rows whose later scores are far from the first ones (`test_accumulate`), in
parts of keys (`test_division`), on several devices, and under transformations.
"""

import dataclasses

import pytest

from tests.cases import by_name
from tests.kernels.runners import ALIKE, RUNNERS, WITH_GRADIENTS

# Of several blocks of keys in each kernel: most of the largest scores are in those that
# have no running maximum.
LONG = dataclasses.replace(by_name("plain"), batch=(1,), t=70, s=400, n=2, k=1)
_KERNELS = [name for name in WITH_GRADIENTS if name.startswith("mosaic_gpu")]


def _params():
    for name in (*ALIKE, *_KERNELS):
        yield RUNNERS[name].param(LONG, id=f"long-{name}", deep_too=name in ALIKE)
    for name, case in (
        ("proof", by_name("everything")),
        *((x, by_name("mask_full")) for x in _KERNELS),
    ):
        yield RUNNERS[name].param(case, id=f"{case.name}-{name}", deep_too=True)


@pytest.mark.parametrize(("case", "runner"), list(_params()), indirect=["runner"])
def test_error_rule(case, runner, record_property):
    case = case if case is LONG else runner.shaped(case)
    more = {"return_max_logit": True}
    runner.check(case, runner.dtypes[0], record_property, **more)
