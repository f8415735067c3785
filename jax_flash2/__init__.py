"""FlashAttention-2 for JAX: exact attention, linear memory, as Pallas GPU kernels.

Start with `attention`; `explain` says which kernels run, and why. `flashify` finds the
attention of a whole model and computes it so. `flax_attention` is for Flax's modules,
`Context` and `stripe` for sequences sharded over devices, `merge` for results over
parts of the keys, `make_block_mask` for lists of blocks that many calls share, `Config`
for block sizes, `nn` for libraries that call jax.nn's attention, `plot_mask` for
pictures of masks.
"""

# For their rules alone.
from jax_flash2 import _derivatives as _derivatives
from jax_flash2 import _taylor as _taylor
from jax_flash2 import nn
from jax_flash2._api import attention
from jax_flash2._block_mask import BlockMask
from jax_flash2._cache import append_to_pages, page_slots, quantize_kv
from jax_flash2._combine import and_masks, not_mask, or_masks
from jax_flash2._explain import explain
from jax_flash2._flashify import flashify
from jax_flash2._flax import flax_attention
from jax_flash2._make_block_mask import make_block_mask
from jax_flash2._merge import merge
from jax_flash2._paged import paged_attention
from jax_flash2._plot import plot_mask
from jax_flash2._rows import Context, stripe, stripe_positions, unstripe
from jax_flash2._version import __version__
from jax_flash2._vjp import LSE_NAME, OUTPUT_NAME
from pallas_kernels.configs import Blocks, Config

__all__ = [
    "LSE_NAME",
    "OUTPUT_NAME",
    "BlockMask",
    "Blocks",
    "Config",
    "Context",
    "__version__",
    "and_masks",
    "append_to_pages",
    "attention",
    "explain",
    "flashify",
    "flax_attention",
    "make_block_mask",
    "merge",
    "nn",
    "not_mask",
    "or_masks",
    "page_slots",
    "paged_attention",
    "plot_mask",
    "quantize_kv",
    "stripe",
    "stripe_positions",
    "unstripe",
]
