"""Faults of calls whose rows are divided over devices: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

CALLS = "tests/devices/test_context_calls.py"
METHOD = "tests/devices/test_context_errors.py -k names_the_method"
NUMBERS = "tests/core/test_mask.py -k 'striped_rows or come_before'"


def one(*words: str) -> str:
    """The test of every result, of cases with these words."""
    return (
        f"tests/devices/test_context.py -m '' -k 'one_result and {' and '.join(words)}'"
    )


def derivative(name: str) -> str:
    """The test of a transformation of two devices' ring."""
    file = "tests/devices/test_context_derivatives.py"
    return f"{file} -k 'test_derivatives and {name}-call'"


MUTANTS = [
    *of(
        "jax_flash2/_linear.py",
        (
            "a ring's backward linear in its operands",
            "if all(isinstance(x, ad.Zero) for x in tangents[:count]):",
            "if count:",
            derivative("jvp_of_grad"),
        ),
        (
            "nothing that is known of a ring's tangent mapped",
            "own = _Map(tuple(dims[:count]),",
            "own = _Map(tuple(None for _ in dims[:count]),",
            derivative("vmap_of_jvp"),
        ),
        (
            "only the last map over a ring's tangent",
            '"maps": (*maps, own)',
            '"maps": (own,)',
            derivative("vmap_of_jvp"),
        ),
    ),
    *of(
        "jax_flash2/_ring.py",
        (
            "a derivative of a ring's backward with o and lse as they are",
            "    _pulled_by_rounds,\n)",
            "    _pulled,\n)",
            derivative("jvp_of_grad"),
        ),
        (
            "a tangent for each operand of a ring",
            " and not isinstance(x, SymbolicZero)",
            "",
            derivative("jvp_of_one"),
        ),
    ),
    *of(
        "jax_flash2/_rows.py",
        (
            "gradients of gathered rows summed in their own dtype",
            "wide = x.astype(at_least_float32(x.dtype))",
            "wide = x.astype(x.dtype)",
            "tests/devices/test_context_corners.py -k 'gathered_rows or copies'",
        ),
    ),
    *of(
        "jax_flash2/_context.py",
        (
            "keys gathered however many they are",
            "or keys > own or",
            "or",
            METHOD,
        ),
        (
            "long rows gathered",
            'call.size["s"] >= _rows("many_rows") or',
            "",
            METHOD,
        ),
    ),
    *of(
        "pallas_kernels/core/positions.py",
        (
            "stripes one stripe too close",
            "(self.stripe * (self.parts - 1))",
            "(self.stripe * self.parts)",
            NUMBERS,
        ),
        (
            "rows before a number with those between stripes",
            "minimum(count - stripes * step, self.stripe)",
            "(count - stripes * step)",
            NUMBERS,
        ),
        (
            "a block's rows numbered from its first number",
            "Numbering(self.at(start) - start)",
            "Numbering(self.at(start))",
            "tests/devices/test_context.py -k kernels",
        ),
    ),
    *of(
        "pallas_kernels/core/mask.py",
        (
            "lengths of all rows for a part",
            "Named(jnp.clip(rows.before(length.to(axes)), 0, size), axes)",
            "Named(jnp.clip(length.to(axes), 0, size), axes)",
            one("lengths", "ring"),
        ),
    ),
    *of(
        "pallas_kernels/core/dropout.py",
        (
            "bits by place, not by number",
            "numbering.of_groups(count).at(group).astype",
            "group.astype",
            one("dropout", "ring"),
        ),
    ),
    *of(
        "jax_flash2/_chunked.py",
        (
            "probabilities of a part as of all keys",
            "not (cut.fuses_softmax or spec.is_part)",
            "not plan.fuses_softmax",
            one("causal", "ring"),
        ),
    ),
    *of(
        "jax_flash2/_ring.py",
        (
            "the keys of another device",
            "lax.rem(self.rank + steps + parts, parts)",
            "lax.rem(self.rank - steps + parts, parts)",
            one("causal", "ring", "3"),
        ),
        (
            "gradients of other keys as integers of other ones",
            "halves = halves.reshape(*grads.shape, words)",
            "halves = halves[..., ::-1].reshape(*grads.shape, words)",
            "tests/devices/test_context.py -m '' -k 'kernels and bfloat16 and ring'",
        ),
        (
            "gradients that do not come home",
            "    grads = shift(grads)\n",
            "",
            one("causal", "ring"),
        ),
        (
            "a backward that begins with the device's own keys",
            "rounds.source(-1 - number)",
            "rounds.source(-number)",
            one("causal", "ring", "3"),
        ),
        (
            "a sink for each round",
            "dataclasses.replace(call.spec, sink=None, is_part=True)",
            "dataclasses.replace(call.spec, is_part=True)",
            one("sinks", "ring"),
        ),
        (
            "results without names for remat",
            "saved = _vjp.to_save(*results[:2])",
            "saved = results[:2]",
            f"{CALLS} -k no_ring_again",
        ),
        (
            "last keys without a name for remat",
            "[checkpoint_name(x.value, _vjp.OUTPUT_NAME) for x in pair]",
            "[x.value for x in pair]",
            f"{CALLS} -k no_ring_again",
        ),
    ),
    *of(
        "jax_flash2/_context.py",
        (
            "the stripe before the first device's is its own",
            "ends = jnp.where(rank == 0, earlier, ends)",
            "del earlier",
            one("short_window", "halo", "32"),
        ),
        (
            "keys around the first device's as around others'",
            "start = first_key - (first - before)",
            "start = jnp.int32(0)",
            one("short_window", "halo", "runs"),
        ),
        (
            "keys beyond the last device's",
            "if after:  # the last",
            "if not after:  # the last",
            one("window", "halo", "runs"),
        ),
        (
            "heads of the first device for all",
            "start = sharding.rank() * jnp.int32(count)",
            "start = jnp.int32(0)",
            one("short_window_segments", "heads"),
        ),
    ),
    *of(
        "jax_flash2/_rows.py",
        (
            "rows in the order of devices",
            "Named(self.in_order(parts.reshape(shape), axis), x.axes)",
            "Named(parts.reshape(shape), x.axes)",
            one("pairwise_1", "gather", "32"),
        ),
    ),
]
