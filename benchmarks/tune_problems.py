"""Calls that `benchmarks.tune` times: those of the regimes of the Triton kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_flash2
from benchmarks import harness
from benchmarks.shapes import Shape
from pallas_kernels import tables
from pallas_kernels.configs import Blocks, Config

TOKENS, HIDDEN = 16384, 2048


@dataclasses.dataclass(frozen=True)
class Problem:
    """A shape, and arguments of `attention` beside `is_causal`.

    Attributes:
      static: those that are no arrays.
      arrays: those that are.
      operand: the one array whose gradient is timed too (kernel `dbias`).
      queries: how many, if not as many as keys: the last ones.
      keys: how many, if not as many as queries: the first ones.
    """

    shape: Shape
    static: dict = dataclasses.field(default_factory=dict)
    arrays: dict = dataclasses.field(default_factory=dict)
    operand: str | None = None
    queries: int | None = None
    keys: int | None = None

    def rows(self, q: Array, k: Array, v: Array, do: Array) -> tuple[Array, ...]:
        """Query, key, value and the output's gradient of the shape, of its rows."""
        k, v = k[:, : self.keys], v[:, : self.keys]
        return q[:, : self.queries], k, v, do[:, : self.queries]

    def attention(self, implementation: str | None, config: Config | None):
        """A call of q, k, v and the problem's arrays."""

        def attention(q, k, v, *arrays):
            offset = 0 if self.queries is None else k.shape[1] - q.shape[1]
            return jax_flash2.attention(
                *(q, k, v), is_causal=self.shape.causal, query_offset=offset,
                implementation=implementation, config=config, **self.static,
                **dict(zip(self.arrays, arrays, strict=True)),
            )  # fmt: skip

        return attention

    def cut(self, blocks: Blocks) -> Blocks:
        """As the library cuts a table's: no larger than the rows of a group need."""
        if self.queries is None:
            return blocks
        rows = tables.padded(self.queries * self.shape.group)
        return dataclasses.replace(blocks, block_q=min(blocks.block_q, rows))


def problems(regime: str, head_size: int) -> list[Problem]:
    """What the blocks of a regime are chosen on."""
    # Enough for more than a few programs.
    hidden_heads = max(16, HIDDEN // head_size)

    def shape(length, causal=True, heads=hidden_heads, batch=None, dtype="bfloat16"):
        batch = batch or TOKENS // length
        return Shape(batch, length, heads, heads, head_size, causal, dtype)

    documents = np.arange(8192) // 1024
    rows = jnp.asarray(np.broadcast_to(documents, (2, 8192)), jnp.int32)
    if regime == "plain":
        cases = [(2048, False), (4096, True), (4096, False)]
        alibi = {"alibi_slopes": jnp.exp2(-jnp.arange(1.0, hidden_heads + 1))}
        return [
            *(Problem(shape(*case)) for case in cases),
            Problem(shape(4096), arrays=alibi, operand="alibi_slopes"),
        ]
    if regime == "long":
        cases = [(8192, True), (TOKENS, True), (TOKENS, False)]
        return [Problem(shape(*case)) for case in cases]
    if regime == "single":
        return [Problem(shape(TOKENS, x, heads=1, batch=1)) for x in (True, False)]
    if regime == "few":
        cases = [(2, True), (4, False), (8, True)]
        return [Problem(shape(TOKENS, x, heads=n, batch=1)) for n, x in cases]
    if regime == "short":
        return [
            Problem(shape(8192), arrays={"query_segment_ids": rows}),
            Problem(shape(8192), arrays={"query_segment_ids": jnp.zeros_like(rows)}),
            Problem(shape(8192), {"local_window_size": (1023, None)}),
            Problem(shape(1024)),
        ]
    if regime == "whole":
        lengths = jnp.asarray(np.arange(1, 1 + TOKENS // 512) * 16, jnp.int32)
        return [
            Problem(shape(512, False)),
            Problem(shape(512, False), arrays={"key_value_seq_lengths": lengths}),
        ]
    if regime == "decode":
        return [
            Problem(Shape(b, s, 32, k, head_size, True, "bfloat16"), queries=t)
            for b, t, s, k in ((16, 1, 8192, 8), (1, 1, 65536, 8), (4, 8, 8192, 8))
        ]
    if regime == "heavy":
        mask = harness.random_mask(4096)
        return [
            Problem(shape(4096), arrays={"mask": mask}),
            Problem(shape(4096), {"logits_soft_cap": 30.0}),
        ]
    if regime == "dropout":
        key = jax.random.PRNGKey(0)
        return [Problem(shape(4096), {"dropout_rate": 0.1}, {"dropout_rng": key})]
    if regime == "bias":
        # One that fits the GPU's cache, and one that does not.
        draw = functools.partial(jax.random.normal, jax.random.key(0))
        biases = [draw((1, n, 4096, 4096), jnp.bfloat16) for n in (1, hidden_heads)]
        return [
            Problem(shape(4096), arrays={"bias": b}, operand="bias") for b in biases
        ]
    precision = "highest" if regime == "float32 highest" else "default"
    return [Problem(shape(4096, dtype="float32"), {"precision": precision})]
