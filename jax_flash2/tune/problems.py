"""Calls that the tuner times: their shapes, and what they have beside them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jax_flash2
from pallas_kernels import tables
from pallas_kernels.configs import Blocks, Config

# Rows of a batch, and features of a row.
TOKENS, HIDDEN = 16384, 2048
_FLOPS = {"forward": 1.0, "backward": 2.5, "forward_backward": 3.5}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Self-attention: query [batch, length, heads, head_size], kv_heads <= heads."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_size: int
    causal: bool
    dtype: str

    @property
    def group(self) -> int:
        """Query heads to a key/value head."""
        return self.heads // self.kv_heads

    def flops(self, which: str) -> float:
        """Floating-point operations of a pass, as the FlashAttention papers count.

        Forward `4 B T T N H`, half of it when causal; backward 2.5 times the forward.
        """
        forward = 4 * self.batch * self.length**2 * self.heads * self.head_size
        return _FLOPS[which] * forward / (2 if self.causal else 1)

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtype of query, key, value and the output's gradient."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [
            jax.ShapeDtypeStruct(
                (self.batch, self.length, n, self.head_size), jnp.dtype(self.dtype)
            )
            for n in heads
        ]

    def operands(self, seed: int = 0) -> list[jax.Array]:
        """Random normal query, key, value and output gradient, made on the device."""
        make = jax.jit(jax.random.normal, static_argnums=(1, 2))
        keys = jax.random.split(jax.random.key(seed), 4)
        made = map(lambda key, x: make(key, x.shape, x.dtype), keys, self.structs())
        return jax.block_until_ready(list(made))

    def __str__(self) -> str:
        heads = f"{self.heads}"
        if self.group > 1:
            heads += f" ({self.kv_heads})"
        causal = " causal" if self.causal else ""
        return f"{self.batch} x {self.length}, {heads} x {self.head_size}{causal}"


def random_mask(length: int) -> jax.Array:
    """[1, 1, length, length] that keeps nine pairs in ten: of no block all or none."""
    draw = jax.jit(jax.random.bernoulli, static_argnums=2)
    return draw(jax.random.key(0), 0.9, (1, 1, length, length))


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


@dataclasses.dataclass(frozen=True)
class Paged(Problem):
    """Keys and values in pages: of `paged_attention`.

    Attributes:
      page: rows of a page.
      kind: dtype of the pools; one of one byte has scales for each row and head.
    """

    page: int = 64
    kind: Any = jnp.bfloat16

    @classmethod
    def of(cls, shape: Shape, queries: int, page: int, kind: Any) -> "Paged":
        pages = shape.batch * shape.length // page
        order = jax.random.permutation(jax.random.key(1), pages).astype(jnp.int32)
        arrays = {
            "page_table": order.reshape(shape.batch, -1),
            "key_value_seq_lengths": jnp.full(shape.batch, shape.length, jnp.int32),
        }
        if jnp.dtype(kind).itemsize == 1:
            scale = jnp.ones((pages, page, shape.kv_heads), jnp.float32)
            arrays |= {"key_scale": scale, "value_scale": scale}
        return cls(shape, arrays=arrays, queries=queries, page=page, kind=kind)

    def rows(self, q: Array, k: Array, v: Array, do: Array) -> tuple[Array, ...]:
        q, k, v, do = super().rows(q, k, v, do)
        k, v = (
            x.reshape(-1, self.page, *x.shape[2:]).astype(self.kind) for x in (k, v)
        )
        return q, k, v, do

    def attention(self, implementation: str | None, config: Config | None):
        def attention(q, k, v, *arrays):
            more = dict(zip(self.arrays, arrays, strict=True))
            options = {"implementation": implementation, "config": config}
            return jax_flash2.paged_attention(q, k, v, **more, **options)

        return attention
