"""The table of this machine (`python -m jax_flash2.tune`) beside the shipped one.

    python -m jax_flash2.tune --quick --folder=tables
    python -m benchmarks.tuned --folder=tables [--calls="128.*causal"]

Shapes of the FlashAttention papers' grid, forward and both passes, by the default and
by Triton's kernels. Each program is lowered with both tables. Where the two differ,
both are timed side by side in settled clocks: the line of a call gives the medians, and
the time with the shipped table over that with the folder's. The last line gives the
geometric mean over all calls. Keeps no rows.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
from absl import flags

from benchmarks import harness, options
from benchmarks.programs import lower
from benchmarks.shapes import Shape, papers_grid
from jax_flash2 import attention
from jax_flash2.tune.timing import Program
from pallas_kernels import user_tables
from pallas_kernels.mosaic_gpu import measured

_FOLDER = flags.DEFINE_string("folder", None, "Of the tables.", required=True)
_LENGTHS = options.integers("length", "1k,8k", "Sequence lengths, T.")
_HEADS = options.integers("head_size", "64,128", "Head sizes, H.")
_CALLS = flags.DEFINE_string("calls", ".", "Names found by this regular expression.")
_REPEATS = options.repeats(9)
_PASSES = ("forward", "forward_backward")


def lowered(
    shape: Shape, which: str, implementation: str | None, tables: str
) -> jax.stages.Lowered:
    """A pass with the blocks of a folder's tables."""
    os.environ[user_tables.VARIABLE] = tables
    for cached in (user_tables.read, measured.of_gpu):
        cached.cache_clear()
    jax.clear_caches()

    def forward(q, k, v):
        return attention(q, k, v, is_causal=shape.causal, implementation=implementation)

    def both(q, k, v, do):
        out, vjp = jax.vjp(forward, q, k, v)
        return out, vjp(do)

    structs = shape.structs()
    return lower(forward, *structs[:3]) if which == "forward" else lower(both, *structs)


def calls() -> dict[str, tuple[Shape, str, str | None]]:
    """Shape, pass and implementation of each call, by name."""

    def named() -> Iterator[tuple[str, tuple[Shape, str, str | None]]]:
        for shape in papers_grid(_LENGTHS.value, _HEADS.value, grouped=False):
            sizes = f"{shape.batch} x {shape.length}, {shape.heads} x {shape.head_size}"
            for implementation in (None, "triton"):
                for which in _PASSES:
                    words = sizes, "causal" * shape.causal, implementation, which
                    yield " ".join(filter(None, words)), (shape, which, implementation)

    return options.calls_named(_CALLS.value, dict(named()))


def compare(name: str, call, both: list[jax.stages.Compiled]) -> float:
    """Prints the times of a call with both tables; the shipped over the folder's."""
    shape, which, _ = call
    operands = shape.operands()[: 3 if which == "forward" else 4]
    made = {
        table: Program(lambda run=run: run(*operands), jax.block_until_ready)
        for table, run in zip(("shipped", "folder"), both, strict=True)
    }
    timings, failures = harness.time_interleaved(made, rounds=_REPEATS.value)
    if failures:
        raise RuntimeError(f"{name}: {failures}")
    seconds = {x: statistics.median(t.seconds) for x, t in timings.items()}
    ratio = seconds["shipped"] / seconds["folder"]
    times = ", ".join(f"{table} {x * 1e3:.3f} ms" for table, x in seconds.items())
    print(f"{name}: {times}, {ratio:.3f}", flush=True)
    return ratio


def main() -> None:
    ratios = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiling = {}
        for name, call in calls().items():
            both = [
                lowered(*call, tables) for tables in (user_tables.OFF, _FOLDER.value)
            ]
            if both[0].as_text() == both[1].as_text():
                print(f"{name}: the same program", flush=True)
                ratios[name] = 1.0
            else:
                compiling[name] = call, [pool.submit(x.compile) for x in both]
        for name, (call, both) in compiling.items():
            ratios[name] = compare(name, call, [x.result() for x in both])
    slowest = min(ratios, key=lambda name: ratios[name])
    mean = statistics.geometric_mean(ratios.values())
    print(
        f"{len(compiling)} of {len(ratios)} differ; geometric mean {mean:.3f}, ", end=""
    )
    print(f"slowest {ratios[slowest]:.3f} ({slowest})")


if __name__ == "__main__":
    options.launch(main)
