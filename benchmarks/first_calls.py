"""Seconds of a first call: tracing, lowering and compiling, in a process of its own.

    python -m benchmarks.first_calls
    python -m benchmarks.first_calls --calls='plain|window' --peers=jax_flash2,cudnn

B 2, T 2048, N 16, H 128, bfloat16, causal unless flags say otherwise; output and
gradients of each call: plain, grouped (a quarter of the key heads), a window, and other
features, bias and slopes with their own gradients; of jax.nn what it has. Each call of
each peer has four new processes. The first traces, lowers and compiles it, then the
same of a longer sequence: the second shape. The second fills JAX's persistent cache and
writes an export (`jax.export`, which needs flatbuffers), the third finds the program
there, and the fourth that of the export. Imports and the making of operands are not
counted. With `--jobs` several calls have their processes side by side: fewer than there
are cores, or they slow one another down. Rows go to `first_calls.jsonl`.
"""

import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import jax
from absl import flags
from jax import export

from benchmarks import cost_tables, harness, options, programs, records
from benchmarks.feature_calls import Feature, features, passes
from benchmarks.peers import OURS
from jax_flash2.tune.problems import Shape

_BATCH = flags.DEFINE_integer("batch", 2, "B.", lower_bound=1)
_LENGTH = options.integers("length", "2k", "Sequence length, T: one number.")
_HEADS = flags.DEFINE_integer("heads", 16, "N.", lower_bound=1)
_HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "H.", lower_bound=1)
_DTYPE = options.dtype("bfloat16")
_CALLS = flags.DEFINE_string("calls", ".", "Names found by this regular expression.")
_PEERS = options.names(
    "peers", [OURS, "cudnn"], (OURS, "triton", "xla", "cudnn"), "Who takes part"
)
_JOBS = flags.DEFINE_integer("jobs", 1, "Calls side by side.", lower_bound=1)
_RESULTS_DIR, _COMMIT = options.files()
# What a process of its own does; the process that was started by hand has None.
_PROCESSES = ["cold", "fill", "cached", "exported"]
_CHILD = flags.DEFINE_enum("child", None, _PROCESSES, "Not by hand.")
_STEP = 128  # the second shape is longer by this
_FEATURES = (
    *("window", "8 segments", "mask [1, 1, T, T], random", "soft cap", "ALiBi"),
    *("bias [1, 1, T, T]", "dropout"),
)


def calls(shape: Shape) -> dict[str, tuple[Shape, Feature]]:
    """Shape and feature of each call, by name."""
    grouped = dataclasses.replace(shape, kv_heads=max(1, shape.heads // 4))
    found = features(shape)
    return {
        "plain": (shape, found["plain"]),
        "grouped": (grouped, Feature()),
        **{name: (shape, found[name]) for name in _FEATURES},
    }


def _of_jax_nn(shape: Shape, feature: Feature, implementation: str) -> Callable:
    """Output and gradients by jax.nn, of q, k, v, do and the feature's arrays.

    Raises:
      NotImplementedError: if it has no such argument.
    """
    named = {"local_window_size": feature.static.get("local_window_size")}
    if set(feature.static) - set(named) or set(feature.arrays) - {"bias", "mask"}:
        raise NotImplementedError("jax.nn has no such argument")
    if named["local_window_size"]:  # None, for no limit, is not known there
        named["local_window_size"] = (named["local_window_size"][0], 0)

    def both(q, k, v, do, arrays):
        operand = {feature.operand: arrays[feature.operand]} if feature.operand else {}

        def attention(q, k, v, operand):
            return jax.nn.dot_product_attention(
                *(q, k, v),
                is_causal=shape.causal,
                implementation=implementation,
                **named,
                **{**arrays, **operand},
            )

        out, vjp = jax.vjp(attention, q, k, v, operand)
        return out, vjp(do)

    return both


def function(peer: str, shape: Shape, feature: Feature) -> Callable:
    """What is compiled, of query, key, value, do and the feature's arrays."""
    if peer in ("xla", "cudnn"):
        return _of_jax_nn(shape, feature, peer)
    if peer == "triton":
        static = {**feature.static, "implementation": "triton"}
        feature = dataclasses.replace(feature, static=static)
    found = passes(shape, feature)
    return found.get("with_operand", found["forward_backward"])


def serves(peer: str, shape: Shape, feature: Feature) -> bool:
    """Whether the peer has arguments for this call."""
    try:
        function(peer, shape, feature)
    except NotImplementedError:
        return False
    return True


def seconds(find: Callable[[], Callable], structs) -> tuple[float, float]:
    """Seconds to find a function, to trace and lower it, and to compile."""
    begun = time.perf_counter()
    lowered = programs.lower(find(), *structs)
    lowering = time.perf_counter() - begun
    lowered.compile()
    return lowering, time.perf_counter() - begun - lowering


def _export() -> Path:
    """The file of a call's export, beside the programs in the cache."""
    return Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "exported"


def _exported() -> Callable:
    return export.deserialize(bytearray(_export().read_bytes())).call


def _write_export(run: Callable, structs) -> None:
    """Exports a function with whatever kernels it has; the cache gets its program."""
    kernels = re.findall(
        r'custom_call @"?([^"(]+)', programs.lower(run, *structs).as_text()
    )
    unchecked = [export.DisabledSafetyCheck.custom_call(name) for name in set(kernels)]
    exported = export.export(jax.jit(run), disabled_checks=unchecked)(*structs)
    _export().write_bytes(exported.serialize())
    seconds(_exported, structs)


def _in_this_process(peer: str, name: str, shape: Shape, what: str) -> dict:
    """The row's figures of one process."""

    def call(shape: Shape) -> tuple[Callable[[], Callable], tuple]:
        of, feature = calls(shape)[name]
        find = functools.partial(function, peer, of, feature)
        return find, (*of.structs(), feature.arrays)

    if what == "exported":  # JAX says there where the kernels' runtime library lies
        importlib.import_module("jax.experimental.mosaic.gpu")
    find, structs = call(shape)
    jax.block_until_ready((structs[-1], jax.numpy.zeros(8) + 1))
    if what != "cold":
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        found = {what: sum(seconds(_exported if what == "exported" else find, structs))}
        if what == "fill":
            _write_export(find(), structs)
        return found
    jax.config.update("jax_enable_compilation_cache", False)
    lowering, compiling = seconds(find, structs)
    longer = call(dataclasses.replace(shape, length=shape.length + _STEP))
    return {"lower": lowering, "compile": compiling, "second": sum(seconds(*longer))}


def _in_a_new_process(peer: str, name: str, what: str, cache: str) -> dict:
    """The figures that another process finds; a failure says what it printed last."""
    mine = (_BATCH, _LENGTH, _HEADS, _HEAD_SIZE, _DTYPE)
    arguments = [f"--{x.name}={flags.FLAGS[x.name].value}" for x in mine]
    (length,) = _LENGTH.value
    arguments[1] = f"--{_LENGTH.name}={length}"
    command = [sys.executable, "-m", "benchmarks.first_calls", f"--child={what}"]
    done = subprocess.run(
        [*command, f"--peers={peer}", f"--calls={name}", *arguments],
        cwd=records.ROOT,
        env={
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_FLASH2_AHEAD": "on",
        },
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def row(peer: str, name: str, shape: Shape, run: Callable[..., dict]) -> dict:
    """The row of one call of one peer; `run` starts its processes."""
    found = {"shape": asdict(shape), "call": name, "peer": peer}
    found |= {"pass": "forward_backward", "failure": None}
    try:
        with tempfile.TemporaryDirectory() as cache:
            for what in _PROCESSES:
                found |= run(peer, name, what, cache)
    except Exception as error:  # one call's failure is a result
        found["failure"] = harness.describe(error)
    return found


def main():
    (length,) = _LENGTH.value
    heads = _HEADS.value
    shape = Shape(
        *(_BATCH.value, length, heads, heads, _HEAD_SIZE.value, True, _DTYPE.value)
    )
    if _CHILD.value:
        (peer,) = _PEERS.value
        print(json.dumps(_in_this_process(peer, _CALLS.value, shape, _CHILD.value)))
        return
    named = options.calls_named(_CALLS.value, calls(shape))
    asked = [(peer, name) for name in named for peer in _PEERS.value]
    asked = [(peer, name) for peer, name in asked if serves(peer, *named[name])]
    run = records.Run.start("first_calls", _RESULTS_DIR.value, commit=_COMMIT.value)
    rows = []
    with (
        options.Progress(len(asked), "call") as progress,
        ThreadPoolExecutor(_JOBS.value) as pool,
    ):
        started = [
            pool.submit(row, *x, named[x[1]][0], _in_a_new_process) for x in asked
        ]
        for (peer, name), done in zip(asked, started, strict=True):
            rows.append(run.write(done.result()))
            progress.step(f"{peer}: {name}")
    print(f"\n{run.path}\n\n{cost_tables.first_calls(rows)}")


if __name__ == "__main__":
    options.launch(main)
