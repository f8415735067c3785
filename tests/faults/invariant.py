"""Faults of equal bits (`Config.invariant`): see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

BITS = "tests/kernels/test_invariant.py -k '{}'"
CUT = BITS.format("cut_anywhere and {}-everything")
PARTS = BITS.format("whoever_makes_them")
DECLINED = BITS.format("decline")
ERRORS = BITS.format("an_error")
LISTED = "tests/kernels/test_invariant.py -m deep -k 'triton-listed'"
ONE_ELEMENT = "tests/kernels/test_invariant.py -m deep -k 'xla-one_element'"

MUTANTS = [
    *of(
        "pallas_kernels/triton/forward.py",
        (
            "all rows of a block begin again",
            "store(finish(by_steps(kv_blocks)), ~good)",
            "store(finish(by_steps(kv_blocks)))",
            BITS.format("neighbour and triton-dense"),
        ),
        (
            "each part of the keys has the sink",
            "if layout.part is not None:\nspec =",
            "if False:\nspec =",
            PARTS,
        ),
        (
            "first to last, but for full blocks",
            "return blocks.all_edges().fold_edges(visit, nothing)",
            "return blocks.fold(visit, nothing)",
            "tests/kernels/test_accumulate.py -k test_levels[beyond_float32",
        ),
    ),
    *of(
        "pallas_kernels/layout.py",
        (
            "parts of the keys that a block needs, as many as there are programs",
            "return blocks & everything(first, first + self.part)",
            'return blocks.part(where["z"], self.parts["z"])',
            PARTS,
        ),
    ),
    *of(
        "pallas_kernels/triton/merge.py",
        (
            "parts of the keys that lie one block too far",
            "everything(number * size, (number + 1) * size)",
            "everything(number * size, (number + 1) * size + 1)",
            PARTS,
        ),
    ),
    *of(
        "pallas_kernels/triton/tuning.py",
        (
            "a tile of as few rows as an invariant call has",
            "regime, rows = _ANY_CALL, (tables.FEW_ROWS, tables.FEW_ROWS)",
            "regime = _ANY_CALL",
            CUT.format("triton"),
        ),
    ),
    *of(
        "pallas_kernels/triton/__init__.py",
        (
            "an invariant call walks lists of blocks",
            "lists=not launch.invariant",
            "lists=True",
            LISTED,
        ),
    ),
    *of(
        "jax_flash2/_chunked.py",
        (
            "xla's blocks of as few rows as an invariant call has",
            "return cls(size, most, heads, batch, precision, invariant=True)",
            "return cls(size, block, heads, batch, precision, invariant=True)",
            CUT.format("xla"),
        ),
        (
            "xla's products of all that vmap maps",
            "shape |= {name: size[name] for name in names}",
            "shape |= {name: shape.get(name, 1) for name in names}",
            BITS.format("vmap and xla"),
        ),
        (
            "xla's products of single numbers",
            'if "h" in own and shape["h"] == 1',
            'if "h" in own and shape["h"] == 0',
            ONE_ELEMENT,
        ),
        (
            "xla promises bits on GPUs",
            "if not _on_cpu():\nreturn Declined(",
            "if False:\nreturn Declined(",
            DECLINED,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/__init__.py",
        (
            "Hopper's kernels promise bits",
            'call.is_invariant and pass_ == "forward"',
            'call.is_invariant and pass_ == "tangent"',
            DECLINED,
        ),
    ),
    *of(
        "pallas_kernels/configs.py",
        (
            "parts of an invariant call that do not begin with a block",
            "if blocks is not None and PART % blocks.block_kv:",
            "if blocks is not None and 3 * PART % blocks.block_kv:",
            ERRORS,
        ),
        (
            "an invariant call in as many parts as the caller says",
            "if self.splits not in (None, 1):",
            "if self.splits not in (None, 1, 2):",
            ERRORS,
        ),
    ),
    *of(
        "jax_flash2/_chunked.py",
        (
            "an invariant call's operands are cut in the loops of its scores",
            "spec = lax.optimization_barrier(spec)",
            "pass",
            "tests/kernels/test_invariant.py -k 'score_of_pairs and xla' -m ''",
        ),
    ),
    *of(
        "jax_flash2/_context.py",
        (
            "an invariant call of rows on several devices",
            "if call.is_invariant:\nraise ValueError",
            "if False:\nraise ValueError",
            ERRORS,
        ),
    ),
]
