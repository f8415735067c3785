"""Pictures of masks. They need matplotlib (the extra `plot`)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from jax_flash2._api import attention

_COLOURS = ListedColormap(["#e4e7eb", "#1f5f8b"])


def attended(query, key, **arguments) -> np.ndarray:
    """Which queries attend to which keys, of all heads and batch entries.

    Scores are those of queries and keys of zeros, so the answer is the masks', and that
    of what acts like one (a bias of -inf, dropout). Memory is quadratic.

    Args:
      query: [*B, T, N, H], as of `attention`. Arrays may be `jax.ShapeDtypeStruct`.
      key: [*B, S, K, H].
      **arguments: others of `attention`.

    Returns:
      A boolean array [*B, N, T, S].

    Raises:
      TypeError, ValueError: as `attention`.

    Example:
      >>> import jax
      >>> from jax_flash2.plot import attended
      >>> x = jax.ShapeDtypeStruct((3, 1, 8), "float32")
      >>> attended(x, x, is_causal=True)[0].astype(int)
      array([[1, 0, 0],
             [1, 1, 0],
             [1, 1, 1]])
    """
    q, k = (jnp.zeros(x.shape, jnp.float32) for x in (query, key))
    rows = k.shape[-3]
    # Of such values the output is the row of probabilities.
    one_hot = jnp.broadcast_to(jnp.eye(rows)[:, None], (*k.shape[:-1], rows))
    options: dict[str, Any] = {**arguments, "implementation": "reference"}
    out = attention(q, k, one_hot, **options)
    return np.asarray(jnp.moveaxis(out, -2, -3)) > 0


def plot_mask(
    query,
    key,
    *,
    entry: int = 0,
    head: int = 0,
    block: int | None = None,
    ax: Axes | None = None,
    **arguments,
) -> Axes:
    """Draws which pairs of query and key a call keeps, for one head of a batch entry.

    Args:
      query: [*B, T, N, H], as of `attention`. Arrays may be `jax.ShapeDtypeStruct`.
      key: [*B, S, K, H].
      entry: of the batch (of all its axes, flat).
      head: of the queries.
      block: lines every so many rows; the kernels skip blocks without a pair.
      ax: to draw on; None makes a figure.
      **arguments: others of `attention`.

    Returns:
      The matplotlib `Axes`: queries downwards, keys to the right, kept pairs dark.

    Raises:
      TypeError, ValueError: as `attention`.

    Example:
      >>> import jax
      >>> from jax_flash2.plot import plot_mask
      >>> x = jax.ShapeDtypeStruct((1, 64, 1, 16), "float32")
      >>> axes = plot_mask(x, x, local_window_size=(15, 0), block=16)
      >>> axes.get_xlabel()
      'keys'
    """
    found = attended(query, key, **arguments)
    kept = found.reshape(-1, *found.shape[-3:])[entry, head]
    if ax is None:
        ax = plt.figure(figsize=(4, 4), layout="constrained").add_subplot()
    rows, keys = kept.shape
    ax.imshow(kept, _COLOURS, vmin=0, vmax=1, extent=(0, keys, rows, 0))
    ax.set(xlabel="keys", ylabel="queries")
    for first in range(block, keys, block) if block else ():
        ax.axvline(first, color="white", linewidth=0.8)
    for first in range(block, rows, block) if block else ():
        ax.axhline(first, color="white", linewidth=0.8)
    return ax
