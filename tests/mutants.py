"""Faults of one line, each of which some test must see: `python -m tests.mutants`.

Coverage says which lines tests run, not whether they look. So each fault of
`tests.faults.catalogue` is made in a copy of the project, and the tests that should see
it are run there: it is killed if one of them fails. It may survive only with a reason,
as that no result changes.

    python -m tests.mutants                  all of them
    python -m tests.mutants dropout window   those whose name matches one of these
    python -m tests.mutants --check          each has one place, and tests to see it
    python -m tests.mutants --clean          the same tests without any fault must pass

The exit code is 1 if a fault survives without a reason, or could not be judged.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from _pytest.mark.expression import Expression

ROOT = Path(__file__).parent.parent
PACKAGES = ("jax_flash2", "pallas_kernels")
# Exit codes of pytest; by others it could not run what was asked for.
_PASSED, _FAILED = 0, 1


class Place(NamedTuple):
    """Where a fault's text stands: from `start` to `end` of a file."""

    file: str
    start: int
    end: int


def sources(folder: Path) -> dict[str, str]:
    """The text of every file of the two packages, by its path from the folder."""
    files = (x for package in PACKAGES for x in (folder / package).rglob("*.py"))
    return {x.relative_to(folder).as_posix(): x.read_text() for x in sorted(files)}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault, and the tests that should see it.

    Its text is looked for in both packages, so that code may move from file to file and
    be indented otherwise. Where several places have the text, `file` decides.

    Attributes:
      name: what is wrong.
      file: where it was written for, from the root of the project.
      old: text of one place; lines after the first may be indented otherwise.
      new: what replaces it.
      tests: arguments of pytest.
      lives: why it may survive these tests, where it may.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    lives: str | None = None

    def place(self, texts: Mapping[str, str]) -> Place:
        """The one place that has the text, in these files.

        Raises:
          ValueError: if there is none, or several that `file` does not tell apart.
        """
        # However lines are indented.
        lines = (re.escape(x.lstrip(" ")) for x in self.old.split("\n"))
        pattern = r"\n *".join(lines)
        found = [
            Place(file, *match.span())
            for file, text in texts.items()
            for match in re.finditer(pattern, text)
        ]
        found = [x for x in found if x.file == self.file] or found
        if len(found) != 1 or self.old == self.new:
            raise ValueError(
                f"{self.name}: one place of {self.file} or of the packages must hold "
                f"this text, and {len(found)} do: {self.old!r}"
            )
        return found[0]

    def applied(self, text: str, place: Place) -> str:
        """The text of the place's file with the fault."""
        there, new = text[place.start : place.end], self.new
        if "\n" in self.old:
            moved = _indent(there) - _indent(self.old)
            first, *rest = new.split("\n")
            rest = [" " * (moved + _indent("\n" + x)) + x.lstrip(" ") for x in rest]
            new = "\n".join([first, *rest])
        return text[: place.start] + new + text[place.end :]


def _indent(text: str) -> int:
    """Spaces that the second line of a text begins with."""
    second = text.split("\n")[1]
    return len(second) - len(second.lstrip(" "))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a fault.

    Attributes:
      outcome: "killed", "lives" (with a reason), "survived" or "not judged".
      seconds: of its tests.
      detail: the reason, or the last words of pytest.
    """

    name: str
    outcome: str
    seconds: float
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.outcome in ("killed", "lives", "passed")

    def __str__(self) -> str:
        words = f"{self.outcome:10} {self.seconds:6.1f} s  {self.name}"
        return words if not self.detail else f"{words}: {self.detail}"


def problems(mutants: Sequence[Mutant]) -> list[str]:
    """What is wrong with the list itself."""
    found = []
    names = [mutant.name for mutant in mutants]
    found += [f"{x}: a name of two" for x in sorted(set(names)) if names.count(x) > 1]
    texts = sources(ROOT)
    for mutant in mutants:
        try:
            mutant.place(texts)
        except ValueError as error:
            found.append(str(error))
    collected = collect()
    for tests in sorted({mutant.tests for mutant in mutants}):
        if not any(selects(tests, test) for test in collected):
            found.append(f"no test is selected by {tests}")
    return found


def collect() -> list[str]:
    """Names of all tests, deep ones too."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if "::" in line]


def selects(tests: str, test: str) -> bool:
    """Whether arguments of pytest, a path and `-k` with words, select a test."""
    path, *options = shlex.split(tests)
    words = options[options.index("-k") + 1] if "-k" in options else ""
    if not test.startswith(path):
        return False
    named = Expression.compile(words or "tests")
    return named.evaluate(lambda word, **_: word.lower() in test.lower())


def copy_project(folder: Path) -> None:
    """The files that git knows or would, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def run_tests(folder: Path, tests: str, timeout: float) -> tuple[int | None, str]:
    """pytest's exit code (None: it took too long) and last line."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", ""]  # deep ones too, where they are asked for
    paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",  # a fault may be made within a clock's tick
    }
    try:
        done = subprocess.run(
            [*command, *shlex.split(tests)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return None, f"more than {timeout:.0f} s"
    lines = done.stdout.strip().splitlines() or [""]
    return done.returncode, lines[-1]


def judged(mutant: Mutant, folder: Path, timeout: float) -> Verdict:
    """Makes the fault in a copy of the project, runs its tests, takes it back."""
    texts = sources(folder)
    place = mutant.place(texts)
    path, text = folder / place.file, texts[place.file]
    start = time.monotonic()
    path.write_text(mutant.applied(text, place))
    try:
        code, words = run_tests(folder, mutant.tests, timeout)
    finally:
        path.write_text(text)
    seconds = time.monotonic() - start
    if code == _FAILED or code is None:  # a loop without an end is seen, too
        return Verdict(mutant.name, "killed", seconds)
    if code != _PASSED:
        return Verdict(mutant.name, "not judged", seconds, words)
    if mutant.lives is not None:
        return Verdict(mutant.name, "lives", seconds, mutant.lives)
    return Verdict(mutant.name, "survived", seconds, mutant.tests)


def passes(tests: str, folder: Path, timeout: float) -> Verdict:
    """The same tests without a fault."""
    start = time.monotonic()
    code, words = run_tests(folder, tests, timeout)
    outcome = "passed" if code == _PASSED else "not judged"
    return Verdict(tests, outcome, time.monotonic() - start, "" if not code else words)


def in_copies(judge: Callable, tasks: Sequence, jobs: int) -> Iterator[Verdict]:
    """`judge(task, folder)` of all, as they finish, each alone in its folder."""
    with tempfile.TemporaryDirectory(prefix="mutants_") as scratch:
        folders: queue.Queue[Path] = queue.Queue()
        for i in range(jobs):
            copy_project(Path(scratch) / str(i))
            folders.put(Path(scratch) / str(i))

        def run(task) -> Verdict:
            folder = folders.get()
            try:
                return judge(task, folder)
            finally:
                folders.put(folder)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(run, task) for task in tasks]
            for future in concurrent.futures.as_completed(futures):
                yield future.result()


def table(verdicts: Sequence[Verdict]) -> str:
    """The worst first, and how many there are of each outcome."""
    order = ("not judged", "survived", "lives", "killed", "passed")
    rows = sorted(verdicts, key=lambda x: (order.index(x.outcome), x.name))
    counts = {name: sum(x.outcome == name for x in rows) for name in order}
    total = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return "\n".join([*map(str, rows), total or "none"])


def main(arguments: Sequence[str] | None = None) -> int:
    from tests.faults.catalogue import MUTANTS

    description, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", help="regexes; without, all")
    parser.add_argument("--check", action="store_true", help="only check the list")
    parser.add_argument("--clean", action="store_true", help="tests without a fault")
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each")
    options = parser.parse_args(arguments)

    wrong = problems(MUTANTS)
    if wrong or options.check:
        print("\n".join(wrong) or f"{len(MUTANTS)} faults, each in one place")
        return 1 if wrong else 0
    chosen = [
        mutant
        for mutant in MUTANTS
        if not options.names or any(re.search(x, mutant.name) for x in options.names)
    ]
    tasks: Sequence
    if options.clean:
        tasks = list(dict.fromkeys(mutant.tests for mutant in chosen))
        judge = passes
    else:
        tasks, judge = chosen, judged
    verdicts: list[Verdict] = []
    for verdict in in_copies(
        lambda task, folder: judge(task, folder, options.timeout), tasks, options.jobs
    ):
        verdicts.append(verdict)
        print(f"{len(verdicts)}/{len(tasks)} {verdict}", flush=True)
    print("\n" + table(verdicts))
    return 0 if verdicts and all(verdict.good for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
