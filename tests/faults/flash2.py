"""Faults in the algorithm itself, and in where its parts are put together."""

from __future__ import annotations

from tests.faults.kernels import SUMS, of, rule

MASKED = "tests/kernels/test_masked_rows.py"
MERGE = "tests/api/test_merge.py -k empty"
# Parts of few queries, in a number that is no power of two, with a sink.
PARTS = "tests/kernels/test_division.py -k 'alibi-3'"

MUTANTS = [
    *of(
        "pallas_kernels/core/flash2.py",
        ("delta without dlse", "rowsum - dlse", "rowsum", rule("plain")),
        (
            "the sinks' gradient off 2 %",
            "-p * delta",
            "-1.02 * p * delta",
            rule("pairwise_0"),
        ),
        (
            "the forward summed in bfloat16",
            "return State(m, add_row_sums(l, p), added(acc, product(p)), top)",
            "new = jax.tree.map(lambda x: lax.reduce_precision(x, 8, 7), "
            "added(acc, product(p))); return State(m, add_row_sums(l, p), new, top)",
            SUMS,
        ),
        (
            "the largest score of the first blocks",
            "m = jnp.maximum(m, finite(m) + jnp.log2(p))",
            "m = jnp.maximum(m, finite(m))",
            "tests/kernels/test_accumulate.py -k 'levels and rising'",
        ),
        (
            "the largest score of a row whose first blocks kept nothing",
            "m = jnp.maximum(m, finite(m) + jnp.log2(p))",
            "m = jnp.maximum(m, m + jnp.log2(p))",
            "tests/kernels/test_accumulate.py -k 'levels and nothing_first'",
        ),
        (
            "the largest score of some of a row's parts",
            "jnp.max(self.top, axis=-1)",
            "self.top[..., 0]",
            "tests/kernels/test_accumulate.py -k 'levels and rising'",
        ),
        (
            "whole rows without the scores' unit",
            "p = jnp.exp((x - top) * unit)",
            "p = jnp.exp(x - top)",
            "tests/kernels/test_attention.py -k whole_rows_as_gpus",
        ),
        (
            "parts merged without their maximum",
            "lambda x: jnp.exp(x - m), lse",
            "jnp.exp, lse",
            MERGE,
        ),
        (
            "what an empty part holds is merged",
            "jnp.where(weight[..., None] == 0.0, 0.0, x) * weight",
            "x * weight",
            MERGE,
        ),
        (
            "sums in range without an upper limit",
            "(l >= 0.5) & (l <= limit)",
            "(l >= 0.5)",
            "tests/kernels/test_accumulate.py -k test_range",
        ),
        (
            "sums of values out of range",
            "good if narrow else good & has_finite_sums(state)",
            "good",
            "tests/kernels/test_accumulate.py -k large_values",
        ),
        (
            "an old sum not scaled by a new maximum",
            "l = _scaled_rows(state.l, alpha, arithmetic) if",
            "l = state.l if",
            rule("window"),
        ),
        (
            "an old sum without parts not scaled by a new maximum",
            "if in_parts else state.l * alpha",
            "if in_parts else state.l",
            rule("window", backend="xla_blocks"),
        ),
        (
            "a padded row's log-sum-exp is 0",
            "PADDING_LSE = math.inf",
            "PADDING_LSE = 0.0",
            "tests/kernels/test_accumulate.py -k test_levels[beyond_float32",
        ),
        (
            "a sink beyond float32",
            "joint = jnp.maximum(m, sink)",
            "joint = m",
            "tests/kernels/test_accumulate.py -k sink_far",
        ),
        (
            "rows masked by numbers keep their log-sum-exp",
            "jnp.abs(log2) > 2.0**24",
            "jnp.abs(log2) > 2.0**100",
            "tests/kernels/test_accumulate.py -k holds_no_sum",
        ),
    ),
    *of(
        "pallas_kernels/core/score.py",
        (
            "the soft cap's derivative",
            "return 1.0 - x * x",
            "return 1.0 - x",
            rule("soft_cap"),
        ),
        (
            "under a soft cap -inf alone masks",
            "if soft_cap is None:\n        return -math.inf",
            "if soft_cap != 0:\n        return -math.inf",
            f"{MASKED} -k 'low_biases and xla--1e9'",
        ),
        (
            "a product of NaN beside a bias of -inf",
            "x = jnp.where(masked, -jnp.inf, scores.x)",
            "x = jnp.where(masked, -jnp.inf, scores.x) + 0 * qk",
            f"{MASKED} -k 'comes_through and bias_soft_cap-xla'",
        ),
        (
            "the sign of the slopes' gradient",
            "-ds * setting.distance",
            "ds * setting.distance",
            rule("alibi_alone"),
        ),
        (
            "a distance with its sign",
            "else jnp.abs(distance)",
            "else distance",
            rule("alibi_alone"),
        ),
        (
            "slopes a fiftieth too large where distances are in two parts",
            "x, row = scores.x + slopes * place.key",
            "x, row = scores.x + 1.02 * slopes * place.key",
            rule("alibi_batch"),
        ),
        (
            "half a soft cap beside a scale",
            "tanh(scores.x * (scores.unit / self.cap))",
            "tanh(scores.x / self.cap)",
            rule("soft_cap"),
        ),
    ),
    *of(
        "pallas_kernels/core/clear.py",
        (
            "queries without keys meet products",
            "return _only(x, Named(lse.value != -jnp.inf, lse.axes))",
            "return x",
            f"{MASKED} -k 'comes_through and mask_pairs-triton'",
        ),
        (
            "dropped keys meet products",
            "jnp.where(kept.to(axes), x.to(axes), zero)",
            "jnp.where(True, x.to(axes), zero)",
            "tests/kernels/test_attention.py -k 'masked_keys and keys-xla'",
        ),
        (
            "batch entries without keys are multiplied too",
            "(by_entry and first)",
            "first",
            f"{MASKED} -k 'comes_through and no_keys-xla'",
        ),
    ),
    *of(
        "pallas_kernels/core/spec.py",
        (
            "a position that is data, and rows are known to have keys",
            "known = known and self.offset is None and",
            "known = known and",
            f"{MASKED} -k which_calls",
        ),
    ),
    *of(
        "pallas_kernels/triton/merge.py",
        (
            "parts beyond the last one count",
            "here, padding=-math.inf)",
            "here)",
            PARTS,
        ),
        (
            "a sink that joins no parts",
            'parts.joined(pieces, log, sink[0].load(("t",), where))',
            "parts.joined(pieces, log, None)",
            PARTS,
        ),
        (
            "of many parts the last ones alone",
            "return parts.merged([state[0], pieces], [state[1], logs[0]])",
            "return pieces, logs[0]",
            "tests/kernels/test_division.py -k many_parts",
        ),
    ),
    *of(
        "pallas_kernels/triton/forward.py",
        (
            "the largest score of the first part of the keys",
            'jnp.max(x.value, axis=x.axes.index("z"))',
            'x.value.take(0, x.axes.index("z"))',
            "tests/kernels/test_division.py -k few_queries",
        ),
    ),
    *of(
        "jax_flash2/_ring.py",
        (
            "the smallest of the rounds' largest scores",
            "functools.reduce(jnp.maximum, x)",
            "functools.reduce(jnp.minimum, x)",
            "tests/devices/test_context.py -k 'any_number and ring'",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/forward_loop.py",
        (
            "the largest score of the last columns",
            "top = jnp.maximum(top, part)",
            "top = part",
            "tests/kernels/test_max_logit.py -k mosaic_gpu",
        ),
    ),
]
