"""What GPUs that are not here would run: chosen and compiled for them, on any machine.

    python -m tests.gpus                     15 calls for one GPU of each family
    python -m tests.gpus rtx4090 b200        for these (`tests.gpu_targets`)
    python -m tests.gpus rtx4090 --all       all 79 calls (`tests.gpu_calls`)
    python -m tests.gpus b200 -k "256 causal"  calls whose name has this text

Arrays have the types of a described GPU, so that the library chooses as it would there;
JAX's CUDA plugin compiles forward and gradients with XLA's Triton. Shared memory is
what XLA says, registers and spills are what ptxas says. Exits with 1 if a call does not
compile, a kernel spills more than 128 bytes a thread (stores and loads together; not on
Hopper, whose blocks were timed; `gpu_calls.SPILLED` has exceptions), takes more shared
memory than was estimated, or so little that the estimate is more than 1.3 times that,
or, on GPUs of 99 KiB, leaves less than two warps to a scheduler at head sizes of 64 and
128. Nothing runs on a GPU.

Needs the extra `test-gpus`. Each GPU has a process of its own: XLA reads where it puts
what it makes once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from tests.gpu_targets import TARGETS, Target

FAMILIES = ("a100", "rtx4090", "gh200", "b200")
MOST_SPILLED = 128
# How many times what a kernel takes the estimate may be.
MOST_ESTIMATED = 1.3
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# Of a thunk in XLA's dump: name, threads, and bytes of shared memory.
_LAUNCH = re.compile(
    r"\] (flash2_\w+) grid: \[[\d, ]+\] threads: \[(\d+).*?shared_memory: (\d+) bytes"
)
_TARGET = re.compile(r"^\.target (\w+)", re.M)
_NAME = re.compile(r"\.visible \.entry (\w+)\(")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Triton kernel of a compiled call.

    Attributes:
      name: without the prefix that all have.
      blocks: as chosen, and whether they were estimated to need as much.
      estimate: bytes of shared memory, at most.
      threads: of a program.
      shared_memory: bytes that it takes.
      registers: of a thread.
      spilled: bytes that a thread stores and loads.
    """

    name: str
    blocks: list[int | None]
    estimate: int
    threads: int
    shared_memory: int
    registers: int
    spilled: int

    def faults(
        self, target: Target, head_size: int, most_spilled: int = MOST_SPILLED
    ) -> Iterator[str]:
        was_timed = target.capability == "9.0"  # what spills there was the fastest
        if self.spilled > most_spilled and not was_timed:
            yield f"{self.name} spills {self.spilled} bytes a thread"
        if self.shared_memory > self.estimate:
            yield (
                f"{self.name} takes {self.shared_memory} bytes of shared memory, "
                f"estimated {self.estimate}"
            )
        elif self.estimate > MOST_ESTIMATED * self.shared_memory:
            yield (
                f"{self.name} takes {self.shared_memory} bytes of shared memory, "
                f"of which {self.estimate} is more than {MOST_ESTIMATED} times"
            )
        few = self.warps(target) < 8 and target.shared_memory < 128 << 10
        if few and head_size in (64, 128) and self.blocks[0] > 16:
            yield f"{self.name} leaves {self.warps(target)} warps on a multiprocessor"

    def warps(self, target: Target) -> int:
        """On a multiprocessor at once; it has four schedulers."""
        sizes = self.threads, self.registers, self.shared_memory
        return target.programs(*sizes) * self.threads // 32

    def words(self, target: Target) -> str:
        kib = f"{self.shared_memory / 1024:.1f} of {self.estimate / 1024:.1f} KiB"
        found = f"{self.name} {self.blocks}: {kib}, {self.registers} registers"
        return f"{found}, {self.warps(target)} warps, {self.spilled} bytes spilled"


def missing() -> str | None:
    """Why nothing can be compiled here, or None."""
    if not any(map(importlib.util.find_spec, PLUGINS)):
        return "JAX's CUDA plugin is not installed: pip install -e '.[test-gpus]'"
    return None if ptxas() else "ptxas is neither on the PATH nor in a wheel of nvidia"


@functools.cache
def ptxas() -> str | None:
    """The assembler of a wheel, or on the PATH."""
    found = importlib.util.find_spec("nvidia")
    folders = found.submodule_search_locations if found else ()
    for folder in map(Path, folders or ()):
        for path in sorted(folder.glob("*/bin/ptxas")):
            return str(path)
    return os.environ.get("PTXAS") or shutil.which("ptxas")


def assembled(path: Path) -> dict[str, tuple[int, int]]:
    """Registers and spilled bytes of the kernel in a file of PTX, by its name."""
    text = path.read_text()
    (name,), target = _NAME.findall(text), _TARGET.search(text)
    assert target is not None
    command = [str(ptxas()), "-v", f"-arch={target[1]}", str(path), "-o", os.devnull]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, spills = _REGISTERS.search(run.stderr), _SPILLS.search(run.stderr)
    assert registers is not None and spills is not None, run.stderr
    return {name: (int(registers[1]), int(spills[1]) + int(spills[2]))}


def kernels(dump: Path, chosen: dict[str, tuple]) -> list[Kernel]:
    """Of the module that XLA wrote to a folder.

    Args:
      dump: the folder.
      chosen: by kernel its blocks and the estimate of its shared memory.
    """
    launches, used = {}, {}
    for path in dump.glob("*thunk_sequence.txt"):
        for name, threads, size in _LAUNCH.findall(path.read_text()):
            launches[name] = int(threads), int(size)
    for path in dump.glob("*.ptx"):
        if "flash2_" in path.read_text():
            used |= assembled(path)
    found = []
    for name, launch in sorted(launches.items()):
        base = re.sub(r"_\d+$", "", name).removeprefix("flash2_")
        if base != "merge":  # it has no blocks to choose
            kernel = "dbias" if base not in chosen else base
            found.append(Kernel(base, *chosen[kernel], *launch, *used[name]))
    return found


class Compiler:
    """Compiles calls for one GPU that is described."""

    def __init__(self, target: Target, dump: Path):
        import jax
        import numpy as np
        from jax.experimental import topologies
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.target, self.dump = target, dump
        described = topologies.get_topology_desc(
            platform="cuda", target_config=target.description, topology="1x1x1"
        )
        mesh = Mesh(np.array(described.devices), ("x",))
        self._struct = functools.partial(
            jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec())
        )
        self._chosen: dict[str, tuple] = {}

    def compile(self, call) -> tuple[str, list[Kernel], list[str]]:
        """What serves a call, its Triton kernels, and what is wrong."""
        import jax

        from jax_flash2 import attention, explain
        from tests.gpu_calls import SPILLED, of_arrays, with_gradients

        for path in self.dump.glob("*"):
            path.unlink()
        self._chosen.clear()
        jax.clear_caches()
        operands, arrays, static = call.structs(self._struct)
        texts, others = [], list(arrays.values())

        def said(*operands, **arguments):
            texts.append(explain(*operands, **arguments))
            return attention(*operands, **arguments)

        run = of_arrays(said, arrays, static)
        given = [operands, others]
        if call.gradients:
            q, _, v = operands
            given.append(self._struct((*q.shape[:3], v.shape[3]), q.dtype))
            run = with_gradients(run)
        with self._recorded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that xla serves it is in `explain`
            compiled = jax.jit(run).trace(*given).lower().compile()
        del compiled
        served = re.findall(r"^implementation: (\w+)", texts[0], re.M)[0]
        found = kernels(self.dump, self._chosen)
        most = SPILLED.get(call.name, {})
        faults = [
            fault
            for k in found
            for fault in k.faults(
                self.target, call.heads[2], most.get(k.name, MOST_SPILLED)
            )
        ]
        if served == "triton" and not found:
            faults.append("no kernel is in the program")
        if served == "xla" and "triton: " not in texts[0]:
            faults.append("no reason is given for xla")
        return served, found, faults

    def _recorded(self):
        """In which the blocks that are chosen are written down."""
        import pytest

        from pallas_kernels.triton import estimates, tuning

        choose, patch = tuning.choose, pytest.MonkeyPatch()

        def spy(kernel, config, **options):
            blocks = choose(kernel, config, **options)
            sizes = kernel, blocks, options["heads"], options["itemsize"]
            products = options["gpu"].family.products
            more = {"products": products, "has_bits": options["dropout"]}
            more["looped"] = options["looped"]
            estimate = estimates.shared_memory(*sizes, options["pair_bytes"], **more)
            self._chosen[kernel] = [*dataclasses.astuple(blocks)], estimate
            return blocks

        patch.setattr(tuning, "choose", spy)
        return _undoing(patch)


class _undoing:
    def __init__(self, patch):
        self._patch = patch

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._patch.undo()


def of_gpu(name: str, words: list[str], *, every: bool, dump: Path) -> int:
    """Compiles calls for a GPU, prints what was found, and counts those that fail."""
    from tests.gpu_calls import CALLS

    compiler, failed = Compiler(TARGETS[name], dump), 0
    target = compiler.target
    for call in CALLS:
        if not (every or call.quick or words):
            continue
        if words and not any(x in call.name for x in words):
            continue
        begun = time.monotonic()
        try:
            served, found, faults = compiler.compile(call)
        except Exception as error:
            served, found = "nothing", []
            faults = [f"{type(error).__name__}: {str(error)[:400]}"]
        seconds = f"{time.monotonic() - begun:.0f} s"
        verdict = "FAIL" if faults else "ok"
        print(f"{verdict} {name}: {call.name}: {served}, {seconds}", flush=True)
        for line in (*(k.words(target) for k in found), *faults):
            print(f"    {line}", flush=True)
        failed += bool(faults)
        record = {"gpu": name, "call": call.name, "served": served, "faults": faults}
        record["kernels"] = [dataclasses.asdict(k) for k in found]
        if path := os.environ.get("GPUS_JSONL"):
            with open(path, "a") as file:
                file.write(json.dumps(record) + "\n")
    return failed


def _in_a_process(name: str, arguments: list[str]) -> int:
    """Runs `of_gpu` where XLA writes what it makes; returns the status.

    With flags of its own alone: those of the tests keep XLA from optimizing.
    """
    with tempfile.TemporaryDirectory() as dump:
        flags = f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx"
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
        # What is found in a cache is not compiled, and XLA writes nothing of it.
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, "-m", "tests.gpus", name, *arguments, "--in", dump]
        return subprocess.run(command, env=environment, check=False).returncode


def main(arguments: list[str] | None = None) -> int:
    first, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m tests.gpus", description=first)
    parser.add_argument("gpus", nargs="*", default=FAMILIES, metavar="GPU")
    parser.add_argument("--all", action="store_true", help="every call")
    parser.add_argument("-k", dest="words", action="append", default=[], metavar="TEXT")
    parser.add_argument("--in", dest="dump", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := [x for x in options.gpus if x not in TARGETS]:
        parser.error(f"no such GPU: {', '.join(unknown)}; one of {', '.join(TARGETS)}")
    if why_not := missing():
        parser.error(why_not)
    if options.dump:
        (name,), dump = options.gpus, Path(options.dump)
        return min(of_gpu(name, options.words, every=options.all, dump=dump), 99)
    more = ["--all"] * options.all + [y for x in options.words for y in ("-k", x)]
    failed = [x for x in options.gpus if _in_a_process(x, more)]
    print(f"failed: {', '.join(failed)}" if failed else "all compile")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
