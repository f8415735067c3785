"""Faults of lists of blocks: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of

LISTS = "tests/core/test_lists.py -k what_masks_keep"
EXACT = "tests/core/test_lists.py -k functions_are_exact"
WALKS = "tests/core/test_lists.py -k walks"
OTHERS = "tests/core/test_lists.py -k other_rows"
RUNS = "tests/core/test_lists.py -k keep_runs"
VISITS = "tests/mosaic_gpu/test_listed_visits.py"
CALLS = "tests/kernels/test_block_mask.py -k '{}'"

KNOWN = "tests/core/test_known.py"

MUTANTS = [
    *of(
        "pallas_kernels/core/known.py",
        (
            "known integers are divided downwards",
            "return np.where(y == 0, -1, wide * np.sign(x) * np.sign(y))",
            "return np.where(y == 0, -1, x // np.where(y == 0, 1, y))",
            KNOWN,
        ),
        (
            "known numbers are shifted with copies of their sign",
            'wide = x.view(f"u{x.dtype.itemsize}")',
            "wide = x",
            KNOWN,
        ),
        (
            "known sums run along the first axis",
            'return np.cumsum(x, params["axis"], x.dtype)',
            "return np.cumsum(x, 0, x.dtype)",
            KNOWN,
        ),
        (
            "known values are never let go",
            "if not _is_literal(x) and last.get(x, number) == number:",
            "if last is None:",
            KNOWN,
        ),
        (
            "known equations are all evaluated",
            "if needed & {*equation.outvars}:",
            "if True:",
            KNOWN,
        ),
        (
            "known results keep NumPy's dtype",
            "values[x] = np.asarray(value).astype(x.aval.dtype, copy=False)",
            "values[x] = np.asarray(value)",
            KNOWN,
        ),
    ),
    *of(
        "pallas_kernels/core/block_tables.py",
        (
            "constants of any size",
            "return is_static and math.prod(tiling.counts) <= _MOST_KNOWN",
            "return is_static and math.prod(tiling.counts) > 0",
            KNOWN,
        ),
        (
            "nothing is known while a call is traced",
            "found = _known(*arguments) if are_static(masks, tiling) else None",
            "found = None",
            KNOWN,
        ),
    ),
    *of(
        "pallas_kernels/core/visits.py",
        (
            "global keys beside windows of a quarter have one program",
            "MANY_VISITS = 3",
            "MANY_VISITS = 4",
            KNOWN,
        ),
        (
            "blocks that no query visits are of the mean",
            "visited * visits > MANY_VISITS",
            "count * visits > MANY_VISITS",
            KNOWN,
        ),
        (
            "which blocks have many visits is asked of no list",
            "return int(np.max(many.value)) if isinstance",
            "return int(np.min(many.value) * 0) if isinstance",
            KNOWN,
        ),
    ),
    *of(
        "pallas_kernels/core/lists.py",
        (
            "full blocks of a list before edges",
            "rank = jnp.where(value == 0, 2, value - 1)",
            "rank = jnp.where(value == 0, 2, 2 - value)",
            LISTS,
        ),
        (
            "a list's last block full beyond the rows",
            "value = jnp.where(last, jnp.minimum(value, 1), value)",
            "value = jnp.where(last, jnp.minimum(value, 2), value)",
            LISTS,
        ),
        (
            "a list of the block of another",
            "start = own * self.others",
            "start = own * (self.others - 1)",
            WALKS,
        ),
        (
            "parts of a list's block beyond the rows visited",
            "mid, end = edges * parts - beyond, count * parts - beyond",
            "mid, end = edges * parts, count * parts",
            WALKS,
        ),
        (
            "full blocks of a list too early",
            "position = position + is_beyond * self.skipped",
            "position = position + 0 * is_beyond",
            WALKS,
        ),
        (
            "the last block of a list in order is that of its edges",
            "found = self.ascending.number(start + maximum(count - 1, 0))",
            "found = self.ascending.number(start + maximum(edges - 1, 0))",
            WALKS,
        ),
        (
            "blocks of a list with their kind in their number",
            "return entry & (_KIND - 1)",
            "return entry & (2 * _KIND - 1)",
            WALKS,
        ),
        (
            "a part of a list with the edges of all",
            "return self._replace(lo=first, mid=mid, hi=last)",
            "return self._replace(lo=first, hi=last)",
            WALKS,
        ),
        (
            "a tile of a list always full",
            "is_full, is_needed = divide(code, 2), minimum(code, 1)",
            "is_full, is_needed = minimum(code, 1), minimum(code, 1)",
            WALKS,
        ),
        (
            "a list without an edge gets none",
            "missing = maximum(one - self.edges, 0)",
            "missing = 0 * maximum(one - self.edges, 0)",
            WALKS,
        ),
        (
            "lists for blocks that do not divide theirs",
            "return self.own % own == 0 and self.visited % visited == 0",
            "return self.own >= own and self.visited >= visited",
            VISITS,
        ),
    ),
    *of(
        "pallas_kernels/core/masks/listed.py",
        (
            "the list of the forward in the backward",
            'turned = code.ordered((*code.axes[:-2], "j", "i"))',
            "turned = Named(code.value.reshape(tiling.counts[::-1]), ('j', 'i'))",
            LISTS,
        ),
        (
            "a block that meets others is what the fullest of them is",
            "jnp.min(met, over) == 2",
            "jnp.max(met, over) == 2",
            OTHERS,
        ),
        (
            "the last row of a run is not looked at",
            "places.append(block - 1)",
            "places.append(0)",
            OTHERS,
        ),
        (
            "stripes are as one run",
            "step = math.gcd(step, numbering.stripe)",
            "step = max(step, numbering.stripe)",
            OTHERS,
        ),
    ),
    *of(
        "pallas_kernels/core/exact.py",
        (
            "blocks get the code of the one after them",
            "rank = lax.cumsum(is_open.astype(jnp.int32)) - 1",
            "rank = lax.cumsum(is_open.astype(jnp.int32))",
            EXACT,
        ),
        (
            "blocks that intervals leave open are not looked at",
            "is_open = codes == 1",
            "is_open = codes == 3",
            EXACT,
        ),
        (
            "rows beyond the last count as kept",
            "kept &= (rows < tiling.q_size) & (keys < tiling.kv_size)",
            "kept &= rows >= 0",
            EXACT,
        ),
    ),
    *of(
        "pallas_kernels/core/visits.py",
        (
            "programs of one block of a list have the same turn",
            'return before * (listed.own // rows["s"]) + within',
            'return before * (listed.own // rows["s"])',
            VISITS,
        ),
        (
            "turns count blocks of a list, not programs",
            'return before * (listed.own // rows["s"]) + within',
            "return before + within",
            VISITS,
        ),
        (
            "all wait for the program with most visits",
            "kind = jnp.where(has_many, _MANY, _FEW)",
            "kind = jnp.where(has_many, _FEW, _FEW)",
            VISITS,
        ),
        (
            "turns are those of blocks in their own order",
            "is_few = (kind == _FEW)[..., None]",
            "is_few = (kind >= _FEW)[..., None]",
            VISITS,
        ),
        (
            "a short last block is not the last one",
            "kind = jnp.where(jnp.arange(count) == count - 1, _SHORT, kind)",
            "pass",
            VISITS,
        ),
        (
            "programs beyond the keys add to dq",
            "count = jnp.minimum(all_parts - number, parts)[:, None]",
            "count = jnp.minimum(all_parts, parts + 0 * number)[:, None]",
            VISITS,
        ),
    ),
    *of(
        "pallas_kernels/core/spec.py",
        (
            "a list of rows of a group asked by query",
            "if self.repeat > 1 and not isinstance(self.table, BlockList):",
            "if self.repeat > 1:",
            CALLS.format("as_rows and False"),
        ),
        (
            "lists of the first mask alone",
            "return functools.reduce(operator.and_, found)",
            "return next(found)",
            CALLS.format("beside_other"),
        ),
    ),
    *of(
        "pallas_kernels/core/masks/mod.py",
        (
            "rows of a group stand at their own numbers",
            "divide(x, tiling.repeat) if tiling.repeat > 1 else x for x in rows",
            "x for x in rows",
            CALLS.format("as_rows and False"),
        ),
    ),
    *of(
        "pallas_kernels/core/pointwise/runs.py",
        (
            "two runs together are one",
            'return _both(kinds, "valley")',
            'return _both(kinds, "hill")',
            RUNS,
        ),
        (
            "a distance is not known to fall and then rise",
            'frozenset(("valley",)) if first & {"rises", "falls"}',
            'frozenset(("valley",)) if first & {""}',
            RUNS,
        ),
    ),
    *of(
        "pallas_kernels/core/masks/window.py",
        (
            "a window of all rows but one is dropped",
            "self.left >= queries - 1 else self.left",
            "self.left >= queries - 2 else self.left",
            "tests/core/test_mask.py -k reach_every_row",
        ),
        (
            "a window ahead of all queries is dropped",
            "self.right >= keys - 1 else self.right",
            "self.right >= keys - 2 else self.right",
            "tests/core/test_mask.py -k reach_every_row",
        ),
    ),
    *of(
        "jax_flash2/_arguments.py",
        (
            "a window dropped beside an offset",
            "is None and _options.is_zero(self.query_offset)",
            "is None",
            "tests/mosaic_gpu/test_choice.py -k all_rows",
        ),
        (
            "a halo of all rows is refused",
            "self.context is None and _options",
            "_options",
            "tests/devices/test_context_errors.py -k window_of_all_rows",
        ),
    ),
]
