"""Attention calls of published models: what `benchmarks.models` times.

A call is one layer's attention as the model's own code makes it: shapes, masks, biases,
and whether it is trained. Sources are papers and the configurations that come with the
published weights. Batch sizes are ours: what keeps one GPU busy, or what a server has.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of `attention` with random operands.

    Attributes:
      name: the model, and which of its layers.
      source: where the numbers are from.
      batch, t, n, h: batch entries, query rows, query heads, head size.
      s, k, hv: key rows, key/value heads, head size of values; None: as of queries.
      trained: whether the backward is timed too.
      causal: attend to the past only; the last query stands at the last key.
      window: keys before and after a query that it may attend to, None for all.
      scale: of the products; None for 1 / sqrt(h).
      soft_cap: of the scores.
      sinks, alibi: whether there is a logit, or a slope, for each head.
      bias: axes of a bias that is learnt, among "bnts"; None for no bias.
      documents: packed in each row, as segment ids; 0 for none.
      lengths: whether each batch entry has a length of its own.
    """

    name: str
    source: str
    batch: int
    t: int
    n: int
    h: int
    s: int | None = None
    k: int | None = None
    hv: int | None = None
    trained: bool = True
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    bias: str | None = None
    documents: int = 0
    lengths: bool = False

    @property
    def keys(self) -> int:
        return self.t if self.s is None else self.s

    @property
    def kv_heads(self) -> int:
        return self.n if self.k is None else self.k

    @property
    def value_size(self) -> int:
        return self.h if self.hv is None else self.hv

    @property
    def offset(self) -> int:
        """Position of the first query."""
        return self.keys - self.t if self.causal else 0

    def small(self) -> Call:
        """The same with few rows and heads, for a CPU."""
        group = min(self.n // self.kv_heads, 2)
        heads = min(self.kv_heads, 2)
        t = min(self.t, 40)
        keys = None if self.s is None else max(t, min(self.s, 72))
        cut = self.window and tuple(x and min(x, 9) for x in self.window)
        return dataclasses.replace(
            self,
            batch=min(self.batch, 2),
            t=t,
            s=keys,
            n=group * heads,
            k=None if self.k is None else heads,
            window=cut,
            documents=min(self.documents, 3),
        )

    def operands(self, dtype, seed: int = 0) -> tuple[list[jax.Array], dict]:
        """Query, key, value and the output's gradient; other arrays by name."""
        keys = jax.random.split(jax.random.key(seed), 6)
        rows = (self.t, self.keys, self.keys, self.t)
        heads = (self.n, self.kv_heads, self.kv_heads, self.n)
        last = (self.h, self.h, self.value_size, self.value_size)
        made = [
            jax.random.normal(key, (self.batch, *shape), dtype)
            for key, *shape in zip(keys, rows, heads, last, strict=False)
        ]
        arrays = {}
        if self.bias is not None:
            size = {"b": self.batch, "n": self.n, "t": self.t, "s": self.keys}
            shape = [size[a] if a in self.bias else 1 for a in "bnts"]
            arrays["bias"] = jax.random.normal(keys[4], shape, dtype)
        if self.sinks:
            arrays["sinks"] = jax.random.normal(keys[5], (self.n,), jnp.float32)
        if self.alibi:
            slopes = 2.0 ** (-8 * np.arange(1, self.n + 1) / self.n)
            arrays["alibi_slopes"] = jnp.asarray(slopes, jnp.float32)
        if self.documents:
            rng = np.random.default_rng(seed)
            borders = rng.integers(1, self.t, (self.batch, self.documents - 1))
            ids = np.sum(np.arange(self.t)[:, None] >= borders[:, None], -1)
            arrays["query_segment_ids"] = jnp.asarray(ids, jnp.int32)
        if self.lengths:
            rng = np.random.default_rng(seed)
            lengths = rng.integers(self.keys // 4, self.keys + 1, self.batch)
            arrays["key_value_seq_lengths"] = jnp.asarray(lengths, jnp.int32)
        return made, arrays

    def __str__(self) -> str:
        rows = f"{self.t}" if self.s is None else f"{self.t} to {self.keys}"
        heads = f"{self.n}" if self.k is None else f"{self.n} ({self.k})"
        size = f"{self.h}" if self.hv is None else f"{self.h}, {self.hv}"
        return f"{self.batch} x {rows}, {heads} x {size}"


def _language() -> list[Call]:
    def call(name, source, *sizes, **more):
        return Call(name, source, *sizes, causal=True, **more)

    llama, gemma = "arXiv 2407.21783", "arXiv 2408.00118"
    oss = "gpt-oss model card, 2025"
    past = (4095, None)
    return [
        call("Llama 3 8B", llama, 2, 8192, 32, 128, k=8),
        call("Llama 3 70B, 1 of 8 slices", llama, 1, 8192, 8, 128, k=1),
        call("Llama 3 70B, 1 of 4 slices", llama, 1, 8192, 16, 128, k=2),
        call("Llama 3 8B, 8 documents", llama, 2, 8192, 32, 128, k=8, documents=8),
        call("Llama 2 7B", "arXiv 2307.09288", 4, 4096, 32, 128),
        call("Mistral 7B", "arXiv 2310.06825", 2, 8192, 32, 128, k=8, window=past),
        call("Qwen2 0.5B", "arXiv 2407.10671", 4, 4096, 14, 64, k=2),
        call("Gemma 2 9B", gemma, 1, 8192, 16, 256, k=8, soft_cap=50.0),
        call(
            *("Gemma 2 9B, local", gemma, 1, 8192, 16, 256),
            **{"k": 8, "soft_cap": 50.0, "window": past},
        ),
        call(
            *("Gemma 3 4B, local", "arXiv 2503.19786", 1, 8192, 8, 256),
            **{"k": 4, "window": (1023, None)},
        ),
        call("gpt-oss 20B", oss, 2, 4096, 64, 64, k=8, sinks=True),
        call(
            *("gpt-oss 20B, local", oss, 2, 4096, 64, 64),
            **{"k": 8, "sinks": True, "window": (127, None)},
        ),
        call("Falcon 7B (multi-query)", "arXiv 2311.16867", 4, 2048, 71, 64, k=1),
        call("StarCoder (multi-query)", "arXiv 2305.06161", 1, 8192, 48, 128, k=1),
        call("PaLM 8B (multi-query)", "arXiv 2204.02311", 4, 2048, 16, 256, k=1),
        call("DeepSeek-V2-Lite (MLA)", "arXiv 2405.04434", 2, 4096, 16, 192, hv=128),
        call("GPT-2 small", "OpenAI, 2019", 16, 1024, 12, 64),
        call("GPT-J 6B", "EleutherAI, 2021", 4, 2048, 16, 256),
        call("GPT-NeoX 20B", "arXiv 2204.06745", 2, 2048, 64, 96),
        call("Phi-2", "Microsoft, 2023", 4, 2048, 32, 80),
        call("StableLM 2 12B", "arXiv 2402.17834", 2, 4096, 32, 160, k=8),
        call("BLOOM 7B", "arXiv 2211.05100", 4, 2048, 32, 128, alibi=True),
    ]


def _encoders() -> list[Call]:
    t5, whisper = "arXiv 1910.10683", "arXiv 2212.04356"
    return [
        Call("BERT large", "arXiv 1810.04805", 32, 512, 16, 64, lengths=True),
        Call("T5 large, encoder", t5, 16, 512, 16, 64, scale=1.0, bias="nts"),
        Call(
            *("T5 large, decoder", t5, 16, 512, 16, 64),
            **{"scale": 1.0, "bias": "nts", "causal": True},
        ),
        Call("ModernBERT, local", "arXiv 2412.13663", 4, 8192, 12, 64, window=(64, 64)),
        Call("Whisper large, encoder", whisper, 8, 1500, 20, 64),
        Call("Whisper large, cross", whisper, 8, 448, 20, 64, s=1500),
    ]


def _vision() -> list[Call]:
    vit, clip = "arXiv 2010.11929", "arXiv 2103.00020"
    diffusion = "arXiv 2112.10752"
    return [
        Call("ViT-L/16", vit, 64, 197, 16, 64),
        Call("ViT-H/14", vit, 32, 257, 16, 80),
        Call("ViT-g/14", "arXiv 2106.04560", 32, 257, 16, 88),
        Call("SigLIP So400m", "arXiv 2303.15343", 32, 729, 16, 72),
        Call("CLIP, text", clip, 256, 77, 12, 64, causal=True),
        Call("Swin, windows", "arXiv 2103.14030", 4096, 49, 4, 32, bias="nts"),
        Call("Stable Diffusion, 64 x 64", diffusion, 8, 4096, 8, 40),
        Call("Stable Diffusion, 32 x 32", diffusion, 8, 1024, 8, 80),
        Call("Stable Diffusion, 16 x 16", diffusion, 8, 256, 8, 160),
        Call("Stable Diffusion, text", diffusion, 8, 4096, 8, 40, s=77),
        Call("Stable Diffusion, VAE", diffusion, 4, 4096, 1, 512),
        Call("SDXL, 64 x 64", "arXiv 2307.01952", 4, 4096, 10, 64),
        Call("SDXL, text", "arXiv 2307.01952", 4, 4096, 10, 64, s=77),
        Call("FLUX.1", "Black Forest Labs, 2024", 1, 4608, 24, 128),
        Call("AlphaFold 2, triangles", "Nature 596", 64, 384, 4, 32, bias="nts"),
    ]


def _serving() -> list[Call]:
    def call(name, *sizes, k=8, **more):
        source = "arXiv 2407.21783"
        return Call(name, source, *sizes, k=k, trained=False, causal=True, **more)

    return [
        call("Llama 3 8B, chunk of a prompt", 1, 512, 32, 128, s=8192),
        call("Llama 3 8B, 8 queries", 4, 8, 32, 128, s=32768),
        call("Llama 3 8B, decode", 16, 1, 32, 128, s=32768),
        call("Llama 3 8B, decode, one row", 1, 1, 32, 128, s=131072),
        call("Llama 3 8B, decode, short", 1, 1, 32, 128, s=4096),
        call("Llama 3 8B, decode, ragged", 64, 1, 32, 128, s=4096, lengths=True),
        call("Llama 3 70B, decode, 1 of 8 slices", 32, 1, 8, 128, s=8192, k=1),
        call("Multi-query decode", 16, 1, 32, 128, s=8192, k=1),
    ]


GROUPS = {
    "language": _language(),
    "encoders": _encoders(),
    "vision": _vision(),
    "serving": _serving(),
}
