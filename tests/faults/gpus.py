"""Faults in what is known of GPUs, and in whether blocks fit them: `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

CLASSES = "tests/triton/test_gpu_classes.py"
BLOCKS = "tests/mosaic_gpu/test_gradient_blocks.py"
CHOICE = "tests/mosaic_gpu/test_choice.py"

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
        "pallas_kernels/mosaic_gpu/hopper/gradient_blocks.py",
        (
            "a kernel that waits for the stage that it reads",
            "if pipelined and blocks.num_stages < 2:",
            "if pipelined and blocks.num_stages < 1:",
            f"{BLOCKS} -k cannot_have",
        ),
        (
            "the caller's blocks of gradients not used",
            "found[kernel] = blocks",
            "found[kernel] = found[kernel]",
            f"{BLOCKS} -k callers_blocks_lower",
        ),
        (
            "warpgroups that make half of a swizzled part",
            "return blocks.block_q != ROWS * count and",
            "return False and",
            f"{BLOCKS} -k cannot_have",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/measured.py",
        (
            "calls that are never faster always faster",
            "math.inf if x is None else x",
            "0 if x is None else x",
            f"{BLOCKS} -k has_a_table",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/tuning.py",
        (
            "the easiest of a call's conditions counts",
            "measured.Crossover(max(forward), max(backward))",
            "measured.Crossover(min(forward), min(backward))",
            CHOICE,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/__init__.py",
        (
            "the caller's blocks of gradients known to be slower",
            "if config is None or not (config.dkv or config.dq):",
            "if True:",
            f"{BLOCKS} -k not_slower",
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
