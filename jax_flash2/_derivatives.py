"""Differentiation rules: forward mode, second derivatives.

The loops of the xla backend are plain JAX, so that JAX itself can push tangents through
them (`jax.jvp`, `jax.linearize`, `jax.hessian`), in memory linear in the sequence
length. The tangent of the forward is an operation of its own, linear in the tangents,
and its transpose is the backward of FlashAttention-2: reverse mode saves and runs what
the kernels' custom_vjp would.

The transpose of the backward's tangent (reverse over reverse) needs no pass of its own.
With L(x) = <out(x), do> + <lse(x), dlse>, the backward is g = grad L, and its
derivative along x is a Hessian, which is symmetric: the transpose at u is the tangent
of g along u. The derivative along do and dlse transposed is the tangent of the forward
along u.

So too for the kernels: their tangents run as loops of the xla backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_flash2 import _backends, _sharding
from jax_flash2._operation import (
    BACKWARD,
    FORWARD,
    Operation,
    Problem,
    is_differentiable,
    to_save,
)
from pallas_kernels.core.axes import Named, sizes, summed_to


@contextlib.contextmanager
def named_mode(backend: str):
    """Rewrites JAX's TypeError for forward mode over a custom_vjp to name a solution.

    JAX's own message remains if the differentiated function was already jitted.
    """
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            f"implementation={backend!r} supports forward mode (jax.jvp, jax.jacfwd) "
            "only on top of reverse mode, got tangents without reverse mode: pass "
            "implementation='xla'"
        ) from error


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
        backend = _backends.of_tangents()
        here = dataclasses.replace(problem, axes=axes, backend=backend)

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


def _no_transpose(*_, **__):
    raise NotImplementedError(
        "attention does not support reverse mode on top of a second derivative: use "
        "forward mode (jax.jvp) for the outermost derivative, or pass "
        "implementation='reference', whose memory is quadratic in the sequence length"
    )


def _differentiate(kind: _Kind, transposed: Callable = _no_transpose) -> _Kind:
    """Gives an operation its rule for `jax.jvp`; returns its tangent.

    Args:
      kind: of the operation.
      transposed: rule for the transpose of the tangent (`_transpose`).
    """
    operation = kind.operation
    derived = _tangent(kind)
    tangent = derived.operation

    def jvp(arrays, tangents, *, problem, axes, marker):
        del marker
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
    ad.primitive_transposes[tangent.primitive] = _transpose(kind, transposed)
    return derived


def _transpose(kind: _Kind, rule: Callable) -> Callable:
    """The transpose of the tangent of an operation.

    Args:
      kind: of the operation.
      rule: of the problem, what the tangent takes beside tangents, and a cotangent of
        each result; returns what each tangent gets.
    """

    def transpose(cotangents, *arrays, problem: Problem, axes, marker):
        del marker
        operands = [
            Named(x.aval if ad.is_undefined_primal(x) else x, a)
            for x, a in zip(arrays, axes, strict=True)
        ]
        outputs = kind.operation.outputs(problem, operands)
        grads = [
            Named(ad.instantiate_zeros(x), out.axes)
            for x, out in zip(cotangents, outputs, strict=True)
        ]
        count = len(operands) - len(kind.parts(problem, operands)[1])
        found = rule(problem, operands[:count], grads)
        wanted = zip(found, arrays[count:], operands[count:], strict=True)
        return [None] * count + [
            _sharding.divided_as(summed_to(x, like.axes).astype(like.dtype), like.value)
            if ad.is_undefined_primal(array)
            else None
            for x, array, like in wanted
        ]

    return transpose


def _call(kind: _Kind, problem: Problem, *operands: Named) -> list[Named]:
    axes = tuple(x.axes for x in operands)
    results = kind.operation(*(x.value for x in operands), problem=problem, axes=axes)
    structs = kind.operation.outputs(problem, operands)
    return [Named(x, struct.axes) for x, struct in zip(results, structs, strict=True)]


def _zeros(operands: Sequence[Named]) -> list[Named]:
    return [Named(jnp.zeros_like(x.value), x.axes) for x in operands]


def _of_forward(problem: Problem, saved, cotangents) -> list[Named]:
    """Of the forward's tangent: the backward pass."""
    return _call(_BACKWARD, problem, *saved, *cotangents)


def _of_backward(problem: Problem, known, along) -> list[Named]:
    """Of the backward's tangent, whose results have the cotangents `along`."""
    *saved, do, dlse = known
    of_out, of_gradients = _along(problem, saved, (do, dlse), along)
    return [*of_gradients, *_zeros(saved[-2:]), *of_out]


def _of_forward_tangent(problem: Problem, known, cotangents) -> list[Named]:
    """Of the tangent of the forward's tangent (reverse over forward)."""
    count = len(problem.axes) + 2
    saved, along = known[:count], known[count:]
    _, of_gradients = _along(problem, saved, cotangents, along)
    gradients = _of_forward(problem, saved, cotangents)
    return [*of_gradients, *_zeros(saved[-2:]), *gradients]


def _along(problem: Problem, saved, cotangents, along):
    """Tangents of the forward's results, and of its gradients for the cotangents.

    That o and lse, the last of `saved`, follow from the operands is in them.
    """
    of_out = _call(_FORWARD_TANGENT, problem, *saved, *along)
    tangents = (*along, *of_out, *_zeros(cotangents))
    return of_out, _call(_BACKWARD_TANGENT, problem, *saved, *cotangents, *tangents)


_FORWARD = _Kind(FORWARD, lambda problem, _: len(problem.axes), saves=True)
_BACKWARD = _Kind(BACKWARD, lambda problem, _: len(problem.axes) + 4)
_FORWARD_TANGENT = _differentiate(_FORWARD, _of_forward)
_BACKWARD_TANGENT = _differentiate(_BACKWARD, _of_backward)
_differentiate(_FORWARD_TANGENT, _of_forward_tangent)
