"""Transformer Engine for JAX with rows divided over devices, where it is installed.

Its own forms: a causal mask in two chunks a device, from both ends of the rows; packed
documents and windows in the layout of packed rows, in stripes of one row for its ring.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import numpy as np
from jax.sharding import Mesh

import jax_flash2
from benchmarks.context_calls import AXIS, Case

STRATEGIES = {"ring": "RING", "gather": "ALL_GATHER"}
# Rows of a stripe for packed rows: the ring takes no other; as its tutorial has it.
_STRIPES = {"RING": 1, "ALL_GATHER": 512}


def _is_packed(case: Case) -> bool:
    return case.mask.documents > 0 or case.mask.window is not None


def _stripe(strategy: str, case: Case) -> int:
    return min(_STRIPES[strategy], case.rows)


def order(strategy: str, case: Case) -> np.ndarray:
    """Which row is where."""
    parts, rows = case.parts, np.arange(case.total)
    if parts == 1 or not case.mask.causal:
        return rows
    if _is_packed(case):
        stripe = _stripe(strategy, case)
        return jax_flash2.stripe_positions(case.total, parts, stripe)
    chunks = rows.reshape(2 * parts, -1)
    mine = [(i, 2 * parts - 1 - i) for i in range(parts)]
    return chunks[np.ravel(mine)].reshape(-1)


def arrays(case: Case) -> dict[str, np.ndarray]:
    """Segment ids, from 1 on, and positions in each segment, of packed rows."""
    if not _is_packed(case):
        return {}
    ids = case.ids()
    ids = np.zeros((1, case.total), np.int32) if ids is None else ids
    first = np.searchsorted(ids[0], ids[0], "left")
    positions = (np.arange(case.total) - first).astype(np.int32)
    return {"ids": ids + 1, "positions": positions[None]}


def setting(mesh: Mesh):
    """The mesh, and which of its axes is for rows."""
    # Its ring has windows only so; read when it traces.
    os.environ.setdefault("NVTE_FUSED_RING_ATTENTION_USE_SCAN", "0")
    import jax
    import transformer_engine.jax as te
    from transformer_engine.jax.sharding import MeshResource

    resource = MeshResource(cp_resource=AXIS)
    stack = contextlib.ExitStack()
    stack.enter_context(jax.set_mesh(mesh))
    if hasattr(te, "autocast"):
        stack.enter_context(te.autocast(mesh_resource=resource))
    else:
        stack.enter_context(te.fp8_autocast(mesh_resource=resource))
    return stack


def build(strategy: str, case: Case, mesh: Mesh) -> Callable:
    del mesh
    from transformer_engine.jax import attention as te

    packed, causal = _is_packed(case), case.mask.causal
    kind = "CAUSAL_MASK" if causal else "NO_MASK"
    kind = "PADDING_CAUSAL_MASK" if packed else kind
    layout = "THD_THD_THD" if packed else "BSHD_BSHD_BSHD"
    window = case.mask.window
    options = {
        "attn_bias_type": te.AttnBiasType.NO_BIAS,
        "attn_mask_type": te.AttnMaskType[kind],
        "qkv_layout": te.QKVLayout[layout],
        "softmax_type": te.AttnSoftmaxType.VANILLA_SOFTMAX,
        "scaling_factor": case.head_size**-0.5,
        "dropout_probability": 0.0,
        "is_training": True,
        "max_segments_per_seq": max(case.mask.documents, 1),
        "window_size": None if window is None else (window - 1, 0),
        "context_parallel_strategy": te.CPStrategy[strategy],
        "context_parallel_causal_load_balanced": causal,
        "context_parallel_axis": AXIS,
    }
    if packed:
        options["stripe_size"] = _stripe(strategy, case)

    def attention(q, k, v, arrays):
        if packed:
            described = te.SequenceDescriptor.from_segment_ids_and_pos(
                arrays["ids"], arrays["positions"]
            )
        else:
            lengths = np.full(q.shape[0], case.total, np.int32)
            described = te.SequenceDescriptor.from_seqlens((lengths, lengths))
        return te.fused_attn((q, k, v), None, described, None, **options)

    return attention
