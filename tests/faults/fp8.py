"""Faults of attention in eight bits: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

CALLS = "tests/api/test_fp8.py"
QUANTISED = f"{CALLS} -k 'softmax_does_not_see or errors_of_quantising'"
KERNEL = "tests/mosaic_gpu/test_fp8.py"
SHARP = f"{KERNEL} -m '' -k sharp"

MUTANTS = [
    *of(
        "jax_flash2/_fp8.py",
        (
            "what has no heads is quantised",
            "return call.reads_bytes or not call.query.value.size",
            "return call.reads_bytes",
            f"{CALLS} -k no_queries",
        ),
    ),
    *of(
        "pallas_kernels/core/quantise.py",
        (
            "the mean key stays in the keys",
            "mean = keys.mean(k) if is_additive and spec.sink is None else None",
            "mean = None",
            f"{CALLS} -k channels",
        ),
        (
            "padding counts for the mean",
            "cls(None if kept is ones else kept, count)",
            "cls(None, count)",
            f"{CALLS} -k padded",
        ),
        (
            "Hadamard matrices without their signs",
            "signs[:, None] * hadamard",
            "hadamard",
            f"{CALLS} -k rotations",
        ),
    ),
    *of(
        "jax_flash2/_fp8.py",
        (
            "the log-sum-exp without the mean key",
            "if found.to_lse is not None:",
            "if found.to_lse is None:",
            QUANTISED,
        ),
        (
            "derivatives of rounded numbers",
            "call = _without_derivatives(call)",
            "call = dataclasses.replace(call)",
            f"{CALLS} -k derivatives",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/fp8_loop.py",
        (
            "probabilities that were cut are stored",
            "good = (peak < LARGEST)",
            "good = (peak < 2 * self.plan.block_kv * LARGEST)",
            SHARP,
        ),
        (
            "rows that lie below the range of bytes are stored",
            "& (rows.total >= keys * _FEWEST)",
            "& (rows.total > 0.0)",
            f"{KERNEL} -m '' -k one_large",
        ),
        (
            "sums of blocks with running maxima are counted twice",
            "part = values[:, self.plan.head :] * self._is_fixed(i - 1)",
            "part = values[:, self.plan.head :]",
            f"{KERNEL} -m '' -k 'interpreted and plain'",
        ),
        (
            "sums stay in the accumulator and are counted again",
            "acc[...] = fp8_bytes.cleared(values, sums.total)",
            "acc[...] = values",
            f"{KERNEL} -m '' -k 'interpreted and plain'",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/fp8.py",
        (
            "values with their keys in order",
            "jnp.swapaxes(x.reshape(*lead, rows, -1, 2, 4), -2, -1)",
            "x.reshape(*lead, rows, -1, 2, 4)",
            f"{KERNEL} -k order_of_keys",
        ),
    ),
]
