"""Faults of the forward kernel for Hopper that a CPU can see: see `tests.mutants`."""

from __future__ import annotations

from tests.faults import level
from tests.faults.kernels import of
from tests.faults.mosaic_gpu import DROPPED, PADDING

MUTANTS = [
    *level.MUTANTS,
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
            "is_first, is_final = number == 0, (number == retries) & (number > 0)",
            "is_first, is_final = number == 0, number > 0",
            DROPPED,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/forward_program.py",
        (
            "values of dropped keys meet products in every pass",
            "clear_keys.clear(values.at(i).ref.at[part], attended)",
            "clear_keys.clear(values.at(i).ref.at[part], attended | True)",
            DROPPED,
        ),
        (
            "values are cleared before they have come",
            "plgpu.barrier_wait(came)",
            "pass",
            PADDING,
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
        "pallas_kernels/mosaic_gpu/hopper/tuning.py",
        (
            "keys are awaited early where there is one stage",
            "return blocks.num_stages > 1",
            "return True",
            "tests/mosaic_gpu/test_schedule.py -k awaited_early",
        ),
        (
            "keys are awaited early beside a bias of pairs",
            "bool(score.pair_operands) or score",
            "score",
            "tests/mosaic_gpu/test_schedule.py -k awaited_early",
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
        (
            "each block of a list has the place of the one before it",
            "self.keys_at(jnp.minimum(i + 1, self.last))",
            "self.keys_at(jnp.minimum(i, self.last))",
            "tests/kernels/test_block_mask.py -m '' -k 'mosaic_gpu_kernels and window'",
        ),
        (
            "sums of rows stay when the maximum grows",
            "sums = sums * self.plan.along(alpha, support.COLUMNS)",
            "del alpha",
            "tests/mosaic_gpu/test_interpreted.py -k out_of_range",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/forward.py",
        (
            "rounds that met what is not finite are not made again",
            "unfinished |= (due & ~good).astype(jnp.int32) << slot",
            "unfinished |= 0 * slot",
            PADDING,
        ),
        (
            "a retry with a fixed maximum from the start",
            "running += this.is_final.astype(jnp.int32) * (keys.count - running)",
            "running += 0 * this.is_final.astype(jnp.int32)",
            "tests/mosaic_gpu/test_interpreted.py -k out_of_range",
        ),
    ),
]
