"""Faults of what is known of masks from their text alone: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

OWN_KEYS = "tests/core/test_own_keys.py"

MUTANTS = [
    *of(
        "pallas_kernels/core/pointwise/build.py",
        (
            "floats are equal to themselves",
            "and self._is_exact(args[0]):",
            "and True:",
            OWN_KEYS,
        ),
        (
            "complex numbers are equal to themselves",
            "jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)",
            "jnp.issubdtype(jnp.dtype(dtype), jnp.floating)",
            OWN_KEYS,
        ),
        (
            "sums of what is not negative do not overflow",
            "return found if found <= np.iinfo(dtype).max else None",
            "return min(found, np.iinfo(dtype).max)",
            OWN_KEYS,
        ),
        (
            "a condition that always holds decides",
            'same, decides = (one, zero) if name == "and" else (zero, one)',
            'same, decides = (one, zero) if name == "or" else (zero, one)',
            OWN_KEYS,
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/trace.py",
        (
            "any other key for a query's own",
            'of_one = [query if x == "kv" else i',
            'of_one = [query - 1 if x == "kv" else i',
            OWN_KEYS,
        ),
    ),
    *of(
        "jax_flash2/_mods.py",
        (
            "queries at an offset have their own keys",
            'traced.keeps_own_key and "q" in self._natural',
            "traced.keeps_own_key",
            OWN_KEYS,
        ),
        (
            "other rows of one array are shared",
            "return may_share and captured[a] == captured[b]",
            "return self._shape.t == self._shape.s and captured[a] == captured[b]",
            OWN_KEYS,
        ),
    ),
    *of(
        "pallas_kernels/core/masks/mod.py",
        (
            "each query is taken to have a key",
            "keeps_own_key=self.keeps_own_key,",
            "keeps_own_key=True,",
            OWN_KEYS,
        ),
    ),
]
