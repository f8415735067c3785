"""Tuned blocks: what tells calls apart, and the tables by backend and GPU.

A table is made from what `python -m jax_flash2.tune` finds on a GPU. It has the fastest
blocks there, by kernel, padded head size and regime, and the other numbers of the
backend's choices, each of which says where and when it was measured.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels.core.axes import batch_axes, sizes
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.device import Family

TUNING = Path(__file__).parent / "tuning"
HEADS = (64, 80, 96, 128, 192, 256, 512)  # sizes of head blocks that tables have
# Rows of queries, heads of a group among them, up to which one block holds them all and
# waits for keys and values.
FEW_ROWS = 64
# The GPU whose table serves those that have none, by backend. "context" is the choice
# of a method for rows divided over devices.
DEFAULT_GPUS = {
    "triton": "NVIDIA H200",
    "mosaic_gpu": "NVIDIA H100 80GB HBM3",
    "context": "NVIDIA H200",
}
# Triton's, by family of GPUs; the numbers that such a table lacks are the default's.
FAMILIES = {
    device.SM_80: "sm_80",
    device.SM_86: "sm_86",
    device.SM_90: DEFAULT_GPUS["triton"],
    device.SM_100: "sm_100",
}

REGIMES = {
    "plain": "none of the others",
    "single": "at most one program of 128 query rows to a multiprocessor",
    "few": "at most eight of them",
    "short": "few keys for a query: a window, short sequences, packed documents",
    "whole": "few keys for a query, all or the first: short sequences that are padded",
    "long": "sequences of many keys",
    "heavy": "much arithmetic or one byte for every pair: a soft cap, a mask",
    "dropout": "bits made for every pair",
    "bias": "more bytes for every pair: a bias",
    "decode": "at most 64 rows of queries and heads of a group, many keys for each",
    "paged": "likewise, and the keys lie in pages",
    "paged rows": "likewise, in pages that no block of 64 rows lies in",
    "paged byte": "likewise, in elements of one byte, in any pages",
    "paged byte bound": "likewise, in small pages, or all programs run at once if one "
    "more fits: with fewer registers of each thread",
    "paged many": "keys in pages, and more than 32 rows of queries",
    "float32": "elements of four bytes",
    "float32 highest": "their products split in bfloat16",
}


# What serves a regime that a kernel has no blocks for; "plain" if it is not here.
INSTEAD = {
    "whole": "short",
    "paged": "decode",
    "paged rows": "paged",
    "paged byte": "paged",
    "paged byte bound": "paged byte",
}


def in_order(regime: str) -> list[str]:
    """The regimes whose blocks serve a call, the first that there are."""
    found = [regime]
    while found[-1] in INSTEAD:
        found.append(INSTEAD[found[-1]])
    return found if found[-1] == "plain" else [*found, "plain"]


def table_path(backend: str, gpu: str) -> Path:
    return TUNING / f"{backend}_{gpu.lower().replace(' ', '_')}.json"


def serving(backend: str, gpu: str | None, family: Family | None = None) -> str:
    """Which table serves a GPU: its own, its family's, or the default one's."""
    if gpu is not None and table_path(backend, gpu).exists():
        return gpu
    default = DEFAULT_GPUS[backend]
    return FAMILIES[family] if backend == "triton" and family else default


@functools.cache
def read(backend: str, gpu: str | None, family: Family | None = None) -> dict:
    """The table that serves a GPU (`serving`).

    Raises:
      ValueError: if it is no JSON, or that of another GPU.
    """
    found = serving(backend, gpu, family)
    path = table_path(backend, found)
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, of blocks for {gpu}: no JSON: {error}") from None
    named = content.get("gpu") if isinstance(content, dict) else None
    if named != found:
        raise ValueError(
            f"{path}, of blocks for {gpu}: 'gpu' must be {found!r}, got {named!r}"
        )
    return content


def table(backend: str, gpu: str | None, family: Family | None = None) -> dict:
    """Blocks by kernel, padded head size and regime (`REGIMES`).

    A regime of elements of two bytes that a kernel lacks is as another one (`INSTEAD`);
    one of float32 has no tuned blocks then.

    Raises:
      ValueError: as `read`, or if the table has none.
    """
    blocks = read(backend, gpu, family).get("blocks")
    if not isinstance(blocks, dict):
        path = table_path(backend, serving(backend, gpu, family))
        raise ValueError(
            f"{path}, of blocks for {gpu}: 'blocks' must be a dictionary, got {blocks}"
        )
    return blocks


def number(backend: str, name: str):
    """A number of a backend's choices, for the GPU that is meant."""
    gpu = device.gpu()
    found = read(backend, gpu.kind, gpu.family).get("numbers", {})
    return (found.get(name) or read(backend, None)["numbers"][name])["value"]


def bucket(head_size: int) -> int:
    """The size in a table that serves a head size."""
    return next(size for size in HEADS if head_size <= size)


def padded(size: int) -> int:
    """The block size that holds `size` rows or head elements: a power of two >= 16."""
    return max(16, 1 << (size - 1).bit_length())


def pieces(size: int) -> tuple[int, ...]:
    """Blocks that together hold `size` head elements: one or two powers of two.

    Two where they are less than the next power of two: 192 is 128 and 64, 80 is 64 and
    16, of which a product multiplies no padding. Below 64 that is no faster.
    """
    first = 1 << (size.bit_length() - 1)
    cut = first, padded(max(size - first, 1))
    return cut if first >= 64 and sum(cut) < padded(size) else (padded(size),)


def pair_bytes(spec: AttentionSpec) -> int:
    """Bytes that are loaded for each pair of query and key (bias, mask)."""
    tiles = (x for x in jax.tree.leaves(spec) if {"t", "s"} <= set(x.axes))
    return sum(jnp.dtype(x.dtype).itemsize for x in tiles)


def _of_pages(operands, spec: AttentionSpec) -> str:
    """Which of the regimes of keys in pages."""
    assert spec.pages is not None
    if any(x.dtype.itemsize == 1 for x in operands):
        size, gpu = sizes(operands), device.multiprocessors()
        axes = *batch_axes(operands), "k" if "k" in size else "n"
        programs = math.prod(size[name] for name in axes)
        left = programs - number("triton", "paged_programs") * gpu
        is_bound = spec.pages.size % 64 or 0 < left <= gpu
        return "paged byte bound" if is_bound else "paged byte"
    return "paged rows" if spec.pages.size % 64 else "paged"


def regime(operands, spec: AttentionSpec) -> str:
    """What is unusual about a call with elements of two bytes, one of `REGIMES`.

    Args:
      operands: query, key and value, `Named`.
      spec: of `Named`.
    """
    size = sizes([*operands, *jax.tree.leaves(spec.pages)])
    if spec.pages is not None and size["t"] > FEW_ROWS // 2:
        return "paged many"
    if size["t"] <= FEW_ROWS and 16 * size["t"] <= size["s"]:
        return "decode" if spec.pages is None else _of_pages(operands, spec)
    if pair_bytes(spec) > 1:
        return "bias"
    if spec.dropout is not None:
        return "dropout"
    if spec.score.is_heavy or pair_bytes(spec):
        return "heavy"
    keys = spec.mean_keys(size["s"])
    if spec.traits.is_sparse or 4 * keys <= size["s"]:
        return "short"
    rows = math.prod(size[name] for name in batch_axes(operands)) * size.get("n", 1)
    programs = rows * -(-size["t"] // 128) / device.multiprocessors()
    if programs > 8:
        # Up to so many keys for a query the blocks of "short" are the faster ones, and
        # from so many keys on those of "long".
        few, many = (number("triton", name) for name in ("few_keys", "many_keys"))
        if keys > few:
            return "long" if size["s"] >= many else "plain"
        return "whole" if spec.traits.reach == (None, None) else "short"
    return "few" if programs > 1 else "single"
