"""`score_mod` and `mask_mod` beside FlexAttention, over its own kind of examples.

    python -m benchmarks.functions                         # an hour of compiling
    python -m benchmarks.functions --lengths=8k --head_sizes=128 --calls="window|causal"

B x T is 16384 and N x H is 2048, in bfloat16. FlexAttention is torch's, compiled, with
its block mask made before. Ours makes what it needs in the call. Forward, and forward
with the gradients of query, key and value; with "its gradient" that of the table, too.
Programs are timed side by side. Results of rows of at most 2048 are compared with exact
ones, longer ones with each other. Several processes can share the work
(--part, --run_id). Rows go to `functions.jsonl`.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import jax_flash2
from benchmarks import harness, options, programs, records, tables
from benchmarks.function_calls import Example, examples
from benchmarks.harness import Program
from benchmarks.peers import OURS
from jax_flash2.tune.problems import Shape

_LENGTHS = options.integers("lengths", "2k,8k,32k", "Sequence lengths, T.")
_SIZES = options.integers("head_sizes", "64,128", "H.")
_TOKENS = options.integers("tokens", "16k", "B x T, of rows that are not longer.")
_WIDTH = options.integers("width", "2k", "N x H.")
_CALLS = flags.DEFINE_string("calls", "", "A regular expression: these examples alone.")
_REPEATS = options.repeats(7)
_PART = options.part()
_RESULTS_DIR, _COMMIT = options.files()

FLEX = "FlexAttention (torch)"
PASSES = "forward", "forward_backward"
_CHECKED = 2048  # rows of which exact results fit into memory
# Parts of a row by which an output and a gradient may be off. Where few keys share a
# row most of dq cancels, and what is left is of the rounding of the output.
_ALLOWED = 2.0**-5, 2.0**-3


def ours(example: Example, **options) -> Callable:
    """The call, of query, key, value and the arrays."""

    def call(q, k, v, arrays):
        score_mod, mask_mod = example.functions(jnp, arrays)
        return jax_flash2.attention(
            q, k, v, score_mod=score_mod, mask_mod=mask_mod, **options
        )

    return call


def passes(example: Example, call: Callable) -> dict[str, Callable]:
    """Functions of (query, key, value, output gradient, arrays)."""

    def forward(q, k, v, do, arrays):
        return (call(q, k, v, arrays),)

    def both(q, k, v, do, arrays):
        def of_operand(q, k, v, x):
            own = {example.operand: x} if example.operand else {}
            return call(q, k, v, {**arrays, **own})

        x = arrays[example.operand] if example.operand else None
        out, vjp = jax.vjp(of_operand, q, k, v, x)
        return (out, *(x for x in vjp(do) if x is not None))

    return dict(zip(PASSES, (forward, both), strict=True))


def _as_arrays(results: Sequence) -> dict[str, np.ndarray]:
    """Of [B, T, N, H]: the last sequence, so that what is compared stays small."""
    arrays = [np.asarray(x[-1:] if x.ndim == 4 else x, np.float32) for x in results]
    return {str(i): x for i, x in enumerate(arrays)}


def _jax_program(compiled: jax.stages.Compiled, arguments: tuple) -> Program:
    programs.check_fits(compiled)
    run = functools.partial(compiled, *arguments)
    used = programs.memory(compiled)
    return Program(run, jax.block_until_ready, _as_arrays, used)


def _flex_program(shape: Shape, example: Example, which: str, operands) -> Program:
    """Torch compiles at the first call, which is made here."""
    import torch
    from torch.nn.attention import flex_attention as flex

    arrays = {n: torch.from_numpy(x).cuda() for n, x in example.arrays.items()}
    score_mod, mask_mod = example.functions(torch, arrays)
    rows = shape.length, shape.length
    block_mask = flex.create_block_mask(mask_mod, None, None, *rows, device="cuda")
    torch._dynamo.reset()  # it gives up after a few functions in one process
    torch.cuda.empty_cache()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    owned = (torch.from_dlpack(x).transpose(1, 2) for x in operands)
    *inputs, do = (x.clone(memory_format=torch.contiguous_format) for x in owned)
    wanted = [*inputs, *(arrays[n] for n in [example.operand] if n)]

    def attention():
        return compiled(*inputs, score_mod=score_mod, block_mask=block_mask)

    def forward():
        with torch.no_grad():
            return (attention(),)

    def both():
        out = attention()
        return (out, *torch.autograd.grad(out, wanted, do))

    for x in wanted:
        x.requires_grad_(which != "forward")
    call = forward if which == "forward" else both
    before = torch.cuda.memory_allocated()
    call()

    def results(found) -> dict[str, np.ndarray]:
        found = (x.detach().float().cpu().numpy() for x in found)
        return _as_arrays([x.swapaxes(1, 2) if x.ndim == 4 else x for x in found])

    used = programs.torch_memory(torch, call, before)
    return Program(call, lambda _: torch.cuda.synchronize(), results, used)


def _exact(example: Example, operands, arrays) -> dict[str, np.ndarray]:
    whole = {"implementation": "reference", "precision": "highest"}
    function = passes(example, ours(example, **whole))["forward_backward"]
    wide = [x[-1:].astype(jnp.float32) for x in operands]
    if example.operand:  # its gradient is of all sequences
        wide = [x.astype(jnp.float32) for x in operands]
    return _as_arrays(jax.jit(function)(*wide, arrays))


def rows_of(shape: Shape, name: str, *, rounds: int) -> list[dict]:
    """Two rows, of both peers, for each pass."""
    example, operands = examples(shape)[name], shape.operands()
    arrays = jax.tree.map(jnp.asarray, dict(example.arrays))
    started: dict[tuple[str, str], Program] = {}
    failures: dict[tuple[str, str], str] = {}

    def attempt(which: str, peer: str, start: Callable[[], Program]) -> None:
        try:
            started[which, peer] = start()
        except Exception as error:  # a peer's failure is a result
            failures[which, peer] = harness.describe(error)

    with harness.compiling(), ThreadPoolExecutor(os.cpu_count()) as pool:
        own, arguments = passes(example, ours(example)), (*operands, arrays)
        lowered = {x: programs.lower(own[x], *arguments) for x in PASSES}
        compiling = {x: pool.submit(lowered[x].compile) for x in PASSES}
        for x in PASSES:
            attempt(x, FLEX, lambda x=x: _flex_program(shape, example, x, operands))
        for x in PASSES:
            attempt(x, OURS, lambda x=x: _jax_program(compiling[x].result(), arguments))
    with harness.alone():
        found = {at: p.results(p.call()) for at, p in started.items()}
        timings, later = harness.time_interleaved(started, rounds=rounds)
    is_checked = shape.length <= _CHECKED
    exact = _exact(example, operands, arrays) if is_checked else None
    rows = []
    for which, peer in itertools.product(PASSES, (OURS, FLEX)):
        at, other = (which, peer), (which, FLEX if peer == OURS else OURS)
        row: dict[str, Any] = {"shape": asdict(shape), "feature": name, "pass": which}
        row |= {"peer": peer, "failure": {**failures, **later}.get(at)}
        if at in timings:
            row |= timings[at].row() | {"memory": started[at].memory}
            want = exact or found.get(other)
            if want is not None:
                errors = {
                    n: harness.row_error(x, want[n]) for n, x in found[at].items()
                }
                of_output, of_gradient = _ALLOWED
                wrong = any(
                    error > (of_gradient if int(n) else of_output)
                    for n, error in errors.items()
                )
                row |= {"row_error": errors, "wrong": wrong}
        rows.append(row)
    return rows


def table(rows: Sequence[dict]) -> str:
    """Milliseconds of both peers, and how many times as fast ours is."""
    found = {}
    for row in rows:
        shape = Shape(**row["shape"])
        at = row["feature"], shape.head_size, shape.length
        found.setdefault(at, {})[row["pass"], row["peer"]] = row
    header = ["example", "H", "T"]
    for which in PASSES:
        header += [f"{tables.TITLES[which]}: ours, ms", "FlexAttention, ms", "ratio"]
    lines, ratios = [], {which: [] for which in PASSES}
    for at, own in found.items():
        line = [str(x) for x in at]
        for which in PASSES:
            pair = [own.get((which, peer)) for peer in (OURS, FLEX)]
            marks = [tables.mark(x) for x in pair]
            line += [
                f"{1e3 * x['seconds']:.3f}" if mark is None else mark
                for x, mark in zip(pair, marks, strict=True)
            ]
            if marks == [None, None]:
                ratio = pair[1]["seconds"] / pair[0]["seconds"]
                ratios[which].append(ratio)
                line.append(f"{ratio:.2f}")
            else:
                line.append("")
        lines.append(line)
    text = [tables.markdown(header, lines), tables.failures(rows)]
    for which, each in ratios.items():
        if each:
            mean = statistics.geometric_mean(each)
            title = tables.TITLES[which]
            text.append(f"{title}: {mean:.2f} times as fast, {min(each):.2f} at least.")
    return "\n\n".join(filter(None, text))


def main():
    run = records.Run.start(
        "functions",
        _RESULTS_DIR.value,
        commit=_COMMIT.value,
        run_id=_PART.run_id.value,
    )
    calls = []
    for length, size in itertools.product(_LENGTHS.value, _SIZES.value):
        (tokens,), (width,) = _TOKENS.value, _WIDTH.value
        heads = max(1, width // size)
        batch = max(1, tokens // length)
        shape = Shape(batch, length, heads, heads, size, False, "bfloat16")
        named = options.calls_named(_CALLS.value, examples(shape))
        calls += [(shape, name) for name in named]
    calls = _PART.of(calls)
    rows = []
    with options.Progress(len(calls), "example") as progress:
        for shape, name in calls:
            own = rows_of(shape, name, rounds=_REPEATS.value)
            rows += [run.write(row) for row in own]
            progress.step(f"{shape}: {name}")
    if not _PART.is_whole:
        rows = records.newest(_RESULTS_DIR.value, "functions")
    print(f"\n{run.path}\n\n{tables.origin(rows)}\n\n{table(rows)}")


if __name__ == "__main__":
    options.launch(main)
