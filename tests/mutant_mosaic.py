"""Faults of the Mosaic GPU kernels that a CPU can see: see `tests.mutants`."""

from __future__ import annotations

from tests.mutant_kernels import of

ORDER = "tests/test_visits.py -k before_them"
DOCUMENTS = "tests/test_visits.py -k of_documents"

MUTANTS = [
    *of(
        "pallas_kernels/core/visits.py",
        (
            "a program among those before it",
            "Named(so_far - visited,",
            "Named(so_far,",
            DOCUMENTS,
        ),
        (
            "programs before it counted from the other end",
            "reverse=last_first",
            "reverse=not last_first",
            DOCUMENTS,
        ),
        (
            "visits without the arrays that decide them",
            "tabled.for_ranges()",
            "spec.for_ranges()",
            DOCUMENTS,
        ),
        (
            "a block of queries too many counted",
            "(i < hi)",
            "(i <= hi)",
            ORDER,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/tiles.py",
        (
            "keys beyond the array not masked",
            "found = found.all_edges(",
            "found.all_edges(",
            ORDER,
        ),
        (
            "the first program of one order the last of the other",
            "return met[1] - 1 - own if self",
            "return met[1] - own if self",
            ORDER,
        ),
        (
            "programs of the queries before it",
            '"i": self._block(tile)[1]}',
            '"i": self._block(tile - tile)[1]}',
            ORDER,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/tuning.py",
        (
            "an order of any size",
            "if need > _MOST_COUNTS:",
            "if need < 0:",
            "tests/test_visits.py -k too_large",
        ),
    ),
]
