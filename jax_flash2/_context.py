"""Attention whose rows are divided over devices: which method, and all but the ring.

Each method makes a call of `attention` on one device from this device's rows, by names
of axes: what has the name `s` goes with the keys, what has `t` with the queries. What
is of pairs has `t` and `ALL_KEYS`, the keys of all devices. So no method knows a mask
or a score.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash2 import _backends, _ring, _sharding, _vjp
from jax_flash2._operation import Problem, forward_outputs
from jax_flash2._rows import Context, RowSharding, copied, sharding_of
from pallas_kernels import device, tables
from pallas_kernels.backend import Call
from pallas_kernels.core.axes import ALL_KEYS, Axes, Named
from pallas_kernels.core.dropout import BLOCK, GROUP
from pallas_kernels.core.masks import Lengths
from pallas_kernels.core.positions import ALL_ROWS, Numbering


def _rows(name: str) -> int:
    """Of keys on a device: few, whose way nothing hides; many, for a ring is ideal."""
    return tables.number("context", name)


class Local(NamedTuple):
    """What a method makes of a call.

    Attributes:
      call: on this device alone.
      finish: of each of its results: this device's rows.
    """

    call: Call
    finish: Callable[[Named], Named] = lambda x: x


def attend(
    call: Call, implementation: str | None, context: Context
) -> tuple[jax.Array, ...]:
    """This device's rows of the results (`_vjp.forward`).

    Args:
      call: with this device's rows; lengths, offset and `ALL_KEYS` are of all.
      implementation: as for `attention`.
      context: as for `attention`.

    Raises:
      ValueError: if the sharding does not fit the call, or no method serves it.
    """
    step = _next_step(call, implementation, context)
    if step.method == "ring":
        return _ring.attend(call, implementation, step.sharding)
    if step.method is None:
        return _vjp.run(_whole(call), implementation)
    local = _METHODS[step.method].local(call, step.sharding)
    if step.rest is None:
        found = _vjp.run(_whole(local.call), implementation)
    else:
        found = attend(local.call, implementation, step.rest)
    axes = result_axes(local.call)
    results = (local.finish(Named(x, a)) for x, a in zip(found, axes, strict=True))
    return tuple(x.value for x in results)


def explain(call: Call, implementation: str | None, context: Context) -> str:
    """What `attend` does with a call, and why."""
    lines = []
    while True:
        step = _next_step(call, implementation, context)
        name = step.method or "none"
        lines.append(f"context: {name}, since {step.why} ({step.sharding.words})")
        sees_more = call.spec.traits.cost_grows and not call.spec.traits.is_windowed
        if step.method in ("ring", "gather") and not step.sharding.stripe and sees_more:
            lines.append("    later devices have more to do: stripes would balance it")
        if step.method == "ring":
            call = _ring.round_of(call, step.sharding)
        elif step.method is not None:
            call = _METHODS[step.method].local(call, step.sharding).call
        if step.rest is None:
            break
        context = step.rest
    return "\n".join([*lines, _backends.explain(implementation, _whole(call))])


def on_mesh(
    function: Callable, call: Call, implementation: str | None
) -> list[jax.Array] | None:
    """A function of this module, where types say that rows are divided; None elsewhere.

    Args:
      function: `attend`, or one with its arguments and results.
      call: with all rows, on an explicit mesh, which divides them in runs.
      implementation: as for `attention`.

    Raises:
      ValueError: if operands are divided in a way that cannot be served.
    """
    division = _sharding.explicit_division(call.operands, call.argument, rows=True)
    if division is None or "t" not in division.along:
        return None
    context = Context(division.along["t"], None)
    tree = jax.tree.structure(call)

    def keys_of_all(axes: Axes) -> Axes:
        return tuple(ALL_KEYS if a == "s" and "t" in axes else a for a in axes)

    operands = [Named(x.value, keys_of_all(x.axes)) for x in call.operands]

    def part(*arrays):
        own = (Named(x, y.axes) for x, y in zip(arrays, operands, strict=True))
        return function(tree.unflatten(own), implementation, context)

    axes = [x.axes for x in operands]
    on_devices = _sharding.on_each_device(division, part, axes, result_axes(call))
    return on_devices(*(x.value for x in operands))


class Step(NamedTuple):
    """How rows that are divided along some axes are brought together.

    Attributes:
      method: its name; None on one device.
      sharding: of those rows.
      why: it is this method.
      rest: how the rows that it leaves are divided, along other axes.
    """

    method: str | None
    sharding: RowSharding
    why: str
    rest: Context | None = None


def _next_step(call: Call, implementation: str | None, context: Context) -> Step:
    sharding = sharding_of(context)
    sharding.check(call.size)
    if sharding.stripe == call.size["t"] == call.size["s"]:  # that is one run of rows
        sharding = dataclasses.replace(sharding, stripe=None)
    if sharding.parts == 1:
        return Step(None, sharding, "there is one device")
    if call.is_invariant:
        raise ValueError(
            "config=Config(invariant=True) goes with no rows divided over devices: "
            "their number decides which sums are made apart"
        )
    if len(context.axes) > 1 and context.method is None:
        last = dataclasses.replace(context, axis=context.axes[-1:])
        inner = sharding_of(last)
        if inner.parts > 1 and _heads_why_not(call, inner) is None:
            stripe = None if sharding.stripe is None else sharding.stripe * inner.parts
            rest = Context(context.axes[:-1], stripe)
            return Step("heads", inner, "the last of several axes divides them", rest)
    return Step(*_choice(call, implementation, context, sharding))


def _choice(
    call: Call, implementation: str | None, context: Context, sharding: RowSharding
) -> tuple[str, RowSharding, str]:
    why_not = {name: x.why_not(call, sharding) for name, x in _METHODS.items()}
    if implementation == _backends.REFERENCE:
        why_not["ring"] = f"implementation={implementation!r} wants all keys at once"
    serving = [name for name, why in why_not.items() if why is None]
    if context.method is not None:
        why = why_not[context.method]
        if why is None:
            return context.method, sharding, "it is asked for"
        others = " or ".join(f"method={name!r}" for name in serving)
        raise ValueError(
            f"context: method={context.method!r} cannot serve this call: {why}; "
            f"{others or 'no other method'} can"
        )
    if "halo" in serving and _is_short(call, sharding):
        return "halo", sharding, "a window needs few rows of other devices"
    few = f"{call.size['s']} key rows a device are few"
    is_short = call.size["s"] < _rows("few_rows")
    gathers = few if is_short else _gathers_cheaply(call, sharding)
    if "ring" in serving and not gathers:
        return "ring", sharding, "queries may look at all rows"
    if "gather" in serving:
        return "gather", sharding, why_not["ring"] or gathers
    if serving:
        return serving[0], sharding, f"gather: {why_not['gather']}"
    reasons = "; ".join(f"{name}: {why}" for name, why in why_not.items())
    raise ValueError(f"context: no method serves this call: {reasons}")


def result_axes(call: Call) -> list[Axes]:
    """Of the results."""
    structs = forward_outputs(Problem.of(call, ""), call.operands)
    return [tuple(a for a in x.axes if a != ALL_KEYS) for x in structs]


def _whole(call: Call) -> Call:
    """A call that has the keys of all devices."""
    spec = jax.tree.map(lambda x: x.renamed(ALL_KEYS, "s"), call.spec)
    return dataclasses.replace(call, spec=spec)


def _of_pairs(call: Call) -> str | None:
    """Why operands of pairs of rows keep a method from serving a call."""
    for name, operand in call.spec.score.operands.items():
        if ALL_KEYS in operand.axes:
            return f"{name} has a number for each pair of rows"
    if any(ALL_KEYS in x.axes for x in jax.tree.leaves(call.spec.masks)):
        return "mask has an element for each pair of rows"
    return None


def _unaligned(call: Call, sharding: RowSharding, names: str = "ts") -> str | None:
    """Why dropout keeps a method, for which these rows stay divided, from serving."""
    if call.spec.dropout is None:
        return None
    unit = GROUP if "s" in names else BLOCK
    runs = [sharding.stripe or call.size[name] for name in names]
    whose = "stripe" if sharding.stripe else "device"
    why = f"dropout needs multiples of {unit} rows of a {whose}, got {max(runs)}"
    return why if any(n % unit for n in runs) else None


# All keys on each device.


def _gather(call: Call, sharding: RowSharding) -> Local:
    def all_keys(x: Named) -> Named:
        return sharding.gathered(x, "s") if "s" in x.axes else x

    key, value = map(all_keys, (call.key, call.value))
    size = {"t": call.size["t"], "s": sharding.parts * call.size["s"]}
    own = sharding.numbering(sharding.rank(), size["t"])
    spec = jax.tree.map(all_keys, call.spec).of_rows(own, ALL_ROWS, size)
    return Local(dataclasses.replace(call, key=key, value=value, spec=spec))


def _gathers_cheaply(call: Call, sharding: RowSharding) -> str:
    """Why one call with all keys is better than a ring's rounds; or nothing.

    It makes no outputs and gradients in float32 to be added, but nothing hides the way
    of the keys.
    """
    keys = sharding.parts * (call.key.value.size + call.value.value.size)
    output, *_ = forward_outputs(Problem.of(call, ""), call.operands)
    own = call.query.value.size + math.prod(output.shape)
    if call.size["s"] >= _rows("many_rows") or keys > own or not device.are_linked():
        return ""
    return (
        "links are fast, and all keys and values are no more than a device's queries "
        "and output"
    )


# All rows of some heads on each device.


def _heads_why_not(call: Call, sharding: RowSharding) -> str | None:
    heads = call.size.get("k", 1)
    if "n" in call.size and heads % sharding.parts == 0:
        return None
    return f"{sharding.parts} devices do not divide {heads} key/value heads"


def _heads(call: Call, sharding: RowSharding) -> Local:
    def index(x: Named, names: tuple[str, ...]) -> int | None:
        return next((i for i, a in enumerate(x.axes) if a in names), None)

    def exchanged(x: Named) -> Named:
        x = x.squeezed()
        head, row = index(x, ("n", "k")), index(x, ("t", "s"))
        if row is None and head is not None:
            count = x.shape[head] // sharding.parts
            start = sharding.rank() * jnp.int32(count)
            value = lax.dynamic_slice_in_dim(x.value, start, count, head)
            return Named(value, x.axes)
        if row is None:
            return x
        if head is None:
            return sharding.gathered(x, str(x.axes[row]))
        value = sharding.exchanged(x.value, head, row)
        return Named(sharding.in_order(value, row), x.axes)

    def finish(x: Named) -> Named:
        head, row = x.axes.index("n"), x.axes.index("t")
        value = sharding.by_device(x.value, row)
        return Named(sharding.exchanged(value, row, head), x.axes)

    query, key, value = map(exchanged, (call.query, call.key, call.value))
    spec = jax.tree.map(exchanged, call.spec)
    local = dataclasses.replace(call, query=query, key=key, value=value, spec=spec)
    return Local(local, finish)


# The keys that a window needs.


def _halo_why_not(call: Call, sharding: RowSharding) -> str | None:
    before, after = call.spec.traits.reach
    rows = call.size["t"]
    if before is None or after is None:
        return "queries may look at keys however far from them"
    if call.spec.offset is not None:
        return "query_offset moves queries away from the keys of their device"
    if rows != call.size["s"]:
        return "a device has other numbers of query rows and of key rows"
    if sharding.stripe is not None and (after > 0 or before > sharding.stripe):
        return (
            f"with stripes of {sharding.stripe} rows the window must be causal and not "
            f"longer, got ({before}, {after})"
        )
    return _of_pairs(call) or _unaligned(call, sharding)


def _is_short(call: Call, sharding: RowSharding) -> bool:
    """Whether a window asks for fewer rows than other devices have (without stripes).

    With fewer, the keys of a device and those around them are not all keys, and more.
    """
    width = sum(n or 0 for n in call.spec.traits.reach)
    return sharding.stripe is not None or width < (sharding.parts - 1) * call.size["t"]


def _halo(call: Call, sharding: RowSharding) -> Local:
    before, after = (-(-(n or 0) // GROUP) * GROUP for n in call.spec.traits.reach)
    rows = call.size["t"]
    if sharding.stripe is not None:
        before = min(before, sharding.stripe)
        return _striped_halo(call, sharding, sharding.stripe, before)
    most = (sharding.parts - 1) * rows
    before, after = min(before, most), min(after, most)
    first = sharding.rank() * jnp.int32(rows)
    first_key = jnp.maximum(first - before, 0)
    earlier, later = (-(-n // max(rows, 1)) for n in (before, after))
    # What comes: from how many devices before this one, and which of their rows.
    places = [
        *((n, max(n * rows - before, 0), rows) for n in range(earlier, 0, -1)),
        (0, 0, rows),
        *((-n, 0, min(after - (n - 1) * rows, rows)) for n in range(1, later + 1)),
    ]

    def widened(x: Named) -> Named:
        if "s" not in x.axes:
            return x
        axis = x.axes.index("s")

        def from_device(copy: jax.Array, hops: int, start: int, end: int) -> jax.Array:
            part = lax.slice_in_dim(copy, start, end, axis=axis)
            return sharding.shifted(part, hops, around=False) if hops else part

        copies = zip(copied(x.value, len(places)), places, strict=True)
        parts = [from_device(copy, *place) for copy, place in copies]
        # The first devices lack rows before theirs: what comes there goes away.
        padding = [(0, 0)] * x.value.ndim
        padding[axis] = (0, before)
        value = jnp.pad(jnp.concatenate(parts, axis), padding)
        start = first_key - (first - before)
        value = lax.dynamic_slice_in_dim(value, start, before + rows + after, axis)
        return Named(value, x.axes)

    spec = jax.tree.map(widened, call.spec)
    if after:  # the last devices lack rows after theirs
        end = Lengths(key_value=Named(np.int32(sharding.parts * rows), ()))
        spec = dataclasses.replace(spec, masks=(*spec.masks, end))
    own, keys = (Numbering(Named(x, ())) for x in (first, first_key))
    spec = spec.of_rows(own, keys, {"t": rows, "s": before + rows + after})
    key, value = map(widened, (call.key, call.value))
    return Local(dataclasses.replace(call, key=key, value=value, spec=spec))


_STRIPES = "stripes"


def _striped_halo(call: Call, sharding: RowSharding, stripe: int, before: int) -> Local:
    """Each stripe as a batch entry, with the end of the stripe before it."""
    rank = sharding.rank()
    stripes = call.size["t"] // stripe
    number = jnp.arange(stripes, dtype=jnp.int32)
    first = (rank + number * jnp.int32(sharding.parts)) * jnp.int32(stripe)
    first_key = jnp.maximum(first - before, 0)

    def apart(x: Named, rows: str) -> Named:
        return x.split(rows, "", stripe).renamed(rows, _STRIPES).renamed("", rows)

    def own(x: Named) -> Named:
        if "t" in x.axes:
            return apart(x, "t")
        if "s" not in x.axes:
            return x
        x = apart(x, "s")
        axis = x.axes.index("s")
        ends = lax.slice_in_dim(x.value, stripe - before, stripe, axis=axis)
        ends = sharding.shifted(ends)
        # What comes before the first device's stripes is of the last's, one earlier.
        earlier = jnp.roll(ends, 1, axis - 1)
        ends = jnp.where(rank == 0, earlier, ends)
        widened = jnp.concatenate([ends, x.value], axis)
        # Nothing comes before the first of all.
        alone = jnp.concatenate([x.value, jnp.zeros_like(ends)], axis)
        is_first = Named(first == 0, (_STRIPES,)).to(x.axes)
        return Named(jnp.where(is_first, alone, widened), x.axes)

    def finish(x: Named) -> Named:
        pairs = ((_STRIPES, "t") if a == "t" else (a,) for a in x.axes if a != _STRIPES)
        axes = tuple(a for pair in pairs for a in pair)
        return x.ordered(axes).joined(_STRIPES, "t").renamed(_STRIPES, "t")

    rows, keys = (Numbering(Named(x, (_STRIPES,))) for x in (first, first_key))
    size = {"t": stripe, "s": before + stripe}
    spec = jax.tree.map(own, call.spec).of_rows(rows, keys, size)
    query, key, value = map(own, (call.query, call.key, call.value))
    local = dataclasses.replace(call, query=query, key=key, value=value, spec=spec)
    return Local(local, finish)


class _Method(NamedTuple):
    """A way to bring queries and keys together.

    Attributes:
      why_not: of a call and a sharding: why it cannot serve them, or None.
      local: of the same; None for the ring, which makes a call for each device.
    """

    why_not: Callable[[Call, RowSharding], str | None]
    local: Any = None


_METHODS = {
    "halo": _Method(_halo_why_not, _halo),
    "ring": _Method(lambda *x: _of_pairs(x[0]) or _unaligned(*x)),
    "gather": _Method(lambda *x: _unaligned(*x, names="t"), _gather),
    "heads": _Method(_heads_why_not, _heads),
}
