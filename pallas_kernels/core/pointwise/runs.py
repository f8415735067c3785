"""Whether a program keeps one run of keys of each query, as far as its text says.

Along one input, a number may rise, fall, or do one after the other. So may a boolean,
of which False comes before True. A run of kept pairs is a "hill". What is said here
chooses between two right ways; nothing is wrong where it errs.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pallas_kernels.core.pointwise.program import Program, Step

# A kind is a set of what holds; "still" is all of them.
_STILL = frozenset(("rises", "falls", "hill", "valley"))
_RISES = frozenset(("rises", "hill", "valley"))
_FALLS = frozenset(("falls", "hill", "valley"))
_TURNED = {"rises": "falls", "falls": "rises", "hill": "valley", "valley": "hill"}
_MONOTONE = ("convert_element_type", "floor", "ceil", "sign", "exp", "exp2", "log")


@functools.lru_cache(maxsize=512)
def keeps_runs(program: Program, reads: tuple[frozenset[str], ...]) -> bool:
    """Whether pairs are kept in one run along the keys, and along the queries.

    Args:
      reads: on which of "q" and "kv" each array depends, beside indices of reads.
    """
    return all("hill" in _kind(program, reads, name) for name in ("q", "kv"))


def _kind(program: Program, reads, name: str) -> frozenset[str]:
    inputs = [_RISES if x == name else _STILL for x in program.inputs]

    def read(step: Step, index: list) -> frozenset[str]:
        is_still = name not in reads[step.params[0]]
        kinds = (x for x in index if isinstance(x, frozenset))
        return _STILL if is_still and all(x == _STILL for x in kinds) else frozenset()

    def rule(step: Step, args: list) -> frozenset[str]:
        kinds = [x if isinstance(x, frozenset) else _STILL for x in args]
        return _STILL if all(x == _STILL for x in kinds) else _of(step, args, kinds)

    (found,) = program.run(inputs, read, rule)
    return found if isinstance(found, frozenset) else _STILL


def _of(step: Step, args: list, kinds: list) -> frozenset[str]:
    name, first = step.name, kinds[0]
    if name in ("not", "neg"):
        return _turned(first)
    if name in _MONOTONE:
        return first
    if name in ("add", "sub", "lt", "le", "gt", "ge", "eq", "ne"):
        return _compared(name, _sum(first, _turned(kinds[1])), kinds)
    if name in ("and", "min"):
        return _both(kinds, "hill")
    if name in ("or", "max"):
        return _both(kinds, "valley")
    if name == "abs":
        return frozenset(("valley",)) if first & {"rises", "falls"} else frozenset()
    if name in ("mul", "div") and _sign(args[1]) and kinds[1] == _STILL:
        return first if _sign(args[1]) > 0 else _turned(first)
    return frozenset()


def _turned(kind: frozenset[str]) -> frozenset[str]:
    return frozenset(_TURNED[x] for x in kind)


def _sum(x: frozenset[str], y: frozenset[str]) -> frozenset[str]:
    """Of two numbers, added: what both do stays so, if it is no turn."""
    if _STILL in (x, y):
        return y if x == _STILL else x
    both = x & y & {"rises", "falls"}
    return both | {"hill", "valley"} if both else frozenset()


def _compared(name: str, difference: frozenset[str], kinds: list) -> frozenset[str]:
    """Of an operation of two numbers, from what their difference does."""
    if name == "add":
        return _sum(*kinds)
    if name == "sub":
        return difference
    if name in ("gt", "ge"):
        return difference
    if name in ("lt", "le"):
        return _turned(difference)
    is_run = name == "eq" and difference & {"rises", "falls"}
    return frozenset(("hill",)) if is_run else frozenset()


def _both(kinds: list, keeps: str) -> frozenset[str]:
    """Of the lower of two numbers, which of two hills is a hill, or of the higher."""
    shared = kinds[0] & kinds[1] & {"rises", "falls", keeps}
    return shared | {"hill", "valley"} if shared & {"rises", "falls"} else shared


def _sign(x: Any) -> int:
    """Of a constant; 0 of what has none, or is not known."""
    is_number = isinstance(x, np.ndarray | np.generic) and not np.isnan(x)
    return int(np.sign(x)) if is_number else 0
