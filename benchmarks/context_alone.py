"""What a device computes with its rows, on one device and without the others.

The same code as with them: the calls of each round one after the other, the merges, the
copies. But what would come from other devices is this device's own. So its time is what
is left if communication costs nothing. For this the benchmark reaches into the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.context_calls import AXIS, Case
from jax_flash2 import _api, _context, _ring, _vjp
from jax_flash2._rows import RowSharding
from pallas_kernels.core.axes import Named


class _Ids:
    """Of all devices, [parts, 1, T], equal to itself alone: a sharding is hashable."""

    def __init__(self, of_devices: np.ndarray):
        self.of_devices = of_devices


@dataclasses.dataclass(frozen=True)
class Alone(RowSharding):
    """A sharding whose device talks to nobody.

    Attributes:
      mine: which part it has.
      ids: of documents, whose blocks decide what is computed; None for one document.
    """

    mine: int = 0
    ids: _Ids | None = None

    def rank(self) -> jax.Array:
        return jnp.int32(self.mine)

    def shifted(self, x: Any, by: int = 1, *, around: bool = True) -> Any:
        del by, around
        return x

    def of_all(self, x: jax.Array) -> jax.Array:
        if self.ids is not None and jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(self.ids.of_devices)
        return jnp.broadcast_to(x, (self.parts, *x.shape))

    def exchanged(self, x: jax.Array, split: int, joined: int) -> jax.Array:
        own = jnp.split(x, self.parts, split)[0]
        return jnp.concatenate([own] * self.parts, joined)


def _attention(method: str, sharding: RowSharding, q, k, v, **options) -> jax.Array:
    """As `jax_flash2.attention` with a context, of that method and sharding."""
    call = _api.given(q, k, v, **options).checked()
    if method == "ring":
        return _ring.attend(call, None, sharding)[0]
    local = _context._METHODS[method].local(call, sharding)
    o, _ = _vjp.run(_context._whole(local.call), None)
    return local.finish(Named(o, _context.result_axes(local.call)[0])).value


def passes(case: Case, method: str | None) -> dict[str, Callable]:
    """Functions of one device's query, key, value and output gradient.

    Of the device that has most pairs of queries and keys.
    """
    mine = int(np.argmax(case.work()))
    ids, arrays = case.ids(), {}
    if ids is not None:
        by_device = ids[:, case.order()].reshape(case.parts, 1, case.rows)
        arrays = {"query_segment_ids": by_device[mine]}
        ids = _Ids(by_device)
    sharding = Alone((AXIS,), case.parts, case.stripe_size, mine, ids)

    def attention(q, k, v):
        options = {**case.options(), **arrays}
        if method is None:
            return _api.attention(q, k, v, **options)
        return _attention(method, sharding, q, k, v, **options)

    def forward(q, k, v, do):
        del do
        return (attention(q, k, v),)

    def both(q, k, v, do):
        out, vjp = jax.vjp(attention, q, k, v)
        return (out, *vjp(do))

    return {"forward": forward, "forward_backward": both}
