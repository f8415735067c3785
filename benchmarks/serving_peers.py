"""Other libraries' calls that read a cache, of the same rows: peers of `serving`.

Each is a function of (case, cache) that gives a `Program`, or raises what says why it
has none: NotImplementedError, or an ImportError where it is not installed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import serving_calls
from benchmarks.serving_calls import Cache, Case, Program


def _one_query(case: Case) -> None:
    if case.t > 1:
        raise NotImplementedError("one query alone")


def _in_order(name: str, case: Case, cache: Cache, function: Callable) -> Program:
    """A call of rows that lie in order, of (query, keys, values, lengths)."""
    own = serving_calls.dense(case, cache)
    return Program(name, function, own.arguments, own.size, want=own.want)


def jax_nn(case: Case, cache: Cache) -> Program:
    def function(q, keys, values, lengths):
        options = {"key_value_seq_lengths": lengths, "implementation": "cudnn"}
        if case.t > 1:
            rows = jnp.arange(case.s - case.t, case.s)[:, None]
            options["mask"] = (rows >= jnp.arange(case.s))[None, None]
        return jax.nn.dot_product_attention(q, keys, values, **options)

    return _in_order("cuDNN (jax.nn), dense", case, cache, function)


def jax_decoding(case: Case, cache: Cache) -> Program:
    _one_query(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import decode_attention

    def function(q, keys, values, lengths):
        gqa = decode_attention.gqa
        return gqa(q[:, 0], keys, values, kv_seq_len=lengths)[:, None]

    return _in_order("JAX decode_attention, dense", case, cache, function)


def jax_paged(page: int, case: Case, cache: Cache) -> Program:
    _one_query(case)
    if page < 16:
        raise NotImplementedError("blocks of less than 16 keys")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention as op

    pages = case.copies * case.rows // page
    shape = case.k, pages, page, case.h

    def function(q, keys, values, table, lengths):
        pools = (x.reshape(shape) for x in (keys, values))
        q = q[:, 0] * case.h**-0.5
        options = {"pages_per_compute_block": max(1, 128 // page)}
        return op.paged_attention(q, *pools, table, lengths, **options)[:, None]

    q, lengths = serving_calls.query(case), serving_calls.lengths_of(case)
    found = serving_calls.tables(case, page)
    arrays = cache.keys, cache.values
    given = [(q, *arrays, jnp.asarray(x), lengths) for x in found]
    row = serving_calls.rows_of(found[0][-1], page)
    pools = (x.reshape(case.k, -1, case.h)[:, row].swapaxes(0, 1) for x in arrays)
    want = serving_calls.exact(q[-1], Cache(*pools), np.arange(case.s))
    size = (cache.keys.nbytes + cache.values.nbytes) // case.copies
    return Program(f"JAX paged_attention, {page}", function, given, size, want=want)


def _same_pages(name: str, page: int, case: Case, cache: Cache, function) -> Program:
    """A call of (query, keys, values, None, table, lengths), of the pages of ours."""
    (own,) = serving_calls.ours(case, "bfloat16", cache, [page])
    return Program(f"{name}, {page}", function, own.arguments, own.size, want=own.want)


def cudnn_paged(page: int, case: Case, cache: Cache) -> Program:
    _one_query(case)
    if case.copies > 1:
        raise NotImplementedError("a pool has the pages of one batch alone")
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    def function(q, keys, values, _, table, lengths):
        pools = (serving_calls.in_pages(x, page) for x in (keys, values))
        table = table[:, None, :, None]
        return cudnn.paged_attention(
            *(q, *pools, jnp.ones_like(lengths), lengths, table, table),
            scale=case.h**-0.5,
            mask_type=cudnn.MaskType.PADDING,
        )

    return _same_pages("cuDNN (JAX), paged", page, case, cache, function)


class _Torch:
    """A result of torch, for which `jax.block_until_ready` waits."""

    def __init__(self, value):
        self.value = value

    def block_until_ready(self) -> _Torch:
        import torch

        torch.cuda.synchronize()
        return self


def flashinfer(page: int, case: Case, cache: Cache) -> Program:
    """`flashinfer-python` 0.6.18, which compiles its modules at its first call."""
    _one_query(case)
    import flashinfer
    import torch

    room = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def planned(table):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            room, "NHD", use_tensor_cores=case.n > case.k
        )
        table = np.asarray(table)
        numbers = {"dtype": torch.int32, "device": "cuda"}
        wrapper.plan(
            torch.arange(0, table.size + 1, table.shape[1], **numbers),
            torch.tensor(table.reshape(-1), **numbers),
            torch.full((case.batch,), page, **numbers),
            *(case.n, case.k, case.h, page),
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return wrapper

    own = _same_pages("FlashInfer", page, case, cache, None)
    taken = functools.partial(jax.tree.map, torch.utils.dlpack.from_dlpack)
    q, keys, values, *_ = own.arguments[0]
    q, *pools = taken(
        [q[:, 0], *(serving_calls.in_pages(x, page) for x in (keys, values))]
    )

    # Calls that share the room have one plan.
    wrapper = planned(own.arguments[0][4])

    def function():
        return _Torch(wrapper.run(q, tuple(pools)))

    def last(out: _Torch):
        return out.value[-1:].float().cpu().numpy()

    return Program(own.peer, function, [()], own.size, last, own.want, is_traced=False)


def flash_attn3(page: int, case: Case, cache: Cache) -> Program:
    """`flash-attn3-jax` 0.2.3, with parts for two programs a multiprocessor."""
    from flash_attn3_jax import flash_mha_with_kvcache

    programs = 2 * jax.devices()[0].core_count
    splits = max(1, programs // (case.batch * case.k))

    def function(q, keys, values, _, table, lengths):
        pools = (serving_calls.in_pages(x, page) for x in (keys, values))
        options = {"cache_seqlens": lengths, "page_table": table}
        options |= {"is_causal": case.t > 1, "num_splits": splits}
        return flash_mha_with_kvcache(q, *pools, **options)

    return _same_pages(
        "FlashAttention-3 (flash-attn3-jax)", page, case, cache, function
    )


DENSE: tuple[Callable[[Case, Cache], Program], ...] = (jax_nn, jax_decoding)
PAGED: tuple[Callable[[int, Case, Cache], Program], ...] = (
    jax_paged,
    cudnn_paged,
    flashinfer,
    flash_attn3,
)
