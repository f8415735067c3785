"""Checks and times of one case: what `benchmarks.context` runs for each."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

import jax_flash2
from benchmarks import context_alone, context_peers, harness, programs
from benchmarks.context_calls import Case, by_rows, bytes_moved, mesh_of
from benchmarks.context_peers import OURS, PEERS, Peer
from benchmarks.harness import Program
from benchmarks.shapes import PASSES

WHICH = ("forward", "forward_backward")
# Of the ceiling: what decides whether one device can do all rows in time.
_REACHED = 0.3
_FEWEST_ROWS = 64


# What is compiled, or why it is not, by case, peer or method, and pass.
_COMPILING: dict[tuple, Future] = {}


def _lowered(case: Case, what: Peer | str, which: str) -> jax.stages.Lowered:
    """A pass of a peer on all devices; of a method, one device's part on the first."""
    if isinstance(what, str):
        device = SingleDeviceSharding(jax.devices()[0])
        structs = case.resized(1, case.rows).structs(device)
        return programs.lower(context_alone.passes(case, what)[which], *structs)
    mesh = mesh_of(case.parts)
    arrays = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_rows(mesh))
        for name, x in what.arrays(case).items()
    }
    with what.setting(mesh):
        function = what.passes(case, mesh)[which]
        return programs.lower(function, *case.structs(by_rows(mesh)), arrays)


def compile_together(wanted: Iterable[tuple[Case, Peer | str, str]]) -> None:
    """Compiles what is not yet. Nothing may be timed before: compilers autotune."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for key in wanted:
            if key in _COMPILING:
                continue
            try:
                _COMPILING[key] = pool.submit(_lowered(*key).compile)
            except Exception as error:  # a peer's failure is a result, not the end
                _COMPILING[key] = Future()
                _COMPILING[key].set_exception(error)


def compiled(case: Case, what: Peer | str, which: str) -> jax.stages.Compiled:
    """A pass of a peer, or of a method on one device.

    Raises:
      Exception: why it does not compile.
    """
    compile_together([(case, what, which)])
    return _COMPILING[case, what, which].result()


def expected(case: Case, operands: Sequence[jax.Array]) -> dict[str, np.ndarray]:
    """What `harness.reference` gives, of a small case, with whole matrices of scores.

    Args:
      case: its mask counts, not its devices.
      operands: with the rows in order.
    """
    group = case.shape.group
    q, do = (x[:, :, -group:].astype(jnp.float32) for x in (operands[0], operands[3]))
    k, v = (x[:, :, -1:].astype(jnp.float32) for x in operands[1:3])
    attention = functools.partial(
        jax_flash2.attention,
        **case.options(),
        query_segment_ids=case.ids(),
        implementation="reference",
        precision="highest",
    )

    @functools.partial(jax.jit, compiler_options=harness.UNTUNED)
    def all_of(q, k, v, do):
        out, vjp = jax.vjp(attention, q, k, v)
        return (out, *vjp(do), attention(q, k, k))

    out, dq, dk, dv, mean_key = (np.asarray(x[0]) for x in all_of(q, k, v, do))
    # As in `harness`: how far dq moves with the rounding of out.
    lengths = [np.linalg.norm(x, axis=-1, keepdims=True) for x in (out, do[0])]
    mean_key = np.linalg.norm(mean_key, axis=-1, keepdims=True)
    rounding = lengths[0] * lengths[1] * mean_key / case.head_size
    return {"out": out, "dq": dq, "dk": dk, "dv": dv, "dq_rounding": rounding}


def errors(case: Case, peers: Sequence[Peer], passes: Sequence[str]) -> dict:
    """By peer and pass, of few rows: what `harness.check` says, or the failure."""
    if case.total > 2**15:
        raise ValueError(f"{case.total} rows are too many to check")
    operands = case.operands(SingleDeviceSharding(jax.devices()[0]))
    want = expected(case, operands)
    mesh, found = mesh_of(case.parts), {}
    compile_together((case, peer, which) for which in passes for peer in peers)
    for peer in peers:
        order = peer.order(case)
        back = np.argsort(order)
        for which in passes:
            try:
                program = compiled(case, peer, which)
                placed = [jax.device_put(x[:, order], by_rows(mesh)) for x in operands]
                results = program(*placed, peer.placed(case, mesh))
                named = zip(PASSES[which], jax.device_get(results), strict=True)
                got = {
                    name: np.asarray(
                        x[0, back][:, -harness.checked_heads(case.shape, name) :],
                        np.float32,
                    )
                    for name, x in named
                }
                checked = harness.check(got, want, case.dtype)
                found[peer.name, which] = {**checked, "checked_rows": case.total}
            except Exception as error:  # a peer's failure is a result, not the end
                found[peer.name, which] = {"failure": harness.describe(error)}
    return found


def _program(compiled: jax.stages.Compiled, arguments: Sequence) -> Program:
    programs.check_fits(compiled)

    def call():
        results = compiled(*arguments)
        return results if harness.is_gpu() else jax.block_until_ready(results)

    memory = programs.memory(compiled)
    return Program(call, jax.block_until_ready, lambda _: {}, memory)


@dataclass(frozen=True)
class Whole:
    """One device that does as many rows as it can.

    Attributes:
      program: None if it can do none.
      rows: how many it does.
      flops: of these.
      failure: why it does not do all, where the reason is not the time.
    """

    program: Program | None
    rows: int
    flops: float
    failure: str | None = None


def whole(case: Case, which: str, *, most_seconds: float, ceiling: float) -> Whole:
    """All rows of a case on the first device; or a half, a quarter and so on.

    Args:
      case, which: what is computed.
      most_seconds: a call may take, at three tenths of the ceiling.
      ceiling: TFLOP/s.
    """
    device = SingleDeviceSharding(jax.devices()[0])
    rows, failure = case.total, None
    while True:
        own = case.resized(1, rows)
        flops = own.flops(which)
        if flops <= most_seconds * _REACHED * ceiling * 1e12:
            try:
                function = context_alone.passes(own, None)[which]
                operands = own.structs(device)
                one = programs.lower(function, *operands).compile()
                program = _program(programs.check_fits(one), own.operands(device))
                program.wait(program.call())
                return Whole(program, rows, flops, failure)
            except Exception as error:  # too large, say: fewer rows may do
                failure = failure or harness.describe(error)
        if rows // 2 < _FEWEST_ROWS:
            return Whole(None, 0, 0.0, failure)
        rows //= 2


def _kernels(case: Case, method: str, which: str) -> Program:
    """What one device of the case computes, without the others."""
    device = SingleDeviceSharding(jax.devices()[0])
    operands = case.resized(1, case.rows).operands(device)
    return _program(compiled(case, method, which), operands)


def _peak(device: jax.Device) -> int | None:
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def _started(
    case, peer: Peer, which: str, mesh: Mesh, operands
) -> tuple[Program, float, dict]:
    """The program after its first call, the seconds of that, what the allocator saw.

    `peak_bytes` is None where the device keeps no count, or saw a higher peak before.
    """
    one = programs.check_fits(compiled(case, peer, which))
    program = _program(one, (*operands, peer.placed(case, mesh)))
    device = mesh.devices.flat[-1]
    before = _peak(device)
    begun = time.perf_counter()
    program.wait(program.call())
    seconds, after = time.perf_counter() - begun, _peak(device)
    risen = before is not None and after is not None and after > before
    about = {"memory": program.memory, "peak_bytes": after if risen else None}
    return program, seconds, about


def methods_of(case: Case, peers: Sequence[Peer]) -> dict[str, str | None]:
    """By the name of a peer, the method of jax_flash2; None for others.

    A method by name is left out where jax_flash2 chooses it anyway, and on one device.
    """
    choice = context_peers.chosen(case, mesh_of(case.parts))
    is_timed = any(peer.name == OURS for peer in peers)
    found: dict[str, str | None] = {}
    for peer in peers:
        if not peer.ours:
            found[peer.name] = None
        elif peer.name == OURS:
            found[peer.name] = choice
        elif case.parts > 1 and not (is_timed and peer.name == choice):
            found[peer.name] = peer.name
    return found


def to_check(case: Case, peers: Sequence[Peer]) -> list[Peer]:
    """Those of `rows_of`; jax_flash2 with the method that it chooses for this case.

    For fewer rows it may choose another one.
    """
    return [PEERS[x or name] for name, x in methods_of(case, peers).items()]


def programs_of(case: Case, peers: Sequence[Peer], which: str) -> list[tuple]:
    """What `rows_of` runs, for `compile_together`."""
    methods = methods_of(case, peers)
    found: list = [peer for peer in peers if peer.name in methods]
    found += [x for x in methods.values() if x is not None]
    return [(case, x, which) for x in found]


def rows_of(
    case: Case,
    peers: Sequence[Peer],
    which: str,
    checked: Mapping,
    *,
    rounds: int,
    most_seconds: float,
    ceiling: float,
) -> list[dict]:
    """A row for each peer, of one pass.

    Args:
      case, which: what is timed.
      peers: who.
      checked: what `errors` found of those in `to_check`.
      rounds: of `harness.time_interleaved`; 0 to time first calls, with nothing beside.
      most_seconds, ceiling: as for `whole`.
    """
    mesh = mesh_of(case.parts)
    operands = case.operands(by_rows(mesh))
    methods = methods_of(case, peers)
    peers = [peer for peer in peers if peer.name in methods]
    compile_together(programs_of(case, peers, which))
    timed: dict[str, Program] = {}
    firsts: dict[str, harness.Timing] = {}
    failures, about = {}, {}
    for peer in peers:
        key = methods[peer.name] or peer.name, which
        failure = checked.get(key, {}).get("failure")
        try:
            if failure is None:
                started = _started(case, peer, which, mesh, operands)
                timed[peer.name], seconds, about[peer.name] = started
                firsts[peer.name] = harness.Timing(1, [seconds])
        except Exception as error:  # a peer's failure is a result, not the end
            failure = harness.describe(error)
        if failure is not None:
            failures[peer.name] = failure
    one = Whole(None, 0, 0.0)
    if rounds:
        one = whole(case, which, most_seconds=most_seconds, ceiling=ceiling)
    if one.program is not None:
        timed["one device"] = one.program
    for name, method in methods.items() if rounds else ():
        if name in about and method is not None:
            try:
                timed[f"kernels, {name}"] = _kernels(case, method, which)
            except Exception as error:  # as above
                about[name]["kernels_failure"] = harness.describe(error)
    timings = firsts
    if rounds:
        timings, later = harness.time_interleaved(timed, rounds=rounds)
        failures |= later
    found = {name: x.row() for name, x in timings.items()}
    flops, work = case.flops(which), case.work()
    rows = []
    for name, method in methods.items():
        check = checked.get((method or name, which), {})
        row = {
            "shape": asdict(case.shape),
            "pass": which,
            "peer": name,
            "feature": case.feature,
            "scaling": case.scaling,
            "mask": case.name,
            "devices": case.parts,
            "rows": case.rows,
            "stripe": case.stripe_size,
            "window": case.mask.window,
            "imbalance": float(work.max() / work.mean()),
            "method": method,
            "failure": failures.get(name),
            **{key: x for key, x in check.items() if key != "failure"},
        }
        if PEERS[name].ours:
            row["bytes"] = bytes_moved(case, method, which)
        if name in found:
            row |= found[name] | about[name]
            seconds = row["seconds"]
            row["tflops"] = flops / case.parts / seconds / 1e12
            row["one_device"] = {"rows": one.rows, "failure": one.failure}
            if "one device" in found:
                row["one_device"]["seconds"] = found["one device"]["seconds"]
                all_rows = found["one device"]["seconds"] * flops / one.flops
                row["efficiency"] = all_rows / case.parts / seconds
            if f"kernels, {name}" in found:
                row["kernels_seconds"] = found[f"kernels, {name}"]["seconds"]
                row["of_kernels"] = row["kernels_seconds"] / seconds
        rows.append(row)
    return rows
