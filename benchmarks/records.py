"""Results as data: one JSON line a row, from which every table and plot is made.

A row says where it comes from: run_id (time and commit), date, commit, versions,
device. Rows of one run_id belong together; in a file that `benchmarks.trim` has been
over, the first of them says it for all.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent
RESULTS_DIR = "benchmarks/results"
# What a row says about the run that it is of.
FACTS = ("benchmark", "run_id", "date", "commit", "dirty", "versions", "device")
_PACKAGES = ("jax", "jaxlib", "torch", "triton", "tokamax", "flash-attn-4", "numpy")


def git_state() -> tuple[str, bool | None]:
    """The commit, and whether files other than results differ from it.

    Returns:
      ("unknown", None) where there is no git or no repository.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--", ".", f":!{RESULTS_DIR}")
    except (OSError, subprocess.CalledProcessError):
        return "unknown", None
    return commit, bool(changes)


def versions() -> dict[str, str]:
    """Of Python and of every package here that takes part."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name() -> str:
    """Of the GPU; or of the processor, with the number of its cores in use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        names = (
            value.strip() for key, _, value in lines if key.strip() == "model name"
        )
        model = next(names, model)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return f"{model} ({cores or os.cpu_count()} cores)"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of one benchmark.

    Attributes:
      path: the file that its rows are appended to.
      facts: what each of its rows says about where it comes from.
      done: rows that are there already, when an earlier run is carried on.
    """

    path: Path
    facts: dict
    done: tuple[dict, ...] = ()

    @classmethod
    def start(
        cls,
        benchmark: str,
        results_dir: str | Path,
        *,
        commit: str | None = None,
        resume: bool = False,
        run_id: str | None = None,
    ) -> "Run":
        """A new run, or the newest one in the file carried on.

        Args:
          benchmark: names the file.
          results_dir: where the file is; made if need be.
          commit: what to record where git cannot say.
          resume: carry on with the newest run of the file.
          run_id: of a run that several processes share; None makes one.

        Raises:
          ValueError: if the run to carry on is of other code or of another device.
        """
        found, dirty = git_state()
        if found == "unknown" and commit:
            found = commit
        now = datetime.datetime.now(datetime.UTC)
        mark = "+" if dirty else ""
        facts = {
            "run_id": run_id or f"{now:%Y%m%dT%H%M%SZ}-{found[:9]}{mark}",
            "benchmark": benchmark,
            "date": now.isoformat(timespec="seconds"),
            "commit": found,
            "dirty": dirty,
            "versions": versions(),
            "device": device_name(),
        }
        path = Path(results_dir) / f"{benchmark}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        done = tuple(newest(results_dir, benchmark)) if resume else ()
        if done:
            for name in ("commit", "dirty", "device", "versions"):
                if done[0][name] != facts[name]:
                    raise ValueError(
                        f"the newest run in {path} has {name} {done[0][name]!r}, this "
                        f"one {facts[name]!r}: start a new run"
                    )
            facts["run_id"] = done[0]["run_id"]
        return cls(path, facts, done)

    def write(self, row: Mapping[str, object]) -> dict:
        """Appends `row`, with the run's facts before it; returns both."""
        row = {**self.facts, **row}
        with self.path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        return row


def read(path: Path) -> list[dict]:
    """All rows of a file, each with its run's facts; none where there is no file."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    facts: dict[str, dict] = {}
    for row in rows:
        own = {name: row[name] for name in FACTS if name in row}
        facts.setdefault(row["run_id"], own)
    return [{**facts[row["run_id"]], **row} for row in rows]


def newest(results_dir: str | Path, benchmark: str) -> list[dict]:
    """Rows of the newest run in the file; none where there is no file.

    Of rows about the same thing (shape, pass, peer) the last counts.
    """
    rows = read(Path(results_dir) / f"{benchmark}.jsonl")
    if not rows:
        return []
    last = rows[-1]["run_id"]
    return list({key(row): row for row in rows if row["run_id"] == last}.values())


def key(row: Mapping) -> str:
    """What a row is about: its shape, pass, peer and feature; or a model's call."""
    about = [row["pass"], row["peer"]]
    about += [row.get(name) for name in ("shape", "feature", "call", "sizes")]
    return json.dumps(about, sort_keys=True)
