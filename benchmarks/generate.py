"""Samples from the GPT of `benchmarks.train_gpt` with caches of four kinds.

    python -m benchmarks.generate                 # trains it first, as its preset says
    python -m benchmarks.generate --steps=50 --requests=4 --length=64

Requests have a prompt in common, and a few words each of their own. The caches: rows in
order ("dense"), pages, pages of which the requests share those of the common prompt,
whose keys are made and kept once, and such pages in int8. Each byte is the most likely
one. Bytes of the first three must be equal, as an exit code of 1 says if they are not;
how many of int8 are is printed. The flags of `benchmarks.train_gpt` choose the model;
its activations are float32 unless --dtype says otherwise, and products are exact, so
that no two bytes are equally likely by rounding. Keeps no rows.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from benchmarks import gpt, harness, options, report, train_gpt
from jax_flash2 import append_to_pages, attention, page_slots, paged_attention

_REQUESTS = flags.DEFINE_integer("requests", 4, "How many.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 96, "New bytes of each.", lower_bound=1)

PAGE = 16
_EXACT = {"precision": "highest"}
PROMPT = b"The following statement is executed when the class definition is "
WORDS = (b"found: ", b"given: ", b"empty: ", b"a list: ", b"not a name: ", b"read: ")


@dataclasses.dataclass(frozen=True)
class Cache:
    """How keys and values are kept.

    Attributes:
      layers: of each layer, its arrays.
      attend: of query, key, value [B, T, N, H], arrays of a layer, and positions [T]:
        the output, and the arrays with the new rows.
    """

    layers: list[Any]
    attend: Callable


def dense(model: gpt.GPT, batch: int, rows: int) -> Cache:
    """Rows in order, [B, S, N, H]."""

    def attend(q, k, v, layer, positions):
        at = (0, positions[0], 0, 0)
        layer = [
            jax.lax.dynamic_update_slice(x, y, at)
            for x, y in zip(layer, (k, v), strict=True)
        ]
        lengths = jnp.full(q.shape[0], positions[-1] + 1)
        where = {"query_offset": positions[0], "key_value_seq_lengths": lengths}
        return attention(q, *layer, is_causal=True, **where, **_EXACT), layer

    n, h, dtype = _heads(model)
    return Cache(
        [[jnp.zeros((batch, rows, n, h), dtype)] * 2 for _ in model.blocks], attend
    )


def paged(model: gpt.GPT, table: np.ndarray, kind: Any = None) -> Cache:
    """Pages of a pool for each layer, that lines of the table name."""
    n, h, dtype = _heads(model)
    pages = int(table.max()) + 1
    pool = jnp.zeros((pages, PAGE, n, h), kind or dtype)
    scales = [] if kind is None else [jnp.zeros((pages, PAGE, n), jnp.float32)] * 2

    def attend(q, k, v, layer, positions, lines):
        every = jnp.broadcast_to(positions, q.shape[:2])
        slots = page_slots(lines, every, PAGE)
        layer = append_to_pages(*layer[:2], k, v, slots, **_scales(layer))
        lengths = jnp.full(q.shape[0], positions[-1] + 1)
        given, more = (*layer[:2], lines, lengths), _scales(layer) | _EXACT
        return paged_attention(q, *given, **more), layer

    return Cache([[pool, pool, *scales] for _ in model.blocks], attend)


def _scales(layer) -> dict[str, jax.Array]:
    return dict(zip(("key_scale", "value_scale"), layer[2:], strict=False))


def _heads(model: gpt.GPT):
    """N, H and dtype of a model's keys."""
    n = model.blocks[0].num_heads
    return n, model.embed.features // n, model.embed.dtype


def forward(graph, attend: Callable, state, tokens, start, layers):
    """Logits of the last of the tokens [B, T], the first at `start`; and the cache."""
    model, after = nnx.merge(graph, state), []

    def of_layer(layer):
        def own(q, k, v, segment_ids):
            del segment_ids
            out, new = attend(q, k, v, layer, positions)
            after.append(list(new))
            return out

        return own

    positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    for block, layer in zip(model.blocks, layers, strict=True):
        block.attention = of_layer(layer)
    return model(tokens, positions=positions)[:, -1, :256], after


class Sampler:
    """Continues prompts by the most likely bytes."""

    def __init__(self, model: gpt.GPT):
        self._graph, self._state = nnx.split(model)

    def filled(self, cache: Cache, tokens, start: int, **more):
        """Logits and layers after these tokens."""
        attend = functools.partial(cache.attend, **more)
        run = jax.jit(functools.partial(forward, self._graph, attend))
        return run(self._state, tokens, jnp.int32(start), cache.layers)

    def continued(self, cache: Cache, logits, start: int, length: int, **more):
        """New tokens [B, length], and seconds of a step."""
        attend = functools.partial(cache.attend, **more)
        step = functools.partial(forward, self._graph, attend)

        @jax.jit
        def run(state, logits, layers):
            def body(i, carried):
                logits, layers, found = carried
                new = jnp.argmax(logits, -1).astype(jnp.int32)
                found = found.at[:, i].set(new)
                at = jnp.int32(start) + i
                return *step(state, new[:, None], at, layers), found

            found = jnp.zeros((logits.shape[0], length), jnp.int32)
            return jax.lax.fori_loop(0, length, body, (logits, layers, found))[2]

        given = self._state, logits, cache.layers
        jax.block_until_ready(run(*given))  # compiles
        begun = time.perf_counter()
        found = np.asarray(run(*given))
        return found, (time.perf_counter() - begun) / length


def samples(model: gpt.GPT, prompts: np.ndarray, common: int, length: int):
    """New tokens and seconds of a step by each kind of cache.

    Args:
      prompts: int32 [B, T]; the first `common` columns, whole pages, are equal rows.
    """
    batch, t = prompts.shape
    places = -(-(t + length) // PAGE)
    own = places - common // PAGE
    alone = np.random.default_rng(0).permutation(batch * places).reshape(batch, places)
    shared = np.broadcast_to(np.arange(common // PAGE), (batch, common // PAGE))
    rest = common // PAGE + np.arange(batch * own).reshape(batch, own)
    tables = {"pages": alone, "shared": np.concatenate([shared, rest], 1)}
    tables["int8"] = tables["shared"]
    sampler = Sampler(model)
    cache = dense(model, batch, places * PAGE)
    logits, layers = sampler.filled(cache, prompts, 0)
    cache = dataclasses.replace(cache, layers=layers)
    yield "dense", *sampler.continued(cache, logits, t, length)
    for name, table in tables.items():
        lines = jnp.asarray(table, jnp.int32)
        cache = paged(model, table, jnp.int8 if name == "int8" else None)
        first = 0
        if name != "pages":  # the common prompt, once
            first = common
            _, layers = sampler.filled(cache, prompts[:1, :common], 0, lines=lines[:1])
            cache = dataclasses.replace(cache, layers=layers)
        logits, layers = sampler.filled(cache, prompts[:, first:], first, lines=lines)
        cache = dataclasses.replace(cache, layers=layers)
        yield name, *sampler.continued(cache, logits, t, length, lines=lines)


def prompts_of(count: int) -> tuple[np.ndarray, int]:
    """Prompts [B, T], and how many first bytes, in whole pages, they have in common."""
    words = [WORDS[i % len(WORDS)] for i in range(count)]
    most = max(map(len, words))
    rows = [PROMPT + x.rjust(most) for x in words]
    tokens = np.array([list(x) for x in rows], np.int32)
    return tokens, len(PROMPT) // PAGE * PAGE


def main():
    given, default = flags.FLAGS, "gpt2_small" if harness.is_gpu() else "cpu"
    name = given.preset or default
    preset = train_gpt._chosen_preset(name)
    sizes = dataclasses.replace(preset.model, dtype=given.dtype or "float32")
    preset = dataclasses.replace(preset, model=sizes)
    print(f"training {preset.steps} steps of the preset {name}", flush=True)
    model = train_gpt.train(preset, seed=given.seed, progress=True).model
    prompts, common = prompts_of(_REQUESTS.value)
    found, is_wrong = {}, False
    exact = jax.default_matmul_precision("highest")
    with exact, options.Progress(4, "cache") as progress:
        for kind, tokens, seconds in samples(model, prompts, common, _LENGTH.value):
            found[kind] = tokens
            same = float(np.mean(tokens == found["dense"]))
            is_wrong |= kind != "int8" and same < 1.0
            rate = tokens.shape[0] / seconds
            progress.step(
                f"{kind}: {1e3 * seconds:.2f} ms a step, {rate:.0f} bytes/s, "
                f"{100 * same:.1f} % of the bytes as with the dense cache"
            )
    for prompt, tokens in zip(prompts, found["shared"], strict=True):
        text = report.printable(bytes(tokens.astype(np.uint8)))
        print(f"\n{bytes(prompt.astype(np.uint8)).decode()!r}\n{text}")
    if is_wrong:
        print("\nWRONG: caches of equal dtype gave other bytes", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    options.launch(main)
