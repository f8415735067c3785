"""The ordered list of backends, and why each can or cannot serve a call.

A backend is a module with `unsupported(**facts)`, `forward` and `backward`, imported
when it is first asked: a machine without a GPU never imports GPU code.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from types import ModuleType

import jax

# From the fastest on. `None` picks the first that serves a call.
BACKENDS = {
    "triton": "pallas_kernels.triton",
    "xla": "jax_flash2._chunked",
}
# The oracle of the tests, quadratic in memory: only by name.
REFERENCE = "reference"
NAMES = (*BACKENDS, REFERENCE)


def module(name: str) -> ModuleType:
    return importlib.import_module(BACKENDS[name])


@contextlib.contextmanager
def lowering_context(name: str):
    """In which a backend's functions are traced and lowered.

    The caller's rules of promotion are for the caller's code.
    """
    own = getattr(module(name), "lowering_context", contextlib.nullcontext)
    rank, dtype = jax.numpy_rank_promotion, jax.numpy_dtype_promotion
    with own(), rank("allow"), dtype("standard"):
        yield


def reasons(facts: dict) -> dict[str, str | None]:
    """For each backend, in order, why it cannot serve the call (None: it can).

    Args:
      facts: dtype, head_sizes (key's and value's), elements (of the largest array),
        config.
    """
    return {name: module(name).unsupported(**facts) for name in BACKENDS}


def choose(implementation: str | None, facts: dict) -> str:
    """The backend that serves a call.

    Raises:
      ValueError: if the backend asked for cannot serve the call, or none can.
    """
    chosen = _choice(implementation, facts)
    best = next(iter(BACKENDS))
    if implementation is None and chosen != best and _has_gpu():
        warnings.warn(
            f"jax_flash2.attention runs as {chosen!r}, slower than {best!r} would be "
            f"on this GPU: {reasons(facts)[best]}",
            stacklevel=3,
        )
    return chosen


def _choice(implementation: str | None, facts: dict) -> str:
    if implementation == REFERENCE:
        return REFERENCE
    if implementation is not None:
        reason = module(implementation).unsupported(**facts)
        if reason is not None:
            raise ValueError(f"implementation={implementation!r}: {reason}")
        return implementation
    why = reasons(facts)
    chosen = next((name for name, reason in why.items() if reason is None), None)
    if chosen is None:
        lines = "; ".join(f"{name}: {reason}" for name, reason in why.items())
        raise ValueError(f"no implementation serves this call: {lines}")
    return chosen


def _has_gpu() -> bool:
    from pallas_kernels.triton import support

    return support.platform() == "cuda"


def explain(implementation: str | None, facts: dict) -> str:
    """The decision of `choose` as text, with the reason for each backend."""
    lines = []
    try:
        lines.append(f"implementation: {_choice(implementation, facts)}")
    except ValueError as error:
        lines.append(f"error: {error}")
    for name, reason in reasons(facts).items():
        lines.append(f"  {name}: {'can serve this call' if reason is None else reason}")
    lines.append(f"  {REFERENCE}: only when asked for (quadratic memory)")
    return "\n".join(lines)
