"""Speed of attention against sequence length, with its peers side by side.

    python -m benchmarks.attention                       # the papers' grid
    python -m benchmarks.attention --grid=overview       # twelve of its shapes
    python -m benchmarks.attention --grid=row            # 2 x 8192, 16 heads of 128
    python -m benchmarks.attention --grid=quick --passes=forward --peers=jax_flash2,xla

The setting of the FlashAttention papers: 16k tokens a batch whatever the length, hidden
size 2048 (so 2048 / H heads), forward, backward, and both in one program. TFLOP/s count
forward 4 B T T N H operations (half when causal) and backward 2.5 times that. Every
result is compared with a float32 reference in the same run. Rows go to
`attention.jsonl`; `python -m benchmarks.figures` makes tables and plots of them.
"""

from absl import flags

from benchmarks import comparison, options, records, tables
from benchmarks.harness import PASSES, Shape
from benchmarks.peers import PEERS

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
_DTYPE = options.dtype("bfloat16")
_PEERS = options.peers(list(PEERS))
_PASSES = options.passes(list(PASSES))
_REPEATS = options.repeats(5)
_BUDGET = flags.DEFINE_float(
    "budget_seconds", None, "Begin no further shape after this long."
)
_RESUME = flags.DEFINE_bool(
    "resume", False, "Carry on with the newest run of the file: same code and machine."
)
_RESULTS_DIR, _COMMIT = options.files()


def paper_shapes() -> list[Shape]:
    """The papers' grid, as the flags say, then the grouped heads."""
    causal = {"both": (True, False), "true": (True,), "false": (False,)}[_CAUSAL.value]

    def shape(length: int, heads: int, kv_heads: int, head_size: int, causal: bool):
        batch = max(1, _TOKENS.value // length)
        return Shape(batch, length, heads, kv_heads, head_size, causal, _DTYPE.value)

    shapes = [
        shape(length, heads, heads, head_size, is_causal)
        for head_size in _HEAD_SIZES.value
        for heads in [max(1, _HIDDEN.value // head_size)]
        for is_causal in causal
        for length in _LENGTHS.value
    ]
    if _GQA.value:
        shapes += [shape(length, 32, 8, 128, True) for length in _LENGTHS.value]
    return shapes


def overview_shapes() -> list[Shape]:
    return list(filter(tables.in_overview, paper_shapes()))


def row_shapes() -> list[Shape]:
    return [
        Shape(2, 8192, 16, 16, 128, causal, _DTYPE.value) for causal in (True, False)
    ]


def quick_shapes() -> list[Shape]:
    """One shape of each kind: long, short, small and large heads, grouped heads."""
    others = [
        (8, 2048, 16, 16, 128),
        (1, 16384, 32, 32, 64),
        (2, 8192, 8, 8, 256),
        (2, 8192, 32, 8, 128),
    ]
    return row_shapes() + [Shape(*sizes, True, _DTYPE.value) for sizes in others]


def main():
    grids = {
        "paper": paper_shapes,
        "overview": overview_shapes,
        "row": row_shapes,
        "quick": quick_shapes,
    }
    run = records.Run.start(
        "attention", _RESULTS_DIR.value, commit=_COMMIT.value, resume=_RESUME.value
    )
    rows = comparison.compare(
        run,
        grids[_GRID.value](),
        [PEERS[name] for name in _PEERS.value],
        _PASSES.value,
        rounds=_REPEATS.value,
        budget_seconds=_BUDGET.value,
    )
    print(f"\n{run.path}\n\n{tables.comparison(rows)}")


if __name__ == "__main__":
    options.launch(main)
