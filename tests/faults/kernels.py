"""Faults of the kernels, and of what is being rewritten: see `tests.mutants`."""

from __future__ import annotations

from tests.mutants import Mutant

COUNTS = "tests/core/test_counts.py"
FEW = "tests/kernels/test_division.py"
SUMS = "tests/kernels/test_sums.py -k triton"
ASSEMBLY = "tests/triton/test_lowered_text.py -k assembly"
ADDRESSES = "tests/triton/test_lowered_text.py -k 'addresses or written_once'"
PRECISION = "tests/triton/test_lowering.py -k precision_reaches"
REGIME = "tests/triton/test_tuning.py -k takes_the_blocks_of_its_regime"
FIT = "tests/triton/test_lowering.py -k 'shared_memory or callers_blocks'"


def rule(*cases: str, backend: str = "triton") -> str:
    """The error rule on a backend, each case in one dtype."""
    names = " or ".join(f"test_error_rule[{case}-" for case in cases)
    return f"tests/kernels/test_attention.py -k '{backend} and ({names})'"


def of(file: str, *faults: tuple[str, ...]) -> list[Mutant]:
    """Of (name, old, new, tests, and why it may live)."""
    return [Mutant(name, file, *rest) for name, *rest in faults]


# XLA may leave out a cast to bfloat16 and back.
_ROUNDED = "jax.tree.map(lambda x: lax.reduce_precision(x, 8, 7), {})"

_TRITON = [
    *of(
        "pallas_kernels/triton/backward.py",
        (
            "dk without scale",
            '"dk": spec.gradient_unit',
            '"dk": spec.dropout_scale',
            rule("plain"),
        ),
        (
            "dk without dropout's scale",
            '"dk": spec.gradient_unit',
            '"dk": spec.score.gradient_unit',
            rule("dropout"),
        ),
        (
            "dk off 1 %",
            '"dk": spec.gradient_unit',
            '"dk": 1.01 * spec.gradient_unit',
            rule("causal"),
        ),
        (
            "dv without dropout's scale",
            '"dv": spec.dropout_scale',
            '"dv": 1.0',
            rule("dropout"),
        ),
        (
            "a bias's gradient without dropout's scale",
            "store(total * spec.dropout_scale,",
            "store(total,",
            rule("dropout_bias"),
        ),
        (
            "dv summed in bfloat16",
            'sums["dv"] = flash2.added(sums["dv"], more)',
            'sums["dv"] = ' + _ROUNDED.format('flash2.added(sums["dv"], more)'),
            SUMS,
        ),
        (
            "dk summed in bfloat16",
            'sums["dk"] = flash2.added(sums["dk"], more)',
            'sums["dk"] = ' + _ROUNDED.format('flash2.added(sums["dk"], more)'),
            SUMS,
        ),
        (
            "dq summed in bfloat16",
            "return flash2.added(dq, more)",
            "return " + _ROUNDED.format("flash2.added(dq, more)"),
            SUMS,
        ),
        (
            "dp of dq rounded to bfloat16",
            "dp = pairs.product(do_block, v_block)\n",
            "dp = pairs.product(do_block, v_block).astype(jnp.bfloat16)\n",
            SUMS,
        ),
        (
            "dp of dk rounded to bfloat16",
            "dp = pairs.product(do_block, *v_block) if",
            "dp = pairs.product(do_block, *v_block).astype(jnp.bfloat16) if",
            SUMS,
        ),
        (
            "p of dq rounded to bfloat16",
            'pairs.recompute(scores, pairs.along(lse_log2, "t"))\ndp = pairs',
            "(lambda x: x._replace(p=x.p.astype(k.dtype)))("
            'pairs.recompute(scores, pairs.along(lse_log2, "t")))\n'
            "dp = pairs",
            SUMS,
            "dz is rounded by as much right after: a result is hardly further off",
        ),
        (
            "dq's products not as precise as asked for",
            "k_block, launch.precision)",
            "k_block)",
            PRECISION,
        ),
    ),
    *of(
        "pallas_kernels/triton/forward.py",
        (
            "the output's product not as precise as asked for",
            "flash2.times(p, v_block, pairs.precision)",
            "flash2.times(p, v_block)",
            PRECISION,
        ),
        (
            "rows out of range are not begun again",
            "lost = kv_blocks.any_full & (jnp.max(jnp.where(good, 0, 1)) > 0)",
            "lost = jnp.max(jnp.where(good, 0, 1)) > 1",
            "tests/kernels/test_accumulate.py -k test_levels[beyond_float32",
        ),
        (
            "an output without dropout's scale",
            "o = flash2.scaled(o, spec.dropout_scale) if spec.dropout else o",
            "pass",
            rule("dropout"),
        ),
        (
            "rows beyond a query length not stored",
            'rows = layout.rows_at("t", where["t"].start)',
            'rows = where["t"]',
            "tests/kernels/test_attention.py -k 'padding_never and triton and nan'",
        ),
        (
            "padded rows make a program begin again",
            '(rows.numbers >= layout.size["t"])',
            "(rows.numbers < 0)",
            rule("plain"),
            "only time: the rows of a last block that overhangs are not stored",
        ),
    ),
    *of(
        "pallas_kernels/triton/__init__.py",
        (
            "the regime always plain",
            "regime=tables.regime(operands, spec),",
            'regime="plain",',
            REGIME,
        ),
        (
            "no tables of blocks",
            "spec = spec.with_table(looped,",
            "spec.with_table(looped,",
            "tests/kernels/test_attention.py -k 'segments_do_not and nan and triton'",
        ),
    ),
    *of(
        "pallas_kernels/program.py",
        (
            "causal order not reversed",
            'layout.num_blocks["t"] - 1 - i',
            "i",
            f"{COUNTS} -k most_keys",
        ),
        (
            "every window reversed",
            "if spec.traits.cost_grows:",
            "if spec.masks:",
            f"{COUNTS} -k most_keys",
        ),
        (
            "an overhanging block of keys without an end",
            'if size % layout.rows["s"] else spec',
            "if False else spec",
            rule("plain"),
        ),
        (
            "the key head of a looped head",
            'lax.div(where["n"], jnp.int32(layout.group))',
            'where["n"]',
            rule("bias_heads", "bias_half"),
        ),
        (
            "padding of visited blocks is loaded",
            "layout.rows_at(name, start, spec.q_limit(size))",
            "layout.rows_at(name, start)",
            "tests/kernels/test_attention.py -k 'padding_never and triton and nan'",
        ),
    ),
    *of(
        "pallas_kernels/division.py",
        (
            "some programs begin when all others end",
            "return turns * at_once // programs",
            "return least",
            FEW,
        ),
        (
            "packed rows all stand at the first positions",
            "dataclasses.replace(packed, repeat=self.heads.group)",
            "packed",
            FEW + " -k 'few_queries and window'",
        ),
        (
            "parts of a gradient in two bytes",
            "(*count.values(), *output.shape), jnp.float32)",
            "(*count.values(), *output.shape), output.dtype)",
            FEW + " -k parts_are_float32",
        ),
    ),
    *of(
        "pallas_kernels/layout.py",
        (
            "every part visits all blocks",
            'blocks.part(where["z"], self.parts["z"])',
            "blocks",
            FEW + " -k forced_parts",
        ),
        (
            "every part visits all heads",
            "(divide(self.elements * i, count) for i in (index, index + 1))",
            "(divide(self.elements * i, count) for i in (0 * index, count))",
            FEW + " -k forced_parts",
        ),
        (
            "dropped keys are loaded",
            "below & self.kept",
            "below",
            "tests/kernels/test_attention.py -k 'masked_keys and keys-triton'",
        ),
        (
            "padding is loaded one row too far",
            "below = self.numbers < self.limit",
            "below = self.numbers <= self.limit",
            ADDRESSES,
        ),
        (
            "a head padded to too few elements",
            "None if start + piece <= size else size",
            "None",
            rule("head_40"),
        ),
        (
            "pieces of a head that begin anew",
            "start += piece",
            "pass",
            rule("head_80"),
        ),
    ),
    *of(
        "pallas_kernels/tables.py",
        (
            "packed documents in the regime of long rows",
            "if spec.traits.is_sparse or 4 * keys",
            "if 4 * keys",
            REGIME,
        ),
        (
            "many rows beside pages in the regime of few",
            'size["t"] > FEW_ROWS // 2:',
            'size["t"] > FEW_ROWS:',
            "tests/triton/test_tuning.py -k 'calls_of_its_own and many'",
        ),
    ),
    *of(
        "pallas_kernels/triton/memory.py",
        (
            "the key head of a query head",
            '_program("n", self.group)',
            '_program("n")',
            rule("gqa"),
        ),
        (
            "tiles kept in the interpreter's place",
            "0 if self.interpret else self.blocks.left_in_registers",
            "0",
            "tests/triton/test_lowering.py -k 'left_operands and 128 and bfloat16'",
        ),
    ),
    *of(
        "pallas_kernels/triton/addresses.py",
        (
            "a doubled stride",
            "stride = math.prod(whole[i + 1 :])",
            "stride = 2 * math.prod(whole[i + 1 :])",
            ADDRESSES,
        ),
        (
            "a block's start in the wrong axis",
            "first = advanced(place, stride)",
            "first = advanced(place, 1)",
            ADDRESSES,
        ),
        (
            "stores without a mask",
            "pallas._store(addresses, value, mask=next(values, None))",
            "pallas._store(addresses, value)",
            ADDRESSES,
        ),
        (
            "padding loaded as whatever lies there",
            "pallas._load(addresses, mask=mask, other=padding)",
            "pallas._load(addresses, mask=mask)",
            "tests/triton/test_lowered_text.py -k padding",
        ),
    ),
    *of(
        "pallas_kernels/triton/support.py",
        (
            "precision ignored by the kernels",
            "return SPLIT_ITEMSIZE, lax.DotAlgorithmPreset.BF16_BF16_F32_X6",
            "return SPLIT_ITEMSIZE, lax.Precision.DEFAULT",
            PRECISION,
        ),
        (
            "highest precision of three products",
            "BF16_BF16_F32_X6",
            "BF16_BF16_F32_X3",
            PRECISION,
        ),
        ("the exponent's shift added", "neg.f32 e, $2;", "mov.f32 e, $2;", ASSEMBLY),
        ("the exponent of base e", "ex2.approx.ftz", "lg2.approx.ftz", ASSEMBLY),
        ("the wrong half of a product's bits", "mul.hi.u32", "mul.lo.u32", ASSEMBLY),
        (
            "one more level of bits kept",
            'p, $2, {limit}; "\n        "selp.f32 $0, $1, 0f00000000, p;}",',
            'p, $2, {limit + 1}; "\n        "selp.f32 $0, $1, 0f00000000, p;}",',
            ASSEMBLY,
        ),
        (
            "a tile kept in registers in another dtype",
            'kept = "=r,0" if pack > 1',
            'kept = "=r,0" if pack > 2',
            ASSEMBLY,
        ),
        (
            "the approximate tanh for float32",
            "jnp.tanh if dtype == jnp.float32 else",
            "jnp.tanh if dtype == jnp.float64 else",
            ASSEMBLY,
        ),
    ),
    *of(
        "pallas_kernels/triton/registers.py",
        (
            "a bound on registers under another name",
            '"ttg.maxnreg"',
            '"ttg.maxreg"',
            "tests/triton/test_lowering.py -k bound_on_registers_reaches",
        ),
    ),
    *of(
        "pallas_kernels/configs.py",
        (
            "anything taken for blocks",
            "not isinstance(blocks, Blocks)",
            "isinstance(blocks, str)",
            "tests/api/test_errors.py -k wrong_type",
        ),
        (
            "the caller's blocks of dk and dv not taken",
            'kernel in ("dk", "dv") else',
            'kernel in ("dv",) else',
            FIT,
        ),
    ),
    *of(
        "pallas_kernels/triton/tuning.py",
        (
            "blocks larger than the rows",
            "block_q=min(blocks.block_q, padded(rows[0])),",
            "block_q=blocks.block_q,",
            "tests/triton/test_lowering.py -k not_larger",
        ),
        (
            "shared memory of a stage too few",
            "need = resident + last + (stages - 1) * ahead",
            "need = resident + last + max(stages - 2, 0) * ahead",
            "tests/triton/test_estimates.py -k wgmma",
        ),
        (
            "tiles in registers counted",
            "len(left) - blocks.left_in_registers",
            "len(left)",
            "tests/triton/test_lowering.py -k 'left_operands and 128 and bfloat16'",
        ),
    ),
]

_PLAIN_JAX = [
    *of(
        "pallas_kernels/triton/__init__.py",
        (
            "few rows of large heads left to XLA",
            "largest > 256 and many",
            "largest > 256",
            "tests/api/test_errors.py -k leaves_a_call",
        ),
    ),
    *of(
        "pallas_kernels/passes.py",
        (
            "keys that a mask of pairs drops reach products",
            "*(clear.dropped_keys(spec, x) for x in rows)",
            "*rows",
            "tests/kernels/test_attention.py -k 'masked_keys and rows-triton'",
        ),
    ),
    *of(
        "jax_flash2/_chunked.py",
        (
            "dv of the loops without dropout's scale",
            "unit = spec.dropout_scale",
            "unit = 1.0",
            rule("dropout", backend="xla_blocks"),
        ),
        (
            "the last block of keys not visited",
            "is_last = j + 1 >= of(end, i)",
            "is_last = j + 2 >= of(end, i)",
            rule("causal", backend="xla_blocks"),
        ),
        (
            "whole rows by their log-sum-exp",
            "if is_whole:\n            p =",
            "if False:\n            p =",
            "tests/kernels/test_accumulate.py -k test_whole_rows_masked_by_numbers",
        ),
        (
            "a group's key gradients not scaled",
            'if name in ("query", "key"):',
            'if name == "dq":',
            rule("plain", backend="xla_blocks"),
        ),
    ),
    *of(
        "jax_flash2/_reference.py",
        (
            "a sink in the reference's log-sum-exp off 1e-4",
            "total = total + jnp.exp(sink",
            "total = total + 1.0001 * jnp.exp(sink",
            "tests/transforms/test_derivatives.py -k test_derivatives[_jvp_of_jit]",
        ),
    ),
]

MUTANTS = [*_TRITON, *_PLAIN_JAX]
