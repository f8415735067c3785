"""Faults in what is known of GPUs, and in whether blocks fit them: `tests.mutants`."""

from __future__ import annotations

from tests.mutant_kernels import of

CLASSES = "tests/test_gpu_classes.py"

MUTANTS = [
    *of(
        "pallas_kernels/device.py",
        (
            "an unknown GPU taken for a Hopper",
            "_UNKNOWN = 86, 84",
            "_UNKNOWN = 90, 132",
            f"{CLASSES} -k by_name",
        ),
        (
            "tensor memory of GPUs that have none",
            "if 100 <= capability() < 120 else",
            "if 100 <= capability() < 130 else",
            f"{CLASSES} -k by_name",
        ),
        (
            "a described GPU's multiprocessors not asked for",
            "here = _here() or abstract_device()",
            "here = _here()",
            f"{CLASSES} -k how_many_multiprocessors",
        ),
    ),
    *of(
        "pallas_kernels/triton/tuning.py",
        (
            "a buffer too few where two products read a block",
            "need += streamed * sum(heads[",
            "need += 0 * sum(heads[",
            f"{CLASSES} -k estimates",
        ),
        (
            "dropout's bits without room",
            'bits * (1 if kernel in ("forward", "dq") else 2)',
            "bits * 0",
            f"{CLASSES} -k estimates",
        ),
        (
            "barriers without room",
            "_BESIDE = (1 << 10) + 512",
            "_BESIDE = 0",
            f"{CLASSES} -k estimates",
        ),
        (
            "left operands not counted in tensor memory",
            "columns += sum(heads[: LEFT[kernel]])",
            "columns += 0",
            f"{CLASSES} -k estimates",
        ),
        (
            "columns of tensor memory not limited",
            "not columns or tensor_memory(kernel, blocks, heads, itemsize) <= columns",
            "True",
            f"{CLASSES} -k 'fits_every_class or of_an_h200'",
        ),
    ),
    *of(
        "pallas_kernels/triton/__init__.py",
        (
            "dropout not told to the choice of blocks",
            "dropout=spec.dropout is not None,",
            "dropout=False,",
            f"{CLASSES} -k asks_for",
        ),
        (
            "the caller's blocks not compared with the GPU",
            "least = tuning.least_shared_memory(kernel, blocks, heads, itemsize)",
            "least = 0",
            f"{CLASSES} -k cannot_fit",
        ),
    ),
]
