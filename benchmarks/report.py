"""Tables, plots and files that tell how a training run went."""

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import matplotlib

matplotlib.use("Agg")  # Draws to files: no window, no display needed.
import matplotlib.pyplot as plt
import numpy as np


def print_table(rows: Mapping[str, object]) -> None:
    """Prints one `name  value` line a row, values aligned."""
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}", flush=True)


def speed(step_seconds: float | None, *, tokens: int, flops: float) -> dict[str, str]:
    """Rows of a table: time, tokens and model FLOPs from one step's figures."""
    if step_seconds is None:
        return {"speed": "unknown (one step, which compiles)"}
    return {
        "step": f"{1e3 * step_seconds:.1f} ms (median, compilation not counted)",
        "tokens/s": f"{tokens / step_seconds:,.0f}",
        "model TFLOP/s": f"{flops / step_seconds / 1e12:.3g}",
    }


def peak_memory(device: jax.Device) -> str:
    """Peak memory of the device, or of this process where the device has no count."""
    stats = device.memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return f"{stats['peak_bytes_in_use'] / 2**30:.2f} GiB (device)"
    if device.platform != "cpu":
        return "unknown"
    # In KiB, save on macOS, where it is in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"{peak / 2**30:.2f} GiB (host process)"


def write_json(stem: Path, record: Mapping[str, object]) -> Path:
    """Writes `record` to `stem` with the ending `.json`; returns the path."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_name(stem.name + ".json")
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def plot_losses(
    stem: Path,
    *,
    losses: Sequence[float],
    validation: Sequence[tuple[int, float]],
    unigram_entropy: float,
) -> Path:
    """Plots losses in nats a byte over steps to `stem` with `.png`; returns the path.

    Args:
      stem: the path without its ending.
      losses: training loss of each step; step i is at i + 1.
      validation: `(steps done, validation loss)`.
      unigram_entropy: drawn as a level to fall below.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_name(stem.name + ".png")
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(np.arange(len(losses)) + 1, losses, lw=0.8, label="training")
    axes.plot(*zip(*validation, strict=True), "o-", ms=4, label="validation")
    axes.axhline(unigram_entropy, color="grey", ls="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=stem.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def printable(sample: bytes) -> str:
    """The text of `sample`; bytes that are not printable ASCII become escapes.

    Line breaks are kept.
    """
    return "".join(
        chr(b) if b == 10 or 32 <= b < 127 else f"\\x{b:02x}" for b in sample
    )
