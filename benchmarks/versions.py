"""Versions of the project beside each other, on one GPU.

    python -m benchmarks.versions --versions=HEAD~3,HEAD       # commits
    python -m benchmarks.versions --versions=HEAD,.            # and folders
    python -m benchmarks.versions --versions=HEAD,. --calls="window|128 causal"

Each version is a process. They compile at the same time, and one at a time is timed:
forward, and both passes of `jax.vjp`, in several rounds over the calls in whose names
the regular expression is found. Prints medians, and ratios to the first version.
Results are not checked, and no rows are kept.
"""

import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags

from benchmarks import harness, options
from benchmarks.harness import Program
from benchmarks.records import ROOT

_VERSIONS = flags.DEFINE_list("versions", ["HEAD", "."], "Commits or folders.")
_CALLS = flags.DEFINE_string("calls", "", "A regular expression; all if empty.")
_IMPLEMENTATION = flags.DEFINE_string("implementation", None, "Of `attention`.")
_SMALL = flags.DEFINE_bool("small", False, "Few rows and heads, as for a CPU.")
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Over all calls.", lower_bound=1)
_FOLDER = flags.DEFINE_string("folder", None, "Times this one only. For processes.")


@dataclasses.dataclass(frozen=True)
class Call:
    """Sizes of a call, and its arguments beside query, key and value."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_size: int
    static: dict = dataclasses.field(default_factory=dict)
    arrays: Callable[["Call"], dict] = lambda call: {}

    def small(self) -> "Call":
        few = {"batch": 1, "length": 64, "heads": 4, "kv_heads": 2, "head_size": 16}
        return dataclasses.replace(self, **few)

    def operands(self) -> list[jax.Array]:
        """Query, key, value and the gradient of the output."""
        heads = self.heads, self.kv_heads, self.kv_heads, self.heads
        shapes = [(self.batch, self.length, n, self.head_size) for n in heads]
        keys = jax.random.split(jax.random.key(0), 4)
        pairs = zip(keys, shapes, strict=True)
        return [jax.random.normal(key, x, jnp.bfloat16) for key, x in pairs]


def _normal(call: Call, *axes: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (*axes, call.length, call.length))


def _bias(call: Call) -> dict:
    return {"bias": _normal(call, 1, call.heads).astype(jnp.bfloat16)}


def _mask(call: Call) -> dict:
    return {"mask": _normal(call, 1, 1) > -0.5}


def _segments(call: Call) -> dict:
    ids = jnp.repeat(jnp.arange(16), call.length // 16)[None]
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


def _slopes(call: Call) -> dict:
    return {"alibi_slopes": 2.0 ** -jnp.linspace(1.0, 8.0, call.heads)}


def _dropout(call: Call) -> dict:
    return {"dropout_rng": jax.random.key(2)}


_CAUSAL = {"is_causal": True}
_DROPS = {"dropout_rate": 0.1}


def _window(before: int) -> dict:
    return {**_CAUSAL, "local_window_size": (before, 0)}


CALLS = {
    "2 x 8192, 16 x 128 causal": Call(2, 8192, 16, 16, 128, _CAUSAL),
    "2 x 8192, 16 x 128": Call(2, 8192, 16, 16, 128),
    "8 x 2048, 16 x 128 causal": Call(8, 2048, 16, 16, 128, _CAUSAL),
    "8 x 2048, 16 x 128": Call(8, 2048, 16, 16, 128),
    "4 x 4096, 32 x 128 causal": Call(4, 4096, 32, 32, 128, _CAUSAL),
    "2 x 8192, 32 (8) x 128 causal": Call(2, 8192, 32, 8, 128, _CAUSAL),
    "1 x 16384, 32 x 64 causal": Call(1, 16384, 32, 32, 64, _CAUSAL),
    "8 x 2048, 32 x 64 causal": Call(8, 2048, 32, 32, 64, _CAUSAL),
    "2 x 8192, 32 x 64": Call(2, 8192, 32, 32, 64),
    "2 x 8192, 8 x 256 causal": Call(2, 8192, 8, 8, 256, _CAUSAL),
    "8 x 2048, 8 x 256": Call(8, 2048, 8, 8, 256),
    "2 x 4096, 16 x 160 causal": Call(2, 4096, 16, 16, 160, _CAUSAL),
    "window 4096, 1 x 16384, 32 (8) x 128": Call(1, 16384, 32, 8, 128, _window(4095)),
    "window 1024, 1 x 16384, 32 x 64": Call(1, 16384, 32, 32, 64, _window(1023)),
    "16 documents, 1 x 16384, 16 x 128": Call(
        1, 16384, 16, 16, 128, _CAUSAL, _segments
    ),
    "mask, 4 x 4096, 16 x 128": Call(4, 4096, 16, 16, 128, {}, _mask),
    "bias, 4 x 4096, 16 x 128": Call(4, 4096, 16, 16, 128, {}, _bias),
    "bias, 4 x 4096, 32 x 64": Call(4, 4096, 32, 32, 64, {}, _bias),
    "ALiBi, 4 x 4096, 16 x 128": Call(4, 4096, 16, 16, 128, {}, _slopes),
    "dropout, 4 x 4096, 16 x 128": Call(4, 4096, 16, 16, 128, _DROPS, _dropout),
    "dropout, 4 x 4096, 32 x 64": Call(4, 4096, 32, 32, 64, _DROPS, _dropout),
}
PASSES = ("forward", "forward_backward")


def programs(call: Call, attention: Callable) -> dict[str, Program]:
    """Each pass, compiled."""
    *qkv, do = call.operands()
    arrays = call.arrays(call)

    def forward(q, k, v, do, arrays):
        return attention(q, k, v, **call.static, **arrays)

    def both(q, k, v, do, arrays):
        out, vjp = jax.vjp(lambda *x: forward(*x, do, arrays), q, k, v)
        return out, vjp(do)

    found = {}
    for name, function in zip(PASSES, (forward, both), strict=True):
        compiled = jax.jit(function).lower(*qkv, do, arrays).compile()
        run = functools.partial(compiled, *qkv, do, arrays)
        found[name] = Program(run, jax.block_until_ready, lambda _: {}, {})
    return found


def timed(folder: Path) -> None:
    """Prints a line of JSON for each call and pass of the version in a folder."""
    sys.path.insert(0, str(folder))
    import jax_flash2

    if not Path(jax_flash2.__file__).is_relative_to(folder):
        raise ValueError(f"jax_flash2 is {jax_flash2.__file__}, not in {folder}")
    attention = functools.partial(
        jax_flash2.attention, implementation=_IMPLEMENTATION.value
    )
    calls = options.calls_named(_CALLS.value, CALLS)
    if _SMALL.value:
        calls = {name: call.small() for name, call in calls.items()}
    compiled, seconds = {}, {}
    with harness.compiling():
        for name, call in calls.items():
            try:
                compiled[name] = programs(call, attention)
            except Exception as error:  # a call's failure is a result, not the end
                print(json.dumps({"call": name, "failure": harness.describe(error)}))
    for _ in range(_ROUNDS.value):
        for name, own in compiled.items():
            with harness.alone():
                timings, failures = harness.time_interleaved(own, rounds=3)
            for which, x in timings.items():
                seconds.setdefault((name, which), []).extend(x.seconds)
            for which, text in failures.items():
                print(json.dumps({"call": name, "pass": which, "failure": text}))
    for (name, which), found in seconds.items():
        row = {"call": name, "pass": which, "seconds": statistics.median(found)}
        print(json.dumps(row))


def in_folder(version: str, folder: Path) -> Path:
    """Where a version is: a folder, or a commit whose files are put into one."""
    if Path(version).is_dir():
        return Path(version).resolve()
    command = ["git", "-C", str(ROOT), "archive", version, "jax_flash2"]
    try:
        done = subprocess.run(
            [*command, "pallas_kernels"], capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode().strip() or error
        raise ValueError(
            f"--versions: {version!r} is no folder and no commit: {said}"
        ) from error
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=done.stdout, check=True)
    return folder


def table(rows: dict[str, list[dict]]) -> list[str]:
    """Microseconds by call, pass and version, and ratios to the first version."""
    times: dict[tuple, dict] = {}
    for version, found in rows.items():
        for row in found:
            at = row["call"], row.get("pass", "")
            times.setdefault(at, {})[version] = row.get("seconds") or row["failure"]
    lines = [" | ".join(["call", "pass", *rows])]
    first = next(iter(rows))
    for (call, which), by_version in times.items():
        cells = [call, which.replace("_", " and ")]
        for version in rows:
            x, base = by_version.get(version), by_version.get(first)
            if isinstance(x, float) and isinstance(base, float):
                cells.append(f"{1e6 * x:.4g} us ({base / x:.3f})")
            else:
                cells.append(f"{1e6 * x:.4g} us" if isinstance(x, float) else str(x))
        lines.append(" | ".join(cells))
    return lines


def main():
    if _FOLDER.value:
        timed(Path(_FOLDER.value))
        return
    options.calls_named(_CALLS.value, CALLS)
    given = [x for x in sys.argv[1:] if not x.startswith("--versions")]
    with tempfile.TemporaryDirectory() as temporary:
        started = {}
        for i, version in enumerate(_VERSIONS.value):
            folder = in_folder(version, Path(temporary, str(i)))
            command = [sys.executable, "-m", "benchmarks.versions", *given]
            started[version] = subprocess.Popen(
                [*command, f"--folder={folder}"],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
        rows = {}
        for version, process in started.items():
            lines, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"{version}: exit code {process.returncode}")
            found = [x for x in lines.splitlines() if x.startswith("{")]
            rows[version] = list(map(json.loads, found))
            print(f"{version}: {len(rows[version])} times", flush=True)
    print("\n" + "\n".join(table(rows)))


if __name__ == "__main__":
    options.launch(main)
