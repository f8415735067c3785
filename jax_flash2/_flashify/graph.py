"""A traced function as a graph of values and nodes, in which calls can be seen through.

`jit` and JAX's own functions with custom derivatives are calls: their nodes are nodes
of the graph around them. Loops, branches, `jax.checkpoint` and `shard_map` have graphs
of their own inside (`Node.inner`).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend.core import Literal

# Operations whose result is their operand.
COPIES = ("copy", "copy_p", "pvary", "pcast")
_JAX = str(Path(jax.__file__).parent / "_src")
_JIT = ("jit", "pjit")
_NUMBERS = (np.ndarray, np.generic, int, float)
_WITH_JAXPR = ("remat", "remat2", "checkpoint", *_JIT)


class Value:
    """An array of the program: a `Node`, a `Result` of one, an input or a constant.

    Attributes:
      aval: its type.
      constant: the array itself, of a literal or of what the function closed over.
      outer: of an input of an inner graph that is a value of the graph around it in
        every round, that value; else None.
    """

    __slots__ = ("aval", "constant", "outer")

    def __init__(self, aval, constant=None, outer: Value | None = None):
        self.aval, self.constant, self.outer = aval, constant, outer

    @property
    def node(self) -> Node | None:
        """What makes it, or None of an input or a constant."""
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def origin(self) -> Value:
        """The same array where it comes from, in a graph around this one."""
        found = self
        while found.outer is not None:
            found = found.outer
        return found


class Node(Value):
    """An operation, which is its own result; if it has not just one, `results` are.

    `inner` are its graphs, by the parameter that has them.
    """

    __slots__ = ("__weakref__", "equation", "inner", "inputs", "name", "results")

    def __init__(self, equation, inputs: list[Value]):
        self.equation, self.inputs = equation, inputs
        self.name: str = equation.primitive.name
        has_graphs = self.name in _WITH_GRAPHS
        self.inner = _inner(equation, inputs) if has_graphs else _NO_GRAPHS
        self.results = self.constant = self.outer = None
        made = equation.outvars
        if len(made) == 1:
            self.aval = made[0].aval
        else:
            self.results = tuple(Result(x.aval, self) for x in made)

    @property
    def node(self) -> Node:
        return self

    @property
    def outputs(self) -> Sequence[Value]:
        return (self,) if self.results is None else self.results

    @property
    def params(self) -> dict:
        return self.equation.params


class Result(Value):
    """One of several results of a node, which the graph keeps.

    If they kept each other, the program and arrays that it closes over would stay in
    memory up to the next collection of all garbage, and make that come sooner.
    """

    __slots__ = ("_node",)

    def __init__(self, aval, node: Node):
        super().__init__(aval)
        self._node = weakref.ref(node)

    @property
    def node(self) -> Node | None:
        return self._node()


@dataclasses.dataclass(eq=False)
class Call:
    """A call whose nodes are nodes of the graph around it."""

    equation: Any
    inputs: list[Value]
    outputs: list[Value]
    items: list[Node | Call]


@dataclasses.dataclass(eq=False)
class Graph:
    """Nodes and calls in an order in which they can run; `nodes` has those of calls."""

    inputs: list[Value]
    outputs: list[Value]
    items: list[Node | Call]
    nodes: list[Node]


def nodes_of(items: list[Node | Call]) -> Iterator[Node]:
    for item in items:
        if isinstance(item, Call):
            yield from nodes_of(item.items)
        else:
            yield item


def graph_of(closed: Any, outer: Sequence[Value | None] | None = None) -> Graph:
    """The graph of a jaxpr (closed or open).

    Args:
      outer: for each input, the value of the graph around it that it always is.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    outer = [None] * len(jaxpr.invars) if outer is None else outer
    inputs = [Value(x.aval, outer=o) for x, o in zip(jaxpr.invars, outer, strict=True)]
    nodes: list[Node] = []
    items, outputs = _walked(closed, inputs, nodes, {})
    return Graph(inputs, outputs, items, nodes)


def is_known(value: Value) -> bool:
    """Whether it is a constant whose numbers can be read while tracing."""
    x = value.constant
    if x is None or isinstance(x, jax.core.Tracer):
        return False
    if isinstance(x, _NUMBERS):
        return True
    return isinstance(x, jax.Array) and x.is_fully_addressable


def is_literal(value: Value) -> bool:
    """Whether it is one number, which the program has in its text."""
    x = value.constant
    return x is not None and not value.shape and isinstance(x, _NUMBERS)


def _walked(
    closed: Any, inputs: Sequence[Value], nodes: list[Node], numbers: dict
) -> tuple[list[Node | Call], list[Value]]:
    """Items and results of a jaxpr, whose nodes are appended to others.

    Args:
      numbers: the literals that there are by now: equal ones are one value.
    """
    jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def constant(aval: Any, x: Any) -> Value:
        found = Value(aval, x)
        if not is_literal(found):
            return found
        return numbers.setdefault((aval, np.asarray(x).tobytes()), found)

    def of(atom) -> Value:
        if isinstance(atom, Literal):
            return constant(atom.aval, atom.val)
        return known[atom]

    for variable, x in zip(jaxpr.constvars, consts, strict=True):
        known[variable] = constant(variable.aval, x)

    items: list[Node | Call] = []
    for equation in jaxpr.eqns:
        own = [of(x) if isinstance(x, Literal) else known[x] for x in equation.invars]
        is_call = equation.primitive.name in _CALLS
        body = _called(equation) if is_call else None
        if body is not None:
            inner, outputs = _walked(body, own, nodes, numbers)
            items.append(Call(equation, own, outputs, inner))
        else:
            node = Node(equation, own)
            nodes.append(node)
            items.append(node)
            if node.results is None:
                known[equation.outvars[0]] = node
                continue
            outputs = node.results
        known.update(zip(equation.outvars, outputs, strict=True))
    return items, [of(x) for x in jaxpr.outvars]


_CALLS = {*_JIT, "closed_call", "core_call", "custom_jvp_call"}


def _called(equation) -> Any | None:
    """The body of a call that may run in line: the same function, and derivatives."""
    name, params = equation.primitive.name, equation.params
    if name in _JIT:
        named = [*params["in_shardings"], *params["out_shardings"]]
        is_plain = all(type(x).__name__ == "UnspecifiedValue" for x in named)
        return params["jaxpr"] if is_plain else None
    if name != "custom_jvp_call":
        return params["call_jaxpr"]
    body, rule = params["call_jaxpr"], params["jvp_jaxpr_fun"]
    infos = (getattr(body, "jaxpr", body).debug_info, rule.debug_info)
    is_of_jax = all(_JAX in (x.func_src_info or "") for x in infos)
    return body if is_of_jax else None  # a user's rule may be another function's


def constants_of_scan(params: dict) -> int:
    if "num_consts" in params:
        return params["num_consts"]
    return len(list(params["ft_in"].unpack()[0]))


_Inner = Mapping[str, "tuple[Graph, ...]"]
_NO_GRAPHS: _Inner = MappingProxyType({})


def _inner(equation, inputs: list[Value]) -> _Inner:
    name, params = equation.primitive.name, equation.params
    if name in _WITH_JAXPR:
        return {"jaxpr": (graph_of(params["jaxpr"], inputs),)}
    if name == "shard_map":
        return {"jaxpr": (graph_of(params["jaxpr"]),)}
    if name == "cond":
        graphs = tuple(graph_of(x, inputs[1:]) for x in params["branches"])
        return {"branches": graphs}
    if name == "scan":
        own = inputs[: constants_of_scan(params)]
        return {"jaxpr": (graph_of(params["jaxpr"], _padded(own, len(inputs))),)}
    first, count = params["cond_nconsts"], params["body_nconsts"]
    own = inputs[first : first + count]
    padded = _padded(own, len(inputs) - first)
    return {"body_jaxpr": (graph_of(params["body_jaxpr"], padded),)}


_WITH_GRAPHS = {*_WITH_JAXPR, "shard_map", "cond", "scan", "while"}


def _padded(own: list[Value], count: int) -> list[Value | None]:
    return [*own, *[None] * (count - len(own))]
