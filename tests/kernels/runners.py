"""Every backend as it runs here: the one list of what this folder's tests hold.

A backend enters by one line of `RUNNERS`. Then the covering set of cases keeps the
error rule on it, and nothing that a mask hides comes through.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import _api, _backends
from pallas_kernels import device
from pallas_kernels.backend import Declined
from pallas_kernels.mosaic_gpu import ampere, blackwell
from tests import mosaic_interpreter, tolerances
from tests.cases import CASES, ON_GPU, PAIRWISE, WITH_BLOCKS, Case, by_name
from tests.mosaic import EVERYTHING, MOSAIC, with_any_size, with_heads
from tests.tiers import deep

DTYPES = ("float32", "bfloat16", "float16")
# Beside the pairwise cases, what runs in a few minutes on a CPU; the others are deep.
FIRST = (
    *("plain", "one_query", "head_1_3", "no_batch", "two_batch_axes", "key_lengths"),
    *("bias_keys", "alibi_batch", "scale_data_zero", "window_empty_rows"),
)


def _shaped(case: Case) -> Case:
    return case.full() if ON_GPU else case


@dataclasses.dataclass(frozen=True)
class Runner:
    """How a backend runs here.

    Attributes:
      options: of `attention`, which choose the backend.
      dtypes: those that it serves. On a GPU cases run in all of them.
      other_dtypes: those in which on a GPU only every fourth case runs.
      first: cases of the error rule in the first tier.
      rest: those of the deep tier.
      shaped: a case in the sizes that it runs here, of several blocks.
      prepare: makes the backend run here, until a test ends.
      programs: how many a GPU is said to run at once; None for as many as it does.
      run: as `tolerances.evaluate`; what it lacks is not compared.
      one_of_each: kind of call must do in the first tier, where a call takes seconds
        or another backend shows the same.
      by_threads: seconds more, in JAX's interpreter of warpgroups.
      forward_only: it makes no gradients here.
      declines: a regex of the reasons for which it may decline a case.
      skip: a reason for which it does not run here.
    """

    options: Mapping[str, Any]
    dtypes: tuple[str, ...] = DTYPES
    other_dtypes: tuple[str, ...] = ()
    first: Sequence[Case] = (*PAIRWISE, *map(by_name, FIRST))
    rest: Sequence[Case] = tuple(CASES)
    shaped: Callable[[Case], Case] = _shaped
    prepare: Callable[[pytest.MonkeyPatch], None] = lambda monkeypatch: None
    programs: int | None = None
    run: Callable = tolerances.evaluate
    one_of_each: bool = False
    by_threads: bool = False
    forward_only: bool = False
    declines: str | None = None
    skip: str | None = None

    def param(self, *values, id: str, deep_too: bool = False):
        """A parameter (*values, runner) of a test: `deep_too` puts it in that tier."""
        marks = [pytest.mark.skip(reason=self.skip)] if self.skip else []
        marks += [deep] if deep_too else []
        return pytest.param(*values, self, id=id, marks=marks)

    @contextlib.contextmanager
    def prepared(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
        """Until the end, the backend runs here."""
        if self.programs is not None:
            jax.clear_caches()
            monkeypatch.setattr(device, "multiprocessors", lambda: self.programs)
        self.prepare(monkeypatch)
        yield self
        if self.programs is not None:
            jax.clear_caches()

    def problems(self, case: Case, number: int) -> list[tuple[str, bool]]:
        """(dtype, whether it is deep) of a case of the error rule, the `number`-th."""
        if case not in (*self.first, *self.rest):
            return []
        dtypes = self.dtypes[number % len(self.dtypes) :][:1]
        if ON_GPU:
            dtypes = self.dtypes + (() if number % 4 else self.other_dtypes)
        return [(dtype, case not in self.first) for dtype in dtypes]

    def evaluate(self, arrays, cotangents, arguments, **more):
        """As `tolerances.evaluate`."""
        return self.run(arrays, cotangents, {**arguments, **self.options}, **more)

    def skip_declined(self, arrays, arguments) -> None:
        """Where its own `plan` says so, by a reason that it may have."""
        if self.declines is None:
            return
        call = _api.given(*arrays, **arguments).checked()
        plan = _backends.module(self.options["implementation"]).plan(call, "forward")
        if isinstance(plan, Declined):
            assert re.search(self.declines, plan.reason), plan.reason
            pytest.skip(plan.reason)

    def check(self, case: Case, dtype, record_property, **more) -> dict:
        """The error rule, of a case in the sizes that it has; returns the results."""
        dtype = jnp.dtype(dtype)
        arrays, arguments = case.inputs(dtype)
        arguments |= more
        self.skip_declined(arrays, arguments)
        cotangents = tolerances.cotangents_for(case, dtype)
        actual = self.evaluate(arrays, cotangents, arguments)
        exact, plain = (
            self.comparable(of(arrays, cotangents, arguments), actual)
            for of in (tolerances.exact, tolerances.plain)
        )
        unit = tolerances.unit_roundoff(dtype, more.get("precision"))
        found = tolerances.check(actual, exact, plain, unit)
        worst = float(max(found.values(), default=0.0))
        record_property("share of the allowed error", worst)
        return actual

    def comparable(self, expected, actual) -> dict:
        """Of what is expected, what this backend's own kernels make here."""
        if not self.by_threads:
            return expected
        return {n: x for n, x in expected.items() if n.split(" ")[0] in actual}


def _of_two_blocks(case: Case) -> Case:
    """Of queries and of keys, the second one not whole; heads that gradients need."""
    rows = {"t": 3 * case.t + 20, "s": 3 * case.s + 20}
    return with_heads(dataclasses.replace(case, **rows), 64)


def _of_two_tiles(case: Case) -> Case:
    """The same of more queries: of 256, and others for one warpgroup alone."""
    return with_heads(dataclasses.replace(_of_two_blocks(case), t=6 * case.t + 60), 128)


def _full_with_heads(size: int) -> Callable[[Case], Case]:
    return lambda case: with_heads(case.full(), size)


def _interpret_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for Hopper, gradients too where Triton's are faster."""
    mosaic_interpreter.install(monkeypatch)
    with_any_size(monkeypatch)


def _register_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_backends.BACKENDS, "proof", _backends.Entry("tests.proof"))


ALL = (*CASES, EVERYTHING)
# Of JAX's interpreter each takes ten seconds of a core; GPUs run them all.
_BY_THREADS = ("segments_causal_gqa",)
_BY_THREADS_DEEP = (
    *("window_offset", "dropout_bias", "pairwise_3"),
    *(case.name for case in PAIRWISE[::4]),
    *[case.name for case in ALL if max(case.h, case.d) <= 256][::24],
    *("everything_served", "bias_half", "bias_half_heads"),  # these come by TMA
)
# Of kernels that run only by name: what they take (`mosaic_gpu.by_name`). They decline
# functions that capture arrays of keys or give lists of blocks: none of these has one.
_BY_NAME = (
    *("causal", "window_empty_rows", "causal_offset_batch", "mqa", "lengths"),
    *("alibi_batch", "sinks_empty_rows", "no_batch", "lengths_causal", "window_offset"),
)
RUNNERS = {name: Runner(options) for name, options in WITH_BLOCKS.items()}
if not ON_GPU:
    # Every feature but the offset, which `test_toys` has on each; a dtype each.
    _FEW = PAIRWISE[2::2]
    RUNNERS["triton"] = dataclasses.replace(
        RUNNERS["triton"], first=_FEW, one_of_each=True
    )
    RUNNERS["xla_blocks"] = dataclasses.replace(RUNNERS["xla_blocks"], first=_FEW)
RUNNERS["reference"] = Runner(
    {"implementation": "reference"},
    dtypes=("float32",),
    first=[by_name(x) for x in ("everything_learnt", "scale_data")],
    rest=[by_name("lengths_causal")],
    one_of_each=True,
)
# The one that the tests add.
RUNNERS["proof"] = Runner(
    {"implementation": "proof"},
    dtypes=("float32",),
    first=PAIRWISE[:1],
    rest=(*PAIRWISE[2::2], by_name("everything"), by_name("everything_learnt")),
    shaped=lambda case: case,
    prepare=_register_proof,
    one_of_each=True,
)
# Where a test has these beside "xla", which shows as much, they are deep.
ALIKE = ("reference", "proof")
if not ON_GPU:
    RUNNERS["mosaic_gpu"] = Runner(
        {},
        dtypes=("bfloat16",),
        first=[case for case in ALL if case.name in _BY_THREADS],
        rest=[case for case in ALL if case.name in _BY_THREADS_DEEP],
        shaped=_of_two_blocks,
        prepare=_interpret_both_passes,
        run=mosaic_interpreter.evaluate,
        one_of_each=True,
        by_threads=True,
        skip=None if mosaic_interpreter.IS_SUPPORTED else "JAX cannot interpret it",
    )

    def _by_name(architecture: str, capability: int, **more) -> Runner:
        """On a GPU that is said to be of this capability; cases of `rest` in turns."""
        install = functools.partial(mosaic_interpreter.install, capability=capability)
        return dataclasses.replace(
            RUNNERS["mosaic_gpu"],
            options={"implementation": f"mosaic_gpu_{architecture}"},
            dtypes=("bfloat16", "float16"),
            prepare=install,
            forward_only=True,
            **more,
        )

    _FIRST_BY_NAME = [by_name("lengths_causal")]
    _OTHERS = [case for case in ALL if case.name in _BY_NAME]
    RUNNERS["mosaic_gpu_ampere"] = _by_name(
        "ampere", 80, first=_FIRST_BY_NAME, rest=_OTHERS[::2]
    )
    RUNNERS["mosaic_gpu_ampere_tma"] = dataclasses.replace(
        _by_name("ampere", 120, first=(), rest=[by_name("window_offset")]),
        shaped=_of_two_tiles,
    )
    RUNNERS["mosaic_gpu_blackwell"] = _by_name(
        "blackwell",
        100,
        first=_FIRST_BY_NAME,
        rest=_OTHERS[1::2],
        shaped=_of_two_tiles,
    )
elif device.capability() == 90:
    _HOPPER = Runner(
        MOSAIC,
        dtypes=("bfloat16",),
        other_dtypes=("float16",),
        first=ALL,
        rest=(),
        declines="head size .* above 256",
    )
    # Those whose gradients it makes itself, whatever is faster.
    _OF_GRADIENTS = dataclasses.replace(
        _HOPPER,
        first=[case for case in ALL if case.h == case.d == 16],
        prepare=with_any_size,
    )
    RUNNERS["mosaic_gpu"] = _HOPPER
    RUNNERS |= {
        f"mosaic_gpu_{head}": dataclasses.replace(
            _OF_GRADIENTS,
            shaped=_full_with_heads(head),
            **({"first": ()} if head == 256 else {}),
        )
        for head in (64, 128, 256)
    }
    RUNNERS["mosaic_gpu_few_programs"] = dataclasses.replace(
        _OF_GRADIENTS,
        dtypes=("float16",),
        first=(),
        shaped=_full_with_heads(64),
        programs=3,
    )
elif device.capability() in {*ampere.CAPABILITIES, *blackwell.CAPABILITIES}:
    _is_ampere = device.capability() in ampere.CAPABILITIES
    _ARCHITECTURE = "ampere" if _is_ampere else "blackwell"
    RUNNERS[f"mosaic_gpu_{_ARCHITECTURE}"] = Runner(
        {"implementation": f"mosaic_gpu_{_ARCHITECTURE}"},
        dtypes=("bfloat16",),
        other_dtypes=("float16",),
        first=[case for case in ALL if case.name in _BY_NAME],
        rest=(),
        shaped=_full_with_heads(128),
    )
# Those that the tests of gradients hold.
WITH_GRADIENTS = {name: x for name, x in RUNNERS.items() if not x.forward_only}
