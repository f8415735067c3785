"""Block masks as calls get them: masks with lists of the blocks that they keep."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.core
import numpy as np

from jax_flash2._rows import RowSharding
from jax_flash2._shape import Shape
from pallas_kernels.core.axes import ALL_KEYS, Axes, Named, is_batch
from pallas_kernels.core.masks import Listed


@dataclasses.dataclass(frozen=True)
class _Form:
    """What is static of a block mask: its tree, and the axes of each array."""

    tree: Any
    axes: tuple[Axes, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A mask, and lists of the blocks that it keeps (`make_block_mask`).

    For each block of queries the lists number the blocks of keys of which some pairs
    are kept, and of which all are; and the reverse, for the backward pass. It is a
    pytree of arrays: `jax.jit`, `jax.vmap` and `jax.lax.scan` take and return it.

    Attributes:
      arrays: of the mask and its lists.
      form: what they are (static).

    Example:
      >>> from jax_flash2 import BlockMask, make_block_mask
      >>> causal = make_block_mask(None, None, None, 256, 256, is_causal=True)
      >>> isinstance(causal, BlockMask), causal
      (True, BlockMask(3 of 4 blocks of 128 x 128 are visited, 2 of them with the mask))
    """

    arrays: tuple[jax.Array, ...]
    form: _Form = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, mask: Listed, offset: Named | None) -> BlockMask:
        leaves, tree = jax.tree.flatten((mask, offset))
        form = _Form(tree, tuple(x.axes for x in leaves))
        return cls(tuple(x.value for x in leaves), form)

    def named(self) -> tuple[Listed, Named | None]:
        """The mask and the position of query 0, of `Named` arrays."""
        return self.form.tree.unflatten(map(Named, self.arrays, self.form.axes))

    def in_call(
        self, shape: Shape, sharding: RowSharding | None
    ) -> tuple[Listed, Named | None]:
        """As `named`, for a call, with what a device needs of arrays of rows.

        Raises:
          ValueError: if it was made for calls of other sizes.
        """
        mask, offset = self.named()
        own = {"t": shape.parts * shape.t, "s": shape.parts * shape.s}
        if mask.size != own:
            t, s = mask.size.values()
            of_all = " on all devices" if shape.parts > 1 else ""
            raise ValueError(
                f"block_mask was made for {t} queries and {s} keys, and the call has "
                f"{own['t']} and {own['s']}{of_all}"
            )
        sizes = dict(zip(shape.batch_axes, shape.batch, strict=True))
        sizes |= dict(zip(shape.head_axes, shape.heads, strict=True))
        for x in map(Named, self.arrays, self.form.axes):
            for name, size in zip(x.axes, x.shape, strict=True):
                is_element = name == "n" or (name is not None and is_batch(name))
                if is_element and sizes.get(str(name)) != size:
                    whose = "heads" if name == "n" else "batch entries"
                    raise ValueError(
                        f"block_mask was made for {size} {whose}, and query has batch "
                        f"shape {shape.batch} and heads {shape.heads}"
                    )

        def of_device(x: Named) -> Named:
            if sharding is None or sharding.parts == 1:
                return x
            rows = [a for a in ("t", "s") if a in x.axes]
            if len(rows) == 2:  # all keys, of these queries
                x = x.renamed(rows.pop(), ALL_KEYS)
            for name in rows:
                x = Named(sharding.own(x.value, x.axes.index(name)), x.axes)
            return x

        return jax.tree.map(of_device, mask), offset

    def __repr__(self) -> str:
        return f"BlockMask({self.words})"

    @property
    def words(self) -> str:
        """How many blocks are visited, as far as is known here."""
        mask, _ = self.named()
        return words_of(mask)


def words_of(mask: Listed) -> str:
    """How many blocks are visited, if the arrays are at hand."""
    blocks = f"blocks of {mask.keys.own} x {mask.keys.visited}"
    code = mask.keys.code.value
    if isinstance(code, jax.core.Tracer) or not hasattr(code, "__array__"):
        return f"how many {blocks} are visited depends on data"
    code = np.asarray(code)
    edges, visited = (code == 1).sum(), (code > 0).sum()
    return (
        f"{visited} of {code.size} {blocks} are visited, {edges} of them with the mask"
    )
