"""The custom_vjp of the kernels, inside the two primitives that calls bind.

`flash2` joins the two passes of FlashAttention-2: a forward kernel whose output and
log-sum-exp are kept, and backward kernels that compute the scores again from them. It
is the one `jax.custom_vjp` around the kernels, and what JAX needs to differentiate
them.

What a call binds is not the custom_vjp but `FORWARD`, a primitive that lowers to it.
JAX can neither push tangents through a custom_vjp nor transpose it, and with it the
axis that `jax.vmap` maps over comes first. A primitive has rules for all of that
(`_operation` for `vmap`, `_derivatives` for the others). In reverse mode they keep what
the custom_vjp keeps, and bind `BACKWARD`, which lowers to its backward half: a gradient
runs the same kernels either way.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_flash2 import _backends, _reference
from jax_flash2._operation import (
    Operation,
    Problem,
    backward_outputs,
    forward_outputs,
    is_differentiable,
    of_value_alone,
    wanted_gradients,
)
from pallas_kernels.backend import Call, Pass, Plan
from pallas_kernels.core.axes import Axes, Named, sizes, varying_alike


def serving(problem: Problem, operands) -> tuple[str, Call]:
    """The backend of a call, with all the axes that it has by now, and the call."""
    call = problem.call(operands[: len(problem.axes)])
    return _backends.again(problem.backend, call, is_named=problem.is_named), call


def forward_backends(problem: Problem, operands) -> tuple[str, ...]:
    name, _ = serving(problem, operands)
    return (name,)


def _makers(problem: Problem, operands) -> dict[Pass, _backends.Made]:
    """The backend and the plan of each pass of the gradients."""
    name, call = serving(problem, operands)
    found = _backends.served(name, call, is_named=problem.is_named)
    del found["forward"]
    return found


def _backward_backends(problem: Problem, operands) -> tuple[str, ...]:
    return tuple({made.name: None for made in _makers(problem, operands).values()})


def _forward(problem: Problem, operands):
    """The results of `Named` operands (`forward_outputs`)."""
    o, *of_rows = outputs = forward_outputs(problem, operands)
    if 0 in sizes(operands).values():
        return [
            jnp.zeros(o.shape, o.dtype),
            *(jnp.full(x.shape, -jnp.inf, x.dtype) for x in of_rows),
        ]
    name, call = serving(problem, operands)
    made = _backends.served(name, call, is_named=problem.is_named)["forward"]
    return _backends.module(name).forward(made.plan, call, outputs)


def _backward(problem: Problem, operands):
    """Gradients of `Named` operands, that o, lse, do and dlse follow."""
    wanted = wanted_gradients(problem, operands)
    if 0 in sizes(operands).values():
        return [jnp.zeros(x.shape, x.dtype) for x in wanted.values()]
    arrays, saved = operands[: len(problem.axes)], operands[len(problem.axes) :]
    call, found = problem.call(arrays), {}
    asked = {_pass_of(name, call) for name in wanted}
    makers = _makers(problem, operands)
    for name in dict.fromkeys(made.name for made in makers.values()):
        plans: dict[Pass, Plan] = {
            x: made.plan
            for x, made in makers.items()
            if made.name == name and x in asked
        }
        own = {n: x for n, x in wanted.items() if _pass_of(n, call) in plans}
        if plans:
            found |= _backends.module(name).backward(plans, call, saved, own)
    return [found[name] for name in wanted]


def _pass_of(name: str, call: Call) -> Pass:
    """The pass that makes the gradient of an operand."""
    return "operand_gradients" if name in call.spec.score.operands else "backward"


def _axes_of_backward(problem: Problem, arrays) -> tuple[Axes, ...]:
    """Of the operands, o, lse, do and dlse."""
    operands = list(map(Named, arrays, problem.axes))
    o, lse = (x.axes for x in forward_outputs(problem, operands)[:2])
    return (*problem.axes, o, lse, o, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash2(problem: Problem, arrays: tuple) -> tuple[jax.Array, ...]:
    """The results of a problem with these arrays."""
    return tuple(_forward(problem, list(map(Named, arrays, problem.axes))))


def _saved(problem: Problem, arrays: tuple):
    """The forward half: its results, and what the backward takes."""
    results = flash2(problem, arrays)
    return results, (arrays, *results[:2])


def _gradients(problem: Problem, saved, cotangents):
    """The backward half."""
    arrays, o, lse = saved
    values = (*arrays, o, lse, *cotangents[:2])
    operands = list(map(Named, values, _axes_of_backward(problem, arrays)))
    found = iter(_backward(problem, operands))
    return (tuple(next(found) if is_differentiable(x) else None for x in arrays),)


flash2.defvjp(_saved, _gradients)


def _forward_rule(problem: Problem, operands):
    if _backends.BACKENDS[problem.backend].has_tangents:
        return _forward(problem, operands)  # JAX pushes tangents through its loops
    return list(flash2(problem, tuple(x.value for x in operands)))


def _unread_forward(problem: Problem, _):
    of_rows = range(1, 2 + problem.gives_largest)
    return dict.fromkeys(of_rows, of_value_alone(problem))


def _unread_backward(problem: Problem, _):
    """dv depends neither on value, nor on o and dlse."""
    o = len(problem.axes)
    return {2: (2, o, o + 3)}


FORWARD = Operation(
    "flash2_forward",
    _forward_rule,
    forward_outputs,
    forward_backends,
    _unread_forward,
)
BACKWARD = Operation(
    "flash2_backward",
    _backward,
    backward_outputs,
    _backward_backends,
    _unread_backward,
)


# Names for `jax.checkpoint_policies.save_only_these_names`.
OUTPUT_NAME = "flash2_output"
LSE_NAME = "flash2_lse"


def to_save(o, lse) -> tuple[jax.Array, jax.Array]:
    """The results that the backward takes, with their names for `jax.checkpoint`."""
    return checkpoint_name(o, OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)


def forward(problem: Problem, arrays) -> tuple[jax.Array, ...]:
    """Output (axes of query, head size that of value) and lse (rows last).

    And the largest scores, like lse, if the problem has them.
    """
    return tuple(FORWARD(*arrays, problem=problem, axes=problem.axes))


def backward(problem: Problem, arrays, o, lse, do, dlse) -> dict[str, jax.Array]:
    """Gradients of the operands that are differentiable, by name."""
    problem = problem.differentiated
    axes = _axes_of_backward(problem, arrays)
    values = (*arrays, o, lse, do, dlse)
    wanted = wanted_gradients(problem, list(map(Named, values, axes)))
    found = BACKWARD(*values, problem=problem, axes=axes)
    return dict(zip(wanted, found, strict=True))


@functools.partial(jax.jit, static_argnums=0)
def attend(problem: Problem, arrays: tuple) -> tuple[jax.Array, ...]:
    """Output and lse (rows last) of a call, differentiable; and what `forward` adds.

    Jitted, so that equal calls of a program (the layers of a model) are traced and
    lowered once.
    """
    arrays = varying_alike(arrays)
    if problem.backend == _backends.REFERENCE:
        return _reference.attend(problem, arrays)
    return forward(problem, arrays)


def run(call: Call, implementation: str | None) -> tuple[jax.Array, ...]:
    """What `attend` gives for a call on one device."""
    backend = _backends.choose(implementation, call)
    problem = Problem.of(call, backend, is_named=implementation is not None)
    return attend(problem, tuple(x.value for x in call.operands))
