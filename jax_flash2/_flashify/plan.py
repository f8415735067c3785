"""Which sites of a graph are computed by `attention`, and what must run for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jax_flash2._flashify.facts import Lost
from jax_flash2._flashify.graph import Call, Graph, Node, Value, nodes_of
from jax_flash2._flashify.match import Found, Matcher
from jax_flash2._flashify.meaning import Meanings
from jax_flash2._flashify.sites import Form, Site, form_of


@dataclasses.dataclass(frozen=True)
class Left:
    """A softmax of scores that is left alone: where, and why."""

    node: Node
    reason: str


@dataclasses.dataclass(eq=False)
class Plan:
    """What of a graph is computed otherwise.

    Attributes:
      sites: by root.
      left: softmaxes that stay.
      inner: plans of graphs inside of nodes, where some have sites: for each node the
        parameter, and a plan for each graph that it has.
      captured: values of graphs around this one that sites of it read.
      live: the nodes that run.
      opened: the calls whose nodes run one by one.
    """

    graph: Graph
    sites: dict[Node, Site]
    left: list[Left]
    inner: dict[Node, tuple[str, tuple[Plan, ...]]]
    captured: list[Value] = dataclasses.field(default_factory=list)
    live: set[Node] = dataclasses.field(default_factory=set)
    opened: set[Call] = dataclasses.field(default_factory=set)

    @property
    def has_sites(self) -> bool:
        return bool(self.sites or self.inner)

    def all_plans(self) -> Iterable[Plan]:
        """This one and all inside, in the order of the program."""
        yield self
        for _, plans in self.inner.values():
            for plan in plans:
                yield from plan.all_plans()


def plan_of(graph: Graph, meanings: Meanings) -> Plan:
    """The plan of a graph and of those inside of it."""
    matcher = Matcher(graph, meanings)
    matcher.run()
    sites: dict[Node, Site] = {}
    left = [Left(node, why) for node, why in matcher.lost.items()]
    narrowed = _narrowed(graph, [*matcher.found])
    forms: dict[tuple[Found, Any], Form | str] = {}
    for root, (found, other) in matcher.found.items():
        key = found, narrowed.get(root)
        form = forms[key] = forms.get(key) or _form_or_reason(*key)
        if isinstance(form, str):
            left.append(Left(root, form))
            continue
        arrays = tuple(other.get(x, x) for x in form.arrays)
        product = found.fact.product.node
        product = other.get(product, product)
        assert isinstance(product, Node)
        sites[root] = Site(root, product, form, arrays)
    inner, every = {}, []
    for node in (x for x in graph.nodes if x.inner):
        plans = [
            (name, tuple(plan_of(x, meanings) for x in graphs))
            for name, graphs in node.inner.items()
        ]
        every += plans
        for name, own in plans:
            if any(x.has_sites for x in own):
                inner[node] = name, own
    plan = Plan(graph, sites, left, inner)
    plan.left += [x for _, own in every for p in own if not p.has_sites for x in p.left]
    _finish(plan, _kept_sites(plan))
    return plan


def _form_or_reason(found: Found, narrowed: Any) -> Form | str:
    try:
        return form_of(found, narrowed)
    except Lost as why:
        return str(why)


def _narrowed(graph: Graph, roots: list[Node]) -> dict[Node, Any]:
    """The 16-bit types that all users of a result convert it to, of roots with one."""
    own: dict[Value, Node] = {x: x for x in roots}  # and the same moved
    dtypes: dict[Node, set] = {x: set() for x in roots}
    for node in graph.nodes if roots else ():
        for x in node.inputs:
            if x not in own:
                continue
            if node.name in ("transpose", "reshape"):
                own[node] = own[x]
            elif node.name == "convert_element_type":
                dtypes[own[x]].add(node.aval.dtype)
            else:
                dtypes[own[x]].add(None)
    for x in graph.outputs:
        if x in own:
            dtypes[own[x]].add(None)
    narrow = {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}
    return {k: next(iter(x)) for k, x in dtypes.items() if len(x) == 1 and x <= narrow}


def _kept_sites(plan: Plan) -> set[Value]:
    """Takes back the sites whose scores are computed all the same.

    Returns:
      All values that are read.
    """
    while True:
        live, needed = _needs(plan)
        kept = {root: x for root, x in plan.sites.items() if x.product not in live}
        if len(kept) == len(plan.sites):
            plan.live = live
            return needed
        why = "scores or probabilities are used elsewhere"
        plan.left += [Left(root, why) for root in plan.sites if root not in kept]
        plan.sites = kept


def _needs(plan: Plan) -> tuple[set[Node], set[Value]]:
    """The nodes that results and side effects need, and all values that are read."""
    needed = set(plan.graph.outputs)
    live = set()
    for node in reversed(plan.graph.nodes):
        if needed.isdisjoint(node.outputs) and not node.equation.effects:
            continue
        live.add(node)
        if node in plan.sites:
            needed.update(plan.sites[node].arrays)
            continue
        needed.update(node.inputs)
        if node in plan.inner:
            for own in plan.inner[node][1]:
                needed.update(own.captured)
    return live, needed


def _finish(plan: Plan, needed: set[Value]) -> None:
    graph = plan.graph
    own = {*graph.inputs, *graph.nodes}
    others = (
        x for x in needed - own if x.constant is None and (x.node or x) not in own
    )
    plan.captured = list(dict.fromkeys(others))
    read = {x for site in plan.sites.values() for x in site.arrays}
    read |= {
        x for _, plans in plan.inner.values() for own in plans for x in own.captured
    }
    _open(plan, graph.items, read)


def _open(plan: Plan, items: list[Node | Call], read: set[Value]) -> bool:
    """Opens calls inside of which a site is, or an array that only a site reads.

    Returns:
      Whether any of the items is one, or has one inside.
    """
    calls = [x for x in items if isinstance(x, Call)]
    opened = {x for x in calls if _open(plan, x.items, read - {*x.outputs})}
    plan.opened |= opened
    return bool(opened) or any(
        x in plan.sites or x in plan.inner or not read.isdisjoint(x.outputs)
        for x in items
        if isinstance(x, Node)
    )


def is_live(plan: Plan, call: Call) -> bool:
    return any(node in plan.live for node in nodes_of(call.items))
