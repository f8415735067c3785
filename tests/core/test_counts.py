"""Which blocks are visited, and in which of them a mask is evaluated: exactly.

A block visited in vain changes no result, only the time. So blocks are drawn, with a
row for each block of queries and a column for each block of keys:

    #   visited, every pair is kept: no mask is evaluated
    +   visited, with the mask
    .   not visited
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks
from pallas_kernels import program
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import DenseMask, Lengths, SegmentIds, Window
from pallas_kernels.core.ranges import Range
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.triton import memory
from tests.core.programs import at_once

BLOCK = 4


def drawing(text: str) -> list[list[str]]:
    return [row.split() for row in text.strip().splitlines()]


def drawn(atoms, t: int, s: int, looped: str, offset: int = 0) -> list[list[str]]:
    """The blocks of a loop over blocks of keys (`looped` "s") or of queries ("t")."""
    spec = AttentionSpec(Score(1.0), tuple(atoms), offset)
    spec = at_once(lambda: spec.with_table(looped, BLOCK, BLOCK, t, s))
    own, other = (t, s) if looped == "s" else (s, t)
    lines = []
    for index in range(-(-own // BLOCK)):
        here = spec.for_ranges()
        if here.table is not None:
            table = ((np.asarray(x.value), x.axes[-1]) for x in here.table)
            at = [value[index if axis else 0] for value, axis in table]
            here = AttentionSpec(here.score, here.masks, offset, table=Range(*at))
        lo, hi = index * BLOCK, min((index + 1) * BLOCK, own)
        blocks = here.kv_blocks if looped == "s" else here.q_blocks
        need_lo, full_lo, full_hi, need_hi = map(int, blocks(lo, hi, other, BLOCK))
        line = []
        for block in range(-(-other // BLOCK)):
            visited = need_lo <= block < need_hi
            full = full_lo <= block < full_hi
            line.append("#" if full else "+" if visited else ".")
        lines.append(line)
    return lines if looped == "s" else [list(line) for line in zip(*lines, strict=True)]


def _segments(query, key_value) -> SegmentIds:
    """Of (id, how many rows)."""
    q, kv = (
        np.repeat(*np.int32(list(zip(*x, strict=True)))) for x in (query, key_value)
    )
    return SegmentIds(Named(q, ("t",)), Named(kv, ("s",)))


def _mask(text: str, t: int, s: int) -> DenseMask:
    """Blocks of 1 (every pair is kept), . (none) and 0 (all but the first pair)."""
    cells = drawing(text)
    mask = np.kron([[x != "." for x in row] for row in cells], np.ones((BLOCK, BLOCK)))
    for i, row in enumerate(cells):
        for j, cell in enumerate(row):
            mask[i * BLOCK, j * BLOCK] *= cell != "0"
    return DenseMask(Named(mask.astype(bool)[:t, :s], ("t", "s")))


# (atoms, query rows, key rows, offset, drawing, drawing of loops over queries if other)
DRAWN = {
    "no mask": ([], 8, 12, 0, "# # #\n# # #", None),
    "keys overhang": ([], 8, 6, 0, "# +\n# +", "# #\n# #"),
    "queries overhang": ([], 6, 8, 0, "# #\n# #", "# #\n+ +"),
    "causal": ([Window(None, 0)], 12, 12, 0, "+ . .\n# + .\n# # +", None),
    "causal after keys": ([Window(None, 0)], 8, 12, 4, "# + .\n# # +", None),
    "causal inside a block": ([Window(None, 0)], 8, 12, 1, "+ + .\n# + +", None),
    "causal before keys": ([Window(None, 0)], 12, 8, -4, ". .\n+ .\n# +", None),
    "window": (
        *([Window(7, 0)], 16, 16, 0),
        *("+ . . .\n# + . .\n+ # + .\n. + # +", None),
    ),
    "window a key short of whole blocks": (
        *([Window(6, 0)], 16, 16, 0),
        *("+ . . .\n+ + . .\n+ + + .\n. + + +", None),
    ),
    "window of both sides": (
        *([Window(3, 7)], 16, 16, 0),
        *("# # + .\n+ # # +\n. + # #\n. . + #", None),
    ),
    "window of whole blocks": ([Window(0, None)], 8, 8, 0, "+ #\n. +", None),
    "lengths": ([Lengths(5, 6)], 12, 12, 0, "# + .\n+ + .\n. . .", None),
    "lengths of whole blocks": (
        [Lengths(8, 4)],
        12,
        12,
        0,
        "# . .\n# . .\n. . .",
        None,
    ),
    "a length of keys": ([Lengths(None, 9)], 8, 12, 0, "# # +\n# # +", None),
    "a length of queries": ([Lengths(5, None)], 12, 8, 0, "# #\n+ +\n. .", None),
    "lengths of 0": ([Lengths(0, 0)], 8, 8, 0, ". .\n. .", None),
    "segments of whole blocks": (
        *([_segments([(0, 4), (1, 8)], [(0, 4), (1, 8)])], 12, 12, 0),
        *("# . .\n. # #\n. # #", None),
    ),
    "segments": (
        *([_segments([(0, 6), (1, 6)], [(0, 6), (1, 6)])], 12, 12, 0),
        *("# + .\n+ + +\n. + #", None),
    ),
    "segments without a partner": (
        *([_segments([(0, 4), (1, 4), (2, 4)], [(0, 4), (2, 4)])], 12, 8, 0),
        *("# .\n. .\n. #", None),
    ),
    "segments overhang": (
        *([_segments([(0, 4), (1, 2)], [(0, 4), (1, 3)])], 6, 7, 0),
        *("# .\n. +", None),
    ),
    "one segment, queries overhang": (
        *([_segments([(3, 6)], [(3, 8)])], 6, 8, 0),
        *("# #\n# #", "# #\n+ +"),
    ),
    "unsorted segments": (
        *([_segments([(2, 4), (0, 4)], [(0, 4), (1, 4), (2, 4)])], 8, 12, 0),
        *(". . #\n# . .", None),
    ),
    "mask": (
        [_mask("1 . 1\n. 1 .\n0 1 .", 12, 12)],
        *(12, 12, 0),
        # What lies between two blocks is visited, and full is the first run alone.
        *("# + +\n. # .\n+ # .", "# . #\n+ # .\n+ # ."),
    ),
    "mask, queries overhang": (
        *([_mask("1 1\n1 0", 6, 8)], 6, 8, 0),
        *("# #\n# +", "# #\n+ +"),
    ),
    "mask, keys overhang": (
        *([_mask("1 1\n0 1", 8, 6)], 8, 6, 0),
        *("# +\n+ +", "# #\n+ #"),
    ),
    "causal segments": (
        *([Window(None, 0), _segments([(0, 4), (1, 8)], [(0, 4), (1, 8)])], 12, 12, 0),
        *("+ . .\n. + .\n. # +", None),
    ),
    "causal lengths": (
        *([Window(None, 0), Lengths(12, 7)], 16, 16, 0),
        *("+ . . .\n# + . .\n# + . .\n. . . .", None),
    ),
}


@pytest.mark.parametrize("looped", ["s", "t"])
@pytest.mark.parametrize("name", DRAWN)
def test_visited_blocks(name, looped):
    atoms, t, s, offset, keys, queries = DRAWN[name]
    expected = drawing(queries if looped == "t" and queries else keys)
    assert drawn(atoms, t, s, looped, offset) == expected


@pytest.mark.parametrize("looped", ["s", "t"])
@pytest.mark.parametrize("name", [x for x in DRAWN if "length" in x])
def test_visited_blocks_of_traced_lengths(name, looped):
    """Of arrays, as in a kernel, what Python integers give."""
    atoms, t, s, offset, keys, _ = DRAWN[name]
    atoms = [
        Lengths(*(x if x is None else jnp.int32(x) for x in (a.query, a.key_value)))
        if isinstance(a, Lengths)
        else a
        for a in atoms
    ]
    assert drawn(atoms, t, s, looped, offset) == drawing(keys)


@pytest.mark.parametrize(
    ("window", "starts"),
    [(None, [0, 16, 32]), ((None, 0), [32, 16, 0]), ((3, None), [0, 16, 32])],
)
def test_programs_with_most_keys_start_first(monkeypatch, window, starts):
    """Under a causal mask those of the last rows, so that none is left for the end."""
    q, kv = (Named(jnp.zeros((40, 16)), (rows, "h")) for rows in ("t", "s"))
    layout = memory.BlockGrid(
        [q, kv], parallel=("t",), heads="n", blocks=Blocks(16, 16, 4, 1)
    )
    layout.size["d"] = 16
    masks = () if window is None else (Window(*window),)
    spec = AttentionSpec(Score(1.0), masks)
    found = []
    for i in range(3):
        monkeypatch.setattr(layout, "program_ids", lambda i=i: {"t": jnp.int32(i)})
        _, where, _ = program.query_program(spec, layout)
        found.append(int(where["t"].start))
    assert found == starts


@pytest.mark.parametrize(
    ("window", "causal"),
    [((None, 0), True), ((9, 0), True), ((None, 1), False), ((9, None), False)],
)
def test_windows_that_are_causal(window, causal):
    """There the distance of query and key needs no absolute value."""
    spec = AttentionSpec(Score(1.0), (Lengths(3, 3), Window(*window)))
    assert spec.is_causal == causal
