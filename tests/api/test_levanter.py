"""Levanter's Llama decodes by `servers.ragged_paged_attention_v2`.

Not in an extra: `marin-levanter` needs some fifty packages, and asks for a JAX that is
older than the newest.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2.servers import ragged_paged_attention_v2
from tests.tiers import deep

LENGTHS, PAGE = [21, 9, 30], 8
# New tokens of each sequence and step: chunks, one token beside a chunk, decoding.
STEPS = [(13, 1, 20), (0, 8, 1), *[(1, 0, 1)] * 8, (0, 0, 1)]


def ours(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, **options):
    """In place of `levanter.layers.attention.ragged_paged_attention`."""
    import haliax

    flat = q.flatten_axes(("kv_head", "q_heads_per_group"), "kv_head")
    arrays = (x.array for x in (flat, kv_pages, kv_lens, page_indices, cu_q_lens))
    out = ragged_paged_attention_v2(*arrays, num_seqs.reshape(1), **options)
    heads = [q.resolve_axis(x) for x in ("kv_head", "q_heads_per_group")]
    named = haliax.named(out, ("position", "kv_head", "head_size"))
    return named.unflatten_axis("kv_head", heads)


def step(levanter, tokens, pages, done, new):
    """What a server gives for a step: where new tokens go, the tokens, positions."""
    import haliax

    page_table = levanter.inference.page_table
    cu = np.cumsum([0, *new, 0])
    dests, ids, positions = np.full((3, 40), -1)
    for of, first, begin, count in zip(range(3), cu, done, new, strict=False):
        at = np.arange(begin, begin + count)
        dests[first : first + count] = pages[of, at // PAGE] * PAGE + at % PAGE
        positions[first : first + count], ids[first : first + count] = (
            at,
            tokens[of][at],
        )

    def named(x, *axes):
        return haliax.named(jnp.asarray(x, jnp.int32), axes)

    info = page_table.PageBatchInfo(
        named([0, 1, 2, -1], "seq"),  # the last is no sequence
        named([*pages, [-1] * pages.shape[1]], "seq", "page"),
        named([*np.add(done, new), -1], "seq"),
        named(cu, "seq"),
        jnp.int32(3),
        named(dests, "position"),
        PAGE,
    )
    return named(np.maximum(ids, 0), "position"), info, named(positions, "position")


@deep
def test_a_llama_of_levanter(monkeypatch):
    """Chunks and decoding of three sequences give the logits of training."""
    levanter = pytest.importorskip("levanter")
    import haliax
    from levanter.layers import attention
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

    sizes = {"hidden_dim": 64, "intermediate_dim": 96, "num_layers": 2}
    config = LlamaConfig(max_seq_len=64, num_heads=4, num_kv_heads=2, **sizes)
    vocabulary = haliax.Axis("vocab", 50)
    model = LlamaLMHeadModel.init(vocabulary, config, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 50, n) for n in LENGTHS]
    pages = rng.permutation(24)[:12].reshape(3, 4)
    spec = levanter.inference.page_table.PageTableSpec(num_pages=24, page_size=PAGE)
    cache = model.initial_cache(spec, dtype=jnp.float32)
    decode = jax.jit(lambda cache, x, info, at: model.decode(x, cache, info, at))
    monkeypatch.setattr(attention, "ragged_paged_attention", ours)
    done, found = np.zeros(3, int), [[], [], []]
    for new in STEPS:
        logits, cache = decode(cache, *step(levanter, tokens, pages, done, new))
        parts = np.split(np.asarray(logits.array)[: sum(new)], np.cumsum(new)[:-1])
        for rows, part in zip(found, parts, strict=True):
            rows.append(part)
        done += new
    assert done.tolist() == LENGTHS
    for ids, rows in zip(tokens, found, strict=True):
        x = haliax.named(jnp.asarray(ids), "position")
        whole = model(x, attention.AttentionMask.causal()).array
        np.testing.assert_allclose(np.concatenate(rows), whole, atol=1e-5)
