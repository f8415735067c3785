"""Backend "triton": Pallas kernels that lower to XLA's Triton custom call."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import configs, device
from pallas_kernels.core.axes import Named, batch_axes, operand_sum, sizes, summed_to
from pallas_kernels.core.mask import SegmentIds
from pallas_kernels.core.spec import AttentionSpec, sink_gradient
from pallas_kernels.triton import memory, support
from pallas_kernels.triton.backward import dkv, dq
from pallas_kernels.triton.backward import operand as operand_kernel
from pallas_kernels.triton.forward import forward as forward_kernel
from pallas_kernels.triton.memory import Launch

MAX_HEAD_SIZE = 512
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# Keys for a query, on average, up to which the blocks of "short" are the faster ones,
# and keys from which those of "long" are (H200, 2026-11-22: BUILD_NOTES.md, Measured).
_SHORT = 1024
_LONG = 8192

lowering_context = support.lowering_context


def unsupported(
    *, dtype, head_sizes: tuple[int, int], elements: int, symbolic: bool, config
) -> str | None:
    """Why this backend cannot serve a call here and now, or None.

    Args:
      dtype: of query, key and value.
      head_sizes: of key and value.
      elements: of the largest array.
      symbolic: whether a size is (`jax.export`).
      config: the caller's.
    """
    interpret = config is not None and config.interpret
    if not interpret and device.capability() < 80:
        return f"compute capability {device.capability() / 10} is below 8.0"
    if dtype not in DTYPES:
        return f"dtype {jnp.dtype(dtype).name} is not bfloat16, float16 or float32"
    if symbolic:
        return "its kernels need sizes that are numbers, and one is symbolic"
    if elements > memory.MOST_ELEMENTS:
        return memory.too_large(elements)
    if max(head_sizes) > MAX_HEAD_SIZE:
        return f"head size {max(head_sizes)} is above {MAX_HEAD_SIZE}"
    heads = (configs.padded(head_sizes[0]), configs.padded(head_sizes[1]))
    for kernel in configs.kernels(heads):
        need = configs.smallest(kernel, heads, jnp.dtype(dtype).itemsize)
        limit = device.shared_memory_limit()
        if not interpret and need > limit:
            return (
                f"head size {max(head_sizes)} in {jnp.dtype(dtype).name} needs "
                f"{need >> 10} KiB of shared memory and this GPU has {limit >> 10}"
            )
    return None


def _kind(size: dict[str, int], operands, spec: AttentionSpec, pair_bytes: int) -> str:
    """What is unusual about a call (`configs.REGIMES`)."""
    if pair_bytes > 1:
        return "bias"
    if spec.dropout is not None:
        return "dropout"
    if spec.score.soft_cap is not None or pair_bytes:
        return "heavy"
    keys = spec.mean_keys(size["s"])
    # Packed documents are mostly short beside a row of them.
    packed = any(isinstance(atom, SegmentIds) for atom in spec.masks)
    if packed or 4 * keys <= size["s"]:
        return "short"
    rows = math.prod(size[name] for name in batch_axes(operands)) * size.get("n", 1)
    programs = rows * -(-size["t"] // 128) / device.multiprocessors()
    if programs > 8:
        usual = "long" if size["s"] >= _LONG else "plain"
        return usual if keys > _SHORT else "short"
    return "few" if programs > 1 else "single"


def _padded_heads(operands) -> tuple[int, int]:
    """Of key and value."""
    size = sizes(operands)
    return configs.padded(size["h"]), configs.padded(size["d"])


def _launch(kernel: str, config, precision, operands, spec) -> Launch:
    size = sizes(operands)
    tiles = [x for x in jax.tree.leaves(spec) if {"t", "s"} <= set(x.axes)]
    pair_bytes = sum(jnp.dtype(x.dtype).itemsize for x in tiles)
    dtype = operands[0].dtype
    interpret = config is not None and config.interpret
    heads = _padded_heads(operands)
    limit = device.shared_memory_limit()
    itemsize, product = support.product_precision(dtype, precision, interpret)
    if configs.smallest(kernel, heads, itemsize) > limit:  # float32 as it is
        itemsize, product = jnp.dtype(dtype).itemsize, precision
    blocks = configs.choose(
        kernel,
        config,
        rows=(size["t"], size["s"]),
        heads=heads,
        itemsize=itemsize,
        limit=limit,
        kind=_kind(size, operands, spec, pair_bytes),
        pair_bytes=pair_bytes,
        gpu=device.device_kind(),
        holds=support.holds(),
    )
    return Launch(blocks, product, support.arithmetic(dtype, interpret), interpret)


def _run(
    kernel,
    name: str,
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    *rest,
    along: str = "j",
    config: configs.Config | None,
    precision,
) -> tuple[jax.Array, ...]:
    """Runs a kernel whose programs loop over blocks of keys (`along` "j") or queries.

    Args:
      kernel: of `forward` or `backward`; `rest` are its operands after the spec.
      name: one of `configs.KERNELS`.
    """
    launch = _launch(name, config, precision, [q, k, v], spec)
    blocks, size = launch.blocks, sizes([q, k])
    spec = spec.with_table(along, blocks.block_q, blocks.block_kv, size["t"], size["s"])
    return kernel(q, k, v, spec, *rest, launch=launch)


def _rows_struct(operands, lse: Named) -> Named:
    """Like lse, with every batch axis: any of o, do and dlse may be mapped alone."""
    size = sizes(operands)
    axes = (*(a for a in batch_axes(operands) if a not in lse.axes), *lse.axes)
    return Named(jax.ShapeDtypeStruct([size[a] for a in axes], lse.dtype), axes)


def forward(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    outputs: tuple[Named, Named],
    *,
    config: configs.Config | None,
    precision,
) -> tuple[jax.Array, ...]:
    """Output and log-sum-exp, with the shapes, dtypes and axes of `outputs`."""
    options = {"config": config, "precision": precision}
    return _run(forward_kernel, "forward", q, k, v, spec, outputs, **options)


def backward(
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    saved: tuple[Named, Named, Named, Named],
    outputs: tuple[Named, ...],
    *,
    config: configs.Config | None,
    precision,
) -> tuple[jax.Array, ...]:
    """Gradients of q, k, v and the spec's operands.

    Args:
      saved: o, lse, do and dlse.
    """
    sink, spec = spec.sink, dataclasses.replace(spec, sink=None)
    options = {"config": config, "precision": precision}
    _, lse, do, _ = saved
    rows = _rows_struct([q, k, v, *jax.tree.leaves(spec), *saved], lse)
    grad_q, *of_rows = _run(
        dq, "dq", q, k, v, spec, saved, (outputs[0], rows, rows), **options
    )
    delta, lse_log2 = (Named(x, rows.axes) for x in of_rows)
    saved = (lse_log2, delta, do)
    grad_kv = dict(zip(("dk", "dv"), outputs[1:3], strict=True))
    structs, gradients = iter(outputs[3:]), [grad_q]
    if "dkv" in configs.kernels(_padded_heads([q, v])):
        passes = {"dkv": grad_kv}
    else:
        passes = {name: {name: out} for name, out in grad_kv.items()}
    for name, out in passes.items():
        gradients += _run(dkv, name, q, k, v, spec, saved, out, along="i", **options)
    for field in spec.score.operands:
        gradients.append(
            _operand_gradient(q, k, v, spec, saved, next(structs), field, options)
        )
    if sink is not None:
        out = next(structs)
        gradient = sink_gradient(sink, lse, delta)
        gradients.append(summed_to(gradient, out.axes).astype(out.dtype))
    return tuple(gradients)


def _operand_gradient(q, k, v, spec, saved, out: Named, field: str, options):
    """The gradient `out` of a field of the score."""
    operands = [q, k, v, *jax.tree.leaves(spec), *saved]
    size = sizes(operands)
    batch = (*batch_axes(operands), *(["n"] if "n" in size else []))
    rows, looped = operand_sum(out, batch)
    mapped = [a for a in batch if a not in looped]
    if len(rows) == 2:
        axes = tuple(a for a in out.axes if a is not None)
    else:
        axes = (*mapped, *rows)
    dtype = out.dtype if len(rows) == 2 else jnp.float32
    result = Named(jax.ShapeDtypeStruct([size[a] for a in axes], dtype), axes)
    kernel = functools.partial(operand_kernel, field=field, looped=looped)
    options = {"along": "i" if rows == ("s",) else "j", **options}
    (total,) = _run(kernel, "operand", q, k, v, spec, saved, (result,), **options)
    return summed_to(Named(total, axes), out.axes).astype(out.dtype)
