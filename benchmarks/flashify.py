"""Training steps before and after `flashify`: time, and peak memory.

The models are blocks as three packages write them: Flax linen's own attention, a
Gemma-like one (grouped queries, soft cap, window) and a T5-like one (learnt bias). Each
of both forms runs in a process of its own, so that its peak memory is its own.

    python -m benchmarks.flashify [--rows=2048] [--batch=4] [--layers=8] [--steps=20]
    python -m benchmarks.flashify --models t5 --layers=2 --seconds=5
    python -m benchmarks.flashify --trace [--layers=24] [--steps=12]

A form is timed for `--steps` steps, but no longer than `--seconds` once it has one. It
prints JSON lines, then a table. With `--trace` nothing is run: it says how long both
forms are traced, which needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from jax_flash2 import flashify

MODELS = ("linen", "gemma", "t5")
WIDTH, HEADS, DEPTH = 1024, 16, 64


def linen(x, weights):
    """`flax.linen.MultiHeadDotProductAttention`'s own function, causal."""
    import flax.linen as nn

    q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, weights["qkv"])
    mask = nn.make_causal_mask(x[..., 0])
    return nn.dot_product_attention(q, k, v, mask=mask)


def gemma(x, weights):
    """Four key heads, a soft cap of 50 and a window of half the rows."""
    b, t, _ = x.shape
    q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, weights["qkv"])
    k, v = k[:, :, :4], v[:, :, :4]
    q = (q * DEPTH**-0.5).reshape(b, t, 4, HEADS // 4, DEPTH)
    logits = jnp.einsum("btkgh,bskh->btkgs", q, k).reshape(b, t, HEADS, t)
    logits = jnp.tanh(logits / 50.0) * 50.0
    i, j = jnp.arange(t)[:, None, None], jnp.arange(t)
    logits = jnp.where((j <= i) & (j > i - t // 2), logits, -2.3819763e38)
    probs = jax.nn.softmax(logits.astype(jnp.float32)).astype(x.dtype)
    probs = probs.reshape(b, t, 4, HEADS // 4, t)
    return jnp.einsum("btkgs,bskh->btkgh", probs, v).reshape(b, t, HEADS, DEPTH)


def t5(x, weights):
    """A learnt bias of 32 distances, no scale, no mask.

    The table is read by a product, as T5X reads it: the transpose of a gather would add
    four million numbers of a head to 32 rows.
    """
    t = x.shape[1]
    q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, weights["qkv"])
    distance = jnp.abs(jnp.arange(t)[:, None] - jnp.arange(t))
    table = weights["table"]
    rows = jax.nn.one_hot(jnp.minimum(distance, 31), len(table), dtype=table.dtype)
    bias = jnp.einsum("tsb,bn->nts", rows, table)
    logits = jnp.einsum("btnh,bsnh->bnts", q * DEPTH**-0.5, k) + bias
    probs = jax.nn.softmax(logits.astype(jnp.float32)).astype(x.dtype)
    return jnp.einsum("bnts,bsnh->btnh", probs, v)


def loss(attend, parameters, x):
    """Mean square of what all layers make of x."""

    def norm(h):
        wide = h.astype(jnp.float32)
        size = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        return (wide * size).astype(h.dtype)

    for weights in parameters:
        out = attend(norm(x), weights)
        x = x + jnp.einsum("btnh,nhd->btd", out, weights["out"])
        x = x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"]
    return jnp.mean(x.astype(jnp.float32) ** 2)


def made_parameters(layers: int, dtype) -> list[dict]:
    shapes = {
        "qkv": (3, WIDTH, HEADS, DEPTH),
        "out": (HEADS, DEPTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
        "table": (32, HEADS),
    }
    keys = iter(jax.random.split(jax.random.key(0), layers * len(shapes)))
    return [
        {k: jax.random.normal(next(keys), s, dtype) * 0.02 for k, s in shapes.items()}
        for _ in range(layers)
    ]


def measured(
    model: str,
    is_fast: bool,
    rows: int,
    batch: int,
    layers: int,
    steps: int,
    seconds: float,
) -> dict:
    """One form of a model: time of a step, bytes, the loss, what was found."""
    dtype = jnp.bfloat16
    parameters = made_parameters(layers, dtype)
    x = jax.random.normal(jax.random.key(1), (batch, rows, WIDTH), dtype)
    own = functools.partial(loss, globals()[model])
    fast = flashify(own, must_find=True)
    found = len(fast.report(parameters, x).replaced) if is_fast else 0

    @functools.partial(jax.jit, donate_argnums=0)
    def step(parameters, x):
        value, slopes = jax.value_and_grad(fast if is_fast else own)(parameters, x)
        new = jax.tree.map(lambda p, s: p - 1e-3 * s, parameters, slopes)
        return value, new

    start = time.perf_counter()
    compiled = step.lower(parameters, x).compile()
    compile_seconds = time.perf_counter() - start
    first, parameters = compiled(parameters, x)
    second, parameters = jax.block_until_ready(compiled(parameters, x))
    last, times = second, []
    while not times or (len(times) < steps and sum(times) < seconds):
        start = time.perf_counter()
        last, parameters = jax.block_until_ready(compiled(parameters, x))
        times.append(time.perf_counter() - start)
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "model": model,
        "flashify": is_fast,
        "found": found,
        "shape": [batch, rows, layers],
        "steps": len(times),
        "ms": 1e3 * sorted(times)[len(times) // 2],
        "compile_s": compile_seconds,
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "first_loss": float(first),
        "second_loss": float(second),
        "last_loss": float(last),
        "device": jax.local_devices()[0].device_kind,
        "jax": jax.__version__,
    }


def traced(model: str, layers: int, steps: int) -> dict:
    """Milliseconds of process time to trace a model, alone and by `flashify`.

    Both forms are traced by turns, as new functions to `jax.jit` each time.
    """
    parameters = jax.eval_shape(lambda: made_parameters(layers, jnp.bfloat16))
    x = jax.ShapeDtypeStruct((1, 64, WIDTH), jnp.bfloat16)
    own = functools.partial(loss, globals()[model])
    forms = {"before": lambda: own, "after": lambda: flashify(own)}
    found: dict = {"model": model, "layers": layers, "jax": jax.__version__}
    for name, transform in {"forward": lambda f: f, "gradient": jax.grad}.items():
        times: dict[str, list[float]] = {x: [] for x in forms}
        for _ in range(steps + 1):
            for form, make in forms.items():
                function = transform(functools.partial(make()))
                start = time.process_time()
                jax.jit(function).trace(parameters, x)
                times[form].append(1e3 * (time.process_time() - start))
        for form, all_times in times.items():
            warm = sorted(all_times[1:])
            found[f"{name} {form}"] = {
                "least": warm[0],
                "median": warm[len(warm) // 2],
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--one", choices=("before", "after"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = ("rows", "batch", "layers", "steps", "seconds")
    sizes = [getattr(given, name) for name in names]
    if given.one:
        (model,) = given.models
        print(json.dumps(measured(model, given.one == "after", *sizes)))
        return
    if given.trace:
        for model in given.models:
            print(json.dumps(traced(model, given.layers, given.steps)), flush=True)
        return
    options = [f"--{k}={x}" for k, x in zip(names, sizes, strict=True)]
    titles = "| model | step, ms: before, after | peak, GiB | loss |"
    table = [titles, "| - | - | - | - |"]
    for model in given.models:
        pair = []
        for one in ("before", "after"):
            command = [sys.executable, "-m", "benchmarks.flashify", *options]
            command += [f"--one={one}", "--models", model]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:  # as where memory is short
                print(f"{model}, {one}: {done.stderr.strip()[-400:]}", flush=True)
                pair.append({})
                continue
            line = done.stdout.strip().splitlines()[-1]
            print(line, flush=True)
            pair.append(json.loads(line))
        table.append(row(model, *pair))
    print("\n".join(table))


def row(model: str, before: dict, after: dict) -> str:
    def both(name: str, scale: float, digits: int) -> str:
        own = [x.get(name) for x in (before, after)]
        texts = ["none" if x is None else f"{x * scale:.{digits}f}" for x in own]
        return ", ".join(texts)

    memory = "peak_bytes" if after.get("peak_bytes") else "temporary_bytes"
    cells = (both("ms", 1, 1), both(memory, 2.0**-30, 2), both("second_loss", 1, 4))
    return f"| {model} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
