"""What each feature of `attention` costs, against plain causal attention.

    python -m benchmarks.features

B 2, T 8192, N 16, H 128, bfloat16 unless flags say otherwise, every feature by itself
on top of the causal mask. Forward; backward to query, key and value; and, for a bias,
slopes or sinks, backward to these too. Times are given for each pair that the masks
keep, relative to plain: a window or documents are faster, and the figure says whether
by as much as they should. Their plain is one of about as many pairs for each query:
shorter sequences in a larger batch. The boolean masks are one that keeps nine pairs in
ten at random, so that no block can be skipped or taken as full; documents; and padding.
Rows go to `features.jsonl`.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import jax_flash2
from benchmarks import cost_tables, harness, options, programs, records
from benchmarks.harness import Program
from benchmarks.peers import OURS
from jax_flash2.tune.problems import Shape, random_mask

_BATCH = flags.DEFINE_integer("batch", 2, "B.", lower_bound=1)
_LENGTH = options.integers("length", "8k", "Sequence length, T: one number.")
_HEADS = flags.DEFINE_integer("heads", 16, "N.", lower_bound=1)
_HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "H.", lower_bound=1)
_DTYPE = options.dtype("bfloat16")
_REPEATS = options.repeats(7)
_RESULTS_DIR, _COMMIT = options.files()


@dataclasses.dataclass(frozen=True)
class Feature:
    """Arguments of `attention` beside `is_causal`.

    Attributes:
      static: those that are no arrays.
      arrays: those that are.
      operand: the one of them whose gradient is taken too.
      pairs: kept by the masks, as a part of causal attention's.
      split: cuts each sequence in this many, in the batch.
      beside: name of the feature whose time this one's is compared with.
      mapped: `jax.vmap` maps a function of one head over batch and heads.
    """

    static: dict = dataclasses.field(default_factory=dict)
    arrays: dict = dataclasses.field(default_factory=dict)
    operand: str | None = None
    pairs: float = 1.0
    split: int = 1
    beside: str = "plain"
    mapped: bool = False


def features(shape: Shape) -> dict[str, Feature]:
    """By name; the first is plain."""
    batch, length, heads = shape.batch, shape.length, shape.heads
    window, documents = min(1024, length), 8
    causal = length * (length + 1) / 2
    in_window = causal - (length - window) * (length - window + 1) / 2
    ids = np.arange(length) // -(-length // documents)
    in_documents = sum(n * (n + 1) / 2 for n in np.bincount(ids).tolist())

    def short(split):
        """Plain attention on sequences of length / split."""
        part = length // split
        return Feature(pairs=split * part * (part + 1) / 2 / causal, split=split)

    rng = np.random.default_rng(0)

    def normal(*sizes):
        return jnp.asarray(rng.standard_normal(sizes, np.float32), shape.dtype)

    def rows(x):
        return jnp.asarray(np.broadcast_to(x, (batch, length)), jnp.int32)

    keys = length - length // 4
    in_keys = causal - (length - keys) * (length - keys + 1) / 2
    lengths = {"key_value_seq_lengths": jnp.full(batch, keys, jnp.int32)}
    padding = jnp.broadcast_to(jnp.arange(length) < keys, (batch, 1, 1, length))
    same = jnp.asarray(ids[:, None] == ids)[None, None]
    drawn = random_mask(length)
    in_drawn = float(jnp.sum(jnp.tril(drawn), dtype=jnp.float32))
    slopes = jnp.asarray(2.0 ** (-8 * np.arange(1, heads + 1) / heads), jnp.float32)
    dropout = {"dropout_rate": 0.1}
    key = {"dropout_rng": jax.random.PRNGKey(0)}
    return {
        "plain": Feature(),
        "plain, T / 4": short(4),
        f"plain, T / {documents}": short(documents),
        "window": Feature(
            {"local_window_size": (window - 1, None)},
            pairs=in_window / causal,
            beside="plain, T / 4",
        ),
        "vmap over heads": Feature(mapped=True),
        "key lengths, 3/4 T": Feature(arrays=lengths, pairs=in_keys / causal),
        "one segment": Feature(arrays={"query_segment_ids": rows(0)}),
        f"{documents} segments": Feature(
            arrays={"query_segment_ids": rows(ids)},
            pairs=in_documents / causal,
            beside=f"plain, T / {documents}",
        ),
        "mask [1, 1, T, T], random": Feature(
            arrays={"mask": drawn}, pairs=in_drawn / causal
        ),
        f"mask [1, 1, T, T], {documents} documents": Feature(
            arrays={"mask": same},
            pairs=in_documents / causal,
            beside=f"plain, T / {documents}",
        ),
        "mask [B, 1, 1, T], 3/4 T": Feature(
            arrays={"mask": padding}, pairs=in_keys / causal
        ),
        "offset, traced": Feature(arrays={"query_offset": jnp.int32(0)}),
        "soft cap": Feature({"logits_soft_cap": 50.0}),
        "ALiBi": Feature(arrays={"alibi_slopes": slopes}, operand="alibi_slopes"),
        "sinks": Feature(arrays={"sinks": jnp.zeros(heads)}, operand="sinks"),
        "bias [1, N, T, T]": Feature(
            arrays={"bias": normal(1, heads, length, length)}, operand="bias"
        ),
        "bias [1, 1, T, T]": Feature(
            arrays={"bias": normal(1, 1, length, length)}, operand="bias"
        ),
        "bias [B, 1, 1, T]": Feature(
            arrays={"bias": normal(batch, 1, 1, length)}, operand="bias"
        ),
        "dropout": Feature(dropout, key),
    }


def passes(shape: Shape, feature: Feature) -> dict[str, Callable]:
    """Functions of (query, key, value, output gradient, arrays of the feature)."""

    def call(q, k, v, arrays):
        def attention(q, k, v):
            return jax_flash2.attention(
                q, k, v, is_causal=shape.causal, **feature.static, **arrays
            )

        heads = jax.vmap(attention, 1, 1)
        return (jax.vmap(heads) if feature.mapped else attention)(q, k, v)

    def forward(q, k, v, do, arrays):
        del do
        return call(q, k, v, arrays)

    def both(q, k, v, do, arrays):
        _, vjp = jax.vjp(lambda *x: call(*x, arrays), q, k, v)
        return vjp(do)

    def operand(q, k, v, do, arrays):
        def with_operand(q, k, v, x):
            return call(q, k, v, {**arrays, feature.operand: x})

        _, vjp = jax.vjp(with_operand, q, k, v, arrays[feature.operand])
        return vjp(do)

    found = {"forward": forward, "forward_backward": both}
    return found | ({"with_operand": operand} if feature.operand else {})


def _program(compiled: jax.stages.Compiled, arguments: tuple) -> Program:
    """After its first call."""
    jax.block_until_ready(compiled(*arguments))
    run = functools.partial(compiled, *arguments)
    return Program(
        run, jax.block_until_ready, lambda _: {}, memory=programs.memory(compiled)
    )


def _started(shape: Shape, found: Mapping[str, Feature]) -> tuple[dict, dict]:
    """Programs by feature and pass, compiled side by side, and failures."""
    compiling, started, failures = {}, {}, {}
    whole = shape.operands()
    with (
        options.Progress(len(found), "feature") as progress,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        for name, feature in found.items():
            operands = [
                x.reshape(x.shape[0] * feature.split, -1, *x.shape[2:]) for x in whole
            ]
            arguments = (*operands, feature.arrays)
            for which, function in passes(shape, feature).items():
                try:
                    lowered = programs.lower(function, *arguments)
                    compiling[name, which] = pool.submit(lowered.compile), arguments
                except Exception as error:  # one feature's failure is a result
                    failures[name, which] = harness.describe(error)
            progress.step(f"lowered: {name}")
    for at, (future, arguments) in compiling.items():
        try:
            started[at] = _program(future.result(), arguments)
        except Exception as error:  # as above
            failures[at] = harness.describe(error)
    return started, failures


def rows_of(shape: Shape, *, rounds: int) -> list[dict]:
    """A row for each feature and pass."""
    found = features(shape)
    with harness.compiling():
        timed, failures = _started(shape, found)
    print(f"timing {len(timed)} programs, {rounds} rounds", flush=True)
    with harness.alone():
        timings, later = harness.time_interleaved(timed, rounds=rounds)
    rows = []
    for name, feature in found.items():
        for which in passes(shape, feature):
            at = name, which
            row = {"shape": asdict(shape), "feature": name, "pass": which}
            row |= {"peer": OURS}
            row |= {"pairs": feature.pairs, "beside": feature.beside}
            row |= {"failure": {**failures, **later}.get(at)}
            if at in timings:
                row |= timings[at].row() | {"memory": timed[at].memory}
            rows.append(row)
    return rows


def main():
    (length,) = _LENGTH.value
    heads = _HEADS.value
    shape = Shape(
        *(_BATCH.value, length, heads, heads, _HEAD_SIZE.value, True, _DTYPE.value)
    )
    run = records.Run.start("features", _RESULTS_DIR.value, commit=_COMMIT.value)
    rows = [run.write(row) for row in rows_of(shape, rounds=_REPEATS.value)]
    print(f"\n{run.path}\n\n{cost_tables.features(rows)}")


if __name__ == "__main__":
    options.launch(main)
