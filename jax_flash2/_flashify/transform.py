"""flashify(): the transform."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_flash2._flashify.evaluate import run
from jax_flash2._flashify.graph import graph_of
from jax_flash2._flashify.meaning import Meanings
from jax_flash2._flashify.plan import Plan, plan_of
from jax_flash2._flashify.report import Report, report_of


def flashify(function: Callable, *, must_find: bool = False) -> Callable:
    """A function with its attention computed by `jax_flash2.attention`."""
    if not callable(function):
        raise TypeError(f"flashify takes a function, got {type(function).__name__}")

    @functools.wraps(function)
    def flashified(*args, **keywords):
        plan, arrays, tree = _planned(function, args, keywords)
        if must_find and not plan.has_sites:
            raise ValueError(str(report_of(plan)))
        return jax.tree.unflatten(tree, run(plan, arrays))

    def report(*args, **keywords) -> Report:
        return report_of(_planned(function, args, keywords)[0])

    flashified.report = report  # type: ignore[attr-defined]
    return flashified


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
        out, tree = jax.tree.flatten(function(*args, **keywords))
        trees.append(tree)
        return out

    arrays = [leaves[i] for i in places]
    closed = jax.make_jaxpr(of_arrays)(*arrays)
    return plan_of(graph_of(closed), Meanings()), arrays, trees[-1]


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)
