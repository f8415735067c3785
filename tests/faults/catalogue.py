"""The faults of `tests.mutants`, each with the cheapest tests known to see it."""

from __future__ import annotations

from tests.faults import (
    context,
    flash2,
    gpus,
    kernels,
    lowering,
    mods,
    mosaic_gpu,
    paged,
)
from tests.faults.kernels import COUNTS, REGIME, of, rule

LITERAL = "tests/core/test_mask.py -k literal"

MUTANTS = [
    *of(
        "pallas_kernels/core/mask.py",
        (
            "a window without its last key",
            "kv_pos >= q_pos - self",
            "kv_pos > q_pos - self",
            LITERAL,
        ),
        (
            "a window full one key too soon",
            "along.before(x - before) for x in (first, last)",
            "along.before(x - before) for x in (first, last - 1)",
            COUNTS,
        ),
        (
            "a window needed one row too late",
            "along.before(x - before) for x in (first, last)",
            "along.before(x - before) for x in (first + 1, last)",
            COUNTS,
        ),
        (
            "a window full one key too late",
            "along.before(x + after + 1) for x in (first, last)",
            "along.before(x + after + 1) for x in (first - 1, last)",
            COUNTS,
        ),
        (
            "a key beyond the length",
            "kv < self.key_value",
            "kv <= self.key_value",
            LITERAL,
        ),
        (
            "padded query blocks visited",
            "minimum(maximum(across - lo, 0), 1) * size",
            "size",
            COUNTS,
        ),
        (
            "blocks within lengths never full",
            "_when(hi <= across,",
            "_when(hi < across,",
            COUNTS,
        ),
        (
            "segments never skipped",
            "some = (q_min <= kv_max) & (kv_min <= q_max)",
            "some = (q_min <= kv_max) | (q_min > kv_max)",
            COUNTS,
        ),
        (
            "a key that some query drops is dropped by all",
            'jnp.any, ("n", "t")',
            'jnp.all, ("n", "t")',
            rule("mask_full"),
        ),
        (
            "segments skipped on one side only",
            "some = (q_min <= kv_max) & (kv_min <= q_max)",
            "some = q_min <= kv_max",
            COUNTS,
        ),
        (
            "segments never full",
            "& (q_min == kv_min)",
            "& (q_min > q_min)",
            COUNTS,
        ),
        (
            "overhanging mask block never full",
            "((False, jnp.any), (True, jnp.all))",
            "((False, jnp.any), (False, jnp.all))",
            COUNTS,
        ),
        (
            "the last block of a table left out",
            "jnp.where(some, index + 1, 0)",
            "jnp.where(some, index, 0)",
            COUNTS,
        ),
        (
            "the first run of full blocks never ends",
            "jnp.where(before & ~every, index, size)",
            "jnp.where(before & ~every, size, size)",
            COUNTS,
        ),
    ),
    *of(
        "pallas_kernels/core/ranges.py",
        (
            "one full block walked as an edge",
            "return index < edges, edge",
            "return index <= edges, edge",
            "tests/core/test_mask.py -k sound",
        ),
        (
            "edges visited where full blocks are",
            "jnp.asarray(index >= before, jnp.int32)",
            "jnp.asarray(index > before, jnp.int32)",
            "tests/core/test_mask.py -k fold_visits",
        ),
        (
            "blocks full by one of two masks",
            "minimum(minimum(self.full_hi, other.full_hi), need_hi)",
            "minimum(self.full_hi, need_hi)",
            COUNTS,
        ),
    ),
    *of(
        "pallas_kernels/core/dropout.py",
        (
            "one level of dropout too many kept",
            "round((1.0 - rate) * _LEVELS)",
            "1 + round((1.0 - rate) * _LEVELS)",
            "tests/core/test_dropout.py -k share_of_kept",
        ),
        (
            "a round of the cipher too few",
            "_ROUNDS = 7",
            "_ROUNDS = 6",
            "tests/core/test_dropout.py -k cipher",
        ),
        (
            "half of a dropout key without effect",
            "words = cipher(s, t ^ tweak,",
            "words = cipher(s, t,",
            "tests/core/test_dropout.py -k uncorrelated",
        ),
        (
            "the last word of a random key without effect",
            "in words.reshape(-1):",
            "in words.reshape(-1)[:-1]:",
            "tests/core/test_dropout.py -k seeds",
        ),
        (
            "batch entries that drop the same",
            "entry = lax.broadcasted_iota(jnp.uint32, shape, 0)",
            "entry = jnp.zeros(shape, jnp.uint32)",
            "tests/core/test_dropout.py -k seeds",
        ),
        (
            "other bits in a transposed block",
            "for x in words)",
            "for x in words[::-1])",
            "tests/core/test_dropout.py -k orientation",
        ),
        (
            "bits of the first two keys of four for the others",
            "(group & 8) * 2",
            "(group & 0) * 2",
            "tests/core/test_dropout.py -k orientation",
        ),
        (
            "the same bits for the other two keys",
            "_TURNS = 0, 16",
            "_TURNS = 0, 0",
            "tests/core/test_dropout.py -k correlation",
        ),
        (
            "ties not decided by a byte",
            "(word << half) | (word >> half)",
            "word << half",
            "tests/core/test_dropout.py -k share_of_kept",
        ),
    ),
    *of(
        "pallas_kernels/core/pairs.py",
        (
            "delta with dropout's scale",
            "delta * (1 / spec.dropout_scale)",
            "delta",
            rule("dropout"),
        ),
        (
            "ALiBi without offset",
            "queries.at(t_start) + offset - keys",
            "queries.at(t_start) - keys",
            rule("pairwise_0"),
        ),
        (
            "ALiBi without offset under causal masks",
            "PairPositions(between + query",
            "PairPositions(between - offset * self.spec.is_causal + query",
            rule(
                "pairwise_0",
                "pairwise_1",
                "pairwise_2",
                "pairwise_3",
                "pairwise_4",
                "pairwise_5",
                "alibi_batch",
                "everything_learnt",
            ),
        ),
        (
            "a masked score under a soft cap",
            "masked = self.pairs.masked is not False",
            "masked = False",
            rule("soft_cap"),
        ),
    ),
    *of(
        "pallas_kernels/core/spec.py",
        (
            "a block of queries beyond the length, that no other one waits for",
            "last = divide(self.q_limit(q_size) + block_q - 1, block_q)",
            "last = divide(self.q_limit(q_size), block_q)",
            "tests/core/test_mask.py -k both_sides",
        ),
        (
            "keys beyond the length that meet queries",
            "kv_lo < self.kv_limit(2**30)",
            "kv_lo <= self.kv_limit(2**30)",
            "tests/core/test_mask.py -k both_sides",
        ),
        (
            "a block that ends before it starts",
            "return first, first + where(start < end, blocks)",
            "return first, first + blocks",
            "tests/core/test_mask.py -k both_sides",
        ),
        (
            "a window that looks ahead is causal",
            "return self.reach[1] == 0",
            "return self.reach[1] in (0, 1)",
            f"{COUNTS} -k are_causal",
        ),
        (
            "an overhanging key is no padding",
            "Lengths(key_value=kv_size)",
            "Lengths(key_value=kv_size + 1)",
            rule("plain"),
        ),
        (
            "padding is loaded",
            "functools.reduce(minimum, limits, size)",
            "size",
            "tests/kernels/test_attention.py -k 'padding_never and triton and nan'",
        ),
        (
            "keys beyond a causal mask counted",
            "return width - width * width / (2 * max(kv_size, 1))",
            "return width",
            REGIME,
        ),
    ),
    *of(
        "jax_flash2/_operation.py",
        (
            "a third map takes a used name",
            'next(f"v{i}" for i in range(len(used) + 1) if f"v{i}" not in used)',
            '"v1" if "v0" in used else "v0"',
            "tests/transforms/test_transforms.py -k three_maps",
        ),
        (
            "one gradient for all elements of a map",
            "(*(a for a in mapped if a not in x.axes), *x.axes)",
            "x.axes",
            "tests/transforms/test_transforms.py -k 'grad_of_vmap and xla'",
        ),
    ),
    *of(
        "jax_flash2/_vjp.py",
        (
            "results without names for checkpoints",
            "return checkpoint_name(o, OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)",
            "return o, lse",
            "tests/transforms/test_transforms.py -k policy_saves",
        ),
        (
            "no rows have a log-sum-exp of 0",
            "jnp.full(lse.shape, -jnp.inf, lse.dtype),",
            "jnp.full(lse.shape, 0.0, lse.dtype),",
            "tests/kernels/test_attention.py -k 'no_rows and xla'",
        ),
        (
            "a log-sum-exp for each value",
            "return {1: of_value_alone(problem)}",
            "return {}",
            "tests/transforms/test_transforms.py -k 'stays_unmapped and xla'",
        ),
    ),
    *of(
        "jax_flash2/_sharding.py",
        (
            "key heads of neighbours",
            "(first + run * jnp.arange(",
            "(first + jnp.arange(",
            "tests/devices/test_sharding.py -k key_heads",
        ),
        (
            "key heads taken one for each query head",
            "run = math.gcd(query_heads, group)",
            "run = 1",
            "tests/devices/test_sharding.py -k key_heads",
        ),
        (
            "no sum over devices",
            "jax.lax.psum(x, shared) if shared else x",
            "x",
            "tests/devices/test_sharding.py -k 'automatic and stay and 8-1 and xla'",
        ),
        (
            "rows proposed to be divided among devices",
            "need_replication_factors=whole",
            "need_replication_factors=()",
            "tests/devices/test_sharding.py -k along_rows",
            "what is proposed for rows is not followed when the call is divided",
        ),
    ),
    *of(
        "jax_flash2/_shape.py",
        (
            "far offsets as they are",
            "return Named(clipped(x, -FAR, FAR), axes)",
            "return Named(x, axes)",
            "tests/api/test_errors.py -k 'far_offsets and xla'",
        ),
    ),
    *of(
        "jax_flash2/_arrays.py",
        (
            "half of an id of 64 bits",
            "in made) for i in range(2)]",
            "in made) for i in range(1)]",
            "tests/api/test_errors.py -k 'wide_integers and xla'",
        ),
        (
            "half of an id of 64 bits of NumPy",
            "zip(*map(halves, arrays), strict=True))",
            "zip(*map(halves, arrays), strict=True))[:1]",
            "tests/api/test_arrays.py -k wide_ids",
        ),
        (
            "gradients as weakly typed as their operands",
            "jax.lax.mul(x, jnp.ones_like(x, dtype=x.dtype))",
            "x.astype(x.dtype)",
            "tests/api/test_arrays.py -k weak",
        ),
    ),
    *of(
        "jax_flash2/_options.py",
        (
            "a causal window looks ahead",
            "Window(left, 0 if is_causal else right)",
            "Window(left, right)",
            rule("window_causal"),
        ),
    ),
    *of(
        "jax_flash2/_arguments.py",
        (
            "positions of ALiBi without a window dropped",
            "if not spec.is_positional:",
            "if not spec.traits.is_positional:",
            rule("pairwise_0", "pairwise_1", "pairwise_5", "alibi_two_sided"),
        ),
    ),
    *of(
        "jax_flash2/_derivatives.py",
        (
            "no tangent of the output in that of the gradient",
            "(*along, *of_out, *(_absent(",
            "(*along, *_zeros(of_out), *(_absent(",
            "tests/transforms/test_derivatives.py -k test_derivatives[_vjp_of_grad]",
        ),
        (
            "second derivatives without the cotangents' part",
            "*_zeros(saved[-2:]), *of_out]",
            "*_zeros(saved[-2:]), *_zeros(of_out)]",
            "tests/transforms/test_derivatives.py -k test_derivatives[_vjp_of_vjp]",
        ),
        (
            "a transpose without the log-sum-exp",
            "*_zeros([o]), lse]",
            "*_zeros([o, lse])]",
            "tests/transforms/test_linear.py -k 'gradient_of_value and triton'",
        ),
    ),
    *of(
        "jax_flash2/_taylor.py",
        (
            "derivatives for Taylor coefficients",
            "[x / math.factorial(order) for order",
            "[x for order",
            "tests/transforms/test_linear.py -k test_jet[xla-2]",
        ),
    ),
    *flash2.MUTANTS,
    *kernels.MUTANTS,
    *mosaic_gpu.MUTANTS,
    *context.MUTANTS,
    *gpus.MUTANTS,
    *lowering.MUTANTS,
    *mods.MUTANTS,
    *paged.MUTANTS,
]
