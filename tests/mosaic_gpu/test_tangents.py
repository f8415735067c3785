"""The tangent kernel for Hopper, which runs only by name: in JAX's interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import _api, _backends, _operation
from jax_flash2._vjp import Problem
from pallas_kernels.core.axes import Named, batch_axes
from pallas_kernels.mosaic_gpu import support
from tests import mosaic_interpreter, tolerances
from tests.cases import ON_GPU, by_name
from tests.kernels import test_tangents
from tests.mosaic import with_heads
from tests.tiers import deep

NAME = "mosaic_gpu_tangent"


def pushed(operands, tangents, arguments, absent=()):
    """As of `test_tangents`, of what the backend's own kernels make."""
    backend = _backends.module(NAME)
    arrays = list(operands.values())
    call = _api.given(*arrays, **arguments, implementation=NAME).checked()
    problem = Problem.of(call, NAME, is_named=True)
    plans = {x: backend.plan(call, x) for x in ("forward", "tangent")}

    @jax.jit
    def run(arrays, tangents):
        with support.lowering_context():
            named = list(map(Named, arrays, problem.axes))
            rows = (*batch_axes(named), "t", "n")
            structs = _operation.forward_outputs(problem, named)
            call = problem.named(arrays)
            found = backend.forward(plans["forward"], call, structs)
            o, lse = (Named(x, s.axes) for x, s in zip(found, structs, strict=True))
            along = {
                name: Named(tangents[name], x.axes)
                for name, x in zip(operands, named, strict=False)
                if name not in absent
            }
            found = backend.tangent(plans["tangent"], call, (o, lse), along, structs)
            do, dlse = (Named(x, s.axes) for x, s in zip(found, structs, strict=True))
            return lse.to(rows), do.to((*rows, "d")), dlse.to(rows)

    found = run(tuple(x.value for x in call.operands), tangents)
    names = "lse", "tangent", "lse tangent"
    return {n: np.asarray(x, np.float64) for n, x in zip(names, found, strict=True)}
