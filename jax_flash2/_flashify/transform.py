"""flashify(): the transform."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from jax_flash2._flashify.evaluate import run
from jax_flash2._flashify.graph import graph_of
from jax_flash2._flashify.meaning import Meanings
from jax_flash2._flashify.plan import Plan, plan_of
from jax_flash2._flashify.report import Report, report_of

P = ParamSpec("P")
R = TypeVar("R")


class Flashified(Generic[P, R]):
    """What `flashify` returns: a function, and `report`."""

    def __init__(self, function: Callable[P, R], must_find: bool):
        self._function, self._must_find = function, must_find
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: P.args, **keywords: P.kwargs) -> R:
        plan, arrays, tree = _planned(self._function, args, keywords)
        if self._must_find and not plan.has_sites:
            raise ValueError(
                f"flashify found no attention that it can replace in {_name(self)}"
                f"\n{report_of(plan)}"
            )
        return jax.tree.unflatten(tree, run(plan, arrays))

    def __get__(self, instance: Any, owner: Any = None) -> Flashified:
        """Of a method: that of an object."""
        function = self._function.__get__(instance, owner)  # pyright: ignore
        return self if instance is None else Flashified(function, self._must_find)

    def report(self, *args: P.args, **keywords: P.kwargs) -> Report:
        """What a call with these arguments would do; nothing is computed.

        Args:
          *args, **keywords: of the function. Each array may be a
            `jax.ShapeDtypeStruct`.
        """
        plan, _, _ = _planned(self._function, args, keywords)
        return report_of(plan)

    def __repr__(self) -> str:
        return f"flashify({_name(self)})"


def flashify(function: Callable[P, R], *, must_find: bool = False) -> Flashified[P, R]:
    """A function that computes its attention by `jax_flash2.attention`.

    It is traced, softmax(q k^T) v is found in what was traced, and calls of `attention`
    take its place: no change of the code that wrote it. All else stays as it is. Works
    inside and outside of `jit`, `grad`, `vmap` and `shard_map`. A gradient must be
    taken of the new function: one that was taken before uses the probabilities, and its
    attention is left alone.

    What is found: products of queries and keys in any order of axes, scale, biases,
    soft cap, masks (`where` with a number of at most -1e4, or such a number added), a
    softmax in any usual form, heads that are repeated (then they no longer are), in
    straight code and inside `jit`, `lax.scan`, `while_loop`, `cond`, `jax.checkpoint`,
    JAX's own functions with custom derivatives, and `shard_map`. A mask of positions
    becomes `is_causal` or `local_window_size`, one of equal ids segment ids; others
    stay masks.

    A softmax is left alone unless its meaning is known to be that of `attention`: with
    dropout, with scores or probabilities that are used elsewhere, or with an operation
    in between that `attention` has not. Rows without keys keep what the function gives
    there (the mean of the values, their sum, or NaN). Results are as near to the exact
    ones as the function's own, not equal to the bit.

    What is assumed of numbers: a score is small beside a number that masks, so that it
    is rounded away where that is added to it. A bias that is data (not made of a
    condition) leaves each row a key if it masks by -inf, or beside a mask, as does a
    bias beside an added mask for the bias's own gradient.

    Each call traces the function, which takes longer than the function alone: put it in
    `jax.jit`, where that is once for all calls of the same shapes. Equal layers are one
    `jit` then, called `flashify` in profiles.

    Args:
      function: of arrays, in any pytrees. Other arguments (numbers, strings, NumPy
        arrays, modules with arrays inside) are as the function got them before.
      must_find: whether a call raises if there is nothing to replace.

    Returns:
      The function. Its method `report` takes the same arguments, or
      `jax.ShapeDtypeStruct`s, and returns a `Report`: for each softmax of scores the
      line of the user's code, the arguments of `attention`, what `explain` says, and
      the bytes of scores and probabilities that are no longer written; or why it is
      left alone.

    Raises:
      TypeError: if `function` is none, or returns something else than arrays.
      ValueError: if `must_find` and nothing is found; or if the function changes state
        outside of it, which it cannot do while it is traced.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash2 import flashify
      >>> def model(x):
      ...     mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
      ...     scores = jnp.where(mask, x @ x.T / 4.0, -1e9)
      ...     return jax.nn.softmax(scores) @ x
      >>> fast = jax.jit(flashify(model))
      >>> x = jax.random.normal(jax.random.key(0), (32, 16))
      >>> bool(jnp.allclose(fast(x), model(x), atol=2e-2))
      True
      >>> report = flashify(model).report(x)
      >>> report.replaced[0].arguments["is_causal"]
      True
    """
    if not callable(function):
        raise TypeError(
            f"function must be a function, got {type(function).__name__}: pass what is "
            "called with arrays, as model.apply or lambda params, x: ..."
        )
    if any(f(function) for f in _OF_STEPS):
        raise TypeError(
            "function must return arrays, got a generator or a coroutine function"
        )
    if not isinstance(must_find, bool):
        raise TypeError(f"must_find must be a bool, got {must_find!r}")
    return Flashified(function, must_find)


_OF_STEPS = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)
# What libraries raise where state is changed inside of a trace.
_OF_STATE = ("TraceContextError", "UnexpectedTracerError")


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _planned(function: Callable, args: tuple, keywords: dict) -> tuple[Plan, list, Any]:
    """The plan of a call, its arrays, and the structure of its result."""
    leaves, structure = jax.tree.flatten((args, keywords))
    places = [i for i, x in enumerate(leaves) if _is_array(x)]
    trees = []

    def of_arrays(*arrays):
        own = list(leaves)
        for i, x in zip(places, arrays, strict=True):
            own[i] = x
        args, keywords = jax.tree.unflatten(structure, own)
        result = function(*args, **keywords)
        out, tree = jax.tree.flatten(result)
        trees.append(tree)
        _check_results(function, result)
        return out

    arrays = [leaves[i] for i in places]
    try:
        closed = jax.make_jaxpr(of_arrays)(*arrays)
    except Exception as error:
        if type(error).__name__ not in _OF_STATE:
            raise
        raise ValueError(
            f"{_name(function)} changes state outside of it, which it cannot do while "
            "flashify traces it: pass the state in and return it (in nnx by nnx.split "
            f"and nnx.merge). {type(error).__name__}: {error}"
        ) from error
    return plan_of(graph_of(closed), Meanings()), arrays, trees[-1]


def _check_results(function: Callable, result: Any) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(result):
        if not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex):
            raise TypeError(
                f"{_name(function)} must return arrays, got {type(x).__name__} as "
                f"result{jax.tree_util.keystr(path)}"
            )


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))  # a union is made anew
