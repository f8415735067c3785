"""Differentiation rules of the xla backend, forward mode included.

Its loops are plain JAX, so that JAX itself can push tangents through them (`jax.jvp`,
`jax.linearize`, `jax.hessian`), in memory linear in the sequence length. The tangent of
the forward is an operation of its own, linear in the tangents, and its transpose is the
backward of FlashAttention-2: reverse mode saves and runs what the kernels' custom_vjp
would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_flash2._operation import (
    BACKWARD,
    FORWARD,
    Operation,
    Problem,
    backward_outputs,
    forward_outputs,
    is_differentiable,
    to_save,
)
from pallas_kernels.core.axes import Named, sizes, summed_to

BACKENDS = ("xla",)


def check_mode(backend: str, arrays) -> None:
    """Raises a TypeError in forward mode over kernels, where it can be seen from here.

    A custom_vjp has reverse mode alone. In the derivative of a function that was jitted
    before, JAX says so by itself.
    """
    forward = any(isinstance(x, ad.JVPTracer) for x in arrays)
    if forward and backend == "triton":
        raise TypeError(
            "implementation='triton' has no forward mode (jax.jvp, jax.jacfwd, "
            "jax.hessian): got tangents; pass implementation='xla', which has"
        )


@dataclasses.dataclass(frozen=True)
class _Kind:
    """An operation that has a tangent.

    Attributes:
      operation: the operation.
      arity: of the problem and its first operands, at least: how many it has.
      saves: whether the tangent takes the results too, for its transpose.
    """

    operation: Operation
    arity: Callable[[Problem, Sequence[Named]], int]
    saves: bool = False

    def parts(self, problem: Problem, operands):
        """Operands of the operation; the tangents."""
        count = self.arity(problem, operands)
        saved = len(self.operation.outputs(problem, operands[:count]))
        return operands[:count], operands[count + saved * self.saves :]


def _places(operands) -> list[int]:
    return [i for i, x in enumerate(operands) if is_differentiable(x)]


def _with_axes_of(x: Named, other: Named) -> Named:
    """`x`, repeated along the axes that only `other` has: one of two may be mapped."""
    missing = tuple(a for a in other.axes if a is not None and a not in x.axes)
    size = sizes([x, other])
    shape = (*(size[a] for a in missing), *x.shape)
    return Named(jnp.broadcast_to(x.value, shape), (*missing, *x.axes))


def _tangent(kind: _Kind) -> _Kind:
    """The derivative of an operation along a tangent of each differentiable operand.

    Its operands are those of the operation, what is saved, and the tangents.
    """
    operation = kind.operation

    def rule(problem: Problem, operands):
        primals, tangents = map(list, kind.parts(problem, operands))
        places = _places(primals)
        for i, x in zip(places, tangents, strict=True):
            primals[i] = _with_axes_of(primals[i], x)
        axes = tuple(x.axes for x in primals[: len(problem.axes)])
        here = dataclasses.replace(problem, axes=axes)

        def function(*values):
            operands = list(primals)
            for i, value in zip(places, values, strict=True):
                operands[i] = Named(value, primals[i].axes)
            return tuple(operation.rule(here, operands))

        points = tuple(primals[i].value for i in places)
        along = (
            _with_axes_of(x, primals[i]).to(primals[i].axes)
            for i, x in zip(places, tangents, strict=True)
        )
        _, results = jax.jvp(function, points, tuple(along))
        own = operation.outputs(here, primals)
        wanted = operation.outputs(problem, operands)
        return [
            jnp.broadcast_to(Named(x, a.axes).to(b.axes), b.shape)
            for x, a, b in zip(results, own, wanted, strict=True)
        ]

    def arity(problem: Problem, operands) -> int:
        count = kind.arity(problem, operands)
        saved = len(operation.outputs(problem, operands[:count])) * kind.saves
        return count + saved + len(_places(operands[:count]))

    tangent = Operation(f"{operation.name}_tangent", rule, operation.outputs)
    return _Kind(tangent, arity)


def _differentiate(kind: _Kind) -> Operation:
    """Gives an operation its rule for `jax.jvp`; returns its tangent."""
    operation = kind.operation
    derived = _tangent(kind)
    tangent = derived.operation

    def jvp(arrays, tangents, *, problem, axes, sign):
        del sign
        results = operation(*arrays, problem=problem, axes=axes)
        operands = list(map(Named, arrays, axes))
        places = _places(operands)
        given = [ad.instantiate_zeros(tangents[i]) for i in places]
        saved, saved_axes = (), ()
        if kind.saves:
            saved = results = to_save(*results)
            saved_axes = tuple(x.axes for x in operation.outputs(problem, operands))
        axes = (*axes, *saved_axes, *(axes[i] for i in places))
        along = tangent(*arrays, *saved, *given, problem=problem, axes=axes)
        return list(results), along

    def jvp_of_tangent(*args, **params):
        """Of a higher order: made when it is first asked for."""
        _differentiate(derived)
        return ad.primitive_jvps[tangent.primitive](*args, **params)

    ad.primitive_jvps[operation.primitive] = jvp
    ad.primitive_jvps[tangent.primitive] = jvp_of_tangent
    ad.primitive_transposes[tangent.primitive] = _no_transpose
    return tangent


def _no_transpose(*_, **__):
    raise NotImplementedError(
        "reverse mode of a derivative of attention: differentiate forward over reverse "
        "(jax.hessian, jax.jvp of jax.grad), or pass implementation='reference', which "
        "takes memory quadratic in the sequence length"
    )


def _transpose(cotangents, *arrays, problem: Problem, axes, sign):
    """Of the tangent of the forward: the backward pass."""
    del sign
    count = len(problem.axes)
    avals = [x.aval if ad.is_undefined_primal(x) else x for x in arrays]
    operands = list(map(Named, avals, axes))
    results = forward_outputs(problem, operands)
    grads = list(map(ad.instantiate_zeros, cotangents))
    all_axes = (*axes[: count + 2], *(x.axes for x in results))
    all_arrays = (*arrays[: count + 2], *grads)
    gradients = BACKWARD(*all_arrays, problem=problem, axes=all_axes)
    structs = backward_outputs(problem, list(map(Named, all_arrays, all_axes)))
    found = [
        summed_to(Named(g, struct.axes), x.axes).astype(x.dtype)
        for g, struct, x in zip(gradients, structs, operands[count + 2 :], strict=True)
    ]
    wanted = map(ad.is_undefined_primal, arrays[count + 2 :])
    unknown = [x if w else None for x, w in zip(found, wanted, strict=True)]
    return [*[None] * (count + 2), *unknown]


_forward_tangent = _differentiate(
    _Kind(FORWARD, lambda problem, _: len(problem.axes), saves=True)
)
ad.primitive_transposes[_forward_tangent.primitive] = _transpose
_differentiate(_Kind(BACKWARD, lambda problem, _: len(problem.axes) + 4))
