"""Who is compared.

An optional package is imported when its peer is asked to start, so that an absent one
is an ImportError there, which the comparison writes down.
"""

import functools
import math

import jax

from benchmarks.programs import JaxPeer, TorchPeer


def _jax_flash2(**config):
    import jax_flash2

    own = jax_flash2.Config(**config) if config else None

    def attention(q, k, v, *, causal):
        return jax_flash2.attention(q, k, v, is_causal=causal, config=own)

    return attention


def _jax_nn(implementation):
    def attention(q, k, v, *, causal):
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, implementation=implementation
        )

    return attention


def _tokamax(implementation):
    import tokamax

    def attention(q, k, v, *, causal):
        return tokamax.dot_product_attention(
            q, k, v, is_causal=causal, implementation=implementation
        )

    return attention


def _pallas_mha():
    from jax.experimental.pallas.ops.gpu import attention as pallas

    def attention(q, k, v, *, causal):
        scale = 1 / math.sqrt(q.shape[-1])
        return pallas.mha(q, k, v, None, sm_scale=scale, causal=causal)

    return attention


def _torch_sdpa(backend):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, backend)

    def attention(q, k, v, *, causal):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    return attention


def _flash4(**options):
    from flash_attn.cute import flash_attn_func

    def attention(q, k, v, *, causal):
        out = flash_attn_func(q, k, v, causal=causal, **options)
        return out[0] if isinstance(out, tuple) else out

    return attention


def _sdpa(name: str, label: str, backend: str, *, gqa: bool = True) -> TorchPeer:
    return TorchPeer(name, label, functools.partial(_torch_sdpa, backend), gqa=gqa)


# In the order of tables: ours, then from the fastest to the slowest.
_ALL = (
    JaxPeer("jax_flash2", "jax_flash2", _jax_flash2),
    JaxPeer(
        "jax_flash2_any_order",
        "jax_flash2, any order",
        functools.partial(_jax_flash2, deterministic=False),
        same_forward=True,
    ),
    TorchPeer("flash4", "FlashAttention-4 (CuTe)", _flash4, heads_first=False),
    TorchPeer(
        "flash4_deterministic",
        "FlashAttention-4 (CuTe), deterministic",
        functools.partial(_flash4, deterministic=True),
        heads_first=False,
        same_forward=True,
    ),
    _sdpa("torch_cudnn", "cuDNN (torch)", "CUDNN_ATTENTION"),
    JaxPeer("cudnn", "cuDNN (jax.nn)", functools.partial(_jax_nn, "cudnn")),
    JaxPeer("tokamax_mosaic", "tokamax Mosaic", functools.partial(_tokamax, "mosaic")),
    _sdpa("torch_flash2", "FlashAttention-2 (torch)", "FLASH_ATTENTION"),
    JaxPeer("pallas_mha", "JAX Pallas mha", _pallas_mha, gqa=False),
    JaxPeer("tokamax_triton", "tokamax Triton", functools.partial(_tokamax, "triton")),
    # FlashAttention-1's class.
    _sdpa(
        "torch_efficient",
        "memory-efficient (torch)",
        "EFFICIENT_ATTENTION",
        gqa=False,
    ),
    JaxPeer("xla", "XLA standard", functools.partial(_jax_nn, "xla")),
)
PEERS = {peer.name: peer for peer in _ALL}
OURS = "jax_flash2"
