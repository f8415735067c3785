"""Walks a jaxpr of scalars, in which captured arrays are indexed by numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.pointwise.program import POINTWISE

# Rewritten as others, which more kernels and versions of JAX have.
REWRITTEN = ("add_any", "log2", "one_minus_square", "polynomial", "square")
# Of scalars these change nothing.
_TRANSPARENT = (
    "broadcast_in_dim copy copy_p mul_invariant optimization_barrier pbroadcast pcast "
    "pvary reduce_and reduce_max reduce_min reduce_or reduce_sum reshape reshard "
    "sharding_constraint squeeze stop_gradient"
)
_RANDOM = "pass dropout_rate, or capture an array of random numbers"
_INSTEAD = {
    "cond": "use jnp.where",
    "while": "write its rounds one after the other",
    "scan": "write its rounds one after the other",
    **dict.fromkeys(("random_bits", "random_seed", "random_wrap"), _RANDOM),
    "dot_general": "compute it before the call, and capture the result",
    **dict.fromkeys(("argmax", "stack"), "use jnp.where in place of jnp.select"),
}


class NotPointwise(Exception):
    """Why a function is none of one pair; the text follows the function's name."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A captured array, of which some axes are indexed (None: not yet)."""

    number: int
    shape: tuple[int, ...]
    index: tuple[Any, ...]

    @property
    def free(self) -> list[int]:
        return [i for i, x in enumerate(self.index) if x is None]

    def at(self, places: dict[int, Any]) -> Part:
        index = tuple(places.get(i, x) for i, x in enumerate(self.index))
        return dataclasses.replace(self, index=index)


class Walk:
    """Walks a jaxpr of scalars; what values and steps become is a subclass's."""

    def run(self, closed, args: Sequence) -> list:
        if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in closed.consts):
            raise NotPointwise(f"captures a random key: {_RANDOM}")
        consts = [
            Part(i, tuple(x.shape), (None,) * x.ndim)
            for i, x in enumerate(closed.consts)
        ]
        parts = [x if x.shape else self.read(x) for x in consts]
        return self._jaxpr(closed.jaxpr, parts, args, None)

    def number(self, value: Any, dtype) -> Any:
        raise NotImplementedError

    def emit(self, primitive, params: dict, args: Sequence, dtype) -> Any:
        raise NotImplementedError

    def read(self, part: Part) -> Any:
        raise NotImplementedError

    def special(self, equation, args: Sequence) -> Any:
        """The results of an equation that is not walked into, or None."""

    def _jaxpr(self, jaxpr, consts, args, where) -> list:
        known = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
        )

        def of(variable):
            if not hasattr(variable, "val"):
                return known[variable]
            if np.ndim(variable.val):
                raise NotPointwise(_LITERAL)
            return self.number(np.asarray(variable.val), variable.aval.dtype)

        for equation in jaxpr.eqns:
            own = where or _where(equation)
            found = self._equation(equation, [of(x) for x in equation.invars], own)
            known.update(zip(equation.outvars, found, strict=True))
        return [of(x) for x in jaxpr.outvars]

    def _equation(self, equation, args: list, where: str) -> list:
        name, params = equation.primitive.name, equation.params
        if equation.effects:
            name = _with_effect(equation).primitive.name
            raise NotPointwise(f"has a side effect, {name!r} ({where}): remove it")
        special = self.special(equation, args)
        if special is not None:
            return special
        inner = next(
            (params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in params),
            None,
        )
        if inner is not None and name not in ("scan", "while", "cond"):
            consts = getattr(inner, "consts", ())
            if consts and any(np.ndim(x) for x in consts):
                raise NotPointwise(_LITERAL)
            numbers = [self.number(np.asarray(x), x.dtype) for x in consts]
            return self._jaxpr(getattr(inner, "jaxpr", inner), numbers, args, where)
        aval = equation.outvars[0].aval
        if any(isinstance(x, Part | list) for x in args) or aval.shape == (1,):
            return [self._of_array(name, params, args, aval, where)]
        if name in _TRANSPARENT.split() and aval.shape == ():
            return [args[0]]
        if aval.shape != () or name not in {*POINTWISE, *REWRITTEN}:
            raise _of_no_numbers(name, where)
        return [self.emit(equation.primitive, params, args, aval.dtype)]

    def _of_array(self, name: str, params, args: list, aval, where: str):
        """What an operation makes of a captured array or of a vector of indices."""
        if not args:
            raise _of_no_numbers(name, where)
        x = args[0]
        if name in ("broadcast_in_dim", "reshape") and not isinstance(x, Part):
            return x if isinstance(x, list) else [x]
        if name == "concatenate" and all(isinstance(x, list) for x in args):
            return [y for x in args for y in x]
        if isinstance(x, list) and name in ("squeeze", "convert_element_type"):
            return x[0] if name == "squeeze" else x
        if name == "gather" and _fills(params["fill_value"], aval.dtype):
            raise NotPointwise(
                f"reads an array with fill_value={params['fill_value']} ({where}), and "
                "an index beyond an array is clamped: choose by jnp.where(i < n, ..)"
            )
        part = self._indexed(name, params, args) if isinstance(x, Part) else None
        if part is None:
            array = next((x for x in args if isinstance(x, Part)), None)
            if array is None or name == "random_wrap":
                raise _of_no_numbers(name, where)
            raise NotPointwise(
                f"uses a captured array of shape {array.shape} whole ({name!r}, "
                f"{where}): index every axis by a number, or compute it before the "
                "call and capture the result"
            )
        return self.read(part) if aval.shape == () and not part.free else part

    def _indexed(self, name: str, params, args: list) -> Part | None:
        part, *rest = args
        free, places = part.free, {}
        if name in ("squeeze", "copy", "copy_p", "pvary", "pcast"):
            return part
        if name == "reshape" and not free:
            return part
        if name == "dynamic_slice":
            return self._sliced(part, rest, params["slice_sizes"])
        if name == "slice":
            limits = params["limit_indices"]
            starts = [
                self.number(np.int32(n), np.int32) for n in params["start_indices"]
            ]
            sizes = [
                b - a for a, b in zip(params["start_indices"], limits, strict=True)
            ]
            return None if params["strides"] else self._sliced(part, starts, sizes)
        if name == "gather":
            numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
            mapped = numbers.start_index_map
            if len(free) != len(sizes) or numbers.operand_batching_dims:
                return None
            index = rest[0] if isinstance(rest[0], list) else [rest[0]]
            for i, start in zip(mapped, index, strict=True):
                if sizes[i] != 1:
                    return None
                places[free[i]] = start
            whole = all(
                i in mapped or n == part.shape[free[i]] for i, n in enumerate(sizes)
            )
            return part.at(places) if whole else None
        return None

    def _sliced(self, part: Part, starts, sizes) -> Part | None:
        """One element of an axis, or all; an axis of one, kept, is indexed already."""
        kept, places = list(part.free), {}
        if len(kept) != len(sizes):
            return None
        for axis, start, size in zip(kept, starts, sizes, strict=True):
            if size == 1:
                places[axis] = start
            elif size != part.shape[axis]:
                return None
        return part.at(places)


_LITERAL = (
    "uses a NumPy array inside: capture jnp.asarray(array), and index every axis of it"
)


def _of_no_numbers(name: str, where: str) -> NotPointwise:
    instead = _INSTEAD.get(name, "a function of one pair has numbers alone")
    return NotPointwise(
        f"uses {name!r} ({where}), which is no operation on numbers: {instead}"
    )


def _with_effect(equation):
    """The innermost equation of one with an effect that has it."""
    for inner in jax.tree.leaves([*equation.params.values()]):
        for own in getattr(getattr(inner, "jaxpr", inner), "eqns", ()):
            if own.effects:
                return _with_effect(own)
    return equation


def _fills(number: Any, dtype) -> bool:
    """Whether a gather gives a number of the caller's beyond its array, not JAX's."""
    usual: Any = True if dtype.kind == "b" else None
    if dtype.kind in "iu":
        limits = jnp.iinfo(dtype)
        usual = limits.min if dtype.kind == "i" else limits.max
    is_nan = number != number
    return not (number is None or is_nan or number == usual)


def _where(equation) -> str:
    """File and line of the caller's code, as far as is known."""
    traceback = getattr(equation.source_info, "traceback", None)
    if traceback is None:
        return "where is not known"
    folder, found = str(Path(jax.__file__).parent), None
    here, last = traceback.as_python_traceback(), None
    while here is not None:
        last = here
        name = here.tb_frame.f_code.co_filename
        if not name.startswith(folder) and name != __file__:
            found = here
        here = here.tb_next
    found = found or last
    if found is None:
        return "where is not known"
    return f"{Path(found.tb_frame.f_code.co_filename).name}:{found.tb_lineno}"
