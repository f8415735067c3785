"""Versions of the project beside each other, on one GPU.

    python -m benchmarks.versions --versions=HEAD~3,HEAD       # commits
    python -m benchmarks.versions --versions=HEAD,.            # and folders
    python -m benchmarks.versions --versions=HEAD,. --calls="window|ALiBi"
    python -m benchmarks.versions --versions=HEAD,. --calls=grid --processes=8

The calls whose names hold the regular expression, forward and both passes of `jax.vjp`.
"grid" are the shapes of the FlashAttention papers; the others have a feature each.
Each version has processes of its own. All compile at the same time; then one at a time
times a call, after others of the same that settle the GPU's clocks. Results are
compared with those of the version's own xla backend in float32. Prints medians, and
ratios to the first version. Keeps no rows.
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
from benchmarks.shapes import Shape, papers_grid

PACKAGES = ("jax_flash2", "pallas_kernels")
_VERSIONS = flags.DEFINE_list("versions", ["HEAD", "."], "Commits or folders.")
_CALLS = flags.DEFINE_string("calls", "", "A regular expression; all if empty.")
_IMPLEMENTATION = flags.DEFINE_string("implementation", None, "Of `attention`.")
_SMALL = flags.DEFINE_bool("small", False, "Few rows and heads, as for a CPU.")
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Over all calls.", lower_bound=1)
_PROCESSES = flags.DEFINE_integer(
    "processes", 1, "Of each version: they share its calls.", lower_bound=1
)
# What a process of `main` is told.
_FOLDER = flags.DEFINE_string("folder", None, "Times this version only.")
_NUMBER = flags.DEFINE_integer("number", 0, "Of the process, among --processes.")


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
    return {"query_segment_ids": ids}


def _documents_as_mask(call: Call) -> dict:
    (ids,) = _segments(call)["query_segment_ids"]
    return {"mask": ids[:, None] == ids}


def _lengths(call: Call) -> dict:
    return {"key_value_seq_lengths": jnp.full(call.batch, call.length * 3 // 4)}


def _offset(call: Call) -> dict:
    return {"query_offset": jnp.zeros(call.batch, jnp.int32)}


def _slopes(call: Call) -> dict:
    return {"alibi_slopes": 2.0 ** -jnp.linspace(1.0, 8.0, call.heads)}


def _dropout(call: Call) -> dict:
    return {"dropout_rng": jax.random.key(2)}


_CAUSAL = {"is_causal": True}
_DROPS = {"dropout_rate": 0.1}


def _window(before: int) -> dict:
    return {**_CAUSAL, "local_window_size": (before, 0)}


def _plain(shape: Shape) -> Call:
    heads = shape.heads, shape.kv_heads
    sizes = shape.batch, shape.length, *heads, shape.head_size
    return Call(*sizes, _CAUSAL if shape.causal else {})


CALLS = {
    **{f"grid: {shape}": _plain(shape) for shape in papers_grid()},
    "2 x 4096, 16 x 160 causal": Call(2, 4096, 16, 16, 160, _CAUSAL),
    "window 4096, 1 x 16384, 32 (8) x 128": Call(1, 16384, 32, 8, 128, _window(4095)),
    "window 1024, 1 x 16384, 32 x 64": Call(1, 16384, 32, 32, 64, _window(1023)),
    "16 documents, 1 x 16384, 16 x 128": Call(
        1, 16384, 16, 16, 128, _CAUSAL, _segments
    ),
    "mask, 4 x 4096, 16 x 128": Call(4, 4096, 16, 16, 128, {}, _mask),
    "mask, 4 x 4096, 32 x 64": Call(4, 4096, 32, 32, 64, {}, _mask),
    "mask of 16 documents, 1 x 16384, 16 x 128": Call(
        1, 16384, 16, 16, 128, _CAUSAL, _documents_as_mask
    ),
    "lengths, 4 x 4096, 16 x 128": Call(4, 4096, 16, 16, 128, {}, _lengths),
    "lengths, 16 x 1024, 16 x 64": Call(16, 1024, 16, 16, 64, {}, _lengths),
    "offset, 4 x 4096, 16 x 128": Call(4, 4096, 16, 16, 128, _CAUSAL, _offset),
    "offset, 16 x 1024, 16 x 64": Call(16, 1024, 16, 16, 64, _CAUSAL, _offset),
    "bias, 4 x 4096, 16 x 128": Call(4, 4096, 16, 16, 128, {}, _bias),
    "bias, 4 x 4096, 32 x 64": Call(4, 4096, 32, 32, 64, {}, _bias),
    "ALiBi, 4 x 4096, 16 x 128": Call(4, 4096, 16, 16, 128, {}, _slopes),
    "dropout, 4 x 4096, 16 x 128": Call(4, 4096, 16, 16, 128, _DROPS, _dropout),
    "dropout, 4 x 4096, 32 x 64": Call(4, 4096, 32, 32, 64, _DROPS, _dropout),
}
# A result is wrong if it is off by more than this part of its largest element.
_TOLERANCE = 2.0**-5


def passes(call: Call, attention: Callable) -> dict[str, Callable]:
    """Functions of (query, key, value, output gradient, other arrays)."""

    def forward(q, k, v, do, arrays):
        del do
        return [attention(q, k, v, **call.static, **arrays)]

    def both(q, k, v, do, arrays):
        out, vjp = jax.vjp(lambda *x: forward(*x, None, arrays)[0], q, k, v)
        return [out, *vjp(do)]

    return {"forward": forward, "forward_backward": both}


def _error(exact: Callable) -> Callable:
    """A function of results and operands: the largest difference from `exact`.

    As a part of the largest element of the same result; NaN if that has one.
    """

    @functools.partial(jax.jit, compiler_options=harness.UNTUNED)
    def error(results, operands, arrays):
        want = exact(*(x.astype(jnp.float32) for x in operands), arrays)
        pairs = zip(results, want, strict=False)  # forward alone gives the first
        return jnp.max(
            jnp.stack([jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)) for x, y in pairs])
        )

    return error


def programs(call: Call, attention: Callable) -> dict[str, tuple[Program, float]]:
    """Each pass, compiled, and the error of its results."""
    operands, arrays = call.operands(), call.arrays(call)
    exact = functools.partial(attention, implementation="xla")
    error = _error(passes(call, exact)["forward_backward"])
    found = {}
    for which, function in passes(call, attention).items():
        compiled = jax.jit(function).lower(*operands, arrays).compile()
        run = functools.partial(compiled, *operands, arrays)
        program = Program(run, jax.block_until_ready, lambda _: {}, {})
        found[which] = program, float(error(run(), operands, arrays))
    return found


def timed(folder: Path) -> None:
    """Prints a line of JSON for each call and pass of the version in a folder."""
    # The clock is this version's (`jax_flash2.tune.timing`); what it times is not.
    for name in [x for x in sys.modules if x.split(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    import jax_flash2

    if not Path(jax_flash2.__file__).is_relative_to(folder):
        raise ValueError(f"jax_flash2 is {jax_flash2.__file__}, not in {folder}")
    attention = functools.partial(
        jax_flash2.attention, implementation=_IMPLEMENTATION.value
    )
    names = list(options.calls_named(_CALLS.value, CALLS))
    compiled, seconds = {}, {}
    with harness.compiling():
        for name in names[_NUMBER.value :: _PROCESSES.value]:
            call = CALLS[name].small() if _SMALL.value else CALLS[name]
            try:
                compiled[name] = programs(call, attention)
            except Exception as error:  # a call's failure is a result, not the end
                print(json.dumps({"call": name, "failure": harness.describe(error)}))
    for number in range(_ROUNDS.value):
        done = f"{folder.name}: {len(compiled)} calls compiled, {number} rounds timed"
        print(done, file=sys.stderr, flush=True)
        for name, own in compiled.items():
            runs = {which: program for which, (program, _) in own.items()}
            with harness.alone():
                timings, failures = harness.time_interleaved(runs, rounds=3)
            for which, x in timings.items():
                seconds.setdefault((name, which), []).extend(x.seconds)
            for which, text in failures.items():
                print(json.dumps({"call": name, "pass": which, "failure": text}))
    for (name, which), found in seconds.items():
        _, error = compiled[name][which]
        row = {"call": name, "pass": which, "seconds": statistics.median(found)}
        print(json.dumps({**row, "wrong": not error <= _TOLERANCE}))


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
    found = {
        version: {(row["call"], row.get("pass", "")): row for row in of_version}
        for version, of_version in rows.items()
    }
    order = list(CALLS)
    every = sorted(set().union(*found.values()), key=lambda x: (order.index(x[0]), x))
    first = next(iter(rows))
    lines = [" | ".join(["call", "pass", *rows])]
    for at in every:
        base = found[first].get(at, {}).get("seconds")
        cells = [cell(found[version].get(at), base) for version in rows]
        lines.append(" | ".join([at[0], at[1].replace("_", " and "), *cells]))
    return lines


def cell(row: dict | None, base: float | None) -> str:
    """A time, its ratio to `base` seconds, and whether results were wrong."""
    if row is None:
        return ""
    if "failure" in row:
        return row["failure"]
    ratio = f" ({base / row['seconds']:.3f})" if base else ""
    return f"{1e6 * row['seconds']:.4g} us{ratio}" + " WRONG" * row["wrong"]


def main():
    if _FOLDER.value:
        timed(Path(_FOLDER.value))
        return
    options.calls_named(_CALLS.value, CALLS)
    given = [x for x in sys.argv[1:] if not x.startswith("--versions")]
    with tempfile.TemporaryDirectory() as temporary:
        started = []
        for i, version in enumerate(_VERSIONS.value):
            folder = in_folder(version, Path(temporary, str(i)))
            command = [sys.executable, "-m", "benchmarks.versions", *given]
            for number in range(_PROCESSES.value):
                mine = [f"--folder={folder}", f"--number={number}"]
                process = subprocess.Popen(
                    [*command, *mine], cwd=ROOT, stdout=subprocess.PIPE, text=True
                )
                started.append((version, process))
        rows = {version: [] for version in _VERSIONS.value}
        for version, process in started:
            lines, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"{version}: exit code {process.returncode}")
            found = [x for x in lines.splitlines() if x.startswith("{")]
            rows[version] += map(json.loads, found)
            print(f"{version}: {len(rows[version])} times", flush=True)
    print("\n" + "\n".join(table(rows)))


if __name__ == "__main__":
    options.launch(main)
