"""Faults of keys in pages, and of what writes them: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

PAGED = "tests/kernels/test_paged.py -k '{}'"
CALLS = "tests/api/test_paged_calls.py"
SERVERS = "tests/api/test_servers.py"
PAGES = "tests/core/test_pages.py"
LOWERED = "tests/triton/test_paged_lowering.py -k '{}'"
WINDOW = PAGED.format("small_pages_window and triton")
STARTS = PAGED.format("int8_parts_starts and triton")

MUTANTS = [
    *of(
        "pallas_kernels/core/pages.py",
        (
            "an entry of the table that is no page",
            "return jnp.minimum(jnp.maximum(entry, 0), self.count - 1)",
            "return jnp.minimum(entry, self.count - 1)",
            f"{PAGES} -k every_entry",
        ),
        (
            "a row beyond the table",
            "return minimum(place, places - 1), row - place * self.size",
            "return place, row - place * self.size",
            f"{PAGES} -k in_the_table",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/__init__.py",
        (
            "a copy of pages for few queries",
            "return dataclasses.replace(found, slower=slower)",
            "return found",
            "tests/mosaic_gpu/test_paged.py -k long_prompts",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/paged.py",
        (
            "copies of rooms of any size",
            'if size["s"] > numbers.most_room_of_pages',
            'if False and size["s"] > numbers.most_room_of_pages',
            "tests/mosaic_gpu/test_paged.py -k long_prompts",
        ),
        (
            "rows from pages in another dtype",
            "call.size, call.dtype)",
            "call.size, jax.numpy.float32)",
            "tests/mosaic_gpu/test_paged.py -k rows_are",
        ),
    ),
    *of(
        "pallas_kernels/layout.py",
        (
            "a limit that is not one of the page",
            "rows.limit - (rows.start - first)",
            "rows.limit",
            STARTS,
        ),
        (
            "rows of small pages that do not exist are read",
            "Scattered(rows.start, rows.size, rows.limit, rows.kept, numbers_of=row)",
            "Scattered(rows.start, rows.size, numbers_of=row)",
            WINDOW,
        ),
    ),
    *of(
        "pallas_kernels/layout.py",
        (
            "the second column of a pair is the first",
            "return tuple(cls(i, size // pieces, step=pieces) for i in range(pieces))",
            "return tuple(cls(0, size // pieces, step=pieces) for i in range(pieces))",
            STARTS,
        ),
        (
            "a part of a long table is as long as the table",
            'if few_rows and "c" in self.size:',
            'if few_rows and "p" in self.names:',
            LOWERED.format("long_tables"),
        ),
    ),
    *of(
        "pallas_kernels/core/masks/tree.py",
        (
            "the key before a tree is one of it",
            "return (number < 0) | (bit != 0)",
            "return (number < -1) | (bit != 0)",
            PAGED.format("tree_int8_parts and xla"),
        ),
        (
            "blocks with keys of a tree are not masked",
            "return Range(0, 0, maximum(positions.offset, 0), size)",
            "return Range(0, 0, size, size)",
            PAGED.format("tree_int8_parts and triton") + " -m ''",
        ),
    ),
    *of(
        "pallas_kernels/triton/__init__.py",
        (
            "look-ups of pages take stages of keys",
            "stages = 2 * blocks.num_stages - 1",
            "stages = blocks.num_stages",
            LOWERED.format("stages_of_their_own"),
        ),
    ),
    *of(
        "pallas_kernels/triton/packed.py",
        (
            "elements of one byte are loaded one by one",
            "is_packed = size >= 32 and size & (size - 1) == 0",
            "is_packed = False",
            LOWERED.format("kernels_lower and int8"),
        ),
    ),
    *of(
        "pallas_kernels/program.py",
        (
            "rows beyond a length are read in pages",
            "rows = Rows(start, rows.size, end)",
            "rows = Rows(start, rows.size)",
            STARTS,
        ),
        (
            "rows before a start or a window are read in pages",
            "kept = None if isinstance(first, int) else rows.numbers >= first",
            "kept = None",
            STARTS,
        ),
    ),
    *of(
        "pallas_kernels/core/masks/starts.py",
        (
            "the first key after a start is dropped",
            "return kv >= self.first",
            "return kv > self.first",
            PAGED.format("int8_parts_starts and xla"),
        ),
        (
            "keys before a start are not left out",
            "return Named(jnp.arange(kv_size, dtype=jnp.int32) >= first",
            "return Named(jnp.arange(kv_size, dtype=jnp.int32) >= 0 * first",
            "tests/kernels/test_masked_rows.py -k before_a_start",
        ),
    ),
    *of(
        "pallas_kernels/core/pairs.py",
        (
            "values without their scale",
            "return p if scale is None else p * scale.astype(p.dtype)",
            "return p",
            PAGED.format("ragged_int8 and xla"),
        ),
    ),
    *of(
        "pallas_kernels/core/spec.py",
        (
            "no room for scales of values in float16",
            "return self.maximum_may_grow or scaled",
            "return self.maximum_may_grow",
            PAGED.format("room_in_float16") + " -m ''",
        ),
    ),
    *of(
        "pallas_kernels/core/scores/score.py",
        (
            "keys without their scale",
            "qk = qk * self.key_scale.astype(qk.dtype)",
            "pass",
            PAGED.format("ragged_int8 and xla"),
        ),
    ),
    *of(
        "pallas_kernels/core/gather.py",
        (
            "rows that no query needs are gathered",
            "inside = (numbers >= self.first[..., None]) & (",
            "inside = (numbers >= 0) & (",
            PAGED.format("small_pages_window and xla"),
        ),
    ),
    *of(
        "pallas_kernels/triton/support.py",
        (
            "NaN of a byte is a number",
            "x = jnp.where(bits & 0x7F == 0x7F, jnp.nan, x)",
            "pass",
            PAGED.format("every_code"),
        ),
    ),
    *of(
        "pallas_kernels/layout.py",
        (
            "two loops over few blocks of keys",
            "self.visits_few = bool(few_rows) and",
            "self.visits_few = False and",
            LOWERED.format("have_one_loop"),
        ),
        (
            "one loop over many blocks of keys",
            'return blocks <= most * self.parts.get("z", 1)',
            "return True",
            LOWERED.format("have_one_loop"),
        ),
        (
            "bound registers and as many programs as without",
            'options["at_once"] = _REGISTERS // (threads * blocks.max_registers)',
            "pass",
            LOWERED.format("small_pages_of_bytes"),
        ),
    ),
    *of(
        "pallas_kernels/tables.py",
        (
            "registers bound whatever the number of programs",
            "0 < left <= gpu",
            "left <= gpu",
            "tests/triton/test_tuning.py -k 'calls_of_its_own and byte'",
        ),
    ),
    *of(
        "pallas_kernels/triton/forward.py",
        (
            "values are all pieces of keys",
            'v_block = k_block[: len(here["d"])]',
            'v_block = k_block[-len(here["d"]) :]',
            PAGED.format("latent and triton"),
        ),
    ),
    *of(
        "jax_flash2/_ragged.py",
        (
            "a later block of a sequence begins at its first position",
            'offset = found["lengths"] - count + self.first',
            'offset = found["lengths"] - count',
            f"{PAGES} -k tokens",
        ),
        (
            "sequences of few tokens are in the last call, too",
            "own = jnp.where(least <= count, count, 0)",
            "own = count",
            f"{PAGES} -k tokens",
        ),
        (
            "no room for the padding at the ends of sequences",
            "blocks = max(1, (tokens + ends * (size - 1)) // size)",
            "blocks = max(1, tokens // size)",
            f"{PAGES} -k tokens",
        ),
        (
            "tokens of one call get rows of another",
            "inside = (row >= 0) & (row < blocks.count[b])",
            "inside = row >= 0",
            f"{PAGES} -k tokens",
        ),
        (
            "chunks of prompts in blocks of few rows",
            "if mean <= few and tokens <= max(many, sequences):",
            "if mean <= packed:",
            f"{PAGES} -k few_queries",
        ),
    ),
    *of(
        "jax_flash2/_cache.py",
        (
            "a row without a slot is written",
            "slots = jnp.where((slots >= 0) & (slots < count), slots, count)",
            "slots = jnp.where(slots < count, jnp.maximum(slots, 0), count)",
            f"{CALLS} -k layout_says",
        ),
        (
            "a token of no entry has a slot",
            "return jnp.where(inside, page * page_size + at % page_size, -1)",
            "return page * page_size + at % page_size",
            f"{CALLS} -k layout_says",
        ),
        (
            "slots of pages that are too late wrap around",
            "(page >= 0) & (page <= (_LAST + 1) // page_size - 1)",
            "page >= 0",
            f"{CALLS} -k extreme",
        ),
        (
            "positions of 64 bits lose their upper half",
            "clipped(as_integers(name, x), -1, _LAST)",
            "jnp.asarray(as_integers(name, x))",
            f"{CALLS} -k extreme",
        ),
    ),
    *of(
        "jax_flash2/_pools.py",
        (
            "a kernel reads scales of 64 bits",
            "x = as_scale(name, x, widest=4)",
            "x = as_scale(name, x)",
            f"{CALLS} -k 64_bits",
        ),
    ),
    *of(
        "jax_flash2/_paged.py",
        (
            "a kernel reads slopes of 64 bits",
            'as_floats("alibi_slopes", x, widest=4)',
            'as_floats("alibi_slopes", x)',
            f"{CALLS} -k 64_bits",
        ),
        (
            "no causal mask of two queries",
            "is_last = shape.t == 1",
            "is_last = shape.t <= 3",
            PAGED.format("rows_of_pages and xla"),
        ),
        (
            "positions after lengths that are beyond the rows",
            'end, count = _inside(given["lengths"], shape.s)',
            'end, count = given["lengths"]',
            PAGED.format("beyond"),
        ),
    ),
    *of(
        "jax_flash2/_server_arguments.py",
        (
            "values of fewer heads are written beside keys",
            "if values.shape != keys.shape:",
            "if values.ndim != keys.ndim:",
            f"{SERVERS} -k wrong",
        ),
        (
            "new rows are cut to what the cache holds",
            "if x.dtype != of_cache.dtype:",
            "if not jnp.issubdtype(x.dtype, jnp.floating):",
            f"{SERVERS} -k wrong",
        ),
        (
            "a cache of int4 in words of bytes",
            "if dtype is None or dtype not in _OF_CACHES:",
            "if dtype is None or dtype.itemsize > 4:",
            f"{SERVERS} -k wrong",
        ),
        (
            "a window has a key more",
            "return size - 1, 0",
            "return size, 0",
            f"{SERVERS} -k 'version_2 and window'",
        ),
    ),
    *of(
        "jax_flash2/_cache.py",
        (
            "rows rounded by another scale than the one that is kept",
            "rows = narrowed(rows, found.astype(jnp.float32)[..., None], kind)",
            "rows = quantize_kv(rows, kind, axes)[0]",
            "tests/api/test_paged_calls.py -k that_is_kept",
        ),
    ),
]
