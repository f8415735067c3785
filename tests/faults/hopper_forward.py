"""Faults of the forward kernel for Hopper that a CPU can see: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of
from tests.faults.mosaic_gpu import DROPPED, PADDING

MUTANTS = [
    *of(
        "pallas_kernels/mosaic_gpu/hopper/forward.py",
        (
            "rows beyond the array among those that leave their range",
            "flash2.in_range(sums, loop.program.v.dtype) | beyond",
            "flash2.in_range(sums, loop.program.v.dtype) | (beyond & False)",
            DROPPED,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/retries.py",
        (
            "the pass that clears has maxima alone",
            "visit(i, i, state)",
            "visit(i, 1, state)",
            DROPPED,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/forward_retry.py",
        (
            "values of dropped keys meet products in every pass",
            "if self.plan.drops_keys:",
            "if False:",
            DROPPED,
        ),
        (
            "no warpgroup waits for the one that clears",
            "self.plan.values_cleared.sync()",
            "pass",
            PADDING,
        ),
        (
            "a retry with a fixed maximum from the start",
            "return lax.cond(number < self.running, running, of_fixed)",
            "return lax.cond(number < 0, running, of_fixed)",
            DROPPED,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/forward_plan.py",
        (
            "one edge, however many there are",
            "return all(edges_first(tile).edges == 1 for tile in tiles)",
            "return True",
            "tests/mosaic_gpu/test_schedule.py -k one_edge",
        ),
        (
            "one edge where data may make more",
            "if jax.tree.leaves(decided_by) or ",
            "if ",
            "tests/mosaic_gpu/test_schedule.py -k one_edge",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/forward_loop.py",
        (
            "the next pairs come while these are loaded",
            "release(use, loaded=True)",
            "release(use)",
            "tests/mosaic_gpu/test_variants.py -k loaded_before",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/forward.py",
        (
            "rounds that met what is not finite are not made again",
            "unfinished |= (~good).astype(jnp.int32) << slot",
            "unfinished |= 0 * slot",
            PADDING,
        ),
    ),
]
