"""Named axes: every operand says what each of its axes means, in memory order.

The names of a single attention problem are

| name | axis |
| --- | --- |
| `t` | query rows |
| `s` | key and value rows |
| `n` | query heads |
| `k` | key/value heads; query head n reads key/value head n // (N // K) |
| `h` | head size of query and key |
| `d` | head size of value and output |
| `i`, `j` | blocks of query rows and of key rows, in block tables (`core.masks`) |
| `e` | diagonals of tiles of pairs, of equally many queries and keys |
| `y` | parts of the heads and batch entries that a program visits (`division`) |
| `z` | parts of the blocks that it visits |
| `w` | sums that a gradient is the sum of (`mosaic_gpu.hopper.backward`) |
| `x...` | a table that programs read at computed places (`whole_axis`) |
| `p`, `r` | pages, and rows of a page, where keys are in pages (`core.pages`) |
| `c` | places of a page table: `s` is `c` times `r` |
| `u0`, `u1` | keys and values in one array, of which only that element is meant |
| `hh`, `dd` | bytes with two elements of `h` or `d` each (`core.nibbles`) |
| `d...` | head size of key, of which the first so many elements are the value's `d` |
| anything else | batch (`b0`, `b1`, ... of the caller, `v0`, `v1`, ... of `jax.vmap`) |

`None` names an axis of size 1 that is broadcast; a name that an operand lacks is
broadcast too. So a bias, a mask and an unmapped key need no special case, and
`jax.vmap` is one more name wherever the mapped axis happens to lie: no transpose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import dot_general_p

from pallas_kernels.core.promotion import at_least_float32

Axes = tuple[str | None, ...]

_NOT_BATCH = ("t", "s", "n", "k", "h", "d", "i", "j", "e")
_OF_PAGES = ("p", "r", "c", "u0", "u1")
_IN_PAIRS = {"hh": "h", "dd": "d"}

# The key rows of all devices, in their order, where `s` are those of one.
ALL_KEYS = "all keys"


@dataclasses.dataclass(frozen=True)
class Named:
    """A value (array, shape struct) with the name of each of its axes.

    Not a pytree node, so that trees of `Named` can be mapped leaf by leaf.
    """

    value: Any
    axes: Axes

    def __post_init__(self):
        if len(self.axes) != len(self.value.shape):
            raise ValueError(f"{self.axes=} do not fit shape {self.value.shape}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self):
        return self.value.dtype

    def squeezed(self) -> Named:
        """The same without its broadcast axes of size 1."""
        lost = tuple(i for i, name in enumerate(self.axes) if name is None)
        if not lost:
            return self
        kept = tuple(name for name in self.axes if name is not None)
        if isinstance(self.value, jax.ShapeDtypeStruct):
            pairs = zip(self.shape, self.axes, strict=True)
            shape = [size for size, name in pairs if name is not None]
            return Named(jax.ShapeDtypeStruct(shape, self.dtype), kept)
        return Named(jnp.squeeze(self.value, lost), kept)

    @classmethod
    def broadcast(cls, value: jax.Array, axes: Axes) -> Named:
        """An array of which axes of size 1 may stand for larger ones."""
        sizes = zip(axes, value.shape, strict=True)
        return cls(value, tuple(None if n == 1 else a for a, n in sizes)).squeezed()

    def split(self, name: str, inner: str, inner_size: int) -> Named:
        """Splits axis `name` in two: (`name`, `inner`), inner fastest."""
        if name not in self.axes:
            return self
        i = self.axes.index(name)
        shape = self.shape
        outer_size = shape[i] // inner_size
        shape = (*shape[:i], outer_size, inner_size, *shape[i + 1 :])
        axes = (*self.axes[: i + 1], inner, *self.axes[i + 1 :])
        return Named(self.value.reshape(shape), axes)

    def joined(self, outer: str, inner: str) -> Named:
        """Makes two neighbouring axes one, called `outer`: the inverse of `split`."""
        i = self.axes.index(outer)
        if self.axes[i + 1] != inner:
            raise ValueError(f"{outer!r} and {inner!r} are no neighbours: {self.axes}")
        shape = (
            *self.shape[:i],
            math.prod(self.shape[i : i + 2]),
            *self.shape[i + 2 :],
        )
        return Named(
            self.value.reshape(shape), (*self.axes[: i + 1], *self.axes[i + 2 :])
        )

    def renamed(self, old: str, new: str | None) -> Named:
        return Named(self.value, tuple(new if a == old else a for a in self.axes))

    def summed(self, names: Sequence[str | None]) -> Named:
        """The sum over these axes."""
        lost = tuple(i for i, name in enumerate(self.axes) if name in names)
        kept = tuple(name for name in self.axes if name not in names)
        return Named(jnp.sum(self.value, lost), kept) if lost else self

    def ordered(self, axes: Axes) -> Named:
        """The same with its axes in another order."""
        return Named(self.to(axes), axes)

    def to(self, axes: Sequence[str | None]) -> jax.Array:
        """The array with axes in the order of `axes`, of size 1 where it lacks one.

        A whole axis comes last, also where `axes` lacks it.
        """
        named = self.squeezed()
        order = [named.axes.index(a) for a in axes if a in named.axes]
        order += [i for i, a in enumerate(named.axes) if is_whole(a) and a not in axes]
        missing = [i for i, a in enumerate(axes) if a not in named.axes]
        return jnp.expand_dims(jnp.transpose(named.value, order), missing)


def sizes(operands: Sequence[Any]) -> dict[str, int]:
    """The size of every named axis; operands that disagree are an error."""
    result: dict[str, int] = {}
    for operand in operands:
        for name, size in zip(operand.axes, operand.shape, strict=True):
            if first := first_of(name):
                name, size = first
            if pairs := in_pairs(name):
                name, size = pairs, 2 * size
            if name is None:
                if size != 1:
                    raise ValueError(f"broadcast axis of size {size} != 1: {operand}")
            elif result.setdefault(name, size) != size:
                raise ValueError(f"axis {name!r}: sizes {result[name]} and {size}")
    if "c" in result and "r" in result:
        result["s"] = result["c"] * result["r"]
    return result


def batch_axes(operands: Sequence[Any]) -> tuple[str, ...]:
    """Names that are neither rows, blocks, heads nor head size, as they appear."""
    names = (name for operand in operands for name in operand.axes)
    return tuple(dict.fromkeys(n for n in names if n is not None and is_batch(n)))


def is_batch(name: str) -> bool:
    return name not in _NOT_BATCH and not is_whole(name)


def whole_axis(size: int) -> str:
    """The name of an axis of so many elements of which a program may read any."""
    return f"x{size}"


def is_numbered(name: str | None) -> bool:
    """Whether it is a `whole_axis`."""
    return bool(name) and name.startswith("x")


def is_whole(name: str | None) -> bool:
    """Whether each device, and each block, needs all elements of an axis."""
    if name is None:
        return False
    if is_numbered(name) or name in _OF_PAGES:
        return True
    return first_of(name) is not None or in_pairs(name) is not None


def first_of(name: str | None) -> tuple[str, int] | None:
    """Of an axis of which the first elements are meant: as which axis, and how many."""
    if not name or name[0] != "d" or not name[1:].isdigit():
        return None
    return "d", int(name[1:])


def in_pairs(name: str | None) -> str | None:
    """Of an axis of bytes with two elements each: the axis of the elements."""
    return _IN_PAIRS.get(name) if name else None


def bytes_of(name: str) -> str:
    """Of a head axis: the one of bytes with two elements (inverse of `in_pairs`)."""
    return next(own for own, whole in _IN_PAIRS.items() if whole == name)


def fixed(name: str | None) -> int | None:
    """The element that is meant of an axis, where it is one of them."""
    return int(name[1:]) if name in ("u0", "u1") else None


def is_mapped(name: str | None) -> bool:
    """Whether `jax.vmap` made the axis: each of its elements is a call of its own."""
    return name is not None and name.startswith("v")


def summed_to(x: Named, axes: Axes) -> jax.Array:
    """The sum over the axes of `x` that `axes` lacks, as an array with `axes`."""
    x = x.squeezed()
    return x.summed([name for name in x.axes if name not in axes]).to(axes)


def operand_sum(
    operand: Named, names: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How the gradient of an operand of the scores is summed over pairs.

    With an axis of queries and one of keys it is made tile by tile, and what it was
    broadcast over is looped within a tile, for a result for each would be large. With
    only one of them it is made for every batch entry and head, and summed afterwards.

    Args:
      operand: the operand, or its gradient: with the axes that `jax.vmap` maps over.
      names: the axes of batch and heads.

    Returns:
      Its axes among `t` and `s` (at least one), and the names to loop over.
    """
    rows = tuple(name for name in ("t", "s") if name in operand.axes) or ("t",)
    if len(rows) == 1:
        return rows, ()
    looped = (a for a in names if a not in operand.axes)
    return rows, tuple(looped)


def product(
    a: jax.Array, b: jax.Array, contracting, batch=((), ()), precision=None
) -> jax.Array:
    """The matrix product of which all others are made; in float32, or wider.

    It binds JAX's primitive. `jax.lax.dot_general` is a function that tools replace
    while they trace a model (to quantise it), and a program of attention that was
    traced meanwhile would serve later calls from JAX's caches.

    Args:
      a, b: arrays of a dtype.
      contracting, batch: numbers of axes of a and of b, as `jax.lax.dot_general` takes
        them.
      precision: where inputs are float32: a `jax.lax.Precision`, a
        `jax.lax.DotAlgorithmPreset`, or None.
    """
    a, b = varying_alike((a, b))
    is_pair = isinstance(precision, jax.lax.Precision)
    contracting, batch = (
        tuple(tuple(numbers) for numbers in pair) for pair in (contracting, batch)
    )
    return dot_general_p.bind(
        a,
        b,
        dimension_numbers=(contracting, batch),
        precision=(precision, precision) if is_pair else precision,
        preferred_element_type=at_least_float32(a.dtype),
        out_sharding=None,
    )


def varying_alike(arrays: tuple) -> tuple:
    """Inside `shard_map`: all arrays vary along whatever mesh axis one of them does.

    The transpose sums the gradient of what was shared.
    """
    along = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in arrays]
    everything = frozenset().union(*along)
    return tuple(
        jax.lax.pcast(x, tuple(everything - axes), to="varying")
        if axes != everything
        else x
        for x, axes in zip(arrays, along, strict=True)
    )


def undivided(x: jax.Array) -> jax.Array:
    """All of x on each device, where its type says that it is divided.

    For operations whose results JAX gives no such type (explicit meshes).
    """
    sharding = jax.typeof(x).sharding
    if not any(sharding.spec):
        return x
    whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return jax.reshard(x, whole)


def contract(a: Named, b: Named, axes: Axes, precision=None) -> jax.Array:
    """The products of a and b, summed over the axes that `axes` lacks.

    Args:
      a, b: without broadcast axes.
      axes: of the result, of size 1 where neither has one.
      precision: of the product where inputs are float32.

    Returns:
      An array of float32, or wider.
    """
    a, b = (
        x.summed([name for name in x.axes if name not in (*other.axes, *axes)])
        for x, other in ((a, b), (b, a))
    )
    shared = [name for name in a.axes if name in b.axes]
    batch = [name for name in shared if name in axes]
    summed = [name for name in shared if name not in axes]

    def places(x: Named, names):
        return [x.axes.index(name) for name in names]

    contracting = places(a, summed), places(b, summed)
    batched = places(a, batch), places(b, batch)
    value = product(a.value, b.value, contracting, batched, precision)
    free = (name for x in (a, b) for name in x.axes if name not in shared)
    return Named(value, (*batch, *free)).to(axes)


def group_of(size: dict[str, int]) -> int:
    """Query heads of a key/value head; 1 if there are no heads."""
    has_heads = "n" in size and size.get("k", 0) != 0
    return size["n"] // size["k"] if has_heads else 1


@dataclasses.dataclass(frozen=True)
class Heads:
    """Query heads `n` seen as (`k`, `g`): a key/value head and a place in its group."""

    group: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, size: dict[str, int]) -> Heads:
        return cls(group_of(size), ("k", "g") if "n" in size else ())

    def split(self, x: Named) -> Named:
        return x.split("n", "g", self.group).renamed("n", "k")

    def split_axes(self, axes: Axes) -> Axes:
        split = (("k", "g") if a == "n" else (a,) for a in axes)
        return tuple(a for pair in split for a in pair)

    def merge(self, x: Named) -> Named:
        """The inverse of `split`, where `k` and `g` are neighbours."""
        if "g" not in x.axes:
            return x
        return x.joined("k", "g").renamed("k", "n")

    def result(self, x: Named, out: Named) -> jax.Array:
        """The sum of `x`, with split heads, over the axes that a result lacks.

        Args:
          out: the result, or its shape struct; its axes and its dtype are those wanted.
        """
        axes = self.split_axes(out.axes)
        merged = self.merge(Named(summed_to(x, axes), axes))
        return merged.value.astype(out.dtype)
