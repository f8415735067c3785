"""What every comparison shares: the reference, timing, the ceiling."""

import contextlib
import dataclasses
import functools
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import Shape
from jax_flash2.tune import timing
from jax_flash2.tune.timing import Timing as Timing
from jax_flash2.tune.timing import describe as describe
from jax_flash2.tune.timing import time_interleaved as time_interleaved

# Another framework uses the same GPU: JAX takes memory as it needs it. Read when JAX
# first looks for devices.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# No thread compiles while something is timed (but `benchmarks.first_calls`).
os.environ.setdefault("JAX_FLASH2_AHEAD", "off")

# A peer is wrong if a row of a result is off by more than this part of its length. A
# correct one rounds a few times: some eps of the dtype, of TF32 for float32 on a GPU.
TOLERANCE = {"bfloat16": 2.0**-5, "float16": 2.0**-8, "float32": 2.0**-8}

# Compiler options of references: XLA would time dozens of forms of each product, for
# minutes where many processes compile.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

_MOST_GPUS = 16  # of a machine


def is_gpu() -> bool:
    return jax.default_backend() == "gpu"


def checked_heads(shape: Shape, name: str) -> int:
    """How many of the last heads of a result are compared with the reference."""
    return shape.group if name in ("out", "dq") else 1


def reference(shape: Shape, operands: Sequence[jax.Array]) -> dict[str, np.ndarray]:
    """Exact results for the last key/value head of the last batch entry.

    In float32 with products in full float32, over whole rows of scores, some query rows
    at a time: memory is linear in the length.

    Returns:
      out and dq [T, N / K, H], dk and dv [T, 1, H], and dq_rounding [T, N / K, 1]: how
      far dq moves for each unit of relative rounding of out (`check`).
    """
    results = jax.device_get(_reference(*operands, causal=shape.causal))
    out, dq, rounding, dk, dv = results
    exact = {"out": out, "dq": dq, "dk": dk[:, None], "dv": dv[:, None]}
    return {**exact, "dq_rounding": rounding}


@functools.partial(jax.jit, static_argnames="causal", compiler_options=UNTUNED)
def _reference(q, k, v, do, *, causal: bool):
    group = q.shape[2] // k.shape[2]
    q, do = (x[-1, :, -group:].astype(jnp.float32) for x in (q, do))
    k, v = (x[-1, :, -1].astype(jnp.float32) for x in (k, v))
    length, _, head_size = q.shape
    rows = math.gcd(length, 512)
    scale = head_size**-0.5
    product = functools.partial(jnp.einsum, precision="highest")

    def block(gradients, start):
        dk, dv = gradients
        q_rows, do_rows = (
            jax.lax.dynamic_slice_in_dim(x, start, rows) for x in (q, do)
        )
        scores = scale * product("tgh,sh->gts", q_rows, k)
        if causal:
            positions = start + jnp.arange(rows)
            kept = positions[:, None] >= jnp.arange(length)
            scores = jnp.where(kept, scores, -jnp.inf)
        p = jax.nn.softmax(scores)
        out = product("gts,sh->tgh", p, v)
        dp = product("tgh,sh->gts", do_rows, v)
        ds = scale * p * (dp - jnp.sum(p * dp, -1, keepdims=True))
        dk += product("gts,tgh->sh", ds, q_rows)
        dv += product("gts,tgh->sh", p, do_rows)
        # A rounding of out moves rowsum(do * out), and so dq along the mean key.
        out_size, do_size, key_size = (
            jnp.linalg.norm(x, axis=-1, keepdims=True)
            for x in (out, do_rows, product("gts,sh->tgh", p, k))
        )
        rounding = scale * head_size**-0.5 * out_size * do_size * key_size
        return (dk, dv), (out, product("gts,sh->tgh", ds, k), rounding)

    zeros = (jnp.zeros_like(k), jnp.zeros_like(v))
    (dk, dv), blocks = jax.lax.scan(block, zeros, jnp.arange(0, length, rows))
    out, dq, rounding = (x.reshape(length, group, -1) for x in blocks)
    return out, dq, rounding, dk, dv


def row_error(got: np.ndarray, want: np.ndarray, excused: np.ndarray | float = 0.0):
    """The largest `|got - want| / |want|` of a row, rows being the last axis.

    A row shorter than the median one counts as if it were as long: what cancels to
    nearly nothing cannot be exact. inf if anything is NaN.

    Args:
      got, want: [..., row].
      excused: [..., 1], part of `|got - want|` that does not count.
    """
    size = np.linalg.norm(want, axis=-1, keepdims=True)
    size = np.maximum(size, np.median(size))
    error = np.linalg.norm(got - want, axis=-1, keepdims=True)
    error = np.maximum(error - excused, 0.0) / np.maximum(size, 1e-30)
    return float(error.max()) if np.isfinite(error).all() else math.inf


def check(
    got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], dtype: str
) -> dict:
    """Errors of the results in `got`, as the part of a row that tells them.

    The gradients of every FlashAttention use out as it was saved, in its dtype; what
    four of its unit roundoffs do to dq is excused: where few keys share a row, that is
    more than what cancels leaves.

    Returns:
      row_error and max_abs_error by result (None: not finite), and `wrong`.
    """
    roundoffs = 4 * float(jnp.finfo(dtype).eps) / 2
    relative = {
        name: row_error(x, want[name], roundoffs * want.get(f"{name}_rounding", 0.0))
        for name, x in got.items()
    }
    absolute = {name: float(np.abs(x - want[name]).max()) for name, x in got.items()}

    def finite(errors):
        return {name: x if math.isfinite(x) else None for name, x in errors.items()}

    return {
        "row_error": finite(relative),
        "max_abs_error": finite(absolute),
        "wrong": max(relative.values()) > TOLERANCE[dtype],
    }


@dataclasses.dataclass(frozen=True)
class Program(timing.Program):
    """A pass of a peer, compiled, with its operands.

    Attributes:
      results: what `reference` gives, of the results of `call`, in float32.
      memory: bytes: "temp", beyond operands and results, and "total"; None if unknown.
      note: what a reader of its figures should know.
    """

    results: Callable[[object], dict[str, np.ndarray]]
    memory: dict[str, int | None]
    note: str = ""


@contextlib.contextmanager
def _locked(gpus: Iterable[str], kind: str) -> Iterator[None]:
    """Locks of some GPUs, for processes of this machine; "LOCK_SH" or "LOCK_EX"."""
    if not is_gpu():
        yield
        return
    import fcntl  # not on Windows

    with contextlib.ExitStack() as files:
        for gpu in sorted(gpus):
            path = Path(tempfile.gettempdir(), f"jax_flash2-gpu-{gpu}.lock")
            file = files.enter_context(path.open("w"))
            fcntl.flock(file, getattr(fcntl, kind))
        yield


def _gpus() -> tuple[set[str], set[str]]:
    """GPUs that this process may use, by number, and those of the machine."""
    every = {str(i) for i in range(_MOST_GPUS)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    mine = every if visible is None else set(visible.replace("/", "-").split(","))
    return mine, every | mine


def compiling() -> contextlib.AbstractContextManager[None]:
    """Beside other processes that compile, while none of them times, on any GPU.

    So a benchmark can be divided over processes: they compile all they need beside each
    other, then one after another times (`alone`). Compilers load the processor, which
    calls need, too, and may autotune on the GPU.
    """
    return _locked(_gpus()[1], "LOCK_SH")


def alone() -> contextlib.AbstractContextManager[None]:
    """While no other process times on the same GPU, or compiles (`compiling`)."""
    return _locked(_gpus()[0], "LOCK_EX")


def batched(found: Sequence, count: int) -> Iterator[Sequence]:
    """Of `count` each, the last one of what is left."""
    for first in range(0, len(found), count):
        yield found[first : first + count]


def matmul_tflops(size: int | None = None) -> float:
    """TFLOP/s of a product of two square matrices: the practical ceiling here.

    Of random normal bfloat16 matrices of size 8192 on a GPU, float32 of size 1024
    elsewhere.
    """
    size = size or (8192 if is_gpu() else 1024)
    dtype = jnp.bfloat16 if is_gpu() else jnp.float32

    @jax.jit
    def make(key):
        return jax.random.normal(key, (size, size)).astype(dtype)

    x, y = (make(jax.random.key(seed)) for seed in (0, 1))
    product = jax.jit(jnp.matmul)
    program = Program(
        lambda: product(x, y), jax.block_until_ready, lambda out: {}, memory={}
    )
    timings, failures = time_interleaved({"matmul": program}, rounds=5)
    if failures:
        raise RuntimeError(failures["matmul"])
    return 2 * size**3 / statistics.median(timings["matmul"].seconds) / 1e12
