"""Results over parts of the keys, put together where heads lie in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.core import flash2


def merged(
    o: Sequence[tuple[jax.Array, ...]],
    lse: Sequence[jax.Array],
    sink: jax.Array | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """`flash2.merge`, piece by piece.

    Two results in turn: one that met no key leaves the other as it is, bit for bit.

    Args:
      o: for each part, the pieces of its output, [rows, size] each.
      lse: for each part, [rows].
      sink: [rows], if no part took it in.
    """
    of_rows = tuple(lse)
    found = [flash2.merge(x, of_rows, sink) for x in zip(*o, strict=True)]
    return tuple(x for x, _ in found), found[0][1]


def joined(
    o: tuple[jax.Array, ...], lse: jax.Array, sink: jax.Array | None
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """A result with the sink that it did not take in, as `merged` joins it.

    Args:
      o, lse: as of `merged`, of one part.
      sink: as of `flash2.finish`; None leaves the result as it is.
    """
    if sink is None:
        return o, lse
    sink = jnp.squeeze(sink, -1) if sink.ndim > lse.ndim else sink
    joint = jnp.broadcast_to(sink.astype(lse.dtype), lse.shape)
    return merged([o], [lse], joint)
