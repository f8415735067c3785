"""Backend "mosaic_gpu": Pallas kernels for Hopper that lower to Mosaic GPU."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import device, passes
from pallas_kernels.backend import Call
from pallas_kernels.configs import Blocks
from pallas_kernels.core import clear, flash2
from pallas_kernels.core.axes import Named, batch_axes, operand_sum, sizes
from pallas_kernels.division import words
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import (
    dropout,
    forward_plan,
    memory,
    pairwise,
    support,
    tuning,
)
from pallas_kernels.mosaic_gpu.backward import backward as backward_kernel
from pallas_kernels.mosaic_gpu.dbias import dbias as dbias_kernel
from pallas_kernels.mosaic_gpu.dbias import layout_of as layout_of_dbias
from pallas_kernels.mosaic_gpu.dkv import dkv as dkv_kernel
from pallas_kernels.mosaic_gpu.dq import dq as dq_kernel
from pallas_kernels.mosaic_gpu.forward import forward as forward_kernel

DTYPES = (jnp.bfloat16, jnp.float16)
MAX_HEAD_SIZE = 256

_ARITHMETIC = dataclasses.replace(
    support.ARITHMETIC,
    masked=pairwise.masked,
    bits=dropout.bits,
    where_below=dropout.where_below,
    drops_by_sign=True,
)

lowering_context = support.lowering_context


def unsupported(call: Call, /) -> str | None:
    """Why this backend cannot serve a call here and now, or None."""
    if call.interpret:
        return "its kernels are not interpreted"
    if device.capability() != 90:
        return f"compute capability {device.capability() / 10} is not 9.0 (Hopper)"
    if call.dtype not in DTYPES:
        return f"dtype {jnp.dtype(call.dtype).name} is not bfloat16 or float16"
    if call.is_symbolic:
        return "the kernels need static sizes, and this call has a symbolic one"
    largest = max(call.head_sizes)
    if largest > MAX_HEAD_SIZE:
        return f"head size {largest} is above {MAX_HEAD_SIZE}"
    spec, config = call.spec, call.config
    if config is not None and config.splits not in (None, 1):
        return f"Config(splits={config.splits}): the forward's programs are not divided"
    blocks = _blocks(call)
    if odd := spec.odd_stripe(t=tuning.ROWS, s=blocks.block_kv):
        return f"blocks would lie in several stripes of {odd} rows"
    output_dtype = jnp.float32 if spec.is_part else call.dtype
    return forward_plan.unfit(blocks, _heads(call), output_dtype)


def slower(call: Call, /) -> str | None:
    """Why the next backend is faster for a call that this one serves, or None."""
    if call.config is not None and call.config.forward is not None:
        return None
    return tuning.slower(call, _programs(call), memory.copies_operands(call.size))


def slower_backward(call: Call, /) -> str | None:
    """Why the other backend makes the gradients faster, or None."""
    return tuning.slower_backward(call)


def _heads(call: Call) -> tuple[int, int]:
    width = memory.forward_tiles(call.size)
    return width["h"], width["d"]


def _blocks(call: Call) -> Blocks:
    chosen = None if call.config is None else call.config.forward
    keys = call.spec.mean_keys(call.size["s"])
    return chosen or tuning.choose(_heads(call), keys, call.spec)


def _programs(call: Call) -> float:
    """Tiles of the forward kernel for each multiprocessor."""
    names = (*batch_axes(call.operands), "n")
    others = [call.size[name] for name in names if name in call.size]
    blocks = -(-call.size["t"] // _blocks(call).block_q)
    return blocks * math.prod(others) / device.multiprocessors()


def division(call: Call, /) -> tuple[str, ...]:
    """How the work of the backward kernel is divided, in words, where it is."""
    layout = _backward_layout(call)
    if layout is None or other_backward(call):
        return ()
    found = [words("dkv", layout.parts)]
    if call.spec.score.operands and not other_score_gradients(call):
        _, looped = operand_sum(
            call.spec.score.bias, passes.axes_of_elements(call.operands)
        )
        tiles = layout_of_dbias(call.operands, _dbias_launch(call), looped)
        found.append(words("dbias", tiles.parts))
    return tuple(filter(None, found))


def forward(q, k, v, spec, outputs, *, config, precision):
    """Output and log-sum-exp (`backend.Backend`)."""
    blocks = _blocks(Call(q, k, v, spec, config, precision))
    spec = pairwise.in_words(spec, "s").with_keys()
    spec = _with_table(spec, blocks, sizes([q, k]))
    launch = _launch(blocks, precision, splits=1)
    return forward_kernel(q, k, v, spec, outputs, launch=launch)


def _with_table(spec, blocks: Blocks, size):
    """The spec with what says which blocks of keys those of queries meet."""
    rows = blocks.block_q, blocks.block_kv, size["t"], size["s"]
    return spec.with_table("s", *rows)


def other_backward(call: Call, /) -> str | None:
    """Why another backend makes the gradients of a call that this one serves."""
    config = call.config
    if config is not None and (config.dkv or config.dk or config.dv or config.dq):
        return "the blocks of `Config` are those of its kernels"
    layout = _backward_layout(call)
    if layout is None:
        return f"there is no kernel for gradients of head sizes {call.head_sizes}"
    programs = layout.tiles / device.multiprocessors()
    return tuning.no_backward(call, layout.rows, programs)


def other_score_gradients(call: Call, /) -> str | None:
    """Why another backend makes the gradients of the score's operands."""
    return tuning.no_dbias(call)


def _launch(blocks: Blocks, precision, splits: int | None) -> Launch:
    return Launch(blocks, precision, _ARITHMETIC, False, splits)


def _backward_launch(call: Call) -> Launch | None:
    """None where there is no kernel for the call's heads."""
    blocks = tuning.of_backward(_heads(call))
    splits = None if call.config is None else call.config.splits
    ahead = tuning.computes_ahead(tuning.head_tiles(call.size))
    if not (ahead or tuning.makes_dq_apart(call.size)):
        splits = 1  # there is no room for sums in float32
    return None if blocks is None else _launch(blocks, call.precision, splits)


def _dbias_launch(call: Call) -> Launch:
    splits = None if call.config is None else call.config.splits
    blocks = tuning.of_dbias(call.size)
    assert blocks is not None  # else `other_score_gradients`
    return _launch(blocks, call.precision, splits)


def _backward_layout(call: Call) -> memory.Layout | None:
    launch = _backward_launch(call)
    if launch is None:
        return None
    return memory.Layout.of("dkv", call.operands, launch)


def _unit(spec, axes):
    """`AttentionSpec.gradient_unit` against an array with these axes."""
    score = spec.score
    if score.factor is not None:
        score = dataclasses.replace(score, factor=score.factor.to(axes))
    return dataclasses.replace(spec, score=score).gradient_unit


def _of_bias(launch, size, kernel, looped, q, k, v, spec, saved, outputs, **options):
    """Runs the kernel for the gradient of a bias (`passes.score_operand`)."""
    assert kernel == "dbias" and looped == "s" and options.pop("field") == "bias"
    spec = _with_table(pairwise.in_words(spec, "s"), launch.blocks, size)
    return dbias_kernel(q, k, v, spec, saved, *outputs, launch=launch, **options)


def backward(q, k, v, spec, saved, outputs, *, config, precision):
    """Gradients of q, k, v, of a bias of pairs and of sinks (`backend.Backend`)."""
    sink, spec = spec.sink, dataclasses.replace(spec, sink=None)
    transposed = pairwise.in_words(spec, "t")
    o, lse, do, dlse = saved
    q, do = (clear.masked_rows(spec, clear.padding(spec, x), lse) for x in (q, do))
    cleared = [clear.dropped_keys(transposed, clear.padding(spec, x)) for x in (k, v)]
    delta = passes.delta(o, lse, do, dlse)
    # With a bias, rows of zeros beyond the array have scores of any size.
    padded = memory.Filled(flash2.lse_log2(lse.value), lse.axes, flash2.PADDING_LSE)
    of_q, of_k, of_v, *rest = outputs
    call = Call(q, k, v, spec, config, precision)
    launch = _backward_launch(call)
    assert launch is not None  # else `other_backward`
    rows = padded, delta, do
    if tuning.makes_dq_apart(call.size):
        of_dq = dataclasses.replace(launch, blocks=tuning.DQ_APART, splits=1)
        tabled = _with_table(pairwise.in_words(spec, "s"), of_dq.blocks, call.size)
        dq = dq_kernel(q, *cleared, tabled, rows, of_q, launch=of_dq)
        outputs = of_k, of_v
        of_keys = dkv_kernel(q, *cleared, transposed, rows, outputs, launch=launch)
        gradients = [dq, *of_keys]
    else:
        wide = Named(jax.ShapeDtypeStruct(of_q.shape, jnp.float32), of_q.axes)
        outputs = wide, of_k, of_v
        keyed = transposed.with_keys()
        dq, *of_keys = backward_kernel(q, k, v, keyed, rows, outputs, launch=launch)
        axes = [None if a == "h" else a for a in of_q.axes]
        dq = jnp.where(lse.to(axes) == -jnp.inf, 0.0, dq * _unit(spec, axes))
        gradients = [dq.astype(of_q.dtype), *of_keys]
    if len(rest) > (sink is not None):
        of_bias = functools.partial(_of_bias, _dbias_launch(call), call.size)
        bias = passes.score_operand(of_bias, q, *cleared, spec, rows, rest[0], "bias")
        gradients.append(bias)
    if sink is not None:
        gradients.append(passes.of_sink(sink, lse, delta, rest[-1]))
    return gradients
