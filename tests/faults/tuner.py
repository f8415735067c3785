"""Faults of the tuner and of tables in the user's folder: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

TABLES = "tests/project/test_user_tables.py"
BAD = f"{TABLES} -k bad_table"
TUNER = "tests/mosaic_gpu/test_crossovers.py"

MUTANTS = [
    *of(
        "pallas_kernels/user_tables.py",
        (
            "tables that are ignored are read",
            "return None if given == OFF else",
            "return",
            f"{TABLES} -k where_a_table",
        ),
        (
            "a table that nobody checks",
            "_check(found, backend, gpu)",
            "pass",
            BAD,
        ),
        (
            "the table of another GPU",
            '_expect(found.get("gpu") == gpu,',
            "_expect(True,",
            BAD,
        ),
        (
            "blocks in a table that do not fit",
            'raise ValueError(f"{field}: {why_not}")',
            "continue",
            BAD,
        ),
        (
            "keys of a crossover point below none",
            "is_count = isinstance(keys, int | float) and keys >= 0",
            "is_count = isinstance(keys, int | float)",
            BAD,
        ),
        (
            "a user's entry without the rest of the shipped one",
            "{**serving(size), **x}",
            "x",
            f"{TABLES} -k over_the_shipped",
        ),
    ),
    *of(
        "pallas_kernels/triton/tuning.py",
        (
            "blocks of the user's table not taken",
            "tuned = tuned | {name: Blocks(*numbers) for name, numbers in own.items()}",
            "pass",
            f"{TABLES} -k calls_use",
        ),
    ),
    *of(
        "jax_flash2/_backends.py",
        (
            "a user's table that explain does not name",
            "for path in filter(None, used)]",
            "for path in filter(None, []) if used]",
            f"{TABLES} -k calls_use",
        ),
    ),
    *of(
        "jax_flash2/tune/__main__.py",
        (
            "crossover points measured with blocks of before",
            "measured.of_gpu.cache_clear()",
            "pass",
            f"{TUNER} -k from_its_command",
        ),
        (
            "a quick run of every rung",
            "ladder = crossover.LADDER[:: 2 if given.quick else 1]",
            "ladder = crossover.LADDER",
            f"{TUNER} -k from_its_command",
        ),
    ),
    *of(
        "jax_flash2/tune/table.py",
        (
            "a second run forgets the first one",
            "if user_tables.path(backend, gpu) == self.path:",
            "if False:",
            f"{TABLES} -k calls_use",
        ),
    ),
    *of(
        "jax_flash2/tune/blocks.py",
        (
            "what was timed in bursts counts",
            'if not row.get("in_bursts"):',
            "if True:",
            "tests/triton/test_tuning.py -k in_bursts",
        ),
        (
            "the slowest go on",
            "key=lambda i: seconds[i])",
            "key=lambda i: -seconds[i])",
            "tests/triton/test_tuning.py -k in_bursts",
        ),
        (
            "the blocks of now do not go on",
            "return [blocks[0], *(",
            "return [*(",
            "tests/triton/test_tuning.py -k in_bursts",
        ),
    ),
]
