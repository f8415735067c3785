"""Lowered halves of calls, kept beside the programs that JAX keeps.

JAX's persistent compilation cache holds what XLA made of a program, under a digest of
the program as it was lowered. So a new process traces and lowers every kernel before it
finds anything, which takes seconds for Hopper's. Where that cache is on, a half of a
call that kernels of a GPU make is kept as it was lowered, in the folder `jax_flash2` of
the cache: a process that meets it again reads it. Its module is one of its own, as it
is where a half is compiled ahead (`_ahead`), with or without such a cache.

It lies under a digest of all that decides what it lowers to: the code of this library,
the versions of JAX, the GPU, the user's tables, and the call's static fields and types.
A field whose text may not say all of it, such as a function, leaves a call without a
digest (`Unknown`): such a call is lowered anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.interpreters.mlir import ir
from jaxlib.mlir.dialects import func

from jax_flash2 import _ahead
from pallas_kernels import device, user_tables

try:
    from jax._src import config as settings
except ImportError:  # a private name: contexts are then not seen
    settings = None

VARIABLE = "JAX_FLASH2_KEPT"
OFF = "off"
_FOLDER = "jax_flash2"
# JAX's settings for kernels begin so, and variables of the environment.
_FLAGS = ("jax_pallas", "jax_mosaic")
_VARIABLES = "MOSAIC_GPU_"
# `set_xla_metadata` and `compute_on`, as JAX keeps them.
_CONTEXTS = ("xla_metadata_context_manager", "compute_on_context_manager")


class Unknown(TypeError):
    """A value of which no text is known that says all of it."""


def folder() -> Path | None:
    """Where lowered halves are kept; None where they are not.

    In the folder of JAX's persistent compilation cache, if that is on and on a disk.
    The environment variable `JAX_FLASH2_KEPT` set to "off" keeps none.
    """
    where = jax.config.jax_compilation_cache_dir
    is_on = jax.config.jax_enable_compilation_cache
    if not where or not is_on or "://" in where or os.environ.get(VARIABLE) == OFF:
        return None
    return Path(where).expanduser() / _FOLDER


def text(x: Any) -> str:
    """Says all of a value: those with equal texts are equal, in any process.

    Raises:
      Unknown: for a value of any other type than static fields of calls have.
    """
    match x:
        case None | bool() | int() | float() | complex() | str() | bytes():
            if type(x) in (type(None), bool, int, float, complex, str, bytes):
                return repr(x)
        case np.dtype():
            return f"dtype({x.name})"
        case np.ndarray() | np.generic():
            if not x.dtype.hasobject:
                return f"array({x.dtype.name}, {x.shape}, {x.tobytes().hex()})"
        case enum.Enum():
            return f"{_type(x)}.{x.name}"
        case Primitive():
            return f"primitive({x.name})"
        case tuple() | list():
            return f"{_type(x)}({', '.join(map(text, x))})"
        case frozenset() | set():
            return f"{_type(x)}({', '.join(sorted(map(text, x)))})"
        case Mapping():
            items = (f"{text(k)}: {text(v)}" for k, v in x.items())
            return f"{_type(x)}({', '.join(items)})"
        case type():
            return f"type({x.__module__}.{x.__qualname__})"
    if dataclasses.is_dataclass(x):
        fields = ((f.name, getattr(x, f.name)) for f in dataclasses.fields(x))
        return f"{_type(x)}({', '.join(f'{n}={text(value)}' for n, value in fields)})"
    raise Unknown(f"no text says all of a {_type(x)}")


def _type(x) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def digest(backends: Sequence[str], *values) -> str | None:
    """Of values, and of what decides how a call is lowered; None if one is unknown.

    So it is, too, if a file of the code has changed since it was imported, or in a
    context that JAX writes into all that is lowered there.

    Args:
      backends: which make the call.
    """
    contexts = (getattr(settings, name, None) for name in _CONTEXTS)
    if any(getattr(x, "value", None) is not None for x in contexts):
        return None
    if not _IMPORTED or _states() != _IMPORTED:
        return None
    of_all = _settings(backends)
    try:
        found = "\n".join((code(), *map(text, of_all), *map(text, values)))
    except Unknown:
        return None
    return hashlib.sha256(found.encode()).hexdigest()


def _settings(backends: Sequence[str]) -> Iterator[Any]:
    """What decides how a call is lowered, beside code and the call."""
    gpu = device.gpu()
    yield device.target(), gpu
    tuned = [x for x in backends if x in user_tables.KNOWN]
    yield tuple(backends), [user_tables.read(x, gpu.kind) for x in tuned]
    if device.gpu_is_here():
        yield jax.devices()[0].client.platform_version
    yield jax.config.jax_enable_x64, str(jax.config.jax_default_matmul_precision)
    flags = jax.config.values.items()
    yield sorted((k, str(v)) for k, v in flags if k.startswith(_FLAGS))
    variables = (x for x in os.environ.items() if x[0].startswith(_VARIABLES))
    # JAX sets paths of libraries when it imports Mosaic GPU, sooner or later.
    yield sorted(x for x in variables if not x[0].endswith("_PATH"))


def _files() -> list[Path]:
    here = Path(__file__).parent
    return [
        path
        for package in (here, here.parent / "pallas_kernels")
        for path in sorted(package.rglob("*"))
        if path.suffix in (".py", ".json")
    ]


def _states() -> list[tuple]:
    """Of the files of this library, which change when one is written."""
    try:
        found = [(path, path.stat()) for path in _files()]
    except OSError:  # one is being replaced
        return []
    return [(p, x.st_mtime_ns, x.st_ctime_ns, x.st_size, x.st_ino) for p, x in found]


_IMPORTED = _states()


@functools.cache
def code() -> str:
    """A digest of the code that makes programs: that of this library and of JAX."""
    here = Path(__file__).parent.parent
    found = hashlib.sha256(f"{jax.__version__} {jaxlib.version.__version__}".encode())
    for path in _files():
        found.update(path.relative_to(here).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def lower(
    context,
    operands,
    name: str,
    backends: Sequence[str],
    digest: Callable[[], str | None],
    make: Callable[[], jax.stages.Lowered],
) -> list[ir.Value] | None:
    """The results of a half, as a function from a module of its own.

    That module is read from disk, or else made, written there (`folder`) and, where it
    is worthwhile, compiled ahead (`_ahead`).

    Args:
      context: of JAX's lowering.
      operands: values of MLIR.
      name: of the function that is called.
      backends: which make the half.
      digest: names it, or gives None.
      make: lowers it in a module of its own.

    Returns:
      None for a half that is lowered in place: with nowhere to keep it and nothing to
      gain ahead, without a digest, or in an export, which JAX lowers by other rules.
    """
    module = context.module_context
    if module.lowering_parameters.for_export:
        return None
    where, is_ahead = folder(), _ahead.is_worthwhile(backends)
    is_ahead = is_ahead and len(module.platforms) == 1  # others are not compiled
    found = digest() if where or is_ahead else None
    if found is None:
        return None
    path = where and where / f"{name}-{found}"
    half = _parsed(_read(path), module.context) if path else None
    if half is None:
        lowered = make()
        made = lowered.compiler_ir()
        assert made is not None  # it is MLIR, as ever
        data = mlir.module_to_bytecode(made)
        if path:
            _write(path, data)
        if is_ahead:
            _ahead.start(found, lowered)
        half = ir.Module.parse(data, module.context)
    symbols = module.symbol_table
    name = mlir.merge_mlir_modules(module.module, name, half, dst_symtab=symbols)
    types = symbols[name].type.results
    call = func.CallOp(types, ir.FlatSymbolRefAttr.get(name), operands)
    return list(call.results)


def _parsed(data: bytes | None, context) -> ir.Module | None:
    """A module, if there is one, and this build of jaxlib can read it."""
    if data is None:
        return None
    try:
        return ir.Module.parse(data, context)
    except Exception:  # MLIRError, of which JAX has no public name
        return None


def _read(path: Path) -> bytes | None:
    """What was kept, if it is whole: it begins with a digest of the rest."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    return data[size:] if data[:size] == hashlib.sha256(data[size:]).digest() else None


def _write(path: Path, data: bytes) -> None:
    """All at once: other processes may read and write it too."""
    draft = path.with_name(f".{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("xb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        warnings.warn(
            f"a lowered call is not kept in {path.parent}, JAX's compilation cache: "
            f"{error}. The next process will lower it again ({VARIABLE}={OFF} keeps "
            "none)",
            stacklevel=2,
        )
