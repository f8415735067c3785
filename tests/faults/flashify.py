"""Faults of `flashify`: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

TESTS = "tests/flashify/test_flashify.py -k {}"
EDGES = "tests/flashify/test_edges.py -k {}"
RUNS = "tests/flashify/test_runs.py -k {}"
ALIKE = "tests/flashify/test_alike.py -k {}"
FOLDER = "jax_flash2/_flashify/"

MUTANTS = [
    *of(
        FOLDER + "sites.py",
        (
            "lengths are positions of queries",
            "if axis in queries:",
            "if axis is not None:",
            EDGES.format("known_lengths"),
        ),
    ),
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
        (
            "a number that is added is nowhere",
            "return fact.replace(steps=(*fact.steps, Moved(sign * number)))",
            "return fact",
            EDGES.format("moved_"),
        ),
        (
            "masked scores may come back",
            "if any(not x.fill + sign * number <= LEAST_MASK for x in masks):",
            "if False:",
            EDGES.format("come_back"),
        ),
        (
            "a mask keeps its number in a narrower type",
            "return dataclasses.replace(step, fill=fill, vanishes=vanishes)",
            "return step",
            EDGES.format("beyond_float16"),
        ),
        (
            "one mask zeroes the probabilities of all",
            "if is_every or fact.is_zeroed:",
            "if True:",
            EDGES.format("two_masks"),
        ),
    ),
    *of(
        FOLDER + "row_rules.py",
        (
            "every maximum is that of the row",
            "if not self._is_exact(total):",
            "if False:",
            EDGES.format("is_cut"),
        ),
        (
            "numbers without a mask come from masked rows",
            "if not any(isinstance(x, Mask) for x in shift.steps):",
            "if False:",
            EDGES.format("'before_the_mask or without_a_maximum'"),
        ),
        (
            "a maximum without its gradient is the same",
            "return known[0].replace(shift=node)",
            "return known[0]",
            EDGES.format("another_gradient"),
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
        FOLDER + "alike.py",
        (
            "equal pieces may have any operands",
            "if [pairs[x] for x in first.read] != second.read or not",
            "if not",
            RUNS.format("'different and operand'"),
        ),
        (
            "equal pieces may have any parameters",
            "[x.params for x in equations],",
            "",
            RUNS.format("'different and parameter'"),
        ),
        (
            "equal pieces may have any literals",
            "if a is not b:",
            "if False:",
            RUNS.format("'different and literal'"),
        ),
        (
            "a value that a piece makes is one that it reads",
            "!= second.read or not is_one_to_one(pairs):",
            "!= second.read:",
            RUNS.format("'different and its_own'"),
        ),
    ),
    *of(
        FOLDER + "layers.py",
        (
            "all that layers read is alike",
            "a in self._facts or b in self._facts or not self._is_same(a, b)",
            "a in self._facts or b in self._facts",
            ALIKE.format("masks_made_outside"),
        ),
        (
            "all constants are one",
            "return are_data or not was_asked",
            "return True",
            ALIKE.format("constants"),
        ),
        (
            "heads that are repeated in one layer are in all",
            "return not is_opened and not was_asked",
            "return not was_asked",
            ALIKE.format("repeated_outside"),
        ),
        (
            "one array outside of a loop is two",
            "if outer.setdefault(a.origin, b.origin) is not b.origin:",
            "if outer.setdefault(a.origin, b.origin) is None:",
            ALIKE.format("in_a_checkpoint"),
        ),
        (
            "nothing reads what an equal layer makes of its scores",
            "self._last.get(y, 0) < end",
            "True",
            ALIKE.format("used_twice"),
        ),
        (
            "a product is one of scores if that of another layer is",
            "if found is None or first.products != second.products:",
            "if found is None:",
            ALIKE.format("in_another_softmax"),
        ),
        (
            "no layer is like another",
            "for layer in reversed(self._searched[-_MOST_LAYERS:]):",
            "for layer in ():",
            ALIKE.format("searched_once"),
        ),
    ),
    *of(
        FOLDER + "runs.py",
        (
            "equal runs may be on any lines",
            "tuple([_line(x) for x in run.steps]),",
            "",
            RUNS.format("in_lines"),
        ),
        (
            "equal runs may have any names inside",
            "tuple([names[depth:] for names in run.scopes]),",
            "",
            RUNS.format("in_names"),
        ),
        (
            "equal runs may have any results",
            "return [*inputs.values()] if is_same else None",
            "return [*inputs.values()]",
            RUNS.format("used_later"),
        ),
        (
            "all sites are one call",
            "if a is not b and a.identity != b.identity:",
            "if False:",
            RUNS.format("'different and (scale or window)'"),
        ),
        (
            "a jit returns mutable arrays",
            "return step in plan.inner or bool(step.equation.effects)",
            "return step in plan.inner",
            RUNS.format("mutable"),
        ),
        (
            "runs reach beyond the names of layers",
            "names[: max(x[i] for x in both)]",
            "()",
            RUNS.format("share_their_runs"),
        ),
        (
            "names of a site are those of its last product",
            "of_sites[step] = names if first is None else _in_common(names, first)",
            "of_sites[step] = names",
            RUNS.format("names_of_einsum"),
        ),
        (
            "the first layer begins with its site",
            "starts.update(i - before for i in (*own, end))",
            "starts.update((*own, end))",
            RUNS.format("share_their_runs"),
        ),
        (
            "the last layer has all that follows",
            "starts.update(i - before for i in (*own, end))",
            "starts.update(i - before for i in own)",
            RUNS.format("share_their_runs"),
        ),
    ),
    *of(
        FOLDER + "evaluate.py",
        (
            "each run is a jit",
            "if not (own.first or own.is_repeated) or not is_traced:",
            "if own.is_alone or not is_traced:",
            RUNS.format("one_layer"),
        ),
        (
            "names of layers are lost",
            "with _place(traceback, own.names):",
            "with _place(traceback, ()):",
            RUNS.format("in_scopes"),
        ),
    ),
    *of(
        FOLDER + "plan.py",
        (
            "results of all layers are as narrow as those of one",
            "key = found, narrowed.get(root)",
            "key = found, narrowed.get(found.root)",
            ALIKE.format("narrow_results"),
        ),
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
            "left.value is right.value and layout == right.layout",
            "True",
            TESTS.format("ids_of_two_arrays"),
        ),
        (
            "ids of keys are those of queries in any order",
            "and layout == right.layout",
            "",
            EDGES.format("another_order"),
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
            "POSITIONS.get(value.aval.dtype, 0)",
            "2**99",
            TESTS.format("positions_that_wrap"),
        ),
        (
            "a type has all positions",
            "POSITIONS.get(value.aval.dtype, 0)",
            "(2**99 if value.aval.dtype in POSITIONS else 0)",
            EDGES.format("positions_that"),
        ),
    ),
    *of(
        FOLDER + "graph.py",
        (
            "functions with derivatives of their own are seen through",
            "return body if is_of_jax else None",
            "return body",
            TESTS.format("derivatives_of_their_own"),
        ),
        (
            "zeros of both signs are one literal",
            "np.asarray(x).tobytes()",
            "np.asarray(x).item()",
            RUNS.format("sign_of_zero"),
        ),
        (
            "nodes of several results stay until a collection of garbage",
            "weakref.ref(node)",
            "lambda: node",
            ALIKE.format("'garbage and several'"),
        ),
        (
            "a user's derivative of a function of JAX is JAX's",
            "for x in infos)",
            "for x in infos[:1])",
            EDGES.format("users_derivative"),
        ),
    ),
]
