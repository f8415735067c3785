"""When XLA moves the keys of a ring, and what runs meanwhile, without a GPU.

    python -m tests.ring_schedule                       both passes on four H200s
    python -m tests.ring_schedule backward 8 one-run    rows that follow one another
    python -m tests.ring_schedule both 4 triton         with kernels of that backend

Compiles a call for GPUs that are not there and prints what the program starts, in order
(kernels, permutations, and the ends of these), temporary memory, and what is wrong:
each permutation must have a kernel between start and end.
Needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_flash2 import Context, attention
from jax_flash2._rows import STRIPE
from tests.gpu_targets import TARGETS

PASSES = ("forward", "backward", "both")


@dataclasses.dataclass(frozen=True)
class Step:
    """Something that a program starts, or waits for.

    Attributes:
      kind: "kernel", "start" or "done" of a permutation, "permutation" for both at
        once, "loop", "conditional".
      name: of the kernel; of the start; of the loop's computation.
      rounds: of a loop.
    """

    kind: str
    name: str
    rounds: int = 1


Program = dict[str, list[Step]]  # by computation, the entry last


def steps(text: str) -> Program:
    """From a scheduled module as text."""
    found: Program = {}
    for line in text.splitlines():
        if heading := re.match(r"(?:ENTRY )?%?(\S+) \(.*\{$", line):
            found[heading[1]] = current = []
        elif operation := re.match(r"\s+(?:ROOT )?%(\S+) = (.*)", line):
            current += _steps(*operation.groups())
    return {name: x for name, x in found.items() if x}


def _steps(name: str, rest: str) -> Iterator[Step]:
    kind = re.search(r"(?:^|[\]})] )([a-z-]+)\(%?([^,)]*)", rest)
    if kind is None:
        return
    if kind[1] == "collective-permute-start":
        yield Step("start", name)
    elif kind[1] == "collective-permute-done":
        yield Step("done", kind[2])
    elif kind[1] == "collective-permute":
        yield Step("permutation", name)
    elif kind[1] == "conditional":
        yield Step("conditional", name)
    elif kind[1] == "custom-call" and (kernel := re.search(r"flash2_\w+", rest)):
        named = re.search(r'name = "(flash2_\w+)"', rest)
        yield Step("kernel", (named or [kernel[0], kernel[0]])[1])
    elif kind[1] == "while" and (body := re.search(r"body=%?([^\s,]+)", rest)):
        rounds = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
        yield Step("loop", body[1], int(rounds[1]) if rounds else 0)


def executed(program: Program) -> list[Step]:
    """The steps in the order in which they run, loops unrolled."""

    def of(name: str, copy: str) -> Iterator[Step]:
        for step in program.get(name, []):
            if step.kind != "loop":
                mark = copy if step.kind in ("start", "done") else ""
                yield dataclasses.replace(step, name=step.name + mark)
                continue
            for number in range(step.rounds):
                yield from of(step.name, f"{copy} in round {number}")

    return list(of(list(program)[-1], ""))


def faults(program: Program, which: str, devices: int) -> list[str]:
    """What is not as it should be, of a pass or both passes of a ring."""
    found, flying = [], {}
    ran = executed(program)
    for step in ran:
        if step.kind == "kernel":
            flying = dict.fromkeys(flying, True)
        elif step.kind == "start":
            flying[step.name] = False
        elif step.kind == "permutation" or (
            step.kind == "done" and not flying.pop(step.name)
        ):
            found.append(f"no kernel runs beside {step.name}")
        elif step.kind == "conditional":
            found.append(f"{step.name} is a conditional")
    # Keys come devices - 1 times, in the backward once less, as a device has its own
    # and begins with the forward's last ones. Their gradients follow them.
    forward = devices - 1
    backward = devices if devices > 2 else 1
    expected = {"forward": forward, "backward": backward, "both": forward + backward}
    count = sum(x.kind in ("start", "permutation") for x in ran)
    if count != expected[which]:
        found.append(f"{count} permutations instead of {expected[which]}")
    return found


def compiled(
    which: str,
    devices: int,
    stripe: int | None = STRIPE,
    implementation: str | None = None,
    shape: tuple[int, ...] = (1, 8192, 32, 8, 128),
):
    """A causal call in bfloat16 in a ring of H200s.

    Args:
      which: of `PASSES`.
      devices: their number.
      stripe: as for `Context`.
      implementation: as for `attention`.
      shape: batch size, rows of a device, query heads, key heads, head size.
    """
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=TARGETS["h200"].description,
        topology=f"1x1x{devices}",
    )
    mesh = Mesh(np.array(topology.devices), ("x",))
    b, t, n, k, h = shape
    rows, first = PartitionSpec(None, "x"), PartitionSpec("x")

    def array(shape, spec, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def on_each(function, specs, out):
        return jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out)
        )

    def call(q, k, v):
        context = Context("x", stripe, "ring")
        named = {"implementation": implementation, "context": context}
        return attention(q, k, v, is_causal=True, **named)

    def both(q, k, v, do):
        out, pull = jax.vjp(call, q, k, v)
        return out, pull(do)

    q, kv = (array((b, devices * t, heads, h), rows) for heads in (n, k))
    if which == "forward":
        function, args = on_each(call, (rows,) * 3, rows), (q, kv, kv)
    elif which == "both":
        function, args = on_each(both, (rows,) * 4, rows), (q, kv, kv, q)
    else:
        trees = []

        def saved(q, k, v):
            leaves, tree = jax.tree.flatten(jax.vjp(call, q, k, v)[1])
            trees.append(tree)
            return [x[None] for x in leaves]

        def backward(leaves, do):
            return trees[0].unflatten([x[0] for x in leaves])(do)

        shapes = jax.eval_shape(on_each(saved, (rows,) * 3, first), q, kv, kv)
        function = on_each(backward, (first, rows), rows)
        args = [array(x.shape, first, x.dtype) for x in shapes], q
    return function.trace(*args).lower(lowering_platforms=("cuda",)).compile()


def show(program: Program, name: str | None = None, indent: str = "") -> Iterator[str]:
    """Lines for a reader."""
    numbers: dict[str, int] = {}
    for step in program[name or list(program)[-1]]:
        if step.kind == "loop" and step.name in program:
            yield f"{indent}loop of {step.rounds} rounds"
            yield from show(program, step.name, indent + "  ")
        elif step.kind in ("start", "done"):
            number = numbers.setdefault(step.name, len(numbers) + 1)
            yield f"{indent}{step.kind} {number}"
        elif step.kind != "loop":
            yield f"{indent}{step.name}"


def main(words: list[str]) -> int:
    which = next((x for x in words if x in PASSES), "both")
    devices = next((int(x) for x in words if x.isdigit()), 4)
    stripe = None if "one-run" in words else STRIPE
    named = next((x for x in words if x in ("mosaic_gpu", "triton")), None)
    program = compiled(which, devices, stripe, named)
    schedule = steps(program.as_text())
    print("\n".join(show(schedule)))
    memory = program.memory_analysis().temp_size_in_bytes
    wrong = faults(schedule, which, devices)
    print(f"{which}, {devices} devices: {memory / 2**20:.0f} MiB of temporary memory")
    print("; ".join(wrong) or "as it should be")
    return bool(wrong)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # else JAX would look for a driver
    sys.exit(main(sys.argv[1:]))
