"""Linear functions whose transpose is given: what joins forward and reverse mode.

A `jax.custom_vjp` has no forward mode: what it gives JAX is the transpose of a tangent
that nothing can compute. A pair of `Linear` functions has both. In forward mode the
first runs, in reverse mode JAX transposes it, and the second runs. Neither is traced
where it does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


class _Map(NamedTuple):
    """One `jax.vmap` over a function; its axis of what is linear comes first.

    Attributes:
      known: the axes of what is known, None where it has none.
      name, size, spmd_name: of the axis.
    """

    known: tuple[int | None, ...]
    name: Hashable
    size: int
    spmd_name: Any

    def of(self, function: Callable, along: int) -> Callable:
        """A function of known arrays, and of so many that it is linear in, mapped."""
        return jax.vmap(
            function,
            (*self.known, *[0] * along),
            axis_name=self.name,
            axis_size=self.size,
            spmd_axis_name=self.spmd_name,
        )


def _mapped(function: Callable, static: Hashable, count: int, maps: tuple[_Map, ...]):
    """A function of arrays, of which so many are known; of a tuple of results."""

    def run(*arrays):
        def whole(*arrays):
            return tuple(function(static, arrays[:count], arrays[count:]))

        mapped = whole
        for one in maps:
            mapped = one.of(mapped, len(arrays) - count)
        return mapped(*arrays)

    return run


class Linear:
    """A primitive: a function that is linear in the last of its arrays.

    Attributes:
      transpose: the function that is its transpose by those arrays, of the same known
        ones.
    """

    transpose: Linear

    def __init__(
        self, name: str, function: Callable, outputs: Callable, meaning: Callable
    ):
        """All three take what is static, known arrays, and arrays it is linear in.

        Args:
          name: of the primitive.
          function: returns the results, a sequence of arrays.
          outputs: returns arrays of their types, which nobody computes.
          meaning: the same results, in a way through which JAX can differentiate by all
            arrays.
        """
        self.function, self.outputs, self.meaning = function, outputs, meaning
        self.primitive = primitive = Primitive(name)
        primitive.multiple_results = True
        primitive.def_impl(self._run)
        primitive.def_abstract_eval(self._abstract_eval)
        mlir.register_lowering(
            primitive, mlir.lower_fun(self._run, multiple_results=True)
        )
        ad.primitive_jvps[primitive] = self._jvp
        ad.primitive_transposes[primitive] = self._transpose
        batching.fancy_primitive_batchers[primitive] = self._batch

    def __call__(self, static: Hashable, known, along) -> list[jax.Array]:
        params = {"static": static, "count": len(known), "maps": ()}
        return self.primitive.bind(*known, *along, **params)

    def _run(self, *arrays, **params):
        return _mapped(self.function, **params)(*arrays)

    def _abstract_eval(self, *avals, **params):
        return jax.make_jaxpr(_mapped(self.outputs, **params))(*avals).out_avals

    def _jvp(self, arrays, tangents, **params):
        results = self.primitive.bind(*arrays, **params)
        count = params["count"]
        if all(isinstance(x, ad.Zero) for x in tangents[:count]):
            along = map(ad.instantiate_zeros, tangents[count:])
            return results, self.primitive.bind(*arrays[:count], *along, **params)
        moved = [i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero)]
        whole = _mapped(self.meaning, **params)

        def function(*points):
            given = dict(zip(moved, points, strict=True))
            return whole(*(given.get(i, x) for i, x in enumerate(arrays)))

        points, along = ([x[i] for i in moved] for x in (arrays, tangents))
        return results, jax.jvp(function, points, along)[1]

    def _transpose(self, cotangents, *arrays, **params):
        count = params["count"]
        known, along = arrays[:count], arrays[count:]
        if any(map(ad.is_undefined_primal, known)):
            raise NotImplementedError(
                f"{self.primitive.name} is linear in tangents alone, and has no "
                "transpose by others of its arguments"
            )
        given = map(ad.instantiate_zeros, cotangents)
        found = self.transpose.primitive.bind(*known, *given, **params)
        pairs = zip(found, along, strict=True)
        wanted = (x if ad.is_undefined_primal(like) else None for x, like in pairs)
        return [*[None] * count, *wanted]

    def _batch(self, axis, arrays, dims, *, static, count, maps):
        along = [
            batching.bdim_at_front(x, dim, axis.size)
            for x, dim in zip(arrays[count:], dims[count:], strict=True)
        ]
        own = _Map(tuple(dims[:count]), axis.name, axis.size, axis.spmd_name)
        params = {"static": static, "count": count, "maps": (*maps, own)}
        found = self.primitive.bind(*arrays[:count], *along, **params)
        return found, [0] * len(found)
