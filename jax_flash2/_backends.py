"""The ordered list of backends, and why each can or cannot serve a call.

A backend is a module with `unsupported(**facts)`, `forward` and `backward`, imported
when a call on its platform first asks for it: a machine without a GPU imports no GPU
code. A backend that cannot be imported serves no call, and the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import warnings
from types import ModuleType

import jax

from pallas_kernels import device


@dataclasses.dataclass(frozen=True)
class _Backend:
    """Where a backend is.

    Attributes:
      module: its name.
      platform: on which it runs, and elsewhere interpreted; None for any.
    """

    module: str
    platform: str | None = None


# From the fastest on. `None` picks the first that serves a call.
BACKENDS = {
    "triton": _Backend("pallas_kernels.triton", "cuda"),
    "xla": _Backend("jax_flash2._chunked"),
}
# The oracle of the tests, quadratic in memory: only by name.
REFERENCE = "reference"
NAMES = (*BACKENDS, REFERENCE)


def module(name: str) -> ModuleType:
    return importlib.import_module(BACKENDS[name].module)


@contextlib.contextmanager
def lowering_context(name: str):
    """In which a backend's functions are traced and lowered.

    The caller's rules of promotion are for the caller's code.
    """
    own = getattr(module(name), "lowering_context", contextlib.nullcontext)
    rank, dtype = jax.numpy_rank_promotion, jax.numpy_dtype_promotion
    with own(), rank("allow"), dtype("standard"):
        yield


def reason(name: str, facts: dict) -> str | None:
    """Why a backend cannot serve the call (None: it can).

    Args:
      facts: dtype, head_sizes (key's and value's), elements (of the largest array),
        symbolic (whether a size is), config.
    """
    config, needed = facts["config"], BACKENDS[name].platform
    interpret = config is not None and config.interpret
    if needed is not None and not interpret and (here := device.platform()) != needed:
        return (
            f"its kernels run on NVIDIA GPUs and this is {here!r} "
            "(config=Config(interpret=True) runs them slowly on any platform)"
        )
    try:
        backend = module(name)
    except ImportError as error:
        return f"it cannot be imported: {error}"
    return backend.unsupported(**facts)


def reasons(facts: dict) -> dict[str, str | None]:
    """For each backend, in order, why it cannot serve the call."""
    return {name: reason(name, facts) for name in BACKENDS}


def choose(implementation: str | None, facts: dict) -> str:
    """The backend that serves a call.

    Raises:
      ValueError: if the backend asked for cannot serve the call, or none can.
    """
    chosen = _choice(implementation, facts)
    best = next(iter(BACKENDS))
    on_its_platform = device.platform() == BACKENDS[best].platform
    if implementation is None and chosen != best and on_its_platform:
        warnings.warn(
            f"jax_flash2.attention runs as {chosen!r}, slower than {best!r} would be "
            f"on this GPU: {reason(best, facts)}",
            stacklevel=3,
        )
    return chosen


def _choice(implementation: str | None, facts: dict) -> str:
    if implementation == REFERENCE:
        return REFERENCE
    if implementation is not None:
        why_not = reason(implementation, facts)
        if why_not is not None:
            raise ValueError(f"implementation={implementation!r}: {why_not}")
        return implementation
    why = reasons(facts)
    chosen = next((name for name, why_not in why.items() if why_not is None), None)
    if chosen is None:
        lines = "; ".join(f"{name}: {why_not}" for name, why_not in why.items())
        raise ValueError(f"no implementation serves this call: {lines}")
    return chosen


def explain(implementation: str | None, facts: dict) -> str:
    """The decision of `choose` as text, with the reason for each backend."""
    lines = []
    try:
        lines.append(f"implementation: {_choice(implementation, facts)}")
    except ValueError as error:
        lines.append(f"error: {error}")
    for name, why_not in reasons(facts).items():
        lines.append(f"  {name}: {why_not or 'can serve this call'}")
    lines.append(f"  {REFERENCE}: only when asked for (quadratic memory)")
    return "\n".join(lines)
