"""Faults in what is known of GPUs, and in whether blocks fit them: `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

CLASSES = "tests/triton/test_gpu_classes.py"
ESTIMATES = "tests/triton/test_estimates.py"
TUNING = "tests/triton/test_tuning.py"
DESCRIBED = "tests/transforms/test_described.py"
BLOCKS = "tests/mosaic_gpu/test_gradient_blocks.py"
CHOICE = "tests/mosaic_gpu/test_choice.py"

MUTANTS = [
    *of(
        "pallas_kernels/device.py",
        (
            "an unknown GPU taken for a Hopper",
            "_UNKNOWN = 86 ",
            "_UNKNOWN = 90 ",
            f"{CLASSES} -k by_name",
        ),
        (
            "tensor memory of GPUs that have none",
            "if 100 <= self.capability < 120:",
            "if 100 <= self.capability < 130:",
            f"{CLASSES} -k by_name",
        ),
        (
            "a described GPU's multiprocessors not asked for",
            "core_count=count) if count else found",
            "core_count=None)",
            f"{CLASSES} -k how_many_multiprocessors",
        ),
        (
            "a part of a GPU with the multiprocessors of all of it",
            "None if _PART.search(kind) else count",
            "count",
            f"{CLASSES} -k by_name",
        ),
        (
            "kernels lowered for a name that JAX refuses",
            "return AbstractDevice(name, there.num_cores, there.platform)",
            "return there",
            f"{CLASSES} -k unknown_name",
        ),
        (
            "types that name a mesh not asked where a program runs",
            "return next((x for x in found if x is not None), None)",
            "return None",
            f"{DESCRIBED} -k types_name",
        ),
    ),
    *of(
        "pallas_kernels/triton/tuning.py",
        (
            "a buffer too few where two products read a block",
            "need += streamed * several * width + again",
            "need += streamed * several * width",
            f"{CLASSES} -k estimates",
        ),
        (
            "dropout's bits without room",
            "has_bits * bits * (1 + owns_keys)",
            "has_bits * bits * 0",
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
            "columns += sum(_heads_of_tiles(kernel, heads)[0])",
            "columns += 0",
            f"{CLASSES} -k estimates",
        ),
        (
            "columns of tensor memory not limited",
            "estimates.tensor_memory(*sizes) <= gpu.tensor_memory",
            "True",
            f"{CLASSES} -k 'fits_every_class or of_an_h200'",
        ),
        (
            "keys of two products in one buffer",
            "again = streamed * heads[0] * (_IN_PIECES if is_split else width)",
            "again = 0",
            f"{CLASSES} -k of_mma_sync",
        ),
        (
            "three pieces of an operand as large as itself",
            "_IN_PIECES = 6",
            "_IN_PIECES = 4",
            f"{CLASSES} -k of_mma_sync",
        ),
        (
            "many rows of float32 tangents",
            "most = 16 if keeps_keys and size > 96 else None",
            "most = None",
            "tests/kernels/test_tangents.py -k of_dq",
        ),
        (
            "left operands of mma.sync without room",
            "resident = own * sum(kept) * width",
            "resident = 0",
            f"{CLASSES} -k of_mma_sync",
        ),
        (
            "what warps hand to each other without room",
            "left = each * pairs * handed if",
            "left = 0 if",
            f"{CLASSES} -k of_mma_sync",
        ),
        (
            "a buffer too many for mma.sync",
            "need = resident + (stages - 1) * ahead + left",
            "need = resident + stages * ahead + left",
            f"{CLASSES} -k of_mma_sync",
        ),
        (
            "a wrong regime of a table not said",
            "if regime not in tables.REGIMES:",
            "if False:",
            f"{TUNING} -k table_that_is_wrong",
        ),
        (
            "a table's blocks that do not fit not said",
            "if is_own and not fits(",
            "if False and not fits(",
            f"{TUNING} -k do_not_fit",
        ),
    ),
    *of(
        "pallas_kernels/tables.py",
        (
            "a family without its table",
            "return FAMILIES[family] if backend",
            "return default if backend",
            f"{TUNING} -k 'familys or whole'",
        ),
        (
            "a table of another GPU taken for its own",
            "if named != found:",
            "if named is None:",
            f"{TUNING} -k table_that_is_wrong",
        ),
    ),
    *of(
        "jax_flash2/_backends.py",
        (
            "a program for GPUs that were not known runs loops, in silence",
            "if not known and any(",
            "if False and any(",
            f"{DESCRIBED} -k one_device",
        ),
        (
            "an unknown GPU not said",
            "if not gpu.is_known:",
            "if False:",
            f"{CLASSES} -k unknown_name",
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
            "products of float32 itself need no more room than those of tensor cores",
            "return estimates.OWN_ITEMSIZE, precision",
            "return jnp.dtype(dtype).itemsize, precision",
            f"{ESTIMATES} -k without_tensor_cores",
        ),
        (
            "dropout not told to the choice of blocks",
            "dropout=spec.dropout is not None,",
            "dropout=False,",
            f"{CLASSES} -k takes_its",
        ),
        (
            "the caller's blocks not compared with the GPU",
            "least = estimates.least_shared_memory(kernel, blocks, heads, itemsize)",
            "least = 0",
            f"{CLASSES} -k cannot_fit",
        ),
    ),
    *of(
        "pallas_kernels/triton/estimates.py",
        (
            "the output on its way out in place of q",
            "own * max(heads) * 4 + held +",
            "own * max(heads) * 4 +",
            f"{CLASSES} -k estimates_of_wgmma",
        ),
        (
            "programs of few rows counted as if wgmma served them",
            "_rows(kernel, blocks)[0] >= 64 and blocks.num_warps >= 4",
            "True",
            f"{ESTIMATES} -k wgmma",
        ),
        (
            "a buffer for each stage of float32",
            "last = max(streamed * most * read, passing)",
            "last = max(every, passing)",
            f"{ESTIMATES} -k wgmma",
        ),
        (
            "left operands of float32 not in tensor memory",
            "need = stages * every if stages > 1 else every / len(loaded)",
            "need += stages * every if stages > 1 else every / len(loaded)",
            f"{ESTIMATES} -k tcgen05",
        ),
        (
            "what a gradient of a bias of keys loads ahead as of rows",
            'of_keys, is_split = looped != "t", itemsize == SPLIT_ITEMSIZE',
            "of_keys, is_split = True, itemsize == SPLIT_ITEMSIZE",
            f"{ESTIMATES} -k took",
        ),
        (
            "a kernel that does not say what it loops over",
            'over = "e" if by_distance else looped',
            'over = "s"',
            f"{ESTIMATES} -k say_what",
        ),
        (
            "what no GPU has timed chosen on Hopper",
            'if itemsize <= 2 and kernel != "dbias":',
            "if True:",
            f"{ESTIMATES} -k was_not_timed",
        ),
    ),
    *of(
        "pallas_kernels/triton/support.py",
        (
            "branches beside wgmma's products",
            'device.gpu().family.products != "wgmma"',
            "True",
            "tests/kernels/test_operations.py -k declined",
        ),
        (
            "no branches on any GPU",
            'interpret or device.gpu().family.products != "wgmma"',
            "interpret",
            "tests/kernels/test_operations.py -k declined",
        ),
    ),
]
