"""How rows are divided over devices: `Context`, and stripes of rows.

A device has rows that follow one another, or stripes: with P devices and stripes of s
rows, device r has the rows [r * s, r * s + s), then those P * s further, and so on.
Under a causal mask later rows have more to do, and documents in a packed row differ in
length: stripes give every device some of each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash2._arrays import check_array
from pallas_kernels.core.axes import Named
from pallas_kernels.core.positions import Numbering
from pallas_kernels.core.promotion import at_least_float32

METHODS = ("ring", "halo", "gather", "heads")
STRIPE = 128


@dataclasses.dataclass(frozen=True)
class Context:
    """The rows of a call are divided over devices (context parallelism).

    For `attention(..., context=Context(...))` inside `jax.shard_map` or `jax.pmap`.
    Every device calls with its rows of query, key, value and segment ids; the results
    are its rows of what one device would compute with all of them. What has no rows
    (lengths, offsets, sinks, slopes, `dropout_rng`) must be the same on all devices.

    Attributes:
      axis: name of the mesh axis that divides the rows, or a tuple of names, the
        outermost first, as in a `PartitionSpec`.
      stripe: rows of a stripe. The rows of every device must be whole stripes, laid out
        as `jax_flash2.stripe` does. None for rows that follow one another: device r has
        the r-th part of them.
      method: how keys and values reach the queries. None chooses (see
        `jax_flash2.explain`):

        - "ring": they travel from device to device, while each attends to those it has.
          Memory does not grow with the number of devices, save in second derivatives,
          which keep the keys and the result of each round.
        - "halo": with a window, each device gets the rows just outside its own. With
          stripes the window must be causal and at most a stripe long.
        - "gather": every device gets all of them. Serves biases and masks of pairs. It
          is chosen in place of a ring where one process has all devices, GPUs whose
          name says that they have NVLink, and all keys and values are no more than a
          device's queries and output, up to 131,071 key rows a device; and below 2048.
        - "heads": heads are divided instead, for the length of the call. The number of
          key/value heads must be a multiple of the number of devices. Serves biases and
          masks of pairs, too.

        With a tuple of axes and no method, heads are divided over the last axis if they
        can be, and a ring runs over the others: fast links belong last.

    Raises:
      TypeError, ValueError: if an attribute is not as above.

    Example:
      >>> from jax_flash2 import Context
      >>> Context("devices", stripe=128)
      Context(axis='devices', stripe=128, method=None)

    References:
      Liu et al., "Ring Attention with Blockwise Transformers", 2023; Brandon et al.,
      "Striped Attention", 2023; Jacobs et al., "DeepSpeed Ulysses", 2023, for heads.
    """

    axis: str | tuple[str, ...]
    stripe: int | None = STRIPE
    method: str | None = None

    def __post_init__(self):
        names = self.axes
        if not names or not all(isinstance(x, str) for x in names):
            raise TypeError(
                "Context.axis must be the name of a mesh axis or a tuple of names, got "
                f"{self.axis!r}"
            )
        if len(set(names)) != len(names):
            raise ValueError(f"Context.axis must name each axis once, got {names}")
        if self.stripe is not None:
            _check_size("Context.stripe", self.stripe)
        if self.method is not None and self.method not in METHODS:
            raise ValueError(
                f"Context.method must be None or one of {METHODS}, got {self.method!r}"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)


def _check_size(name: str, x: Any) -> None:
    if not isinstance(x, int | np.integer) or isinstance(x, bool):
        raise TypeError(f"{name} must be an int, got {type(x).__name__}")
    if x < 1:
        raise ValueError(f"{name} must be at least 1, got {x}")


def stripe(x, parts: int, size: int = STRIPE, axis: int = 1):
    """Reorders rows so that devices which divide them evenly have stripes of them.

    Do this once for each batch, to whatever has an axis of rows: tokens, targets,
    segment ids. Positions (of rotary embeddings, say) are `stripe_positions`.

    Args:
      x: an array (NumPy's remain so) with all rows, in their order.
      parts: number of devices, P.
      size: rows of a stripe; P * size must divide the number of rows.
      axis: of the rows.

    Returns:
      An array of the same shape. Its part r of P, along `axis`, has the stripes r,
      r + P, r + 2 P and so on.

    Raises:
      TypeError, ValueError: if an argument is wrong.

    Example:
      >>> import numpy as np
      >>> from jax_flash2 import stripe
      >>> stripe(np.arange(8), parts=2, size=2, axis=0)
      array([0, 1, 4, 5, 2, 3, 6, 7])
    """
    return _reordered(x, parts, size, axis, lambda n: (n, parts))


def unstripe(x, parts: int, size: int = STRIPE, axis: int = 1):
    """The inverse of `stripe`, with the same arguments.

    Example:
      >>> import numpy as np
      >>> from jax_flash2 import unstripe
      >>> unstripe(np.array([0, 1, 4, 5, 2, 3, 6, 7]), parts=2, size=2, axis=0)
      array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    return _reordered(x, parts, size, axis, lambda n: (parts, n))


def _reordered(x, parts: int, size: int, axis: int, outer):
    check_array("x", x)
    _check_size("parts", parts)
    _check_size("size", size)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be an axis of x, {x.shape}, got {axis}")
    axis %= x.ndim
    rows = x.shape[axis]
    if rows % (parts * size):
        raise ValueError(
            f"x must have a multiple of parts * size = {parts * size} rows along axis "
            f"{axis}, got {rows}: pad it, or take smaller stripes"
        )
    return _swapped(x, axis, (*outer(rows // (parts * size)), size))


def _swapped(x, axis: int, shape: tuple[int, int, int]):
    """x, whose rows are [a, b, size], with rows [b, a, size]."""
    apart = x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :])
    return apart.swapaxes(axis, axis + 1).reshape(x.shape)


def stripe_positions(rows: int, parts: int, size: int = STRIPE) -> np.ndarray:
    """The positions of striped rows: `stripe` of 0, 1, 2 and so on.

    Args:
      rows: number of all rows.
      parts, size: as for `stripe`.

    Returns:
      int32 [rows].

    Example:
      >>> from jax_flash2 import stripe_positions
      >>> stripe_positions(8, parts=2, size=2)
      array([0, 1, 4, 5, 2, 3, 6, 7], dtype=int32)
    """
    _check_size("rows", rows)
    return stripe(np.arange(rows, dtype=np.int32), parts, size, axis=0)


@dataclasses.dataclass(frozen=True)
class RowSharding:
    """How the rows of a call are sharded over devices, seen from one of them.

    Attributes:
      axes: of the mesh, that divide them.
      parts: number of devices.
      stripe: rows of a stripe; None for one run of rows.
    """

    axes: tuple[str, ...]
    parts: int
    stripe: int | None

    def rank(self) -> jax.Array:
        """Which part this device has."""
        return lax.axis_index(self.axes).astype(jnp.int32)

    def numbering(self, rank: jax.Array, rows: int) -> Numbering:
        """The numbers of the rows of a device that has so many."""
        if self.stripe is None:
            return Numbering(Named(rank * jnp.int32(rows), ()))
        first = rank * jnp.int32(self.stripe)
        return Numbering(Named(first, ()), self.stripe, self.parts)

    def own(self, x: jax.Array, axis: int) -> jax.Array:
        """The rows of this device, of an array of all."""
        rows = x.shape[axis] // self.parts
        if self.stripe is None:
            first = self.rank() * jnp.int32(rows)
            return lax.dynamic_slice_in_dim(x, first, rows, axis)
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        x = x.reshape(*before, -1, self.parts, self.stripe, *after)
        x = lax.dynamic_index_in_dim(x, self.rank(), axis + 1, keepdims=False)
        return x.reshape(*before, rows, *after)

    def in_order(self, x: jax.Array, axis: int) -> jax.Array:
        """All rows in their order, from those of each device in turn."""
        if self.stripe is None:
            return x
        stripes = x.shape[axis] // self.parts // self.stripe
        return _swapped(x, axis, (self.parts, stripes, self.stripe))

    def by_device(self, x: jax.Array, axis: int) -> jax.Array:
        """The inverse of `in_order`."""
        if self.stripe is None:
            return x
        stripes = x.shape[axis] // self.parts // self.stripe
        return _swapped(x, axis, (stripes, self.parts, self.stripe))

    def shifted(self, x: Any, by: int = 1, *, around: bool = True) -> Any:
        """What the device before this one has, or the one `by` before it.

        Args:
          x: a tree of arrays.
          around: whether the first gets it of the last, or zeros.
        """
        pairs = [
            (i, (i + by) % self.parts)
            for i in range(self.parts)
            if around or 0 <= i + by < self.parts
        ]
        return jax.tree.map(lambda a: lax.ppermute(a, self.axes, pairs), x)

    def of_all(self, x: jax.Array) -> jax.Array:
        """[parts, *shape]: what every device has.

        The transpose sums what comes back in float32, and in one order.
        """
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return lax.all_gather(x, self.axes)
        return _of_all(x, self)

    def gathered(self, x: Named, rows: str) -> Named:
        """x with all rows, in their order."""
        axis = x.axes.index(rows)
        parts = jnp.moveaxis(self.of_all(x.value), 0, axis)
        shape = (*x.shape[:axis], self.parts * x.shape[axis], *x.shape[axis + 1 :])
        return Named(self.in_order(parts.reshape(shape), axis), x.axes)

    def exchanged(self, x: jax.Array, split: int, joined: int) -> jax.Array:
        """x with its axis `split` divided over devices, and `joined` not any more."""
        return lax.all_to_all(x, self.axes, split, joined, tiled=True)

    @property
    def words(self) -> str:
        """For a reader."""
        names = ", ".join(map(repr, self.axes))
        stripes = f"stripes of {self.stripe} rows" if self.stripe else "rows in one run"
        return f"{self.parts} devices along {names}, {stripes}"

    def check(self, size: Mapping[str, int]) -> None:
        """Raises a ValueError if the rows of a device are not whole stripes.

        Args:
          size: of the axes `t` and `s`, on a device.
        """
        for name, argument in (("t", "query"), ("s", "key")):
            rows = size[name]
            if self.stripe is not None and rows % self.stripe:
                raise ValueError(
                    f"context: stripe={self.stripe} must divide the rows of {argument} "
                    f"on each device, got {rows} rows: pass a stripe that does, or "
                    "None for rows that follow one another"
                )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _of_all(x: jax.Array, sharding: RowSharding) -> jax.Array:
    """Each passes on what came: copy engines of GPUs can do that beside a kernel."""
    came = [x]
    while len(came) < sharding.parts:
        came.append(sharding.shifted(came[-1]))
    return _by_sender(came, sharding)


@_of_all.defjvp
def _change_of_all(sharding: RowSharding, xs, changes):
    """The transpose sends each device its part of a gradient, and adds in float32."""
    (x,), (change,) = xs, changes
    copies = enumerate(copied(change, sharding.parts))
    came = [sharding.shifted(copy, by) if by else copy for by, copy in copies]
    return _of_all(x, sharding), _by_sender(came, sharding)


def copied(x: jax.Array, times: int) -> list[jax.Array]:
    """The same array so often. Their gradients are added in float32."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return [x] * times
    wide = x.astype(at_least_float32(x.dtype))
    return [wide.astype(x.dtype) for _ in range(times)]


def _by_sender(came: list[jax.Array], sharding: RowSharding) -> jax.Array:
    """[parts, *shape], of what came from this device, the one before it, and so on."""
    return jnp.roll(jnp.stack(came[::-1]), sharding.rank() + 1, axis=0)


def sharding_of(context: Context) -> RowSharding:
    """How the rows of a call are sharded here.

    Raises:
      ValueError: if an axis is not a manual one here.
    """
    try:
        sizes = [lax.axis_size(axis) for axis in context.axes]
    except NameError as error:
        raise ValueError(
            f"context: axis {context.axis!r} must be a manual mesh axis here: call "
            "attention inside jax.shard_map (or jax.pmap) over it, or pass context=None"
        ) from error
    return RowSharding(context.axes, math.prod(sizes), context.stripe)
