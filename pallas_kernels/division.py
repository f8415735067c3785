"""How the work of a call is divided over programs, and how parts are put together.

A kernel has a program for each block of its own rows, head and batch entry. Where those
are fewer than the GPU runs at once, its multiprocessors stand idle. What then happens
follows from counts and from the number of multiprocessors, here for every kernel of
every backend:

- `Packing`: with few queries, the query heads of a group become rows of one block, so
  that keys and values are read once for the group.
- `y`: what a program would loop over besides blocks (the query heads of a group, or the
  heads and batch entries that an operand is broadcast over) is divided over programs.
- `z`: so is the range of blocks that it would visit.

The parts of a result are float32. They are put together in one order, so that the same
inputs give the same bits: outputs by their log-sum-exps (`flash2.merge`), gradients by
sums. Where the division is chosen here there are at most sixteen tiles of parts for
each multiprocessor, so that their memory does not grow with the call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import device, tables
from pallas_kernels.core.axes import Axes, Heads, Named, is_numbered, sizes
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.tables import FEW_ROWS

PARTS = ("y", "z")
# Tiles of parts for each multiprocessor.
_MOST_TILES = 16
# Parts that are tried to avoid a last turn of few programs, and the part of the time
# without them that they must take at most: results are put together afterwards.
_FEW_PARTS, _GAIN_OF_PARTS = 3, 0.96
# As `_MOST_TILES`, of such a call, whose number of parts is fixed.
_MOST_FIXED_TILES = 64


def number(name: str) -> int:
    """A number of the table that all kernels have.

    enough_programs: programs for each multiprocessor from which on parts would cost
    more than they bring. waves: those that loops over heads are divided to make: some
    have less to do than others, and those that are left over should be short.
    fewest_blocks: blocks of keys or queries that a part of a range has at least.
    fewest_few_blocks: the same, if blocks have few rows.
    filled_part: the part of the GPU that programs fill if ranges need no division.
    dense_loop_blocks, paged_loop_blocks, byte_loop_blocks: blocks of keys that one of
    few rows visits in one loop at most: in order, in pages, or of elements of one byte.
    few_programs, byte_programs: for each multiprocessor, those that ranges are divided
    to make if blocks have few rows; the second, if keys or values have one byte.
    longest_part: keys that a part of a table of pages has at most, if blocks have few
    rows: sequences may be much longer than others, and none should be left at the end.
    paged_programs: for each multiprocessor, those of such a call that run at once.
    last_turn: the part of the time of a turn of so many programs that one of a few
    takes at least; 0 where it is not known.
    """
    return tables.number("triton", name)


def parts(
    programs: int,
    elements: int,
    blocks: int,
    *,
    splits: int | None,
    few_rows: int = 0,
    waves: int | None = None,
    longest: int | None = None,
    even_turns: bool = False,
    at_once: int | None = None,
) -> dict[str, int]:
    """Into how many parts the work of each program is divided, by axis.

    Args:
      programs: before.
      elements: heads, or heads and batch entries, that one of them loops over.
      blocks: of keys or queries that it visits at most for each; 1 if it owns both.
      splits: how many parts there are to be (`configs.Config`); None chooses.
      few_rows: of a block of few rows, which waits for memory most of the time, how
        many programs each multiprocessor is to have; 0 of others.
      waves: programs for each multiprocessor that heads are divided to make; None for
        the table's.
      longest: blocks that a part has at most, if that does not make too many parts;
        None for any number.
      even_turns: whether it is known how many programs run at once, and a last turn of
        a few of them is to be avoided.
      at_once: programs for each multiprocessor that run at the same time; None for the
        table's.

    Returns:
      The sizes of the axes of `PARTS` that are not 1.
    """
    if not programs or not blocks:
        return {}
    if splits is not None:
        y = math.gcd(splits, elements) if blocks > 1 else min(splits, elements)
        z = splits // y if blocks > 1 else 1
    else:
        gpu = device.multiprocessors()
        at_once = gpu * (at_once or number("paged_programs"))
        y = z = 1
        waves = number("waves") if waves is None else waves
        if programs < number("enough_programs") * gpu:
            y = -(-elements // _run(elements, elements * programs // (waves * gpu)))
        room = gpu * max(1, few_rows)
        fewest = number("fewest_few_blocks" if few_rows else "fewest_blocks")
        if programs * y < number("filled_part") * room:
            z = max(1, min(blocks // fewest, room // (programs * y)))
        if longest is not None:
            most = _MOST_TILES * gpu // (programs * y)
            least = min(blocks // longest, most)
            most = min(most, max(least, blocks // number("fewest_blocks")))
            z = min(_filling(programs * y, least, at_once), most) if least > z else z
        if even_turns and y == z == 1:
            z = _even_turns(programs, blocks // number("fewest_blocks"), at_once)
    return {name: n for name, n in zip(PARTS, (y, z), strict=True) if n > 1}


def _filling(programs: int, least: int, at_once: int) -> int:
    """Into how many parts programs are divided so that as many as run at once end.

    Where 396 programs run at once, four parts of 128 took 1.08 times as long as six
    (NVIDIA H200, 16 x 32,768 keys, 8 heads of 128, pages of 64, 2026-11-28: lab 122).

    Args:
      least: parts that there are to be.
      at_once: programs that run at the same time.
    """
    turns = -(-programs * least // at_once)
    return turns * at_once // programs


def _even_turns(programs: int, most: int, at_once: int) -> int:
    """Into how many parts programs are divided if few would be left for a last turn.

    Of 512 programs 396 run at once. In two parts they took 248 us, not 258, and 384
    took longer in parts than without (NVIDIA H200, 64 and 48 x 4,096 keys, 8 heads of
    128, pages of 64, 2026-11-28: lab 124).

    Args:
      most: parts that there may be.
      at_once: as of `_filling`.
    """

    def time(parts: int) -> float:
        turns, rest = divmod(programs * parts, at_once)
        rest = max(rest / at_once, number("last_turn")) if rest else 0.0
        return (turns + rest) / parts

    best = min(range(1, 1 + max(1, min(most, _FEW_PARTS))), key=time)
    return best if time(best) < _GAIN_OF_PARTS * time(1) else 1


def fixed_parts(found: Mapping[str, int], programs: int, count: int) -> dict[str, int]:
    """`parts`, with the keys in `count` parts at fixed places or in none.

    Args:
      found: what `parts` gave for a call without such places.
      programs: before.
      count: of the parts of all keys. The results are the same where a program
        computes all of them, one after the other.
    """
    few = programs * count <= _MOST_FIXED_TILES * device.multiprocessors()
    return {"z": count} if found.get("z", 1) > 1 < count and few else {}


def _run(elements: int, most: int) -> int:
    """How many elements a part has: at most `most`, and all parts alike if they can."""
    alike = (n for n in range(most, most // 2, -1) if elements % n == 0)
    return next(alike, max(1, most))


def check(splits: int | None, keys: int) -> None:
    """Raises a ValueError if a call with so many keys cannot be divided so often."""
    most = max(1, -(-keys // 16))
    if splits is not None and splits > most:
        raise ValueError(
            f"config=Config(splits={splits}) does not fit {keys} keys: a part has a "
            f"block of 16 at least, so splits must be from 1 to {most}"
        )


def words(kernel: str, count: Mapping[str, int]) -> str:
    """What `parts` gave for a kernel, for a reader; empty if nothing is divided."""
    visited = "queries" if kernel in ("dkv", "dk", "dv") else "keys"
    looped = "heads and batch entries" if kernel == "dbias" else "heads of a group"
    names = {"y": looped, "z": visited}
    found = [f"{names[axis]} in {n} parts" for axis, n in count.items()]
    return f"{kernel}: {', '.join(found)}" if found else ""


def partial(output: Named, count: Mapping[str, int]) -> Named:
    """The shape struct of the parts of a result."""
    if not count:
        return output
    struct = jax.ShapeDtypeStruct((*count.values(), *output.shape), jnp.float32)
    return Named(struct, (*count, *output.axes))


def summed(found: Sequence[Named], outputs: Sequence[Named]) -> tuple[jax.Array, ...]:
    """Gradients from their parts."""
    pairs = zip(found, outputs, strict=True)
    return tuple(x.summed(PARTS).value.astype(out.dtype) for x, out in pairs)


@dataclasses.dataclass(frozen=True)
class Packing:
    """Query heads of a group as rows: row t * group + g is head g of query t.

    There is then one query head for each key/value head.
    """

    heads: Heads
    queries: int

    @classmethod
    def of(cls, q: Named, k: Named, spec: AttentionSpec) -> Packing | None:
        """What fits a call, or None where its heads stay apart."""
        size = sizes([q, k])
        heads = Heads.of(size)
        rows = size["t"] * heads.group
        # Bits of dropout are made for sixteen rows that lie together, and a block reads
        # elements of one table.
        is_apart = spec.dropout is not None or _has_tables_of_heads(spec)
        if heads.group == 1 or rows > FEW_ROWS or is_apart:
            return None
        return cls(heads, size["t"])

    def array(self, x: Named) -> Named:
        """An operand with its rows packed; what varies by head varies by row."""
        x = self.heads.split(x.squeezed())
        if not {"g", "t"} & set(x.axes):
            return x.renamed("k", "n")
        place = "g" if "g" in x.axes else "t"
        rows = (
            ("t", "g") if a == place else (a,) for a in x.axes if a != _other(place)
        )
        axes = tuple(a for pair in rows for a in pair)
        size: dict[Any, int] = {"t": self.queries, "g": self.heads.group}
        value = x.to(axes)
        shape = [size.get(a, n) for a, n in zip(axes, value.shape, strict=True)]
        found = Named(jnp.broadcast_to(value, shape), axes)
        return found.joined("t", "g").renamed("k", "n")

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        packed = jax.tree.map(self.array, spec)
        return dataclasses.replace(packed, repeat=self.heads.group)

    def struct(self, output: Named) -> Named:
        """Of a result whose rows are packed."""
        size: dict[Any, int] = dict(sizes([output]))
        size |= {
            "n": size["n"] // self.heads.group,
            "t": self.queries * self.heads.group,
        }
        pairs = (("n", "t") if a == "n" else (a,) for a in output.axes if a != "t")
        axes = tuple(a for pair in pairs for a in pair)
        struct = jax.ShapeDtypeStruct([size[a] for a in axes], output.dtype)
        return Named(struct, axes)

    def unpacked(self, x: Named, axes: Axes) -> jax.Array:
        """A result as it would be with heads apart."""
        x = x.renamed("n", "k").split("t", "g", self.heads.group)
        return self.heads.merge(x.ordered(self.heads.split_axes(axes))).to(axes)


def _has_tables_of_heads(spec: AttentionSpec) -> bool:
    axes = [x.squeezed().axes for x in jax.tree.leaves(spec)]
    return any("n" in own and any(map(is_numbered, own)) for own in axes)


def _other(place: str) -> str:
    return "t" if place == "g" else "g"


def varying_like(struct: jax.ShapeDtypeStruct, x: jax.Array) -> jax.ShapeDtypeStruct:
    """A result's struct for a kernel, which inside `shard_map` must say more."""
    axes = jax.typeof(x).manual_axis_type
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, manual_axis_type=axes)
