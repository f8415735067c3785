"""Faults of quantised keys and values in dense calls: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

DENSE = "tests/kernels/test_quantised.py -k '{}'"

MUTANTS = [
    *of(
        "pallas_kernels/core/clear.py",
        (
            "scales of values that no query reads",
            "return dataclasses.replace(spec, value_scale=unread(spec, scale))",
            "return spec",
            DENSE.format("masked_keys and xla"),
        ),
    ),
    *of(
        "pallas_kernels/passes.py",
        (
            "scales of values that a mask of pairs drops, in kernels",
            "return clear.scale_of_values(spec), *(clear",
            "return spec, *(clear",
            DENSE.format("masked_keys and triton"),
        ),
    ),
    *of(
        "pallas_kernels/backend.py",
        (
            "quantised keys have gradients",
            "return self.spec.pages is None and not self.reads_bytes",
            "return self.spec.pages is None and not self.is_quantised",
            DENSE.format("heads and xla"),
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/__init__.py",
        (
            "Hopper's kernels read quantised keys",
            "if call.reads_bytes and not call.is_quantised:",
            "if call.reads_bytes and call.is_quantised:",
            DENSE.format("lower_for_gpus"),
        ),
    ),
    *of(
        "jax_flash2/_arguments.py",
        (
            "keys keep their scale for themselves",
            'key_scale=scales.get("key")',
            "key_scale=None",
            DENSE.format("keys_alone and xla"),
        ),
        (
            "a query of float8 has quantised keys of another dtype",
            "(query.dtype == FP8 or not is_quantised)",
            "not is_quantised",
            "tests/api/test_fp8.py -k other_kinds",
        ),
    ),
    *of(
        "jax_flash2/_fp8.py",
        (
            "quantised keys are quantised again",
            "if call.reads_bytes:\n        return _vjp",
            "if call.is_quantised:\n        return _vjp",
            DENSE.format("heads and xla"),
        ),
    ),
]
