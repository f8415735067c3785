"""The kernels' modules, before and after a change that must leave them as they are.

    python -m tests.modules save FILE [words]      writes what each call lowers to
    python -m tests.modules compare FILE [words]   says which of these differ now

Each call of the tests is lowered for an H200 on a machine without a GPU, forward and
gradients, on the Triton and the Mosaic GPU backend and on the one that is chosen for
it, and for xla on a CPU; kernels that run only by name, for their own GPUs. What is
kept of a kernel is a hash of its module without source locations, of the rest of the
program a hash of its text. With words, only calls whose name has all of them. `--jobs`
processes work at a time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import hashlib
import json
import multiprocessing
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

from jax_flash2 import attention
from tests import mosaic, ptxas
from tests.cases import CASES, Case, by_name
from tests.lowering import lower_for_gpu, string_attributes

# The bytes of a kernel, and what JAX derives of them.
_KERNEL = re.compile(r'\b(ir|module|kernel_hash) = "(?:[^"\\]|\\.)*"')


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without_locations(module: bytes) -> str:
    """The text of a kernel's module."""
    from jax.experimental.mosaic.gpu import dialect as mosaic_dialect

    with mlir.make_ir_context() as context:
        triton_dialect.register_dialect(context)
        mosaic_dialect.register_dialect(context)
        context.load_all_available_dialects()
        context.allow_unregistered_dialects = True
        parsed = ir.Module.parse(module).operation
        return parsed.get_asm(enable_debug_info=False)


def mosaic_modules(text: str) -> list[str]:
    """Those of Mosaic GPU, without the number of each in the process (JAX 0.11)."""
    found = map(without_locations, string_attributes(text, "module"))
    return [re.sub(r'dump_basename = "\w+"', "", x) for x in found]


def hashes(text: str) -> dict[str, list[str] | str]:
    """Of the kernels of a program, in order, and of the rest of it."""
    names = ("ir", "module")
    found = (x for name in names for x in string_attributes(text, name))
    rest = _KERNEL.sub("", text)
    return {
        "kernels": [hashed(without_locations(x)) for x in found],
        "rest": hashed(rest),
    }


def _case(case: Case, dtype, implementation: str | None) -> str:
    arrays, arguments = case.inputs(dtype)
    data = {n: x for n, x in arguments.items() if isinstance(x, np.ndarray | jax.Array)}
    static = {n: x for n, x in arguments.items() if n not in data}

    def run(arrays, data):
        call = functools.partial(attention, implementation=implementation)
        out, vjp = jax.vjp(functools.partial(call, **static, **data), *arrays)
        return out, vjp(out)

    if implementation == "xla":
        return jax.jit(run).lower(arrays, data).as_text()
    return lower_for_gpu(run, arrays, data)


def _modules(modules: Callable[[], list[bytes]]) -> dict:
    return {"kernels": [hashed(without_locations(x)) for x in modules()], "rest": ""}


def _of_any_size(case: Case) -> dict:
    """With gradients of these kernels, where those of Triton are faster, too."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        mosaic.with_numbers(monkeypatch, fewest_tiles=0, widths_that_keep_no_scores=())
        return hashes(_case(case, jnp.bfloat16, "mosaic_gpu"))


def _mosaic_cases() -> Iterator[Case]:
    yield from mosaic.SERVED
    for size in (64, 128, 192, 256):
        for name in ("causal", "everything", "segments", "dropout"):
            yield mosaic.with_heads(by_name(name), size)


def calls() -> dict[str, Callable[[], dict]]:
    """What to lower, by name."""
    found: dict[str, Callable[[], dict]] = {}

    def add(implementation: str | None, case: Case, dtype) -> None:
        words = implementation or "chosen", case.name, f"{case.h}", dtype.__name__
        found[" ".join(words)] = lambda: hashes(_case(case, dtype, implementation))

    for case in CASES:
        add("xla", case, jnp.float32)
        for dtype in (jnp.bfloat16, jnp.float32):
            add("triton", case.full(), dtype)
        add(None, case.full(), jnp.bfloat16)
    for case in _mosaic_cases():
        add("mosaic_gpu", case.full(), jnp.bfloat16)
    long = {
        name: functools.partial(ptxas.kernels, *variant)
        for name, variant in ptxas.variants().items()
    }
    others = ptxas.eight_bits() | ptxas.tangents() | ptxas.by_name()
    for name, call in others.items():
        long[name] = functools.partial(getattr, call, "modules")
    for name, modules in long.items():
        found[f"mosaic_gpu long {name}"] = functools.partial(_modules, modules)
    for size in (64, 128, 256):
        for case in mosaic.SERVED:
            wide = mosaic.with_heads(case, size)
            found[f"mosaic_gpu gradients {case.name} {size}"] = functools.partial(
                _of_any_size, wide.full()
            )
    return found


def lowered(name: str) -> dict:
    """What a call lowers to, or the words of its error."""
    try:
        return calls()[name]()
    except (ValueError, NotImplementedError) as error:
        return {"kernels": [], "rest": str(error)}


def main(arguments: Sequence[str] | None = None) -> int:
    description, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("what", choices=("save", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("words", nargs="*", help="of the names of calls; without, all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args(arguments)

    names = [x for x in calls() if all(word in x for word in options.words)]
    before = json.loads(options.file.read_text()) if options.what == "compare" else {}
    found, differ = {}, []
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, spawn) as pool:
        for name, now in zip(names, pool.map(lowered, names), strict=True):
            found[name] = now
            print(f"\r{len(found)}/{len(names)}", end="", file=sys.stderr, flush=True)
            for part in ("kernels", "rest"):
                if before and before.get(name, now)[part] != now[part]:
                    differ.append(f"{name}: {part}")
    print(file=sys.stderr)
    new = len(found.keys() - before.keys()) if before else 0
    kernels = sum(len(x["kernels"]) for x in found.values())
    if options.what == "save":
        options.file.write_text(json.dumps(found, indent=0))
    print("\n".join(differ), end="\n" if differ else "")
    unknown = f", {new} calls are not in {options.file}" if new else ""
    print(f"{len(found)} calls, {kernels} kernels, {len(differ)} differ{unknown}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
