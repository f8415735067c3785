"""Runs: the operations of a layer with its site, which equal layers have alike.

A program that repeats a layer has a run for each, and they differ in their operands
alone. Each such kind of run is traced, linearized and lowered once, in a `jit` of its
own. What was traced from jitted functions of `jax.numpy` would otherwise cost more than
it did in the program, since it is single operations now.

Runs never reach beyond a name scope that has a site inside. So layers that are named
differ in the names around their runs, not in those inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax_flash2._flashify.alike import Piece, paired
from jax_flash2._flashify.graph import Call, Node, Value, is_literal
from jax_flash2._flashify.plan import Plan, is_live

Names = tuple[Any, ...]  # as in a `NameStack`


# What is bound at once: a node, a call that stays closed, or the root of a site.
Step = Node | Call


@dataclasses.dataclass(eq=False)
class Run:
    """Steps that follow each other.

    Attributes:
      scopes: the names of each step, with those of the calls around it.
      names: the scopes around all of it.
      is_alone: whether it is one step that must not be inside a `jit` of ours.
      first: the first run that is the same function of its inputs, with the same
        lines, and the same names inside; None if this is the first.
      is_repeated: whether this is the first of several.
      inputs: the arrays that it reads, in the order in which it does.
      piece: what it makes and reads, and `outputs`, what of it is read later.
    """

    names: Names
    is_alone: bool
    steps: list[Step] = dataclasses.field(default_factory=list)
    scopes: list[Names] = dataclasses.field(default_factory=list)
    piece: Piece = dataclasses.field(init=False)
    first: Run | None = None
    is_repeated: bool = False
    inputs: list[Value] = dataclasses.field(default_factory=list)
    outputs: list[Value] = dataclasses.field(default_factory=list)


def runs_of(plan: Plan) -> list[Run]:
    """All that runs of a plan, in order."""
    products: dict[Node, Names | None] = {x.product: None for x in plan.sites.values()}
    steps: list[Step] = []
    scopes: list[Names] = []
    for item, names in _steps(plan, plan.graph.items, (), products):
        steps.append(item)
        scopes.append(names)
    runs = _cut(plan, steps, scopes, _shared(plan, steps, scopes, products))
    later = set(plan.graph.outputs)
    for run in reversed(runs):
        run.piece = _piece(plan, run)
        run.outputs = [x for x in run.piece.made if x in later]
        later.update(run.piece.read)
    kinds: dict[Any, list[Run]] = {}
    for run in runs:
        if not run.is_alone:
            _sort(plan, run, kinds.setdefault(_places(plan, run), []))
    return runs


def _piece(plan: Plan, run: Run) -> Piece:
    made = [y for x in run.steps for y in x.outputs]
    if any(isinstance(x, Call) for x in run.steps):  # which may pass on what it reads
        made = [y for x in run.steps for y in x.outputs if y not in x.inputs]
    read = [y for x in run.steps for y in _reads(plan, x)]
    return Piece([x.equation for x in run.steps if x not in plan.sites], made, read)


def _sort(plan: Plan, run: Run, others: list[Run]) -> None:
    """Finds what a run reads, and the first of others that it is like."""
    for other in others:
        inputs = _paired(plan, other, run)
        if inputs is not None:
            run.first, other.is_repeated, run.inputs = other, True, inputs
            return
    run.inputs = [x for x in run.piece.inputs if not is_literal(x)]
    others.append(run)


def _places(plan: Plan, run: Run) -> Any:
    """Lines and names inside of a run, and what is a site."""
    depth = len(run.names)
    return (
        tuple([_line(x) for x in run.steps]),
        tuple([names[depth:] for names in run.scopes]),
        tuple([x in plan.sites for x in run.steps]),
    )


def _paired(plan: Plan, first: Run, second: Run) -> list[Value] | None:
    """What the second run reads, if both are the same function of their inputs."""
    sites = plan.sites
    both = (first.steps, second.steps)
    forms = ([sites[x].form for x in steps if x in sites] for steps in both)
    for a, b in zip(*forms, strict=True):
        if a is not b and a.identity != b.identity:
            return None
    found = paired(first.piece, second.piece)
    if found is None:
        return None
    pairs, inputs = found
    is_same = [pairs[x] for x in first.outputs] == second.outputs
    return [*inputs.values()] if is_same else None


def _reads(plan: Plan, item: Node | Call) -> Sequence[Value]:
    """The values that a step takes."""
    if item in plan.sites:
        return plan.sites[item].arrays
    if item in plan.inner:
        captured = [x for own in plan.inner[item][1] for x in own.captured]
        return [*item.inputs, *captured]
    return item.inputs


def _steps(
    plan: Plan,
    items: list[Node | Call],
    names: Names,
    products: dict[Node, Names | None],
) -> Iterator[tuple[Step, Names]]:
    """What is live, with calls that are opened replaced by what they have inside.

    Args:
      products: of sites, whose names it puts there.
    """
    live = plan.live
    for item in items:
        is_node = isinstance(item, Node)
        if is_node and item not in live and item not in products:
            continue
        own = item.equation.source_info.name_stack.stack
        own = names + own if own else names
        if item in plan.opened:
            yield from _steps(plan, item.items, own, products)
        elif item in products:
            products[item] = own
        elif is_node or is_live(plan, item):
            yield item, own


def _cut(
    plan: Plan, steps: list[Step], scopes: list[Names], shared: list[Names]
) -> list[Run]:
    """Runs of one shared scope, in which layers begin and end."""
    runs: list[Run] = []
    run = None
    starts = _starts(plan, steps, shared)
    for i, (step, own, names) in enumerate(zip(steps, scopes, shared, strict=True)):
        is_alone = _stays_alone(plan, step)
        if run is None or is_alone or run.is_alone or run.names != names or i in starts:
            run = Run(names, is_alone)
            runs.append(run)
        run.steps.append(step)
        run.scopes.append(own)
    return runs


def _starts(plan: Plan, steps: list[Step], shared: list[Names]) -> set[int]:
    """Where layers begin that are in one scope, and where the last of them ends.

    Each begins as far before its site as the first two sites have the same lines before
    them, so that the first is like the others.
    """
    sites: dict[Names, list[int]] = {}
    for i, step in enumerate(steps):
        if step in plan.sites:
            sites.setdefault(shared[i], []).append(i)
    starts: set[int] = set()
    for own in (x for x in sites.values() if len(x) > 1):
        first, second = own[:2]
        lines = tuple([_line(x) for x in steps[:second]])
        before = len(_in_common(lines[:first][::-1], lines[:first:-1]))
        end = 2 * own[-1] - own[-2]
        starts.update(i - before for i in (*own, end))
    return starts


def _line(step: Step) -> Any:
    return step.equation.source_info.traceback


def _stays_alone(plan: Plan, step: Step) -> bool:
    """Whether it has sites inside, or effects, as what makes mutable arrays has."""
    return step in plan.inner or bool(step.equation.effects)


def _shared(
    plan: Plan,
    steps: list[Step],
    scopes: list[Names],
    products: dict[Node, Names | None],
) -> list[Names]:
    """For each step, the innermost scope that the site before or after is in, too.

    A site reaches from its product, where that has been seen, to its root.
    """
    of_sites: dict[Step, Names] = {}
    for step, names in zip(steps, scopes, strict=True):
        if step in plan.sites:
            first = products[plan.sites[step].product]
            of_sites[step] = names if first is None else _in_common(names, first)
    if not any(of_sites.values()):
        return [()] * len(steps)

    def depths(order: Iterable[int]) -> dict[int, int]:
        found, site = {}, ()
        for i in order:
            site = of_sites.get(steps[i], site)
            found[i] = len(_in_common(scopes[i], site))
        return found

    places = range(len(steps))
    both = depths(places), depths(reversed(places))
    return [names[: max(x[i] for x in both)] for i, names in enumerate(scopes)]


def _in_common(left: tuple, right: tuple) -> tuple:
    """What both begin with."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return left[:count]
