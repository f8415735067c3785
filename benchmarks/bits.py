"""Whether a row has the same bits however its sequence is cut (`Config.invariant`).

    python -m benchmarks.bits                  on a GPU: for each dtype and head size
    python -m benchmarks.bits --quick          anywhere: small, interpreted kernels

A line for each way in which a causal sequence is cut: the number of elements of output
and log-sum-exp that differ from those of one call of all rows, and the largest
difference. Those of `Config(invariant=True)` must be 0: exits with 1 if one is not. The
others say what no promise covers: tiles of 16 and of 64 rows (on Hopper mma.sync and
wgmma), Triton's kernels and those of Mosaic GPU on one block of keys, and calls without
the promise.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import options
from jax_flash2 import Blocks, Config, attention, paged_attention

_QUICK = flags.DEFINE_bool("quick", False, "One small shape, by interpreted kernels.")
_DTYPES = flags.DEFINE_list("dtypes", ["bfloat16", "float16", "float32"], "Of inputs.")
_HEADS = options.integers("heads", "64,128,256", "Head sizes.")
_ROWS = options.integers("rows", "4500", "Rows of a sequence.")

Results = tuple[jax.Array, jax.Array]


class Cut(NamedTuple):
    """Results of some rows, and what they are compared with."""

    name: str
    found: Results
    expected: Results
    is_promised: bool


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A causal sequence of two batch entries, with grouped heads.

    Attributes:
      dtype: of the operands.
      head: their head size.
      rows: of each entry.
      interpret: whether Triton kernels are interpreted.
    """

    dtype: str
    head: int
    rows: int
    interpret: bool

    def operands(self) -> list[jax.Array]:
        rng = np.random.default_rng(0)
        shapes = ((2, self.rows, heads, self.head) for heads in (8, 2, 2))
        return [jnp.asarray(2 * rng.standard_normal(x), self.dtype) for x in shapes]

    def call(self, function: Callable, backend: str = "triton", **fields: Any):
        interpret = self.interpret and backend == "triton"
        config = Config(interpret=interpret, **fields)
        more = {"implementation": backend, "config": config, "return_residual": True}
        return jax.jit(functools.partial(function, is_causal=True, **more))

    def pages(self, page: int) -> list[jax.Array]:
        """Keys and values in pages that lie in any order, and the table."""
        _, *pools = self.operands()
        count = -(-self.rows // page)
        order = np.random.default_rng(1).permutation(2 * count)
        width = [(0, 0), (0, count * page - self.rows), (0, 0), (0, 0)]
        found = [
            jnp.pad(x, width).reshape(2 * count, page, 2, self.head)[np.argsort(order)]
            for x in pools
        ]
        return [*found, jnp.asarray(order.reshape(2, count), jnp.int32)]

    def cuts(self) -> Iterator[Cut]:
        q, k, v = self.operands()
        t = self.rows
        for promised in (True, False):
            call = self.call(attention, invariant=promised)
            paged = self.call(paged_attention, invariant=promised)
            whole = call(q, k, v)
            mark = "invariant" if promised else "not asked for"

            def cut(name, found, first, end, b=slice(None), whole=whole, mark=mark):
                expected = whole[0][b, first:end], whole[1][b, first:end]
                return Cut(f"{mark}: {name}", found, expected, mark == "invariant")

            for size in (1, 8, 64, 100):
                found = call(q[:, t - size :], k, v, query_offset=t - size)
                yield cut(f"the last {size} rows", found, t - size, t)
            half = t // 2
            found = call(q[:, :half], k[:, :half], v[:, :half])
            yield cut("a prefix, and its keys alone", found, 0, half)
            found = call(q[1:], k[1:], v[1:])
            yield cut("one of the batch", found, 0, t, slice(1, None))
            for page in (16, 64):
                for size in (1, 64):
                    lengths = jnp.full(2, t)
                    found = paged(q[:, t - size :], *self.pages(page), lengths)
                    yield cut(f"{size} rows, pages of {page}", found, t - size, t)
        yield from self.parts(q, k, v)
        yield from self.tiles(q, k, v)

    def parts(self, q, k, v) -> Iterator[Cut]:
        """One program for all parts of the keys of a row, or one for each."""
        t = self.rows
        one = self.call(attention, invariant=True, splits=1)
        each = self.call(attention, invariant=True)
        last = q[:1, t - 1 :], k[:1], v[:1]
        found, expected = (x(*last, query_offset=t - 1) for x in (each, one))
        yield Cut("invariant: parts in programs of their own", found, expected, True)

    def tiles(self, q, k, v) -> Iterator[Cut]:
        """What other tiles, and other kernels, make of one block of keys."""
        blocks = functools.partial(Blocks, block_kv=64, num_warps=4, num_stages=1)
        q, k, v = q[:, :64], k[:, :64], v[:, :64]
        few, many = (
            self.call(attention, invariant=True, forward=blocks(rows))(q, k, v)
            for rows in (16, 64)
        )
        yield Cut("tiles of 16 rows against 64", few, many, False)
        if not self.interpret and self.dtype != "float32":
            try:
                other = self.call(attention, "mosaic_gpu")(q, k, v)
            except ValueError as error:
                print(f"  mosaic_gpu: {error}")
                return
            yield Cut("Mosaic GPU against Triton", other, many, False)


def differing(found: Results, expected: Results) -> tuple[int, float]:
    """How many elements differ, and by how much at most."""
    pairs = [
        [np.asarray(x, np.float32) for x in pair]
        for pair in zip(found, expected, strict=True)
    ]
    count = sum(int(np.sum(x != y)) for x, y in pairs)
    return count, max(float(np.max(np.abs(x - y))) for x, y in pairs)


def main():
    quick = _QUICK.value
    if not quick and jax.default_backend() != "gpu":
        sys.exit("benchmarks.bits: there is no GPU here; --quick interprets kernels")
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    broken = 0
    for dtype in ["float32"] if quick else _DTYPES.value:
        for head in [16] if quick else _HEADS.value:
            for rows in [130] if quick else _ROWS.value:
                print(f"{dtype}, head size {head}, {rows} rows", flush=True)
                for name, found, expected, is_promised in Sequence(
                    dtype, head, rows, interpret=quick
                ).cuts():
                    count, most = differing(found, expected)
                    broken += bool(count and is_promised)
                    words = f"{count} differ, by {most:.2g}" if count else "equal"
                    print(f"  {name}: {words}", flush=True)
    sys.exit(f"{broken} promises are broken" if broken else 0)


if __name__ == "__main__":
    options.launch(main)
