"""A picture of the masks of a call, and of the blocks that they imply."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jax_flash2 import _api
from pallas_kernels.backend import Call
from pallas_kernels.core.axes import Named, is_batch
from pallas_kernels.core.lists import BlockList
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.promotion import at_least_float32
from pallas_kernels.core.ranges import Range, block_ends
from pallas_kernels.core.spec import AttentionSpec

_MOST_PAIRS = 2**26
_COLOURS = {
    "block skipped": "#f4f4f4",
    "pair masked": "#c9d7e8",
    "pair kept": "#3b76b5",
    "pair kept, in a block without a mask": "#15406f",
}


def plot_mask(
    *arguments: Any,
    block: int | tuple[int, int] = 128,
    entry: int = 0,
    head: int = 0,
    ax: Any = None,
    **keywords: Any,
) -> Any:
    """Draws which pairs a call of `attention` keeps, and which blocks it visits.

    The picture has a row for each query and a column for each key. It shows what all
    masks of the call keep together, and pairs that a bias of -inf or a `score_mod`
    drops where the product of query and key is 0. A block is skipped if the masks rule
    it out, and needs no mask if they are known to keep all of its pairs.

    Args:
      *arguments, **keywords: the arguments of `attention`. query, key and value may be
        `jax.ShapeDtypeStruct`s. Arrays that masks read must have values; `context` must
        be None.
      block: rows of a block, of queries and of keys alike or as a pair. The kernels
        choose their own, from 16 to 256.
      entry: the number of the batch entry (row-major of several batch axes).
      head: the number of the query head.
      ax: a matplotlib `Axes` to draw into. Default: that of a new figure.

    Returns:
      The matplotlib `Axes`.

    Raises:
      TypeError, ValueError: if an argument is wrong, as `attention`, or there are more
        than 2**26 pairs.
      ImportError: without matplotlib (`pip install "jax_flash2[plot]"`).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash2 import plot_mask
      >>> x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
      >>> ax = plot_mask(x, x, x, is_causal=True, block=16)
      >>> ax.get_title()
      '10 of 16 blocks visited, 6 without a mask'
      >>> ax.figure.savefig("mask.png")  # doctest: +SKIP
    """
    found = _api.given(*arguments, **keywords)
    if found.context is not None:
        raise ValueError(
            f"context must be None for a picture, got {found.context}: rows of all "
            "devices are drawn as those of one"
        )
    for name, x in vars(found).items():
        if isinstance(x, jax.core.Tracer):
            raise TypeError(f"{name} must be an array with values, got a traced one")
    rows = (block, block) if isinstance(block, int) else tuple(block)
    if len(rows) != 2 or not all(isinstance(n, int) and n > 0 for n in rows):
        raise ValueError(f"block must be an int > 0, or a pair of them, got {block!r}")

    @jax.jit
    def drawn():
        # Zeros that nothing reads: they take no memory.
        zeros = {
            name: jnp.zeros(x.shape, x.dtype)
            for name, x in vars(found).items()
            if isinstance(x, jax.ShapeDtypeStruct)
        }
        call = dataclasses.replace(found, **zeros).checked()
        spec = _of_element(call, entry, head)
        size = call.size["t"], call.size["s"]
        return _kept(spec, size, call.dtype), *_blocks(spec, size, *rows)

    return _draw(ax, rows, *map(np.asarray, drawn()))


def _of_element(call: Call, entry: int, head: int) -> AttentionSpec:
    """The spec of a batch entry and head, `Named` with rows alone."""
    batch = [a for a in call.query.axes if a is not None and is_batch(a)]
    sizes = [call.size[a] for a in batch]
    heads = call.size.get("n", 1)
    for name, number, size in (
        ("entry", entry, int(np.prod(sizes))),
        ("head", head, heads),
    ):
        if not 0 <= number < size:
            raise ValueError(f"{name} must be from 0 to {size - 1}, got {number}")
    pairs = call.size["t"] * call.size["s"]
    if pairs > _MOST_PAIRS:
        raise ValueError(
            f"query and key must have at most {_MOST_PAIRS} pairs of rows, got {pairs}"
        )
    numbers = map(int, np.unravel_index(entry, sizes))
    places = {**dict(zip(batch, numbers, strict=True)), "n": head}

    def at(x: Named) -> Named:
        x = x.squeezed()
        index = tuple(places[a] if a in places else slice(None) for a in x.axes)
        return Named(x.value[index], tuple(a for a in x.axes if a not in places))

    spec = dataclasses.replace(call.spec, sink=None, dropout=None)
    return jax.tree.map(at, spec)


def _kept(spec: AttentionSpec, size: tuple[int, int], dtype) -> jax.Array:
    """[T, S], which pairs are kept."""
    t, s = size
    own = jax.tree.map(lambda x: x.to(("t", "s")), spec)
    pairs = Pairs(own, {"t": (0, t), "s": (0, s)})
    scores = pairs.scores_of(jnp.zeros(size, at_least_float32(dtype)), dtype)
    return jnp.broadcast_to(scores.x > -jnp.inf, size)


def _blocks(spec: AttentionSpec, size: tuple[int, int], block_q: int, block_kv: int):
    """[query blocks, key blocks], which are visited, and which without a mask."""
    t, s = size
    spec = spec.with_table("s", block_q, block_kv, t, s)
    if isinstance(spec.table, BlockList):
        code = spec.table.codes().value
        for axis, (block, rows) in enumerate(
            ((spec.table.own, block_q), (spec.table.visited, block_kv))
        ):
            code = jnp.repeat(code, block // rows, axis)
        code = code[: -(-t // block_q), : -(-s // block_kv)]
        return code > 0, code > 1
    spec = jax.tree.map(lambda x: x.to(("i",)), spec.for_ranges())
    first, end = block_ends(block_q, t)
    found = spec.kv_blocks(first, end, s, block_kv)
    number = jnp.arange(-(-s // block_kv), dtype=jnp.int32)
    shape = len(first), len(number)
    assert isinstance(found, Range)
    bounds = [jnp.broadcast_to(x, shape[:1])[:, None] for x in found]
    visited = (bounds[0] <= number) & (number < bounds[3])
    return visited, visited & (bounds[1] <= number) & (number < bounds[2])


def _draw(ax, rows: tuple[int, int], kept, visited, full):
    try:
        from matplotlib import pyplot
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            'plot_mask needs matplotlib: pip install "jax_flash2[plot]"'
        ) from error
    if ax is None:
        _, ax = pyplot.subplots(layout="constrained")

    def of_pairs(blocks):
        (t, s), (block_q, block_kv) = kept.shape, rows
        return blocks.repeat(block_q, axis=0).repeat(block_kv, axis=1)[:t, :s]

    # The numbers of the colours. A pair of a skipped block is masked.
    code = of_pairs(visited.astype(np.uint8))
    code[kept] += 1
    code[kept & of_pairs(full)] += 1
    t, s = kept.shape
    colours = ListedColormap(list(_COLOURS.values()))
    extent = (0, s, t, 0)
    ax.imshow(code, colours, vmin=0, vmax=3, extent=extent, interpolation="nearest")
    for draw, size, block in zip((ax.axhline, ax.axvline), (t, s), rows, strict=True):
        for at in range(block, size, block) if size <= 64 * block else ():
            draw(at, color="white", linewidth=0.5)
    seen = set(np.unique(code).tolist())
    entries = enumerate(_COLOURS.items())
    handles = [Patch(color=x, label=name) for i, (name, x) in entries if i in seen]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    ax.set(xlabel="key", ylabel="query")
    ax.set_title(
        f"{visited.sum()} of {visited.size} blocks visited, {full.sum()} without a mask"
    )
    return ax
