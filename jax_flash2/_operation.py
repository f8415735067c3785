"""The two halves of attention, forward and backward, as operations that batch in place.

Each half is a JAX primitive whose parameters name the axes of its operands. `jax.vmap`
adds a name where the mapped axis lies, so that no operand is transposed or repeated and
an unmapped one is shared; the backend sees one more batch axis.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_flash2 import _backends, _kept, _partitioner, _sharding
from pallas_kernels import device
from pallas_kernels.backend import Call
from pallas_kernels.core.axes import Axes, Named, batch_axes, is_mapped, sizes
from pallas_kernels.core.promotion import at_least_float32


@dataclasses.dataclass(frozen=True)
class Problem:
    """All that is static about a call (hashable).

    Attributes:
      axes: of each operand: the leaves of the `Call`.
      tree: the structure of the `Call`, with its static fields.
      backend: name of the backend that was chosen; kernels of another one may be
        faster for the axes that `vmap` adds (`_backends.again`).
      is_named: whether the caller named it.
      described: the abstract device that it is for (`device.described_by`), of which
        the parts say nothing that JAX divides arrays into.
      unasked: operands of the score whose gradients nobody asks for: no kernel is
        traced for them.
    """

    axes: tuple[Axes, ...]
    tree: Any
    backend: str
    is_named: bool
    described: Any = None
    unasked: tuple[str, ...] = ()

    @classmethod
    def of(cls, call: Call, backend: str, *, is_named: bool = False) -> Problem:
        """The problem whose arrays are those of `call.operands`.

        Raises:
          ValueError: if a floating-point array is none of `Call.differentiable`.
        """
        leaves, tree = jax.tree.flatten(call)
        there = device.described_by(x.value for x in leaves)
        problem = cls(tuple(x.axes for x in leaves), tree, backend, is_named, there)
        known = set(problem.places.values())
        others = (x for i, x in enumerate(leaves) if i not in known)
        unknown = [x for x in others if is_differentiable(x)]
        if unknown and call.has_gradients:
            raise ValueError(
                "a floating-point operand must be query, key, value, sink or an operand"
                f" of a term of the score, got another with axes {unknown[0].axes}"
            )
        return problem

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """Of the operands that may have gradients, by name, in order."""
        numbered = self.tree.unflatten(range(self.tree.num_leaves))
        return dict(sorted(numbered.differentiable.items(), key=lambda x: x[1]))

    def argument(self, place: int) -> str:
        """What errors call an operand of a pass, which may be none of the call's."""
        own = range(len(self.axes))
        return self.call(own).argument(place) if place in own else "an array"

    @property
    def is_part(self) -> bool:
        """Whether results are parts of others (`AttentionSpec.is_part`)."""
        return self.tree.unflatten([None] * self.tree.num_leaves).spec.is_part

    @property
    def gives_largest(self) -> bool:
        """Whether the forward has a third result (`AttentionSpec.gives_largest`)."""
        return self.tree.unflatten([None] * self.tree.num_leaves).spec.gives_largest

    @property
    def differentiated(self) -> Problem:
        """The same without the largest scores, which have no derivative."""
        if not self.gives_largest:
            return self
        call = self.tree.unflatten(range(self.tree.num_leaves))
        spec = dataclasses.replace(call.spec, gives_largest=False)
        tree = jax.tree.structure(dataclasses.replace(call, spec=spec))
        return dataclasses.replace(self, tree=tree)

    def asking(self, asked: Mapping[str, bool]) -> Problem:
        """The same, whose backward may leave gradients out.

        Args:
          asked: of operands of the score, False for those that nobody asks for.
        """
        operands = self.call(range(self.tree.num_leaves)).spec.score.operands
        unasked = tuple(name for name in operands if not asked.get(name, True))
        return dataclasses.replace(self, unasked=unasked)

    def result_dtype(self, dtype):
        """Of a result that has that dtype if it is no part of another.

        Of eight bits it is bfloat16.
        """
        dtype = jnp.dtype(jnp.bfloat16) if dtype.itemsize == 1 else dtype
        return at_least_float32(dtype) if self.is_part else dtype

    def call(self, operands) -> Call:
        """The call of these operands, `Named`, which may have more axes."""
        return self.tree.unflatten(operands)

    def named(self, arrays) -> Call:
        """The call of these arrays."""
        return self.call(map(Named, arrays, self.axes))


def forward_outputs(problem: Problem, operands) -> tuple[Named, ...]:
    """Shape structs of o and lse, and of the largest scores if the problem has them.

    o lies in memory as q does, with the names that q lacks in front; lse has its rows
    last, for kernels read it in blocks of rows. The largest scores are like lse.
    """
    q, *_ = operands
    size = sizes(operands)
    axes = _with_missing(operands, tuple("d" if a == "h" else a for a in q.axes))
    lse_axes = (*(a for a in axes if a not in ("t", "d")), "t")
    lse_dtype = at_least_float32(q.dtype)
    dtype = problem.result_dtype(q.dtype)
    lse = _struct(lse_axes, size, lse_dtype)
    return _struct(axes, size, dtype), lse, *[lse] * problem.gives_largest


def is_differentiable(operand) -> bool:
    """Whether a call's operand has a gradient: bias and slopes do, lengths do not."""
    return jnp.issubdtype(operand.dtype, jnp.floating)


def backward_outputs(problem: Problem, operands) -> tuple[Named, ...]:
    """Shape structs of the gradients (`wanted_gradients`), in the order of operands."""
    return tuple(wanted_gradients(problem, operands).values())


def wanted_gradients(problem: Problem, operands) -> dict[str, Named]:
    """Shape structs of the gradients, one for each element that `vmap` maps over.

    Args:
      problem: of the call.
      operands: those of the forward, then o, lse, do and dlse.
    """
    size = sizes(operands)
    mapped = tuple(name for name in batch_axes(operands) if is_mapped(name))

    def struct(x: Named) -> Named:
        axes = (*(a for a in mapped if a not in x.axes), *x.axes)
        return _struct(axes, size, problem.result_dtype(x.dtype))

    named = {name: operands[place] for name, place in problem.places.items()}
    return {
        name: struct(x)
        for name, x in named.items()
        if is_differentiable(x) and name not in problem.unasked
    }


def _with_missing(operands, axes: Axes) -> Axes:
    return (*(name for name in batch_axes(operands) if name not in axes), *axes)


def _struct(axes: Axes, size: dict[str, int], dtype) -> Named:
    shape = tuple(1 if name is None else size[name] for name in axes)
    return Named(jax.ShapeDtypeStruct(shape, dtype), axes)


def of_value_alone(problem: Problem) -> tuple[int, ...]:
    """The places of the operands on which the output depends and lse does not."""
    places = problem.tree.unflatten(range(problem.tree.num_leaves))
    return places.value, *jax.tree.leaves(places.spec.dropout)


class Operation:
    """A primitive of named operands.

    Attributes:
      name: of the primitive.
      rule: of the problem and the operands, `Named` arrays; returns the results.
      outputs: of the same, the operands may be shape structs; returns shape structs.
      backends: of the problem and the operands; returns the names of the backends whose
        functions the rule runs.
      unread: of the problem and the operands; returns for each result, by its place,
        the places of operands that it does not depend on, if there are any.
      primitive: for differentiation rules.

    A result has no axis that `jax.vmap` made for operands it does not depend on. The
    rule and `outputs` have it there, as the kernels do: all its elements are equal, and
    the first is the result.
    """

    def __init__(
        self,
        name: str,
        rule: Callable,
        outputs: Callable,
        backends: Callable,
        unread: Callable,
    ):
        self.name, self.rule, self.outputs = name, rule, outputs
        self.backends, self.unread = backends, unread
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

    def results(self, problem: Problem, operands) -> list[Named]:
        """Shape structs of the results."""
        outputs = list(self.outputs(problem, operands))
        division = _sharding.explicit_division(operands, problem.argument)
        divided = set() if division is None else set(division.along)
        for i, places in self.unread(problem, operands).items():
            read = (x for j, x in enumerate(operands) if j not in places)
            own = divided.union(*(x.axes for x in read))
            axes, shape = outputs[i].axes, outputs[i].shape
            is_kept = [
                a in own or not is_mapped(a) or n == 0
                for a, n in zip(axes, shape, strict=True)
            ]
            at = [j for j, kept in enumerate(is_kept) if kept]
            struct = jax.ShapeDtypeStruct([shape[j] for j in at], outputs[i].dtype)
            outputs[i] = Named(struct, tuple(axes[j] for j in at))
        return outputs

    def _context(self, problem: Problem, operands):
        return _backends.lowering_context(*self.backends(problem, operands))

    def _eager(self, *arrays, problem, axes, marker):
        del marker
        where = device.lowering_for(device.platform_of(arrays))
        with where, _backends.remembering():
            return self._implementation(*arrays, problem=problem, axes=axes)

    def _implementation(self, *arrays, problem, axes):
        operands = list(map(Named, arrays, axes))
        return self._firsts(problem, operands, self._whole(problem, operands))

    def _whole(self, problem: Problem, operands) -> list:
        """What the rule makes."""
        problem = dataclasses.replace(
            problem, axes=tuple(x.axes for x in operands[: len(problem.axes)])
        )
        with self._context(problem, operands):
            return list(self.rule(problem, operands))

    def _structs(self, problem: Problem, operands) -> list[tuple[Named, Named]]:
        """Of what the rule makes, and of the results."""
        outputs = self.outputs(problem, operands)
        return list(zip(outputs, self.results(problem, operands), strict=True))

    def _firsts(self, problem: Problem, operands, found) -> list:
        """The results, of what the rule makes."""
        firsts = []
        for x, (whole, result) in zip(
            found, self._structs(problem, operands), strict=True
        ):
            for i in reversed(range(len(whole.axes))):
                if is_mapped(whole.axes[i]) and whole.axes[i] not in result.axes:
                    x = jax.lax.index_in_dim(x, 0, i, keepdims=False)
            firsts.append(x)
        return firsts

    def _repeated(self, problem: Problem, operands, found) -> list:
        """What the rule makes, of the results."""
        structs = self._structs(problem, operands)
        return [
            x
            if whole.axes == result.axes
            else jnp.broadcast_to(Named(x, result.axes).to(whole.axes), whole.shape)
            for x, (whole, result) in zip(found, structs, strict=True)
        ]

    def _abstract_eval(self, *avals, problem, axes, marker):
        del marker
        operands = list(map(Named, avals, axes))
        return _sharding.types(operands, self.results(problem, operands))

    def _batch(self, arrays, dims, *, problem, axes, marker):
        used = {a for operand_axes in axes for a in operand_axes}
        name = next(f"v{i}" for i in range(len(used) + 1) if f"v{i}" not in used)
        axes = tuple(
            a if dim is None else (*a[:dim], name, *a[dim:])
            for a, dim in zip(axes, dims, strict=True)
        )
        params = {"problem": problem, "axes": axes, "marker": marker}
        results = self.primitive.bind(*arrays, **params)
        structs = self.results(problem, list(map(Named, arrays, axes)))
        return results, [
            x.axes.index(name) if name in x.axes else None for x in structs
        ]

    def _divided(self, *arrays, problem, axes, marker):
        """What is lowered: the implementation, and how devices may divide it."""
        operands = list(map(Named, arrays, axes))
        outputs = self.outputs(problem, operands)
        division = _sharding.explicit_division(operands)

        def part(*arrays):
            found = self(*arrays, problem=problem, axes=axes)
            return self._repeated(problem, list(map(Named, arrays, axes)), found)

        def whole(*arrays):
            return self._whole(problem, list(map(Named, arrays, axes)))

        if division is not None:
            names = axes, tuple(x.axes for x in outputs)
            found = _sharding.on_each_device(division, part, *names)(*arrays)
        elif marker is not None:
            found = _sharding.partitioned(whole, part, operands, outputs)(*arrays)
        else:
            found = whole(*arrays)
        return self._firsts(problem, operands, found)

    def _lower(self, context, *operands, platform=None, **params):
        if platform is None:
            platform, *_ = context.platforms or context.module_context.platforms
        problem = params["problem"]
        where = device.describing(problem.described)
        with where, device.lowering_for(platform), _backends.remembering():
            if len(context.module_context.platforms) == 1:
                is_named = problem.is_named
                _backends.check_lowered(problem.backend, is_named=is_named)
            return self._lower_there(context, *operands, **params)

    def _lower_there(self, context, *operands, problem: Problem, axes, marker):
        named = list(map(Named, context.avals_in, axes))
        division = _sharding.explicit_division(named)
        if division is not None:
            scope = _sharding.on_mesh(division)
        else:
            scope = _sharding.one_device()
            context = context.replace(
                avals_in=list(map(_sharding.local, context.avals_in)),
                avals_out=list(map(_sharding.local, context.avals_out)),
            )

        def alone() -> jax.stages.Lowered:
            """What is computed, as on one device."""
            whole = functools.partial(self._implementation, problem=problem, axes=axes)
            with jax.default_device(None):  # one of the platform
                traced = jax.jit(whole, keep_unused=True).trace(*context.avals_in)
                return traced.lower(lowering_platforms=(device.target(),))

        def digest() -> str | None:
            """The same in a few bytes, if it can be said."""
            types = [(x.shape, x.dtype) for x in context.avals_in]
            static = dataclasses.replace(problem, tree=call)
            return _kept.digest(backends, self.name, static, axes, types)

        backends = self.backends(problem, named)
        call = problem.tree.unflatten(range(problem.tree.num_leaves))
        of_gpus = all(_backends.BACKENDS[name].platform for name in backends)
        is_compiled = of_gpus and not call.interpret
        with self._context(problem, named), scope:
            if division is None and marker is None and is_compiled:
                made = _kept.lower(
                    context, operands, self.name, backends, digest, alone
                )
                if made is not None:
                    return made
            lower = mlir.lower_fun(self._divided, multiple_results=True)
            params = {"problem": problem, "axes": axes, "marker": marker}
            results = lower(context, *operands, **params)
            if marker is not None and division is None:
                # Plain JAX may be lowered by settings that no digest has.
                short = digest if is_compiled else lambda: None
                _partitioner.named(
                    results, lambda: f"{axes} {short() or alone().as_text()}"
                )
            return results
