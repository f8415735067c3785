"""The two halves of attention, forward and backward, as operations that batch in place.

Each half is a JAX primitive whose parameters name the axes of its operands. `jax.vmap`
adds a name where the mapped axis lies, so that no operand is transposed or repeated and
an unmapped one is shared; the backend sees one more batch axis.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_flash2 import _backends, _partitioner, _sharding
from pallas_kernels import device
from pallas_kernels.backend import Call
from pallas_kernels.configs import Config
from pallas_kernels.core.axes import Axes, Named, batch_axes, is_mapped, sizes


@dataclasses.dataclass(frozen=True)
class Problem:
    """All that is static about a call (hashable).

    Attributes:
      axes: of each operand: query, key, value and the leaves of the spec.
      spec_tree: the structure of the AttentionSpec, with its static fields.
      backend: name of the backend that was chosen; kernels of another one may be
        faster for the axes that `vmap` adds (`_backends.again`).
      is_named: whether the caller named it.
      config: of the kernels.
      precision: of products of float32 operands.
    """

    axes: tuple[Axes, ...]
    spec_tree: Any
    backend: str
    is_named: bool
    config: Config | None
    precision: jax.lax.Precision | None

    @classmethod
    def of(cls, call: Call, backend: str, *, is_named: bool = False) -> Problem:
        """The problem whose arrays are those of `call.operands`."""
        axes = tuple(x.axes for x in call.operands)
        tree = jax.tree.structure(call.spec)
        return cls(axes, tree, backend, is_named, call.config, call.precision)

    def result_dtype(self, dtype):
        """Of a result that has that dtype if it is no part of another."""
        none = [None] * self.spec_tree.num_leaves
        is_part = self.spec_tree.unflatten(none).is_part
        return jnp.promote_types(dtype, jnp.float32) if is_part else dtype

    def named(self, arrays):
        """query, key, value and the spec, as `Named`."""
        q, k, v, *leaves = map(Named, arrays, self.axes)
        return q, k, v, self.spec_tree.unflatten(leaves)


def _statistics_dtype(dtype):
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def forward_outputs(problem: Problem, operands) -> tuple[Named, Named]:
    """Shape structs of o and lse.

    o lies in memory as q does, with the names that q lacks in front; lse has its rows
    last, for kernels read it in blocks of rows.
    """
    q, _, v, *_ = operands
    size = sizes(operands)
    axes = _with_missing(operands, tuple("d" if a == "h" else a for a in q.axes))
    lse_axes = (*(a for a in axes if a not in ("t", "d")), "t")
    lse_dtype = _statistics_dtype(q.dtype)
    dtype = problem.result_dtype(v.dtype)
    return _struct(axes, size, dtype), _struct(lse_axes, size, lse_dtype)


def is_differentiable(operand) -> bool:
    """Whether a call's operand has a gradient: bias and slopes do, lengths do not."""
    return jnp.issubdtype(operand.dtype, jnp.floating)


def backward_outputs(problem: Problem, operands) -> tuple[Named, ...]:
    """Shape structs of the gradients, one for each element that `vmap` maps over.

    Args:
      problem: of the call.
      operands: those of the forward, then o, lse, do and dlse.
    """
    size = sizes(operands)
    mapped = tuple(name for name in batch_axes(operands) if is_mapped(name))
    return tuple(
        _struct(
            (*(a for a in mapped if a not in x.axes), *x.axes),
            size,
            problem.result_dtype(x.dtype),
        )
        for x in operands[: len(problem.axes)]
        if is_differentiable(x)
    )


def _with_missing(operands, axes: Axes) -> Axes:
    return (*(name for name in batch_axes(operands) if name not in axes), *axes)


def _struct(axes: Axes, size: dict[str, int], dtype) -> Named:
    shape = tuple(1 if name is None else size[name] for name in axes)
    return Named(jax.ShapeDtypeStruct(shape, dtype), axes)


def _forward_rule(problem: Problem, operands):
    o, lse = forward_outputs(problem, operands)
    if 0 in sizes(operands).values():
        return [
            jnp.zeros(o.shape, o.dtype),
            jnp.full(lse.shape, -jnp.inf, lse.dtype),
        ]
    q, k, v, spec = problem.named([x.value for x in operands])
    options = {"config": problem.config, "precision": problem.precision}
    (backend,) = map(_backends.module, _forward_backends(problem, operands))
    return backend.forward(q, k, v, spec, (o, lse), **options)


def _backward_rule(problem: Problem, operands):
    outputs = backward_outputs(problem, operands)
    if 0 in sizes(operands).values():
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]
    arrays, saved = operands[: len(problem.axes)], operands[len(problem.axes) :]
    q, k, v, spec = problem.named([x.value for x in arrays])
    arguments = q, k, v, spec, saved
    options = {"config": problem.config, "precision": problem.precision}
    backend, *other = map(_backends.module, _backward_backends(problem, operands))
    if not other:
        return backend.backward(*arguments, outputs, **options)
    end = 3 + len(spec.score.operands)
    own, of_score = (*outputs[:3], *outputs[end:]), outputs[3:end]
    found = backend.backward(*arguments, own, **options)
    more = other[0].score_gradients(*arguments, of_score, **options)
    return [*found[:3], *more, *found[3:]]


def _own_backend(problem: Problem, operands) -> tuple[str, ...]:
    del operands
    return (problem.backend,)


def _serving(problem: Problem, operands) -> tuple[str, Call]:
    """The backend of a call, with all the axes that it has by now, and the call."""
    q, k, v, *leaves = operands[: len(problem.axes)]
    spec = problem.spec_tree.unflatten(leaves)
    call = Call(q, k, v, spec, problem.config, problem.precision)
    name = _backends.again(problem.backend, call, is_named=problem.is_named)
    return name, call


def _forward_backends(problem: Problem, operands) -> tuple[str, ...]:
    name, _ = _serving(problem, operands)
    return (name,)


def _backward_backends(problem: Problem, operands) -> tuple[str, ...]:
    """That of the gradients, and another for those of the score's operands, if so."""
    name, call = _serving(problem, operands)
    name = _backends.of_backward(name, call, is_named=problem.is_named)
    other = _backends.of_score_gradients(name, call)
    return (name,) if other is None else (name, other)


class Operation:
    """A primitive of named operands.

    Attributes:
      name: of the primitive.
      rule: of the problem and the operands, `Named` arrays; returns the results.
      outputs: of the same, the operands may be shape structs; returns shape structs.
      backends: of the problem and the operands; returns the names of the backends whose
        functions the rule runs.
      primitive: for differentiation rules.
    """

    def __init__(
        self,
        name: str,
        rule: Callable,
        outputs: Callable,
        backends: Callable = _own_backend,
    ):
        self.name, self.rule, self.outputs = name, rule, outputs
        self.backends = backends
        self.primitive = primitive = Primitive(name)
        primitive.multiple_results = True
        primitive.def_impl(self._eager)
        primitive.def_abstract_eval(self._abstract_eval)
        batching.primitive_batchers[primitive] = self._batch
        mlir.register_lowering(primitive, self._lower)
        # So that a program for several platforms has what is best for each.
        for name in ("cpu", "cuda"):
            rule = functools.partial(self._lower, platform=name)
            mlir.register_lowering(primitive, rule, platform=name)

    def __call__(self, *arrays, problem: Problem, axes: tuple[Axes, ...]) -> list:
        marker = _sharding.needs_devices() if _sharding.divisible(arrays) else None
        return self.primitive.bind(*arrays, problem=problem, axes=axes, marker=marker)

    def _context(self, problem: Problem, operands):
        return _backends.lowering_context(*self.backends(problem, operands))

    def _eager(self, *arrays, problem, axes, marker):
        del marker
        with device.lowering_for(device.platform_of(arrays)):
            return self._implementation(*arrays, problem=problem, axes=axes)

    def _implementation(self, *arrays, problem, axes):
        problem = dataclasses.replace(problem, axes=axes[: len(problem.axes)])
        operands = list(map(Named, arrays, axes))
        with self._context(problem, operands):
            return list(self.rule(problem, operands))

    def _abstract_eval(self, *avals, problem, axes, marker):
        del marker
        operands = list(map(Named, avals, axes))
        return _sharding.types(operands, self.outputs(problem, operands))

    def _batch(self, arrays, dims, *, problem, axes, marker):
        used = {a for operand_axes in axes for a in operand_axes}
        name = next(f"v{i}" for i in range(len(used) + 1) if f"v{i}" not in used)
        axes = tuple(
            a if dim is None else (*a[:dim], name, *a[dim:])
            for a, dim in zip(axes, dims, strict=True)
        )
        params = {"problem": problem, "axes": axes, "marker": marker}
        results = self.primitive.bind(*arrays, **params)
        structs = self.outputs(problem, list(map(Named, arrays, axes)))
        return results, [x.axes.index(name) for x in structs]

    def _divided(self, *arrays, problem, axes, marker):
        """What is lowered: the implementation, and how devices may divide it."""
        operands = list(map(Named, arrays, axes))
        outputs = self.outputs(problem, operands)
        division = _sharding.explicit_division(operands)

        def part(*arrays):
            return self(*arrays, problem=problem, axes=axes)

        def whole(*arrays):
            return self._implementation(*arrays, problem=problem, axes=axes)

        if division is not None:
            names = axes, tuple(x.axes for x in outputs)
            return _sharding.on_each_device(division, part, *names)(*arrays)
        if marker is not None:
            return _sharding.partitioned(whole, part, operands, outputs)(*arrays)
        return whole(*arrays)

    def _lower(self, context, *operands, platform=None, **params):
        if platform is None:
            platform, *_ = context.platforms or context.module_context.platforms
        with device.lowering_for(platform):
            return self._lower_there(context, *operands, **params)

    def _lower_there(self, context, *operands, problem: Problem, axes, marker):
        lower = mlir.lower_fun(self._divided, multiple_results=True)
        division = _sharding.explicit_division(list(map(Named, context.avals_in, axes)))
        if division is not None:
            scope = _sharding.on_mesh(division)
        else:
            scope = _sharding.one_device()
            context = context.replace(
                avals_in=list(map(_sharding.local, context.avals_in)),
                avals_out=list(map(_sharding.local, context.avals_out)),
            )
        params = {"problem": problem, "axes": axes, "marker": marker}

        def describe() -> str:
            """What is computed, as on one device, and of arrays with which axes."""
            whole = functools.partial(self._implementation, problem=problem, axes=axes)
            traced = jax.jit(whole).trace(*context.avals_in)
            platforms = (device.target(),)
            return f"{axes} {traced.lower(lowering_platforms=platforms).as_text()}"

        with self._context(problem, list(map(Named, context.avals_in, axes))), scope:
            results = lower(context, *operands, **params)
            if marker is not None and division is None:
                _partitioner.named(results, describe)
            return results


FORWARD = Operation("flash2_forward", _forward_rule, forward_outputs, _forward_backends)
BACKWARD = Operation(
    "flash2_backward", _backward_rule, backward_outputs, _backward_backends
)


# Names for `jax.checkpoint_policies.save_only_these_names`.
OUTPUT_NAME = "flash2_output"
LSE_NAME = "flash2_lse"


def to_save(o, lse) -> tuple[jax.Array, jax.Array]:
    """The results that the backward takes, with their names for `jax.checkpoint`."""
    return checkpoint_name(o, OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)


def forward(problem: Problem, arrays) -> tuple[jax.Array, jax.Array]:
    """Output (axes of query, head size that of value) and lse (rows last)."""
    return tuple(FORWARD(*arrays, problem=problem, axes=problem.axes))


def backward(problem: Problem, arrays, o, lse, do, dlse) -> tuple[jax.Array, ...]:
    """Gradients of the operands that are differentiable, in order."""
    operands = list(map(Named, arrays, problem.axes))
    o_axes, lse_axes = (x.axes for x in forward_outputs(problem, operands))
    axes = (*problem.axes, o_axes, lse_axes, o_axes, lse_axes)
    return tuple(BACKWARD(*arrays, o, lse, do, dlse, problem=problem, axes=axes))
