"""Faults of kernels that run only by name, and of their choice: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of, rule

HERE = "tests/mosaic_gpu/test_by_name.py"
PADDING = f"{HERE} -m '' -k 'padding and {{}}'"
PASSES = f"{HERE} -k which_pass"
AMPERE = rule("lengths_causal", backend="mosaic_gpu_ampere")
BLACKWELL = rule("lengths_causal", backend="mosaic_gpu_blackwell")

MUTANTS = [
    *of(
        "jax_flash2/_backends.py",
        (
            "gradients by the forward's backend, or one after it",
            "first = name if is_named else _of_platform(name)[0]",
            "first = name",
            "tests/mosaic_gpu/test_choice.py -k a_window",
        ),
        (
            "gradients leave a backend that is named for one before it",
            "first = name if is_named else _of_platform(name)[0]",
            "first = _of_platform(name)[0]",
            "tests/mosaic_gpu/test_choice.py -k a_window",
        ),
        (
            "a backend that must be named is chosen without",
            "[name for name, entry in BACKENDS.items() if not entry.only_by_name]",
            "list(BACKENDS)",
            f"{HERE} -k without_their_name",
        ),
        (
            "explain does not say that a kernel never ran",
            'return f" ({why})" if why else ""',
            'return ""',
            PASSES,
        ),
    ),
    *of(
        "pallas_kernels/device.py",
        (
            "a described GPU taken for one that is here",
            "return _here() is not None",
            "return True",
            f"{HERE} -k other_gpus",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/by_name.py",
        (
            "a forward plan for the gradients",
            'if pass_ != "forward":\nreturn "it has',
            'if pass_ == "operand_gradients":\nreturn "it has',
            PASSES,
        ),
        (
            "vectors where kernels load scalars",
            'any({"t", "s"} & set(x.axes) for x in jax.tree.leaves(spec))',
            "False",
            f"{HERE} -k 'declined and mask'",
        ),
        (
            "values beyond a length meet products",
            "value = clear.unread(call.spec, call.value)",
            "value = call.value",
            PADDING.format("tma"),
        ),
        (
            "a row's part of the scores, for which there is no layout",
            "return scores if scores.row is None else scores.settled",
            "return scores",
            f"{HERE} -k 'scalars_alone and alibi'",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/memory.py",
        (
            "threads copy beyond the array",
            "by_tma = heads and not whole_blocks",
            "by_tma = heads",
            AMPERE,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/shared_memory.py",
        (
            "tensor memory counted as shared memory",
            "if x.memory_space == plgpu.TMEM:",
            "if x.memory_space == plgpu.GMEM:",
            PASSES,
        ),
        (
            "blocks that need more than the GPU has",
            "need, limit = num_bytes(declared), device.shared_memory_limit()",
            "need, limit = 0, device.shared_memory_limit()",
            "tests/mosaic_gpu/test_gradient_blocks.py -k 'cannot_have and memory'",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/ampere/heads.py",
        (
            "the keys of the first head for all",
            "Rows(number * width, width)",
            "Rows(number * 0, width)",
            f"{HERE} -k head_lies",
        ),
        (
            "heads of several axes counted as if these had one element",
            "number = number * self.sizes[name] + where[name]",
            "number = number + where[name]",
            f"{HERE} -k head_lies",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/ampere/stages.py",
        (
            "TMA writes where loads may be under way",
            "self.pipeline.release(i, loaded=True)",
            "self.pipeline.release(i)",
            PADDING.format("tma"),
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/ampere/forward.py",
        (
            "a sum that is not scaled where the maximum grows",
            "flash2.add_row_sums(state.l * alpha, p)",
            "flash2.add_row_sums(state.l, p)",
            AMPERE,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/blackwell/forward.py",
        (
            "sums of values that are never scaled",
            "@pl.when(grown != 0)",
            "@pl.when(grown < 0)",
            BLACKWELL,
        ),
        (
            "sums of values begin with what was there",
            "accumulate=i > self.first",
            "accumulate=True",
            BLACKWELL,
        ),
        (
            "scores overwritten while they are loaded",
            "qk = plgpu.async_load_tmem(self.scores, layout=support.ROW_OF_A_THREAD)\n"
            "plgpu.wait_load_tmem()",
            "qk = plgpu.async_load_tmem(self.scores, layout=support.ROW_OF_A_THREAD)",
            PADDING.format("blackwell"),
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/blackwell/plan.py",
        (
            "scores without columns of tensor memory",
            "scores = blocks.block_kv + blocks.block_kv // 2",
            "scores = blocks.block_kv // 2",
            f"{HERE} -k 'declined and tensor_memory'",
        ),
    ),
]
