"""Ring attention: keys and values travel from device to device, the queries stay.

In round i of P, device r has the keys of device r + i. The forward merges what its
queries make of them (`flash2.merge`). The backward needs no more of other rounds than
the output, the log-sum-exp and their cotangents: with those, what one call makes of
some keys is their share of the gradients. All sums are float32, or wider.

In forward mode keys and their tangents travel together, and JAX pushes tangents through
each round and the merge. So it does through gradients, for which each round then has an
output of its own (`_pulled_by_rounds`): the backward above takes output and log-sum-exp
as they are, though they depend on the operands.

The backward goes the other way round, from the keys that the forward had last, those of
device r - 1, which it keeps: in round i a device has the keys of r - 1 - i, and in the
last round its own. dk and dv follow their keys one round later, and so are at home when
the last kernel ends.

A kernel runs while anything travels. XLA would move all keys before the first kernel; a
barrier for each round keeps it from that. No round is skipped by a condition, for which
XLA would ask the host: where a device has nothing to do, the kernel's programs end at
once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_flash2 import _backends, _vjp
from jax_flash2._linear import Linear
from jax_flash2._operation import Problem, forward_outputs, is_differentiable
from jax_flash2._rows import RowSharding
from pallas_kernels import passes
from pallas_kernels.backend import Call
from pallas_kernels.core import flash2
from pallas_kernels.core.axes import Axes, Named, varying_alike
from pallas_kernels.core.promotion import at_least_float32

# Of more devices, the rounds between the first and the last are a loop: three copies of
# each kernel in the program, whatever their number.
_UNROLLED = 4
_DEVICES = "p"  # the axis of what all devices have, in operands that are gathered


def attend(
    call: Call, implementation: str | None, sharding: RowSharding
) -> tuple[jax.Array, ...]:
    """The results of this device's queries (`_vjp.forward`), differentiable once.

    Raises:
      ValueError: if XLA would end the process, which it does for rings of plain JAX in
        a `shard_map` where GSPMD divides the program.
    """
    backend = _backends.choose(implementation, round_of(call, sharding))
    manual = set(sharding.axes) <= set(jax.sharding.get_abstract_mesh().manual_axes)
    is_plain = backend not in _backends.BACKENDS or (
        _backends.BACKENDS[backend].has_tangents
    )
    if manual and is_plain and not jax.config.jax_use_shardy_partitioner:
        raise ValueError(
            "context: a ring requires JAX's partitioner Shardy, got "
            "jax_use_shardy_partitioner=False: set it to True, or pass "
            "Context(..., method='gather') or 'heads'"
        )

    def of_all(x: Named) -> Named:
        if "s" not in x.axes:
            return x
        return Named(sharding.of_all(x.value), (_DEVICES, *x.axes))

    # What goes with keys is little beside them, and so it does not travel.
    call = dataclasses.replace(call, spec=jax.tree.map(of_all, call.spec))
    problem = Problem.of(call, backend, is_named=implementation is not None)
    ring = _Ring(problem, sharding)
    values = tuple(x.value for x in call.operands)
    *arrays, rank = varying_alike((*values, sharding.rank()))
    return _run(ring, tuple(arrays), rank)


def round_of(call: Call, sharding: RowSharding) -> Call:
    """The call that each round makes, for the choice of a backend."""
    return _round(call, sharding, sharding.rank(), sharding.rank())


def _round(call: Call, sharding: RowSharding, rank, source) -> Call:
    """This device's queries and the keys of device `source`; `call.spec` is theirs."""
    size = {"t": call.size["t"], "s": call.size["s"]}
    rows = sharding.numbering(rank, size["t"])
    keys = sharding.numbering(source, size["s"])
    spec = dataclasses.replace(call.spec, sink=None, is_part=True)
    return dataclasses.replace(call, spec=spec.of_rows(rows, keys, size))


@dataclasses.dataclass(frozen=True)
class _Ring:
    """What is static about a ring; its arrays are those of the problem.

    Attributes:
      problem: with this device's rows of queries and of keys; what else goes with keys
        has an axis for the devices in front.
      sharding: of the rows on devices.
    """

    problem: Problem
    sharding: RowSharding

    def result_axes(self, arrays) -> list[Axes]:
        """Of the results."""
        operands = list(map(Named, arrays, self.problem.axes))
        structs = forward_outputs(self.problem, operands)
        return [tuple(a for a in x.axes if a != _DEVICES) for x in structs]

    def rounds(self, arrays, rank) -> _Rounds:
        return _Rounds(self, self.problem.named(arrays), rank)


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """A ring on one device.

    Attributes:
      ring: its static part.
      whole: the call of its problem.
      rank: of this device.
    """

    ring: _Ring
    whole: Call
    rank: jax.Array

    def source(self, steps) -> jax.Array:
        """The device so many steps, from -P on, after this one."""
        parts = jnp.int32(self.ring.sharding.parts)
        return lax.rem(self.rank + steps + parts, parts)

    def call(self, source, k: Named, v: Named) -> tuple[Problem, tuple]:
        """Problem and arrays of a round with a device's keys, without a sink."""

        def of_source(x: Named) -> Named:
            if _DEVICES not in x.axes:
                return x
            value = lax.dynamic_index_in_dim(x.value, source, 0, keepdims=False)
            return Named(value, x.axes[1:])

        static = self.ring.problem
        spec = jax.tree.map(of_source, self.whole.spec)
        call = dataclasses.replace(self.whole, key=k, value=v, spec=spec)
        call = _round(call, self.ring.sharding, self.rank, source)
        problem = Problem.of(call, static.backend, is_named=static.is_named)
        return problem, tuple(x.value for x in call.operands)

    def packed(self, k: Named, v: Named) -> jax.Array:
        """What belongs to keys and to values as one array, that travels at once."""
        return jnp.concatenate([k.value, v.value], axis=-1)

    def unpacked(self, pair: jax.Array) -> tuple[Named, Named]:
        return self.named(*jnp.split(pair, [self.whole.key.shape[-1]], axis=-1))

    def named(self, k: jax.Array, v: jax.Array) -> tuple[Named, Named]:
        return Named(k, self.whole.key.axes), Named(v, self.whole.value.axes)

    def shifted(self, pair: jax.Array, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both from the device before this one, in one permutation.

        As integers: XLA may compute with numbers of two bytes in four, where what is
        half of another number can become a different one.
        """
        unit = jnp.dtype(f"uint{8 * pair.dtype.itemsize}")
        words = grads.dtype.itemsize // unit.itemsize
        halves = lax.bitcast_convert_type(grads, unit)
        halves = halves.reshape(*grads.shape[:-1], words * grads.shape[-1])
        both = [lax.bitcast_convert_type(pair, unit), halves]
        there = self.ring.sharding.shifted(jnp.concatenate(both, axis=-1))
        pair_there, halves = jnp.split(there, [pair.shape[-1]], axis=-1)
        if words > 1:
            halves = halves.reshape(*grads.shape, words)
        return (
            lax.bitcast_convert_type(pair_there, pair.dtype),
            lax.bitcast_convert_type(halves, grads.dtype),
        )

    def run(self, turn: Callable, carry):
        """`carry = turn(number, carry)` for all rounds but the first and the last."""
        last = self.ring.sharding.parts - 1
        if last < _UNROLLED:
            for number in range(1, last):
                carry = turn(jnp.int32(number), carry)
            return carry
        # Of Python integers `fori_loop` makes an int64 under x64.
        return lax.fori_loop(np.int32(1), np.int32(last), turn, carry)


def _forward(
    ring: _Ring, arrays, rank
) -> tuple[tuple[jax.Array, ...], tuple[Named, Named]]:
    """The results; keys and values of the last round."""
    rounds = ring.rounds(arrays, rank)
    last = jnp.int32(ring.sharding.parts - 1)
    shift = functools.partial(ring.sharding.shifted, by=-1)
    merge = functools.partial(_merged, ring.result_axes(arrays))

    def part(number, k, v):
        return _vjp.forward(*rounds.call(rounds.source(number), k, v))

    def turn(number, carry):
        pair, state = carry
        following = shift(pair)
        state = merge(state, part(number, *rounds.unpacked(pair)))
        return lax.optimization_barrier((following, state))

    own = rounds.whole.key, rounds.whole.value
    first = shift(rounds.packed(*own)), part(jnp.int32(0), *own)
    pair, state = rounds.run(turn, lax.optimization_barrier(first))
    pair = rounds.unpacked(pair)
    o, *of_rows = merge(state, part(last, *pair), sink=rounds.whole.spec.sink)
    return (o.astype(rounds.whole.value.dtype), *of_rows), pair


def _merged(axes: list[Axes], *parts, sink: Named | None = None):
    """The results, with these axes, of results over disjoint keys."""
    of_o, of_lse, *_ = axes
    rows = tuple(a for a in of_o if a != "d")
    outputs, logs, *others = zip(*parts, strict=True)
    largest = (functools.reduce(jnp.maximum, x) for x in others)
    o = [Named(x, of_o).to((*rows, "d")) for x in outputs]
    lse = [Named(x, of_lse).to(rows) for x in logs]
    o, lse = flash2.merge(o, lse, None if sink is None else sink.to(rows))
    return Named(o, (*rows, "d")).to(of_o), Named(lse, rows).to(of_lse), *largest


def _backward(ring: _Ring, arrays, rank, pair, *results) -> tuple[jax.Array, ...]:
    """Gradients of the operands that are differentiable, in order.

    Args:
      pair: keys and values of the forward's last round.
      results: o and lse, and their cotangents.
    """
    parts, shift = ring.sharding.parts, ring.sharding.shifted
    # Else XLA makes one of the forward's permutations and those here, and all keys
    # would be kept in between. With the forward's results, since keys that set off
    # before its last round would leave those of that round alone on their way.
    arrays, pair, results = lax.optimization_barrier((arrays, pair, results))
    rounds = ring.rounds(arrays, rank)
    named = {
        n: x for n, x in rounds.whole.differentiable.items() if is_differentiable(x)
    }
    of_keys, sink = ("key", "value"), named.pop("sink", None)
    of_queries = {n: x for n, x in named.items() if n not in of_keys}

    def gradients(number, k, v, sums):
        """Of dq and what goes with the queries; of keys and values, packed."""
        source = rounds.source(-1 - number)
        problem, values = rounds.call(source, k, v)
        found = _vjp.backward(problem, values, *results)

        def added(x: Named, total, more):
            if _DEVICES not in x.axes:
                return total + more
            return lax.dynamic_update_index_in_dim(total, more, source, 0)

        pair = rounds.named(*(found[name] for name in of_keys))
        sums = {n: added(x, sums[n], found[n]) for n, x in of_queries.items()}
        return sums, rounds.packed(*pair)

    def turn(number, carry):
        pair, sums, grads = carry
        following, grads = rounds.shifted(pair, grads)
        sums, more = gradients(number, *rounds.unpacked(pair), sums)
        return lax.optimization_barrier((following, sums, grads + more))

    sums = {
        n: jnp.zeros_like(x.value, at_least_float32(x.dtype))
        for n, x in of_queries.items()
    }
    pair = rounds.named(*pair)
    following = shift(rounds.packed(*pair)) if parts > 2 else None
    sums, grads = gradients(jnp.int32(0), *pair, sums)
    # Without the sums: the next ones are then added in one operation with their zeros.
    following, grads = lax.optimization_barrier((following, grads))
    _, sums, grads = rounds.run(turn, (following, sums, grads))
    grads = shift(grads)
    own = rounds.whole.key, rounds.whole.value
    sums, more = gradients(jnp.int32(parts - 1), *own, sums)
    pair = (x.value for x in rounds.unpacked(grads + more))
    found = {**sums, **dict(zip(of_keys, pair, strict=True))}
    if sink is not None:
        axes = ring.result_axes(arrays)[:2] * 2
        saved = list(map(Named, results, axes))
        delta = passes.delta_of(*saved)
        found["sink"] = passes.of_sink(sink, saved[1], delta, sink)
    return tuple(found[name] for name in ring.problem.places if name in found)


class _Moved(NamedTuple):
    """A ring whose operands have tangents, or get gradients.

    Attributes:
      ring: the ring.
      places: of those operands.
    """

    ring: _Ring
    places: tuple[int, ...]

    def points(self, known) -> list[jax.Array]:
        """Those operands, of what is known (`_change`)."""
        return [known[i] for i in self.places]

    def results(self, known) -> Callable:
        """Output and log-sum-exp as a function of them: JAX can differentiate it."""
        problem = self.ring.problem
        ring = dataclasses.replace(self.ring, problem=problem.differentiated)
        *arrays, rank = known[: len(problem.axes) + 1]

        def run(*points):
            given = dict(zip(self.places, points, strict=True))
            values = tuple(given.get(i, x) for i, x in enumerate(arrays))
            return _forward(ring, values, rank)[0]

        return run


def _pushed(moved: _Moved, known, along):
    """Tangents of output and log-sum-exp: those of each round, and of their merge."""
    return jax.jvp(moved.results(known), moved.points(known), list(along))[1]


def _pulled(moved: _Moved, known, cotangents):
    """Gradients, by the backward's own ring."""
    count = len(moved.ring.problem.axes)
    arrays, (rank, *pair), saved = known[:count], known[count:-2], known[-2:]
    gradients = iter(_backward(moved.ring, arrays, rank, pair, *saved, *cotangents))
    found = {i: next(gradients) for i, x in enumerate(arrays) if is_differentiable(x)}
    return [found[i].astype(arrays[i].dtype) for i in moved.places]


def _pulled_by_rounds(moved: _Moved, known, cotangents):
    """The same as JAX finds it, with an output and a log-sum-exp for each round.

    Those of all rounds, which `_pulled` takes as they are, depend on the operands. Here
    they do so in JAX's eyes, too. All keys are kept.
    """
    return jax.vjp(moved.results(known), *moved.points(known))[1](tuple(cotangents))


_TANGENT = Linear("flash2_ring_tangent", _pushed, lambda _, x, __: x[-2:], _pushed)
_GRADIENT = Linear(
    "flash2_ring_gradient",
    _pulled,
    lambda moved, x, _: moved.points(x),
    _pulled_by_rounds,
)
_TANGENT.transpose, _GRADIENT.transpose = _GRADIENT, _TANGENT


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _ring(ring: _Ring, arrays, rank) -> tuple[jax.Array, ...]:
    return _forward(ring, arrays, rank)[0]


@functools.partial(_ring.defjvp, symbolic_zeros=True)
def _change(ring: _Ring, primals, tangents):
    """The rule of both modes; what the gradient takes is kept, with names."""
    (arrays, rank), (along, _) = primals, tangents
    results, pair = _forward(ring, arrays, rank)
    saved = _vjp.to_save(*results[:2])
    # Under the name of the output, with which they are saved.
    pair = [checkpoint_name(x.value, _vjp.OUTPUT_NAME) for x in pair]
    places = [
        i
        for i, x in enumerate(along)
        if is_differentiable(arrays[i]) and not isinstance(x, SymbolicZero)
    ]
    known = (*arrays, rank, *pair, *saved)
    found = _TANGENT(_Moved(ring, tuple(places)), known, [along[i] for i in places])
    others = results[2:]
    return (*saved, *others), (*found, *map(jnp.zeros_like, others))


# Jitted, so that equal calls of a program (the layers of a model) are traced once.
_run = jax.jit(_ring, static_argnums=0)
