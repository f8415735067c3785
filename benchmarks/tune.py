"""Finds the fastest blocks of every kernel on this GPU.

    python -m benchmarks.tune

Times blocks that fit the GPU, kernel by kernel, for each head size and regime
(`pallas_kernels.tables.REGIMES`), each on a few shapes side by side. Every timing goes
to `tune.jsonl`; the blocks with the smallest geometric mean go into the GPU's table in
`pallas_kernels/tuning`, which the library reads. A table is only as good as the shapes
below; a GPU without one takes the H200's, where it fits.
"""

import collections
import copy
import dataclasses
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import Array

import jax_flash2
from benchmarks import harness, options, programs, records
from benchmarks.harness import Program
from benchmarks.shapes import Shape
from pallas_kernels import configs, device, tables
from pallas_kernels.configs import Blocks, Config
from pallas_kernels.triton import support, tuning

# A table's size serves those below it, too: of 192, 160 is one for keys and values.
_HEAD_SIZES = options.integers("head_sizes", "64,80,96,128,160,256,512", "Sizes, H.")
_REGIMES = options.names("regimes", list(tables.REGIMES), tables.REGIMES, "Which")
_KERNELS = options.names("kernels", list(configs.KERNELS), configs.KERNELS, "Which")
_REPEATS = options.repeats(3)
_BUDGET = flags.DEFINE_float("budget_seconds", None, "Begin nothing after this long.")
_TABLES_DIR = flags.DEFINE_string("tables_dir", str(tables.TUNING), "Of the table.")
_RESULTS_DIR, _COMMIT = options.files()

_TOKENS, _HIDDEN = 16384, 2048
_REGISTERS = 65536  # of a multiprocessor
# New blocks must be this much faster than those in the table to take their place.
_MARGIN = 0.99
# Blocks this much slower than the fastest on the first shape are not tried on others.
_SLOW = 1.2


@dataclasses.dataclass(frozen=True)
class Problem:
    """A shape, and arguments of `attention` beside `is_causal`.

    Attributes:
      static: those that are no arrays.
      arrays: those that are.
      operand: the one array whose gradient is timed too (kernel `dbias`).
      queries: how many, if not as many as keys: the last ones.
    """

    shape: Shape
    static: dict = dataclasses.field(default_factory=dict)
    arrays: dict = dataclasses.field(default_factory=dict)
    operand: str | None = None
    queries: int | None = None

    def rows(self, q: Array, k: Array, v: Array, do: Array) -> tuple[Array, ...]:
        """Query, key, value and the output's gradient of the shape, for its queries."""
        return q[:, : self.queries], k, v, do[:, : self.queries]

    def cut(self, blocks: Blocks) -> Blocks:
        """As the library cuts a table's: no larger than the rows of a group need."""
        if self.queries is None:
            return blocks
        rows = tables.padded(self.queries * self.shape.group)
        return dataclasses.replace(blocks, block_q=min(blocks.block_q, rows))


def problems(regime: str, head_size: int) -> list[Problem]:
    """What the blocks of a regime are chosen on."""
    # Enough for more than a few programs.
    hidden_heads = max(16, _HIDDEN // head_size)

    def shape(length, causal=True, heads=hidden_heads, batch=None, dtype="bfloat16"):
        batch = batch or _TOKENS // length
        return Shape(batch, length, heads, heads, head_size, causal, dtype)

    documents = np.arange(8192) // 1024
    rows = jnp.asarray(np.broadcast_to(documents, (2, 8192)), jnp.int32)
    if regime == "plain":
        cases = [(2048, False), (4096, True), (4096, False)]
        alibi = {"alibi_slopes": jnp.exp2(-jnp.arange(1.0, hidden_heads + 1))}
        return [
            *(Problem(shape(*case)) for case in cases),
            Problem(shape(4096), arrays=alibi, operand="alibi_slopes"),
        ]
    if regime == "long":
        cases = [(8192, True), (_TOKENS, True), (_TOKENS, False)]
        return [Problem(shape(*case)) for case in cases]
    if regime == "single":
        return [Problem(shape(_TOKENS, x, heads=1, batch=1)) for x in (True, False)]
    if regime == "few":
        cases = [(2, True), (4, False), (8, True)]
        return [Problem(shape(_TOKENS, x, heads=n, batch=1)) for n, x in cases]
    if regime == "short":
        return [
            Problem(shape(8192), arrays={"query_segment_ids": rows}),
            Problem(shape(8192), arrays={"query_segment_ids": jnp.zeros_like(rows)}),
            Problem(shape(8192), {"local_window_size": (1023, None)}),
            Problem(shape(1024)),
        ]
    if regime == "whole":
        lengths = jnp.asarray(np.arange(1, 1 + _TOKENS // 512) * 16, jnp.int32)
        return [
            Problem(shape(512, False)),
            Problem(shape(512, False), arrays={"key_value_seq_lengths": lengths}),
        ]
    if regime == "decode":
        return [
            Problem(Shape(b, s, 32, k, head_size, True, "bfloat16"), queries=t)
            for b, t, s, k in ((16, 1, 8192, 8), (1, 1, 65536, 8), (4, 8, 8192, 8))
        ]
    if regime == "heavy":
        mask = harness.random_mask(4096)
        return [
            Problem(shape(4096), arrays={"mask": mask}),
            Problem(shape(4096), {"logits_soft_cap": 30.0}),
        ]
    if regime == "dropout":
        key = jax.random.PRNGKey(0)
        return [Problem(shape(4096), {"dropout_rate": 0.1}, {"dropout_rng": key})]
    if regime == "bias":
        # One that fits the GPU's cache, and one that does not.
        draw = functools.partial(jax.random.normal, jax.random.key(0))
        biases = [draw((1, n, 4096, 4096), jnp.bfloat16) for n in (1, hidden_heads)]
        return [
            Problem(shape(4096), arrays={"bias": b}, operand="bias") for b in biases
        ]
    precision = "highest" if regime == "float32 highest" else "default"
    return [Problem(shape(4096, dtype="float32"), {"precision": precision})]


def kernels(regime: str, head_size: int) -> list[str]:
    if head_size > 256 and regime not in ("plain", "float32"):
        return []  # as those
    names = (
        ["forward"] if regime == "decode" else tuning.kernels((head_size, head_size))
    )
    with_operand = regime in ("plain", "bias")
    return [name for name in names if name != "dbias" or with_operand]


def itemsize(regime: str) -> float:
    sizes = {"float32": 4, "float32 highest": tuning.SPLIT_ITEMSIZE}
    return sizes.get(regime, 2)


def candidates(kernel: str, head_size: int, regime: str) -> list[Blocks]:
    """Blocks that fit shared memory, and registers by a rough count; the table's first.

    The rows of the block that a program owns are divided among its warps, 16 each. What
    is too small to be fast is left out.
    """
    heads, size = (head_size, head_size), itemsize(regime)
    limit = device.shared_memory_limit()
    pair_bytes = {"bias": 2, "heavy": 1}.get(regime, 0)
    options = {"rows": (1 << 20, 1 << 20), "heads": heads, "itemsize": size}
    options |= {"pair_bytes": pair_bytes, "gpu": device.device_kind()}
    room = {"limit": limit, "columns": device.tensor_memory_columns()}
    room |= {"dropout": regime == "dropout"}
    options |= room
    keeps_left = support.reads_left_from_shared_memory()
    options |= {"keeps_left": keeps_left}
    found = [tuning.choose(kernel, None, regime=regime, **options)]
    if regime == "decode":  # its block of queries holds them all
        shapes = itertools.product([64], (32, 64, 128, 256), (1, 2, 4, 8), (2, 3, 4))
        found += itertools.starmap(Blocks, shapes)
        return [
            blocks
            for blocks in dict.fromkeys(found)
            if tuning.fits(kernel, blocks, heads, size, **room)
        ]
    rows = (16, 32, 64, 128, 256)
    half = size == 2 and head_size <= 256
    left = tuning.LEFT[kernel] if half and keeps_left else 0
    shapes = itertools.product(rows, rows[:-1], (4, 8, 16), (1, 2, 3))
    for sizes, kept in itertools.product(shapes, range(left + 1)):
        blocks = Blocks(*sizes, left_in_registers=kept)
        own, other = blocks.block_q, blocks.block_kv
        if kernel in ("dkv", "dk", "dv"):
            own, other = other, own
        accumulators = 2 if kernel == "dkv" else 0 if kernel == "dbias" else 1
        scores = 1 if kernel in ("forward", "dv") else 2
        values = own * (accumulators * head_size + scores * other)
        values += own * kept * head_size / 2
        each = values / (32 * blocks.num_warps)  # of a thread's 255 registers
        need = tuning.shared_memory(kernel, blocks, heads, size, pair_bytes)
        large = 2**12 if half and head_size <= 128 else 2**10
        if half and (own < 16 * blocks.num_warps or other < 32):
            continue
        if head_size <= 128 and half and blocks.num_stages == 1:
            continue
        if not tuning.fits(kernel, blocks, heads, size, pair_bytes, **room):
            continue
        if 64 <= each <= 208 and large <= own * other <= 2**14:
            found.append(blocks)
            # Registers for as many programs as shared memory has room for: it is 1 KiB
            # larger than a program may use, and each takes 1 KiB more than it uses.
            programs = (limit + 1024) // (need + 1024)
            most = _REGISTERS // (32 * blocks.num_warps * programs) // 8 * 8
            if each + 24 <= most <= 248:
                found.append(dataclasses.replace(blocks, max_registers=most))
    return list(dict.fromkeys(found))


def lowered(
    problem: Problem, kernel: str, blocks: Blocks, arguments
) -> jax.stages.Lowered:
    """A pass that runs `kernel`, of the arguments that `_arguments` gives."""
    config = Config(**{kernel: problem.cut(blocks)})
    if kernel == "forward":
        return programs.lower(_attention(problem, config), *arguments)
    # The residuals are the same whatever the blocks; only the tree knows of them.
    structs = jax.eval_shape(problem.rows, *problem.shape.structs())
    inputs = [*structs[:3], *problem.arrays.values()]
    saving = _saving(problem, kernel, config)
    tree = jax.tree.structure(jax.eval_shape(saving, *inputs))
    wanted = {"dq": [0], "dkv": [1, 2], "dk": [1], "dv": [2], "dbias": [3]}[kernel]

    def backward(saved, do):
        gradients = tree.unflatten(saved)(do)
        return [gradients[i] for i in wanted]

    return programs.lower(backward, *arguments)


def _arguments(problem: Problem, kernel: str) -> list:
    """Of `lowered`: the inputs, or what a forward saved and the output's gradient."""
    q, k, v, do = problem.rows(*problem.shape.operands())
    inputs = [q, k, v, *problem.arrays.values()]
    if kernel == "forward":
        return inputs
    return [jax.tree.leaves(jax.jit(_saving(problem, kernel, None))(*inputs)), do]


def _attention(problem: Problem, config: Config | None):
    """Of q, k, v and the problem's arrays."""

    def attention(q, k, v, *arrays):
        offset = k.shape[1] - q.shape[1]
        return jax_flash2.attention(
            *(q, k, v), is_causal=problem.shape.causal, query_offset=offset,
            implementation="triton", config=config, **problem.static,
            **dict(zip(problem.arrays, arrays, strict=True)),
        )  # fmt: skip

    return attention


def _saving(problem: Problem, kernel: str, config: Config | None):
    """Of the same; the backward pass, for `operand` with that array's gradient too."""
    attention, own = _attention(problem, config), 4 if kernel == "dbias" else 3
    return lambda *x: jax.vjp(lambda *y: attention(*y, *x[own:]), *x[:own])[1]


def _time(problem: Problem, kernel: str, blocks: Iterable[Blocks], rounds: int):
    """Timings by blocks, and failures."""
    arguments = _arguments(problem, kernel)
    compiling, running, failures = {}, {}, {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for b in blocks:
            compiling[b] = pool.submit(lowered(problem, kernel, b, arguments).compile)
    for b, future in compiling.items():
        try:
            compiled = future.result()
        except Exception as error:  # blocks that do not compile are a result
            failures[b] = harness.describe(error)
            continue
        running[b] = Program(
            lambda compiled=compiled: compiled(*arguments),
            jax.block_until_ready,
            lambda results: {},
            memory={},
        )
    # There are many, and they draw about as much power as each other.
    timings, later = harness.time_interleaved(
        running, rounds=rounds, min_seconds=0.01, settle_seconds=0.02
    )
    return timings, {**failures, **later}


def measure(run: records.Run, regime: str, kernel: str, head_size: int, rounds: int):
    """Rows of all blocks of a kernel in a regime.

    Of those slow on the first problem only that is known.
    """
    blocks = candidates(kernel, head_size, regime)
    for problem in problems(regime, head_size):
        if kernel == "dbias" and problem.operand is None:
            continue
        timings, failures = _time(problem, kernel, blocks, rounds)
        for b in blocks:
            row = {"shape": asdict(problem.shape), "pass": kernel, "peer": regime}
            row |= {"feature": _numbers(b), "failure": failures.get(b)}
            row |= {"arguments": [*problem.static, *problem.arrays]}
            row |= timings[b].row() if b in timings else {}
            yield run.write(row)
        seconds = {b: timings[b].row()["seconds"] for b in timings}
        limit = _SLOW * min(seconds.values())
        blocks = [b for b in blocks if b == blocks[0] or seconds.get(b, limit) < limit]


def _numbers(blocks: Blocks) -> list[int | None]:
    """As in a table: without what is left out of `Blocks`."""
    numbers = list(dataclasses.astuple(blocks))
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def best(rows: Iterable[dict]) -> dict[tuple[str, int, str], list[int]]:
    """The fastest blocks by (kernel, head size, regime).

    The first of a regime's blocks, those of the table, stay unless others are faster by
    a margin.
    """
    seconds: dict = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        at = row["pass"], row["shape"]["head_size"], row["peer"]
        found = row.get("seconds", math.inf)
        seconds[at][tuple(row["feature"])].append(found)

    def mean(times):
        return math.exp(sum(map(math.log, times)) / len(times))

    chosen = {}
    for at, timings in seconds.items():
        most = max(map(len, timings.values()))
        means = {b: mean(times) for b, times in timings.items() if len(times) == most}
        now = next(iter(means))
        fastest = min(means, key=lambda b: means[b])
        better = means[fastest] < _MARGIN * means[now]
        chosen[at] = list(fastest if better else now)
    return chosen


def write_table(path: Path, gpu: str, made: dict, chosen: dict) -> None:
    """Puts blocks into the table of a GPU; what it has of others stays."""
    # A GPU's first table begins as the one that the library takes for it.
    known = json.loads(path.read_text())["blocks"] if path.exists() else None
    blocks = copy.deepcopy(known or tables.table("triton", gpu))
    for (kernel, head_size, regime), found in chosen.items():
        blocks[kernel][str(tables.bucket(head_size))][regime] = found
    lines = []
    for kernel, heads in blocks.items():
        inner = (f'      "{h}": {json.dumps(regimes)}' for h, regimes in heads.items())
        lines.append(f'    "{kernel}": {{\n' + ",\n".join(inner) + "\n    }")
    head = json.dumps({"gpu": gpu, **made}, indent=2)[:-2]
    path.write_text(head + ',\n  "blocks": {\n' + ",\n".join(lines) + "\n  }\n}\n")


def main():
    gpu = device.device_kind()
    if gpu is None:
        raise SystemExit("benchmarks.tune times kernels on a GPU: there is none here")
    begun = time.monotonic()
    run = records.Run.start("tune", _RESULTS_DIR.value, commit=_COMMIT.value)
    wanted = [
        (regime, kernel, head_size)
        for regime in _REGIMES.value
        for head_size in _HEAD_SIZES.value
        for kernel in kernels(regime, head_size)
        if kernel in _KERNELS.value
    ]
    rows: list[dict] = []
    with options.Progress(len(wanted), "kernel") as progress:
        for count, (regime, kernel, head_size) in enumerate(wanted):
            if _BUDGET.value and time.monotonic() - begun > _BUDGET.value:
                progress.say(f"time is spent: {len(wanted) - count} not begun")
                break
            found = list(measure(run, regime, kernel, head_size, _REPEATS.value))
            ((at, chosen),) = best(found).items()
            rows += found
            tried = len({tuple(row["feature"]) for row in found})
            progress.step(f"{at}: {chosen} of {tried}, now {found[0]['feature']}")
    path = Path(_TABLES_DIR.value) / tables.table_path("triton", gpu).name
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {name: run.facts[name] for name in ("date", "commit", "versions")}
    write_table(path, gpu, made, best(rows))
    print(f"\n{run.path}\n{path}")


if __name__ == "__main__":
    options.launch(main)
