"""Speed of attention against sequence length, with its peers side by side.

    python -m benchmarks.attention                       # the papers' grid
    python -m benchmarks.attention --grid=overview       # twelve of its shapes
    python -m benchmarks.attention --grid=row            # 2 x 8192, 16 heads of 128
    python -m benchmarks.attention --grid=quick --passes=forward --peers=jax_flash2,xla

The setting of the FlashAttention papers: 16k tokens a batch whatever the length, hidden
size 2048 (so 2048 / H heads), forward, backward, and both in one program. TFLOP/s count
forward 4 B T T N H operations (half when causal) and backward 2.5 times that. Every
result is compared with a float32 reference in the same run. Rows go to
`attention.jsonl`, of another dtype than bfloat16 to `attention_float32.jsonl` and the
like; `python -m benchmarks.figures` makes tables and plots of them.

XLA's standard attention needs up to 80 GiB in one piece: set
XLA_PYTHON_CLIENT_PREALLOCATE=true for JAX to have them from the start.
"""

import jax
from absl import flags

from benchmarks import comparison, options, tables
from benchmarks.shapes import PASSES, Shape, papers_grid

_GRID = flags.DEFINE_enum(
    "grid",
    "paper",
    ["paper", "overview", "quick", "row"],
    "paper: all lengths and head sizes. overview: those of them that README.md shows. "
    "quick: one shape of each kind, in less than 2 minutes. row: 2 x 8192, 16 heads of "
    "128, causal and not. The last two ignore the flags that describe the grid.",
)
_LENGTHS = options.integers("lengths", "512,1k,2k,4k,8k,16k", "Sequence lengths, T.")
_HEAD_SIZES = options.integers("head_sizes", "128,64,256", "Head sizes, H.")
_CAUSAL = flags.DEFINE_enum("causal", "both", ["both", "true", "false"], "Masks.")
_GQA = flags.DEFINE_bool(
    "gqa", True, "Also 32 query heads over 8 key/value heads of 128, causal."
)
_TOKENS = flags.DEFINE_integer("tokens", 16384, "Of a batch: B = tokens / T.")
_HIDDEN = flags.DEFINE_integer("hidden", 2048, "N = hidden / H.")
_PRECISION = flags.DEFINE_enum(
    "precision",
    "default",
    ["default", "highest"],
    "Of JAX's products of float32: default is TF32 on a GPU, highest true float32.",
)
_FLAGS = options.comparison(list(PASSES))


def paper_shapes() -> list[Shape]:
    """The papers' grid, as the flags say, then the grouped heads."""
    return papers_grid(
        _LENGTHS.value,
        _HEAD_SIZES.value,
        {"both": (True, False), "true": (True,), "false": (False,)}[_CAUSAL.value],
        grouped=_GQA.value,
        tokens=_TOKENS.value,
        hidden=_HIDDEN.value,
        dtype=_FLAGS.dtype.value,
    )


def overview_shapes() -> list[Shape]:
    return list(filter(tables.in_overview, paper_shapes()))


def row_shapes() -> list[Shape]:
    return [
        Shape(2, 8192, 16, 16, 128, causal, _FLAGS.dtype.value)
        for causal in (True, False)
    ]


def quick_shapes() -> list[Shape]:
    """One shape of each kind: long, short, small and large heads, grouped heads."""
    others = [
        (8, 2048, 16, 16, 128),
        (1, 16384, 32, 32, 64),
        (2, 8192, 8, 8, 256),
        (2, 8192, 32, 8, 128),
    ]
    return row_shapes() + [Shape(*sizes, True, _FLAGS.dtype.value) for sizes in others]


def main():
    grids = {
        "paper": paper_shapes,
        "overview": overview_shapes,
        "row": row_shapes,
        "quick": quick_shapes,
    }
    name = ["attention"]
    if _FLAGS.dtype.value != "bfloat16":
        name.append(_FLAGS.dtype.value)
    if _PRECISION.value != "default":
        jax.config.update("jax_default_matmul_precision", _PRECISION.value)
        name.append(_PRECISION.value)
    comparison.measure("_".join(name), grids[_GRID.value](), _FLAGS)


if __name__ == "__main__":
    options.launch(main)
