"""Backend "mosaic_gpu": Pallas kernels for Hopper that lower to Mosaic GPU."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels import device, passes, user_tables
from pallas_kernels.backend import Call, Declined, Pass, Plan
from pallas_kernels.configs import Blocks
from pallas_kernels.core import clear, flash2
from pallas_kernels.core.axes import Named, batch_axes, operand_sum
from pallas_kernels.division import words
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import dropout, measured, memory, pairwise, support
from pallas_kernels.mosaic_gpu.hopper import (
    forward_plan,
    fp8,
    fp8_plan,
    gradient_blocks,
    paged,
    tangent_blocks,
    tuning,
)
from pallas_kernels.mosaic_gpu.hopper.backward import backward as backward_kernel
from pallas_kernels.mosaic_gpu.hopper.dbias import dbias as dbias_kernel
from pallas_kernels.mosaic_gpu.hopper.dbias import grid_of as dbias_grid
from pallas_kernels.mosaic_gpu.hopper.ddistance import ddistance as ddistance_kernel
from pallas_kernels.mosaic_gpu.hopper.dkv import dkv as dkv_kernel
from pallas_kernels.mosaic_gpu.hopper.dq import dq as dq_kernel
from pallas_kernels.mosaic_gpu.hopper.forward import forward as forward_kernel
from pallas_kernels.mosaic_gpu.hopper.tangent import tangent as tangent_kernel
from pallas_kernels.mosaic_gpu.plan import PassPlan

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


@dataclasses.dataclass(frozen=True)
class _Plan(PassPlan):
    """The plan of a pass.

    Attributes:
      slower: why the next backend is faster, or None.
      words: how the work is divided.
      dq: of the kernel for the gradient of query, if that is one of its own.
    """

    slower: str | None = None
    words: tuple[str, ...] = ()
    dq: Launch | None = None


def plan(call: Call, pass_: Pass, /) -> Plan | Declined:
    """The plan of a pass (`backend.Backend`)."""
    why_not = _unsupported(call)
    if why_not is not None:
        return Declined(why_not)
    if call.spec.pages is not None:
        found, slower = plan(paged.structs_in_order(call), pass_), paged.slower(call)
        if slower is None or not isinstance(found, _Plan):
            return found
        return dataclasses.replace(found, slower=slower)
    if call.is_invariant and pass_ == "forward":
        return Declined(
            "Config(invariant=True): which sums a tile makes depends on its other rows"
        )
    if call.is_quantised:
        return fp8_plan.plan(call, pass_)
    return {
        "forward": _forward_plan,
        "backward": _backward_plan,
        "operand_gradients": _operand_plan,
        "tangent": _tangent_plan,
    }[pass_](call)


def _unsupported(call: Call) -> str | None:
    """Why this backend has no kernels for a call here and now, or None."""
    if call.interpret:
        return "its kernels are not interpreted"
    if device.capability() != 90:
        return f"compute capability {device.capability() / 10} is not 9.0 (Hopper)"
    if call.dtype not in DTYPES and not call.is_quantised:
        return f"dtype {jnp.dtype(call.dtype).name} is not bfloat16 or float16"
    if lacking := call.lacking(support.OPERATIONS):
        return lacking
    if call.reads_bytes and not call.is_quantised:
        return support.QUANTISED_KEYS
    if call.is_symbolic:
        return "the kernels need static sizes, and this call has a symbolic one"
    largest = max(call.head_sizes)
    if largest > MAX_HEAD_SIZE:
        return f"head size {largest} is above {MAX_HEAD_SIZE}"
    if pairwise.has_other_arrays(call.spec):
        return "an array with an element for each pair is part of a mask or a function"
    return None


def _forward_plan(call: Call) -> Plan | Declined:
    spec, config = call.spec, call.config
    if config is not None and config.splits not in (None, 1):
        return Declined(
            f"Config(splits={config.splits}): the forward's programs are not divided"
        )
    blocks = _blocks(call)
    if odd := spec.odd_stripe(t=tuning.ROWS, s=blocks.block_kv):
        return Declined(f"blocks would lie in several stripes of {odd} rows")
    output_dtype = jnp.float32 if spec.is_part else call.dtype
    why_not = forward_plan.unfit(blocks, _heads(call), output_dtype)
    if why_not is not None:
        return Declined(why_not)
    slower = None
    if config is None or config.forward is None:
        copied = memory.copies_operands(call.size)
        slower = tuning.slower(call, _programs(call), copied)
    return _Plan(_launch(blocks, call.precision, splits=1), slower)


def _backward_plan(call: Call) -> Plan | Declined:
    spec, config = call.spec, call.config
    blocks = gradient_blocks.of_call(call)
    if isinstance(blocks, str):
        return Declined(blocks)
    launches = _backward_launches(call, blocks)
    launch = launches.get("backward") or launches["dkv"]
    layout = memory.TileGrid.of("dkv", call.operands, launch)
    programs = layout.tiles / device.multiprocessors()
    why_not = tuning.no_backward(call, layout.rows, programs)
    if why_not is not None:
        return Declined(why_not)
    if "dq" in blocks and (
        odd := spec.odd_stripe(t=tuning.ROWS, s=blocks["dq"].block_kv)
    ):
        return Declined(f"blocks would lie in several stripes of {odd} rows")
    slower = None
    if config is None or not (config.dkv or config.dq):
        makes_gradient = not isinstance(gradient_blocks.of_operand(call), str)
        known = _programs(call), memory.copies_operands(call.size)
        slower = tuning.slower_backward(call, *known, makes_gradient=makes_gradient)
    notes = [words("dkv", layout.parts)]
    if "backward" in launches and not launch.deterministic:
        notes.append("dq: blocks of keys add to it in any order")
    return _Plan(launch, slower, tuple(filter(None, notes)), launches.get("dq"))


def _tangent_plan(call: Call) -> Plan | Declined:
    blocks = tangent_blocks.of_call(call)
    if isinstance(blocks, str):
        return Declined(blocks)
    is_chosen = call.config is not None and call.config.dq is not None
    slower = None if is_chosen else tuning.slower_tangent(call)
    return _Plan(tangent_blocks.launch(blocks, call.precision), slower)


def _operand_plan(call: Call) -> Plan | Declined:
    blocks = gradient_blocks.of_operand(call)
    if isinstance(blocks, str):
        return Declined(blocks)
    splits = None if call.config is None else call.config.splits
    launch = _launch(blocks, call.precision, splits)
    if not call.spec.score.pair_operands:  # sums along diagonals
        return _Plan(launch)
    (operand,) = call.spec.score.operands.values()
    _, looped = operand_sum(operand, passes.axes_of_elements(call.operands))
    tiles = dbias_grid(call.operands, launch, looped)
    return _Plan(launch, words=tuple(filter(None, [words("dbias", tiles.parts)])))


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


def forward(plan: PassPlan, call: Call, outputs):
    """Output and log-sum-exp (`backend.Backend`)."""
    if call.is_quantised:
        return fp8.forward(plan, call, outputs)
    if call.spec.pages is not None:
        call = paged.in_order(call)
    spec = pairwise.in_words(call.spec, "s").with_keys(call.size["s"])
    spec = _with_table(spec, plan.launch.blocks, call.size)
    operands = call.query, call.key, call.value, spec
    return forward_kernel(*operands, outputs, launch=plan.launch)


def _with_table(spec, blocks: Blocks, size, **options):
    """The spec with what says which blocks of keys those of queries meet."""
    rows = blocks.block_q, blocks.block_kv, size["t"], size["s"]
    return spec.with_table("s", *rows, **options)


def _launch(blocks: Blocks, precision, splits: int | None, **options) -> Launch:
    return Launch(blocks, precision, _ARITHMETIC, False, splits, **options)


def _backward_launches(call: Call, blocks: Mapping[str, Blocks]) -> dict[str, Launch]:
    """Of the kernels for the gradients of query, key and value."""
    splits = None if call.config is None else call.config.splits
    divided = tuning.pipelines_scores(tuning.head_tiles(call.size)) or "dkv" in blocks
    # The work of `dq` is not divided. For heads above 128 `backward` has no room for
    # sums in float32.
    whole = {"dq", *(() if divided else ("backward",))}
    options = {"deterministic": call.is_deterministic}
    return {
        kernel: _launch(x, call.precision, 1 if kernel in whole else splits, **options)
        for kernel, x in blocks.items()
    }


def _unit(spec, axes):
    """`AttentionSpec.gradient_unit` against an array with these axes."""
    score = spec.score
    if score.factor is not None:
        score = dataclasses.replace(score, factor=score.factor.to(axes))
    return dataclasses.replace(spec, score=score).gradient_unit


def _of_operand(launch, size, kernel, looped, q, k, v, spec, saved, outputs, **options):
    """Runs a kernel for the gradient of an operand (`passes.score_operand`)."""
    assert looped == "s"
    options.pop("field")  # it is the only one
    run = {"dbias": dbias_kernel, "ddistance": ddistance_kernel}[kernel]
    spec = _with_table(pairwise.in_words(spec, "s"), launch.blocks, size)
    return run(q, k, v, spec, saved, *outputs, launch=launch, **options)


def backward(plans, call: Call, saved, wanted):
    """Gradients (`backend.Backend`)."""
    sink, spec = call.spec.sink, dataclasses.replace(call.spec, sink=None)
    q, k, v = call.query, call.key, call.value
    transposed = pairwise.in_words(spec, "t")
    o, lse, do, dlse = saved
    q, do = (clear.masked_rows(spec, clear.padding(spec, x), lse) for x in (q, do))
    k_clear, v_clear = (
        clear.dropped_keys(transposed, clear.padding(spec, x)) for x in (k, v)
    )
    delta = passes.delta_of(o, lse, do, dlse)
    # With a bias, rows of zeros beyond the array have scores of any size.
    padded = memory.Filled(flash2.lse_log2(lse.value), lse.axes, flash2.PADDING_LSE)
    rows, gradients = (padded, delta, do), {}
    if "backward" in plans:
        of_q, of_k, of_v = (wanted[name] for name in ("query", "key", "value"))
        launch = plans["backward"].launch
        of_dq = plans["backward"].dq
        if of_dq is not None:
            tabled = _with_table(
                pairwise.in_words(spec, "s"), of_dq.blocks, call.size, in_order=True
            )
            dq = dq_kernel(q, k_clear, v_clear, tabled, rows, of_q, launch=of_dq)
            outputs = of_k, of_v
            dk, dv = dkv_kernel(
                q, k_clear, v_clear, transposed, rows, outputs, launch=launch
            )
        else:
            wide = Named(jax.ShapeDtypeStruct(of_q.shape, jnp.float32), of_q.axes)
            keyed = transposed.with_keys(call.size["s"])
            outputs = wide, of_k, of_v
            dq, dk, dv = backward_kernel(q, k, v, keyed, rows, outputs, launch=launch)
            axes = [None if a == "h" else a for a in of_q.axes]
            dq = jnp.where(lse.to(axes) == -jnp.inf, 0.0, dq * _unit(spec, axes))
            dq = dq.astype(of_q.dtype)
        gradients = {"query": dq, "key": dk, "value": dv}
    if "operand_gradients" in plans:
        (name,) = spec.score.operands
        launch = plans["operand_gradients"].launch
        run = functools.partial(_of_operand, launch, call.size)
        operands = q, k_clear, v_clear, spec, rows, wanted[name], name
        gradients[name] = passes.score_operand(run, *operands)
    if "sink" in wanted:
        gradients["sink"] = passes.of_sink(sink, lse, delta, wanted["sink"])
    return gradients


def tangent(plan: PassPlan, call: Call, saved, tangents, outputs):
    """Tangents of output and log-sum-exp (`backend.Backend`)."""

    def cleared(x: Named) -> Named:
        return clear.unread(call.spec, x) if "s" in x.axes else x

    spec = _with_table(call.spec, plan.launch.blocks, call.size)
    k, v, along = jax.tree.map(cleared, (call.key, call.value, dict(tangents)))
    operands = call.query, k, v, spec, saved, along, outputs
    return tangent_kernel(*operands, launch=plan.launch)


def _unfit(kernel: str, size: int, regime: str, blocks: Blocks) -> str | None:
    """Why a kernel cannot have blocks of a user's table, or None."""
    del regime
    # Above 192 each gradient has a kernel: "backward" is tuned for heads of 160.
    head = 160 if (kernel, size) == ("backward", 256) else size
    sizes = {"t": 1024, "s": 1024, "h": head, "d": head}
    if kernel == "forward":
        width = memory.forward_tiles(sizes)
        return forward_plan.unfit(blocks, (width["h"], width["d"]), jnp.bfloat16)
    pair_values = jnp.bfloat16 if kernel == "dbias" else None
    return gradient_blocks.unfit(kernel, blocks, sizes, pair_values=pair_values)


user_tables.KNOWN[measured.BACKEND] = user_tables.Known(
    sizes={
        "forward": (64, 128, 256),
        "backward": (64, 128, 256),
        "dkv": (256,),
        "dq": (256,),
        "dbias": (64, 128),
    },
    regimes=measured.REGIMES,
    conditions=measured.CONDITIONS,
    unfit=_unfit,
)
