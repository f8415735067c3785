"""make_block_mask(): a mask with lists of the blocks that it keeps."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2 import _options
from jax_flash2._arguments import Arguments, Array, Window
from jax_flash2._arrays import unwrapped
from jax_flash2._block_mask import BlockMask, words_of
from jax_flash2._mods import Mods
from jax_flash2._shape import Shape
from pallas_kernels import device
from pallas_kernels.core import exact
from pallas_kernels.core.axes import Axes, Named
from pallas_kernels.core.masks import Atom, Listed, Tiling
from pallas_kernels.core.promotion import own_rules
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec

BLOCK = 128
# Pairs that are evaluated at a time. On a GPU XLA makes one kernel of them, and none of
# them is written; elsewhere a few numbers of each are.
_PAIRS = {"cpu": 2**20}
_MOST_PAIRS = 2**25


def make_block_mask(
    mask_mod: Callable | None,
    batch: int | tuple[int, ...] | None,
    heads: int | None,
    queries: int,
    keys: int,
    *,
    mask: Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: Window | None = None,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    query_offset: int | np.integer | Array = 0,
    block_size: int | tuple[int, int] = BLOCK,
) -> BlockMask:
    """A mask with lists of the blocks of pairs that it keeps, for `attention`.

    Make it once and give it to all layers and steps, as `attention(...,
    block_mask=...)`, which then skips every block without a kept pair and evaluates the
    mask in those alone of which only some pairs are kept. It is what FlexAttention's
    `create_block_mask` is. It may be made inside `jax.jit`, on the device, and of
    arrays that are data. No array of all pairs is made.

    Args:
      mask_mod: a function (b, h, q, kv) -> bool, as of `attention`; or None.
      batch: the batch shape of calls (an int for one axis), or None if no mask depends
        on the batch entry: the block mask then serves any.
      heads: the number of query heads, or None likewise.
      queries, keys: the numbers of rows, T and S; with `Context` those of all devices.
      mask, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size,
        query_segment_ids, key_value_segment_ids: as of `attention`. A pair is kept if
        all that is given keeps it. Without a batch their batch axes are left out.
      query_offset: the position of query row 0, as of `attention`: calls with the block
        mask take it from here.
      block_size: rows of a block of queries and of keys in the lists, or a pair of
        these; multiples of 16. Kernels whose blocks divide it walk the lists as they
        are (those of up to 128 rows do, by default). For others, and beside other masks
        of a call, lists are made again from these in the call.

    Returns:
      A `BlockMask`: a pytree of arrays. For each block of queries it numbers the blocks
      of keys of which some pairs are kept, then those of which all are, and the reverse
      for gradients: some 12 bytes for each pair of blocks. `print` says how many are
      visited.

    Raises:
      TypeError, ValueError: if an argument is wrong. The message names the argument,
        what was given and what was expected.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash2 import attention, make_block_mask
      >>> def mask_mod(b, h, q, kv):  # a window, and the first keys for all
      ...     return (kv <= q) & ((q - kv < 64) | (kv < 4))
      >>> block_mask = make_block_mask(mask_mod, None, None, 1024, 1024)
      >>> block_mask
      BlockMask(21 of 64 blocks of 128 x 128 are visited, 21 of them with the mask)
      >>> q = k = v = jnp.ones((1, 1024, 2, 16))
      >>> attention(q, k, v, block_mask=block_mask).shape
      (1, 1024, 2, 16)

    References: Dong et al., "Flex Attention" (2024), section 4.2 (block masks).
    """
    sizes = _check_sizes(batch, heads, queries, keys)
    tile = _check_blocks(block_size)
    given = {
        "mask": mask,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "query_segment_ids": query_segment_ids,
        "key_value_segment_ids": key_value_segment_ids,
    }
    given = {name: unwrapped(x) for name, x in given.items()}
    options = {"is_causal": is_causal, "local_window_size": local_window_size}
    arguments = _arguments(mask_mod=mask_mod, **options, **given)
    _options.check_bool("is_causal", is_causal)
    shape = Shape(_struct(sizes, queries), _struct(sizes, keys))
    offset = shape.offset(query_offset)
    masks = arguments.masks(shape)
    if mask_mod is not None:
        unknown = [n for n, x in (("b", batch), ("h", heads)) if x is None]
        masks = (*masks, *Mods(shape, offset, None).masks(mask_mod, unknown))
    if not masks:
        raise ValueError("make_block_mask requires a mask: pass mask_mod")
    found = functools.reduce(operator.and_, masks)
    if heads is None:  # one stands for any number
        found = jax.tree.map(lambda x: x.renamed("n", None).squeezed(), found)
    return _made(found, offset, Tiling(*tile, queries, keys))


def counts(arguments: Arguments) -> list[str]:
    """How many blocks of a call are visited, for a reader, as far as is known here.

    Of calls with a block mask or with a function for one.
    """
    found = arguments
    if found.block_mask is not None:
        return [f"block_mask: {found.block_mask.words}"]
    if found.mask_mod is None or found.context is not None:
        return []
    nowhere = jax.sharding.AbstractMesh((), ())  # not on a GPU that is described
    shape = Shape(found.query, found.key)
    try:
        with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(nowhere):
            offset = shape.offset(found.query_offset)
            mods = Mods(shape, offset, None)
            masks = (*found.masks(shape), *mods.masks(found.mask_mod))
            mask = functools.reduce(operator.and_, masks)
            tiling = Tiling(BLOCK, BLOCK, shape.t, shape.s)
            made = _made(mask, offset, tiling, refines=False)
    except (TypeError, jax.errors.JAXTypeError):  # an array without numbers
        return ["mask_mod: how many blocks are visited depends on data"]
    return [f"mask_mod, by intervals: {words_of(made.named()[0])}"]


def _arguments(**given: Any) -> Arguments:
    names = (field.name for field in dataclasses.fields(Arguments))
    return Arguments(**{**dict.fromkeys(names), **given})


def _struct(sizes: tuple[int, ...], rows: int) -> jax.ShapeDtypeStruct:
    *batch, heads = sizes
    return jax.ShapeDtypeStruct((*batch, rows, heads, 1), jnp.float32)


def _check_sizes(batch, heads, queries, keys) -> tuple[int, ...]:
    """The batch shape and the heads, as far as they are known."""
    batch = () if batch is None else batch
    batch = batch if isinstance(batch, tuple) else (batch,)
    named = {"heads": 1 if heads is None else heads, "queries": queries, "keys": keys}
    named |= {f"batch[{i}]": x for i, x in enumerate(batch)}
    for name, x in named.items():
        if not isinstance(x, int | np.integer) or isinstance(x, bool):
            raise TypeError(f"{name} must be an int, got {type(x).__name__}")
        if x < 1:
            raise ValueError(f"{name} must be at least 1, got {x}")
    return (*batch, named["heads"])


def _check_blocks(block_size) -> tuple[int, int]:
    pair = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    is_pair = len(pair) == 2 and all(
        isinstance(x, int | np.integer) and not isinstance(x, bool) for x in pair
    )
    if not is_pair or any(x < 16 or x % 16 for x in pair):
        raise ValueError(
            "block_size must be a multiple of 16 or a pair of them, (queries, keys), "
            f"got {block_size!r}"
        )
    return int(pair[0]), int(pair[1])


@dataclasses.dataclass(frozen=True)
class _Form:
    """What is static of masks: their tree, axes and blocks."""

    tree: Any
    axes: tuple[Axes, ...]
    blocks: tuple[int, int, int, int]
    refines: bool


def _made(
    mask: Atom, offset: Named | None, tiling: Tiling, *, refines: bool = True
) -> BlockMask:
    """The block mask of a mask with all rows.

    Args:
      refines: whether blocks that intervals leave open are looked at.
    """
    leaves, tree = jax.tree.flatten((mask, offset))
    sizes = tiling.block_q, tiling.block_kv, tiling.q_size, tiling.kv_size
    form = _Form(tree, tuple(x.axes for x in leaves), sizes, refines)
    return _lists(form, [jnp.asarray(x.value) for x in leaves])


@functools.partial(jax.jit, static_argnums=0)
@own_rules()
def _lists(form: _Form, arrays) -> BlockMask:
    mask, offset = form.tree.unflatten(map(Named, arrays, form.axes))
    spec = AttentionSpec(Score(1.0), (mask,), offset)
    tiling = Tiling(*form.blocks, spec.positions)
    pairs = _PAIRS.get(device.target(), _MOST_PAIRS)
    found = exact.relation(spec, tiling, pairs) if form.refines else None
    found = spec.relation(tiling) if found is None else found
    return BlockMask.of(Listed.of(mask, found, tiling), offset)
