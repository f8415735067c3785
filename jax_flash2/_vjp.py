"""The custom_vjp of the kernels: which results are kept between the passes."""

from __future__ import annotations

import functools

import jax

from jax_flash2 import _backends, _derivatives, _operation, _reference, _sharding
from jax_flash2._operation import Problem, is_differentiable
from pallas_kernels.backend import Call


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(problem: Problem, arrays):
    return _operation.forward(problem, arrays)


def _flash_forward(problem: Problem, arrays):
    o, lse = _operation.to_save(*_operation.forward(problem, arrays))
    return (o, lse), (arrays, o, lse)


def _flash_backward(problem: Problem, saved, cotangents):
    arrays, o, lse = saved
    gradients = iter(_operation.backward(problem, arrays, o, lse, *cotangents))
    return (
        tuple(
            _sharding.divided_as(next(gradients), x) if is_differentiable(x) else None
            for x in arrays
        ),
    )


_flash.defvjp(_flash_forward, _flash_backward)


@functools.partial(jax.jit, static_argnums=0)
def attend(problem: Problem, arrays: tuple) -> tuple[jax.Array, jax.Array]:
    """Output and lse (rows last) of a call, differentiable.

    Jitted, so that equal calls of a program (the layers of a model) are traced and
    lowered once.
    """
    arrays = _sharding.varying_alike(arrays)
    if problem.backend == _backends.REFERENCE:
        return _reference.attend(problem, arrays)
    if _backends.BACKENDS[problem.backend].has_tangents:
        return _operation.forward(problem, arrays)
    return _flash(problem, arrays)


def run(call: Call, implementation: str | None) -> tuple[jax.Array, jax.Array]:
    """Output and lse (rows last) of a call on one device."""
    backend = _backends.choose(implementation, call)
    problem = Problem.of(call, backend, is_named=implementation is not None)
    with _derivatives.named_mode(problem.backend):
        return attend(problem, tuple(x.value for x in call.operands))
