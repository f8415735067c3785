"""Computes a `Form` by `attention`: arrays of the program in, its result out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash2._api import attention
from jax_flash2._flashify.axes import Axes
from jax_flash2._flashify.digits import FREE, Dim, Layout, size_of
from jax_flash2._flashify.facts import Added, Operand
from jax_flash2._flashify.graph import Value
from jax_flash2._flashify.masks import Dense
from jax_flash2._flashify.sites import Form
from pallas_kernels.core.promotion import at_least_float32

Read = Callable[[Value], jax.Array]


def arguments(form: Form, read: Read) -> dict[str, Any]:
    """The arguments of `attention`."""
    axes, dtype = form.axes, form.dtype
    heads = axes.heads + axes.group
    query = [*axes.of_batch, axes.rows, heads, axes.depth]
    key = [*axes.of_batch, axes.keys, axes.heads]
    found: dict[str, Any] = {
        "query": _cast(_whole(form.query, query, read), dtype),
        "key": _cast(_whole(form.key, [*key, axes.depth], read), dtype),
        "value": _cast(_whole(form.value, [*key, axes.width], read), dtype),
        "scale": form.scale,
        "logits_soft_cap": form.cap,
        "precision": form.precision,
    }
    found |= _masks(form, read)
    biases = [_bias(x, axes, read) for x in form.biases]
    found |= _biases(biases, [x.size for x in axes.batch], found)
    return {k: x for k, x in found.items() if x is not None}


def reader(form: Form, arrays: Sequence[jax.Array]) -> Read:
    """Reads the arrays of a site by the values of its form."""
    return dict(zip(form.arrays, arrays, strict=True)).__getitem__


def result(form: Form, arrays: Sequence[jax.Array]) -> jax.Array:
    """What the root of a site has as its result."""
    read = reader(form, arrays)
    given = arguments(form, read)
    out = attention(**given)
    if form.masks.empty != "none":
        out = _with_empty_rows(form, read, given, out)
    axes = form.axes
    groups = [*axes.of_batch, axes.rows, axes.heads + axes.group, axes.width]
    out = _arranged(out, groups, form.layout)
    aval = form.aval
    return _cast(_reshaped(out, list(aval.shape)), aval.dtype)


def _biases(
    arrays: list[jax.Array], entries: list[int], found: dict[str, Any]
) -> dict[str, Any]:
    """One bias, and a function that adds those that would make it larger."""
    total, others = None, []
    for x in sorted(arrays, key=lambda x: -x.size):
        shape = x.shape if total is None else jnp.broadcast_shapes(total.shape, x.shape)
        if total is None or shape == total.shape or "query_offset" in found:
            total = x if total is None else total + x
        else:
            others.append(_read_pairs(x, entries))

    def score_mod(score, b, h, q, kv):
        return score + sum(read(b, h, q, kv).astype(score.dtype) for read in others)

    return {"bias": total} | ({"score_mod": score_mod} if others else {})


def _read_pairs(array: jax.Array, entries: list[int]) -> Callable:
    """A function of (b, h, q, kv) that reads an array with the axes of pairs.

    Args:
      entries: sizes of the axes of the batch, which b counts together.
    """
    own = array.shape[len(entries) :]
    count = math.prod(entries)
    if array.size == math.prod(own):
        array = array.reshape(1, *own)
    else:
        array = jnp.broadcast_to(array, (*entries, *own)).reshape(count, *own)
    places = [i for i, size in enumerate(array.shape) if size > 1]
    array = array.reshape([array.shape[i] for i in places])
    return lambda *pair: array[tuple(pair[i] for i in places)]


def _bias(bias: Added, axes: Axes, read: Read) -> jax.Array:
    array = _spread(bias.operand, axes.pairs, read)
    wide = at_least_float32(array.dtype) if bias.factor != 1 else None
    return array if wide is None else array.astype(wide) * bias.factor


def _masks(form: Form, read: Read) -> dict[str, Any]:
    masks, axes = form.masks, form.axes
    found: dict[str, Any] = {}
    if masks.window is not None:
        found |= _window(*masks.window)
    if masks.segments is not None:
        rows, keys = masks.segments
        names = ("query_segment_ids", "key_value_segment_ids")
        for name, x, own in zip(
            names, (rows, keys), (axes.rows, axes.keys), strict=True
        ):
            found[name] = _whole(x, [*axes.of_batch, own], read).astype(jnp.int32)
    if masks.dense:
        kept = [_kept(x, axes, read) for x in masks.dense]
        found["mask"] = _all(kept)
    return found


def _window(left: int | None, right: int | None) -> dict[str, Any]:
    """Windows of negative sizes begin at an offset."""
    if right is not None and right <= 0:
        offset, right = right, 0
    elif left is not None and left < 0:
        offset = -left
    else:
        offset = 0
    left = None if left is None else left + offset
    found: dict[str, Any] = {"query_offset": offset} if offset else {}
    if right == 0:
        found["is_causal"] = True
    if left is not None or right:
        right = (
            None if right == 0 else right - offset if right and offset > 0 else right
        )
        found["local_window_size"] = (left, right)
    return found


def _kept(dense: Dense, axes: Axes, read: Read) -> jax.Array:
    array = _spread(dense.operand, axes.pairs, read)
    if array.dtype == jnp.bool_:
        return array if dense.number == 0 else ~array
    return array != jnp.asarray(dense.number, array.dtype)


def _all(kept: list[jax.Array]) -> jax.Array:
    found = kept[0]
    for x in kept[1:]:
        found = found & x
    return found


def _with_empty_rows(form: Form, read: Read, given, out: jax.Array) -> jax.Array:
    """The program's own result in rows that all masks leave without keys."""
    axes, masks = form.axes, form.masks
    kept = _all([_kept(x, axes, read) for x in masks.keeps])
    has_keys = jnp.any(kept, axis=-1, keepdims=True)  # [*batch, heads, rows, 1]
    has_keys = jnp.swapaxes(has_keys, -3, -2)  # [*batch, rows, heads, 1]
    wide = at_least_float32(out.dtype)
    value = given["value"].astype(wide)
    group = size_of(axes.group)
    mean = jnp.mean(value, axis=-3, keepdims=True)
    empty = jnp.repeat(mean, group, axis=-2)
    if masks.empty == "nan":
        empty = jnp.full_like(empty, jnp.nan)  # no NaN in others' gradients
    if masks.empty == "mean of scores":
        empty = empty + _without_value(_linear(form, given, value - mean, group, wide))
    if masks.is_sum:
        empty = empty * size_of(axes.keys)
    return jnp.where(has_keys, out, empty.astype(out.dtype))


def _linear(form: Form, given, apart: jax.Array, group: int, wide) -> jax.Array:
    """The derivative of equal probabilities by their scores, times the scores.

    Scores that a large number was added to are rounded away, but have a gradient.
    """
    query, key = (given[x].astype(wide) for x in ("query", "key"))
    count = size_of(form.axes.keys)
    apart = lax.stop_gradient(apart) * (form.scale / count)
    both = jnp.einsum("...skh,...skd->...khd", key, apart)
    return jnp.einsum("...tnh,...nhd->...tnd", query, jnp.repeat(both, group, axis=-3))


def _without_value(x: jax.Array) -> jax.Array:
    """Zeros that have the gradient of x."""
    return x - lax.stop_gradient(x)


# Axes.


def _whole(operand: Operand, groups: list[Dim], read: Read) -> jax.Array:
    """An operand with these axes, repeated along those that it has not."""
    found = _spread(operand, groups, read)
    sizes = tuple(size_of(x) for x in groups)
    return found if found.shape == sizes else jnp.broadcast_to(found, sizes)


def _spread(operand: Operand, groups: list[Dim], read: Read) -> jax.Array:
    """An operand with these axes, of size 1 where it is constant."""
    array = read(operand.value)
    digits = [x for dim in operand.layout for x in dim]
    array = _reshaped(array, [x.size for x in digits])
    for i in reversed([i for i, x in enumerate(digits) if x.axis == FREE]):
        array = lax.index_in_dim(array, 0, i, keepdims=False)
    digits = [x for x in digits if x.axis != FREE]
    wanted = [x for dim in groups for x in dim]
    array = _transposed(array, [digits.index(x) for x in wanted if x in digits])
    shape, sizes = [], []
    for dim in groups:  # an axis has all of its digits, or none
        has_any = any(x in digits for x in dim)
        shape += [x.size if has_any else 1 for x in dim]
        sizes.append(size_of(dim) if has_any else 1)
    array = _reshaped(array, [x.size if x in digits else 1 for x in wanted])
    if list(array.shape) != shape:
        array = jnp.broadcast_to(array, shape)
    return _reshaped(array, sizes)


def _arranged(array: jax.Array, groups: list[Dim], layout: Layout) -> jax.Array:
    """From these axes to those of a layout, digit by digit."""
    digits = [x for dim in groups for x in dim]
    array = _reshaped(array, [x.size for x in digits])
    return _transposed(array, [digits.index(x) for dim in layout for x in dim])


def _reshaped(array: jax.Array, shape: list[int]) -> jax.Array:
    array = jnp.asarray(array)
    return array if list(array.shape) == shape else lax.reshape(array, shape)


def _transposed(array: jax.Array, order: list[int]) -> jax.Array:
    is_same = order == list(range(len(order)))
    return array if is_same else lax.transpose(array, order)


def _cast(array: jax.Array, dtype: Any) -> jax.Array:
    return array if array.dtype == dtype else lax.convert_element_type(array, dtype)
