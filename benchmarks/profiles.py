"""What kernels a call runs on GPUs, and for how long, by JAX's profiler."""

import collections
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax


class Event(NamedTuple):
    """A kernel's run: its name, and its start and length in nanoseconds."""

    kernel: str
    start: float
    length: float


def events_in(folder: Path) -> Iterator[Event]:
    """Of all GPUs, from what `jax.profiler.trace` wrote."""
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for x in line.events:
                        yield Event(x.name, x.start_ns, x.duration_ns)


def idle(events: Iterable[Event]) -> float:
    """Nanoseconds between the first start and the last end in which no kernel ran."""
    found, end = 0.0, None
    for _, start, length in sorted(events, key=lambda x: x.start):
        if end is not None:
            found += max(0.0, start - end)
        end = max(start + length, end or 0.0)
    return found


def lines(events: list[Event], calls: int) -> list[str]:
    """Microseconds a call, the longest first; pauses at the end."""
    if not events:
        return ["no kernel of a GPU was seen"]
    spent: collections.Counter[str] = collections.Counter()
    times: collections.Counter[str] = collections.Counter()
    for kernel, _, length in events:
        spent[kernel] += length
        times[kernel] += 1
    table = [
        f"{length / calls / 1e3:10.1f} us  {times[kernel] / calls:5.1f} x  {kernel}"
        for kernel, length in spent.most_common()
    ]
    return [*table, f"{idle(events) / calls / 1e3:10.1f} us  no kernel"]


def watched(call: Callable[[], object], seconds: float) -> tuple[list[Event], int]:
    """What ran on GPUs in `seconds` of calls, and their number."""
    repeated(call, seconds / 10)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            count, _ = repeated(call, seconds)
        return list(events_in(Path(folder))), count


def repeated(call: Callable[[], object], seconds: float) -> tuple[int, float]:
    """Calls for `seconds`, ten at a time: their number, and the seconds of each."""
    begun, count = time.perf_counter(), 0
    while not count or time.perf_counter() - begun < seconds:
        for _ in range(10):
            results = call()
        jax.block_until_ready(results)
        count += 10
    return count, (time.perf_counter() - begun) / count
