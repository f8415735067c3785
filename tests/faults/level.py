"""Faults of what is known of a function of the score, and of level blocks."""

from __future__ import annotations

from tests.faults.kernels import of

_TESTS = "tests/mosaic_gpu/test_level.py"
INTERPRETED = f"{_TESTS} -k interpreted"
KNOWN = f"{_TESTS} -k known"
CHOSEN = f"{_TESTS} -k chosen"

MUTANTS = [
    *of(
        "pallas_kernels/core/pairs.py",
        (
            "a level block without its number",
            "moved = shift - number * flash2.LOG2_E",
            "moved = shift",
            INTERPRETED,
        ),
        (
            "numbers of level blocks in units of the score",
            "moved = shift - number * flash2.LOG2_E",
            "moved = shift - number",
            INTERPRETED,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/gather.py",
        (
            "every block is level",
            "return are_equal(_part(ref, index, axis, own)) != 0, first",
            "return are_equal(_part(ref, index, axis, own)) >= 0, first",
            INTERPRETED,
        ),
        (
            "a block is level if most of its diagonals are",
            "sum(block[name] for name in places.order) - 1)",
            "sum(block[name] for name in places.order) - 65)",
            INTERPRETED,
        ),
    ),
    *of(
        "pallas_kernels/core/scores/mod.py",
        (
            "ALiBi as a function with the first block's maximum",
            'return not names.isdisjoint(("q", "kv"))',
            "return False",
            KNOWN,
        ),
        (
            "a table's index makes scores grow",
            "self.program.depends(by_index=False)",
            "self.program.depends()",
            KNOWN,
        ),
        (
            "what is added for a key counts as level",
            'not names & {"q", "kv", "t", "s"}',
            'not names & {"q", "kv"}',
            f"{_TESTS} -k arithmetic",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/tuning.py",
        (
            "level blocks with two warpgroups at heads of 64",
            "fewest = 3 if largest <= 64 else 1",
            "fewest = 1",
            CHOSEN,
        ),
        (
            "level blocks at heads of 256",
            "fits = largest <= 128 and",
            "fits =",
            CHOSEN,
        ),
        (
            "level blocks of few keys",
            "numbers.many_level_keys if is_level",
            "numbers.many_keys if is_level",
            CHOSEN,
        ),
    ),
]
