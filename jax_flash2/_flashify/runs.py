"""Runs: the operations from one site to the next, which equal layers have alike.

A program that repeats a layer has a run for each, and they differ in their operands
alone. Each such kind of run is traced, linearized and lowered once, in a `jit` of its
own. What was traced from jitted functions of `jax.numpy` would otherwise cost more than
it did in the program, since it is single operations now.

Runs never reach beyond a name scope that has a site inside. So layers that are named
differ in the names around their runs, not in those inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_flash2._flashify.digits import Digit
from jax_flash2._flashify.graph import Call, Node, Value, is_known
from jax_flash2._flashify.plan import Plan, is_live

Names = tuple[Any, ...]  # as in a `NameStack`


class Step(NamedTuple):
    """What is bound at once: a node, a call that stays closed, or the root of a site.

    `names` are its name scopes, with those of the calls around it.
    """

    item: Node | Call
    names: Names


@dataclasses.dataclass(eq=False)
class Run:
    """Steps that follow each other.

    Attributes:
      names: the scopes around all of it.
      is_alone: whether it is one step that must not be inside a `jit` of ours.
      kind: the same for runs that are the same function of their inputs, with the same
        lines, and the same names inside; None of what is alone.
      inputs: the arrays that it reads, in the order in which it does.
      outputs: the values of it that are read later.
    """

    steps: list[Step]
    names: Names
    is_alone: bool
    kind: int | None = None
    inputs: list[Value] = dataclasses.field(default_factory=list)
    outputs: list[Value] = dataclasses.field(default_factory=list)


def runs_of(plan: Plan) -> list[Run]:
    """All that runs of a plan, in order."""
    runs = _cut(plan, list(_steps(plan, plan.graph.items, ())))
    later = set(plan.graph.outputs)
    for run in reversed(runs):
        made = dict.fromkeys(x for step in run.steps for x in step.item.outputs)
        run.outputs = [x for x in made if x in later]
        for step in run.steps:
            later.update(_reads(plan, step.item))
    kinds: dict[Any, int] = {}
    for run in runs:
        if not run.is_alone:
            run.kind = kinds.setdefault(_key(plan, run), len(kinds))
    return runs


def _reads(plan: Plan, item: Node | Call) -> list[Value]:
    """The values that a step takes."""
    if item in plan.sites:
        return [x.value for x in plan.sites[item].operands()]
    if item in plan.inner:
        captured = [x for own in plan.inner[item][1] for x in own.captured]
        return [*item.inputs, *captured]
    return item.inputs


def _steps(plan: Plan, items: list[Node | Call], names: Names) -> Iterator[Step]:
    """What is live, with calls that are opened replaced by what they have inside."""
    for item in items:
        own = names + item.equation.source_info.name_stack.stack
        if isinstance(item, Node):
            if item in plan.live:
                yield Step(item, own)
        elif item in plan.opened:
            yield from _steps(plan, item.items, own)
        elif is_live(plan, item):
            yield Step(item, own)


def _cut(plan: Plan, steps: list[Step]) -> list[Run]:
    """Runs of one scope, with one site at most."""
    runs: list[Run] = []
    has_site = False
    for step, names in zip(steps, _scopes(plan, steps), strict=True):
        is_site = step.item in plan.sites
        is_alone = _stays_alone(plan, step.item)
        last = runs[-1] if runs else None
        if (
            last is None
            or is_alone
            or last.is_alone
            or (is_site and has_site)
            or last.names != names
        ):
            runs.append(Run([], names, is_alone))
            has_site = False
        runs[-1].steps.append(step)
        has_site |= is_site
    return runs


def _stays_alone(plan: Plan, item: Node | Call) -> bool:
    """Whether it has sites inside, or effects, as what makes mutable arrays has."""
    return item in plan.inner or bool(item.equation.effects)


def _scopes(plan: Plan, steps: list[Step]) -> list[Names]:
    """For each step, the innermost scope that the site before or after is in, too."""

    def depths(steps: Iterable[Step]) -> list[int]:
        found, site = [], ()
        for item, names in steps:
            site = names if item in plan.sites else site
            found.append(_in_common(names, site) if names and site else 0)
        return found

    both = zip(depths(steps), reversed(depths(reversed(steps))), strict=True)
    return [x.names[: max(y)] for x, y in zip(steps, both, strict=True)]


def _in_common(left: Names, right: Names) -> int:
    """How many elements both begin with."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def _key(plan: Plan, run: Run) -> Any:
    """The key of a run, whose inputs it finds."""
    numbers: dict[Value, int] = {}

    def number(value: Value) -> Any:
        if value in numbers:
            return numbers[value]
        if _is_literal(value):
            return value.aval, np.asarray(value.constant).tobytes()
        run.inputs.append(value)
        numbers[value] = len(numbers)
        return numbers[value], value.aval

    depth, tokens = len(run.names), []
    for item, names in run.steps:
        equation = item.equation
        if item in plan.sites:
            what = _numbered(plan.sites[item], number), item.outputs[0].aval
        else:
            inputs = tuple(map(number, item.inputs))
            params = tuple(equation.params.items())
            what = equation.primitive, params, equation.ctx, inputs
        tokens.append((what, equation.source_info.traceback, names[depth:]))
        for x in item.outputs:
            numbers.setdefault(x, len(numbers))
    return (*tokens, *(numbers[x] for x in run.outputs))


def _is_literal(value: Value) -> bool:
    x = value.constant
    return is_known(value) and not value.shape and not isinstance(x, jax.Array)


# Of a site, where it stands in the program.
_PLACES = ("root", "product", "weights")


def _numbered(x: Any, number: Callable[[Value], Any]) -> Any:
    """A record with numbers instead of values."""
    if isinstance(x, Value):
        return number(x)
    if isinstance(x, tuple) and not isinstance(x, Digit):
        return tuple(_numbered(y, number) for y in x)
    if dataclasses.is_dataclass(x):
        names = (y.name for y in dataclasses.fields(x) if y.name not in _PLACES)
        return type(x), *(_numbered(getattr(x, y), number) for y in names)
    return x
