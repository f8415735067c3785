"""The command line: flags that benchmarks share, defined where called; progress."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from absl import app, flags, logging

from benchmarks import records
from benchmarks.peers import PEERS
from benchmarks.programs import JaxPeer
from benchmarks.shapes import PASSES

# A flag belongs to the benchmark that asks for it: its --help shows it.
flags.disclaim_key_flags()


class _Integers(flags.ArgumentParser):
    """`512,1k,1M` as [512, 1024, 1048576]."""

    syntactic_help = "comma-separated integers; k is 1024, M is 1024 k"

    def parse(self, argument):
        if isinstance(argument, list):
            return argument
        return [self._integer(x.strip()) for x in argument.split(",")]

    def _integer(self, text: str) -> int:
        factor = {"k": 2**10, "M": 2**20}.get(text[-1:], 1)
        value = int(text[:-1] if factor > 1 else text) * factor
        if value < 1:
            raise ValueError(f"{text!r} is not positive")
        return value


def integers(name: str, default: str | None, help: str) -> flags.FlagHolder:
    serializer = flags.ListSerializer(",")
    return flags.DEFINE(_Integers(), name, default, help, serializer=serializer)


def files() -> tuple[flags.FlagHolder, flags.FlagHolder]:
    """--results_dir and --commit."""
    return (
        flags.DEFINE_string(
            "results_dir", records.RESULTS_DIR, "Where rows are appended."
        ),
        flags.DEFINE_string(
            "commit", None, "Commit to record where the tree has no git of its own."
        ),
    )


def names(name: str, default: list[str], known: Collection[str], help: str):
    """A list of names, each of which must be known."""
    holder = flags.DEFINE_list(name, default, f"{help}, of: {', '.join(known)}.")
    flags.register_validator(
        name,
        lambda chosen: set(chosen) <= set(known),
        message=f"must be some of {', '.join(known)}",
    )
    return holder


def peers(default: list[str]) -> flags.FlagHolder:
    return names("peers", default, PEERS, "Who takes part")


def jax_peers(default: list[str], *others: str) -> flags.FlagHolder:
    known = [name for name, peer in PEERS.items() if isinstance(peer, JaxPeer)]
    return names("peers", default, [*known, *others], "Who takes part")


def passes(default: list[str]) -> flags.FlagHolder:
    return names("passes", default, PASSES, "What is timed")


def repeats(default: int) -> flags.FlagHolder:
    return flags.DEFINE_integer(
        "repeats", default, "Rounds over the peers; the median counts.", lower_bound=1
    )


def dtype(default: str) -> flags.FlagHolder:
    return flags.DEFINE_enum(
        "dtype", default, ["bfloat16", "float16", "float32"], "Of the operands."
    )


def calls_named(pattern: str, calls: Mapping[str, Any]) -> dict[str, Any]:
    """Those in whose names --calls, a regular expression, is found.

    Raises:
      ValueError: if there is none.
    """
    found = {name: x for name, x in calls.items() if re.search(pattern, name)}
    if not found:
        raise ValueError(f"--calls={pattern}: found in no call's name")
    return found


class Part(NamedTuple):
    """Flags of benchmarks that processes can divide: see `harness.compiling`."""

    number: flags.FlagHolder
    run_id: flags.FlagHolder

    def of(self, calls: Sequence) -> list:
        """Those of part I of N, of --part=I/N."""
        number, count = self._numbers()
        first, end = (i * len(calls) // count for i in (number, number + 1))
        return list(calls[first:end])

    @property
    def is_whole(self) -> bool:
        return self._numbers()[1] == 1

    def _numbers(self) -> tuple[int, int]:
        found = re.fullmatch(r"(\d+)/(\d+)", self.number.value)
        if found is None or not int(found[1]) < int(found[2]):
            raise ValueError(
                f"--part={self.number.value}: expected I/N with I less than N, as 0/4"
            )
        return int(found[1]), int(found[2])


def part() -> Part:
    """--part and --run_id."""
    return Part(
        flags.DEFINE_string(
            "part",
            "0/1",
            "I/N: part I of N, from 0 on. Other processes do others.",
        ),
        flags.DEFINE_string("run_id", None, "Of the run that such processes share."),
    )


class Comparison(NamedTuple):
    """Flags of benchmarks that compare peers."""

    dtype: flags.FlagHolder
    peers: flags.FlagHolder
    passes: flags.FlagHolder
    repeats: flags.FlagHolder
    budget: flags.FlagHolder
    resume: flags.FlagHolder
    part: Part
    results_dir: flags.FlagHolder
    commit: flags.FlagHolder


def comparison(default_passes: list[str]) -> Comparison:
    return Comparison(
        dtype("bfloat16"),
        peers(list(PEERS)),
        passes(default_passes),
        repeats(5),
        flags.DEFINE_float(
            "budget_seconds", None, "Begin no further shape after this long."
        ),
        flags.DEFINE_bool(
            "resume",
            False,
            "Carry on with the newest run of the file: same code and machine.",
        ),
        part(),
        *files(),
    )


def launch(main: Callable[[], object]) -> None:
    """Runs `main` as the program, once the flags are read."""

    def checked(argv):
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        # JAX logs each platform that it looks for in vain, at the level INFO.
        logging.set_verbosity(logging.WARNING)
        main()

    app.run(checked)


class Progress:
    """A bar where tqdm is installed and there is a terminal; lines of text anywhere."""

    def __init__(self, total: int, unit: str):
        self._total, self._done, self._bar, self._print = total, 0, None, print
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(total=total, unit=unit, disable=None)  # None: by the terminal
        self._print = tqdm.write

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, text: str) -> None:
        """One more is done; says what."""
        self._done += 1
        self.say(f"[{self._done}/{self._total}] {text}")
        if self._bar is not None:
            self._bar.update()

    def say(self, text: str) -> None:
        self._print(text)
