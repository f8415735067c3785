"""Shapes of self-attention, what a pass of one computes, and the papers' grid."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

# The results of each pass. Backward takes what the forward left; it is timed alone.
PASSES = {
    "forward": ("out",),
    "backward": ("dq", "dk", "dv"),
    "forward_backward": ("out", "dq", "dk", "dv"),
}
_FLOPS = {"forward": 1.0, "backward": 2.5, "forward_backward": 3.5}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Self-attention: query [batch, length, heads, head_size], kv_heads <= heads."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_size: int
    causal: bool
    dtype: str

    @property
    def group(self) -> int:
        """Query heads to a key/value head."""
        return self.heads // self.kv_heads

    def flops(self, which: str) -> float:
        """Floating-point operations of a pass, as the FlashAttention papers count.

        Forward `4 B T T N H`, half of it when causal; backward 2.5 times the forward.
        """
        forward = 4 * self.batch * self.length**2 * self.heads * self.head_size
        return _FLOPS[which] * forward / (2 if self.causal else 1)

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtype of query, key, value and the output's gradient."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [
            jax.ShapeDtypeStruct(
                (self.batch, self.length, n, self.head_size), jnp.dtype(self.dtype)
            )
            for n in heads
        ]

    def operands(self, seed: int = 0) -> list[jax.Array]:
        """Random normal query, key, value and output gradient, made on the device."""
        make = jax.jit(jax.random.normal, static_argnums=(1, 2))
        keys = jax.random.split(jax.random.key(seed), 4)
        made = map(lambda key, x: make(key, x.shape, x.dtype), keys, self.structs())
        return jax.block_until_ready(list(made))

    def __str__(self) -> str:
        heads = f"{self.heads}"
        if self.group > 1:
            heads += f" ({self.kv_heads})"
        causal = " causal" if self.causal else ""
        return f"{self.batch} x {self.length}, {heads} x {self.head_size}{causal}"


def papers_grid(
    lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384),
    head_sizes: Sequence[int] = (128, 64, 256),
    causal: Sequence[bool] = (True, False),
    *,
    grouped: bool = True,
    tokens: int = 16384,
    hidden: int = 2048,
    dtype: str = "bfloat16",
) -> list[Shape]:
    """Shapes of the FlashAttention papers: as many rows and features in each.

    Args:
      lengths: T; the batch has `tokens / T` entries.
      head_sizes: H; there are `hidden / H` heads.
      causal: with and without masking.
      grouped: also 32 query heads over 8 key/value heads of 128, causal, at the end.
      tokens, hidden: rows of a batch, and features of a row.
      dtype: of the operands.
    """

    def shape(length: int, heads: int, kv_heads: int, size: int, causal: bool) -> Shape:
        batch = max(1, tokens // length)
        return Shape(batch, length, heads, kv_heads, size, causal, dtype)

    shapes = [
        shape(length, heads, heads, head_size, is_causal)
        for head_size in head_sizes
        for heads in [max(1, hidden // head_size)]
        for is_causal in causal
        for length in lengths
    ]
    if grouped:
        shapes += [shape(length, 32, 8, 128, True) for length in lengths]
    return shapes
