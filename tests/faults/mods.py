"""Faults of functions of pairs, `score_mod` and `mask_mod`: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

DENSE = "tests/kernels/test_mods.py -k 'dense_attention and {}'"
OFFSET = "tests/kernels/test_mods.py -k 'begin_at_the_offset'"
SOUND = "tests/core/test_pointwise.py -k sound"

WORDS = "tests/core/test_pointwise.py -k words"
DIAGONALS = "tests/core/test_tables.py -k along_diagonals"
KNOWN = "tests/core/test_known_masks.py"

MUTANTS = [
    *of(
        "jax_flash2/_combine.py",
        (
            "or_masks keeps what all keep",
            '_joined("or_masks", operator.or_, mask_mods)',
            '_joined("or_masks", operator.and_, mask_mods)',
            "tests/api/test_combine.py",
        ),
        (
            "not_mask keeps what the function keeps",
            "jnp.logical_not(mask_mod(b, h, q, kv))",
            "mask_mod(b, h, q, kv)",
            "tests/api/test_combine.py",
        ),
    ),
    *of(
        "pallas_kernels/core/scores/mod.py",
        (
            "tangents of tables that are not read",
            "along if places is None else take(along, places)",
            "along",
            "tests/kernels/test_tangents.py -k tables_of_grouped",
        ),
    ),
    *of(
        "pallas_kernels/division.py",
        (
            "heads with tables of their own as rows of a block",
            "spec.dropout is not None or _has_tables_of_heads(spec)",
            "spec.dropout is not None",
            "tests/kernels/test_tangents.py -k tables_of_grouped",
        ),
    ),
    *of(
        "pallas_kernels/core/masks/known.py",
        (
            "less means at most",
            "more = int(name in _STRICT)",
            "more = 0",
            KNOWN,
        ),
        (
            "a negated AND is split",
            'joins = "or" if part.is_negated else "and"',
            'joins = "and"',
            KNOWN,
        ),
        (
            "ids of heads are segments",
            'if any("n" in x.axes or x.value.dtype != np.int32 for x in found):',
            "if any(x.value.dtype != np.int32 for x in found):",
            KNOWN,
        ),
        (
            "the widest of several windows",
            "min(lefts, default=None), min(rights, default=None)",
            "max(lefts, default=None), max(rights, default=None)",
            KNOWN,
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/sides.py",
        (
            "a field has no room for the bit that says no",
            "place += field.bits + 1",
            "place += field.bits",
            WORDS,
        ),
        (
            "bounds that no int32 has",
            "abs(number) > _FAR or abs(first + number) > _FAR",
            "abs(number) > _FAR",
            WORDS,
        ),
        (
            "a query's number in a word is not cut off",
            "query = more.add(lax.clamp_p, _int32(0), query, _int32(2**bits))",
            "query = more.add(lax.max_p, _int32(0), query)",
            WORDS,
        ),
        (
            "what one side decides of heads that are rows",
            'return frozenset({"t", "s"} & {str(a) for a in axes})',
            "return frozenset()",
            "tests/core/test_pointwise.py -k heads_that_are_rows",
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/binding.py",
        (
            "any function of both positions is one of their distance",
            "return not rows & taken",
            "return True",
            "tests/kernels/test_tables.py -k places_of_pairs",
        ),
        (
            "distances of rows begin at 0",
            'return _Operand(found.renamed("t", name), zero=positions.zero)',
            'return _Operand(found.renamed("t", name), zero=0)',
            DENSE.format("xla and table"),
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/tables.py",
        (
            "diagonals begin a row early",
            "x = x.reshape(*lead, -1)[..., : t * (t + s - 1)]",
            "x = x.reshape(*lead, -1)[..., t : t * (t + s)]",
            DIAGONALS,
        ),
        (
            "the upper halves of tiles are lost",
            "sums += jnp.pad(upper, [*none, (1, 0), (0, 0)])",
            "sums += 0 * jnp.pad(upper, [*none, (1, 0), (0, 0)])",
            DIAGONALS,
        ),
    ),
    *of(
        "jax_flash2/_chunked.py",
        (
            "the distance of the first of several halos is that of all",
            "if places.first is not None and places.first.size == 1:\n"
            "                first = places.first.reshape(())",
            "if places.first is not None:\n"
            "                first = places.first.ravel()[0]",
            "tests/kernels/test_tables.py -k on_several_devices",
        ),
    ),
    *of(
        "pallas_kernels/program.py",
        (
            "a diagonal of tiles ends a tile early",
            "jnp.minimum(queries - after, keys)",
            "jnp.minimum(queries - after, keys) - 1",
            DENSE.format("triton and table"),
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/gather.py",
        (
            "neighbours of a diagonal in the other order",
            "places = [8 * n - e for e in range(NEIGHBOURS)]",
            "places = [8 * n + e for e in range(NEIGHBOURS)]",
            "tests/mosaic_gpu/test_dealt.py -k diagonals",
        ),
    ),
    *of(
        "pallas_kernels/core/scores/mod.py",
        (
            "JAX differentiates where a mask drops pairs",
            "return jnp.where(kept, whole, whole.reshape(-1)[jnp.argmax(kept)])",
            "return whole",
            "tests/kernels/test_mods.py -k 'nan_outside and reference'",
        ),
    ),
    *of(
        "jax_flash2/_plot.py",
        (
            "a picture of the first head for all",
            '"n": head}',
            '"n": 0}',
            "tests/api/test_plot.py -k every_mask",
        ),
        (
            "a picture shows blocks without a mask as others",
            "code[kept & of_pairs(full)] += 1",
            "code[kept & of_pairs(full)] += 0",
            "tests/api/test_plot.py -k blocks_are",
        ),
    ),
    *of(
        "pallas_kernels/core/scores/mod.py",
        (
            "a derivative that is not finite counts for masked pairs",
            "return ds * jnp.where((ds != 0.0) | is_finite, slope, 0.0)",
            "return ds * slope",
            "tests/kernels/test_mods.py -k nan_outside",
        ),
        (
            "a function has the slope of its first operand for all",
            "number = 1 + list(self.operands).index(name)",
            "number = min(1, len(self.operands))",
            DENSE.format("xla and computed"),
        ),
        (
            "a function's score has no slope",
            "return _product(ds, self._derivatives(kept, setting)[0])",
            "return ds",
            "tests/kernels/test_mods.py -k 'dense_attention and blocks and of_rows'",
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/binding.py",
        (
            "an index of few bits is clamped to what it cannot number",
            "end = min(size - 1, jnp.iinfo(place.dtype).max)",
            "end = size - 1",
            "tests/kernels/test_tables.py -k few_bits",
        ),
    ),
    *of(
        "pallas_kernels/core/masks/mod.py",
        (
            "a kernel's table of a mask is an array of bits",
            "if isinstance(x, Table) or not is_float or x.dtype == dtype:",
            "if not is_float or x.dtype == dtype:",
            "tests/kernels/test_tables.py -k masks_may_read_tables",
        ),
    ),
    *of(
        "pallas_kernels/core/axes.py",
        (
            "no heads have a group",
            'has_heads = "n" in size and size.get("k", 0) != 0',
            'has_heads = "n" in size',
            "tests/mosaic_gpu/test_choice.py -k nothing_to_do",
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/build.py",
        (
            "a logarithm to base two is the natural one",
            "inverse = Constant.of(np.asarray(1 / np.log(2.0), dtype))",
            "inverse = Constant.of(np.asarray(1.0, dtype))",
            "tests/core/test_pointwise.py -k base_two",
        ),
        (
            "a boolean is the lowest bit of a number",
            "if dtype == np.bool_:  # Mosaic GPU would take the lowest bit of a number",
            "if False:",
            "tests/kernels/test_tables.py -k booleans_lower",
        ),
        (
            "the larger of two booleans is one of numbers",
            'if name in ("max", "min") and dtype == np.bool_:',
            "if False:",
            "tests/kernels/test_tables.py -k booleans_lower",
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/program.py",
        (
            "not of a boolean is JAX's",
            'if (self.name, self.dtype) == ("not", "bool"):',
            "if False:",
            "tests/kernels/test_tables.py -k booleans_lower",
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/intervals.py",
        (
            "corners of a product are its ends",
            "corners = [(a, b) for a in args[0] for b in args[1]]",
            "corners = list(zip(*args, strict=True))",
            SOUND,
        ),
        (
            "remainders of one period for all",
            "same = (x[0] // n == x[1] // n) & (x[0] >= 0)",
            "same = x[0] >= 0",
            SOUND,
        ),
        (
            "not of an interval as of a number",
            '"not": lambda step, x: (~x[1], ~x[0]),',
            '"not": lambda step, x: (~x[0], ~x[1]),',
            "tests/core/test_pointwise.py -k 'sound or exact'",
        ),
        (
            "a bound that takes NaN away",
            "return of_ends(jnp.where(odd, jnp.nan, low), high)",
            "return low, high",
            "tests/core/test_pointwise.py -k nan_in_a_captured",
        ),
        (
            "an absolute value is never 0 between its ends",
            "low = jnp.maximum(jnp.maximum(x[0], -x[1]), jnp.zeros_like(x[0]))",
            "low = jnp.minimum(abs(x[0]), abs(x[1]))",
            SOUND,
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/tables.py",
        (
            "a long sum is its first part alone",
            "found = [jnp.sum(y, axis=-2) for y in found]",
            "found = [y[..., 0, :] for y in found]",
            "tests/core/test_tables.py -k sum_of_its_place",
        ),
        (
            "infinite numbers times 0 are in the sums of other places",
            "jnp.sum(jnp.where(places == some, x, 0), axis=-1)",
            "jnp.sum((places == some) * x, axis=-1)",
            "tests/core/test_tables.py -k sum_of_its_place",
        ),
        (
            "places of a table in the order of pairs",
            "return a_begins | b_begins, jnp.where(b_begins, right, left + right)",
            "return a_begins | b_begins, left + right",
            "tests/core/test_tables.py -k sums_of_a_table",
        ),
        (
            "places that no pair read have a gradient",
            "return jnp.where(is_met, jnp.take_along_axis(sums, last, axis=-1), 0)",
            "return jnp.take_along_axis(sums, last, axis=-1)",
            "tests/core/test_tables.py -k sums_of_a_table",
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/tables.py",
        (
            "the tangent of a shared table varies along no mesh axis",
            "varying, _ = varying_alike((tangents[0], found))",
            "varying = tangents[0]",
            "tests/devices/test_mods.py -k 'shard_map and inside'",
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/binding.py",
        (
            "a table is divided where JAX gives what it reads no type",
            "array = undivided(array)\nlead = [",
            "lead = [",
            "tests/devices/test_mods.py -k 'meshes and Explicit'",
        ),
        (
            "a number in place of an index of a divided axis",
            "if len(kept) < array.ndim:",
            "if len(kept) < 0:",
            "tests/devices/test_mods.py -k 'numbers_in_place and Explicit'",
        ),
        (
            "constants beside an index that varies between devices do not",
            "args = varying_alike(tuple(map(jnp.asarray, args)))",
            "args = tuple(args)",
            "tests/devices/test_mods.py -k 'shard_map and inside'",
        ),
    ),
    *of(
        "jax_flash2/_mods.py",
        (
            "floats of few bits as bits of wide ones",
            "    x = x.astype(dtype)\n",
            "",
            "tests/kernels/test_tables.py -k compare_floats",
        ),
        (
            "a captured array begins at row 0 of any offset",
            "start = jnp.clip(jnp.asarray(offset.value) + rows, 0, size + rows)",
            "start = jnp.int32(rows)",
            OFFSET,
        ),
        (
            "positions without the offset",
            "return Named(rows.to(axes) + first[..., None], axes)",
            "return Named(rows.to(axes) + 0 * first[..., None], axes)",
            "tests/kernels/test_mods.py -k read_beforehand",
        ),
        (
            "captured rows of the first device for all",
            "lax.dynamic_index_in_dim(x, self.rank(), axis + 1, keepdims=False)",
            "lax.index_in_dim(x, 0, axis + 1, keepdims=False)",
            "tests/kernels/test_mods.py -k several_devices",
        ),
        (
            "an index beyond an array is that of its first element",
            'return jnp.pad(x, pad, mode="edge")',
            "return jnp.pad(x, pad)",
            OFFSET,
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/build.py",
        (
            "a product without JAX's parameter",
            "return self.emit(lax.mul_p, PRODUCT, [x, inverse], dtype)",
            "return self.emit(lax.mul_p, {}, [x, inverse], dtype)",
            "tests/core/test_pointwise.py -k rewritten",
        ),
        (
            "absolute values are compared as they are",
            "compared_by_sign(self).run(",
            "self.run(",
            "tests/core/test_pointwise.py -k by_sign",
        ),
        (
            "one sign suffices for a bound",
            "jax.lax.and_p if is_bound else jax.lax.or_p",
            "jax.lax.or_p if is_bound else jax.lax.and_p",
            "tests/core/test_pointwise.py -k by_sign",
        ),
        (
            "the sign that ptxas loses",
            "found = self.emit(primitive, {}, [found, opposite], dtype)",
            "pass",
            "tests/core/test_pointwise.py -k larger_and",
        ),
        (
            "the larger of an absolute value as it is written",
            "return self._without_absolute(primitive, args, dtype)",
            "return None",
            "tests/core/test_pointwise.py -k larger_and",
        ),
        (
            "one of two numbers suffices for a bound",
            'joined = lax.and_p if is_bound == (name == "max") else lax.or_p',
            "joined = lax.or_p",
            "tests/core/test_pointwise.py -k larger_and",
        ),
        (
            "a bound from the other side",
            'is_bound = (primitive.name in ("le", "lt")) == (side == 0)',
            "is_bound = side == 0",
            "tests/core/test_pointwise.py -k larger_and",
        ),
        (
            "the logarithm of a constant is left to kernels",
            'if name in _FOLDED and not (name == "rem" and values[1] == 0):',
            'if name in _FOLDED and name != "log":',
            "tests/kernels/test_operations.py -k declined",
        ),
    ),
]
