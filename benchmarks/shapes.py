"""What a pass of self-attention computes, and the shapes of the papers' grid."""

from collections.abc import Sequence

from jax_flash2.tune.problems import Shape as Shape

# The results of each pass. Backward takes what the forward left; it is timed alone.
PASSES = {
    "forward": ("out",),
    "backward": ("dq", "dk", "dv"),
    "forward_backward": ("out", "dq", "dk", "dv"),
}


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
