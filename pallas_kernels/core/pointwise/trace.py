"""From a Python function to a `Program`: its jaxpr of scalars, made flat.

Jitted and custom functions are walked into, equal steps are merged, and what is known
of constants and of numbers that are not negative is used: it folds JAX's wrap of
negative indices, so that `x[h, q]` is seen to be indexed by h and q.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core.pointwise.program import (
    INDICES,
    POINTWISE,
    SCORE,
    Argument,
    Constant,
    Program,
    Step,
    live,
    only_live,
)

# Of scalars these change nothing.
_TRANSPARENT = (
    "broadcast_in_dim copy copy_p mul_invariant optimization_barrier pbroadcast pcast "
    "pvary reduce_and reduce_max reduce_min reduce_or reduce_sum reshape reshard "
    "sharding_constraint squeeze stop_gradient"
)
_INSTEAD = {
    "cond": "use jnp.where",
    "while": "write its rounds one after the other",
    "scan": "write its rounds one after the other",
    "random_bits": "pass dropout_rate, or capture an array of random numbers",
    "dot_general": "compute it before the call, and capture the result",
}
_FOLDED = {
    "add": np.add,
    "and": np.bitwise_and,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "or": np.bitwise_or,
    "sub": np.subtract,
}


class NotPointwise(Exception):
    """Why a function is none of one pair; the text follows the function's name."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """A captured array, of which some axes are indexed (None: not yet)."""

    number: int
    shape: tuple[int, ...]
    index: tuple[Any, ...]

    @property
    def free(self) -> list[int]:
        return [i for i, x in enumerate(self.index) if x is None]

    def at(self, places: dict[int, Any]) -> _Part:
        index = tuple(places.get(i, x) for i, x in enumerate(self.index))
        return dataclasses.replace(self, index=index)


class _Walk:
    """Walks a jaxpr of scalars; what values and steps become is a subclass's."""

    def run(self, closed, args: Sequence) -> list:
        consts = [
            _Part(i, tuple(x.shape), (None,) * x.ndim)
            for i, x in enumerate(closed.consts)
        ]
        parts = [x if x.shape else self.read(x) for x in consts]
        return self._jaxpr(closed.jaxpr, parts, args, None)

    def number(self, value: np.ndarray, dtype) -> Any:
        raise NotImplementedError

    def emit(self, primitive, params: dict, args: Sequence, dtype) -> Any:
        raise NotImplementedError

    def read(self, part: _Part) -> Any:
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
        if any(isinstance(x, _Part | list) for x in args) or aval.shape == (1,):
            return [self._of_array(name, params, args, aval, where)]
        if name in _TRANSPARENT.split() and aval.shape == ():
            return [args[0]]
        if aval.shape != () or name not in {*POINTWISE, "one_minus_square"}:
            instead = _INSTEAD.get(name, "a function of one pair has numbers alone")
            raise NotPointwise(
                f"uses {name!r} ({where}), which is no operation on numbers: {instead}"
            )
        return [self.emit(equation.primitive, params, args, aval.dtype)]

    def _of_array(self, name: str, params, args: list, aval, where: str):
        """What an operation makes of a captured array or of a vector of indices."""
        x = args[0]
        if name in ("broadcast_in_dim", "reshape") and not isinstance(x, _Part):
            return x if isinstance(x, list) else [x]
        if name == "concatenate" and all(isinstance(x, list) for x in args):
            return [y for x in args for y in x]
        if isinstance(x, list) and name in ("squeeze", "convert_element_type"):
            return x[0] if name == "squeeze" else x
        part = self._indexed(name, params, args) if isinstance(x, _Part) else None
        if part is None:
            array = next((x for x in args if isinstance(x, _Part)), None)
            shape = "" if array is None else f" of shape {array.shape}"
            raise NotPointwise(
                f"uses a captured array{shape} whole ({name!r}, {where}): index every "
                "axis by a number, or compute it before the call and capture the result"
            )
        return self.read(part) if aval.shape == () and not part.free else part

    def _indexed(self, name: str, params, args: list) -> _Part | None:
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

    def _sliced(self, part: _Part, starts, sizes) -> _Part | None:
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


class _Build(_Walk):
    """Makes a list of steps."""

    def __init__(self, dtypes: Sequence, natural: Sequence[int], captured: Sequence):
        self.steps: list[Step] = []
        self.numbers: dict[Step, int] = {}
        self.read_order: list[int] = []  # the step of each read, as it was met
        self._dtypes = [np.dtype(x) for x in dtypes]  # of inputs, then of steps
        self._inputs = len(dtypes)
        self._natural = set(natural)
        self._captured = captured

    def number(self, value: np.ndarray, dtype) -> Constant:
        return Constant.of(np.asarray(value, dtype))

    def _is_natural(self, x: Argument) -> bool:
        return bool(x.value >= 0) if isinstance(x, Constant) else x in self._natural

    def _add(self, step: Step) -> int:
        if step not in self.numbers:
            self.numbers[step] = len(self._dtypes)
            self.steps.append(step)
            self._dtypes.append(jnp.dtype(step.dtype))
        return self.numbers[step]

    def read(self, part: _Part) -> int:
        dtype = self._captured[part.number].dtype.name
        index = tuple(map(self._without_wrap, part.index, part.shape))
        found = self._add(Step(None, (part.number,), index, dtype))
        self.read_order.append(found - self._inputs)
        return found

    def _without_wrap(self, index: Argument, size: int) -> Argument:
        """An input in place of what wraps it where it is negative: it is clamped."""
        if isinstance(index, Constant):
            number = int(index.value)
            return Constant.of(np.int32(number + size if number < 0 else number))
        for i in range(self._inputs):
            zero = Constant.of(np.asarray(0, self._dtypes[i]))
            end = Constant.of(np.asarray(size, self._dtypes[i]))
            below, beyond = (
                self._number(*x) for x in (("lt", i, zero), ("add", i, end))
            )
            if index == self._number("select_n", below, i, beyond):
                return i
        return index

    def _number(self, name: str, *args) -> int | None:
        """The number of a step that is there already."""
        steps = (x for x in self.numbers if x.name == name and x.args == args)
        return next((self.numbers[x] for x in steps), None)

    def emit(self, primitive, params: dict, args: Sequence, dtype) -> Argument:
        name = primitive.name
        if name in (
            "square",
            "one_minus_square",
        ):  # of derivatives; few kernels lower it
            square = self.emit(lax.mul_p, {}, [args[0], args[0]], dtype)
            one = Constant.of(np.asarray(1, dtype))
            return (
                square
                if name == "square"
                else self.emit(lax.sub_p, {}, [one, square], dtype)
            )
        known = self._folded(name, args, dtype)
        if known is not None:
            return known
        static = {**params, "sharding": None} if "sharding" in params else params
        if "weak_type" in static:
            static = {**static, "weak_type": False}
            if not isinstance(args[0], Constant) and self._dtypes[args[0]] == dtype:
                return args[0]
        step = Step(primitive, tuple(sorted(static.items())), tuple(args), dtype.name)
        found = self._add(step)
        stays = name in ("add", "div", "max", "min", "rem", "convert_element_type")
        stays = stays and np.issubdtype(dtype, np.signedinteger)
        if stays and all(map(self._is_natural, args)):
            self._natural.add(found)
        return found

    def _folded(self, name: str, args: Sequence, dtype) -> Argument | None:
        """What is known without data."""
        if all(isinstance(x, Constant) for x in args):
            values = [x.value for x in args]
            if name in _FOLDED:
                return Constant.of(np.asarray(_FOLDED[name](*values), dtype))
            if name == "convert_element_type":
                return Constant.of(values[0].astype(dtype))
        zero = [isinstance(x, Constant) and bool(x.value == 0) for x in args]
        one = [isinstance(x, Constant) and bool(x.value == 1) for x in args]
        if name == "lt" and zero[1] and self._is_natural(args[0]):
            return Constant.of(np.False_)
        if name == "select_n" and isinstance(args[0], Constant):
            return args[1 + int(args[0].value)]
        if name == "mul" and any(one):
            return args[1 - one.index(True)]
        return None

    def special(self, equation, args: Sequence):
        """Quotients of what is not negative are one step."""
        called = equation.params.get("name")
        if called not in ("floor_divide", "remainder") or len(args) != 2:
            return None
        aval, divisor = equation.outvars[0].aval, args[1]
        if not np.issubdtype(aval.dtype, np.signedinteger):
            return None
        if not isinstance(divisor, Constant) or not divisor.value > 0:
            return None
        if not self._is_natural(args[0]):
            return None
        divisor = Constant.of(divisor.value.astype(aval.dtype))
        primitive = lax.div_p if called == "floor_divide" else lax.rem_p
        return [self.emit(primitive, {}, [args[0], divisor], aval.dtype)]


class _Evaluate(_Walk):
    """Runs the steps, with given numbers in place of reads."""

    def __init__(self, reads: Sequence):
        self._reads = iter(reads)

    def number(self, value: np.ndarray, dtype):
        return np.asarray(value, dtype)

    def emit(self, primitive, params: dict, args: Sequence, dtype):
        del dtype
        return primitive.bind(*args, **params)

    def read(self, part: _Part):
        del part
        return next(self._reads)

    def special(self, equation, args: Sequence):
        """Custom derivatives of numbers are kept."""
        if not equation.primitive.name.startswith("custom_"):
            return None
        if any(isinstance(x, _Part | list) for x in args):
            return None
        found = equation.primitive.get_bind_params(equation.params)
        functions, params = found if isinstance(found, tuple) else ((), found)
        found = equation.primitive.bind(*functions, *args, **params)
        return found if equation.primitive.multiple_results else [found]


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a function is.

    Attributes:
      program: of numbers; reads have the indices of all axes of their arrays.
      captured: the arrays, as the function closed over them.
      closed: its jaxpr.
      natural: the names of the inputs that are not negative.
      read_order: for each read that the jaxpr has, which read of the program it is, or
        None of one that nothing needs; and the dtype.
    """

    program: Program
    captured: tuple
    closed: Any
    natural: frozenset[str]
    read_order: tuple[tuple[int | None, Any], ...]

    def derivative(self, score_dtype) -> Program:
        """The derivatives by the score and by each read of a float.

        Its inputs are those of the function, then what the reads find (`r0`, ...).
        """
        reads, floats = self.program.reads, float_reads(self.program)

        def gradients(score, b, h, q, kv, *found):
            def value(score, *chosen):
                own = [*found]
                for i, x in zip(floats, chosen, strict=True):
                    own[i] = x
                values = [
                    jnp.zeros((), dtype) if i is None else own[i]
                    for i, dtype in self.read_order
                ]
                walk = _Evaluate(values)
                return walk.run(self.closed, [score, b, h, q, kv])[0]

            _, pull = jax.vjp(value, score, *(found[i] for i in floats))
            return pull(jnp.ones((), score_dtype))

        structs = [jax.ShapeDtypeStruct((), jnp.dtype(x.dtype)) for x in reads]
        inputs = (SCORE, *INDICES, *(f"r{i}" for i in range(len(reads))))
        closed = jax.make_jaxpr(gradients)(*_scalars(score_dtype), *structs)
        return _built(closed, inputs, self.natural)[0]


def float_reads(program: Program) -> list[int]:
    """The numbers of the reads that have derivatives."""
    return [
        i
        for i, step in enumerate(program.reads)
        if jnp.issubdtype(jnp.dtype(step.dtype), jnp.floating)
    ]


def _scalars(score_dtype=None) -> list[jax.ShapeDtypeStruct]:
    """What a function takes."""
    dtypes = [jnp.int32] * len(INDICES)
    dtypes = dtypes if score_dtype is None else [score_dtype, *dtypes]
    return [jax.ShapeDtypeStruct((), x) for x in dtypes]


def _built(closed, inputs: tuple[str, ...], natural: frozenset[str]):
    """The program of a jaxpr, and `Traced.read_order`."""
    dtypes = [x.aval.dtype for x in closed.jaxpr.invars]
    counted = [i for i, x in enumerate(inputs) if x in natural]
    build = _Build(dtypes, counted, closed.consts)
    outputs = build.run(closed, list(range(len(inputs))))
    whole = Program(inputs, tuple(build.steps), tuple(outputs))
    kept = [i for i in live(whole, outputs) if whole.steps[i].primitive is None]
    numbers = {step: i for i, step in enumerate(kept)}
    order = (
        (numbers.get(i), jnp.dtype(whole.steps[i].dtype)) for i in build.read_order
    )
    return only_live(whole, outputs), tuple(order)


def trace(
    function: Callable, score_dtype=None, natural: frozenset[str] = frozenset()
) -> Traced:
    """Traces a function of one pair.

    Args:
      function: of (score, b, h, q, kv), or without a score of the rest.
      score_dtype: of the score, or None without one.
      natural: the names of the inputs that are not negative.

    Raises:
      NotPointwise: if it is not one of numbers alone, or of another result.
    """
    scalars = _scalars(score_dtype)
    inputs = INDICES if score_dtype is None else (SCORE, *INDICES)
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*scalars)
    wanted = jnp.dtype(jnp.bool_ if score_dtype is None else score_dtype)
    leaves = jax.tree.leaves(shape)
    if len(leaves) != 1 or not hasattr(shape, "dtype"):
        raise NotPointwise(f"must return one {wanted.name} scalar, got {shape!r}")
    if shape.shape != () or shape.dtype != wanted:
        hint = "" if shape.shape else f": convert it, as x.astype({wanted.name!r})"
        raise NotPointwise(
            f"must return a {wanted.name} scalar, got {shape.dtype.name} of shape "
            f"{shape.shape}{hint}"
        )
    program, order = _built(closed, inputs, natural)
    return Traced(program, tuple(closed.consts), closed, natural, order)
