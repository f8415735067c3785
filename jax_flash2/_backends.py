"""The ordered list of backends, and why each can or cannot serve a call.

A backend is a module with the functions of `pallas_kernels.backend.Backend`, imported
when a call on its platform first asks for it: a machine without a GPU imports no GPU
code. A backend that cannot be imported serves no call, and the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import warnings
from pathlib import Path
from typing import cast

import jax

from pallas_kernels import device
from pallas_kernels.backend import Backend, Call

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
        tangents (forward mode); others are inside a `custom_vjp`, and have those of the
        first that is.
      backward: the backend that makes the gradients that this one does not make: those
        of a score's operands, and all of the calls in `Backend.other_backward` and
        `Backend.slower_backward`.
    """

    module: str
    platform: str | None = None
    has_tangents: bool = False
    backward: str | None = None


# From the fastest on. `implementation=None` picks the first that serves a call and is
# not known to be slower than the next.
BACKENDS = {
    "mosaic_gpu": Entry("pallas_kernels.mosaic_gpu", "cuda", backward="triton"),
    "triton": Entry("pallas_kernels.triton", platform="cuda"),
    "xla": Entry("jax_flash2._chunked", has_tangents=True),
}
_SERVED = "can serve this call"
# Arguments of `attention` that fields of the score have other names for.
_ARGUMENTS = {"slopes": "alibi_slopes", "factor": "scale"}
# The oracle of the tests, quadratic in memory: only by name.
REFERENCE = "reference"


def names() -> tuple[str, ...]:
    """Every value of `implementation` but None."""
    return (*BACKENDS, REFERENCE)


def module(name: str) -> Backend:
    return cast(Backend, importlib.import_module(BACKENDS[name].module))


def _why_other_backward(name: str, call: Call, is_named: bool) -> str | None:
    """Why `BACKENDS[name].backward` makes the gradients of a call; None: it does not.

    Args:
      is_named: whether the caller names the backend, which a faster one then leaves it.
    """
    other = BACKENDS[name].backward
    if other is None:
        return None
    backend = module(name)
    if is_named or reason(other, call.of_gradients()) is not None:
        return backend.other_backward(call)
    return backend.other_backward(call) or backend.slower_backward(call)


def of_backward(name: str, call: Call, *, is_named: bool) -> str:
    """The backend that makes the gradients of a call that `name` serves."""
    why = _why_other_backward(name, call, is_named)
    return name if why is None else BACKENDS[name].backward or name


def of_score_gradients(name: str, call: Call) -> str | None:
    """The other backend for gradients of the score's operands, if there is one."""
    other = BACKENDS[name].backward
    if other is None or not call.spec.score.operands:
        return None
    return other if module(name).other_score_gradients(call) else None


def of_tangents() -> str:
    """The backend that computes the tangents of every backend."""
    return next(name for name, entry in BACKENDS.items() if entry.has_tangents)


@contextlib.contextmanager
def lowering_context(*names: str):
    """In which functions of these backends are traced and lowered.

    The caller's rules of promotion are for the caller's code. So is compile-time
    evaluation: what has no operand, as the number of a program, is no constant.
    """
    rank, dtype = jax.numpy_rank_promotion, jax.numpy_dtype_promotion
    with contextlib.ExitStack() as stack, rank("allow"), dtype("standard"):
        if _constants_at_once is not None:
            stack.enter_context(_constants_at_once(False))
        for name in names:
            stack.enter_context(module(name).lowering_context())
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
    why_not = _why_not_here(name, call)
    if why_not is not None:
        return why_not
    try:
        backend = module(name)
    except ImportError as error:
        return f"it cannot be imported: {error}"
    why_not = backend.unsupported(call)
    if why_not is not None:
        return why_not
    makes_gradients = of_backward(name, call, is_named=True)
    for other in (makes_gradients, of_score_gradients(name, call) or name):
        why_not = None if other == name else reason(other, call.of_gradients())
        if why_not is not None:
            return f"{other!r} makes its gradients: {why_not}"
    return None


def reasons(call: Call) -> dict[str, str | None]:
    """For each backend, in order, why it cannot serve the call."""
    return {name: reason(name, call) for name in BACKENDS}


def choose(implementation: str | None, call: Call) -> str:
    """The backend that serves a call.

    Warns if the platform has a backend of its own and none of those serves the call.

    Raises:
      ValueError: if the backend asked for cannot serve the call, or none can.
    """
    chosen = _choice(implementation, call)
    here = device.platform()
    kernels = [name for name, entry in BACKENDS.items() if entry.platform == here]
    why_not = {name: reason(name, call) for name in kernels}
    declined = why_not and all(why_not.values())
    if implementation is None and declined and BACKENDS[chosen].platform is None:
        why = "; ".join(f"{name}: {text}" for name, text in why_not.items())
        warnings.warn(
            f"jax_flash2.attention runs as {chosen!r}, slower than the kernels would "
            f"be on this GPU. {why}",
            stacklevel=_level_of_caller(),
        )
    return chosen


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
    why_not = {x: None if x == name else reason(x, call) for x in BACKENDS}
    why_not[name] = why_not_here
    chosen = _first(call, [x for x, why in why_not.items() if why is None])
    stays = why_not_here is None and BACKENDS[chosen].has_tangents
    return name if stays else chosen


def _refusal(name: str, why_not: str) -> str:
    return f"implementation={name!r}: {why_not}"


def _level_of_caller() -> int:
    """For a warning of the function that asks: the line outside of this package."""
    folder = str(Path(__file__).parent)
    files = [frame.filename for frame in inspect.stack(context=0)]
    return next(n for n, file in enumerate(files) if not file.startswith(folder))


def _choice(implementation: str | None, call: Call) -> str:
    if implementation == REFERENCE:
        return REFERENCE
    if implementation is not None:
        why_not = reason(implementation, call)
        if why_not is not None:
            raise ValueError(_refusal(implementation, why_not))
        return implementation
    why = reasons(call)
    serving = [name for name, why_not in why.items() if why_not is None]
    if not serving:
        lines = "; ".join(f"{name}: {why_not}" for name, why_not in why.items())
        raise ValueError(f"no implementation serves this call: {lines}")
    return _first(call, serving)


def _first(call: Call, serving: list[str]) -> str:
    """Of the backends that can serve a call."""
    # A backend may be known to be slower than the next one, not than those after that.
    return next(
        name
        for name, following in itertools.pairwise([*BACKENDS, None])
        if name in serving
        and (following not in serving or module(name).slower(call) is None)
    )


def explain(implementation: str | None, call: Call) -> str:
    """The decision of `choose` as text, with the reason for each backend."""
    lines = []
    try:
        chosen = _choice(implementation, call)
        lines.append(f"implementation: {chosen}")
        if not call.is_symbolic:
            forward, backward = call.flops
            of_products = f"{forward:.3g} FLOPs, of gradients {backward:.3g}"
            lines.append(f"    products: {of_products}")
        if chosen in BACKENDS:
            is_named = implementation is not None
            why = _why_other_backward(chosen, call, is_named)
            division = () if why else module(chosen).division(call)
            lines += [f"    {line}" for line in division]
            if why:
                other = BACKENDS[chosen].backward
                lines.append(f"    gradients: {other}, since {why}")
            elif other := of_score_gradients(chosen, call):
                fields = (_ARGUMENTS.get(x, x) for x in call.spec.score.operands)
                lines.append(f"    gradients of {' and '.join(fields)}: {other}")
    except ValueError as error:
        lines.append(f"error: {error}")
    for name, why_not in reasons(call).items():
        slower = None if why_not else module(name).slower(call)
        served = f"can serve this call, slower: {slower}" if slower else _SERVED
        lines.append(f"  {name}: {why_not or served}")
    lines.append(f"  {REFERENCE}: only when asked for (quadratic memory)")
    return "\n".join(lines)
