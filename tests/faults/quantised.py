"""Faults of quantised keys and values, and of four bits: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

FOUR_BITS = "tests/kernels/test_paged.py -k '{}'"
CALLS = "tests/api/test_paged_calls.py -k '{}'"
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
            "call.reads_bytes or not call.query",
            "call.is_quantised or not call.query",
            DENSE.format("heads and xla"),
        ),
    ),
    *of(
        "pallas_kernels/core/nibbles.py",
        (
            "numbers of four bits have no sign",
            "return ((numbers ^ 8) - 8).astype(jnp.int8)",
            "return numbers.astype(jnp.int8)",
            FOUR_BITS.format("are_those_of_jax"),
        ),
        (
            "the odd element is in the low half",
            "return (low | high << 4).astype(BYTES)",
            "return (high | low << 4).astype(BYTES)",
            FOUR_BITS.format("are_those_of_jax"),
        ),
    ),
    *of(
        "pallas_kernels/core/quantise.py",
        (
            "numbers of four bits are cut, not rounded",
            "return nibbles.packed(jnp.round(x).astype(jnp.int8))",
            "return nibbles.packed(x.astype(jnp.int8))",
            FOUR_BITS.format("are_those_of_jax"),
        ),
    ),
    *of(
        "pallas_kernels/triton/memory.py",
        (
            "the second element of a byte is the first",
            "return nibbles.half(found, place)",
            "return nibbles.half(found, 0)",
            FOUR_BITS.format("int4_parts and triton"),
        ),
    ),
    *of(
        "pallas_kernels/triton/packed.py",
        (
            "four bits become other numbers of bfloat16",
            "mov.b32 m, 0xC308C308; fma",
            "mov.b32 m, 0xC300C300; fma",
            FOUR_BITS.format("instructions and bfloat16"),
        ),
        (
            "bits of int8 and of its constant are joined in another way",
            '_AND_XOR = "0x6A"',
            '_AND_XOR = "0xEA"',
            FOUR_BITS.format("instructions and int8 and float16"),
        ),
        (
            "four bits become other numbers of float16",
            "mov.b32 c, 0x64086408; lop3",
            "mov.b32 c, 0x64006400; lop3",
            FOUR_BITS.format("instructions and float16"),
        ),
        (
            "kernels take heads of four bits of any size",
            "return kind != BYTES or (size >= 64 and size & (size - 1) == 0)",
            "return True",
            FOUR_BITS.format("kernels_lack"),
        ),
    ),
    *of(
        "jax_flash2/_pools.py",
        (
            "values are a part of keys of four bits",
            'if head != "d":',
            'if head == "h":',
            CALLS.format("int4_latent"),
        ),
    ),
]
