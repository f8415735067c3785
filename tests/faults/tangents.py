"""Faults of forward mode: the kernel of tangents, its blocks, and who makes them."""

from __future__ import annotations

from tests.faults.kernels import of

_TESTS = "tests/kernels/test_tangents.py"
RULE = f"{_TESTS} -k 'test_error_rule and everything_learnt'"
MASKS = f"{_TESTS} -k 'test_error_rule and pairwise_3'"
PARTS = f"{_TESTS} -k keys_in_parts"
KERNEL = f"{_TESTS} -k tangents_are_a_kernel"
PRODUCTS = f"{_TESTS} -k absent"
BLOCKS = f"{_TESTS} -k blocks"
HOPPER = "tests/mosaic_gpu/test_tangents.py"
HOPPER_ORDERS = "tests/mosaic_gpu/test_forward_mode.py"
HOPPER_RULE = f"{HOPPER} -k 'error_rule and two_stages'"
NAN = "tests/kernels/test_masked_rows.py -k 'tangents_are_zero and triton'"

MUTANTS = [
    *of(
        "pallas_kernels/core/flash2.py",
        (
            "tangents that ask which score is the largest",
            "largest = arithmetic.constant(jnp.max(x, axis=-1))",
            "largest = jnp.max(x, axis=-1)",
            f"{_TESTS} -k bias_alone",
        ),
    ),
    *of(
        "pallas_kernels/core/tangent.py",
        ("tangents without dropout's scale", "acc * spec.dropout_scale", "acc", RULE),
        (
            "the mean of ds not taken off",
            "found -= arithmetic",
            "found -= 0.0 * arithmetic",
            RULE,
        ),
        (
            "a sink's tangent of the wrong sign",
            '-tangents["sink"]',
            'tangents["sink"]',
            PARTS,
        ),
        (
            "a sink in every part of the keys",
            "jnp.where(is_first, of_sink, mu)",
            "of_sink",
            PARTS,
        ),
        (
            "what dropout drops in the first product of tangents",
            "left = pairs.drop(weighted).astype(dtype)",
            "left = weighted.astype(dtype)",
            RULE,
        ),
        (
            "what dropout drops in the product with dv",
            "left = again.dropped.astype(dtype)",
            "left = again.p.astype(dtype)",
            RULE,
        ),
        (
            "tangents of rows without keys from what their queries hold",
            "return jnp.where(arithmetic.along(empty, -2, acc.shape), 0.0, found)",
            "return found",
            NAN,
        ),
    ),
    *of(
        "pallas_kernels/core/pairs.py",
        (
            "tangents of scores that a mask drops",
            "if masked or score.may_mask:\n            ds =",
            "if False:\n            ds =",
            f"{_TESTS} -k minus_infinity",
        ),
    ),
    *of(
        "pallas_kernels/triton/tangent.py",
        (
            "no tangent of keys",
            "dqk += pairs.product(q_block, dk.load",
            "dqk += 0.0 * pairs.product(q_block, dk.load",
            RULE,
        ),
        (
            "no tangents of the score's operands",
            "weighted = again.push(dqk, qk, own)",
            "weighted = again.push(dqk, qk, {})",
            RULE,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/tangent.py",
        (
            "no tangent of keys on Hopper",
            "plgpu.wgmma(dqk_acc, q, dk)",
            "plgpu.wgmma(dqk_acc, q, k)",
            HOPPER_RULE,
        ),
        (
            "tiles of eight rows for arrays of any number",
            "tile = self.head_tile(head, *shape, along=rows)",
            "tile = self.head_tile(head, *shape)",
            f"{HOPPER} -k any_number",
        ),
        (
            "values of the next block for the probabilities of this one",
            "self._add_values(acc, last, left)",
            "self._add_values(acc, last - 1, left)",
            HOPPER_RULE,
        ),
        (
            "mu of one block alone",
            "return mu + more, following",
            "return more, following",
            HOPPER_RULE,
        ),
        (
            "no pair of an edge masked on Hopper",
            "mu, left = self._pairs(True, first)",
            "mu, left = self._pairs(False, first)",
            HOPPER_RULE,
        ),
        (
            "the output's rows taken before they have come",
            "plgpu.barrier_wait(refs.output_full.at[me])\no =",
            "o =",
            f"{HOPPER} -m '' -k padding",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/__init__.py",
        (
            "tangents of keys beyond a length",
            'clear.unread(call.spec, x) if "s" in x.axes else x',
            "clear.unread(call.spec, x) if x is call.key or x is call.value else x",
            f"{HOPPER} -m '' -k padding",
        ),
        (
            "no tangent by mosaic_gpu",
            "return _Plan(tangent_blocks.launch(blocks, call.precision), slower)",
            'return Declined("none")',
            f"{HOPPER_ORDERS} -k kernel_makes",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/tangent_blocks.py",
        (
            "a sink whose tangent nobody makes",
            "spec.score.terms or {*call.differentiable} - _OPERANDS",
            "spec.score.terms",
            f"{HOPPER} -k 'declined and sinks'",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/tuning.py",
        (
            "tangents on Hopper from the forward's crossover points on",
            "if keys < _crossover(call).backward:",
            "if keys < _crossover(call).forward:",
            f"{HOPPER_ORDERS} -k how_many_keys",
        ),
    ),
    *of(
        "pallas_kernels/passes.py",
        (
            "tangents of keys that a mask drops",
            "tangents = {**tangents, **dict(zip(of_keys, along, strict=True))}",
            "del along",
            f"{_TESTS} -k dropped_keys",
        ),
    ),
    *of(
        "pallas_kernels/triton/tangent_blocks.py",
        (
            "blocks of tangents with all keys",
            "wide = list(map(_with_half_the_keys, tuned))",
            "wide = list(tuned)",
            BLOCKS,
        ),
    ),
    *of(
        "jax_flash2/_backends.py",
        (
            "tangents of kernels in loops",
            "return found if isinstance(found, Made) else Made(of_tangents(),",
            "return Made(of_tangents(),",
            KERNEL,
        ),
    ),
    *of(
        "jax_flash2/_derivatives.py",
        (
            "products of tangents that are zero",
            "along = {name: present[i] for name, i in names if i in present}",
            "along = {name: present.get(i, primals[i]) for name, i in names}",
            PRODUCTS,
        ),
    ),
]
