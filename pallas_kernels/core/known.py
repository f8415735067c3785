"""Arrays that depend on no data, computed by NumPy while a call is traced.

What a function computes is written as for any traced call, with `jax.numpy`. Where its
result depends on nothing but shapes, JAX's equations for it are evaluated here, in
milliseconds. To let XLA compile and run them takes a second, on whatever device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.core.axes import Named

# Of all results of equations: 0.1 s of integers on one core (benchmarks/lab/138).
_MOST_ELEMENTS = 2**26


class Unknown(Exception):
    """An equation is left to XLA."""


def evaluated(make: Callable[[], Any]) -> Any:
    """What `make` gives, a tree of `Named` arrays, with NumPy's arrays.

    Raises:
      Unknown: if it needs an operation that is not known here, or too many of them.
    """
    form: list[Any] = []

    def arrays() -> list[jax.Array]:
        leaves, tree = jax.tree.flatten(make())
        form[:] = tree, [x.axes for x in leaves]
        return [x.value for x in leaves]

    traced = jax.make_jaxpr(arrays)()
    with np.errstate(all="ignore"):  # integers wrap, as on any device
        found = _run(traced, [])
    tree, axes = form
    return tree.unflatten(map(Named, found, axes))


def _run(traced, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a closed jaxpr, of the equations that they need."""
    jaxpr, values = traced.jaxpr, {}
    values.update(zip(jaxpr.constvars, map(_number, traced.consts), strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def of(x) -> np.ndarray:
        return _number(np.asarray(x.val, x.aval.dtype)) if _is_literal(x) else values[x]

    equations, last = _needed(jaxpr)
    if sum(x.aval.size for one in equations for x in one.outvars) > _MOST_ELEMENTS:
        raise Unknown("results of so many elements")
    for number, equation in enumerate(equations):
        name, own = equation.primitive.name, [of(x) for x in equation.invars]
        if name in ("jit", "pjit"):
            found = _run(equation.params["jaxpr"], own)
        elif name in _RULES:
            found = _RULES[name](equation.params, *own)
            found = found if equation.primitive.multiple_results else [found]
        else:
            raise Unknown(name)
        for x, value in zip(equation.outvars, found, strict=True):
            values[x] = np.asarray(value).astype(x.aval.dtype, copy=False)
        for x in (*equation.invars, *equation.outvars):
            if not _is_literal(x) and last.get(x, number) == number:
                values.pop(x, None)
    return [of(x) for x in jaxpr.outvars]


def _needed(jaxpr) -> tuple[list, dict]:
    """The equations that results need, and after which one a value is let go."""
    results = [x for x in jaxpr.outvars if not _is_literal(x)]
    needed, equations = set(results), []
    for equation in reversed(jaxpr.eqns):
        if needed & {*equation.outvars}:
            equations.append(equation)
            needed |= {x for x in equation.invars if not _is_literal(x)}
    equations.reverse()
    last = {
        x: number
        for number, equation in enumerate(equations)
        for x in equation.invars
        if not _is_literal(x)
    }
    return equations, last | dict.fromkeys(results, len(equations))


def _is_literal(x) -> bool:
    return hasattr(x, "val")


def _number(value) -> np.ndarray:
    """A constant. Of denormal numbers XLA makes zeros on some devices."""
    value = np.asarray(value)
    if value.dtype.kind == "f":
        smallest = np.finfo(value.dtype).smallest_normal
        if np.any((value != 0) & (np.abs(value) < smallest)):
            raise Unknown("a denormal number")
    return value


def _quotient(params, x, y):
    """Towards zero, of integers; -1 by none."""
    if x.dtype.kind == "f":
        return x / y
    wide = np.abs(x.astype(np.int64)) // np.maximum(np.abs(y.astype(np.int64)), 1)
    return np.where(y == 0, -1, wide * np.sign(x) * np.sign(y))


def _remainder(params, x, y):
    """With the sign of x; of integers by none, x."""
    if x.dtype.kind == "f":
        return np.fmod(x, y)
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y)))


def _shifted(function: Callable, beyond: Callable) -> Callable:
    """By numbers of bits; `beyond` gives what is left of x after all of them."""

    def rule(params, x, bits):
        most = 8 * x.dtype.itemsize
        is_less = (bits >= 0) & (bits < most)
        return np.where(is_less, function(x, np.where(is_less, bits, 0)), beyond(x))

    return rule


def _sign_bits(x):
    return np.where(x < 0, -1, 0)


def _to_the_right(x, bits):
    """With zeros from the left."""
    wide = x.view(f"u{x.dtype.itemsize}")
    return np.right_shift(wide, bits.astype(wide.dtype)).view(x.dtype)


def _selected(params, which, *cases):
    return np.choose(which.astype(np.int64), cases)


def _broadcast(params, x):
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _iota(params):
    shape, axis = params["shape"], params["dimension"]
    own = [-1 if i == axis else 1 for i in range(len(shape))]
    return np.broadcast_to(np.arange(shape[axis]).reshape(own), shape)


def _sorted(params, *operands):
    if len(operands) != 1:
        raise Unknown("sort of several")
    return [np.sort(operands[0], axis=params["dimension"])]


def _padded(params, x, value):
    if any(lo < 0 or hi < 0 or between for lo, hi, between in params["padding_config"]):
        raise Unknown("pad")
    widths = [(lo, hi) for lo, hi, _ in params["padding_config"]]
    return np.pad(x, widths, constant_values=value)


def _summed_up(params, x):
    if params["reverse"]:
        raise Unknown("cumsum from the end")
    return np.cumsum(x, params["axis"], x.dtype)


def _slice(params, x):
    steps = params["strides"] or [None] * x.ndim
    ends = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return x[tuple(slice(*own) for own in ends)]


def _of(function: Callable) -> Callable:
    return lambda params, *args: function(*args)


def _reduced(function: Callable) -> Callable:
    return lambda params, x: function(x, axis=tuple(params["axes"]))


# NumPy's functions of the same meaning, by the name of JAX's primitive.
_ALIKE = {
    **{"abs": "abs", "add": "add", "ceil": "ceil", "floor": "floor", "sign": "sign"},
    **{"sub": "subtract", "mul": "multiply", "neg": "negative"},
    **{"max": "maximum", "min": "minimum", "not": "invert"},
    **{"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"},
    **{"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"},
    **{"gt": "greater", "ge": "greater_equal"},
}
_RULES: dict[str, Callable] = {
    **{name: _of(getattr(np, function)) for name, function in _ALIKE.items()},
    "reduce_sum": _reduced(np.sum),
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "reduce_and": _reduced(np.all),
    "reduce_or": _reduced(np.any),
    "convert_element_type": _of(np.asarray),  # as of every result
    "clamp": _of(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "broadcast_in_dim": _broadcast,
    "cumsum": _summed_up,
    "div": _quotient,
    "iota": _iota,
    "pad": _padded,
    "rem": _remainder,
    "select_n": _selected,
    "shift_left": _shifted(np.left_shift, np.zeros_like),
    "shift_right_arithmetic": _shifted(np.right_shift, _sign_bits),
    "shift_right_logical": _shifted(_to_the_right, np.zeros_like),
    "slice": _slice,
    "sort": _sorted,
    "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "unstack": lambda params, x: list(np.moveaxis(x, params["axis"], 0)),
}
