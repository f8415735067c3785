"""Faults of the Mosaic GPU kernels that a CPU can see: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of, rule

ORDER = "tests/mosaic_gpu/test_visits.py -k 'before_them or several_heads'"
DOCUMENTS = "tests/mosaic_gpu/test_visits.py -k of_documents"
SCHEDULE = "tests/mosaic_gpu/test_schedule.py"
APART = "tests/mosaic_gpu/test_interpreted.py -m '' -k 'apart and segments'"
PADDING = "tests/mosaic_gpu/test_interpreted.py -k 'race_for and bfloat16'"
DROPPED = "tests/mosaic_gpu/test_interpreted.py -k made_again"
WORDS = "tests/mosaic_gpu/test_dealt.py -k words"
CHOICE = "tests/mosaic_gpu/test_choice.py -k 'measured_faster or must_be_copied'"
TAKEN = rule("segments_causal_gqa", backend="mosaic_gpu")

MUTANTS = [
    *of(
        "jax_flash2/_backends.py",
        (
            "gradients leave a backend that the caller names",
            "[] if is_named or not own.slower else",
            "[] if not own.slower else",
            CHOICE,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/memory.py",
        (
            "rows that end anywhere are always copied",
            "if _in_single_rows(width):\n        return any(",
            "if False:\n        return any(",
            CHOICE,
        ),
        (
            "heads that must be padded are not copied",
            "return any(x % (_FEWEST_BYTES // 2) for x in heads)",
            "return False",
            CHOICE,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/__init__.py",
        (
            "dq by itself in parts",
            'whole = {"dq", *(',
            "whole = {*(",
            "tests/mosaic_gpu/test_interpreted.py -m '' -k parts_of_gradients_apart",
        ),
        (
            "dq by itself without tables of segments",
            "q, k_clear, v_clear, tabled, rows",
            "q, k, v, spec, rows",
            APART,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/clear_keys.py",
        (
            "keys beyond their length are looked at",
            "numbers < spec.kv_limit(size)",
            "numbers < size",
            PADDING,
        ),
        (
            "keys that a mask drops are looked at",
            "return below if keys is None",
            "return below if True",
            DROPPED,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/pairwise.py",
        (
            "bits of a mask from the other end",
            "jnp.arange(BITS, dtype=jnp.uint16)",
            "jnp.arange(BITS, dtype=jnp.uint16)[::-1]",
            WORDS,
        ),
        (
            "a block is said to be full if each word keeps a pair",
            "words.value == FULL",
            "words.value != 0",
            WORDS,
        ),
        (
            "a key is kept only if all queries keep it",
            "lax.reduce(words.value, np.uint16(0), lax.bitwise_or, lost)",
            "lax.reduce(words.value, np.uint16(FULL), lax.bitwise_and, lost)",
            WORDS,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/tiles.py",
        (
            "blocks at the edges of a window first",
            "self.needed.in_order(self.blocks",
            "self.needed.at(self.blocks",
            "tests/mosaic_gpu/test_turns.py -k do_not_wait",
        ),
        (
            "with a window, some heads of a block twice",
            "lax.div(tile, self.blocks), lax.rem(tile, self.blocks)",
            "lax.rem(tile, self.blocks), lax.rem(tile, self.blocks)",
            ORDER,
        ),
        (
            "without a window, some blocks of a head twice",
            "lax.rem(tile, self.heads), lax.div(tile, self.heads)",
            "lax.rem(tile, self.heads), lax.rem(tile, self.heads)",
            ORDER,
        ),
    ),
    *of(
        "pallas_kernels/core/visits.py",
        (
            "a program among those before it",
            "Named(so_far - visited,",
            "Named(so_far,",
            DOCUMENTS,
        ),
        (
            "programs before it counted from the other end",
            "axis=visited.ndim - 2)",
            "axis=visited.ndim - 2, reverse=True)",
            DOCUMENTS,
        ),
        (
            "visits without the arrays that decide them",
            "tabled.for_ranges()",
            "spec.for_ranges()",
            DOCUMENTS,
        ),
        (
            "a block of queries too many counted",
            "(i < hi)",
            "(i <= hi)",
            ORDER,
        ),
        (
            "rows that no keys meet as written",
            "last - first, 0)",
            "last - first + 1, 0)",
            "tests/mosaic_gpu/test_visits.py -k no_keys_meet",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/tiles.py",
        (
            "keys beyond the array not masked",
            "found = found.all_edges(",
            "found.all_edges(",
            ORDER,
        ),
        (
            "the first program is the last",
            "jnp.int32(keys)) - met[0]",
            "jnp.int32(keys)) - met[1]",
            ORDER,
        ),
        (
            "programs of the queries before it",
            "before_at(self.where, place.block, self.layout.rows)",
            "before_at(self.where, 0 * place.block, self.layout.rows)",
            ORDER,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/tuning.py",
        (
            "documents at small heads go to these kernels",
            'if spec.traits.is_sparse and keys < fewest("documents")',
            "if spec.traits.is_sparse and keys < 1024",
            CHOICE,
        ),
        (
            "documents have the forward's point in the backward",
            "return getattr(table.crossover(condition, largest), which)",
            "return table.crossover(condition, largest).forward",
            "tests/mosaic_gpu/test_choice.py -k for_each_pass",
        ),
        (
            "an order of any size",
            "if need > numbers.most_order_bytes:",
            "if need < 0:",
            "tests/mosaic_gpu/test_visits.py -k too_large",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/tile_scheduler.py",
        (
            "nobody takes the last tile",
            "(self.tile(last) < self.schedule.tiles)",
            "(self.tile(last) < self.schedule.tiles - 1)",
            TAKEN,
        ),
        (
            "numbers of tiles where those of rounds left are",
            "self.words.shape[0] - self.schedule.most_tiles + slot",
            "0 * slot",
            TAKEN,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/tile_scheduler.py",
        (
            "programs that take tiles have no rounds to spare",
            "mean_tiles = measured.here().numbers.mean_tiles",
            "mean_tiles = MOST_TILES",
            SCHEDULE,
        ),
        (
            "tiles of unknown length are dealt out",
            "is_static = uniform_cost or tiles <= resident",
            "is_static = True",
            SCHEDULE,
        ),
        (
            "every round deals tiles out in the same direction",
            "back = (slot & 1) * ",
            "back = 0 * ",
            SCHEDULE,
        ),
        (
            "a last round without tiles",
            "self.tile(thread_block, slot) >= self.tiles",
            "self.tile(thread_block, slot) > self.tiles",
            SCHEDULE,
        ),
        (
            "programs that come later take the tiles of the first",
            "row = slot + wave * self.most_tiles",
            "row = slot + wave",
            SCHEDULE,
        ),
        (
            "fewer tiles side by side than there are programs",
            "if n * blocks >= thread_blocks",
            "if n >= 1",
            SCHEDULE,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/memory.py",
        (
            "zeros for what lies beyond queries",
            "fill = x.fill if isinstance(x, Filled) else 0",
            "fill = 0",
            "tests/mosaic_gpu/test_backward.py -k beyond_queries",
        ),
        (
            "the next heads from the same end",
            'ids["t"] += ((last - rest) & 1)',
            'ids["t"] += 0',
            SCHEDULE,
        ),
        (
            "parts that are no tiles of their own",
            "rest, ids[name] = _divmod(rest, size)\n        rest, head",
            "_, ids[name] = _divmod(rest, size)\n        rest, head",
            SCHEDULE,
        ),
        (
            "heads together of one block only",
            'if self.together > 1 and "t" in self.num_blocks:',
            "if False:",
            SCHEDULE,
        ),
    ),
    *of(
        "pallas_kernels/core/spec.py",
        (
            "a kernel's own form of a mask is left out",
            "return [*first, *(x for x in kept if x.dtype != jnp.bool_)]",
            "return first",
            rule("pairwise_3", backend="mosaic_gpu"),
        ),
        (
            "ALiBi on both sides with the first block's maximum",
            "maximum_may_grow for x in terms) and not self.is_causal",
            "maximum_may_grow for x in terms) and False",
            "tests/kernels/test_accumulate.py -k on_both_sides",
        ),
        (
            "rows of unequal lengths said to be sorted",
            "ALL, cost_is_monotone=False, keeps_own_key=own",
            "ALL, cost_is_monotone=True, keeps_own_key=own",
            SCHEDULE,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/tiles.py",
        (
            "every program visits all heads of the group",
            "first, end = layout.own_elements(where)",
            "first, end = 0, layout.elements",
            ORDER,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/dropout.py",
        (
            "words of dropout for other queries",
            "for word in words]",
            "for word in words[::-1]]",
            "tests/mosaic_gpu/test_dealt.py",
        ),
    ),
    *of(
        "pallas_kernels/core/visits.py",
        (
            "blocks that only some heads visit left out",
            ', over=("n",)',
            "",
            ORDER,
        ),
        (
            "counts that elements share as if each had its own",
            "shape = (*(size[a] for a in _batch(spec)), *start.shape)",
            "shape = jnp.broadcast_shapes(*map(jnp.shape, (*found, start)))",
            "tests/mosaic_gpu/test_visits.py -k do_not_depend_on",
        ),
    ),
    *of(
        "pallas_kernels/program.py",
        (
            "the main diagonal out of reach",
            "(tiles - 1) * block + 1 > reach",
            "tiles * block + 1 > reach",
            f"{SCHEDULE} -k out_of_reach",
        ),
    ),
]
