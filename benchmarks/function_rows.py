"""Rows and table of `benchmarks.functions`."""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash2
from benchmarks import harness, programs, tables
from benchmarks.function_calls import Example, examples
from benchmarks.function_peers import FLASH4, FLEX, Call, as_arrays, started_by
from benchmarks.harness import Program
from benchmarks.peers import OURS
from jax_flash2.tune.problems import Shape

PASSES = "forward", "forward_backward"
ANY_ORDER = f"{OURS}, any order"  # its forward is ours
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


def _jax_program(compiled: jax.stages.Compiled, arguments: tuple) -> Program:
    programs.check_fits(compiled)
    run = functools.partial(compiled, *arguments)
    used = programs.memory(compiled)
    return Program(run, jax.block_until_ready, as_arrays, used)


def _exact(example: Example, operands, arrays) -> dict[str, np.ndarray]:
    whole = {"implementation": "reference", "precision": "highest"}
    function = passes(example, ours(example, **whole))["forward_backward"]
    wide = [x[-1:].astype(jnp.float32) for x in operands]
    if example.operand:  # its gradient is of all sequences
        wide = [x.astype(jnp.float32) for x in operands]
    return as_arrays(jax.jit(function)(*wide, arrays))


def _any_order(call: Call) -> Program:
    """Ours, with the gradient of query added up in any order."""
    arrays = jax.tree.map(jnp.asarray, dict(call.example.arrays))
    config = jax_flash2.Config(deterministic=False)
    own = passes(call.example, ours(call.example, config=config))[call.which]
    arguments = (*call.operands, arrays)
    return _jax_program(programs.lower(own, *arguments).compile(), arguments)


def _timed(peer: str) -> tuple[str, ...]:
    """The passes of a peer that have programs of their own."""
    return PASSES if peer != ANY_ORDER else PASSES[1:]


def rows_of(
    shape: Shape, name: str, *, peers: Sequence[str], rounds: int
) -> list[dict]:
    """A row of each peer for each pass; `peers`: "any_order", or as of `started_by`."""
    example, operands = examples(shape)[name], shape.operands()
    arrays = jax.tree.map(jnp.asarray, dict(example.arrays))
    others = started_by(peers, shape)
    if "any_order" in peers:
        others[ANY_ORDER] = _any_order
    started: dict[tuple[str, str], Program] = {}
    failures: dict[tuple[str, str], str] = {}

    def attempt(at: tuple[str, str], start: Callable) -> Any:
        try:
            return start()
        except Exception as error:  # a peer's failure is a result
            failures[at] = harness.describe(error)

    with harness.compiling(), ThreadPoolExecutor(os.cpu_count()) as pool:
        own, arguments = passes(example, ours(example)), (*operands, arrays)
        lowered = {x: programs.lower(own[x], *arguments) for x in PASSES}
        compiling = {x: pool.submit(lowered[x].compile) for x in PASSES}
        starts = {
            (which, peer): functools.partial(
                start, Call(shape, name, example, which, operands)
            )
            for peer, start in others.items()
            for which in _timed(peer)
        }
        for which in PASSES:
            starts[which, OURS] = lambda x=which: _jax_program(
                compiling[x].result(), arguments
            )
        for at, start in starts.items():
            if (program := attempt(at, start)) is not None:
                started[at] = program
        # Here, as its compiler would disturb the timings of other processes.
        is_checked = shape.length <= _CHECKED
        exact = _exact(example, operands, arrays) if is_checked else None
    with harness.alone():
        found = {
            at: results
            for at, p in started.items()
            if (results := attempt(at, lambda p=p: p.results(p.call()))) is not None
        }
        timings, later = harness.time_interleaved(
            {at: started[at] for at in found}, rounds=rounds
        )
    rows = []
    for which, peer in itertools.product(PASSES, (OURS, *others)):
        at = which, peer
        if which not in _timed(peer):
            continue
        row: dict[str, Any] = {"shape": asdict(shape), "feature": name, "pass": which}
        row |= {"peer": peer, "failure": {**failures, **later}.get(at)}
        if at in timings:
            row |= timings[at].row() | {"memory": started[at].memory}
            beside = (found.get((which, x)) for x in (OURS, *others) if x != peer)
            want = exact or next(filter(None, beside), None)
            row |= _errors(found[at], want) if want is not None else {}
        rows.append(row)
    return rows


def _errors(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict:
    """row_error by result (None: not finite), and `wrong`."""
    errors = {n: harness.row_error(x, want[n]) for n, x in got.items()}
    of_output, of_gradient = _ALLOWED
    allowed = {n: of_gradient if int(n) else of_output for n in errors}
    return {
        "row_error": {n: x if math.isfinite(x) else None for n, x in errors.items()},
        "wrong": any(x > allowed[n] for n, x in errors.items()),
    }


def _fastest(own: dict, which: str, label: str) -> dict | None:
    """Of a peer's forms, whose names begin with its label; else why there is none."""
    forms = [row for (x, peer), row in own.items() if x == which]
    forms = [row for row in forms if row["peer"].startswith(label)]
    timed = [row for row in forms if tables.mark(row) is None]
    return min(timed or forms[:1], key=lambda x: x.get("seconds", 0), default=None)


def results(rows: Sequence[dict]) -> str:
    """Where rows come from, and their table, in order."""

    names = list(examples(Shape(**rows[0]["shape"])))

    def place(row: dict):
        shape = Shape(**row["shape"])
        return shape.head_size, shape.length, names.index(row["feature"])

    rows = sorted(rows, key=place)
    return f"{tables.origin(rows)}\n\n{table(rows)}"


def table(rows: Sequence[dict]) -> str:
    """Milliseconds of all peers, and how many times as fast ours is."""
    found: dict[tuple, dict] = {}
    for row in rows:
        shape = Shape(**row["shape"])
        at = row["feature"], shape.head_size, shape.length
        found.setdefault(at, {})[row["pass"], row["peer"]] = row
    names = {row["peer"] for row in rows}
    peers = [x for x in (FLEX, FLASH4, ANY_ORDER) if x in names]
    header = ["example", "H", "T"]
    for which in PASSES:
        header.append(f"{tables.TITLES[which]}: ours, ms")
        for peer in peers:
            header += [f"{peer.partition(' (')[0]}, ms", "ratio"]
    lines, ratios = [], {x: [] for x in itertools.product(PASSES, peers)}
    for at, own in found.items():
        line = [str(x) for x in at]
        for which in PASSES:
            first = own.get((which, OURS))
            line.append(_milliseconds(first))
            for peer in peers:
                row = _fastest(own, which, peer)
                line += [_milliseconds(row), ""]
                if first and row and tables.mark(first) is tables.mark(row) is None:
                    ratio = row["seconds"] / first["seconds"]
                    ratios[which, peer].append(ratio)
                    line[-1] = f"{ratio:.2f}"
        lines.append(line)
    text = [tables.markdown(header, lines), tables.failures(rows)]
    for (which, peer), each in ratios.items():
        if each:
            mean, title = statistics.geometric_mean(each), tables.TITLES[which]
            least = f"{min(each):.2f} at least"
            text.append(f"{title}: {mean:.2f} times as fast as {peer}, {least}.")
    return "\n\n".join(filter(None, text))


def _milliseconds(row: dict | None) -> str:
    mark = tables.mark(row)
    return f"{1e3 * row['seconds']:.3f}" if row and mark is None else mark or ""
