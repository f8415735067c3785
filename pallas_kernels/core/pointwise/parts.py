"""The conditions whose AND is a function that gives a boolean."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.core.pointwise.program import Argument, Program, made_by


class Part(NamedTuple):
    """One of them: a value, or its negation."""

    value: Argument
    is_negated: bool


def parts_of(program: Program) -> list[Part]:
    """Those of the only output of a program."""
    return _parts(program, Part(program.outputs[0], False))


def _parts(program: Program, part: Part) -> list[Part]:
    if step := made_by(program, part.value, "not"):
        return _parts(program, Part(step.args[0], not part.is_negated))
    joins = "or" if part.is_negated else "and"
    if step := made_by(program, part.value, joins):
        sides = (Part(x, part.is_negated) for x in step.args)
        return [found for side in sides for found in _parts(program, side)]
    return [part]
