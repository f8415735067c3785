"""Attention with rows divided over all devices of this process: how it scales.

    python -m benchmarks.context                           # on GPUs
    python -m benchmarks.context --scaling=weak --lengths=4k,8k,16k,32k
    python -m benchmarks.context --scaling=strong --total=2M --masks=causal --once
    python -m benchmarks.context --tiny --cpu_devices=8    # in seconds, anywhere

Weak scaling: T rows a device, whatever the number of devices; strong: so many rows in
all. B 1. Masks: causal, none, 16 documents of lognormal lengths (causal), and windows.
Causal rows lie in stripes; with a window, or no mask, they follow one another.

Each peer is first checked on few rows, against float32 attention on one device. Then,
side by side with one device that does all rows, or as many as fit in its memory and in
--most_seconds a call; and with the part of the busiest device alone on one device, by
the same code without communication. Rows go to `context.jsonl`, the weak scaling also
to plots, `context_forward.png` and the like. With --resume a run goes on where the last
one ended, so that one can be cut into pieces by --budget_seconds.
"""

import math
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

import jax
from absl import flags

from benchmarks import context_peers, context_rows, figures, harness, options, records
from benchmarks.context_calls import MASKS, Case
from benchmarks.context_tables import context
from jax_flash2._rows import STRIPE

_SCALING = options.names("scaling", ["weak", "strong"], ["weak", "strong"], "Which")
_LENGTHS = options.integers("lengths", "4k,8k,16k,32k,128k", "T, rows a device (weak).")
_TOTAL = options.integers("total", "1M", "Rows of all devices (strong).")
_DEVICES = options.integers("devices", None, "Numbers of devices, P; all by default.")
_MASKS = options.names("masks", [], MASKS, "Which keys count; by default all")
_HEADS = flags.DEFINE_integer("heads", 32, "N (weak).", lower_bound=1)
_KV_HEADS = flags.DEFINE_integer("kv_heads", 8, "K.", lower_bound=1)
_STRONG_HEADS = flags.DEFINE_integer("strong_heads", 8, "N (strong).", lower_bound=1)
_HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "H.", lower_bound=1)
_STRIPE = flags.DEFINE_integer("stripe", STRIPE, "Rows of a stripe.", lower_bound=1)
_CHECK_ROWS = flags.DEFINE_integer("check_rows", 512, "T of the checks.")
_MOST_SECONDS = flags.DEFINE_float(
    "most_seconds", 2.0, "A call of one device with all rows may take, about."
)
_TINY = flags.DEFINE_bool(
    "tiny",
    False,
    "64 rows a device, 8 heads of 16, float32, whatever other flags say; unless they "
    "name them, two masks and three peers.",
)
_CPU_DEVICES = flags.DEFINE_integer(
    "cpu_devices", None, "Simulated, where JAX has no other devices.", lower_bound=1
)
_PEERS = options.names(
    "peers", [], context_peers.PEERS, "Who takes part; by default what may run"
)
_PASSES = options.names(
    "passes", list(context_rows.WHICH), context_rows.WHICH, "What is timed"
)
_DTYPE = options.dtype("bfloat16")
_REPEATS = options.repeats(5)
_ONCE = flags.DEFINE_bool(
    "once", False, "Times the first calls alone, for calls of many seconds."
)
_BUDGET = flags.DEFINE_float("budget_seconds", None, "Begin no case after this long.")
_RESUME = flags.DEFINE_bool("resume", False, "Carry on with the newest run.")
_PART = options.part()
_RESULTS_DIR, _COMMIT = options.files()

_TINY_ROWS, _TINY_STRIPE = 64, 16
_TINY_MASKS = ["causal", "window1024"]
_TINY_PEERS = ["jax_flash2", "ring", "xla_gathered"]


def _prepare() -> None:
    """What must be said before JAX looks for devices."""
    more = [os.environ.get("XLA_FLAGS", "")]
    if _CPU_DEVICES.value:
        more.append(f"--xla_force_host_platform_device_count={_CPU_DEVICES.value}")
    if _TINY.value:
        more.append("--xla_backend_optimization_level=0")  # the compiler is what takes
    os.environ["XLA_FLAGS"] = " ".join(filter(None, more))


def _chosen_peers() -> list[str]:
    if _PEERS.value:
        return _PEERS.value
    if _TINY.value:
        return _TINY_PEERS
    return context_peers.ON_GPUS if harness.is_gpu() else context_peers.EVERYWHERE


def _chosen_masks() -> list[str]:
    return _MASKS.value or (_TINY_MASKS if _TINY.value else list(MASKS))


def cases() -> list[Case]:
    """As the flags say; those with few rows first."""
    tiny, found = _TINY.value, []
    for parts in _DEVICES.value or [jax.device_count()]:
        if parts > jax.device_count():
            raise ValueError(f"--devices={parts}, but JAX has {jax.device_count()}")
        for scaling in _SCALING.value:
            lengths = [_TINY_ROWS] if tiny else sorted(_LENGTHS.value)
            heads = _HEADS.value
            if scaling == "strong":
                lengths = [total // parts for total in sorted(_TOTAL.value)]
                lengths = [8 * _TINY_ROWS // parts] if tiny else lengths
                heads = _STRONG_HEADS.value
            sizes = (heads, _KV_HEADS.value, _HEAD_SIZE.value, _DTYPE.value)
            layout = _TINY_STRIPE if tiny else _STRIPE.value
            for rows in lengths:
                if not tiny and rows % layout:
                    raise ValueError(
                        f"{rows} rows a device must be whole stripes of {layout}"
                    )
                for name in _chosen_masks():
                    own = (8, 8, 16, "float32") if tiny else sizes
                    case = Case(scaling, name, MASKS[name], parts, rows, *own, layout)
                    found.append(case.resized(parts, rows))
    return found


def _wanted(done: Collection[str], peers) -> dict[Case, tuple[Case, list[str]]]:
    """Cases that are not done, each with the one to check and the passes."""
    found = {}
    for case in _PART.of(cases()):
        passes = [x for x in _PASSES.value if not _is_done(done, case, x, peers)]
        if passes:
            small = case.resized(case.parts, min(case.rows, _CHECK_ROWS.value))
            found[case] = small, passes
    return found


def _programs(case: Case, small: Case, peers, which: str) -> list[tuple]:
    """Of the check and of the timing."""
    found = [(small, peer, which) for peer in context_rows.to_check(case, peers)]
    return found + context_rows.programs_of(case, peers, which)


def _is_done(done: Collection[str], case: Case, which: str, peers) -> bool:
    about = {"shape": asdict(case.shape), "pass": which, "feature": case.feature}
    names = context_rows.methods_of(case, peers)
    return all(records.key({**about, "peer": name}) in done for name in names)


def _worst(checked: Mapping) -> str:
    """The largest error of each peer, over passes and results."""
    words = {}
    for (name, _), x in checked.items():
        found = [math.nan if e is None else e for e in x.get("row_error", {}).values()]
        words.setdefault(name, []).append(x.get("failure") or max(found))
    numbers = (
        (name, next((x for x in found if isinstance(x, str)), None) or max(found))
        for name, found in words.items()
    )
    return "; ".join(
        f"{name} {x}" if isinstance(x, str) else f"{name} {x:.1e}"
        for name, x in numbers
    )


def main():
    _prepare()
    begun = time.monotonic()
    peers = [context_peers.PEERS[name] for name in _chosen_peers()]
    run = records.Run.start(
        *("context", _RESULTS_DIR.value),
        commit=_COMMIT.value,
        resume=_RESUME.value,
        run_id=_PART.run_id.value,
    )
    rows = list(run.done)
    done = {records.key(row) for row in rows}
    wanted = _wanted(done, peers)
    print(f"compiling programs of {len(wanted)} cases", flush=True)
    with harness.compiling():
        context_rows.compile_together(
            x
            for case, (small, passes) in wanted.items()
            for which in passes
            for x in _programs(case, small, peers, which)
        )
    with harness.alone():
        ceiling = harness.matmul_tflops()
    checked: dict[Case, dict] = {}
    with options.Progress(len(wanted), "case") as progress:
        progress.say(
            f"{jax.device_count()} x {run.facts['device']}: "
            f"matrix product {ceiling:.4g} TFLOP/s"
        )
        for count, (case, (small, passes)) in enumerate(wanted.items()):
            spent = time.monotonic() - begun
            if _BUDGET.value is not None and spent > _BUDGET.value:
                progress.say(f"{spent:.0f} s: {len(wanted) - count} cases not begun")
                break
            known = checked.setdefault(small, {})
            new = [
                peer
                for peer in context_rows.to_check(case, peers)
                if any((peer.name, which) not in known for which in passes)
            ]
            with harness.alone():
                if new:
                    found = context_rows.errors(small, new, passes)
                    progress.say(f"check, {small}: {_worst(found)}")
                    known.update(found)
                for which in passes:
                    for row in context_rows.rows_of(
                        *(case, peers, which, checked[small]),
                        rounds=0 if _ONCE.value else _REPEATS.value,
                        most_seconds=_MOST_SECONDS.value,
                        ceiling=ceiling,
                    ):
                        rows.append(run.write({**row, "matmul_tflops": ceiling}))
            progress.step(f"{case} ({time.monotonic() - begun - spent:.1f} s)")
    print(f"\n{run.path}\n\n{context(rows)}")
    try:
        for path in figures.context(rows, Path(_RESULTS_DIR.value)):
            print(f"plot: {path}")
    except ImportError as error:
        print(f"No plots: {error}.")


if __name__ == "__main__":
    options.launch(main)
