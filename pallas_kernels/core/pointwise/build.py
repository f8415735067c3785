"""Makes a list of steps of a jaxpr of scalars."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.core.pointwise.program import PRODUCT, Argument, Constant, Step
from pallas_kernels.core.pointwise.walk import Part, Walk

# Of constants: eager JAX would fail under an abstract mesh.
_FOLDED = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "cos": np.cos,
    "eq": np.equal,
    "exp": np.exp,
    "exp2": np.exp2,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.bitwise_not,
    "or": np.bitwise_or,
    "rem": np.fmod,
    "sign": np.sign,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "sub": np.subtract,
    "tanh": np.tanh,
}
# Of rows, heads and batch entries there are fewer.
_MOST = 2**28
# The largest results, of the largest of integers that are not negative.
_LARGEST = {
    "add": operator.add,
    "convert_element_type": lambda x: x,
    "div": lambda x, y: x,
    "max": max,
    "min": min,
    "rem": lambda x, y: x,
}
# Of a number and itself, where it is no float, which may be NaN.
_REFLEXIVE = {
    "eq": True,
    "ge": True,
    "gt": False,
    "le": True,
    "lt": False,
    "ne": False,
    "sub": 0,
}


class Build(Walk):
    """Makes a list of steps.

    Of integers max(|x|, y) and min(-|x|, y) are none: ptxas before CUDA 13.4 loses a
    sign of them on Hopper and Blackwell, in kernels and in XLA's programs
    (benchmarks/lab/123).
    """

    def __init__(
        self,
        dtypes: Sequence,
        natural: Sequence[int],
        captured: Sequence,
        *,
        widens: bool,
    ):
        self.steps: list[Step] = []
        self.numbers: dict[Step, int] = {}
        self.read_order: list[int] = []  # the step of each read, as it was met
        self.wide: dict[int, int] = {}  # of steps of narrow reads, those of wide ones
        self._widens = widens
        self._dtypes = [np.dtype(x) for x in dtypes]  # of inputs, then of steps
        self._inputs = len(dtypes)
        # The largest value of each that is not negative.
        self._most: dict[int, int] = dict.fromkeys(natural, _MOST)
        self._captured = captured
        self._split: dict[tuple, Argument] = {}  # comparisons, by primitive and args

    def number(self, value: Any, dtype) -> Constant:
        return Constant.of(np.asarray(value, dtype))

    def _is_natural(self, x: Argument) -> bool:
        return bool(x.value >= 0) if isinstance(x, Constant) else x in self._most

    def _largest(self, name: str, args: Sequence, dtype) -> int | None:
        """The largest integer that a step gives, if it is known to give none below 0.

        Args:
          name, args, dtype: of the step.
        """
        if not np.issubdtype(dtype, np.signedinteger):
            return None
        if name == "abs":
            return np.iinfo(dtype).max
        if name not in _LARGEST or not all(map(self._is_natural, args)):
            return None
        if name == "div" and not isinstance(args[1], Constant):
            return None  # a quotient by 0 is -1
        own = (x.value if isinstance(x, Constant) else self._most[x] for x in args)
        found = _LARGEST[name](*map(int, own))
        return found if found <= np.iinfo(dtype).max else None

    def _add(self, step: Step) -> int:
        if step not in self.numbers:
            self.numbers[step] = len(self._dtypes)
            self.steps.append(step)
            self._dtypes.append(jnp.dtype(step.dtype))
        return self.numbers[step]

    def read(self, part: Part) -> int:
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
        known = self._folded(name, args, dtype)
        if known is None:
            known = self._rewritten(primitive, params, args, dtype)
        if known is not None:
            return known
        static = {**params, "sharding": None} if "sharding" in params else params
        if "weak_type" in static:
            static = {**static, "weak_type": False}
        step = Step(primitive, tuple(sorted(static.items())), tuple(args), dtype.name)
        found = self._add(step)
        most = self._largest(name, args, dtype)
        if most is not None:
            self._most[found] = most
        return found

    def _made_by(self, name: str, value: Argument) -> Step | None:
        """The step of that name, of integers, that makes a value, or None."""
        if isinstance(value, Constant) or value < self._inputs:
            return None
        step = self.steps[value - self._inputs]
        is_one = step.name == name and step.dtype.startswith("int")
        return step if is_one else None

    def _without_absolute(self, primitive, args: Sequence, dtype) -> Argument | None:
        """max(max(x, y), -x) in place of max(|x|, y), and its mirror image."""
        is_max = primitive is lax.max_p
        for value, other in (args, args[::-1]):
            if not is_max:
                negated = self._made_by("neg", value)
                value = None if negated is None else negated.args[0]
            absolute = None if value is None else self._made_by("abs", value)
            if absolute is None:
                continue
            (x,) = absolute.args
            opposite = self.emit(lax.neg_p, {}, [x], dtype)
            found = self.emit(primitive, {}, [x, other], dtype)
            found = self.emit(primitive, {}, [found, opposite], dtype)
            most = self._largest(primitive.name, args, dtype)
            if isinstance(found, int) and most is not None:
                self._most[found] = most
            return found
        return None

    def _of_two(self, primitive, args: Sequence) -> Argument | None:
        """Comparisons with two numbers in place of one with the larger or smaller."""
        for side, name in itertools.product((0, 1), ("max", "min")):
            step = self._made_by(name, args[side])
            if step is None:
                continue
            at = primitive, *args
            if at not in self._split:
                pairs = [(x, args[1]) if side == 0 else (args[0], x) for x in step.args]
                each = [self.emit(primitive, {}, x, np.dtype(bool)) for x in pairs]
                is_bound = (primitive.name in ("le", "lt")) == (side == 0)  # from above
                joined = lax.and_p if is_bound == (name == "max") else lax.or_p
                self._split[at] = self.emit(joined, {}, each, np.dtype(bool))
            return self._split[at]
        return None

    def _rewritten(self, primitive, params, args: Sequence, dtype) -> Argument | None:
        """The same by operations that more kernels have, or compilers get right."""
        name, x = primitive.name, args[0]
        if name == "add_any":
            return self.emit(lax.add_p, {}, args, dtype)
        if name == "log2":
            natural = self.emit(lax.log_p, {"accuracy": None}, args, dtype)
            inverse = Constant.of(np.asarray(1 / np.log(2.0), dtype))
            return self.emit(lax.mul_p, PRODUCT, [natural, inverse], dtype)
        if name in ("square", "one_minus_square"):
            square = self.emit(lax.mul_p, PRODUCT, [x, x], dtype)
            one = Constant.of(np.asarray(1, dtype))
            is_square = name == "square"
            return (
                square if is_square else self.emit(lax.sub_p, {}, [one, square], dtype)
            )
        if name == "polynomial":  # of coefficients in ascending order
            *lower, found = args[1:]
            for coefficient in reversed(lower):
                found = self.emit(lax.mul_p, PRODUCT, [found, x], dtype)
                found = self.emit(lax.add_p, {}, [found, coefficient], dtype)
            return found
        if name == "div" and jnp.issubdtype(dtype, jnp.floating):
            inverse = _inverse(args[1], dtype)
            if inverse is not None:
                return self.emit(lax.mul_p, PRODUCT, [x, inverse], dtype)
        if name == "integer_pow" and params["y"] < 0:
            power = self.emit(lax.integer_pow_p, {"y": -params["y"]}, args, dtype)
            one = Constant.of(np.asarray(1, dtype))
            return self.emit(lax.div_p, {}, [one, power], dtype)
        if name in ("max", "min") and dtype == np.bool_:
            joined = lax.or_p if name == "max" else lax.and_p
            return self.emit(joined, {}, args, dtype)
        if name in ("max", "min") and np.issubdtype(dtype, np.signedinteger):
            return self._without_absolute(primitive, args, dtype)
        if name in ("le", "lt", "ge", "gt"):
            return self._of_two(primitive, args)
        if name == "convert_element_type" and not isinstance(x, Constant):
            if self._dtypes[x] == dtype:
                return x
            if dtype == np.bool_:  # Mosaic GPU would take the lowest bit of a number
                zero = Constant.of(np.asarray(0, self._dtypes[x]))
                return self.emit(lax.ne_p, {}, [x, zero], dtype)
            return self._widened(x, dtype)
        return None

    def _widened(self, number: int, dtype) -> int | None:
        """A read of narrow floats that gives wide ones, of which gradients are sums."""
        narrow = self.steps[number - self._inputs] if number >= self._inputs else None
        floats = all(
            jnp.issubdtype(x, jnp.floating) for x in (dtype, self._dtypes[number])
        )
        if (
            narrow is None
            or narrow.primitive is not None
            or not (self._widens and floats)
        ):
            return None
        if jnp.dtype(dtype).itemsize < self._dtypes[number].itemsize:
            return None
        wide = self._add(narrow._replace(dtype=jnp.dtype(dtype).name))
        self.wide[number - self._inputs] = wide - self._inputs
        return wide

    def _folded(self, name: str, args: Sequence, dtype) -> Argument | None:
        """What is known without data."""
        if all(isinstance(x, Constant) for x in args):
            values = [x.value for x in args]
            if name in _FOLDED and not (name == "rem" and values[1] == 0):
                with np.errstate(all="ignore"):
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
        if name in ("and", "or") and dtype == np.bool_ and any(zero + one):
            same, decides = (one, zero) if name == "and" else (zero, one)
            first = (decides if any(decides) else same).index(True)
            return args[first if any(decides) else 1 - first]
        if name in _REFLEXIVE and args[0] == args[1] and self._is_exact(args[0]):
            return Constant.of(np.asarray(_REFLEXIVE[name], dtype))
        return None

    def _is_exact(self, x: Argument) -> bool:
        """Whether a value is no float and no complex number."""
        dtype = x.dtype if isinstance(x, Constant) else self._dtypes[x]
        return not jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)

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


def _inverse(x: Argument, dtype) -> Constant | None:
    """1 / x of a constant whose inverse is a normal number, as XLA has it, too."""
    if not isinstance(x, Constant) or x.value == 0:
        return None
    found = np.asarray(1 / x.value, dtype)
    is_normal = jnp.finfo(dtype).tiny <= abs(float(found)) < np.inf
    return Constant.of(found) if is_normal else None
