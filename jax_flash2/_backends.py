"""The ordered list of backends, and why each can or cannot serve a call.

A backend is a module with the functions of `pallas_kernels.backend.Backend`, imported
when a call on its platform first asks for it: a machine without a GPU imports no GPU
code. A backend that cannot be imported serves no call, and the others go on.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

from pallas_kernels import device, tables, user_tables
from pallas_kernels.backend import Backend, Call, Declined, Pass, Plan
from pallas_kernels.core.promotion import own_rules

try:  # what `jax.ensure_compile_time_eval` sets
    from jax._src.config import eager_constant_folding as _constants_at_once
except ImportError:  # a private name: without it kernels raise an error there
    _constants_at_once = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """A backend in the list.

    Attributes:
      module: its name.
      platform: on which its kernels run, and elsewhere interpreted; None for any.
      has_tangents: whether its functions are plain JAX, through which JAX can push
        tangents (forward mode); others are inside a `custom_vjp`, and have kernels for
        tangents, or those of the first that is.
      only_by_name: why it serves only calls that name it, and has a kernel for one of
        their passes alone; None where it serves others.
    """

    module: str
    platform: str | None = None
    has_tangents: bool = False
    only_by_name: str | None = None


class Made(NamedTuple):
    """Who makes a pass of a call.

    Attributes:
      name: of the backend.
      plan: its plan.
      passed_over: for each backend that stands before it in the list, why not that one.
    """

    name: str
    plan: Plan
    passed_over: dict[str, str]


def _not_run(name: str) -> Entry:
    module = f"pallas_kernels.mosaic_gpu.{name}"
    return Entry(module, "cuda", only_by_name="not run on a card")


# From the fastest on. `implementation=None` picks the first that serves a call and is
# not known to be slower than the next, of those that need not be named. Gradients are
# made by the first of its platform for whose backward this holds; by one that is named,
# and what it does not make by the next.
BACKENDS = {
    "mosaic_gpu": Entry("pallas_kernels.mosaic_gpu.hopper", "cuda"),
    "mosaic_gpu_ampere": _not_run("ampere"),
    "mosaic_gpu_blackwell": _not_run("blackwell"),
    "triton": Entry("pallas_kernels.triton", platform="cuda"),
    "xla": Entry("jax_flash2._chunked", has_tangents=True),
}
REFERENCE = "reference"  # the oracle of the tests, quadratic in memory: by name


def unnamed() -> list[str]:
    """The backends that `implementation=None` may pick, in order."""
    return [name for name, entry in BACKENDS.items() if not entry.only_by_name]


def names() -> tuple[str, ...]:
    """Every value of `implementation` but None."""
    return (*BACKENDS, REFERENCE)


def module(name: str) -> Backend:
    return cast(Backend, importlib.import_module(BACKENDS[name].module))


_plans: contextvars.ContextVar[dict | None] = contextvars.ContextVar("plans")


@contextlib.contextmanager
def remembering():
    """While a program is lowered, or a call is traced, each plan is made once."""
    if _plans.get(None) is not None:
        yield
        return
    token = _plans.set({})
    try:
        yield
    finally:
        _plans.reset(token)


def plan(name: str, call: Call, pass_: Pass) -> Plan | Declined:
    """The plan of a backend for a pass of a call, or why it makes none."""
    known = _plans.get(None)
    if known is None:
        return _new_plan(name, call, pass_)
    key = name, pass_, call.static, device.target()
    if key not in known:
        known[key] = _new_plan(name, call, pass_)
    return known[key]


def _new_plan(name: str, call: Call, pass_: Pass) -> Plan | Declined:
    why_not = _why_not_here(name, call)
    if why_not is not None:
        return Declined(why_not)
    try:
        backend = module(name)
    except ImportError as error:
        return Declined(f"it cannot be imported: {error}")
    return backend.plan(call.structs, pass_)


def passes(name: str, call: Call, *, is_named: bool) -> dict[Pass, Made] | Declined:
    """Who makes each pass of a call that `name` serves, or why it cannot serve it.

    Args:
      is_named: whether the caller names the backend. Then a faster one leaves it what
        it makes of the gradients.
    """
    forward = plan(name, call, "forward")
    if isinstance(forward, Declined):
        return forward
    made = Made(name, forward, {})
    if not call.has_gradients:
        return {"forward": made}
    first = name if is_named else _of_platform(name)[0]
    backward = _maker(first, call, "backward", is_named=is_named)
    if isinstance(backward, Declined):
        return backward
    found: dict[Pass, Made] = {"forward": made, "backward": backward}
    if call.spec.score.operands:
        last = _maker(backward.name, call, "operand_gradients", is_named=is_named)
        if isinstance(last, Declined):
            return last
        found["operand_gradients"] = last
    return found


def served(name: str, call: Call, *, is_named: bool) -> dict[Pass, Made]:
    """`passes` of a call that the backend serves.

    Raises:
      ValueError: if it does not.
    """
    found = passes(name, call, is_named=is_named)
    if isinstance(found, Declined):
        raise ValueError(_refusal(name, found.reason))
    return found


def _maker(name: str, call: Call, pass_: Pass, *, is_named: bool) -> Made | Declined:
    """The first backend of a platform, from `name` on, that makes a gradient."""
    found = _first_of(name, call, pass_, is_named=is_named)
    if isinstance(found, Made):
        return found
    why = "; ".join(f"{x}: {text}" for x, text in found.items())
    return Declined(f"no kernel makes its gradients: {why}")


def tangents(name: str, call: Call, *, is_named: bool) -> Made:
    """Who makes the tangent of a call's results: a kernel, or else `of_tangents`."""
    found = _first_of(name, call, "tangent", is_named=is_named)
    return found if isinstance(found, Made) else Made(of_tangents(), Plan(), found)


def _of_platform(name: str) -> list[str]:
    """The unnamed backends of the platform of one, in order; or that one."""
    own = BACKENDS[name].platform
    return [x for x in unnamed() if BACKENDS[x].platform == own] if own else [name]


def _first_of(name: str, call: Call, pass_: Pass, *, is_named: bool) -> Made | dict:
    """Of a platform's backends from `name` on, or why none of them makes a pass."""
    after = list(BACKENDS)[list(BACKENDS).index(name) + 1 :]
    others, passed_over = [name, *(x for x in _of_platform(name) if x in after)], {}
    for i, x in enumerate(others):
        own = plan(x, call, pass_)
        if isinstance(own, Declined):
            passed_over[x] = own.reason
            if own.to_loops:
                own = cast(Plan, plan(of_tangents(), call, pass_))
                return Made(of_tangents(), own, passed_over)
            continue
        following = [] if is_named or not own.slower else others[i + 1 : i + 2]
        if any(not isinstance(plan(y, call, pass_), Declined) for y in following):
            passed_over[x] = str(own.slower)
            continue
        return Made(x, own, passed_over)
    return passed_over


def of_tangents() -> str:
    """The backend of plain JAX, which makes the tangents that no kernel makes."""
    return next(name for name, entry in BACKENDS.items() if entry.has_tangents)


@contextlib.contextmanager
def lowering_context(*names: str):
    """In which functions of these backends are traced and lowered, by `own_rules`.

    Compile-time evaluation is for the caller's code, too: what has no operand, as the
    number of a program, is no constant.
    """
    with contextlib.ExitStack() as stack, own_rules():
        if _constants_at_once is not None:
            stack.enter_context(_constants_at_once(False))
        for name in names:
            own = getattr(module(name), "lowering_context", contextlib.nullcontext)
            stack.enter_context(own())
        yield


def _why_not_here(name: str, call: Call) -> str | None:
    """Why a backend serves no call on the platform in question (None: it does)."""
    needed, here = BACKENDS[name].platform, device.target()
    if needed is None or call.interpret or here == needed:
        return None
    return (
        f"the kernels run on NVIDIA GPUs, not on {here!r} "
        "(config=Config(interpret=True) interprets them on any platform, slowly)"
    )


def reason(name: str, call: Call) -> str | None:
    """Why a backend cannot serve the call (None: it can)."""
    found = passes(name, call, is_named=True)
    return found.reason if isinstance(found, Declined) else None


def reasons(call: Call) -> dict[str, str | None]:
    """For each backend, in order, why it cannot serve the call."""
    return {name: reason(name, call) for name in BACKENDS}


def choose(implementation: str | None, call: Call) -> str:
    """The backend that serves a call.

    Warns if the platform has a backend of its own and none of those serves the call.

    Raises:
      ValueError: if the backend asked for cannot serve the call, or none can.
    """
    with _described_by(call), remembering():
        chosen = _choice(implementation, call)
        needed = BACKENDS[chosen].platform if chosen in BACKENDS else None
        if needed is not None and not call.interpret:
            _warn_of_unknown_gpu()
        if implementation is not None or needed is not None:
            return chosen
        here = device.platform()
        kernels = [x for x in unnamed() if BACKENDS[x].platform == here]
        why_not = {name: reason(name, call) for name in kernels}
    if why_not and all(why_not.values()):
        why = "; ".join(f"{name}: {text}" for name, text in why_not.items())
        warnings.warn(
            f"jax_flash2.attention runs as {chosen!r}, slower than the kernels would "
            f"be on this GPU. {why}",
            stacklevel=_level_of_caller(),
        )
    return chosen


def _warn_of_unknown_gpu() -> None:
    gpu = device.gpu()
    if not gpu.is_known:
        path = tables.table_path(
            "triton", tables.serving("triton", gpu.kind, gpu.family)
        )
        warnings.warn(
            f"jax_flash2.attention does not know the GPU {gpu.kind!r}, which is not on "
            f"this machine: kernels take the blocks of the smallest GPUs ({path.name})",
            stacklevel=_level_of_caller(),
        )


def check_lowered(name: str, *, is_named: bool) -> None:
    """Of a program for one platform alone, that the choice was made for it.

    Args:
      name, is_named: as for `again`.

    Raises:
      ValueError: if the program is for GPUs that were not known when it was traced.
    """
    traced_for, platform = device.platform(), device.target()
    if is_named or name == REFERENCE or BACKENDS[name].platform is not None:
        return
    known = platform == traced_for or device.is_here(platform)
    if not known and any(x.platform == platform for x in BACKENDS.values()):
        raise ValueError(
            f"jax_flash2.attention was traced for {traced_for!r}, where {name!r} is "
            f"best, and is lowered for {platform!r}, of which no device is here. Types "
            "of arrays of one device do not name it: give them a NamedSharding on a "
            "mesh of the devices, trace under an abstract mesh with that "
            f"abstract_device, or name an implementation ({name!r} for these loops)"
        )


def again(name: str, call: Call, *, is_named: bool) -> str:
    """The backend that serves a call which `name` was chosen for, as it is lowered.

    By then `vmap` may have added axes, and devices may have divided others, so that
    other kernels are faster. Where JAX differentiates the backend itself, or the caller
    names it, it stays. And the program may be one for another platform than that where
    arrays lie by default, on which no kernel runs: its backend serves it then.

    Raises:
      ValueError: if the platform is not that of the backend that the caller names.
    """
    why_not_here = _why_not_here(name, call)
    if why_not_here is not None and is_named:
        raise ValueError(_refusal(name, why_not_here))
    if is_named or BACKENDS[name].has_tangents:
        return name

    def serves(other: str) -> bool:
        why_not = why_not_here if other == name else reason(other, call)
        return why_not is None

    chosen = _first(call, serves)
    if chosen is None or (why_not_here is None and BACKENDS[chosen].has_tangents):
        return name
    return chosen


def _refusal(name: str, why_not: str) -> str:
    return f"implementation={name!r}: {why_not}"


def _level_of_caller() -> int:
    """For a warning of the function that asks: the line outside of this package."""
    folder = str(Path(__file__).parent)
    files = [frame.filename for frame in inspect.stack(context=0)]
    return next(n for n, file in enumerate(files) if not file.startswith(folder))


def _choice(implementation: str | None, call: Call) -> str:
    if implementation is not None:
        why_not = "it has no Config(invariant=True)" if call.is_invariant else None
        if implementation != REFERENCE:
            why_not = reason(implementation, call)
        if why_not is not None:
            raise ValueError(_refusal(implementation, why_not))
        return implementation
    chosen = _first(call, lambda name: reason(name, call) is None)
    if chosen is None:
        why = (f"{name}: {reason(name, call)}" for name in unnamed())
        raise ValueError(f"no implementation serves this call: {'; '.join(why)}")
    return chosen


def _first(call: Call, serves: Callable[[str], bool]) -> str | None:
    """The first backend that serves a call and is not slower than the next, if any."""
    # A backend may be known to be slower than the next one, not than those after that.
    names = unnamed()
    for i, name in enumerate(names):
        following = names[i + 1 : i + 2]
        if serves(name) and not (_slower(name, call) and any(map(serves, following))):
            return name
    return None


def _slower(name: str, call: Call) -> str | None:
    """Why the next backend is faster in the forward pass of a call, as measured."""
    own = plan(name, call, "forward")
    return None if isinstance(own, Declined) else own.slower


def _described_by(call: Call):
    """In which the devices that the types of a call's arrays name are meant."""
    return device.describing(device.described_by(x.value for x in call.operands))


def explain(implementation: str | None, call: Call) -> str:
    """The decision of `choose` as text, with the reason for each backend."""
    with _described_by(call):
        return "\n".join(_explained(implementation, call))


def _explained(implementation: str | None, call: Call) -> list[str]:
    lines = []
    try:
        chosen = _choice(implementation, call)
        lines.append(f"implementation: {chosen}{_marked(chosen)}")
        if not call.is_symbolic:
            products = "{:.3g} FLOPs, of gradients {:.3g}".format(*call.flops)
            lines.append(f"    products: {products}")
        if chosen in BACKENDS:
            is_named = implementation is not None
            found = served(chosen, call, is_named=is_named)
            if call.has_gradients:
                found["tangent"] = tangents(chosen, call, is_named=is_named)
            for pass_, made in found.items():
                lines += [f"    {line}" for line in _words(pass_, made, call)]
        used = (user_tables.used(name, device.device_kind()) for name in BACKENDS)
        lines += [f"    with blocks of yours: {path}" for path in filter(None, used)]
    except ValueError as error:
        lines.append(f"error: {error}")
    for name, why_not in reasons(call).items():
        slower = None if why_not else _slower(name, call)
        text = "can serve this call" + (f", slower: {slower}" if slower else "")
        text = f"{text}, if named{_marked(name)}" if _marked(name) else text
        lines.append(f"  {name}: {why_not or text}")
    lines.append(f"  {REFERENCE}: only when asked for (quadratic memory)")
    if device.target() == "cuda":
        gpu = device.gpu()
        table = tables.serving("triton", gpu.kind, gpu.family)
        lines.append(f"  GPU: {gpu.words}; blocks of Triton kernels: {table}")
    return lines


def _marked(name: str) -> str:
    """Why a backend is not chosen without its name, in brackets; or nothing."""
    why = name in BACKENDS and BACKENDS[name].only_by_name
    return f" ({why})" if why else ""


def _words(pass_: Pass, made: Made, call: Call) -> list[str]:
    """Who makes a pass, why not those before it, and how its work is divided."""
    what = pass_
    if pass_ == "operand_gradients":
        score = call.spec.score
        named = {f: x for y in (score, *score.terms) for f, x in y.arguments.items()}
        fields = (named.get(x, x) for x in score.operands)
        what = f"gradients of {' and '.join(fields)}"
    others = "; ".join(f"not {x}: {why}" for x, why in made.passed_over.items())
    line = f"{what}: {made.name}{others and f' ({others})'}"
    return [line, *(f"    {x}" for x in made.plan.words)]
