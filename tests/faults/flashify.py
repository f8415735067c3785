"""Faults of `flashify`: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

TESTS = "tests/flashify/test_flashify.py -k {}"
FOLDER = "jax_flash2/_flashify/"

MUTANTS = [
    *of(
        FOLDER + "score_rules.py",
        (
            "any number masks",
            "if not fill <= LEAST_MASK:",
            "if not fill <= 0:",
            TESTS.format("weak_number"),
        ),
        (
            "any sum divides exponentials",
            "if not fact.same_exponents(total) or fact.keys != (",
            "if fact.keys != (",
            TESTS.format("'other_sum or hot or other_maximum'"),
        ),
        (
            "any number is one of the row",
            "if fact.shift_axes & {x.axis for x in summed}:",
            "if False:",
            TESTS.format("weak_number"),
        ),
    ),
    *of(
        FOLDER + "match.py",
        (
            "values may be summed over another axis",
            'if fact.kind == "prob" and keys != fact.keys:',
            "if False:",
            TESTS.format("over_queries"),
        ),
    ),
    *of(
        FOLDER + "plan.py",
        (
            "scores may be used elsewhere",
            "if len(kept) == len(plan.sites):",
            "if True:",
            TESTS.format("'used_elsewhere or probabilities_used or scores_used'"),
        ),
    ),
    *of(
        FOLDER + "masks.py",
        (
            "a window without the diagonal has keys in every row",
            "return right >= 0 and left + right >= 0 and t - 1 - left <= s - 1",
            "return left + right >= 0 and t - 1 - left <= s - 1",
            TESTS.format("'random_functions and 36'"),
        ),
        (
            "a softmax by log-sum-exp gives the mean in rows without keys",
            "if rounding > math.log(keys):",
            "if False:",
            TESTS.format("'random_functions and 36'"),
        ),
        (
            "ids of any two arrays leave each row a key",
            "left.value is right.value and t == s and",
            "True or",
            TESTS.format("ids_of_two_arrays"),
        ),
    ),
    *of(
        FOLDER + "rewrite.py",
        (
            "scores that were rounded away have no gradient",
            "return x - lax.stop_gradient(x)",
            "return jnp.zeros_like(x)",
            TESTS.format("'rows_without_keys and True'"),
        ),
        (
            "NaN of rows without keys reaches the gradients of others",
            "empty = jnp.full_like(empty, jnp.nan)",
            "empty = empty * jnp.nan",
            TESTS.format("'rows_without_keys and inf'"),
        ),
    ),
    *of(
        FOLDER + "meaning.py",
        (
            "positions never wrap",
            "value.aval.dtype.name not in POSITIONS",
            "False",
            TESTS.format("positions_that_wrap"),
        ),
    ),
    *of(
        FOLDER + "graph.py",
        (
            "functions with derivatives of their own are seen through",
            "return body if _JAX in info else None",
            "return body",
            TESTS.format("derivatives_of_their_own"),
        ),
    ),
]
