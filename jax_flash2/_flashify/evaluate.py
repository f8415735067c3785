"""Runs a graph with its sites computed by `attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax import lax
from jax.extend import source_info_util

from jax_flash2._flashify import rewrite
from jax_flash2._flashify.graph import Node, Value
from jax_flash2._flashify.plan import Plan
from jax_flash2._flashify.runs import Names, Run, Step, runs_of


def run(plan: Plan, inputs: Sequence[Any], captured: Sequence[Any] = ()) -> list[Any]:
    """The results of a graph."""
    env: dict[Value, Any] = dict(zip(plan.captured, captured, strict=True))
    env.update(zip(plan.graph.inputs, inputs, strict=True))
    functions: dict[Run, Callable] = {}
    for own in runs_of(plan):
        args = [_read(env, x) for x in own.inputs]
        is_traced = any(isinstance(x, jax.core.Tracer) for x in args)
        if not (own.first or own.is_repeated) or not is_traced:
            _run(plan, own, 0, env)
            continue
        first = own.first or own
        if first not in functions:
            functions[first] = _function(plan, first)
        traceback = own.steps[0].equation.source_info.traceback
        with _place(traceback, own.names):
            found = functions[first](*args)
        env.update(zip(own.outputs, found, strict=True))
    return [_read(env, x) for x in plan.graph.outputs]


def _function(plan: Plan, own: Run) -> Callable:
    """A run as a function, for all of its kind."""

    def flashify(*args):
        env = dict(zip(own.inputs, args, strict=True))
        _run(plan, own, len(own.names), env)
        return [env[x] for x in own.outputs]

    return jax.jit(flashify)


def _read(env: dict, value: Value) -> Any:
    return env.get(value, value.constant)


def _run(plan: Plan, own: Run, depth: int, env: dict) -> None:
    """Binds the steps of a run, with their names from a depth on."""
    read = functools.partial(_read, env)
    for step, names in zip(own.steps, own.scopes, strict=True):
        with _place(step.equation.source_info.traceback, names[depth:]):
            found = _results(plan, step, read)
        env.update(zip(step.outputs, found, strict=True))


def _results(plan: Plan, item: Step, read: Callable) -> list[Any]:
    if item in plan.sites:
        site = plan.sites[item]
        return [rewrite.result(site.form, [read(x) for x in site.arrays])]
    args = [read(x) for x in item.inputs]
    if item not in plan.inner:
        return _bound(item.equation, args)
    name, plans = plan.inner[item]
    if item.name == "shard_map":
        return _sharded(item, plans[0], args)
    return _with_inner(item, name, plans, args, read)


def _place(traceback: Any, names: Names):
    """Source lines and names of the program, for what is done in its place."""
    own = source_info_util.NameStack(names)
    stack = source_info_util.current_name_stack() + own
    return source_info_util.user_context(traceback, name_stack=stack)


def _bound(equation, args: list[Any], params: dict | None = None) -> list[Any]:
    """The results of an equation, as JAX evaluates one."""
    primitive = equation.primitive
    own = equation.params if params is None else params
    with equation.ctx.manager:
        out = primitive.bind(*args, **primitive.get_bind_params(own))
    return list(out) if primitive.multiple_results else [out]


# Nodes whose graphs have sites.


def _sharded(node: Node, plan: Plan, args: list[Any]) -> list[Any]:
    params = node.params
    mapped = jax.shard_map(
        lambda *x: tuple(run(plan, x)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(mapped(*args))


def _with_inner(node: Node, name: str, plans, args: list[Any], read) -> list[Any]:
    """Loops, branches and the like, whose jaxprs take what sites capture first."""
    values = list(dict.fromkeys(x for plan in plans for x in plan.captured))
    extra = [read(x) for x in values]
    own = node.params[name]
    several = isinstance(own, tuple)
    jaxprs, arrays = [], []
    for plan, old in zip(plans, own if several else (own,), strict=True):
        jaxpr, consts = _retraced(plan, old, values, extra)
        jaxprs.append(jaxpr)
        arrays.append(consts)
    consts = [x for own in arrays for x in own]
    new = (
        [_with_arguments(x, arrays, i) for i, x in enumerate(jaxprs)]
        if consts
        else jaxprs
    )
    is_closed = hasattr(own[0] if several else own, "consts")
    new = [x if is_closed else x.jaxpr for x in new]
    added = [*consts, *extra]
    params = {**node.params, name: tuple(new) if several else new[0]}
    return _bound(node.equation, *_extended(node, params, args, added))


def _retraced(plan: Plan, old: Any, values: list[Value], extra: list[Any]):
    """The closed jaxpr of a graph with sites, and arrays that it captures."""
    places = [values.index(x) for x in plan.captured]

    def function(*x):
        captured = [x[i] for i in places]
        return run(plan, x[len(extra) :], captured)

    avals = [x.aval for x in getattr(old, "jaxpr", old).invars]
    closed = jax.make_jaxpr(function)(*(jax.typeof(x) for x in extra), *avals)
    return closed, list(closed.consts)


def _with_arguments(closed: Any, arrays: list[list], number: int) -> Any:
    """A closed jaxpr whose constants, and those of the others, are inputs."""
    sizes = [len(x) for x in arrays]
    first, total = sum(sizes[:number]), sum(sizes)

    def function(*x):
        own = x[first : first + sizes[number]]
        return jax.core.eval_jaxpr(closed.jaxpr, own, *x[total:])

    structs = [jax.typeof(x) for own in arrays for x in own]
    return jax.make_jaxpr(function)(*structs, *closed.in_avals)


def _extended(node: Node, params: dict, args: list[Any], added: list[Any]):
    """Parameters and operands of a node with more constants."""
    if not added:
        return args, params
    if node.name == "while":
        first = params["cond_nconsts"]
        count = params["body_nconsts"] + len(added)
        return [*args[:first], *added, *args[first:]], {**params, "body_nconsts": count}
    if node.name == "cond":
        return [args[0], *added, *args[1:]], params
    if node.name == "scan":
        return [*added, *args], _scan_params(params, len(added))
    return [*added, *args], params


def _scan_params(params: dict, count: int) -> dict:
    if "num_consts" in params:
        return {**params, "num_consts": params["num_consts"] + count}
    constants, *others = params["ft_in"].unpack()
    group = _group_of_constants(count + len(constants))
    return {**params, "ft_in": type(params["ft_in"])(group, *others)}


def _group_of_constants(count: int) -> Any:
    """As JAX has it for a scan with so many constants."""

    def function(x, *constants):
        return lax.scan(lambda c, _: (c + sum(constants), None), x, length=2)[0]

    scalars = [jax.ShapeDtypeStruct((), "float32")] * (count + 1)
    equations = jax.make_jaxpr(function)(*scalars).jaxpr.eqns
    (scan,) = (x for x in equations if x.primitive.name == "scan")
    return scan.params["ft_in"].unpack()[0]
