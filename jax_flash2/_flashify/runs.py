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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax_flash2._flashify.alike import Pairs, same_operation
from jax_flash2._flashify.graph import Call, Node, Value, is_literal
from jax_flash2._flashify.plan import Plan, is_live
from jax_flash2._flashify.sites import Site

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
      first: the first run that is the same function of its inputs, with the same
        lines, and the same names inside; None if this is the first.
      is_repeated: whether this is the first of several.
      inputs: the arrays that it reads, in the order in which it does.
      outputs: the values of it that are read later.
    """

    steps: list[Step]
    names: Names
    is_alone: bool
    first: Run | None = None
    is_repeated: bool = False
    inputs: list[Value] = dataclasses.field(default_factory=list)
    outputs: list[Value] = dataclasses.field(default_factory=list)


def runs_of(plan: Plan) -> list[Run]:
    """All that runs of a plan, in order."""
    products: dict[Node, Names | None] = {x.product: None for x in plan.sites.values()}
    steps = list(_steps(plan, plan.graph.items, (), products))
    runs = _cut(plan, steps, _scopes(plan, steps, products))
    later = set(plan.graph.outputs)
    for run in reversed(runs):
        made = dict.fromkeys(x for step in run.steps for x in step.item.outputs)
        run.outputs = [x for x in made if x in later]
        for step in run.steps:
            later.update(_reads(plan, step.item))
    kinds: dict[Any, list[Run]] = {}
    for run in runs:
        if not run.is_alone:
            _sort(plan, run, kinds.setdefault(_places(plan, run), []))
    return runs


def _sort(plan: Plan, run: Run, others: list[Run]) -> None:
    """Finds what a run reads, and the first of others that it is like."""
    for other in others:
        pairs = _paired(plan, other, run)
        if pairs is not None:
            run.first, other.is_repeated = other, True
            run.inputs = [x for _, x in pairs.inputs]
            return
    own = {x for step in run.steps for x in step.item.outputs}
    read = dict.fromkeys(x for step in run.steps for x in _reads(plan, step.item))
    run.inputs = [x for x in read if x not in own and not is_literal(x)]
    others.append(run)


def _places(plan: Plan, run: Run) -> Any:
    """Lines and names inside of a run, and what is a site."""
    depth, sites = len(run.names), plan.sites
    return tuple(
        (item in sites, item.equation.source_info.traceback, names[depth:])
        for item, names in run.steps
    )


def _paired(plan: Plan, first: Run, second: Run) -> Pairs | None:
    """The values of two runs, if they are the same function of their inputs."""
    pairs, sites = Pairs(), plan.sites
    for (a, _), (b, _) in zip(first.steps, second.steps, strict=True):
        if a in sites:
            is_same = _same_site(sites[a], sites[b])
        else:
            is_same = same_operation(a.equation, b.equation)
        if not is_same or not pairs.read(_reads(plan, a), _reads(plan, b)):
            return None
        pairs.make(a.outputs, b.outputs)
    is_same = [pairs.of[x] for x in first.outputs] == second.outputs
    return pairs if is_same and pairs.are_different() else None


def _same_site(a: Site, b: Site) -> bool:
    return a.form is b.form or a.form.identity == b.form.identity


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
) -> Iterator[Step]:
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
            yield Step(item, own)


def _cut(plan: Plan, steps: list[Step], scopes: list[Names]) -> list[Run]:
    """Runs of one scope, with one site at most."""
    runs: list[Run] = []
    sites = plan.sites
    run, has_site = None, False
    for step, names in zip(steps, scopes, strict=True):
        item = step.item
        is_site, is_alone = item in sites, _stays_alone(plan, item)
        if (
            run is None
            or is_alone
            or run.is_alone
            or (is_site and has_site)
            or run.names != names
        ):
            run, has_site = Run([], names, is_alone), False
            runs.append(run)
        run.steps.append(step)
        has_site = has_site or is_site
    return runs


def _stays_alone(plan: Plan, item: Node | Call) -> bool:
    """Whether it has sites inside, or effects, as what makes mutable arrays has."""
    return item in plan.inner or bool(item.equation.effects)


def _scopes(
    plan: Plan, steps: list[Step], products: dict[Node, Names | None]
) -> list[Names]:
    """For each step, the innermost scope that the site before or after is in, too.

    A site reaches from its product, where that has been seen, to its root.
    """

    def depths(steps: Iterable[Step]) -> list[int]:
        found, site = [], ()
        for item, names in steps:
            if item in plan.sites:
                first = products[plan.sites[item].product]
                site = names if first is None else _in_common(names, first)
            found.append(len(_in_common(names, site)) if names and site else 0)
        return found

    if not any(names for _, names in steps):
        return [()] * len(steps)
    both = zip(depths(steps), reversed(depths(reversed(steps))), strict=True)
    return [x.names[: max(y)] for x, y in zip(steps, both, strict=True)]


def _in_common(left: Names, right: Names) -> Names:
    """What both begin with."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return left[:count]
