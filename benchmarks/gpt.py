"""A small GPT in Flax NNX whose attention is a function handed to it.

Pre-norm blocks, rotary positions, no biases, and one matrix for the embedding and
the output layer. Shapes: B batch, T sequence length, D width, N heads, H head
size (D = N H), V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import jax_flash2

# (q, k, v, segment_ids) -> out: q, k, v and out are [B, T, N, H], segment_ids is
# int32 [B, T] or None. Causal; within a segment only, where there are segment ids.
# That of jax_flash2 takes `context`, too, for rows that devices divide.
AttentionFn = Callable[..., jax.Array]


def _jax_flash2(q, k, v, segment_ids, *, implementation, context=None):
    return jax_flash2.attention(
        q,
        k,
        v,
        is_causal=True,
        query_segment_ids=segment_ids,
        implementation=implementation,
        context=context,
    )


def _jax_nn(q, k, v, segment_ids, *, implementation):
    mask = None
    if segment_ids is not None:
        # [B, 1, T, T]: jax.nn has no segment ids, so their mask is written out.
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, implementation=implementation
    )


@jax.checkpoint
def _standard(q, k, v, segment_ids):
    """Scores are computed again for the backward: those of all layers do not fit."""
    return _jax_nn(q, k, v, segment_ids, implementation="xla")


ATTENTIONS: dict[str, AttentionFn] = {
    "jax_flash2": functools.partial(_jax_flash2, implementation=None),
    "reference": functools.partial(_jax_flash2, implementation="reference"),
    "jax_nn": _standard,
    "cudnn": functools.partial(_jax_nn, implementation="cudnn"),
}


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
      num_layers: number of blocks.
      num_heads: N, which divides `width`.
      width: D.
      vocab_size: V.
      dtype: dtype of the activations; the parameters stay float32.
      remat: for the backward, a block keeps its input and what attention names
        (jax_flash2 its results), and computes the rest again.
    """

    num_layers: int
    num_heads: int
    width: int
    vocab_size: int = 256
    dtype: str = "float32"
    remat: bool = False


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turns each pair of features by an angle that grows with the position.

    Feature pair i at position t turns by `t * 10000 ** (-2 i / H)`. Scores then
    depend on the distance of query and key alone, so positions need not start
    anew at each document of a packed row.

    Args:
      x: queries or keys, `[B, T, N, H]`, H even.
      positions: of the rows, int32 `[T]`.

    Returns:
      The same shape and dtype; the angles and the products are in float32.

    References:
      Su et al., RoFormer, 2021, section 3.4.2.
    """
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-jnp.arange(half) / half)
    angle = positions[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): `[B, T, D]` to `[B, T, D]`.

    Called with positions `[T]`, segment ids and options of the attention.
    """

    def __init__(self, config: GPTConfig, attention: AttentionFn, *, rngs: nnx.Rngs):
        width = config.width
        dtype = jnp.dtype(config.dtype)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, width, dtype=dtype, rngs=rngs)
        # The 2 * num_layers additions to the residual stream start with the
        # variance of one (GPT-2).
        residual_init = nnx.initializers.variance_scaling(
            0.5 / config.num_layers, "fan_in", "truncated_normal"
        )
        self.num_heads = config.num_heads
        self.attention = attention
        self.attention_norm = norm()
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width, kernel_init=residual_init)
        self.mlp_norm = norm()
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width, kernel_init=residual_init)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None,
        **options,
    ) -> jax.Array:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = (
            y.reshape(batch, length, self.num_heads, -1)
            for y in jnp.split(qkv, 3, axis=-1)
        )
        q, k = rotary(q, positions), rotary(k, positions)
        o = self.attention(q, k, v, segment_ids, **options)
        x = x + self.out(o.reshape(batch, length, width))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


_KEPT = jax.checkpoint_policies.save_only_these_names(
    jax_flash2.OUTPUT_NAME, jax_flash2.LSE_NAME
)


class GPT(nnx.Module):
    """A causal language model: tokens `[B, T]` to float32 logits `[B, T, V]`.

    Args:
      config: the sizes.
      attention: one of `ATTENTIONS`, or a function like them.
      rngs: keys for the initial parameters.
    """

    def __init__(self, config: GPTConfig, attention: AttentionFn, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.embed = nnx.Embed(
            config.vocab_size,
            config.width,
            dtype=dtype,
            # Small, because the same matrix makes the logits (GPT-2's 0.02).
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.blocks = nnx.List(
            Block(config, attention, rngs=rngs) for _ in range(config.num_layers)
        )
        self.norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.remat = config.remat

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        **options,
    ) -> jax.Array:
        """Logits.

        Args:
          tokens: int32 `[B, T]`.
          segment_ids: int32 `[B, T]`, or None where tokens attend to all before them.
          positions: of the tokens, int32 `[T]`. Default: 0, 1, 2 and so on.
          options: keywords of the attention (`context`).
        """
        if positions is None:
            positions = jnp.arange(tokens.shape[1])

        def run(block, x):
            return block(x, positions, segment_ids, **options)

        if self.remat:
            run = nnx.remat(run, policy=_KEPT)
        x = self.embed(tokens)
        for block in self.blocks:
            x = run(block, x)
        return self.embed.attend(self.norm(x)).astype(jnp.float32)


def generate(
    model: GPT, prompt: bytes, length: int, *, temperature: float = 0.0, seed: int = 0
) -> bytes:
    """Continues `prompt` by `length` bytes.

    Each byte costs a forward pass over the whole buffer, prompt and answer: simple,
    and fast enough for a sample. What lies after the current byte cannot be seen,
    because the attention is causal.

    Args:
      model: a model over bytes.
      prompt: at least one byte.
      length: the number of bytes to make.
      temperature: divides the logits; 0 takes the most likely byte each time.
      seed: chooses the sample where temperature > 0.

    Returns:
      The `length` new bytes, without the prompt.

    Raises:
      ValueError: the prompt is empty.
    """
    if not prompt:
        raise ValueError("generate needs a prompt of at least one byte")
    start = len(prompt)
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, tokens, key):
        model = nnx.merge(graph, state)

        def body(i, tokens):
            logits = model(tokens)[0, i - 1, :256]
            if temperature > 0:
                new = jax.random.categorical(
                    jax.random.fold_in(key, i), logits / temperature
                )
            else:
                new = jnp.argmax(logits)
            return tokens.at[0, i].set(new.astype(tokens.dtype))

        return jax.lax.fori_loop(start, start + length, body, tokens)

    tokens = jnp.zeros((1, start + length), jnp.int32)
    tokens = tokens.at[0, :start].set(jnp.array(list(prompt), jnp.int32))
    tokens = run(state, tokens, jax.random.key(seed))
    return bytes(tokens[0, start:].tolist())
