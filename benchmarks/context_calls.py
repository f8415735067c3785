"""Calls whose rows are divided over devices: sizes, masks, operands, bytes moved."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_flash2
from benchmarks.shapes import Shape
from jax_flash2 import Context
from pallas_kernels.core.dropout import GROUP

AXIS = "context"
ROWS = PartitionSpec(None, AXIS)
_BACKWARD = 2.5  # FLOPs of a backward, as a part of its forward's


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query attends to.

    Attributes:
      causal: those at or before it.
      window: the last so many of these; None for all.
      documents: packed in the row, with lengths of a lognormal distribution; 0 for one.
      striped: whether devices have stripes of rows, or rows that follow one another.
    """

    causal: bool = False
    window: int | None = None
    documents: int = 0
    striped: bool = False


MASKS = {
    "causal": Mask(causal=True, striped=True),
    "full": Mask(),
    "documents": Mask(causal=True, documents=16, striped=True),
    "window1024": Mask(causal=True, window=1024),
    "window4096": Mask(causal=True, window=4096),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Self-attention of one sequence whose rows are divided evenly.

    Attributes:
      scaling: "weak" or "strong", for a reader.
      name: of the mask, for a reader.
      mask: see `Mask`.
      parts: number of devices, P.
      rows: of each device, T.
      heads, kv_heads, head_size, dtype: N, K, H and the type of the operands.
      stripe: rows of a stripe, where the mask asks for stripes.
    """

    scaling: str
    name: str
    mask: Mask
    parts: int
    rows: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    stripe: int

    @property
    def total(self) -> int:
        """Rows of all devices."""
        return self.parts * self.rows

    @property
    def shape(self) -> Shape:
        """All of it."""
        sizes = (1, self.total, self.heads, self.kv_heads, self.head_size)
        return Shape(*sizes, self.mask.causal, self.dtype)

    @property
    def stripe_size(self) -> int | None:
        """Of the layout; None for rows that follow one another."""
        return self.stripe if self.mask.striped else None

    @property
    def feature(self) -> str:
        """What tells it from others of the same shape, in rows."""
        return f"{self.scaling}, {self.name}, {self.parts} devices"

    def __str__(self) -> str:
        heads = f"{self.heads} ({self.kv_heads}) x {self.head_size}"
        return f"{self.scaling}, {self.name}, {self.parts} x {self.rows}, {heads}"

    def resized(self, parts: int, rows: int) -> Case:
        """The same mask over other rows; a window is half of all rows at most."""
        window = self.mask.window
        if window is not None:
            window = min(window, max(parts * rows // 2, 1))
        mask = dataclasses.replace(self.mask, window=window)
        return dataclasses.replace(self, mask=mask, parts=parts, rows=rows)

    def ids(self) -> np.ndarray | None:
        """Of the documents, int32 [1, total] in the order of rows; None for one."""
        if not self.mask.documents:
            return None
        rng = np.random.default_rng(0)
        lengths = rng.lognormal(size=self.mask.documents)
        ends = np.cumsum(lengths / lengths.sum())[:-1]
        borders = (ends * self.total).astype(int)
        rows = np.arange(self.total)
        return np.searchsorted(borders, rows, "right").astype(np.int32)[None]

    def order(self) -> np.ndarray:
        """Which row is where, int32 [total]: the first device's, then the second's."""
        if self.stripe_size is None:
            return np.arange(self.total, dtype=np.int32)
        return jax_flash2.stripe_positions(self.total, self.parts, self.stripe)

    def keys(self) -> np.ndarray:
        """How many each query attends to, int64 [total] in the order of rows."""
        rows = np.arange(self.total, dtype=np.int64)
        if not self.mask.causal:
            return np.full(self.total, self.total, np.int64)
        first = np.zeros_like(rows)
        if (ids := self.ids()) is not None:
            first = np.searchsorted(ids[0], ids[0], "left")
        if self.mask.window is not None:
            first = np.maximum(first, rows + 1 - self.mask.window)
        return rows + 1 - first

    def work(self) -> np.ndarray:
        """Pairs of queries and keys that each device has, int64 [parts]."""
        return self.keys()[self.order()].reshape(self.parts, -1).sum(axis=1)

    def flops(self, which: str) -> float:
        """Of the pairs that the mask keeps; a backward counts 2.5 forwards."""
        forward = 4.0 * float(self.keys().sum()) * self.heads * self.head_size
        return forward * (1.0 if which == "forward" else 1.0 + _BACKWARD)

    def options(self) -> dict:
        """Arguments of `jax_flash2.attention` that are no arrays."""
        window = self.mask.window
        return {
            "is_causal": self.mask.causal,
            "local_window_size": None if window is None else (window - 1, 0),
        }

    def context(self, method: str | None) -> Context:
        return Context(AXIS, self.stripe_size, method)

    def structs(self, sharding) -> list[jax.ShapeDtypeStruct]:
        """Of query, key, value and the output's gradient."""
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x in self.shape.structs()
        ]

    def operands(self, sharding, seed: int = 0) -> list[jax.Array]:
        """Random normal query, key, value and output gradient, made where they lie."""
        keys = jax.random.split(jax.random.key(seed), 4)
        structs = self.structs(sharding)
        made = [
            _normal(x.shape, x.dtype, sharding)(key)
            for key, x in zip(keys, structs, strict=True)
        ]
        return jax.block_until_ready(made)


@functools.cache
def _normal(shape, dtype, sharding):
    def make(key):
        return jax.random.normal(key, shape, dtype)

    return jax.jit(make, out_shardings=sharding)


def mesh_of(parts: int) -> Mesh:
    """Of the first devices."""
    return Mesh(np.array(jax.devices()[:parts]), (AXIS,))


def by_rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, ROWS)


def bytes_moved(case: Case, method: str | None, which: str) -> int:
    """What a device receives from others in a pass, at most, in closed form.

    Keys and values, queries and outputs where heads are divided, segment ids, and in
    the backward their gradients: in float32 in a ring, and in the dtype of the operands
    elsewhere.

    Args:
      case: what is computed.
      method: one of those of `jax_flash2.Context`; None on one device.
      which: "forward", or "forward_backward".
    """
    parts, rows = case.parts, case.rows
    if method is None or parts == 1:
        return 0
    size = jnp.dtype(case.dtype).itemsize
    pair = 2 * case.kv_heads * case.head_size  # numbers of a row of keys and of values
    ids = 4 * bool(case.mask.documents)
    both = which == "forward_backward"
    others = (parts - 1) * rows
    if method == "ring":
        forward = others * pair * size
        # Of two devices each has the keys and values that it needs.
        again = forward if parts > 2 else 0
        backward = again + others * pair * max(size, 4)
        return others * ids + forward + backward * both
    if method == "halo":
        # As many rows as the window reaches back, in whole groups.
        reach = min(-(-((case.mask.window or 1) - 1) // GROUP) * GROUP, others)
        return reach * pair * size * (2 if both else 1)
    if method == "gather":
        return others * (pair * size * (2 if both else 1) + ids)
    # What belongs to a row's other heads leaves, and as much of the own heads comes.
    row = 2 * (case.heads + case.kv_heads) * case.head_size * size
    exchanged = others * row // parts
    return exchanged * (2 if both else 1) + others * ids
