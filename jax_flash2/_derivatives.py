"""Rules of the primitives: forward mode, transposes, second derivatives.

The tangent of the forward is an operation of its own, linear in the tangents, and its
transpose is the backward of FlashAttention-2: reverse mode saves and runs what the
custom_vjp of the kernels would (`_vjp`).

The forward's tangent is made by kernels, if the backend of the call has them for it.
Others are made by the loops of the xla backend, and so are tangents of tangents and of
gradients, whatever the backend of the call. Its loops are plain JAX, so that JAX itself
can push tangents through them (`jax.jvp`, `jax.linearize`, `jax.hessian`), in memory
linear in the sequence length. Along value alone, in which the output is linear, the
tangent is the forward with another value.

The transpose of the backward's tangent (reverse over reverse) needs no pass of its own.
With L(x) = <out(x), do> + <lse(x), dlse>, the backward is g = grad L, and its
derivative along x is a Hessian, which is symmetric: the transpose at u is the tangent
of g along u. The derivative along do and dlse transposed is the tangent of the forward
along u.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from jax_flash2 import _backends, _sharding
from jax_flash2._operation import Operation, Problem, is_differentiable
from jax_flash2._vjp import BACKWARD, FORWARD, forward_backends, serving, to_save
from pallas_kernels.core.axes import Named, sizes, summed_to

_VALUE = 2  # the place of value among the operands


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


def _absent(dtype) -> Named:
    """Stands for a tangent that is zero: it costs no memory, and no operation."""
    return Named(np.zeros((), dtype), ())


def _present(operands, tangents) -> dict[int, Named]:
    """The tangents that are not zero, by the places of their operands."""
    pairs = zip(_places(operands), tangents, strict=True)
    return {i: x for i, x in pairs if x.axes or not operands[i].axes}


def _with_axes_of(x: Named, other: Named) -> Named:
    """`x`, repeated along the axes that only `other` has: one of two may be mapped."""
    missing = tuple(a for a in other.axes if a is not None and a not in x.axes)
    size = sizes([x, other])
    shape = (*(size[a] for a in missing), *x.shape)
    return Named(jnp.broadcast_to(x.value, shape), (*missing, *x.axes))


def _repeated_to(x: Named, like: Named) -> jax.Array:
    return jnp.broadcast_to(x.to(like.axes), like.shape)


def _tangent(kind: _Kind) -> _Kind:
    """The derivative of an operation along a tangent of each differentiable operand.

    Its operands are those of the operation, what is saved, and the tangents.
    """
    operation = kind.operation

    def rule(problem: Problem, operands):
        primals, tangents = kind.parts(problem, operands)
        wanted = operation.outputs(problem, operands)
        made = _made(operation, problem, primals, tangents)
        if made is not None:
            saved = operands[len(primals) : len(operands) - len(tangents)]
            return _by_kernels(made, problem, (primals, saved, tangents), wanted)
        own, results = _pushed(operation, problem, list(primals), tangents)
        named = (Named(x, a.axes) for x, a in zip(results, own, strict=True))
        return [_repeated_to(x, b) for x, b in zip(named, wanted, strict=True)]

    def arity(problem: Problem, operands) -> int:
        count = kind.arity(problem, operands)
        saved = len(operation.outputs(problem, operands[:count])) * kind.saves
        return count + saved + len(_places(operands[:count]))

    def backends(problem: Problem, operands) -> tuple[str, ...]:
        primals, tangents = kind.parts(problem, operands)
        if _along_value(operation, primals, tangents) is not None:
            return forward_backends(problem, primals)
        made = _made(operation, problem, primals, tangents)
        return (_backends.of_tangents() if made is None else made.name,)

    def unread(problem: Problem, operands):
        """What the operation does not read, its tangents, and what is saved."""
        primals, tangents = kind.parts(problem, operands)
        first = len(operands) - len(tangents)
        at = {i: first + number for number, i in enumerate(_places(primals))}
        saved = range(len(primals), first)
        return {
            result: (*places, *saved, *(at[i] for i in places if i in at))
            for result, places in operation.unread(problem, primals).items()
        }

    name = f"{operation.name}_tangent"
    return _Kind(Operation(name, rule, operation.outputs, backends, unread), arity)


def _along_value(operation: Operation, primals, tangents) -> Named | None:
    """The tangent of value, if the forward has no other."""
    present = _present(primals, tangents)
    return present[_VALUE] if operation is FORWARD and [*present] == [_VALUE] else None


def _made(operation: Operation, problem: Problem, primals, tangents):
    """Who has a kernel for the tangent of an operation, and its plan; or None."""
    by_value = _along_value(operation, primals, tangents) is not None
    is_empty = 0 in sizes([*primals, *tangents]).values()
    if operation is not FORWARD or by_value or is_empty:
        return None
    name, call = serving(problem, primals)
    made = _backends.tangents(name, call, is_named=problem.is_named)
    return None if _backends.BACKENDS[made.name].has_tangents else made


def _by_kernels(made: _backends.Made, problem: Problem, parts, outputs):
    """The tangent of the forward; `parts` are primals, what is saved, and tangents."""
    primals, saved, tangents = parts
    present, names = _present(primals, tangents), problem.places.items()
    along = {name: present[i] for name, i in names if i in present}
    call = problem.call(primals)
    return _backends.module(made.name).tangent(made.plan, call, saved, along, outputs)


def _pushed(operation: Operation, problem: Problem, primals: list[Named], tangents):
    """Structs of the tangents of an operation's results, and their arrays."""

    def static(**changes) -> Problem:
        axes = tuple(x.axes for x in primals[: len(problem.axes)])
        return dataclasses.replace(problem, axes=axes, **changes)

    value = _along_value(operation, primals, tangents)
    if value is not None:
        primals[_VALUE] = value
        here = static()
        o, lse = operation.rule(here, primals)
        return operation.outputs(here, primals), (o, jnp.zeros_like(lse))
    present = _present(primals, tangents)
    for i, x in present.items():
        primals[i] = _with_axes_of(primals[i], x)
    here = static(backend=_backends.of_tangents())

    def function(*values):
        operands = list(primals)
        for i, value in zip(present, values, strict=True):
            operands[i] = Named(value, primals[i].axes)
        return tuple(operation.rule(here, operands))

    points = tuple(primals[i].value for i in present)
    along = (
        _with_axes_of(x, primals[i]).to(primals[i].axes) for i, x in present.items()
    )
    _, results = jax.jvp(function, points, tuple(along))
    return operation.outputs(here, primals), results


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
        problem, saved, constant = problem.differentiated, [], []
        if kind.saves:
            constant = results[2:]
            results = to_save(*results[:2])
            structs = operation.results(problem, operands)
            saved = [Named(x, s.axes) for x, s in zip(results, structs, strict=True)]
        given = [
            _absent(operands[i].dtype)
            if isinstance(tangents[i], ad.Zero)
            else Named(tangents[i], axes[i])
            for i in _places(operands)
        ]
        along = _call(derived, problem, *operands, *saved, *given)
        zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in constant]
        return [*results, *constant], [*(x.value for x in along), *zeros]

    def jvp_of_tangent(*args, **params):
        """Of a higher order: made when it is first asked for."""
        _differentiate(derived)
        return ad.primitive_jvps[tangent.primitive](*args, **params)

    ad.primitive_jvps[operation.primitive] = jvp
    ad.primitive_jvps[tangent.primitive] = jvp_of_tangent
    ad.primitive_transposes[tangent.primitive] = _transpose(kind, derived, transposed)
    return derived


def _transpose(kind: _Kind, derived: _Kind, rule: Callable) -> Callable:
    """The transpose of the tangent of an operation.

    Args:
      kind: of the operation.
      derived: of its tangent.
      rule: of the problem, what the tangent takes beside tangents, a cotangent of each
        result, and which tangents it is linear in; returns what each of these gets.
    """

    def transpose(cotangents, *arrays, problem: Problem, axes, marker):
        del marker
        operands = _operands(arrays, axes)
        grads = _instantiated(derived.operation, problem, operands, cotangents)
        count = len(operands) - len(kind.parts(problem, operands)[1])
        linear = list(map(ad.is_undefined_primal, arrays[count:]))
        found = rule(problem, operands[:count], grads, linear)
        return [None] * count + [
            _cotangent(x, like) if ad.is_undefined_primal(array) else None
            for x, array, like in zip(
                found, arrays[count:], operands[count:], strict=True
            )
        ]

    return transpose


def _at_zero(problem: Problem, operands) -> tuple[list[Named], list[Named]]:
    """A call with zeros for value: its operands, output and log-sum-exp; the rest.

    The output is linear in value: where value is not known, it is the tangent along
    value there, or anywhere.
    """
    value = operands[_VALUE]
    zeros = Named(jnp.zeros(value.shape, value.dtype), value.axes)
    operands = [*operands[:_VALUE], zeros, *operands[_VALUE + 1 :]]
    o, lse, *others = _call(_FORWARD, problem, *operands)
    return [*operands, *_zeros([o]), lse], others


def _partly_known(trace, *tracers, problem: Problem, axes, marker):
    """Evaluates the forward before its value is known: the log-sum-exp does not wait.

    So `jax.linear_transpose` may take a function that uses all results.
    """
    if [i for i, x in enumerate(tracers) if not x.is_known()] != [_VALUE]:
        params = {"problem": problem, "marker": marker, "axes": axes}
        return trace.default_process_primitive(FORWARD.primitive, tracers, params)
    known = [x.pval.get_known() if x.is_known() else x.aval for x in tracers]
    saved, others = _at_zero(problem, list(map(Named, known, axes)))
    absent = [_absent(x.dtype) for x in map(saved.__getitem__, _places(saved[:-2]))]
    absent[_VALUE] = Named(tracers[_VALUE], axes[_VALUE])
    operands = [*saved, *absent]
    own = tuple(x.axes for x in operands)
    params = {"problem": problem.differentiated, "marker": marker, "axes": own}
    values = [x.value for x in operands]
    tangent = _FORWARD_TANGENT.operation.primitive
    o, _ = trace.default_process_primitive(tangent, values, params)
    return o, saved[-1].value, *(x.value for x in others)


def _by_value(cotangents, *arrays, problem: Problem, axes, marker):
    """The transpose of the forward by value."""
    del marker
    linear = [i for i, x in enumerate(arrays) if ad.is_undefined_primal(x)]
    if linear != [_VALUE]:
        raise NotImplementedError(
            "attention is linear in value alone, and has no transpose by others of its "
            "arguments"
        )
    operands, problem = _operands(arrays, axes), problem.differentiated
    do, dlse = _instantiated(FORWARD, problem, operands, cotangents[:2])
    known, _ = _at_zero(problem, operands)
    gradients = _call(_BACKWARD, problem, *known, do, *_zeros([dlse]))
    dv = gradients[_VALUE]
    found: list = [None] * len(arrays)
    found[_VALUE] = _cotangent(dv, operands[_VALUE])
    return found


def _by_cotangents(cotangents, *arrays, problem: Problem, axes, marker):
    """The transpose of the backward by do and dlse, in which it is linear."""
    del marker
    operands = _operands(arrays, axes)
    first = len(problem.axes) + 2
    if any(map(ad.is_undefined_primal, arrays[:first])):
        raise NotImplementedError(
            "gradients of attention are linear in cotangents alone, and have no "
            "transpose by others of its arguments"
        )
    structs = BACKWARD.results(problem, operands)
    along = [
        _absent(s.dtype) if isinstance(x, ad.Zero) else Named(x, s.axes)
        for x, s in zip(cotangents, structs, strict=True)
    ]
    problem, along = _of_all(problem, operands[: first - 2], along)
    found = _call(_FORWARD_TANGENT, problem, *operands[:first], *along)
    pairs = zip(found, arrays[first:], operands[first:], strict=True)
    return [None] * first + [
        _cotangent(x, like) if ad.is_undefined_primal(array) else None
        for x, array, like in pairs
    ]


def _operands(arrays, axes) -> list[Named]:
    """Of a transpose: arrays, and types of what it is linear in."""
    return [
        Named(x.aval if ad.is_undefined_primal(x) else x, a)
        for x, a in zip(arrays, axes, strict=True)
    ]


def _instantiated(operation: Operation, problem: Problem, operands, cotangents):
    """Cotangents of an operation's results, as arrays."""
    structs = operation.results(problem, operands)
    pairs = zip(cotangents, structs, strict=True)
    return [Named(ad.instantiate_zeros(x), s.axes) for x, s in pairs]


def _cotangent(x: Named, like: Named):
    """What an operand gets of the gradient for each element of a map."""
    x = Named(summed_to(x, like.axes).astype(like.dtype), like.axes)
    return _sharding.divided_as(_repeated_to(x, like), like.value)


def _call(kind: _Kind, problem: Problem, *operands: Named) -> list[Named]:
    axes = tuple(x.axes for x in operands)
    results = kind.operation(*(x.value for x in operands), problem=problem, axes=axes)
    structs = kind.operation.results(problem, operands)
    return [Named(x, struct.axes) for x, struct in zip(results, structs, strict=True)]


def _zeros(operands: Sequence[Named]) -> list[Named]:
    return [Named(jnp.zeros_like(x.value), x.axes) for x in operands]


def _names(problem: Problem, operands) -> list[str]:
    """Of the operands that have gradients, in order: those of `_places`."""
    places = problem.places.items()
    return [name for name, i in places if is_differentiable(operands[i])]


def _of_forward(problem: Problem, saved, cotangents, linear) -> list[Named | None]:
    """Of the forward's tangent: the backward pass. None where nobody asks."""
    names = _names(problem, saved)
    problem = problem.asking(dict(zip(names, linear, strict=True)))
    found = iter(_call(_BACKWARD, problem, *saved, *cotangents))
    return [None if name in problem.unasked else next(found) for name in names]


def _of_all(problem: Problem, operands, along) -> tuple[Problem, list[Named]]:
    """The problem of all gradients, of which those that were not asked for get 0.

    Args:
      operands: of the call.
      along: of each gradient that the problem has.
    """
    given = iter(along)
    along = [
        _absent(operands[problem.places[name]].dtype)
        if name in problem.unasked
        else next(given)
        for name in _names(problem, operands)
    ]
    return problem.asking({}), along


def _of_backward(problem: Problem, known, along, linear) -> list[Named]:
    """Of the backward's tangent, whose results have the cotangents `along`."""
    del linear
    *saved, do, dlse = known
    problem, along = _of_all(problem, saved, along)
    of_out, of_gradients = _along(problem, saved, (do, dlse), along)
    return [*of_gradients, *_zeros(saved[-2:]), *of_out]


def _of_forward_tangent(problem: Problem, known, cotangents, linear) -> list[Named]:
    """Of the tangent of the forward's tangent (reverse over forward)."""
    del linear
    count = len(problem.axes) + 2
    saved, along = known[:count], known[count:]
    _, of_gradients = _along(problem, saved, cotangents, along)
    gradients = _call(_BACKWARD, problem, *saved, *cotangents)
    return [*of_gradients, *_zeros(saved[-2:]), *gradients]


def _along(problem: Problem, saved, cotangents, along):
    """Tangents of the forward's results, and of its gradients for the cotangents.

    That o and lse, the last of `saved`, follow from the operands is in them.
    """
    of_out = _call(_FORWARD_TANGENT, problem, *saved, *along)
    tangents = (*along, *of_out, *(_absent(x.dtype) for x in cotangents))
    return of_out, _call(_BACKWARD_TANGENT, problem, *saved, *cotangents, *tangents)


_FORWARD = _Kind(FORWARD, lambda problem, _: len(problem.axes), saves=True)
_BACKWARD = _Kind(BACKWARD, lambda problem, _: len(problem.axes) + 4)
_FORWARD_TANGENT = _differentiate(_FORWARD, _of_forward)
_BACKWARD_TANGENT = _differentiate(_BACKWARD, _of_backward)
_differentiate(_FORWARD_TANGENT, _of_forward_tangent)
pe.custom_partial_eval_rules[FORWARD.primitive] = _partly_known
ad.primitive_transposes[FORWARD.primitive] = _by_value
ad.primitive_transposes[BACKWARD.primitive] = _by_cotangents
